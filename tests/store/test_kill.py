"""SIGKILL at any moment: what was acknowledged is there, and the next run goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from osmosis_ai.eval.local.upload import build_eval_upload_plan

from harness.store import RunStore
from tests.store.helpers import info, inputs, row, trial

N = 100

CHILD = """
import sys, anyio
from pathlib import Path
from harness.store import RunStore
from tests.store.helpers import inputs, info, row, trial
async def one(store, run):
    record = trial(0, run)
    await store.call_log(record.rollout_id).aclose()
    await store.record(record, row())
    sys.stdout.write(f"{run} {record.rollout_id}\\n")
    sys.stdout.flush()
async def main():
    with RunStore.open(Path(sys.argv[1]), "r", inputs(n=100), info(sampled_rows=1)) as store:
        print("open", flush=True)
        pending = store.pending([row()], 100)
        for start in range(0, len(pending), 8):
            async with anyio.create_task_group() as tasks:
                for _, run in pending[start:start + 8]:
                    tasks.start_soon(one, store, run)
        await store.finish()
anyio.run(main)
"""


def kill_once(command: list[str], environment: dict[str, str]) -> dict[int, str]:
    """What a child acknowledged before it was killed: run index and rollout id."""
    acknowledged = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        killing_after = random.randint(1, 20)
        for count, line in enumerate(child.stdout, start=1):
            run, rollout_id = line.split()
            acknowledged[int(run)] = rollout_id
            if count == killing_after:
                child.send_signal(signal.SIGKILL)
    return acknowledged


@pytest.mark.anyio
async def test_killed_again_and_again_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    output = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    acknowledged: dict[int, str] = {}
    for _ in range(2):
        more = await anyio.to_thread.run_sync(kill_once, [sys.executable, str(script), str(output)], environment)
        assert not acknowledged.keys() & more.keys()
        acknowledged |= more
    assert acknowledged
    with RunStore.open(output, "r", inputs(n=N), info(sampled_rows=1)) as store:
        recorded = {entry.run_index: entry.rollout_id for entry in store.entries}
        assert acknowledged.items() <= recorded.items()
        for source, attempt in store.pending([row()], N):
            await store.record(trial(0, attempt), source)
        result = await store.finish()
    assert result.complete
    assert len(build_eval_upload_plan(output / "r").files) == N + 3
