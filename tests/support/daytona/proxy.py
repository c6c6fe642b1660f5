"""The preview proxy: one HTTP exchange or WebSocket a connection, spliced to a port inside a sandbox.

The service gives each preview a host name of its own. Names below ``localhost`` do not resolve everywhere, so here the
first path segment, ``{port}-{sandbox or token}``, stands for it and is not passed on; as host name it works too.
"""

from __future__ import annotations

import hmac
import json
import re
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from urllib.parse import parse_qs

import anyio
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from . import schema
from .clock import iso
from .faults import Break, Delay, Faults, Request, RequestLog, Respond
from .records import Link, Sandbox
from .schema import ApiError
from .world import World

PORTS = range(3000, 10_000)
RESERVED = (22222, 2280, 33333)
HEAD_BYTES, HEAD_S = 64 * 1024, 30.0
TOKEN, SKIP_WARNING = "x-daytona-preview-token", "x-daytona-skip-preview-warning"
TOKEN_QUERY = "DAYTONA_SANDBOX_AUTH_KEY"
_OURS = (TOKEN, SKIP_WARNING, "x-daytona-disable-cors", "connection", "keep-alive")


@dataclass
class _Head:
    method: str
    target: str
    version: str
    headers: list[tuple[str, str]]

    def get(self, name: str) -> str:
        return next((value for each, value in self.headers if each.lower() == name), "")

    @property
    def upgrades(self) -> bool:
        return self.get("upgrade").lower() == "websocket"


class PreviewProxy:
    """
    :param idle_s: a connection that carries nothing for so long is closed; None: never.
    :param counts_as_activity: whether preview traffic keeps a sandbox from auto-stop. Reports about the service differ.
    """

    def __init__(
        self,
        world: World,
        faults: Faults,
        log: RequestLog,
        *,
        idle_s: float | None,
        counts_as_activity: bool,
        warning: bool,
    ) -> None:
        self._world = world
        self._faults = faults
        self._log = log
        self._idle_s = idle_s
        self._counts_as_activity = counts_as_activity
        self._warning = warning
        self.open = 0

    async def serve(self, client: SocketStream) -> None:
        self.open += 1
        try:
            with suppress(
                anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, TimeoutError, OSError
            ):
                async with client:
                    await self._exchange(client)
        finally:
            self.open -= 1

    async def _exchange(self, client: SocketStream) -> None:
        incoming = BufferedByteReceiveStream(client)
        with anyio.fail_after(HEAD_S):
            try:
                head = _parse(await incoming.receive_until(b"\r\n\r\n", HEAD_BYTES))
            except (anyio.DelimiterNotFound, anyio.IncompleteRead, ValueError):
                return
        status, name = 101 if head.upgrades else 200, ""
        try:
            name, port, path = _split(head)
            sandbox, signed = self._sandbox(name, port)
            breaks = None
            for action in self._faults.take("PREVIEW", f"/{sandbox.id}/{port}"):
                breaks = action if isinstance(action, Break) else breaks
                if isinstance(action, Delay):
                    await anyio.sleep(action.seconds)
                if isinstance(action, Respond):
                    raise ApiError(action.status, action.message, source=schema.PROXY, headers=action.headers)
            if not signed:
                self._authorize(sandbox, head)
            if self._warning and _is_browser(head):
                await client.send(_response(200, b"<h1>Preview URL Warning</h1>", "text/html"))
                return
            try:
                upstream = await SocketStream.from_socket(await sandbox.running().connect(port))
            except (OSError, TimeoutError) as error:
                message = f"bad gateway: nothing listens on port {port}: {error}"
                raise ApiError(502, message, source=schema.PROXY) from error
            if self._counts_as_activity:
                sandbox.active_at = self._world.clock.now()
            async with upstream:
                await upstream.send(_forwarded(head, path) + incoming.buffer)
                await self._splice(sandbox, client, upstream, breaks)
        except ApiError as error:
            status = error.status
            body = json.dumps(error.envelope(head.method, head.target, iso(self._world.clock.now()))).encode()
            await client.send(_response(error.status, body, "application/json", error.headers))
        finally:
            self._log.add(Request("PREVIEW", f"/{name}", "/{port}-{id}", status, self._world.clock.now()))

    def _sandbox(self, name: str, port: int) -> tuple[Sandbox, bool]:
        """The sandbox that a host name is for, and whether the name is a signed token of it."""
        if port not in PORTS or port in RESERVED:
            raise ApiError(400, f"bad request: port {port} cannot be previewed", source=schema.PROXY)
        if found := self._world.sandboxes.get(name):
            return found, False
        for sandbox in self._world.live():
            if name in sandbox.signed:
                for_port, until = sandbox.signed[name]
                if for_port == port and self._world.clock.now() < until:
                    return sandbox, True
                raise ApiError(401, "unauthorized: signed preview URL has expired", source=schema.PROXY)
        raise ApiError(404, f"not found: sandbox {name} not found", source=schema.PROXY)

    def _authorize(self, sandbox: Sandbox, head: _Head) -> None:
        query = parse_qs(head.target.partition("?")[2])
        given = head.get(TOKEN) or (query.get(TOKEN_QUERY) or [""])[0]
        if not sandbox.public and not (sandbox.token and hmac.compare_digest(given.encode(), sandbox.token.encode())):
            raise ApiError(401, "unauthorized: invalid or expired preview token", source=schema.PROXY)

    async def _splice(
        self, sandbox: Sandbox, client: SocketStream, upstream: SocketStream, breaks: Break | None
    ) -> None:
        left = breaks.after_bytes if breaks else -1
        active = self._world.clock.now()
        with ExitStack() as closing:
            async with anyio.create_task_group() as tasks:
                link = Link(sandbox.links, tasks.cancel_scope.cancel)
                closing.callback(link.close)
                if breaks and left == 0:
                    link.silent, left = breaks.silent, -1
                    if not breaks.silent:
                        tasks.cancel_scope.cancel()

                async def pump(source: SocketStream, sink: SocketStream) -> None:
                    nonlocal left, active
                    with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                        while True:
                            data = await source.receive()
                            active = self._world.clock.now()
                            if link.silent:  # nothing more is read: what is sent here piles up there
                                await anyio.sleep_forever()
                            await sink.send(data)
                            if self._counts_as_activity:
                                sandbox.active_at = active
                            if left >= 0 and (left := max(0, left - len(data))) == 0:
                                if breaks is None or not breaks.silent:
                                    break
                                link.silent, left = True, -1
                    if link.silent:  # neither side learns of the other's end
                        await anyio.sleep_forever()
                    tasks.cancel_scope.cancel()

                async def idle(limit: float) -> None:
                    while (rest := active + limit - self._world.clock.now()) > 0:
                        await anyio.sleep(min(rest, 0.25))  # the clock may jump
                    tasks.cancel_scope.cancel()

                tasks.start_soon(pump, client, upstream)
                tasks.start_soon(pump, upstream, client)
                if self._idle_s is not None:
                    tasks.start_soon(idle, self._idle_s)


def _parse(data: bytes) -> _Head:
    first, *lines = data.decode("latin-1").split("\r\n")
    method, target, version = first.split(" ")
    pairs = [line.partition(":") for line in lines]
    return _Head(method, target, version, [(name.strip(), value.strip()) for name, _, value in pairs])


def _split(head: _Head) -> tuple[str, int, str]:
    """Name, port and the path to ask for."""
    if found := re.match(r"(\d+)-([\w-]+)\.", head.get("host")):
        return found[2], int(found[1]), head.target
    if found := re.match(r"/(\d+)-([\w-]+)(/[^?]*)?(\?.*)?$", head.target):
        return found[2], int(found[1]), (found[3] or "/") + (found[4] or "")
    raise ApiError(404, "not found: no sandbox in this URL", source=schema.PROXY)


def _forwarded(head: _Head, path: str) -> bytes:
    """One request a connection, unless it becomes a WebSocket; without what was for the proxy."""
    path = re.sub(rf"(?<=[?&]){TOKEN_QUERY}=[^&]*&?", "", path).rstrip("?&")
    kept = [f"{name}: {value}" for name, value in head.headers if name.lower() not in _OURS]
    kept += ["Connection: Upgrade" if head.upgrades else "Connection: close", "X-Forwarded-Proto: http"]
    return "\r\n".join([f"{head.method} {path} {head.version}", *kept, "\r\n"]).encode("latin-1")


def _is_browser(head: _Head) -> bool:
    asks_html = "text/html" in head.get("accept") and "Mozilla" in head.get("user-agent")
    return asks_html and not head.upgrades and head.get(SKIP_WARNING).lower() != "true"


def _response(status: int, body: bytes, kind: str, more: object = ()) -> bytes:
    headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close", **dict(more or {})}  # type: ignore[call-overload]
    lines = [f"HTTP/1.1 {status} Stand-in", *(f"{name}: {value}" for name, value in headers.items()), "\r\n"]
    return "\r\n".join(lines).encode() + body
