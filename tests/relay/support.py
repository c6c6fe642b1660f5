"""A policy that does as scripted, and a client that sees every byte, both real and on this machine."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from aiohttp import web
from anyio.abc import SocketStream, TaskGroup
from pydantic import SecretStr

from harness.models import CallRecord
from harness.policy.resolve import Policy
from harness.relay.egress import EgressRecord
from harness.relay.relay import Lease, Relay
from harness.relay.settings import CallLimits, RelaySettings

KEY = "sk-policy-key-0123456789/abc"
QUICK = RelaySettings(retry_first_s=0.01, retry_max_s=0.05, attempts=3, connect_timeout_s=5)

Step = Callable[[web.BaseRequest, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One request as the policy got it."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


class ScriptedPolicy:
    """Takes one step of the script for each request; the last step is repeated."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self._steps = list(steps)
        self.seen: list[Seen] = []
        self.cancelled = anyio.Event()
        """Set when a client went away before its answer was whole."""
        self.url = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.seen.append(Seen(request.path, request.headers, body))
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        try:
            return await step(request, body)
        except (anyio.get_cancelled_exc_class(), ConnectionError):
            self.cancelled.set()
            raise

    def policy(self) -> Policy:
        return Policy(name="test/m", base_url=self.url, model="the-model", key=SecretStr(KEY))


@asynccontextmanager
async def scripted(*steps: Step) -> AsyncIterator[ScriptedPolicy]:
    policy = ScriptedPolicy(steps)
    server = web.Server(policy.handle, handler_cancellation=True)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        policy.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield policy
    finally:
        await runner.cleanup()


# -- steps


def completion(content: str = "hello", finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    top = {"id": "c1", "object": "chat.completion", "created": 1, "model": "the-model"}
    return {**top, "choices": [{**choice, **more.pop("choice", {})}], "usage": usage, **more}


def says(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Step:
    """Answer with JSON, or with bytes as they are."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()

    async def step(request: web.BaseRequest, _: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"Content-Type": "application/json", **(headers or {})})

    return step


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more.pop("choice", {})}
    top = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "the-model"}
    return b"data: " + json.dumps({**top, "choices": [choice], **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
HELLO = (chunk({"role": "assistant", "content": "hel"}), chunk({"content": "lo"}), chunk({}, "stop"))


def streams(*pieces: bytes | float | str) -> Step:
    """Stream bytes; a number sleeps, "cut" drops the connection, "hold" waits for ever."""

    async def step(request: web.BaseRequest, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for piece in pieces:
            if isinstance(piece, bytes):
                await response.write(piece)
            elif piece == "cut":
                response._payload_writer.send_headers()  # type: ignore[union-attr]
                await anyio.sleep(0.05)
                assert request.transport is not None
                request.transport.close()
                return response
            else:
                await anyio.sleep(piece if isinstance(piece, float) else 60)
        return response

    return step


def waits(seconds: float, then: Step) -> Step:
    async def step(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        await anyio.sleep(seconds)
        return await then(request, body)

    return step


def raw(*pieces: bytes) -> Step:
    """Write bytes that are not HTTP, or only part of it, and drop the connection."""

    async def step(request: web.BaseRequest, _: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        for piece in pieces:
            request.transport.write(piece)
        request.transport.close()
        return web.Response()

    return step


# -- the sandbox's side


async def until(true: Callable[[], object]) -> None:
    with anyio.fail_after(10):
        while not true():
            await anyio.sleep(0.01)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool
    """Whether the body came to its end as HTTP says it."""

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        lines = [line[6:] for line in self.body.splitlines() if line.startswith(b"data: ")]
        return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


@dataclass
class Peer:
    """One connection of the sandbox."""

    stream: SocketStream
    token: str
    buffer: bytes = b""
    everything: bytearray = field(default_factory=bytearray)

    async def ask(self, **fields: Any) -> Reply:
        """A chat completion with a message, and its answer."""
        await self.post({"model": "whatever", "messages": [{"role": "user", "content": "hi"}], **fields})
        return await self.reply()

    async def post(self, body: Any, path: str = "/v1/rollouts/r1/chat/completions", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Host": "relay", "Authorization": f"Bearer {self.token}", "Content-Length": str(len(data))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await self.stream.send(head.encode() + b"\r\n" + data)

    async def reply(self) -> Reply:
        with anyio.fail_after(20):
            head = await self._until(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
            status = int(lines[0].split()[1])
            if "content-length" in headers:
                length = int(headers["content-length"])
                body, whole = await self._exactly(length)
            else:
                body, whole = await self._chunks()
            return Reply(status, headers, body, whole)

    async def _chunks(self) -> tuple[bytes, bool]:
        body = b""
        while True:
            try:
                size = int(await self._until(b"\r\n"), 16)
            except anyio.EndOfStream:
                return body, False
            data, whole = await self._exactly(size + 2)
            body += data[:size] if whole else data
            if not whole:
                return body, False
            if size == 0:
                return body, True

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            await self._more()
        found, _, self.buffer = self.buffer.partition(mark)
        return found

    async def _exactly(self, size: int) -> tuple[bytes, bool]:
        try:
            while len(self.buffer) < size:
                await self._more()
        except anyio.EndOfStream:
            return self.buffer, False
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data, True

    async def _more(self) -> None:
        try:
            data = await self.stream.receive()
        except (anyio.BrokenResourceError, ConnectionError):
            raise anyio.EndOfStream from None
        self.buffer += data
        self.everything += data

    async def closed(self) -> bool:
        """Whether the relay closes the connection without another byte."""
        with anyio.fail_after(15):
            try:
                await self._more()
            except anyio.EndOfStream:
                return True
        return False


@dataclass
class Box:
    """A lease, and connections to it."""

    relay: Relay
    lease: Lease
    records: list[CallRecord]
    egress: list[EgressRecord]
    tasks: TaskGroup

    async def connect(self) -> Peer:
        ours, theirs = socket.socketpair()
        self.tasks.start_soon(self.lease.serve, await SocketStream.from_socket(ours))
        return Peer(await SocketStream.from_socket(theirs), self.lease.token)

    async def recorded(self, count: int) -> list[CallRecord]:
        """The records, once there are that many."""
        await until(lambda: len(self.records) >= count)
        return self.records


@asynccontextmanager
async def box(
    policy: Policy,
    settings: RelaySettings = QUICK,
    *,
    limits: CallLimits | None = None,
    allow: tuple[str, ...] = (),
    sampling: Mapping[str, Any] | None = None,
) -> AsyncIterator[Box]:
    records: list[CallRecord] = []
    egress: list[EgressRecord] = []
    async with Relay(policy, settings, sampling=sampling or {}) as relay, anyio.create_task_group() as tasks:
        lease = Lease(relay, on_call=records.append, on_egress=egress.append, allow=allow, limits=limits)
        yield Box(relay, lease, records, egress, tasks)
        await lease.revoke()
        tasks.cancel_scope.cancel()
