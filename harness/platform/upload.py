"""``harness upload``: a finished run into the platform, by its own command line, after its own checks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from osmosis_ai.eval.local.upload import LocalEvalUploadError, build_eval_upload_plan

from harness.errors import StoreError, UsageError
from harness.models import Record
from harness.trial.provenance import will_differ


class Upload(Record):
    """A run that the platform will take."""

    run_dir: Path
    files: int
    notes: list[str]
    """Where the platform's code and this run's differ."""


def check_upload(run: str, output: Path) -> Upload:
    """Validate a run as the platform's upload does, without a login.

    :param run: a run's directory, or its name under ``output``.
    :raises UsageError: there is no such run.
    :raises StoreError: the platform would refuse it; says why.
    """
    run_dir = Path(run) if (Path(run) / "manifest.json").is_file() else output / run
    if not (run_dir / "manifest.json").is_file():
        raise UsageError(f"there is no run {run!r}: {run_dir} holds no manifest.json")
    try:
        plan = build_eval_upload_plan(run_dir)
    except LocalEvalUploadError as error:
        hint = "Run the same `harness run` command again to finish it." if "incomplete" in str(error) else ""
        raise StoreError(f"the platform would refuse {run_dir}: {error}", hint=hint) from error
    manifest = json.loads((run_dir / "manifest.json").read_bytes())
    return Upload(run_dir=run_dir, files=len(plan.files), notes=will_differ(manifest.get("provenance", {})))


def upload(checked: Upload) -> int:
    """Hand a checked run to ``osmosis eval upload``, which asks and reports by itself; its exit status.

    :raises UsageError: the platform's command line is not installed.
    """
    command = shutil.which("osmosis", path=str(Path(sys.executable).parent)) or shutil.which("osmosis")
    if command is None:
        raise UsageError("the platform's command line is not installed", hint="pip install 'osmosis-ai'")
    return subprocess.run([command, "eval", "upload", str(checked.run_dir)], check=False).returncode
