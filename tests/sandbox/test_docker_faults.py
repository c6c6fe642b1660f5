"""Runs whose engine or whose harness is ended half-way: nothing that was finished is lost, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from aiodocker import Docker

from harness.sandbox.docker import DockerProvider
from harness.sandbox.docker.pull import DEFAULT_IMAGE
from tests.support.policy import Reply, ScriptedPolicy
from tests.support.workspace import ROOT, Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.timeout(400)]


class PrivateEngine:
    """A dockerd of the test's own, in a network namespace of its own, or it would remove the machine's bridge."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder / 'engine.sock'}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder = self.folder
        command = ["unshare", "--net", "dockerd", "--bridge=none", "--iptables=false", "-H", self.url]
        command += ["--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")]
        command += ["--pidfile", str(folder / "pid")]
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while "API listen on" not in (folder / "log").read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = (folder / "log").read_text(errors="replace")[-500:]
                self.stop()
                pytest.skip(f"no second engine can be started here: {said}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            (self.folder / "log").write_text("")
            # dockerd mounts its data folder onto itself, and leaves that behind when it does not get far.
            subprocess.run(["umount", "-l", str(self.folder / "data")], stderr=subprocess.DEVNULL, check=False)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PrivateEngine]:
    if os.geteuid() != 0 or shutil.which("dockerd") is None or shutil.which("unshare") is None:
        pytest.skip("a second engine needs root, dockerd and unshare")
    made = PrivateEngine(tmp_path)
    made.start()
    try:
        yield made
    finally:
        made.stop()
        for shim in Path("/proc").glob("[0-9]*"):  # an engine that ends while it starts a container may forget this one
            with suppress(OSError):
                if str(tmp_path / "exec") in (shim / "cmdline").read_text():
                    os.kill(int(shim.name), signal.SIGKILL)
        for mount in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if str(tmp_path) in (target := mount.split()[1]):
                subprocess.run(["umount", "-l", target], check=False)
        shutil.rmtree(tmp_path / "data", ignore_errors=True)


async def copy_image(url: str) -> None:
    async with Docker() as source, Docker(url=url) as target, source.images.export_image(DEFAULT_IMAGE) as image:
        async for _ in target.images.import_image(image.iter_chunked(1 << 18), stream=True):
            pass


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "ws")


def finished(workspace: Workspace) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (workspace.root / "out/r/rollout_trials").glob("*/trial.json")]


def start(workspace: Workspace, policy: ScriptedPolicy, **env: str) -> subprocess.Popen[str]:
    command = workspace.command(
        "--sandbox", "docker", "--policy-url", policy.url, "--plain", "--max-in-flight", "3", "--json"
    )
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **env}
    )


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
    await copy_image(engine.url)
    scripted_policy.script, scripted_policy.delay_s = lambda body: Reply("ok"), 3.0
    workspace.write_rows([{"user_prompt": f"say ok {n}", "ground_truth": "ok"} for n in range(8)])
    process = start(workspace, scripted_policy, DOCKER_HOST=engine.url)
    await until_finished(workspace, process, 2)
    await anyio.to_thread.run_sync(engine.stop)
    await anyio.to_thread.run_sync(engine.start)
    out, err = await anyio.to_thread.run_sync(process.communicate)
    trials = finished(workspace)
    assert process.returncode == 0, (err, out)
    assert [trial["reward"] for trial in trials] == [1.0] * 8, [trial["failure"] for trial in trials]
    assert any(trial["attempts"] > 1 for trial in trials)
    assert await states([process.pid], engine.url) == []


async def test_a_run_killed_at_any_moment_leaves_no_container_and_the_next_one_finishes_it(
    workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    scripted_policy.script, scripted_policy.delay_s = lambda body: Reply("ok"), 0.2
    workspace.write_rows([{"user_prompt": f"say ok {n}", "ground_truth": "ok"} for n in range(12)])
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
    out, err = await anyio.to_thread.run_sync(process.communicate)
    assert process.returncode == 0, err
    assert json.loads(out)["summary"]["passed"] == 12
    assert known <= {trial["rollout_id"] for trial in finished(workspace)}
    assert await states([*killed, process.pid]) == []
