"""What the first process of a sandbox does once it has a child: carries its bytes, ends it, reports how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from . import control as protocol
from . import export, processes, tunnel, wire
from .logs import LogPump
from .mux import Mux, Stream, StreamReset

EXIT_FAULT, EXIT_LEASE, EXIT_CHANNEL, EXIT_PROTOCOL = 70, 75, 76, 77
"""Exit statuses of the guest itself: its own fault, the host was silent, went away, or broke the protocol."""
KILL_GRACE_S = 2.0
"""How long a child may take to end by itself after its deadline or its last word."""
MEMORY_CHECK_S = 0.1


class Running:
    """The child, as the supervisor holds it."""

    def __init__(self, pid: int, control: socket.socket, out: int, err: int) -> None:
        self.pid = pid
        self.control = control
        self.out = out
        self.err = err
        self.status: int | None = None
        """What ``waitpid`` said, once it has ended."""
        self.ended = asyncio.Event()


class Supervisor:
    def __init__(
        self,
        boot: dict[str, Any],
        load: dict[str, Any],
        root: Path,
        listener: socket.socket,
        running: Running,
        channel_in: int,
        channel_out: int,
    ) -> None:
        self._boot = boot
        self._load = load
        self._root = root
        self._listener = listener
        self._child = running
        self._in, self._out = channel_in, channel_out
        self._unsent = b""
        self._heard = time.monotonic()
        self._finished: asyncio.Future[int] = None  # type: ignore[assignment]  # made in serve, which has the loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._mux: Mux = None  # type: ignore[assignment]
        self._stopping: str | None = None
        """Why the supervisor itself ended the child: "timeout", "cancelled" or "out_of_memory"."""
        self._started: float | None = None
        self._verdict: dict[str, Any] | None = None
        self._oom_kills = processes.oom_kills()
        self._peak_mib = 0.0

    async def serve(self, rest: bytes) -> int:
        """Run until the host says exit or goes away. Returns the exit status."""
        loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        self._mux = Mux(host=False, on_message=self._on_message, on_open=Stream.reset, wake=self._flush)
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._reap()
        budget = int(self._load.get("log_bytes", 1 << 20))
        self._pumps = [
            LogPump("stdout", self._child.out, budget, self._mux),
            LogPump("stderr", self._child.err, budget, self._mux),
        ]
        server = await asyncio.start_server(partial(tunnel.carry, self._mux), sock=self._listener)
        self._spawn(self._listen_to_child())
        self._spawn(self._watch_lease())
        if self._boot.get("limits", {}).get("memory_mib") is not None:
            self._spawn(self._watch_memory(float(self._boot["limits"]["memory_mib"])))
        self._feed(rest)
        loop.add_reader(self._in, self._readable)
        status = await self._finished
        server.close()
        processes.kill_all(self._child.pid)
        return status

    # The channel

    def _readable(self) -> None:
        try:
            data = os.read(self._in, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._finish(EXIT_CHANNEL)
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._heard = time.monotonic()
        try:
            self._mux.feed(data)
        except wire.WireError as error:
            print(f"host broke the protocol: {error}", file=sys.stderr)
            self._finish(EXIT_PROTOCOL)

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._unsent and not (data := self._mux.take()):
                    loop.remove_writer(self._out)
                    return
                data = self._unsent or data
                self._unsent = data[os.write(self._out, data) :]
        except BlockingIOError:
            self._unsent = data
            loop.add_writer(self._out, self._flush)
        except OSError:
            self._finish(EXIT_CHANNEL)

    def _finish(self, status: int) -> None:
        if not self._finished.done():
            self._finished.set_result(status)

    async def _watch_lease(self) -> None:
        lease = float(self._boot["lease_s"])
        while (silent := time.monotonic() - self._heard) < lease:
            await asyncio.sleep(lease - silent + 0.05)
        print(f"the host was silent for {lease:g} s", file=sys.stderr)
        self._finish(EXIT_LEASE)

    # Messages from the host

    def _on_message(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "run":
            self._run(message)
        elif kind == "probe":
            self._spawn(self._probe(message))
        elif kind == "cancel":
            self._stop("cancelled", float(message.get("grace_s", KILL_GRACE_S)))
        elif kind == "export":
            self._spawn(self._export(str(message.get("folder", "artifacts"))))
        elif kind == "ping":
            self._mux.send({"type": "pong", "n": message.get("n")})
        elif kind == "exit":
            self._finish(0)
        else:
            raise wire.WireError(f"unknown message {kind!r}")

    def _run(self, message: dict[str, Any]) -> None:
        self._started = time.monotonic()
        self._spawn(self._tell_child(message))
        if (timeout := message.get("timeout_s")) is not None:
            # The child's own clock ends a well-behaved workflow; this one ends the others.
            loop = asyncio.get_running_loop()
            loop.call_later(float(timeout) + KILL_GRACE_S, self._stop, "timeout", 0.5)

    def _stop(self, reason: str, grace_s: float) -> None:
        if self._child.ended.is_set() or self._stopping is not None:
            return
        self._stopping = reason
        processes.signal_all(signal.SIGTERM)
        asyncio.get_running_loop().call_later(grace_s, processes.kill_all, self._child.pid)

    async def _probe(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"type": "probed", "status": None, "body": "", "error": None}
        try:
            async with asyncio.timeout(float(message.get("timeout_s") or 60)):
                answer["status"], answer["body"] = await self._post(str(message["path"]), message.get("body"))
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        self._mux.send(answer)

    async def _post(self, path: str, body: object) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._listener.getsockname()[1])
        payload = json.dumps(body).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self._load['token']}\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        try:
            status = int((await reader.readline()).split()[1])
            await reader.readuntil(b"\r\n\r\n")
            return status, (await reader.read(4096)).decode("utf-8", "replace")
        except IndexError as error:
            raise ValueError("the relay closed the connection without an answer") from error
        finally:
            writer.close()

    async def _export(self, folder: str) -> None:
        processes.kill_all(self._child.pid)  # in this thread: a fork bomb may have left no room for another
        stream = self._mux.open("export")
        report: dict[str, Any] = {"files": 0, "bytes": 0, "skipped": []}
        with contextlib.suppress(StreamReset):  # the host has had enough
            report = await export.send(self._root / folder, stream)
            stream.write_eof()
        self._mux.send({"type": "exported", **report})

    # The child

    async def _tell_child(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self._child.control.setblocking(False)
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self._child.control, len(data).to_bytes(4, "big") + data)

    async def _listen_to_child(self) -> None:
        """Pass on what the child says of itself; then, however it ended, say so once."""
        reading = asyncio.get_running_loop().create_task(self._read_child())
        gone = asyncio.get_running_loop().create_task(self._child.ended.wait())
        await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
        # After its last word the child should exit; after its exit a process that it left may still hold the socket.
        late = None if self._stopping else KILL_GRACE_S
        await asyncio.wait({gone} if reading.done() else {reading}, timeout=late)
        reading.cancel()
        gone.cancel()
        # Whatever it started must not outlive it: a background writer would race the export and the grading.
        processes.kill_all(self._child.pid)
        self._reap()
        for pump in self._pumps:
            await pump.finish()
        try:
            self._mux.send(self._ended())
        except (ValueError, TypeError, RecursionError) as error:  # a verdict that cannot be passed on is none
            print(f"the child's last message is broken: {error}", file=sys.stderr)
            self._verdict = None
            self._mux.send(self._ended())

    async def _read_child(self) -> None:
        self._child.control.setblocking(False)
        try:
            while (message := await _receive_json(self._child.control)) is not None:
                if message.get("type") == "loaded":
                    self._mux.send(message)
                elif message.get("type") == "ended":
                    self._verdict = message
                    return
        except (OSError, ValueError) as error:
            print(f"the child's control socket is broken: {error}", file=sys.stderr)

    def _ended(self) -> dict[str, Any]:
        verdict: dict[str, Any] = {"type": "ended", "samples": [], "error": None, "code": None, "signal": None}
        status = self._child.status
        if status is not None and os.WIFEXITED(status):
            verdict["code"] = os.WEXITSTATUS(status)
        oom = processes.oom_kills() > self._oom_kills
        if self._stopping is not None and (self._verdict is None or self._stopping == "out_of_memory"):
            # One that waits in vain for a process that the kernel has ended for its memory has no other fault.
            verdict["how"] = "out_of_memory" if oom and self._stopping == "timeout" else self._stopping
        elif self._verdict is not None:
            verdict.update(self._verdict)
            if oom and verdict.get("how") == "timeout":
                verdict["how"] = "out_of_memory"
        elif oom:
            verdict["how"] = "out_of_memory"
        elif status is not None and os.WIFSIGNALED(status):
            verdict.update(how="signaled", signal=os.WTERMSIG(status))
        else:
            verdict["how"] = "exited"
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        verdict["agent_s"] = time.monotonic() - self._started if self._started is not None else 0.0
        verdict["peak_mib"] = round(max(peak, self._peak_mib), 1)
        return verdict

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._child.pid:
                    self._child.status = found[1]
                    self._child.ended.set()

    async def _watch_memory(self, limit_mib: float) -> None:
        """Where no control group counts the sandbox's memory, this does; it may overshoot for the time of one check."""
        while not self._child.ended.is_set():
            used = processes.memory_mib(self._root)
            self._peak_mib = max(self._peak_mib, used)
            if used > limit_mib:
                self._stopping = "out_of_memory"
                processes.kill_all(self._child.pid)
                return
            await asyncio.sleep(MEMORY_CHECK_S)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Better gone than mute: the host would wait for a word that never comes.
            print(f"the guest failed: {error!r}", file=sys.stderr)
            self._finish(EXIT_FAULT)


async def _receive_json(control: socket.socket) -> dict[str, Any] | None:
    """A message of the child; None at its end. What the child writes is not to be trusted.

    :raises ValueError: it is too long, cut, or not an object.
    """
    loop = asyncio.get_running_loop()

    async def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count and (more := await loop.sock_recv(control, min(count - len(data), 1 << 18))):
            data += more
        return bytes(data)

    header = await exactly(4)
    if not header:
        return None
    return protocol.decode(await exactly(protocol.body_length(header)))


def die(status: int, last_words: str = "") -> NoReturn:
    if last_words:
        print(last_words, file=sys.stderr)
    sys.stderr.flush()
    os._exit(status)
