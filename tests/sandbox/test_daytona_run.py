"""Daytona by the commands that users type: a first run, the upkeep, what goes wrong, and connections that break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import pytest

pytest.importorskip("daytona")
from daytona import CreateSnapshotParams, Image

from harness.sandbox.base import Environment
from harness.sandbox.daytona import DaytonaProvider
from harness.sandbox.daytona.client import service_url
from harness.sandbox.owner import this_process
from tests.sandbox.test_daytona import account, settled, spec
from tests.support.daytona import Respond, too_many
from tests.support.policy import Reply, ScriptedPolicy, refused_url
from tests.support.workspace import ROOT, Finished, Workspace

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.namespaces,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
]

ON_DAYTONA = ("--sandbox", "daytona", "--json")
CALLS = 8
WORKFLOW = f"""
for n in range({CALLS}):
    print("line", n, flush=True)
    reply = await asyncio.to_thread(ask, ctx.prompt)
    await asyncio.sleep(0.2)
return [*ctx.prompt, reply]
"""


async def command(*arguments: str, first: str = "", env: dict[str, str] | None = None) -> Finished:
    """:param first: Python that the process executes before the command."""
    code = f"{first}\nfrom harness.cli import main\nmain()"
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-c", code, *arguments, *ON_DAYTONA],
            capture_output=True,
            text=True,
            timeout=500,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            check=False,
        )
    )
    return Finished(done.returncode, done.stdout, done.stderr)


async def document(*arguments: str) -> Any:
    done = await command(*arguments)
    assert done.code == 0, done.err
    return done.document


@asynccontextmanager
async def service(which: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    if which == "stand-in":
        async with account(monkeypatch) as (standin, _):
            yield
            await settled(standin)
            assert [each.general for each in standin.snapshots.values()] == [True]
            made = [each for each in standin.requests if (each.method, each.endpoint) == ("POST", "/snapshots")]
            assert [each.status for each in made].count(200) == 1
    elif urlsplit(service_url()).hostname in ("127.0.0.1", "localhost"):
        pytest.skip("DAYTONA_API_URL is not that of a real service")
    else:
        yield


@pytest.mark.parametrize("which", ["stand-in", pytest.param("live", marks=pytest.mark.live("DAYTONA_API_KEY"))])
async def test_a_first_run(
    which: str, tmp_path: Path, scripted_policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes build one snapshot, a trial runs in one sandbox for some seconds, and both are removed."""
    scripted_policy.script = lambda body: Reply("ok")
    workspace = Workspace(tmp_path / "ws")
    workspace.settings("[tool.harness.sandbox]\nmemory_mib = 1024\n")
    async with service(which, monkeypatch), DaytonaProvider() as daytona:
        before = {each.tag for each in await daytona.stored()}
        built: list[str] = []

        async def build() -> None:
            built.append((await document("images", "build", str(workspace.rollout)))["handle"])

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(build)
                tasks.start_soon(build)
            assert len({*built}) == 1
            arguments = ("--policy-url", scripted_policy.url, "--sandbox", "daytona")
            done = await anyio.to_thread.run_sync(lambda: workspace.run(*arguments, timeout=500))
            assert done.code == 0, done.err
            assert [trial["reward"] for trial in done.trials] == [1]
            assert built[0] in {each.tag for each in await daytona.stored()}
            mine = [each.owner.host for each in await daytona.list() if each.owner and each.owner.run == "r"]
            assert this_process("").host not in mine
        finally:
            for handle in {*built} - before:
                await daytona.client.sdk.snapshot.delete(handle)
            with anyio.fail_after(60):
                while ({*built} - before) & {each.tag for each in await daytona.stored()}:
                    await anyio.sleep(0.5)


async def test_snapshots_are_listed_and_pruned_and_others_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with account(monkeypatch) as (_, daytona):
        ours = [f"harness-{uuid.uuid4().hex}" for _ in range(2)]
        for name in (*ours, "harness-of-somebody", "another"):
            wanted = CreateSnapshotParams(name=name, image=Image.base("python:3.13"))
            await daytona.client.sdk.snapshot.create(wanted)
        assert [each["tag"] for each in (await document("images", "list"))["images"]] == ours
        assert (await document("images", "prune", "--budget", "1T"))["removed"] == []
        size = (await daytona.stored())[0].size
        assert size > 0
        pruned = await document("images", "prune", "--budget", str(size))
        assert [each["tag"] for each in pruned["removed"]] == ours[:1]
        async with await daytona.create(spec(environment=Environment(key="", handle=ours[1], python="python3"))):
            assert (await document("images", "prune", "--budget", "0"))["removed"] == []
        assert [each["tag"] for each in (await document("images", "prune", "--budget", "0"))["removed"]] == ours[1:]
        with anyio.fail_after(10):
            while len(left := (await daytona.client.sdk.snapshot.list()).items) > 3:
                await anyio.sleep(0.05)
        assert {each.name for each in left} == {"harness-of-somebody", "another", "daytona-small"}


async def test_dead_owners_sandboxes_are_listed_and_reaped_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with account(monkeypatch) as (standin, daytona):
        dead = this_process("dead").model_copy(update={"pid": 2**22 - 1, "started": "1"})
        elsewhere = dead.model_copy(update={"host": "another-machine", "boot_id": "another"})
        made = [await daytona.create(spec(owner=owner)) for owner in (dead, elsewhere, this_process("alive"))]
        done = await command("sandboxes", "list")
        assert done.err == ""
        listed = {each["name"]: each["dead"] for each in done.document["sandboxes"]}
        assert [listed[each.name] for each in made] == [True, False, False]
        reaped = await document("sandboxes", "reap")
        assert ([each["id"] for each in reaped["removed"]], reaped["problems"]) == ([made[0].id], [])
        assert {each.id for each in await daytona.list()} == {each.id for each in made[1:]}
        for sandbox in made:
            await sandbox.destroy()
        await settled(standin)


async def test_a_limit_of_lists_is_waited_for_and_said_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = "from harness.sandbox.daytona import limits; limits.TELL_S = limits.JITTER_S = 0.1"
    async with account(monkeypatch) as (standin, _):
        standin.faults.add("GET /sandbox", too_many("sandbox-list", retry_after=1))
        done = await command("sandboxes", "list", first=soon)
        assert done.code == 0, done.err
        assert "rate limit (sandbox-list) is used up; waiting 1 s" in done.err
        until = formatdate(time.time() + 3600, usegmt=True)
        standin.faults.add("GET /sandbox", Respond(429, headers={"Retry-After": until}))
        done = await command("sandboxes", "list")
        assert done.code == 2, done.err
        assert "rate limit (sandbox-list) is used up for another 3" in done.document["error"]["message"]


WRONG: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no key": ({"DAYTONA_API_KEY": ""}, ("credentials not found", "set DAYTONA_API_KEY")),
    "wrong key": ({"DAYTONA_API_KEY": "dtn_wrong"}, ("does not accept the key", "set DAYTONA_API_KEY")),
    "key and line end": ({"DAYTONA_API_KEY": "dtn_1\n"}, ("DAYTONA_API_KEY has white space", "without them")),
    "no scheme": ({"DAYTONA_API_URL": "daytona.internal/api"}, ("DAYTONA_API_URL is no address", "https://")),
    "wrong organisation": (
        {"DAYTONA_API_KEY": "", "DAYTONA_JWT_TOKEN": "JWT", "DAYTONA_ORGANIZATION_ID": str(uuid.uuid4())},
        ("forbids it", "DAYTONA_ORGANIZATION_ID"),
    ),
    "unknown region": ({"DAYTONA_TARGET": "moon"}, ('Region "moon" not found', "DAYTONA_TARGET")),
    "unreachable": ({"DAYTONA_API_URL": refused_url()}, ("cannot be reached", "DAYTONA_API_URL")),
    "image that does not build": ({}, ("non-zero code: 7", "needs python3")),
}


async def test_what_is_wrong_is_one_clear_message_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path / "ws")
    workspace.settings('[tool.harness.sandbox]\nimage = "./own"\n')
    (workspace.rollout / "own").mkdir()
    (workspace.rollout / "own/Dockerfile").write_text("FROM python:3.13-slim\nRUN echo no; exit 7\n")
    run = ("run", str(workspace.config), "-o", str(tmp_path / "out"), "-y", "--policy-url", refused_url())
    found: dict[str, Finished] = {}
    async with account(monkeypatch) as (standin, _):

        async def one(name: str) -> None:
            env = {key: standin.jwt if value == "JWT" else value for key, value in WRONG[name][0].items()}
            found[name] = await command(*run, "--name", name.replace(" ", "-"), env=env)

        async with anyio.create_task_group() as tasks:
            for name in WRONG:
                tasks.start_soon(one, name)
        for name, (_, says) in WRONG.items():
            done = found[name]
            assert done.code == 2, (name, done)
            error = done.document["error"]
            assert all(each in f"{error['message']} {error['hint']}" for each in says), (name, error)
            assert done.err.count("error:") == 1, done.err
            assert "Traceback" not in done.err
        await settled(standin)
        assert standin.world.created == 0
        assert [each.general for each in standin.snapshots.values()] == [True]


@pytest.mark.parametrize(
    "gone",
    [
        "import daytona.common.sandbox; del daytona.common.sandbox.ListSandboxesQuery",
        "from daytona.internal.shared_session import SharedAiohttpSession as Shared; del Shared._adopt",
    ],
    ids=["a name", "a private way"],
)
async def test_another_sdk_is_told_at_once(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    async with account(monkeypatch) as (standin, _):
        done = await command("images", "list", first=gone)
        assert done.code == 2, done.err
        assert "not one that this harness knows" in done.document["error"]["message"]
        assert "rollout-harness[daytona]" in done.document["error"]["hint"]
        assert len(standin.requests) == 0


async def test_cut_connections_cost_no_call_no_line_and_no_result(
    tmp_path: Path, scripted_policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path / "ws")
    workspace.write_main(WORKFLOW)
    scripted_policy.script = lambda body: Reply("ok")
    workspace.write_rows([{"user_prompt": f"say ok {n}", "ground_truth": "ok"} for n in range(3)])
    async with account(monkeypatch) as (standin, _), anyio.create_task_group() as tasks:

        async def cut() -> None:
            while True:
                await anyio.sleep(0.3)
                for id in list(standin.sandboxes):
                    standin.faults.cut(id)

        tasks.start_soon(cut)
        arguments = ("--policy-url", scripted_policy.url, "--sandbox", "daytona")
        done = await anyio.to_thread.run_sync(lambda: workspace.run(*arguments, timeout=500))
        tasks.cancel_scope.cancel()
        assert done.code == 0, done.err
        await settled(standin)
        dials = standin.requests.count("PREVIEW *")
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
