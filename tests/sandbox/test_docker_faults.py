"""Runs whose engine or whose harness is ended half-way: nothing that was finished is lost, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from aiodocker import Docker

from harness.errors import SandboxError, SandboxGone
from harness.sandbox.base import SandboxSettings
from harness.sandbox.docker import DockerProvider, images
from harness.sandbox.docker.pull import DEFAULT_IMAGE
from tests.sandbox.test_docker import make_lock
from tests.support.engine import PrivateEngine, copy_image, private_engine
from tests.support.policy import Reply, ScriptedPolicy
from tests.support.workspace import ROOT, Finished, Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.timeout(400)]

ROWS = 12
FOREVER_S = 600.0
"""How long a policy thinks whose trials are to be lost."""


@pytest.fixture(scope="module")
def stopped_engine() -> Iterator[PrivateEngine]:
    """What one test had built is there for the next one."""
    with private_engine() as made:
        yield made


@pytest.fixture
async def engine(stopped_engine: PrivateEngine) -> AsyncIterator[PrivateEngine]:
    with stopped_engine.running():
        async with DockerProvider(stopped_engine.url) as provider:
            there = await provider.engine.image(DEFAULT_IMAGE)
        if there is None:
            await copy_image(DEFAULT_IMAGE, stopped_engine.url)
        yield stopped_engine


@pytest.fixture
def workspace(tmp_path: Path, scripted_policy: ScriptedPolicy) -> Workspace:
    """Of whose rows a few are finished soon; how long the others take, a test says with the policy's ``delay_s``."""
    scripted_policy.script, scripted_policy.delay_s = lambda body: Reply("ok"), 0.2
    made = Workspace(tmp_path / "ws")
    made.write_rows([{"user_prompt": f"say ok {n}", "ground_truth": "ok"} for n in range(ROWS)])
    return made


def finished(workspace: Workspace) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (workspace.root / "out/r/rollout_trials").glob("*/trial.json")]


def start(
    workspace: Workspace, policy: ScriptedPolicy, engine: PrivateEngine | None = None, patience: str = ""
) -> subprocess.Popen[str]:
    """``harness run``.

    :param patience: a statement that makes the provider's shorter, for a user would wait for minutes.
    """
    command = workspace.command(
        "--sandbox", "docker", "--policy-url", policy.url, "--plain", "--max-in-flight", "3", "--json"
    )
    if patience:
        again = f"import runpy; from harness.sandbox.docker import provider; {patience}; "
        command[1:3] = ["-c", again + "runpy.run_module('harness', run_name='__main__')"]
    env = {**os.environ, **({"DOCKER_HOST": engine.url} if engine else {})}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


async def ended(process: subprocess.Popen[str]) -> Finished:
    try:
        out, err = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=120))
    finally:
        process.kill()
    return Finished(process.returncode, out, err)


async def until_finished(workspace: Workspace, process: subprocess.Popen[str], count: int) -> None:
    with anyio.fail_after(200):
        while len(await anyio.to_thread.run_sync(finished, workspace)) < count and process.poll() is None:
            await anyio.sleep(0.05)


async def states(pids: list[int], url: str = "") -> list[str]:
    """The states of all containers of these processes."""
    async with DockerProvider(url) as provider:
        return [info.state for info in await provider.list() if info.owner is not None and info.owner.pid in pids]


async def test_a_run_goes_on_when_its_engine_is_restarted(
    engine: PrivateEngine, workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    process = start(workspace, scripted_policy, engine)
    await until_finished(workspace, process, 2)
    scripted_policy.delay_s = FOREVER_S
    await anyio.to_thread.run_sync(engine.stop)
    scripted_policy.delay_s = 0
    await anyio.to_thread.run_sync(engine.start)
    run = await ended(process)
    assert run.code == 0, run.err
    assert [trial["reward"] for trial in run.trials] == [1.0] * ROWS, [trial["failure"] for trial in run.trials]
    assert any(trial["attempts"] > 1 for trial in run.trials)
    assert await states([process.pid], engine.url) == []


async def goes_on(workspace: Workspace, policy: ScriptedPolicy, engine: PrivateEngine, stopped: Finished) -> None:
    """A run that was stopped has lost nothing, gave no wrong reward, and the same command finishes it."""
    assert stopped.code == 1, stopped.err
    assert "run the same command again" in stopped.err
    known = [trial["rollout_id"] for trial in stopped.trials]
    assert [trial["failure"] for trial in stopped.trials] == [None] * len(known)
    assert [trial["reward"] for trial in stopped.trials] == [1.0] * len(known)
    policy.delay_s = 0
    process = start(workspace, policy, engine)
    run = await ended(process)
    assert run.code == 0, run.err
    assert [trial["reward"] for trial in run.trials] == [1.0] * ROWS
    assert set(known) < {trial["rollout_id"] for trial in run.trials}
    assert await states([process.pid], engine.url) == []


async def test_an_engine_that_stays_away_stops_the_run(
    engine: PrivateEngine, workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    patience = "provider.ENGINE_S = provider._REMOVE_S = provider._LEAVE_S = provider._SETTLE_S = 0.5"
    process = start(workspace, scripted_policy, engine, patience)
    await until_finished(workspace, process, 2)
    scripted_policy.delay_s = FOREVER_S
    await anyio.to_thread.run_sync(engine.stop)
    run = await ended(process)
    assert f"The Docker engine at {engine.url} went away and has not been back" in run.err
    assert "systemctl start docker" in run.err
    await anyio.to_thread.run_sync(engine.start)
    await goes_on(workspace, scripted_policy, engine, run)


async def test_a_disk_that_is_full_stops_the_run(
    engine: PrivateEngine, workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    process = start(workspace, scripted_policy, engine)
    await until_finished(workspace, process, 2)
    with engine.full_disk():
        run = await ended(process)
        assert await states([process.pid], engine.url) == []
    assert "the engine's disk is full" in run.err
    assert "python -m harness images prune --budget 0" in run.err
    await goes_on(workspace, scripted_policy, engine, run)


async def test_an_image_that_is_removed_stops_the_run_and_is_built_again(
    engine: PrivateEngine, workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    process = start(workspace, scripted_policy, engine)
    await until_finished(workspace, process, 1)
    async with DockerProvider(engine.url) as provider, Docker(url=engine.url) as docker:
        for image in await images.stored(provider.engine):
            if image.kind == "environment":  # of an image in use this removes the name
                await docker.images.delete(image.tag, force=True)
        await until_finished(workspace, process, 3)
        assert process.poll() is None
        scripted_policy.delay_s = FOREVER_S
        process.send_signal(signal.SIGSTOP)  # or new containers would come meanwhile, and keep the image
        while found := await provider.engine.images("harness.image=environment"):
            for info in await provider.list():
                await provider.remove(info)
            for each in found:
                await provider.engine.remove_image(each["Id"])
        process.send_signal(signal.SIGCONT)
    run = await ended(process)
    assert "No such image" in run.err
    assert "run again to have it rebuilt" in run.err
    await goes_on(workspace, scripted_policy, engine, run)


async def test_a_container_that_somebody_removes_before_its_start_is_gone_not_wrong() -> None:
    async with DockerProvider() as provider:
        for use in (provider.engine.attach, provider.engine.start):
            with pytest.raises(SandboxGone, match="somebody removed it"):
                await use("0" * 64)


@pytest.mark.parametrize(
    ("moment", "message"), [("building image", "MiB are free"), ("Step 4/", "disk is full")], ids=["before", "half-way"]
)
async def test_a_disk_that_is_too_full_for_an_image_leaves_no_half_one(
    engine: PrivateEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, message: str
) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    lock = make_lock(tmp_path, digest=secrets.token_hex(8))
    async with DockerProvider(engine.url) as provider:
        before = {image["Id"] for image in await provider.engine.images("")}
        with ExitStack() as full:

            def progress(line: str) -> None:
                if line.startswith(moment):
                    full.enter_context(engine.full_disk())

            with pytest.raises(SandboxError, match=message) as caught:
                await provider.prepare(lock, SandboxSettings(), progress)
            assert "python -m harness images prune --budget 0" in caught.value.hint
            assert {image["Id"] for image in await provider.engine.images("")} == before
            assert await provider.list() == []
        environment = await provider.prepare(lock, SandboxSettings(), lambda line: None)
        assert await provider.engine.image(environment.handle) is not None


async def test_a_sandbox_that_is_lost_before_the_first_trial_is_made_again(
    workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    workspace.write_rows([{"user_prompt": "say ok", "ground_truth": "ok"}])
    scripted_policy.script, scripted_policy.delay_s = lambda body: Reply("ok"), FOREVER_S
    process = start(workspace, scripted_policy)
    with anyio.fail_after(60):
        while not scripted_policy.requests:
            await anyio.sleep(0.05)
    scripted_policy.delay_s = 0
    async with DockerProvider() as provider:
        (info,) = [info for info in await provider.list() if info.owner and info.owner.pid == process.pid]
        await provider.remove(info)
    done = await ended(process)
    assert done.code == 0, done.err
    assert done.document["summary"]["passed"] == 1


async def test_a_run_killed_at_any_moment_leaves_no_container_and_the_next_one_finishes_it(
    workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    moments, before = random.Random(3), 0
    killed: list[int] = []
    for _ in range(3):
        process = start(workspace, scripted_policy)
        await until_finished(workspace, process, before + 1)
        await anyio.sleep(moments.random())
        process.send_signal(signal.SIGKILL)
        killed.append(process.pid)
        await anyio.to_thread.run_sync(process.communicate)
        with anyio.fail_after(30):
            # All that had been started go by themselves; a container that was never started waits for the next run.
            while set(await states(killed)) - {"created"}:
                await anyio.sleep(0.1)
        known = {trial["rollout_id"] for trial in finished(workspace)}
        assert len(known) > before
        before = len(known)
    process = start(workspace, scripted_policy)
    run = await ended(process)
    assert run.code == 0, run.err
    assert run.document["summary"]["passed"] == ROWS
    assert known <= {trial["rollout_id"] for trial in finished(workspace)}
    assert await states([*killed, process.pid]) == []
