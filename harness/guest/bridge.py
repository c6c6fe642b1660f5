"""The guest where its channel is not there from the start: a WebSocket that the host dials, again after each cut.

This process serves the WebSocket and runs the supervisor below it, one end of a socket pair its descriptors 0 and 1.
The first connection brings the session's secret, before any code of a rollout is here; every later one must know it, so
that nothing that runs in the sandbox can take the channel over. A connection starts with a JSON text message each way,
which says how many bytes have been received, and goes on with the messages of ``resume``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hmac
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from . import ROOT, processes, start, websocket
from .resume import Resumable, ResumeError

SANDBOX_UID = 1000
HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 64
TAIL_BYTES = 8 * 1024
ENDING_S = 2.0
_READ = 256 * 1024


def main() -> None:
    """``argv[1]`` is a JSON object: ``port``, ``log`` (a path), ``keep_alive_s``, and ``boot`` for the supervisor.

    Returns, in a process that is not the bridge, as soon as the port can be dialled: a host that waits for that has no
    need to knock at it again and again.
    """
    options = json.loads(sys.argv[1])
    boot = options["boot"]
    ctypes.CDLL(None, use_errno=True).prctl(start.PR_SET_DUMPABLE, 0, 0, 0, 0)
    listener = socket.create_server(("", options["port"]), backlog=16)
    if os.fork():
        return
    _leave_caller(options["log"])
    _choose_user(boot)
    ours, theirs = socket.socketpair()
    stderr_read, stderr_write = os.pipe()
    pid = os.fork()  # before there is an event loop; the imports are shared
    if pid == 0:
        try:
            listener.close()
            ours.close()
            os.dup2(theirs.fileno(), 0)
            os.dup2(theirs.fileno(), 1)
            os.dup2(stderr_write, 2)
            theirs.close()
            for descriptor in (stderr_read, stderr_write):
                os.close(descriptor)
            with contextlib.suppress(OSError):  # where memory runs out, what can be reported goes first
                Path("/proc/self/oom_score_adj").write_text("500")
            sys.argv[1] = json.dumps(boot)
            start.main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    theirs.close()
    os.close(stderr_write)
    bridge = Bridge(pid, ours, stderr_read, options["keep_alive_s"], boot["lease_s"])
    asyncio.run(bridge.serve(listener))
    os._exit(0)


def _leave_caller(log: str) -> None:
    os.setsid()
    null, written = os.open(os.devnull, os.O_RDWR), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number, descriptor in enumerate((null, null, written)):
        os.dup2(descriptor, number)
    os.close(null)
    os.close(written)


def _choose_user(boot: dict[str, Any]) -> None:
    """Where this is root, give the rollout a user of its own, which cannot touch this process."""
    root = Path(boot.get("root") or ROOT)
    root.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or boot.get("uid") is not None:
        return
    spans = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    if any(first <= SANDBOX_UID < first + count for first, _, count in spans):
        boot["uid"] = boot["gid"] = SANDBOX_UID
        os.chown(root, SANDBOX_UID, SANDBOX_UID)
    else:
        boot["limits"] = {**boot.get("limits", {}), "processes": None}  # root's processes would all be counted


class Bridge:
    def __init__(self, pid: int, channel: socket.socket, stderr: int, keep_alive_s: float, lease_s: float) -> None:
        self._pid = pid
        self._channel = channel
        self._stderr = stderr
        self._keep_alive_s = keep_alive_s
        self._lease_s = lease_s
        self._link = Resumable()
        self._secret: bytes | None = None
        self._host: asyncio.StreamWriter | None = None
        """The connection that counts: the newest with the right secret."""
        self._down: asyncio.StreamWriter = None  # type: ignore[assignment]  # made in serve, which has the loop
        self._room = asyncio.Event()
        self._gone = asyncio.Event()
        """Set when the host has closed its connection in good order: it wants no more."""
        self._handshakes: list[asyncio.StreamWriter] = []
        """Connections that have not said yet who they are, the oldest first."""
        self._tail = bytearray()

    async def serve(self, listener: socket.socket) -> None:
        """Run until the supervisor has ended and the host knows, or has had the time of its lease to ask."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._stderr, self._read_stderr)
        up, self._down = await asyncio.open_connection(sock=self._channel)
        server = await asyncio.start_server(self._accept, sock=listener, limit=websocket.MAX_HEAD)
        ticking = loop.create_task(self._tick())
        with contextlib.suppress(ConnectionError):
            while data := await up.read(_READ):
                self._link.write(data)
                self._flush()
                while self._link.full:
                    self._room.clear()
                    await self._room.wait()
        status = await self._reap()
        loop.remove_reader(self._stderr)
        self._read_stderr()
        last = {**status, "last_lines": self._tail.decode(errors="replace")}
        print(f"\n{json.dumps(status)}", file=sys.stderr, flush=True)  # for a host that comes too late
        self._link.end(json.dumps(last).encode())
        self._gone.clear()
        self._flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s):
                await self._gone.wait()
        ticking.cancel()
        server.close()

    async def _reap(self) -> dict[str, Any]:
        """How the supervisor ended. It has closed its channel, so it is about to."""
        deadline = time.monotonic() + ENDING_S
        while not (found := os.waitpid(self._pid, os.WNOHANG))[0]:  # noqa: ASYNC222  # does not wait
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
        code = os.waitstatus_to_exitcode(found[1])
        return {"code": code if code >= 0 else 128 - code, "oom_kills": processes.oom_kills()}

    def _read_stderr(self) -> None:
        os.set_blocking(self._stderr, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._stderr, 1 << 16):
                os.write(2, data)
                self._tail += data
                del self._tail[:-TAIL_BYTES]
            asyncio.get_running_loop().remove_reader(self._stderr)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # a connection that is of no use; the host dials another
        except websocket.WebSocketError as error:
            writer.write(websocket.encode_close(error.code, str(error)))
        except ResumeError as error:
            writer.write(websocket.encode_close(websocket.PROTOCOL, str(error)))
        finally:
            if self._host is writer:
                self._host = None
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = websocket.Decoder()
        self._handshakes.append(writer)
        if len(self._handshakes) > MAX_HANDSHAKES:  # a rollout can dial this port, too: it must not fill it
            self._handshakes[0].transport.abort()
            del self._handshakes[0]
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                writer.write(websocket.accept(await reader.readuntil(b"\r\n\r\n")))
                messages: list[tuple[int, bytes]] = []
                while not messages:
                    messages = decoder.feed(await _some(reader))
        finally:
            if writer in self._handshakes:
                self._handshakes.remove(writer)
        self._attach(messages.pop(0), writer)
        while True:
            for opcode, payload in messages:
                if opcode == websocket.BINARY:
                    self._down.write(self._link.receive(payload))
                elif opcode == websocket.PING:
                    writer.write(websocket.encode(websocket.PONG, payload))
                elif opcode == websocket.CLOSE:
                    writer.write(websocket.encode(websocket.CLOSE, payload[:2]))
                    self._gone.set()
                    return
            if not self._link.full:
                self._room.set()
            self._flush()
            if not self._down.is_closing():
                await self._down.drain()
            async with asyncio.timeout(3 * self._keep_alive_s):
                data = await _some(reader)
            if self._host is not writer:
                return  # replaced meanwhile: what it still brings has been sent again
            messages = decoder.feed(data)

    def _attach(self, message: tuple[int, bytes], writer: asyncio.StreamWriter) -> None:
        try:
            said = json.loads(message[1])
            secret, received = str(said["secret"]).encode(), int(said["received"])
        except (ValueError, KeyError, TypeError) as error:
            raise websocket.WebSocketError(websocket.POLICY, "the first message does not say who this is") from error
        if len(secret) < 16 or not hmac.compare_digest(secret, self._secret or secret):
            raise websocket.WebSocketError(websocket.POLICY, "wrong secret")
        self._secret = secret
        self._link.rewind(received)
        if self._host is not None:
            self._host.transport.abort()
        self._host = writer
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = {"received": self._link.received, "pid": os.getpid()}
        writer.write(websocket.encode(websocket.TEXT, json.dumps(answer).encode()))

    def _flush(self) -> None:
        while self._host is not None and (message := self._link.next_message()) is not None:
            self._host.write(websocket.encode(websocket.BINARY, message))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            if self._host is not None:
                self._host.write(websocket.encode(websocket.BINARY, self._link.keep_alive()))


async def _some(reader: asyncio.StreamReader) -> bytes:
    if not (data := await reader.read(_READ)):
        raise EOFError
    return data
