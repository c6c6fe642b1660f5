"""One worker as the pool holds it: a socket pair for messages, a pipe for what it prints, a process group to kill."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.abc import Process

from harness.guest import control

_WORKER = Path(__file__).with_name("worker.py")
_LOG_LIMIT = 64 * 1024
_THREAD_FROM = 1 << 20  # bytes of JSON that are too many for the event loop
_GOODBYE_S = 2.0
_KILL_S = 5.0


class WorkerProcess:
    """A process that loads the rollout and answers one message at a time.

    Its stdout and stderr belong to the user's code. Messages go over the socket pair; when the host dies the worker
    sees that end and kills its own process group.
    """

    def __init__(self, process: Process, sock: socket.socket, log: int) -> None:
        self._process = process
        self._sock = sock
        self._log = log
        self._printed = HeadTail(_LOG_LIMIT)
        self._killed = False
        self.reusable = False
        """Whether its last answer was a good one."""

    @classmethod
    async def start(cls, python: Path, rollout: Path, entrypoint: str, env: Mapping[str, str], lib: Path) -> Self:
        """Start one, in a session of its own, with exactly this environment. Its first message says what it loaded.

        :raises OSError: the interpreter cannot be started.
        """
        ours, theirs = socket.socketpair()
        log_read, log_write = os.pipe()
        options = ("-P", "-s", "-B", "-X", "utf8")
        arguments = (str(lib), str(theirs.fileno()), str(rollout), entrypoint)
        try:
            process = await anyio.open_process(
                [str(python), *options, str(_WORKER), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log_write,
                stderr=log_write,
                cwd=rollout,
                env=env,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            ours.close()
            os.close(log_read)
            raise
        finally:
            theirs.close()
            os.close(log_write)
        ours.setblocking(False)
        os.set_blocking(log_read, False)
        return cls(process, ours, log_read)

    @property
    def waiting(self) -> bool:
        """Whether it is there and has nothing to say. The socket knows of its end before the event loop does."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self._process.returncode is None
        except OSError:
            pass
        return False

    @property
    def ending(self) -> str:
        """How it ended, for a message: ``was killed by SIGABRT``, ``exited with status 3``."""
        code = self._process.returncode
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"exited with status {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    async def exchange(self, message: dict[str, Any] | None) -> dict[str, Any] | None:
        """Send a message, if there is one, and wait for the worker's next. None when it died or hung up.

        :raises ValueError: one of the two is no message: too large, or not JSON.
        """
        self.reusable = False
        data = b"" if message is None else await anyio.to_thread.run_sync(control.encode, message)
        body: bytes | None = None
        problem: ValueError | None = None
        async with anyio.create_task_group() as helpers:
            helpers.start_soon(self._read_log_on)
            helpers.start_soon(self._hang_up_at_exit)
            try:
                await self._write(data)
                header = await self._read(control.HEADER.size)
                body = None if header is None else await self._read(control.body_length(header))
            except ValueError as exc:
                problem = exc  # raised outside of the group, which would wrap it
            helpers.cancel_scope.cancel()
        if problem is not None:
            raise problem
        if body is None:
            with anyio.move_on_after(_GOODBYE_S):
                await self._process.wait()
            return None
        if len(body) < _THREAD_FROM:
            return control.decode(body)
        return await anyio.to_thread.run_sync(control.decode, body)

    def take_log(self) -> str:
        """What was printed since the last time.

        The worker flushes before it answers, so all that belongs to the answer is in the pipe by then.
        """
        for _ in range(64):  # more than a pipe holds; a process that the grader left may be writing on
            if not self._read_log():
                break
        printed, self._printed = self._printed, HeadTail(_LOG_LIMIT)
        return printed.text()

    async def kill(self) -> None:
        """Kill the whole process group. Bounded, not cancellable."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True), anyio.move_on_after(_KILL_S):
            await self._process.wait()

    async def close(self) -> None:
        """Let it end by itself if it is idle, kill what is left, free the descriptors. Bounded, not cancellable."""
        self._sock.close()
        if self.reusable:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_GOODBYE_S):
                await self._process.wait()
        await self.kill()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    async def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._sock)
            except OSError:
                return  # it is gone, as the next read will tell

    async def _read(self, count: int) -> bytes | None:
        buffer = bytearray()
        while len(buffer) < count:
            try:
                chunk = self._sock.recv(min(count - len(buffer), 1 << 20))
            except BlockingIOError:
                await anyio.wait_readable(self._sock)
                continue
            except OSError:
                return None
            if not chunk:
                return None
            buffer += chunk
        return bytes(buffer)

    async def _hang_up_at_exit(self) -> None:
        await self._process.wait()
        # A process that it left may hold the other end open. What is in flight can still be read, then comes the end.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def _read_log_on(self) -> None:
        readable = True
        while readable:
            await anyio.wait_readable(self._log)
            readable = self._read_log()

    def _read_log(self) -> bool:
        """Read what is there; whether there was something."""
        try:
            chunk = os.read(self._log, _LOG_LIMIT)
        except BlockingIOError:
            return False
        self._printed.add(chunk)
        return bool(chunk)


class HeadTail:
    """The first and the last bytes of a stream, however long it is."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if (over := len(self._tail) - self._half) > 0:
            del self._tail[:over]
            self._dropped += over

    def text(self) -> str:
        """All of it as text, with a line that says how much is missing, if anything is."""
        if not self._dropped:
            return (self._head + self._tail).decode(errors="replace")
        gap = f"\n[... {self._dropped} bytes left out ...]\n"
        return self._head.decode(errors="replace") + gap + self._tail.decode(errors="replace")
