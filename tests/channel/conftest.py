"""A real guest in a plain process of this machine, in the development environment, which holds the SDK."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream, SocketStream

import harness.guest
from harness.channel import Guest, Loaded
from harness.guest import command

TOKEN = "token-of-this-sandbox"


def code_tar(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "/") + ".py")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def echo_http(stream: ByteStream) -> None:
    """A relay that says what it was asked."""
    request = bytearray()
    while b"\r\n\r\n" not in request:
        request += await stream.receive()
    body = json.dumps({"head": request.decode().split("\r\n")[0], "auth": TOKEN in request.decode()}).encode()
    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await stream.aclose()


class Box:
    """A guest, its process and what it printed."""

    def __init__(self, guest: Guest, process: anyio.abc.Process, root: Path) -> None:
        self.guest = guest
        self.process = process
        self.root = root
        self.log: list[tuple[str, str]] = []
        self.dropped = 0

    def on_log(self, source: str, text: str, dropped: int) -> None:
        self.log.append((source, text))
        self.dropped = max(self.dropped, dropped)

    def printed(self, source: str = "stdout") -> str:
        return "".join(text for origin, text in self.log if origin == source)

    async def load(self, **files: str) -> Loaded:
        return await self.guest.load(
            entrypoint="main.py",
            code=code_tar(**files),
            env={"GREETING": "hello"},
            token=TOKEN,
            log_bytes=40_000,
            proxy=False,
            timeout=60,
        )


Boxes = Callable[..., AbstractAsyncContextManager[Box]]


@pytest.fixture
def box(tmp_path: Path) -> Boxes:
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "harness_guest").symlink_to(Path(harness.guest.__file__).parent)

    @asynccontextmanager
    async def open_box(
        serve: Callable[[ByteStream], Awaitable[None]] = echo_http, *, lease_s: float = 60, **limits: int
    ) -> AsyncIterator[Box]:
        root = tmp_path / "root"
        root.mkdir()
        ours, theirs = socket.socketpair()
        boot = {"root": str(root), "uid": None, "gid": None, "lease_s": lease_s, "limits": limits}
        with theirs:
            process = await anyio.open_process(
                command(sys.executable, str(lib), boot),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=None,
                env=dict(os.environ),
            )
        made = Box.__new__(Box)
        stream = await SocketStream.from_socket(ours)
        try:
            async with Guest(stream, serve=serve, on_log=lambda s, t, d: made.on_log(s, t, d), lease_s=60) as guest:
                made.__init__(guest, process, root)  # type: ignore[misc]
                await guest.hello(20)
                yield made
        finally:
            await stream.aclose()
            with anyio.CancelScope(shield=True), anyio.move_on_after(10):
                await process.wait()
            assert process.returncode is not None, "the guest outlived its channel"

    return open_box
