"""The guest as the host sees it: typed messages, each awaited with a deadline. ``harness.guest`` explains them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import anyio
from anyio.abc import ByteStream
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.background import Background
from harness.channel.channel import Channel, ChannelStream
from harness.errors import ChannelClosed, ChannelError, EntryPointError, ProtocolError
from harness.guest import PROTOCOL
from harness.models import Message, Sample

MAX_TEXT = 64 * 1024


class _Untrusted(BaseModel):
    """What a sandbox says. Unknown keys are ignored, types are checked, sizes are bounded by the wire."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ErrorInfo(_Untrusted):
    """An exception of the rollout's code."""

    types: list[str] = Field(min_length=1, max_length=64)
    message: str = ""
    traceback: str = ""
    status_code: int | None = None
    category: str | None = None


class Hello(_Untrusted):
    version: int
    python: str


class Loaded(_Untrusted):
    """Whether the entry point could be imported, and what it wires."""

    ok: bool
    sdk: str = ""
    workflow: str | None = None
    grader: str | None = None
    error: ErrorInfo | None = None
    import_s: float = 0.0


class Probed(_Untrusted):
    """How one request through the sandbox's loopback port went."""

    status: int | None
    body: str = ""
    error: str | None = None


class Ended(_Untrusted):
    """How the workflow ended."""

    how: Literal["returned", "raised", "exited", "signaled", "timeout", "cancelled", "out_of_memory"]
    samples: list[Sample] = Field(default=[], max_length=1000)
    labelled: bool = False
    """The workflow returned its messages itself, so grading puts the label on the sample, as the SDK does."""
    error: ErrorInfo | None = None
    code: int | None = None
    signal: int | None = None
    agent_s: float = 0.0
    peak_mib: float = 0.0


class Exported(_Untrusted):
    files: int = 0
    bytes: int = 0
    skipped: list[dict[str, str]] = Field(default=[], max_length=1000)


_REPLIES: dict[str, type[_Untrusted]] = {
    "hello": Hello,
    "loaded": Loaded,
    "probed": Probed,
    "ended": Ended,
    "exported": Exported,
}

OnLog = Callable[[str, str, int], None]
"""Takes the source ("stdout" or "stderr"), the text, and how many bytes have been left out so far."""


class Guest:
    """Drives one guest over its sandbox's byte stream, for as long as the ``async with`` lasts.

    :param transport: the sandbox's byte stream.
    :param serve: awaited for each connection of the sandbox to its loopback port.
    :param lease_s: the guest ends when it hears nothing for this long; it is pinged three times as often, and given up
        when it has said nothing for twice as long.
    """

    def __init__(
        self, transport: ByteStream, *, serve: Callable[[ByteStream], Awaitable[None]], on_log: OnLog, lease_s: float
    ) -> None:
        self._channel = Channel(transport, self._on_message, self._on_stream, self._wake)
        self._serve = serve
        self._on_log = on_log
        self._lease_s = lease_s
        self._replies: dict[str, _Untrusted] = {}
        self._arrived = anyio.Event()
        self._export: Callable[[ByteStream], Awaitable[None]] | None = None
        self._received = anyio.Event()
        self._background = Background()

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        self._heard = anyio.current_time()
        tasks = await self._background.__aenter__()
        tasks.start_soon(self._ping)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._background.__aexit__(kind, error, trace)
        finally:
            await self._channel.__aexit__(kind, error, trace)

    @property
    def alive(self) -> bool:
        """Whether the channel is still of use."""
        return self._channel.error is None

    async def hello(self, timeout: float) -> Hello:
        """Wait for the guest's first word.

        :raises ProtocolError: it speaks another version.
        """
        hello = await self._reply(Hello, timeout)
        if hello.version != PROTOCOL:
            raise ProtocolError(
                f"the guest speaks protocol {hello.version}, this harness {PROTOCOL}",
                hint="the environment was built by another version; remove it with `harness images prune`",
            )
        return hello

    async def load(
        self,
        *,
        entrypoint: str,
        code: bytes,
        env: Mapping[str, str],
        token: str,
        log_bytes: int,
        proxy: bool,
        timeout: float,
    ) -> Loaded:
        """Copy the code (a tar) in and have the entry point imported.

        :raises EntryPointError: that ended the process: ``os._exit``, a crash, too much memory.
        """
        self._channel.send(
            {
                "type": "load",
                "entrypoint": entrypoint,
                "env": dict(env),
                "token": token,
                "log_bytes": log_bytes,
                "proxy": proxy,
            }
        )
        stream = self._channel.open("code")
        with anyio.fail_after(timeout):
            try:
                await stream.send(code)
                await stream.send_eof()
            except anyio.BrokenResourceError:
                raise self._channel.error or ChannelClosed("the guest did not take the code") from None
        return await self._reply(Loaded, timeout)

    async def probe(self, path: str, body: Mapping[str, Any], timeout: float) -> Probed:
        """POST once from inside the sandbox to its loopback port."""
        self._channel.send({"type": "probe", "path": path, "body": dict(body), "timeout_s": timeout})
        return await self._reply(Probed, timeout + 5)

    async def run(
        self,
        *,
        rollout_id: str,
        prompt: list[Message],
        metadata: Mapping[str, Any] | None,
        timeout: float | None,
        margin_s: float = 30.0,
    ) -> Ended:
        """Run the workflow to its end. The guest keeps the deadline; ``margin_s`` after it this side stops waiting.

        :raises ChannelError: the sandbox went away.
        :raises TimeoutError: the guest is silent long after the deadline.
        """
        self._channel.send(
            {"type": "run", "rollout_id": rollout_id, "prompt": prompt, "metadata": metadata, "timeout_s": timeout}
        )
        return await self._reply(Ended, None if timeout is None else timeout + margin_s)

    def cancel(self, grace_s: float) -> None:
        """Ask for the workflow's end; ``run`` then returns."""
        if self._channel.error is None:
            self._channel.send({"type": "cancel", "grace_s": grace_s})

    async def export(
        self, receive: Callable[[ByteStream], Awaitable[None]], timeout: float, folder: str = "artifacts"
    ) -> Exported:
        """End whatever still runs in the sandbox and take one of its folders out; ``receive`` gets the tar."""
        self._export, self._received = receive, anyio.Event()
        self._channel.send({"type": "export", "folder": folder})
        exported = await self._reply(Exported, timeout)
        with anyio.fail_after(timeout):
            await self._received.wait()
        return exported

    def exit(self) -> None:
        """Ask the guest to end now, without waiting."""
        if self._channel.error is None:
            self._channel.send({"type": "exit"})

    async def _ping(self) -> None:
        number = 0
        while self._channel.error is None:
            await anyio.sleep(self._lease_s / 3)
            if self._channel.error is None:
                number += 1
                self._channel.send({"type": "ping", "n": number})
            if anyio.current_time() - self._heard > 2 * self._lease_s:
                self._channel.fail(ChannelClosed(f"the guest has been silent for {2 * self._lease_s:g} s"))

    async def _reply[R: _Untrusted](self, kind: type[R], timeout: float | None) -> R:
        name = kind.__name__.lower()
        with anyio.fail_after(timeout):
            while name not in self._replies:
                if kind is Loaded and isinstance(ended := self._replies.get("ended"), Ended):
                    how = ended.how if ended.code is None else f"exit status {ended.code}"
                    raise EntryPointError(f"the entry point ended its process while it was imported ({how})")
                if self._channel.error is not None:
                    raise self._channel.error
                await self._arrived.wait()
        reply = self._replies.pop(name)
        assert isinstance(reply, kind)
        return reply

    def _on_message(self, message: dict[str, Any]) -> None:
        self._heard = anyio.current_time()
        kind = message["type"]
        if kind == "log":
            source, text, dropped = message.get("source"), message.get("text"), message.get("dropped")
            if source not in ("stdout", "stderr") or not isinstance(text, str) or not isinstance(dropped, int):
                raise ProtocolError("the guest sent a log message that is none")
            self._on_log(source, text, dropped)
        elif kind in _REPLIES:
            try:
                reply = _REPLIES[kind].model_validate(message)
            except ValidationError as error:
                first = error.errors()[0]
                raise ProtocolError(
                    f"the guest's {kind!r} message is wrong at {first['loc']}: {first['msg']}"
                ) from None
            if kind in self._replies:
                raise ProtocolError(f"the guest said {kind!r} twice")
            self._replies[kind] = reply
            self._wake()
        elif kind != "pong":
            raise ProtocolError(f"the guest sent an unknown message {kind[:40]!r}")

    async def _on_stream(self, purpose: str, stream: ChannelStream) -> None:
        try:
            if purpose == "http":
                await self._serve(stream)
            elif purpose == "export" and self._export is not None:
                receive, self._export = self._export, None
                try:
                    await receive(stream)
                finally:
                    self._received.set()
        except ChannelError as error:
            self._channel.fail(error)
        finally:
            stream.drop()

    def _wake(self) -> None:
        arrived, self._arrived = self._arrived, anyio.Event()
        arrived.set()
