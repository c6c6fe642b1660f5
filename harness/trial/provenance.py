"""Which code a run was made from, for its manifest."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

GIT_S = 10.0


def provenance(config: Path, root: Path) -> dict[str, Any]:
    """``config_path``, and ``git_head``, ``git_branch`` and ``git_dirty`` of a workspace under git. Blocks."""
    shown = config.relative_to(root) if config.is_relative_to(root) else config
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return {"config_path": str(shown)}
    return {
        "config_path": str(shown),
        "git_head": head,
        "git_branch": _git(root, "symbolic-ref", "--short", "-q", "HEAD"),
        "git_dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=normal", "--", ".")),
    }


def _git(root: Path, *arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
