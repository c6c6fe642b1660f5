"""Commands that look after the machine: ``doctor``, ``sandboxes`` and ``images``."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from harness.sandbox.base import Environment, SandboxSettings, SandboxSpec
from harness.sandbox.docker import DockerProvider
from harness.sandbox.docker.pull import DEFAULT_IMAGE
from harness.sandbox.owner import this_process
from tests.support.policy import Reply, ScriptedPolicy, refused_url
from tests.support.workspace import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(200)]


async def harness(*arguments: str, code: int = 0, env: dict[str, str] | None = None) -> Any:
    """What ``harness ... --json`` prints."""
    command = [sys.executable, "-m", "harness", *arguments, "--json"]
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT, env=env, check=False)
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "provider",
    [pytest.param("local", marks=pytest.mark.namespaces), pytest.param("docker", marks=pytest.mark.docker)],
)
async def test_the_doctor_tries_everything_from_inside_a_real_sandbox(
    provider: str, scripted_policy: ScriptedPolicy
) -> None:
    scripted_policy.script = lambda body: Reply("ok")
    said = await harness("doctor", "--sandbox", provider, "--policy-url", scripted_policy.url)
    found = {finding["check"]: finding for finding in said["findings"]}
    assert said["ok"]
    assert all(finding["ok"] for finding in found.values() if finding["required"])
    assert {"python", "uv", "disk", "policy", f"{provider} sandbox", "relay, from a sandbox"} <= set(found)
    assert found["policy, from a sandbox"]["ok"]
    assert len(scripted_policy.requests) == 2


@pytest.mark.namespaces
async def test_the_doctor_says_what_is_wrong_and_what_to_do() -> None:
    said = await harness("doctor", "--sandbox", "local", "--policy-url", refused_url(), code=1)
    wrong = {finding["check"]: finding for finding in said["findings"] if not finding["ok"]}
    assert set(wrong) == {"policy", "policy, from a sandbox"}
    assert "refused" in wrong["policy"]["detail"]
    assert wrong["policy"]["remedy"]


async def test_the_doctor_ends_with_1_where_no_engine_answers(tmp_path: Path) -> None:
    env = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    said = await harness("doctor", "--sandbox", "docker", code=1, env=env)
    (wrong,) = [finding for finding in said["findings"] if not finding["ok"]]
    assert wrong["check"] == "docker engine"
    assert "dockerd" in wrong["remedy"]


@pytest.mark.docker
async def test_reaping_takes_what_dead_runs_left_and_leaves_what_lives_alone() -> None:
    run = f"test-{secrets.token_hex(4)}"
    alive = this_process(run)
    owners = {
        "alive": alive,
        "dead": alive.model_copy(update={"started": "1"}),
        "another-boot": alive.model_copy(update={"boot_id": "an-earlier-one"}),
        "elsewhere": alive.model_copy(update={"boot_id": "another", "host": "another-machine", "started": "1"}),
        "of-the-same-name": alive.model_copy(update={"boot_id": "another", "machine": "another"}),
        "in-a-container": alive.model_copy(update={"namespace": "pid:[1]", "started": "1"}),
    }
    async with DockerProvider(command=lambda python, lib, boot: ["sleep", "300"]) as provider:
        made = {}
        try:
            for name, owner in owners.items():
                environment = Environment(key="test", handle=DEFAULT_IMAGE, python="python3")
                made[name] = await provider.create(
                    SandboxSpec(name=f"{run}-{name}", owner=owner, environment=environment, settings=SandboxSettings())
                )
            listed = {info["name"]: info for info in (await harness("sandboxes", "list"))["sandboxes"]}
            # Every run that starts meanwhile reaps, too: those of dead owners may be gone already.
            dead = {f"{run}-dead", f"{run}-another-boot"}
            assert all(info["dead"] == (name in dead) for name, info in listed.items() if name.startswith(run))
            assert {f"{run}-{name}" for name in owners} - dead <= set(listed)
            assert (await harness("sandboxes", "reap"))["problems"] == []
            left = {info.name for info in await provider.list() if info.owner and info.owner.run == run}
            assert left == {f"{run}-{name}" for name in owners} - dead
        finally:
            for sandbox in made.values():
                await provider.engine.remove(sandbox.id)
                await sandbox.destroy()


@pytest.mark.docker
async def test_images_are_listed_and_a_wrong_budget_is_refused() -> None:
    for image in (await harness("images", "list"))["images"]:
        assert image["kind"] in ("environment", "base", "default")
        assert image["size"] >= 0
    said = await harness("images", "prune", "--budget", "much", code=2)
    assert "10G" in said["error"]["hint"]
    assert (await harness("images", "prune", "--budget", "100T"))["removed"] == []
