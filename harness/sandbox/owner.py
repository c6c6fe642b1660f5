"""Who owns a sandbox, and whether that process still lives: a leftover, or a living sibling's sandbox."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import anyio

from harness.errors import SandboxError
from harness.sandbox.base import Owner, Provider, SandboxInfo


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # not Linux: the time of the last boot says the same
        found = subprocess.run(
            ["sysctl", "-n", "kern.boottime"], capture_output=True, text=True, timeout=5, check=False
        )
        return found.stdout.strip()


def _started(pid: int) -> str:
    """Start time of a process; empty when there is none with this pid, or just its remains."""
    if sys.platform == "linux":
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
            return "" if state in "ZX" else fields[18]
        except (OSError, IndexError, ValueError):
            return ""
    found = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=5, check=False
    )
    return found.stdout.strip()


def this_process(run: str) -> Owner:
    """The owner of every sandbox that this process makes for a run."""
    pid = os.getpid()
    return Owner(host=socket.gethostname(), boot_id=_boot_id(), pid=pid, started=_started(pid), run=run)


def is_dead(owner: Owner) -> bool:
    """Whether the owner certainly lives no more. Nothing can be said of processes on other machines."""
    if owner.host != socket.gethostname():
        return False
    return owner.boot_id != _boot_id() or _started(owner.pid) != owner.started


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
