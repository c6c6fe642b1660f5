"""One model call, from the request that the sandbox sent to the last byte it got and the record of it."""

from __future__ import annotations

import time
from typing import Any

import anyio
from aiohttp import web
from pydantic_core import to_json

from harness.models import CallRecord, Failure
from harness.relay.capture import Merger, Tokens, bounded, tokens_of
from harness.relay.request import ModelCall, load_json
from harness.relay.serve import StreamTransport
from harness.relay.settings import CallLimits, RelaySettings
from harness.relay.sse import DONE, PING, EventCutter, as_stream, error_event, payloads
from harness.relay.upstream import Answer, Upstream, UpstreamFailure

_FORWARDED = ("x-rollout-id", "x-sample-id", "x-request-id")
"""Headers of the sandbox that reach the policy. All others are dropped: its token, cookies, whatever might route."""
_END_S = 0.05
"""How long to wait for the end of a stream after [DONE], so that the connection to the policy can be used again."""


class Call:
    """Asks the policy once for a sandbox, and gives the answer down as faithfully as HTTP allows."""

    def __init__(
        self,
        index: int,
        request: web.BaseRequest,
        call: ModelCall,
        size: int,
        upstream: Upstream,
        settings: RelaySettings,
        limits: CallLimits,
    ) -> None:
        assert isinstance(request.transport, StreamTransport)
        self._transport = request.transport
        self._index, self._request, self._call, self._size = index, request, call, size
        self._upstream, self._settings, self._limits = upstream, settings, limits
        self._began = time.monotonic()
        self._started_at = time.time()
        self._attempts = 0
        self._first_byte_s: float | None = None
        self._status: int | None = None
        self._merger = Merger()
        self._response: dict[str, Any] | None = None
        self._response_size = 0
        self._finished = False
        self._complete = False
        self.error: UpstreamFailure | None = None

    async def run(self) -> web.StreamResponse:
        """Answer the request. Raises only cancellation, and ConnectionError when the sandbox went away."""
        return await (self._streamed() if self._call.stream else self._plain())

    # -- towards the policy

    async def _open(self) -> Answer:
        headers = {name: self._request.headers[name] for name in _FORWARDED if name in self._request.headers}
        return await self._upstream.open(self._call.chat, self._call.body, headers, self._count)

    def _count(self) -> None:
        self._attempts += 1

    async def _whole(self, answer: Answer) -> tuple[bytes, dict[str, Any]]:
        """A plain answer as bytes and as a completion."""
        data = await answer.read(self._limits.response_bytes)
        self._first_byte()
        self._response_size = len(data)
        try:
            value = load_json(data)
        except ValueError:
            value = None
        choices = value.get("choices") if isinstance(value, dict) else None
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
            raise self._upstream.garbage(data)
        self._response = value
        self._finished = choices[0].get("finish_reason") is not None
        return data, value

    async def _events(self, answer: Answer, down: Downstream | None) -> None:
        """Read a streamed answer to its end, handing whole events down as they come."""
        cutter = EventCutter()
        while piece := await answer.piece():
            self._first_byte()
            self._response_size += len(piece)
            if self._response_size > self._limits.response_bytes:
                raise self._upstream.too_large(self._limits.response_bytes)
            whole = cutter.feed(piece)
            if whole and await self._pass(whole, answer, down):
                with anyio.move_on_after(_END_S):
                    await answer.piece()
                break
        else:
            await self._pass(cutter.rest(), answer, down, last=True)
        if not self._finished:
            raise self._upstream.unfinished()

    async def _pass(self, whole: bytes, answer: Answer, down: Downstream | None, *, last: bool = False) -> bool:
        """Merge events and hand them down; says whether the stream is done. The ``last`` may lack its blank line."""
        whole = self._upstream.scrub(whole)
        merger, done = self._merger, False
        for data in payloads(whole):
            done = done or data == DONE
            if not done and not merger.feed(data) and last:
                raise self._upstream.unfinished()
        if last and whole:
            whole += b"\n\n"
        self._finished = merger.finished and merger.error is None
        if (done or last) and merger.error is None and not merger.finished:
            raise self._upstream.unfinished()  # before [DONE] goes down, which clients take for a good end
        if down is not None and whole:
            await down.send(whole, answer.content_type)
        if merger.error is not None:
            failure = self._upstream.said(merger.error)
            if down is not None:
                down.told = True
            raise failure
        return done

    # -- towards the sandbox

    async def _plain(self) -> web.StreamResponse:
        try:
            answer = await self._open()
            try:
                if answer.is_stream:  # asked for a plain answer all the same
                    await self._events(answer, None)
                    self._response = self._merger.result()
                    data, kind = to_json(self._response), "application/json"
                else:
                    (data, _), kind = await self._whole(answer), answer.content_type
            finally:
                answer.close()
        except UpstreamFailure as failure:
            return await self._fail(failure)
        response = await self._reply(answer.status, data, {"Content-Type": kind})
        self._complete = self._finished and not self._transport.unsent
        return response

    async def _streamed(self) -> web.StreamResponse:
        down = Downstream(self._request, self._settings)
        failure: UpstreamFailure | None = None
        lost: ConnectionError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(down.beat)
            try:
                await self._pump(down)
            except UpstreamFailure as error:
                failure = error
            except ConnectionError as error:
                lost = error
            finally:
                self._status = 200 if down.response else None
            tasks.cancel_scope.cancel()
        if lost is not None:
            raise lost
        if failure is not None and down.response is None:
            return await self._fail(failure)
        assert down.response is not None
        if failure is not None:
            self.error = failure
            if not down.told:
                await down.send(error_event(failure.body))
            # No terminating chunk: a client must not take this for the end of an answer.
            self._transport.close()
            return down.response
        await down.response.write_eof()
        await self._transport.flush()
        self._complete = self._finished and not self._transport.unsent
        return down.response

    async def _pump(self, down: Downstream) -> None:
        answer = await self._open()
        try:
            if answer.is_stream:
                await self._events(answer, down)
            else:  # some servers ignore "stream"
                _, completion = await self._whole(answer)
                await down.send(as_stream(completion))
        finally:
            answer.close()

    async def _fail(self, failure: UpstreamFailure) -> web.StreamResponse:
        self.error = failure
        headers = failure.headers | {"Content-Type": failure.content_type, "x-should-retry": "false"}
        return await self._reply(failure.status, failure.body, headers)

    async def _reply(self, status: int, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        response = web.Response(status=status, body=body, headers=headers)
        await response.prepare(self._request)
        self._status = status
        await response.write_eof()
        await self._transport.flush()
        return response

    # -- what is left

    def _first_byte(self) -> None:
        if self._first_byte_s is None:
            self._first_byte_s = time.monotonic() - self._began

    def failure(self) -> Failure | None:
        """The policy's failure, when the sandbox got to see it."""
        if self.error is None or self._status is None:
            return None
        error = self.error.error
        return Failure(
            party=error.party,
            category=error.category,
            kind=type(error).__name__,
            message=str(error),
            retryable=error.retryable,
        )

    def tokens(self) -> Tokens:
        if self._response is None:
            self._response = self._merger.result()
        return tokens_of(self._response)

    def record(self, tokens: Tokens) -> CallRecord:
        limit = self._settings.record_bytes
        request, cut = bounded(self._call.fields, self._size, limit)
        response, response_cut = bounded(self._response, self._response_size, limit)
        error = self.error.error.message if self.error else None
        if error is None and not self._complete and self._status is None:
            error = "the sandbox went away before the answer"
        return CallRecord(
            index=self._index,
            attempt=self._attempts,
            client_retry=client_retry(self._request),
            path=path_of(self._request),
            stream=self._call.stream,
            request=request,
            status=self._status,
            response=response,
            error=error,
            complete=self._complete,
            started_at=self._started_at,
            first_byte_s=self._first_byte_s,
            duration_s=time.monotonic() - self._began,
            prompt_tokens=tokens.prompt,
            completion_tokens=tokens.completion,
            prompt_token_ids=tokens.prompt_ids,
            completion_token_ids=tokens.completion_ids,
            logprobs=tokens.logprobs,
            tokens_complete=tokens.complete,
            truncated=cut or response_cut,
        )


class Downstream:
    """A streamed answer towards the sandbox: begun as late as possible, never silent for long after that."""

    def __init__(self, request: web.BaseRequest, settings: RelaySettings) -> None:
        self._request, self._settings = request, settings
        self._last = anyio.current_time()
        self.response: web.StreamResponse | None = None
        """Null until the first byte: up to then the policy's true status can still go down."""
        self.told = False
        """Whether the sandbox has been sent the policy's own error event."""

    async def send(self, data: bytes, content_type: str = "text/event-stream") -> None:
        """Send whole events.

        :raises ConnectionError: the sandbox went away.
        """
        if self.response is None:
            headers = {"Content-Type": content_type, "Cache-Control": "no-cache, no-transform"}
            self.response = web.StreamResponse(headers=headers)
            self.response.enable_chunked_encoding()
            await self.response.prepare(self._request)
        self._last = anyio.current_time()
        await self.response.write(data)

    async def beat(self) -> None:
        """Send a comment whenever nothing was sent for a while, until cancelled."""
        settings = self._settings
        while True:
            due = self._last + (settings.bootstrap_s if self.response is None else settings.heartbeat_s)
            await anyio.sleep_until(due)
            quiet = settings.bootstrap_s if self.response is None else settings.heartbeat_s
            if anyio.current_time() - self._last < quiet:
                continue
            if self._request.protocol.writing_paused:  # it has enough to read
                self._last = anyio.current_time()
                continue
            try:
                await self.send(PING)
            except ConnectionError:
                return


def path_of(request: web.BaseRequest) -> str:
    return request.path[:256]


def client_retry(request: web.BaseRequest) -> int:
    """How often the client says it has tried this before."""
    value = request.headers.get("x-stainless-retry-count", "")
    return int(value) if value.isdecimal() and value.isascii() and len(value) < 6 else 0
