"""One model call, from the request that the sandbox sent to the last byte it got and the record of it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import anyio
from aiohttp import web
from pydantic_core import to_json

from harness.models import CallRecord, Failure
from harness.relay.capture import Merger, Tokens, bounded, tokens_of
from harness.relay.request import Refusal, load_json
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
        self, request: web.BaseRequest, upstream: Upstream, settings: RelaySettings, limits: CallLimits
    ) -> None:
        assert isinstance(request.transport, StreamTransport)
        self._transport = request.transport
        self._request, self._upstream, self._settings, self._limits = request, upstream, settings, limits
        self._began, self._started_at = time.monotonic(), time.time()
        self._fields: dict[str, Any] | None = None
        self._body = b""
        self._attempts = 0
        self._trouble: UpstreamFailure | None = None
        """Why the policy was asked again last."""
        self._duration_s: float | None = None
        self._first_byte_s: float | None = None
        self._status: int | None = None
        self._merger = Merger()
        self._response: dict[str, Any] | None = None
        self._response_size = 0
        self._complete = False
        self._error: str | None = None
        self.failure: Failure | None = None
        """The policy's failure, when the sandbox got to see it."""

    def refuse(self, refusal: Refusal) -> None:
        """Note that the relay will not ask the policy this."""
        self._status, self._error = refusal.status, refusal.message

    async def run(self, fields: dict[str, Any]) -> web.StreamResponse:
        """Ask the policy and answer the request.

        :param fields: what the policy is asked.
        :raises ConnectionError: the sandbox went away.
        """
        self._fields, self._body = fields, to_json(fields)
        return await (self._streamed() if fields.get("stream") else self._plain())

    # -- towards the policy

    async def _open(self) -> Answer:
        path = "/chat/completions" if self._request.path.endswith("/chat/completions") else "/completions"
        headers = {name: self._request.headers[name] for name in _FORWARDED if name in self._request.headers}
        return await self._upstream.open(path, self._body, headers, self._count_attempt)

    def _count_attempt(self, failed: UpstreamFailure | None) -> None:
        if failed is None:
            self._attempts += 1
        else:
            self._trouble = failed

    def _count(self, data: bytes) -> None:
        if self._first_byte_s is None:
            self._first_byte_s = time.monotonic() - self._began
        self._response_size += len(data)
        if self._response_size > self._limits.response_bytes:
            raise self._upstream.too_large(self._limits.response_bytes)

    async def _whole(self, answer: Answer) -> tuple[bytes, dict[str, Any]]:
        """A plain answer as bytes and as a completion."""
        body = bytearray()
        while piece := await answer.piece():
            self._count(piece)
            body += piece
        data = self._upstream.scrub(bytes(body))
        try:
            value = load_json(data)
        except ValueError:
            value = None
        choices = value.get("choices") if isinstance(value, dict) else None
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
            raise self._upstream.garbage(data)
        self._response = value
        return data, value

    async def _events(self, answer: Answer, down: Downstream) -> None:
        """Read a streamed answer to its end, handing whole events down as they come."""
        cutter = EventCutter()
        while piece := await answer.piece():
            self._count(piece)
            if await self._pass(cutter.feed(piece), down):
                with anyio.move_on_after(_END_S):
                    await answer.piece()
                return
        await self._pass(cutter.end(), down)
        if not self._merger.finished:
            raise self._upstream.unfinished()

    async def _pass(self, events: bytes, down: Downstream) -> bool:
        """Merge whole events and hand them down; says whether the stream is done."""
        if not events:
            return False
        events = self._upstream.scrub(events)
        done = False
        for data in payloads(events):
            done = done or data == DONE
            # Nothing goes down that a client could take for a good end when it is none.
            if (not self._merger.finished) if done else (not self._merger.feed(data)):
                raise self._upstream.unfinished()
            if self._merger.error is not None:
                raise self._upstream.said(self._merger.error)
        await down.send(events)
        return done

    # -- towards the sandbox

    async def _plain(self) -> web.StreamResponse:
        try:
            answer = await self._open()
            try:
                data, completion = await self._whole(answer)
            finally:
                answer.close()
        except UpstreamFailure as failure:
            return await self._fail(failure)
        return await self._reply(answer.status, data, {}, finished=_is_finished(completion))

    async def _streamed(self) -> web.StreamResponse:
        down = Downstream(self._request, self._settings)
        finished = False
        problem: UpstreamFailure | ConnectionError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(down.beat)
            try:
                finished = await self._pump(down)
            except (UpstreamFailure, ConnectionError) as error:
                problem = error
            finally:
                self._status = 200 if down.response else None
            tasks.cancel_scope.cancel()
        if isinstance(problem, ConnectionError):
            raise problem
        if down.response is None:
            assert problem is not None
            return await self._fail(problem)
        if problem is not None:
            self._note(problem)
            await down.send(error_event(problem.body))
            # No terminating chunk: a client must not take this for the end of an answer.
            self._transport.close()
            return down.response
        await down.response.write_eof()
        self._complete = await self._transport.flush() and finished
        return down.response

    async def _pump(self, down: Downstream) -> bool:
        """Give the answer down as a stream; says whether it has a finish reason."""
        answer = await self._open()
        try:
            if answer.is_stream:
                await self._events(answer, down)
                return True
            _, completion = await self._whole(answer)  # some servers ignore "stream"
            await down.send(as_stream(completion))
            return _is_finished(completion)
        finally:
            answer.close()

    async def _fail(self, failure: UpstreamFailure) -> web.StreamResponse:
        headers = {"Content-Type": failure.content_type, "x-should-retry": "false"}
        if failure.retry_after is not None:
            headers["Retry-After"] = f"{failure.retry_after:.0f}"
        response = await self._reply(failure.status, failure.body, headers, finished=False)
        self._note(failure)
        return response

    def _note(self, failure: UpstreamFailure) -> None:
        error = failure.error
        self._error = error.message
        self.failure = Failure(
            party=error.party,
            category=error.category,
            kind=type(error).__name__,
            message=str(error),
            retryable=error.retryable,
        )

    async def _reply(self, status: int, body: bytes, headers: dict[str, str], *, finished: bool) -> web.StreamResponse:
        response = web.Response(status=status, body=body, headers={"Content-Type": "application/json"} | headers)
        await response.prepare(self._request)
        self._status = status
        await response.write_eof()
        self._complete = await self._transport.flush() and finished
        return response

    # -- what is left

    def unanswered(self) -> Failure | None:
        """What the policy owes: null once anything of an answer, or a failure, has come."""
        if self._first_byte_s is not None or self._error is not None:
            return None
        waited = self._duration_s if self._duration_s is not None else time.monotonic() - self._began
        text = f"the policy had not answered a model call after {waited:.1f} s"
        if self._trouble is not None:
            text += f"; before that: {self._trouble.error.message}"
        return Failure(party="policy", category="timeout", kind="Unanswered", message=text, retryable=True)

    def tokens(self) -> Tokens:
        if self._response is None:
            self._response = self._merger.result()
        return tokens_of(self._response)

    def record(self, index: int, tokens: Tokens) -> CallRecord:
        limit = self._settings.record_bytes
        request, cut = bounded(self._fields, len(self._body), limit)
        response, response_cut = bounded(self._response, self._response_size, limit)
        self._duration_s = time.monotonic() - self._began
        gone = "the sandbox went away before the answer" if self._status is None else None
        if gone and self._trouble is not None:
            gone += f"; before that: {self._trouble.error.message}"
        retries = self._request.headers.get("x-stainless-retry-count", "")
        return CallRecord(
            index=index,
            attempt=self._attempts,
            client_retry=int(retries) if retries.isdecimal() and len(retries) < 6 else 0,
            path=self._request.path[:256],
            stream=bool(self._fields and self._fields.get("stream")),
            request=request,
            status=self._status,
            response=response,
            error=self._error or gone,
            complete=self._complete,
            started_at=self._started_at,
            first_byte_s=self._first_byte_s,
            duration_s=self._duration_s,
            **tokens._asdict(),
            truncated=cut or response_cut,
        )


class Downstream:
    """A streamed answer towards the sandbox: begun as late as possible, never silent for long after that."""

    def __init__(self, request: web.BaseRequest, settings: RelaySettings) -> None:
        self._request, self._settings = request, settings
        self._last = anyio.current_time()
        self.response: web.StreamResponse | None = None
        """Null until the first byte: up to then the policy's true status can still go down."""

    async def send(self, events: bytes) -> None:
        """Send whole events.

        :raises ConnectionError: the sandbox went away.
        """
        if self.response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache, no-transform"}
            self.response = web.StreamResponse(headers=headers)
            self.response.enable_chunked_encoding()
            await self.response.prepare(self._request)
        self._last = anyio.current_time()
        await self.response.write(events)

    async def beat(self) -> None:
        """Send a comment whenever nothing was sent for a while, until cancelled or the sandbox went away."""
        with suppress(ConnectionError):
            while True:
                quiet_s = self._settings.bootstrap_s if self.response is None else self._settings.heartbeat_s
                rest = self._last + quiet_s - anyio.current_time()
                await (anyio.sleep(rest) if rest > 0 else self.send(PING))


def _is_finished(completion: dict[str, Any]) -> bool:
    return completion["choices"][0].get("finish_reason") is not None
