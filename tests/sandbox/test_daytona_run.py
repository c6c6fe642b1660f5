"""``harness run --sandbox daytona`` from the outside, on the stand-in service, while its connections break."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

pytest.importorskip("daytona")
from tests.sandbox.test_daytona import account, settled
from tests.support.policy import Reply, ScriptedPolicy
from tests.support.workspace import Workspace

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.namespaces,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
]

CALLS = 8
WORKFLOW = f"""
for n in range({CALLS}):
    print("line", n, flush=True)
    reply = await asyncio.to_thread(ask, ctx.prompt)
    await asyncio.sleep(0.2)
return [*ctx.prompt, reply]
"""


async def test_cut_connections_cost_no_call_no_line_and_no_result(
    tmp_path: Path, scripted_policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path / "ws")
    workspace.write_main(WORKFLOW)
    scripted_policy.script = lambda body: Reply("ok")
    workspace.write_rows([{"user_prompt": f"say ok {n}", "ground_truth": "ok"} for n in range(3)])
    async with account(monkeypatch) as (service, _), anyio.create_task_group() as tasks:

        async def cut() -> None:
            while True:
                await anyio.sleep(0.3)
                for id in list(service.sandboxes):
                    service.faults.cut(id)

        tasks.start_soon(cut)
        arguments = ("--policy-url", scripted_policy.url, "--sandbox", "daytona")
        done = await anyio.to_thread.run_sync(lambda: workspace.run(*arguments, timeout=500))
        tasks.cancel_scope.cancel()
        assert done.code == 0, done.err
        await settled(service)
        dials = service.requests.count("PREVIEW *")
    assert [trial["reward"] for trial in done.trials] == [1, 1, 1]
    for trial in done.trials:
        folder = Path(done.document["run_dir"], "rollout_trials", trial["rollout_id"])
        calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
        first = calls[0]["index"]  # one of the sandboxes has asked the policy for the preflight before
        assert [(call["index"] - first, call["attempt"], call["complete"]) for call in calls] == [
            (n, 1, True) for n in range(CALLS)
        ]
        log = "".join(path.read_text() for path in folder.rglob("*stdout*"))
        assert [line for line in log.splitlines() if line.startswith("line")] == [f"line {n}" for n in range(CALLS)]
    assert dials > 2 * len(done.trials)  # or nothing was cut
