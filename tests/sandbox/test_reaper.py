"""What a killed run leaves is removed at once, not only by the next run."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from harness.sandbox.docker import DockerProvider
from tests.support.gateway import Gateway
from tests.support.policy import Reply, ScriptedPolicy
from tests.support.workspace import ROOT, Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.timeout(120)]


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    if not Path("/var/run/docker.sock").exists():
        pytest.skip("the engine has no socket at /var/run/docker.sock")
    with tempfile.TemporaryDirectory() as folder:
        yield Gateway(Path(folder))


async def test_a_container_that_was_made_but_not_started_goes_when_its_host_is_killed(
    gateway: Gateway, tmp_path: Path, scripted_policy: ScriptedPolicy
) -> None:
    workspace = Workspace(tmp_path / "ws")
    scripted_policy.script = lambda body: Reply("ok")
    workspace.write_rows([{"user_prompt": "say ok", "ground_truth": "ok"}])
    command = workspace.command("--sandbox", "docker", "--policy-url", scripted_policy.url, "--plain")
    gateway.swallow = b"/start HTTP/1.1"

    async def states(pid: int) -> list[str]:
        async with DockerProvider() as provider:
            return [info.state for info in await provider.list() if info.owner is not None and info.owner.pid == pid]

    async with anyio.create_task_group() as tasks:
        await tasks.start(gateway.serve)
        env = {**os.environ, "DOCKER_HOST": gateway.url}
        async with await anyio.open_process(command, cwd=ROOT, env=env, stdout=None, stderr=None) as process:
            with anyio.fail_after(60):
                while await states(process.pid) != ["created"]:
                    assert process.returncode is None
                    await anyio.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        assert await states(process.pid) == ["created"]  # nobody inside could have known
        with anyio.fail_after(60):
            while await states(process.pid):
                await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()
