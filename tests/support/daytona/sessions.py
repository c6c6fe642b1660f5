"""Shell sessions, commands and terminals of one running sandbox, with the quirks of the service's daemon.

A session is one long-lived shell: commands are written to its standard input, so they queue, ``exit`` ends it, and its
folder and variables persist. Output and exit codes come back through named pipes, so nobody has to poll here.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

import anyio
from anyio.abc import TaskGroup

from .machine import Child, Machine, MachineDown, chunks, write_all
from .schema import DAEMON, ApiError

STDOUT, STDERR = b"\x01\x01\x01", b"\x02\x02\x02"
LOG_BYTES = 16 * 1024 * 1024
ENTRYPOINT = "entrypoint"
FOLDER = "/tmp/.daytona"


class Command:
    """A command's output, in order, up to ``LOG_BYTES``; ``done`` when it has ended or its shell has."""

    def __init__(self, text: str) -> None:
        self.id = str(uuid.uuid4())
        self.text = text
        self.code: int | None = None
        self.done = anyio.Event()
        self.output: list[tuple[bytes, bytes]] = []
        self.stdin = -1
        self._size = 0
        self._more = anyio.Event()

    def add(self, prefix: bytes, data: bytes) -> None:
        if self._size < LOG_BYTES:
            self._size += len(data)
            self.output.append((prefix, data))
        self.wake()

    def wake(self) -> None:
        self._more.set()
        self._more = anyio.Event()

    def end(self, code: int | None) -> None:
        self.code = code
        self.done.set()
        self.wake()

    def text_of(self, *prefixes: bytes) -> str:
        return b"".join(data for prefix, data in self.output if prefix in prefixes).decode(errors="replace")

    async def follow(self) -> AsyncIterator[bytes]:
        seen = 0
        while True:
            more = self._more
            while seen < len(self.output):
                prefix, data = self.output[seen]
                seen += 1
                yield prefix + data
            if self.done.is_set():
                return
            await more.wait()

    def describe(self) -> dict[str, object]:
        return {"id": self.id, "command": self.text} | ({} if self.code is None else {"exitCode": self.code})


class Session:
    def __init__(self, name: str, shell: Child) -> None:
        self.name = name
        self.shell = shell
        self.commands: dict[str, Command] = {}
        self.descriptors = list(shell.descriptors)
        self.lock = anyio.Lock()

    def command(self, number: str) -> Command:
        if number not in self.commands:
            raise ApiError(404, "command not found", source=DAEMON)
        return self.commands[number]

    def describe(self) -> dict[str, object]:
        return {"sessionId": self.name, "commands": [each.describe() for each in self.commands.values()]}


class Pty:
    def __init__(self, name: str, child: Child, size: tuple[int, int], about: dict[str, object]) -> None:
        self.name = name
        self.child = child
        self.terminal = child.descriptors[0]
        self.size = size
        self._about = about

    def resize(self, cols: int, rows: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        self.size = cols, rows

    def describe(self) -> dict[str, object]:
        cols, rows = self.size
        return {"id": self.name, "active": self.child.code is None, "cols": cols, "rows": rows, **self._about}


class Sessions:
    def __init__(self, machine: Machine, env: Mapping[str, str], workdir: str, tasks: TaskGroup) -> None:
        self.machine = machine
        self.env = dict(env)
        self.workdir = workdir
        self.all: dict[str, Session] = {}
        self.ptys: dict[str, Pty] = {}
        self._tasks = tasks
        self._descriptors: set[int] = set()

    async def boot(self, command: list[str]) -> None:
        """Start the image's own command; its output is the session ``entrypoint``."""
        await self.machine.call("folder", path=self.workdir, mode=0o755)
        if not command:
            return
        child = await self.machine.spawn(command, self.env, self.workdir)
        os.close(child.descriptors[0])
        session = self.all[ENTRYPOINT] = Session(ENTRYPOINT, child)
        running = Command(" ".join(command))
        session.commands[running.id] = running
        session.descriptors = child.descriptors[1:]
        self._descriptors.update(session.descriptors)
        for prefix, descriptor in zip((STDOUT, STDERR), session.descriptors, strict=True):
            self._read(running, prefix, descriptor)
        self._tasks.start_soon(self._await_shell, session, running)

    async def create(self, name: str) -> None:
        if name in self.all:
            raise ApiError(409, "session already exists", source=DAEMON)
        child = await self.machine.spawn(["/bin/bash"], self.env, self.workdir)
        self.all[name] = Session(name, child)
        self._descriptors.update(child.descriptors)
        for descriptor in child.descriptors[1:]:  # what the shell itself says goes nowhere
            self._read(Command(""), STDOUT, descriptor)

    def get(self, name: str) -> Session:
        if name not in self.all:
            raise ApiError(404, "session not found", source=DAEMON)
        return self.all[name]

    async def execute(self, session: Session, text: str) -> Command:
        """
        :raises ApiError: 410, the shell has ended.
        """
        command = Command(text)
        folder = f"{FOLDER}/{session.name}/{command.id}"
        if session.shell.code is not None:
            raise ApiError(410, "session has ended", code="SESSION_ENDED", source=DAEMON)
        _, descriptors = await self.machine.call("fifos", folder=folder, names=["in", "out", "err", "code"])
        command.stdin, out, err, code = descriptors
        session.descriptors += descriptors
        self._descriptors.update(descriptors)
        session.commands[command.id] = command
        self._tasks.start_soon(self._await_code, session, command, out, err, code)
        line = f"{{ {text}\n}} < {folder}/in > {folder}/out 2> {folder}/err; echo $? > {folder}/code\n"
        async with session.lock:
            with suppress(BrokenPipeError):
                await write_all(session.shell.descriptors[0], line.encode())
        return command

    async def delete(self, name: str) -> None:
        session = self.get(name)
        del self.all[name]
        await self.machine.call("kill", pid=session.shell.pid, number=int(signal.SIGKILL), group=True)
        for command in session.commands.values():
            if not command.done.is_set():
                command.end(None)
        self._close(session.descriptors)

    async def open_pty(self, name: str, cols: int, rows: int, cwd: str, envs: Mapping[str, str], at: str) -> Pty:
        if name in self.ptys:
            raise ApiError(409, f"PTY session with ID '{name}' already exists", source=DAEMON)
        env = {**self.env, "TERM": "xterm-256color", **envs}
        child = await self.machine.spawn(["/bin/bash", "-i"], env, cwd or self.workdir, tty=[cols, rows])
        self._descriptors.update(child.descriptors)
        about = {"cwd": cwd or self.workdir, "envs": dict(envs), "createdAt": at, "lazyStart": False}
        self.ptys[name] = Pty(name, child, (cols, rows), about)
        return self.ptys[name]

    def pty(self, name: str) -> Pty:
        if name not in self.ptys:
            raise ApiError(404, f"PTY session {name} not found", source=DAEMON)
        return self.ptys[name]

    async def kill_pty(self, pty: Pty) -> None:
        with suppress(MachineDown):
            await self.machine.call("kill", pid=pty.child.pid, number=int(signal.SIGKILL), group=True)
        if self.ptys.pop(pty.name, None):
            self._close([pty.terminal])

    def close(self) -> None:
        """The machine is down: let go of everything."""
        for session in self.all.values():
            for command in session.commands.values():
                if not command.done.is_set():
                    command.end(None)
        self._close(list(self._descriptors))

    def _close(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            if descriptor in self._descriptors:
                self._descriptors.discard(descriptor)
                anyio.notify_closing(descriptor)
                os.close(descriptor)

    def _read(self, command: Command, prefix: bytes, descriptor: int) -> None:
        self._tasks.start_soon(self._copy, command, prefix, descriptor)

    async def _copy(self, command: Command, prefix: bytes, descriptor: int) -> None:
        # Ends with the pipe, or when ``_close`` takes the descriptor away.
        with suppress(anyio.ClosedResourceError):
            async for data in chunks(descriptor):
                command.add(prefix, data)

    async def _await_code(self, session: Session, command: Command, out: int, err: int, code: int) -> None:
        self._read(command, STDOUT, out)
        self._read(command, STDERR, err)
        with suppress(anyio.ClosedResourceError):
            async with anyio.create_task_group() as tasks:

                async def shell() -> None:
                    await session.shell.wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(shell)
                async for data in chunks(code):
                    # What was written before the code is in the pipes by now.
                    for prefix, descriptor in ((STDOUT, out), (STDERR, err)):
                        with suppress(BlockingIOError):
                            while left := os.read(descriptor, 1 << 16):
                                command.add(prefix, left)
                    command.end(int(data))
                    tasks.cancel_scope.cancel()
        if not command.done.is_set():
            command.end(None)

    async def _await_shell(self, session: Session, command: Command) -> None:
        command.end(await session.shell.wait())
