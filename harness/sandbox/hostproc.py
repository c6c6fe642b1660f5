"""A guest that is a process of this machine: its channel, last words and end. What ``local`` and ``process`` share."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import SocketStream
from pydantic import ValidationError

from harness.errors import QuotaError, SandboxError
from harness.models import Record
from harness.sandbox.base import Exit, Owner, Sandbox, SandboxSpec

MARKER = "HARNESS_SANDBOX"
"""Variable of the host's process (never of what runs inside) that says whose sandbox it is."""
TAIL_BYTES = 8 * 1024
SPAWN_S = 30.0
SETTLE_S = 1.0
"""How long an exit status may come after the end of the stream."""
KILL_S = 10.0
_PROC = Path("/proc")
_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class Marker(Record):
    """Whose sandbox a process is."""

    provider: str
    name: str
    owner: Owner
    trial: str = ""
    attempt: int = 0

    @classmethod
    def of(cls, provider: str, spec: SandboxSpec) -> Marker:
        return cls(provider=provider, name=spec.name, owner=spec.owner, trial=spec.trial, attempt=spec.attempt)


def boot(spec: SandboxSpec, *, root: str, uid: int | None, processes: int | None) -> dict[str, Any]:
    """The guest's start object (see ``harness.guest``): here the guest itself keeps every limit."""
    resources = spec.settings.resources
    limits = resources.model_dump(include={"open_files", "file_mib", "memory_mib"})
    return {
        "root": root,
        "uid": uid,
        "gid": uid,
        "limits": {**limits, "processes": processes},
        "lease_s": spec.lease_s,
    }


class _Watcher(asyncio.SubprocessProtocol):
    """Keeps the last lines of a process's stderr and knows when it is over.

    A protocol and not a task: it needs nobody to own it, and a provider has no task group that outlives ``create``.
    """

    def __init__(self) -> None:
        self.tail = bytearray()
        self.exited = anyio.Event()
        self.closed = anyio.Event()
        """Set once it has been reaped and every holder of its stderr is gone."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.tail += data
        del self.tail[:-TAIL_BYTES]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


class HostSandbox(Sandbox):
    """A sandbox whose guest, or whose guest's keeper, is a child process of ours."""

    stream: SocketStream

    def __init__(
        self,
        name: str,
        transport: asyncio.SubprocessTransport,
        watcher: _Watcher,
        stream: SocketStream,
        kill: Callable[[int | None], None],
        on_destroyed: Callable[[], None],
    ) -> None:
        pid = transport.get_pid()
        self.id = f"{pid}:{start_ticks(pid)}"
        self.name = name
        self.stream = stream
        self._pid = pid
        self._transport = transport
        self._watcher = watcher
        self._kill = kill
        self._on_destroyed: Callable[[], None] | None = on_destroyed

    async def outcome(self) -> Exit:
        with anyio.move_on_after(SETTLE_S):
            await self._watcher.exited.wait()
            # What it wrote last may still be in the pipe.
            with anyio.move_on_after(SETTLE_S / 4):
                await self._watcher.closed.wait()
        return _exit(self._transport.get_returncode(), self._watcher.tail.decode(errors="replace"))

    async def destroy(self) -> None:
        with anyio.move_on_after(KILL_S, shield=True):
            await self.stream.aclose()
            while not self._watcher.closed.is_set():
                # As long as it is not reaped, the number means this process.
                running = self._transport.get_returncode() is None
                await anyio.to_thread.run_sync(self._kill, self._pid if running else None)
                with anyio.move_on_after(KILL_S / 8):
                    await self._watcher.closed.wait()
            if self._on_destroyed is not None:
                await anyio.to_thread.run_sync(self._on_destroyed)
                self._on_destroyed = None
            self._transport.close()
            return
        self._transport.close()
        raise SandboxError(f"sandbox {self.name}: process {self._pid} did not end within {KILL_S:.0f} s of SIGKILL")


async def spawn(
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    kill: Callable[[int | None], None],
    on_destroyed: Callable[[], None],
    cwd: str | None = None,
    pass_fds: Collection[int] = (),
) -> HostSandbox:
    """Start a process with one end of a socket pair as its descriptors 0 and 1.

    It is started from the event loop's thread: the kernel sends the parent-death signal when the *thread* that started
    a process ends, and a worker thread ends when it has been idle. A cancelled spawn leaves no process.

    :param kill: ends the process with the given id and everything below it, or what is left when it is over (null).
        Blocks; called in a thread, again and again until nobody holds the process's stderr.
    :param on_destroyed: frees what else the sandbox holds, once, after its last process is gone. Blocks, as above.
    :raises QuotaError: this machine has no room for another process now.
    :raises SandboxError: it cannot be started.
    """
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise QuotaError(f"sandbox {name}: no socket for its channel: {error}") from error
    try:
        with theirs, anyio.fail_after(SPAWN_S, shield=True):
            transport, watcher = await asyncio.get_running_loop().subprocess_exec(
                _Watcher,
                *argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                env=env,
                cwd=cwd,
                pass_fds=tuple(pass_fds),
                start_new_session=True,  # Ctrl-C in the terminal is for the harness, which ends its sandboxes in order
                umask=0o022,
            )
            stream = await SocketStream.from_socket(ours)
    except (OSError, TimeoutError) as error:
        ours.close()
        full = isinstance(error, OSError) and error.errno in _NO_ROOM
        raise (QuotaError if full else SandboxError)(f"sandbox {name}: cannot start {argv[0]}: {error}") from error
    except BaseException:
        ours.close()
        raise
    sandbox = HostSandbox(name, transport, watcher, stream, kill, on_destroyed)
    try:
        await anyio.lowlevel.checkpoint_if_cancelled()
    except BaseException:
        await sandbox.destroy()
        raise
    return sandbox


def _exit(code: int | None, last_lines: str) -> Exit:
    if code is None:
        return Exit(state="running", last_lines=last_lines)
    # Below zero: the process itself; above 128: bwrap says so of the guest.
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number:
        with contextlib.suppress(ValueError):
            return Exit(state="killed", code=code, detail=signal.Signals(number).name, last_lines=last_lines)
    failed = [line for line in last_lines.splitlines() if line.startswith("bwrap: ")]
    return Exit(state="exited", code=code, detail=failed[-1] if code and failed else "", last_lines=last_lines)


def start_ticks(pid: int) -> str:
    """Start of a process in clock ticks since boot, which with its number names it for good; empty when it is gone."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; empty for a process that is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def started_at(pid: int) -> float:
    """Unix time of a process's start."""
    ticks = start_ticks(pid)
    since_boot = float(ticks) / os.sysconf("SC_CLK_TCK") if ticks else 0.0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            found += started_by(pid, int(thread.name))
    return found


def started_by(pid: int, thread: int) -> list[int]:
    """Children of one thread of a process."""
    return [int(child) for child in (_PROC / str(pid) / "task" / str(thread) / "children").read_text().split()]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def marked(provider: str) -> Iterator[tuple[int, Marker]]:
    """Processes of this user that carry a provider's marker, oldest first."""
    found: list[tuple[int, int, Marker]] = []
    prefix = f"{MARKER}=".encode()
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValidationError, ValueError):
                for variable in (entry / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(prefix):
                        marker = Marker.model_validate_json(variable.removeprefix(prefix))
                        ticks = start_ticks(int(entry.name))
                        if marker.provider == provider and ticks and alive(int(entry.name)):
                            found.append((int(ticks), int(entry.name), marker))
    for _, pid, marker in sorted(found, key=lambda item: item[:2]):
        yield pid, marker


def labels(marker: Marker) -> dict[str, str]:
    return {"trial": marker.trial, "attempt": json.dumps(marker.attempt)}
