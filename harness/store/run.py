"""One run's directory: opened under a lock, recorded into while trials end, summed up at the end.

The layout is that of the platform's own local runs, so that its upload takes ours. ``events.jsonl`` alone says which
trials have a result; what ``projections.py`` writes follows from it and from ``rollout_trials/<rollout_id>/`` at any
time. A trial's files are written before its line in the journal. They are not flushed to the disk one by one: a power
cut may cost the last seconds' transcripts, never a journalled result.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
from pydantic import ValidationError

from harness.models import CallRecord, Record, Row, Sample, TrialRecord
from harness.store import projections
from harness.store.artifacts import remove_unsafe
from harness.store.files import Redact, clean, json_line, sync_folder, utc_now, write_atomic, write_json, writing
from harness.store.journal import Entry, Journal, Key
from harness.store.lock import locked
from harness.store.logs import CallLog, RunLog, TextLog
from harness.store.manifest import Manifest, Retry, RunInfo, RunInputs
from harness.store.names import check_name, generate_name
from harness.store.trajectory import to_trajectory, tool_calls

DEFAULT_OUTPUT = Path(".osmosis/evals")

LOG_BYTES = 4 << 20
"""Most that is kept of one trial's standard output, and of its standard error."""


class RunResult(Record):
    """What a run came to, over all its invocations."""

    name: str
    run_dir: Path
    complete: bool
    """Whether every planned trial has a final state."""
    planned: int
    resumed: int
    """How many of the results come from earlier invocations."""
    duration_s: float
    """Of this invocation."""
    metrics: dict[str, Any]
    """``metrics.json`` as written."""
    entries: list[Entry]

    @property
    def document(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {**self.metrics, "run_dir": str(self.run_dir)}


class RunStore:
    """The open run directory. Use ``RunStore.open`` in a ``with`` statement."""

    def __init__(
        self,
        run_dir: Path,
        manifest: Manifest,
        journal: Journal,
        log: RunLog,
        inputs: RunInputs,
        info: RunInfo,
        *,
        created: bool,
        retry: Retry | None,
        redact: Redact,
    ) -> None:
        self.run_dir = run_dir
        self.name = run_dir.name
        self.notes: list[str] = []
        """What the user should be told about how the run was opened."""
        self._manifest = manifest
        self._inputs = inputs
        self._info = info
        self._created = created
        self._redact = redact
        self._started = time.monotonic()
        self._calls: dict[str, CallLog] = {}
        self._claimed: set[Key] = set()
        self._journal = journal
        self.log = log
        self._resumed = set(journal.latest)
        self._reopened = {key for key, entry in journal.latest.items() if _reopens(entry, retry)}

    @classmethod
    @contextmanager
    def open(
        cls,
        output: Path,
        name: str | None,
        inputs: RunInputs,
        info: RunInfo,
        *,
        fresh: bool = False,
        retry: Retry | None = None,
        redact: Redact = str,
    ) -> Iterator[Self]:
        """Create a run, or continue the one of that name.

        :param output: folder of all runs (``DEFAULT_OUTPUT``).
        :param name: None for a generated one.
        :param fresh: set an existing run of that name aside, as ``<name>.archive-<UTC time>``, and start over.
        :param retry: which final results to run again; only then may the rollout's source and settings have changed.
        :param redact: applied to every text that is written.
        :raises StoreError: another process has the run open, its inputs differ, or the disk refuses.
        """
        name = check_name(name) if name is not None else _unused_name(output)
        run_dir = output.absolute() / name
        path = run_dir / "manifest.json"
        with locked(output / ".locks" / f"{name}.lock", name):
            notes = []
            if fresh and path.exists():
                notes.append(f"archived previous results to {_archive(run_dir)}")
            created = not path.exists()
            manifest = Manifest.create(path, name, inputs, info, redact) if created else Manifest.read(path)
            if changed := manifest.accept(path, name, inputs, retry):
                notes.append(
                    f"{', '.join(changed)} changed since this run began: what is retried runs the new one "
                    f"(generation {manifest.generation} in manifest.json), the other results stay"
                )
            with (
                closing(RunLog(run_dir / "logs.txt", redact)) as log,
                closing(Journal(run_dir / "events.jsonl")) as journal,
            ):
                if journal.torn_bytes:
                    notes.append(f"dropped a half-written last line ({journal.torn_bytes} bytes) of {journal.path}")
                store = cls(run_dir, manifest, journal, log, inputs, info, created=created, retry=retry, redact=redact)
                for note in notes:
                    store.notes.append(note)
                    log.write("warning", "run", note)
                store._write_summaries("running")
                yield store

    @property
    def entries(self) -> list[Entry]:
        """The final results so far, by row and run."""
        return [self._journal.latest[key] for key in sorted(self._journal.latest)]

    @property
    def planned(self) -> int:
        """How many trials the whole run has."""
        return self._info.sampled_rows * self._inputs.n

    def pending(self, rows: Sequence[Row], n: int) -> list[tuple[Row, int]]:
        """Trials without a final result, and those that ``retry`` reopened, group by group."""
        return [(row, run) for row in rows for run in range(n) if self._is_open((row.index, run))]

    def trial_dir(self, rollout_id: str) -> Path:
        """Where a trial's files lie; what comes out of its sandbox belongs into ``artifacts`` below. Not created."""
        return projections.trial_dir(self.run_dir, rollout_id)

    def call_log(self, rollout_id: str) -> CallLog:
        """The trial's ``calls.jsonl``. Closed by ``record`` at the latest."""
        if rollout_id not in self._calls:
            self._calls[rollout_id] = CallLog(self.trial_dir(rollout_id) / "calls.jsonl", self._redact)
        return self._calls[rollout_id]

    def text_log(self, rollout_id: str, source: str, limit: int = LOG_BYTES) -> TextLog:
        """A log of the trial, ``stdout`` or ``stderr``. The caller closes it."""
        return TextLog(self.trial_dir(rollout_id) / "logs" / f"{source}.txt", self._redact, limit)

    async def record(self, trial: TrialRecord, row: Row, *, diagnostics: dict[str, Any] | None = None) -> bool:
        """Write a trial's files, then its line in the journal. Completes even when cancelled.

        :returns: whether it counts: a cancelled trial leaves no line; a second result for the same row and run, or one
            that comes too late, is not written at all.
        :raises StoreError: the disk refuses; the trial stays pending.
        """
        key = trial.row_index, trial.run_index
        final = trial.status != "cancelled"
        if final:
            if not self._is_open(key):
                self.log.write("warning", "record", "ignored a second result", rollout_id=trial.rollout_id, key=key)
                return False
            self._claimed.add(key)
        with anyio.CancelScope(shield=True):
            try:
                calls = self._calls.pop(trial.rollout_id, None)
                if calls is not None:
                    await calls.aclose()
                await anyio.to_thread.run_sync(self._write_trial, trial, row, diagnostics)
                if final:
                    await self._journal.append(self._entry(trial))
            except BaseException:
                self._claimed.discard(key)
                raise
        return final

    async def finish(self) -> RunResult:
        """Compute everything that follows from the journal, earlier invocations' results included.

        :raises StoreError: the disk refuses. The journal is safe, and ``finish`` can be called again.
        """
        return await anyio.to_thread.run_sync(self._finish)

    def discard_if_unused(self) -> None:
        """Remove the directory again if this invocation made it and no trial left anything in it."""
        if self._created and not self._journal.latest and not (self.run_dir / "rollout_trials").exists():
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def _is_open(self, key: Key) -> bool:
        return key not in self._claimed and (key not in self._journal.latest or key in self._reopened)

    def _entry(self, trial: TrialRecord) -> Entry:
        failure = trial.failure
        error = f"{failure.kind}: {failure.message}"[:200] if failure else None
        return Entry(
            row_index=trial.row_index,
            run_index=trial.run_index,
            rollout_id=trial.rollout_id,
            status=trial.status,
            source_row_index=trial.source_row_index,
            reward=trial.reward if trial.status == "success" else None,
            tokens=trial.usage.total_tokens if trial.usage.calls else None,
            duration_ms=round(trial.timing.total_s * 1000, 3),
            error_type=failure.category if failure else None,
            error=self._clean(error),
            timing={name: round(value, 4) for name, value in trial.timing.model_dump().items() if value},
            generation=self._manifest.generation,
        )

    def _write_trial(self, trial: TrialRecord, row: Row, diagnostics: dict[str, Any] | None) -> None:
        folder = self.trial_dir(trial.rollout_id)
        with writing(folder / "artifacts"):
            removed = remove_unsafe(folder / "artifacts")
        data = trial.model_dump()
        data["warnings"] += [f"artifact {path} was removed: {reason}" for path, reason in removed[:100]]
        data |= {name: self._clean(data[name]) for name in ("samples", "failure", "sandbox", "warnings")}
        try:
            transcript = self._transcript(trial, row, data["samples"], folder)
        except Exception as error:  # whatever shape a rollout's messages have, its result must not be lost for it
            data["warnings"].append(f"no trajectory could be made of the messages: {self._clean(repr(error))}")
            transcript = None
        if transcript is not None:
            write_atomic(folder / "trajectory.json", transcript)
        if diagnostics is not None:
            write_json(folder / "diagnostics.json", self._clean(diagnostics))
        write_atomic(folder / "trial.json", json_line(data))

    def _transcript(self, trial: TrialRecord, row: Row, samples: list[dict[str, Any]], folder: Path) -> bytes | None:
        document = to_trajectory(
            trial.model_copy(update={"samples": [Sample(**sample) for sample in samples]}),
            row.model_copy(update={"label": self._clean(row.label), "metadata": self._clean(row.metadata)}),
            _read_calls(folder / "calls.jsonl"),
            self._inputs.model_path,
        )
        if document is None:
            return None
        for call in tool_calls(document):  # they were JSON within a string
            call["arguments"] = self._clean(call["arguments"])
        return json_line(document)

    def _clean(self, value: Any) -> Any:
        return clean(value, self._redact)

    def _finish(self) -> RunResult:
        entries = self.entries
        complete = len(entries) >= self.planned
        document = self._write_summaries("finished" if complete else "incomplete")
        for entry in entries:
            projections.project(self.run_dir, entry)
        return RunResult(
            name=self.name,
            run_dir=self.run_dir,
            complete=complete,
            planned=self.planned,
            resumed=len(self._resumed - self._claimed),
            duration_s=time.monotonic() - self._started,
            metrics=document,
            entries=entries,
        )

    def _write_summaries(self, status: str) -> dict[str, Any]:
        identity = {
            "id": self._manifest.run_id,
            "status": status,
            "name": self.name,
            "dataset_name": self._info.dataset_name,
            "model_name": self._inputs.model_path,
            "rollout_name": self._inputs.rollout.name,
            "duration_ms": round((time.monotonic() - self._started) * 1000, 3),
            "started_at": self._manifest.created_at,
        }
        if status == "finished":
            identity["completed_at"] = utc_now()
        return projections.write_summaries(
            self.run_dir,
            self.entries,
            resumed=self._resumed - self._claimed,
            identity=identity,
            progress={
                "total_runs": self.planned,
                "sampled_rows": self._info.sampled_rows,
                "total_dataset_rows": self._info.total_dataset_rows,
            },
            pass_threshold=self._info.pass_threshold,
        )


def _reopens(entry: Entry, retry: Retry | None) -> bool:
    if retry == "failed":
        return entry.status == "failed"
    if retry == "unscored":
        return entry.reward is None and entry.status != "skipped"
    return retry == "all"


def _read_calls(path: Path) -> Iterator[CallRecord]:
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with suppress(ValidationError):  # half a line: an earlier write found the disk full
                call = CallRecord.model_validate_json(line)
                yield call.model_copy(update={"request": None, "response": None})


def _unused_name(output: Path) -> str:
    while (output / (name := generate_name())).exists():
        pass
    return name


def _archive(run_dir: Path) -> Path:
    target = run_dir.with_name(f"{run_dir.name}.archive-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    with writing(target):
        run_dir.rename(target)
        sync_folder(run_dir.parent)
    return target
