"""The bridge as a process of this machine, dialled through a proxy that a test can cut and silence."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from anyio.abc import ByteStream, SocketStream

pytest.importorskip("daytona")
from harness.channel import Guest
from harness.errors import ProtocolError
from harness.sandbox.daytona.sandbox import guest_zip
from harness.sandbox.daytona.stream import ResumingStream, Socket

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="Linux only")]

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\nConnection: close\r\n\r\n" + b"x" * 60_000


BUFFER = 32 * 1024
"""The kernel's, for one connection and direction: less than may be under way."""


def with_small_buffer(address: Any) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    return made


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Bridge:
    """A bridge with its supervisor, and a proxy before it."""

    def __init__(self, root: Path, lease_s: float) -> None:
        archive = root / "guest.zip"
        archive.write_bytes(guest_zip())
        self.port, self.lease_s = free_port(), lease_s
        user = 0 if os.geteuid() == 0 else None  # root stays root: others may not reach this interpreter
        boot: dict[str, Any] = {
            "root": str(root / "sandbox"),
            "uid": user,
            "gid": user,
            "lease_s": lease_s,
            "limits": {},
        }
        options = {"port": self.port, "log": str(root / "log"), "keep_alive_s": lease_s / 6, "boot": boot}
        code = f"import sys; sys.path.insert(0, {str(archive)!r}); from harness_guest.bridge import main; main()"
        command = [sys.executable, "-I", "-S", "-c", code, json.dumps(options)]
        subprocess.run(command, check=True, timeout=30)  # returns when the port can be dialled
        [self.pid] = self._processes()
        self.calls = 0
        self.silent = False
        self.budget = -1
        """Bytes until the next cut; negative: none."""
        self._links: set[anyio.CancelScope] = set()

    def _processes(self) -> list[int]:
        """The bridge itself: the first in its session."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f'"port": {self.port}'.encode() in (folder / "cmdline").read_bytes():
                    pid = int(folder.name)
                    found += [pid] if os.getsid(pid) == pid else []
        return found

    def over(self) -> bool:
        return not self._processes()

    def cut(self) -> None:
        for link in self._links:
            link.cancel()

    async def proxy(self, client: SocketStream) -> None:
        with anyio.CancelScope() as link, suppress(OSError, anyio.BrokenResourceError, anyio.EndOfStream):
            self._links.add(link)
            bridge = await anyio.connect_tcp("127.0.0.1", self.port)
            async with client, bridge, anyio.create_task_group() as tasks:

                async def pump(source: ByteStream, sink: ByteStream) -> None:
                    with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                        while True:
                            data = await source.receive()
                            if self.silent:  # reads no more: what is sent piles up before it
                                await anyio.sleep_forever()
                            await sink.send(data)
                            if self.budget >= 0:
                                self.budget -= len(data)
                                if self.budget < 0:
                                    break
                    tasks.cancel_scope.cancel()

                tasks.start_soon(pump, client, bridge)
                tasks.start_soon(pump, bridge, client)
        self._links.discard(link)

    async def serve(self, connection: ByteStream) -> None:
        """Answer a model call."""
        await connection.receive()
        self.calls += 1
        await connection.send(ANSWER)
        await connection.send_eof()


@asynccontextmanager
async def running(lease_s: float = 30.0) -> AsyncIterator[tuple[Bridge, ResumingStream]]:
    folder = tempfile.TemporaryDirectory(prefix="bridge-")
    bridge = Bridge(Path(folder.name), lease_s)
    try:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        listener.extra(anyio.abc.SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        connector = aiohttp.TCPConnector(socket_factory=with_small_buffer)
        session = aiohttp.ClientSession(connector=connector, ws_response_class=Socket)
        async with listener, session as web, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, bridge.proxy)

            async def dial(fresh: bool) -> Socket:
                socket = await web.ws_connect(f"http://127.0.0.1:{port}/", compress=0, max_msg_size=1 << 17)
                assert isinstance(socket, Socket)
                return socket

            stream = ResumingStream(dial, lease_s)
            await stream.open(20)
            try:
                yield bridge, stream
            finally:
                await stream.aclose()
                tasks.cancel_scope.cancel()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(bridge.pid, signal.SIGKILL)
        folder.cleanup()


def talking(bridge: Bridge, stream: ResumingStream) -> Guest:
    return Guest(stream, serve=bridge.serve, on_log=lambda *_: None, lease_s=bridge.lease_s)


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not true():  # nothing tells of it
            await anyio.sleep(0.02)


async def ended(stream: ResumingStream) -> None:
    """Read to the end."""
    while True:
        await stream.receive()


async def loaded(guest: Guest) -> None:
    """With an entry point that cannot be imported: the supervisor and its port work as with any."""
    await guest.hello(20)
    ok = await guest.load(
        entrypoint="main.py", code=bytes(1024), env={}, token="t", log_bytes=1000, proxy=False, timeout=20
    )
    assert not ok.ok


async def test_a_guest_is_driven_over_it_and_its_end_is_reported() -> None:
    async with running() as (bridge, stream), talking(bridge, stream) as guest:
        await loaded(guest)
        assert (await guest.probe("/v1/x", {}, 20)).status == 200
        guest.exit()
        await until(lambda: not guest.alive)
    assert stream.last_words == {"code": 0, "oom_kills": 0, "last_lines": ""}
    assert bridge.calls == 1


@pytest.mark.parametrize("budget", [1, 150, 700, 4_000, 30_000])
async def test_cuts_anywhere_lose_nothing_and_repeat_nothing(budget: int) -> None:
    async with running() as (bridge, stream), talking(bridge, stream) as guest:
        bridge.budget = budget
        bridge.cut()
        await loaded(guest)
        for _ in range(4):
            bridge.budget = budget
            probed = await guest.probe("/v1/x", {"text": "y" * 50_000}, 20)
            assert (probed.status, probed.body) == (200, "x" * 4096)
    assert bridge.calls == 4
    assert stream.dials > 3


@pytest.mark.parametrize("size", [1, 2_000_000])
async def test_a_connection_that_fell_silent_is_replaced(size: int) -> None:
    async with running(lease_s=3) as (bridge, stream), talking(bridge, stream) as guest:
        await loaded(guest)
        bridge.silent = True

        async def heal() -> None:
            await anyio.sleep(0.5)
            bridge.silent = False  # for new connections; the old ones have lost bytes

        before = stream.dials
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(heal)
            probed = await guest.probe("/v1/x", {"text": "y" * size}, 20)
        assert probed.status == 200
    assert stream.dials > before
    assert bridge.calls == 1


async def test_who_does_not_know_the_secret_cannot_take_over() -> None:
    async with running() as (bridge, stream):
        intruder = ResumingStream(stream._dial, 30)
        with pytest.raises(anyio.BrokenResourceError) as refused:
            await intruder.open(20)
        assert isinstance(refused.value.__cause__, ProtocolError)
        async with talking(bridge, stream) as guest:
            await loaded(guest)
        assert stream.dials == 1


async def test_other_bytes_on_its_port_do_no_harm() -> None:
    async with running() as (bridge, stream):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 40_000, b"", os.urandom(3000) + b"\r\n\r\n"):
            async with await anyio.connect_tcp("127.0.0.1", bridge.port) as connection:
                with suppress(anyio.BrokenResourceError):
                    await connection.send(garbage)
        async with talking(bridge, stream) as guest:
            await loaded(guest)
            assert (await guest.probe("/v1/x", {}, 20)).status == 200


async def test_connections_that_say_nothing_do_not_keep_the_host_out() -> None:
    async with running() as (bridge, stream), AsyncExitStack() as idle, talking(bridge, stream) as guest:
        await loaded(guest)
        for _ in range(100):
            await idle.enter_async_context(await anyio.connect_tcp("127.0.0.1", bridge.port))
        bridge.cut()
        assert (await guest.probe("/v1/x", {}, 5)).status == 200
    assert stream.dials > 1


async def test_it_ends_when_its_host_does_not_come_back() -> None:
    async with running(lease_s=1) as (bridge, stream):
        await stream.receive()
        bridge.cut()
        await until(bridge.over)


async def test_a_supervisor_that_was_killed_is_reported_as_that() -> None:
    async with running() as (bridge, stream):
        await stream.receive()
        children = await anyio.Path(f"/proc/{bridge.pid}/task/{bridge.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
        with anyio.fail_after(20), pytest.raises(anyio.EndOfStream):
            await ended(stream)
        assert stream.last_words is not None
        assert stream.last_words["code"] == 137
