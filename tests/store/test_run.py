"""The run directory through its public door: what is recorded, resumed, retried and refused."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from osmosis_ai.eval.local.results import aggregate_metrics
from osmosis_ai.eval.local.state import RunManifest, TerminalJournal
from osmosis_ai.eval.local.upload import LocalEvalUploadError, build_eval_upload_plan

from harness.errors import StoreError
from harness.models import CallRecord, Row, Sample, TrialRecord
from harness.store import RolloutInputs, RunInputs, RunStore
from tests.store.helpers import ROWS, failed, info, inputs, row, trial

pytestmark = pytest.mark.anyio
KEYS = [(r, k) for r in range(3) for k in range(2)]


def call(index: int = 0, **changes: Any) -> CallRecord:
    values: dict[str, Any] = {
        "index": index,
        "attempt": 1,
        "path": "/chat/completions",
        "stream": True,
        "request": {"messages": [{"role": "user", "content": "2*3"}]},
        "status": 200,
        "response": {"id": "x"},
        "complete": True,
        "started_at": 1.0,
        "duration_s": 0.5,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": [4, 5],
        "logprobs": [-0.5, -1.0],
        "tokens_complete": True,
    }
    return CallRecord(**(values | changes))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def find(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


async def fill(store: RunStore, keys: list[tuple[int, int]] = KEYS) -> dict[tuple[int, int], TrialRecord]:
    trials = {}
    for row_index, run_index in keys:
        trials[row_index, run_index] = record = trial(row_index, run_index)
        assert await store.record(record, row(row_index))
    return trials


async def test_a_full_run_is_accepted_by_the_platforms_upload(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        for row_index, run_index in KEYS:
            record = {
                0: trial(row_index, run_index),
                1: failed(row_index, run_index),
                2: trial(row_index, run_index, reward=0.25),
            }[row_index]
            if (row_index, run_index) == (2, 1):
                record = trial(2, 1, status="skipped", reward=None)
            artifacts = store.trial_dir(record.rollout_id) / "artifacts"
            artifacts.mkdir(parents=True)
            (artifacts / "out.txt").write_text("x")
            (artifacts / "link").symlink_to("/etc/passwd")
            (artifacts / "back\\slash").write_text("x")
            await store.call_log(record.rollout_id).write(call())
            await store.record(record, row(row_index))
        store.log.write("info", "run", "hello", a=1)
        result = await store.finish()
    run = tmp_path / "r"
    plan = build_eval_upload_plan(run)
    paths = {file.path for file in plan.files}
    assert sum(path.endswith("artifacts/out.txt") for path in paths) == 6
    assert sum(path.endswith("trajectory.json") for path in paths) == 4  # failed ones had no messages
    assert {"index.jsonl", "progress.json", "logs.txt"} <= paths
    assert plan.provenance == {"git_head": "abc", "git_dirty": False}
    # The platform's own code agrees about the numbers, the manifest and the journal.
    index = lines(run / "index.jsonl")
    assert result.metrics["summary"] == aggregate_metrics(index, pass_threshold=1.0)
    assert result.metrics["summary"]["pass_rate"] == 2 / 5
    assert RunManifest.read(run / "manifest.json").inputs == inputs().model_dump()
    assert len(TerminalJournal(run / "events.jsonl").replay().latest) == 6
    assert index == lines(run / "summary.jsonl")
    assert None not in [value for line in index for value in line.values()]
    assert (run / "artifacts/row_1_run_0/out.txt").exists()
    assert not (run / "artifacts/row_1_run_0/link").is_symlink()
    trajectory = json.loads((run / "trajectories/row_0_run_1.json").read_text())
    assert trajectory["steps"][1]["metrics"]["completion_token_ids"] == [4, 5]
    assert result.document["run_dir"] == str(run)
    assert (run / "logs.txt").stat().st_mode & 0o777 == 0o600
    assert "[run] hello" in (run / "logs.txt").read_text()


async def test_an_incomplete_run_is_not_uploadable_and_continues_where_it_stopped(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        await fill(store, KEYS[:4])
        assert not await store.record(trial(2, 0, status="cancelled", reward=None), row(2))
        assert not (await store.finish()).complete
    with pytest.raises(LocalEvalUploadError):
        build_eval_upload_plan(tmp_path / "r")
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        assert [(r.index, k) for r, k in store.pending(ROWS, 2)] == KEYS[4:]
        await fill(store, KEYS[4:])
        result = await store.finish()
    assert result.complete
    assert result.resumed == 4
    assert [line.get("resumed", False) for line in lines(tmp_path / "r/index.jsonl")] == [True] * 4 + [False] * 2
    assert result.metrics["summary"]["total_samples"] == 6
    build_eval_upload_plan(tmp_path / "r")


@pytest.mark.parametrize(
    ("retry", "reopened"), [(None, []), ("failed", [(0, 0)]), ("unscored", [(0, 0)]), ("all", KEYS)], ids=str
)
async def test_retry_reopens_what_it_names(tmp_path: Path, retry: Any, reopened: list[tuple[int, int]]) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        await store.record(failed(0, 0), row())
        await store.record(trial(0, 1, status="skipped", reward=None), row())
        await fill(store, KEYS[2:])
    with RunStore.open(tmp_path, "r", inputs(), info(), retry=retry) as store:
        assert [(r.index, k) for r, k in store.pending(ROWS, 2)] == reopened


async def test_a_retry_replaces_the_result_and_its_projections(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        old = failed(0, 0)
        artifacts = store.trial_dir(old.rollout_id) / "artifacts"
        artifacts.mkdir(parents=True)
        (artifacts / "old.txt").write_text("old")
        await store.record(old, row())
        await fill(store, KEYS[1:])
        await store.finish()
    assert (tmp_path / "r/artifacts/row_0_run_0/old.txt").exists()
    with RunStore.open(tmp_path, "r", inputs(), info(), retry="failed") as store:
        new = trial(0, 0)
        assert await store.record(new, row())
        assert not await store.record(trial(0, 0, reward=0.0), row())  # late or second: fenced
        assert not await store.record(trial(1, 0, reward=0.0), row(1))  # never reopened
        result = await store.finish()
    assert result.metrics["summary"]["passed"] == 6
    assert lines(tmp_path / "r/index.jsonl")[0]["rollout_id"] == new.rollout_id
    assert not (tmp_path / "r/artifacts/row_0_run_0").exists()
    assert (tmp_path / "r/trajectories/row_0_run_0.json").exists()
    build_eval_upload_plan(tmp_path / "r")


EDITED = RolloutInputs(name="multiply", entrypoint="main.py", source_digest="two")


async def test_edited_code_may_retry_but_not_silently_resume(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        await store.record(failed(0, 0), row())
        await fill(store, KEYS[1:])
        await store.finish()
    with (
        pytest.raises(
            StoreError, match=r"(?s)different resolved inputs.*Changed: image, rollout. Restart.*--fresh.*--retry"
        ),
        RunStore.open(tmp_path, "r", inputs(rollout=EDITED, image="other"), info()),
    ):
        pass
    with RunStore.open(tmp_path, "r", inputs(rollout=EDITED, image="other"), info(), retry="failed") as store:
        assert "image, rollout changed" in store.notes[0]
        await store.record(trial(0, 0), row())
        result = await store.finish()
    assert [entry.generation for entry in result.entries] == [2, 1, 1, 1, 1, 1]
    manifest = json.loads((tmp_path / "r/manifest.json").read_text())
    assert manifest["inputs"]["rollout"]["source_digest"] == "two"
    assert manifest["harness"]["previous"][0]["inputs"]["rollout"]["source_digest"] == "one"
    build_eval_upload_plan(tmp_path / "r")
    with RunStore.open(tmp_path, "r", inputs(rollout=EDITED, image="other"), info()) as store:
        assert store.notes == []


@pytest.mark.parametrize(
    "changed",
    [
        inputs(model_path="other"),
        inputs(n=3),
        inputs(rollout=EDITED.model_copy(update={"name": "other"})),
        inputs(dataset={"sha256": "e", "selected_source_rows": "0-2"}),
    ],
    ids=["model", "n", "name", "data"],
)
def test_a_retry_may_not_change_anything_else(tmp_path: Path, changed: RunInputs) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()):
        pass
    with pytest.raises(StoreError, match="Changed:"), RunStore.open(tmp_path, "r", changed, info(), retry="all"):
        pass


async def test_fresh_sets_the_old_run_aside(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        await fill(store)
    for _ in range(2):
        with RunStore.open(tmp_path, "r", inputs(n=1), info(), fresh=True) as store:
            assert len(store.pending(ROWS, 1)) == 3
    archives = find(tmp_path, "r.archive-*")
    assert len(archives) == 2
    assert len(lines(archives[0] / "events.jsonl")) == 6


def test_a_second_process_is_told_who_holds_the_run(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()):
        with (
            pytest.raises(StoreError, match=f"in use by process {os.getpid()}"),
            RunStore.open(tmp_path, "r", inputs(), info()),
        ):
            pass
        with (tmp_path / ".locks/r.lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as the platform's runner does
    with RunStore.open(tmp_path, "r", inputs(), info()):
        pass


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "..", "a b", "x" * 97, ".locks", "a\n"])
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError), RunStore.open(tmp_path, name, inputs(), info()):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_name_gets_one_and_an_unused_one_goes_away(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, None, inputs(), info()) as store:
        assert store.name.count("-") == 2
        store.discard_if_unused()
    assert [path.name for path in tmp_path.iterdir()] == [".locks"]


async def test_a_torn_last_line_is_dropped_and_said(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        await fill(store, KEYS[:2])
    with (tmp_path / "r/events.jsonl").open("ab") as file:
        file.write(b'{"row_index":2,"run_in')
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        assert "half-written" in store.notes[0]
        assert len(store.pending(ROWS, 2)) == 4
        await fill(store, KEYS[2:])
    assert [(e["row_index"], e["run_index"]) for e in lines(tmp_path / "r/events.jsonl")] == KEYS


async def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        await fill(store, KEYS[:2])
    path = tmp_path / "r/events.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"run_index":0', b'"run_index":"x"'))
    with pytest.raises(StoreError, match=r"events\.jsonl:1 is damaged"), RunStore.open(tmp_path, "r", inputs(), info()):
        pass


async def test_a_result_in_hand_is_recorded_even_when_cancelled(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await store.record(trial(), row())
        assert len(store.entries) == 1
    assert len(lines(tmp_path / "r/events.jsonl")) == 1


SECRET = 'sk-"secret"-value'


async def test_no_text_that_is_written_holds_a_secret(tmp_path: Path) -> None:
    def redact(text: str) -> str:
        return text.replace(SECRET, "[redacted]")

    record = failed(0, 0, message=f"key {SECRET}")
    arguments = json.dumps({"key": SECRET})
    messages = [
        {"role": "user", "content": SECRET},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]},
    ]
    sample = Sample(name="", data={"messages": messages, SECRET: 1, "metrics": {}})
    record = record.model_copy(update={"samples": [sample], "warnings": [SECRET], "sandbox": {"last": SECRET}})
    with RunStore.open(tmp_path, "r", inputs(), info(harness={"x": SECRET}), redact=redact) as store:
        calls = store.call_log(record.rollout_id)
        await calls.write(call(request={"h": SECRET}, response={"h": [SECRET]}, error=SECRET))
        text = store.text_log(record.rollout_id, "stdout")
        for piece in ("x" * 70_000, SECRET[:5], SECRET[5:], "y" * 70_000):
            await text.write(piece)
        await text.aclose()
        store.log.write("error", "s", SECRET, detail=SECRET)
        label = Row(index=0, source_index=0, prompt=[], label=SECRET, metadata={"a": SECRET})
        await store.record(record, label, diagnostics={"d": SECRET})
        await store.finish()
    files = [path for path in find(tmp_path, "**/*") if path.is_file()]
    assert len(files) > 10
    escaped = json.dumps(SECRET)[1:-1]
    for path in files:
        content = path.read_text()
        assert SECRET not in content, path
        if path.name != "trial.json":  # the message's own JSON text is the redactor's to know
            assert escaped not in content, path
    assert "[redacted]" in (store.trial_dir(record.rollout_id) / "logs/stdout.txt").read_text()


async def test_unusual_messages_never_cost_the_result(tmp_path: Path) -> None:
    nested: Any = "x"
    for _ in range(500):
        nested = [nested]
    data = {
        "messages": [
            {"role": "assistant", "content": "\ud800", "x": float("nan")},
            3,
            {"role": "user", "content": nested},
        ]
    }
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        record = trial(samples=[Sample(name="", data=data)])
        assert await store.record(record, row())
        written = json.loads((store.trial_dir(record.rollout_id) / "trial.json").read_text())
    assert written["samples"][0]["data"]["messages"][0]["x"] is None


async def test_output_is_cut_with_a_mark(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        text = store.text_log("a" * 32, "stderr", limit=100)
        for _ in range(10):
            await text.write("é" * 100_000)
        await text.aclose()
        await text.write("late")
        data = (store.trial_dir("a" * 32) / "logs/stderr.txt").read_bytes()
    assert data.startswith("é".encode() * 50)
    assert data.decode().endswith("[1999900 more bytes were cut]\n")


async def test_late_model_calls_are_not_written(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        record = trial()
        calls = store.call_log(record.rollout_id)
        async with anyio.create_task_group() as tasks:
            for index in range(20):
                tasks.start_soon(calls.write, call(index))
        await store.record(record, row())
        await calls.write(call(20))
    written = lines(store.trial_dir(record.rollout_id) / "calls.jsonl")
    assert sorted(line["index"] for line in written) == list(range(20))


FULL_DISK = """
import sys, anyio, os
from pathlib import Path
from harness.errors import StoreError
from harness.store import RunStore
from tests.store.helpers import inputs, info, row, trial
from harness.models import Sample
big = [Sample(name="", data={"messages": [{"role": "assistant", "content": "x" * 20000}]})]
async def main():
    n = 1000
    output = Path(sys.argv[1])
    with RunStore.open(output, "r", inputs(n=n), info(sampled_rows=1)) as store:
        done = 0
        try:
            for run in range(n):
                await store.record(trial(0, run, samples=big), row())
                done += 1
        except StoreError as error:
            print(error)
    # Room for the journal's own repair is all that a full disk must leave.
    (output / "r/logs.txt").unlink()
    for path in sorted((output / "r/rollout_trials").iterdir())[:20]:
        for file in path.iterdir():
            file.unlink()
    with RunStore.open(output, "r", inputs(n=n), info(sampled_rows=1)) as store:
        assert len(store.pending([row()], n)) == n - done, (len(store.pending([row()], n)), done)
        await store.record(trial(0, done, samples=big), row())
        assert done > 5
        await store.finish()
    print("resumed after", done)
anyio.run(main)
"""


@pytest.mark.namespaces
def test_a_full_disk_names_the_path_and_loses_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FULL_DISK)
    mount = tmp_path / "disk"
    mount.mkdir()
    command = f"mount -t tmpfs -o size=1m none {mount} && exec {sys.executable} {script} {mount}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=60,
        check=False,
    )
    if "Operation not permitted" in done.stderr and "mount" in done.stderr:
        pytest.skip("no user namespaces here")
    assert "resumed after" in done.stdout, done.stderr
    assert "the disk is full" in done.stdout
    assert str(mount) in done.stdout
    assert "is safe" in done.stdout
