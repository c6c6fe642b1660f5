"""Removing the sandboxes of processes that died: when a run starts, when somebody asks, and as soon as it happens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio

from harness.errors import SandboxError
from harness.sandbox.base import Provider, SandboxInfo
from harness.sandbox.owner import is_dead

_LAST_WILL = """read -r _ || for pause in 0 5; do sleep $pause; "$0" -m harness sandboxes reap --sandbox "$1"; done"""
"""Twice, because an engine may still carry out a create call whose caller is dead."""


async def reap(provider: Provider) -> tuple[list[SandboxInfo], list[str]]:
    """Remove the sandboxes whose owners are dead, and nobody else's. Returns those removed, and what went wrong."""
    removed: list[SandboxInfo] = []
    problems: list[str] = []

    async def remove(info: SandboxInfo) -> None:
        try:
            await provider.remove(info)
            removed.append(info)
        except SandboxError as error:
            problems.append(f"sandbox {info.name} of a dead run may still exist: {error.message}")

    try:
        infos = await provider.list()
    except SandboxError as error:
        return [], [f"sandboxes of dead runs could not be looked for: {error.message}"]
    async with anyio.create_task_group() as tasks:
        for info in infos:
            if info.owner is not None and is_dead(info.owner):
                tasks.start_soon(remove, info)
    return removed, problems


@contextmanager
def reaped_at_death(provider: Provider) -> Iterator[None]:
    """Have this process's sandboxes removed should it die inside the block, even by SIGKILL.

    What runs in a sandbox ends with its host by itself; one that was made but not started yet cannot. A shell in a
    session of its own waits for a line, or for the end of a pipe that only this process holds.
    """
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _LAST_WILL, sys.executable, provider.capabilities.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):  # somebody killed it, or holds it
            shell.communicate(b"all are gone\n", timeout=5)
