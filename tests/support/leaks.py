"""What a test may leave behind: nothing. Compares before and after, and waits a moment for what is just going away.

The test process is a subreaper (on Linux): a process that outlives the program which a test started becomes its child,
and is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import anyio
from aiodocker import Docker
from aiodocker.exceptions import DockerError

from harness.sandbox.docker import container
from harness.sandbox.owner import is_dead

_PR_SET_CHILD_SUBREAPER = 36
_SELF = Path("/proc/self")
GRACE_S = 20.0

Things = dict[str, str]
"""What there is: an identity, and a description for the report."""


def adopt_orphans() -> None:
    if _SELF.exists():
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> Things:
    """Processes below this one. Dead ones that nobody waited for are buried: orphans have no other parent."""
    found: Things = {}
    for listing in _SELF.glob("task/*/children"):
        with contextlib.suppress(OSError):
            for pid in listing.read_text().split():
                stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if stat[0] == "Z":
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(int(pid), os.WNOHANG)
                else:
                    found[f"{pid}@{stat[19]}"] = f"process {pid}: {command[:200]}"
    return found


def descriptors() -> Things:
    """Open sockets and pipes of this process."""
    found: Things = {}
    for entry in _SELF.glob("fd/*"):
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith(("socket:", "pipe:")):
                found[target] = f"descriptor {entry.name}: {target}"
    return found


def folders() -> Things:
    """Temporary folders and files of ours."""
    return {str(path): f"temporary {path}" for path in Path(tempfile.gettempdir()).glob("harness*")}


def containers() -> Things:
    """Containers of ours whose owner is this process or is dead: what other living processes have is theirs."""

    async def listed() -> Things:
        found: Things = {}
        async with Docker() as docker:
            for each in await docker.containers.list(all=True, filters={"label": [container.OWNED]}):
                info = container.info(each._container)
                if info.owner is None or info.owner.pid == os.getpid() or is_dead(info.owner):
                    found[info.id] = f"container {info.name} ({info.state})"
        return found

    return anyio.run(listed)


@contextlib.contextmanager
def nothing_left(*looks: Callable[[], Things]) -> Iterator[None]:
    """Fails when the block has left something that was not there before it, and that is still there after a grace."""
    before = [look() for look in looks]
    yield
    deadline = time.monotonic() + GRACE_S
    while True:
        left = [what for look, old in zip(looks, before, strict=True) for key, what in look().items() if key not in old]
        if not left:
            return
        if time.monotonic() > deadline:
            raise AssertionError("the test left something behind:\n  " + "\n  ".join(left))
        gc.collect()
        time.sleep(0.05)


@contextlib.asynccontextmanager
async def no_task_left() -> AsyncIterator[None]:
    """The same for the tasks of the running event loop."""

    def tasks() -> set[asyncio.Task[object]]:
        # without those in which the test runner itself runs tests and fixtures
        return {task for task in asyncio.all_tasks() if "TestRunner." not in repr(task.get_coro())}

    before = tasks()
    yield
    if ending := tasks() - before:
        await asyncio.wait(ending, timeout=GRACE_S)
    left = tasks() - before
    assert not left, f"the test left tasks behind: {left}"


async def engine_answers() -> str:
    """Empty when a Docker engine answers, else why none does."""
    try:
        with anyio.fail_after(10):
            async with Docker() as docker:
                await docker.version()
    except (OSError, ValueError, DockerError) as error:
        return f"no Docker engine answers: {error}"
    return ""
