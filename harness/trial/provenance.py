"""Which code a run was made from, for its manifest; whether the platform, which runs what was pushed, would run it."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GIT_S = 10.0


def provenance(config: Path, root: Path, branch: str | None = None, commit_sha: str | None = None) -> dict[str, Any]:
    """What git says of a workspace. Blocks.

    ``config_path``; under git also ``git_head``, ``git_branch``, ``git_dirty``, ``git_diff_sha256`` (of everything that
    is not committed, when dirty), ``git_pushed`` (whether a remote's branch holds the commit; absent without a remote),
    and what the config pins: ``git_pinned``, with ``git_pinned_commit`` where it is known here.

    :param branch: the config's ``branch``.
    :param commit_sha: the config's ``commit_sha``.
    """
    shown = config.relative_to(root) if config.is_relative_to(root) else config
    found: dict[str, Any] = {"config_path": str(shown)}
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return found
    changes = _git(root, "status", "--porcelain", "--untracked-files=all", "--", ".")
    found |= {
        "git_head": head,
        "git_branch": _git(root, "symbolic-ref", "--short", "-q", "HEAD"),
        "git_dirty": bool(changes),
    }
    if changes:
        found["git_diff_sha256"] = _diff_digest(root)
    if _git(root, "remote"):
        found["git_pushed"] = bool(_git(root, "branch", "--remotes", "--contains", head))
    if pinned := branch or commit_sha:
        found["git_pinned"] = pinned
        for name in (
            [f"refs/remotes/origin/{branch}", f"refs/heads/{branch}"] if branch else [f"{commit_sha}^{{commit}}"]
        ):
            if commit := _git(root, "rev-parse", "--verify", "-q", name):
                found["git_pinned_commit"] = commit
                break
    return found


def will_differ(found: Mapping[str, Any]) -> list[str]:
    """Why the platform would run other code than this run did; empty when it would not, or nobody can tell."""
    head, pinned = found.get("git_head"), found.get("git_pinned")
    notes = []
    if pinned:
        commit = found.get("git_pinned_commit")
        if commit is None:
            notes.append(f"the config pins {pinned}, which git does not know here: the platform would run that")
        elif commit != head:
            notes.append(
                f"the config pins {pinned} ({commit[:12]}), but this is {str(head)[:12]}: the platform runs the former"
            )
    if found.get("git_dirty"):
        notes.append("there are uncommitted changes: the platform runs what was committed and pushed")
    if found.get("git_pushed") is False:
        notes.append(f"commit {str(head)[:12]} is on no remote branch: the platform runs what was pushed")
    return notes


def _diff_digest(root: Path) -> str:
    """Of the changes to tracked files, and of the names and contents of those that are neither tracked nor ignored."""
    digest = hashlib.sha256(
        (_git(root, "diff", "HEAD", "--binary", "--", ".") or "").encode("utf-8", "surrogateescape")
    )
    for name in sorted((_git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", ".") or "").split("\0")):
        path = root / name
        if name and path.is_file():
            digest.update(name.encode("utf-8", "surrogateescape"))
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
