"""The files of a run directory that follow from the journal and the trials' folders. They can always be made again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.store import metrics
from harness.store.files import json_line, write_atomic, write_json, writing
from harness.store.journal import Entry, Key


def write_summaries(
    run_dir: Path,
    entries: Sequence[Entry],
    *,
    resumed: Collection[Key],
    identity: dict[str, Any],
    progress: dict[str, Any],
    pass_threshold: float,
) -> dict[str, Any]:
    """Write index.jsonl, summary.jsonl, progress.json and metrics.json; returns the last one's content."""
    rows = [
        metrics.index_row(entry, trajectory=has_trajectory(run_dir, entry), resumed=entry.key in resumed)
        for entry in entries
    ]
    index = b"".join(map(json_line, rows))
    document = {"eval_run": identity, "summary": metrics.summarize(entries, pass_threshold)}
    write_atomic(run_dir / "index.jsonl", index)
    write_atomic(run_dir / "summary.jsonl", index)
    write_json(run_dir / "progress.json", progress)
    write_json(run_dir / "metrics.json", document)
    return document


def trial_dir(run_dir: Path, rollout_id: str) -> Path:
    return run_dir / "rollout_trials" / rollout_id


def has_trajectory(run_dir: Path, entry: Entry) -> bool:
    """Whether the transcript is there and whole; after a power cut it may be there and empty."""
    with suppress(OSError), (trial_dir(run_dir, entry.rollout_id) / "trajectory.json").open("rb") as file:
        file.seek(-2, os.SEEK_END)
        return file.read() == b"}\n"
    return False


def project(run_dir: Path, entry: Entry) -> None:
    """Show a trial's transcript and artifacts under its row and run, in place of those of a result it replaced."""
    stem = f"row_{entry.row_index}_run_{entry.run_index}"
    source = trial_dir(run_dir, entry.rollout_id)
    target, folder = run_dir / "trajectories" / f"{stem}.json", run_dir / "artifacts" / stem
    with writing(target):
        target.unlink(missing_ok=True)
        if has_trajectory(run_dir, entry):
            _link(source / "trajectory.json", target)
    with writing(folder):
        if folder.exists():
            shutil.rmtree(folder)
        root = source / "artifacts"
        for parent, _, names in os.walk(root):
            for name in names:
                path = Path(parent, name)
                if path.is_file() and not path.is_symlink():
                    _link(path, folder / path.relative_to(root))


def _link(source: Path, target: Path) -> None:
    """Cheap where the file system has hard links, a copy elsewhere."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
