"""A stand-in for the guest: drops to its user as the guest does, then runs the lines of Python that it is sent."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from harness.rollout.environment import host_environment
from harness.rollout.lock import resolve
from harness.sandbox.base import Environment, Owner, Provider, Sandbox, SandboxInfo, SandboxSettings, SandboxSpec

PROGRAM = """
import json, os, sys
boot = json.loads(sys.argv[1])
if boot["uid"] is not None:
    os.setgroups([]); os.setresgid(*[boot["gid"]] * 3); os.setresuid(*[boot["uid"]] * 3)
for line in os.fdopen(os.dup(0)):
    space = {"boot": boot}
    try:
        exec(json.loads(line), space)
        answer = space.get("r")
    except Exception as error:
        answer = type(error).__name__ + ": " + str(error)
    os.write(1, json.dumps(answer).encode() + b"\\n")
"""


def command(python: str, lib: str, boot: dict[str, object]) -> list[str]:
    return [python, "-I", "-c", PROGRAM, json.dumps(boot)]


async def ask(sandbox: Sandbox, code: str) -> Any:
    """Run code in the sandbox; its variable ``r`` comes back, or the exception as text."""
    with anyio.fail_after(30):
        await sandbox.stream.send(json.dumps(code).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += await sandbox.stream.receive()
    return json.loads(answer)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(15):
        while not await anyio.to_thread.run_sync(condition):  # nothing tells of another process's end
            await anyio.sleep(0.01)


def owner() -> Owner:
    return Owner(host="host", boot_id="boot", pid=os.getpid(), started="1", run="run")


async def listed(provider: Provider) -> list[SandboxInfo]:
    """The sandboxes of this process; others may run on the same machine."""
    return [info for info in await provider.list() if info.owner == owner()]


def spec(environment: Environment, name: str = "sandbox", **settings: Any) -> SandboxSpec:
    return SandboxSpec(
        name=f"test-{os.getpid()}-{name}",
        owner=owner(),
        environment=environment,
        settings=SandboxSettings(**settings),
        trial="t",
        attempt=2,
    )


@asynccontextmanager
async def sandbox(provider: Provider, of: SandboxSpec) -> AsyncIterator[Sandbox]:
    async with await provider.create(of) as made:
        yield made


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARNESS_CACHE", str(folder))
        yield


def build_environment(folder: Path) -> Path:
    """An environment without packages, which needs no network."""
    project = folder / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "1"\ndependencies = []\n')

    async def build() -> Path:
        lock = await resolve(project, lambda _: None)
        return (await host_environment(lock, lambda _: None)).path

    with _cache(folder / "cache"):
        return anyio.run(build)
