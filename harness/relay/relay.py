"""The relay: what answers a sandbox's model calls from the policy, and what each sandbox is allowed."""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import anyio
from aiohttp import web
from anyio.abc import ByteStream

from harness.models import CallRecord, Failure, Usage
from harness.policy.resolve import Policy
from harness.relay.call import Call
from harness.relay.capture import Tokens
from harness.relay.egress import EgressRecord, Rules, is_connect, serve_connect
from harness.relay.request import Refusal, error_body, parse_call
from harness.relay.serve import GONE, HttpConnection, StreamTransport
from harness.relay.settings import CallLimits, RelaySettings
from harness.relay.upstream import Upstream

log = logging.getLogger(__name__)

_SETTLE_S = 5.0
"""How long a cancelled call may take to write its record."""
_MAX_REFUSALS = 100
"""Refused calls that are recorded; a sandbox could make any number of them."""


class Relay:
    """Answers model calls from one policy. An async context manager that owns the connections to it.

    :param policy: which model answers.
    :param settings: how patient to be.
    :param sampling: fields put into requests that do not set them: ``temperature``, or ``return_token_ids`` and
        ``logprobs`` for a policy that gives token ids.
    """

    def __init__(
        self, policy: Policy, settings: RelaySettings | None = None, *, sampling: Mapping[str, Any] | None = None
    ) -> None:
        self.settings = settings or RelaySettings()
        self.sampling = dict(sampling or {})
        self.upstream = Upstream(policy, self.settings)

    async def __aenter__(self) -> Self:
        await self.upstream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.upstream.__aexit__(*error)


class Lease:
    """One sandbox's right to call the policy, until it is revoked.

    :param on_call: takes the record of each call when the call is over, which for concurrent calls is not the order
        of ``index``. Called from the event loop; must neither block nor raise.
    :param on_egress: takes the record of each attempt to reach an allowed host.
    :param allow: hosts that the sandbox may reach through ``CONNECT``, see ``harness.relay.egress``.
    :raises ConfigError: ``allow`` holds something that is no host.
    """

    def __init__(
        self,
        relay: Relay,
        *,
        on_call: Callable[[CallRecord], None],
        on_egress: Callable[[EgressRecord], None],
        allow: tuple[str, ...] = (),
        limits: CallLimits | None = None,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.failure: Failure | None
        """How the policy failed the call that ended last; null if it did not."""
        self._relay, self._limits, self._rules = relay, limits or CallLimits(), Rules(allow)
        self._upstream = relay.upstream
        self._on_call, self._on_egress = on_call, on_egress
        self._server = web.Server(self._handle, handler_cancellation=True)
        self._connections: set[anyio.CancelScope] = set()
        self._ended = anyio.Event()
        self._revoked = False
        self._open = 0
        self._open_since = 0.0
        self.restart()

    def restart(self) -> None:
        """Forget the calls so far: they were a check, and no trial's."""
        self.failure = None
        self._latest: Call | None = None
        self.usage = Usage()
        """What the calls that are over have used."""
        self._index = self._refused = 0
        self._policy_s = 0.0

    @property
    def policy_s(self) -> float:
        """Seconds in which at least one call was open."""
        return self._policy_s + (time.monotonic() - self._open_since if self._open else 0.0)

    @property
    def unanswered(self) -> Failure | None:
        """The policy's part in what ended just now: nothing has come of the latest call. Null where something has."""
        return self._latest.unanswered() if self._latest is not None else None

    def route(self, policy: Policy) -> None:
        """Have this sandbox's calls answered by another policy than the relay's own from now on."""
        self._upstream = self._relay.upstream.towards(policy)

    async def serve(self, stream: ByteStream) -> None:
        """Serve one connection from the sandbox until it closes, then close the stream.

        Never raises for anything that the peer or the policy does.
        """
        scope = anyio.CancelScope()
        try:
            if len(self._connections) < self._limits.connections:
                self._connections.add(scope)
                with scope:
                    await self._serve(stream)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_SETTLE_S):
                await stream.aclose()
            self._connections.discard(scope)
            if not self._connections:
                self._ended.set()

    async def revoke(self) -> None:
        """Drop open calls and connections, and wait until their records are written. Anything later is refused."""
        self._revoked = True
        if self._connections:
            self._ended = anyio.Event()
            for scope in self._connections:
                scope.cancel()
            with anyio.CancelScope(shield=True), anyio.move_on_after(2 * _SETTLE_S):
                await self._ended.wait()

    async def _serve(self, stream: ByteStream) -> None:
        first = b""
        try:
            while len(first) < 8 and (not first or is_connect(first)):
                first += await stream.receive()
        except GONE:
            return
        if is_connect(first):
            if not self._revoked:
                await serve_connect(stream, first, self._rules, self._on_egress)
            return
        connection = HttpConnection(self._server)
        try:
            await StreamTransport(stream, connection).run(first)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_SETTLE_S):
                await connection.idle.wait()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, HttpConnection)
        connection.idle = anyio.Event()
        try:
            return await self._answer(request)
        except Refusal as refusal:
            body = error_body(refusal.status, refusal.code, refusal.message)
            headers = {"x-should-retry": "false", "Content-Type": "application/json"}
            response = web.Response(status=refusal.status, body=body, headers=headers)
            if refusal.status in (401, 408, 413, 505):
                response.force_close()
            return response
        except ConnectionError:  # the sandbox went away
            raise
        except Exception:
            log.exception("a request could not be handled")
            raise
        finally:
            connection.idle.set()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._revoked or not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise Refusal(401, "invalid_api_key", "This token is not valid here, or its trial has ended")
        if not self._upstream.policy.base_url:
            raise Refusal(503, "no_policy", "No model answers here: none was given, or the trial has not begun")
        if request.version < (1, 1):  # without chunks, a cut answer could not be told from a whole one
            raise Refusal(505, "http_version", "HTTP/1.1 is required")
        if request.method == "POST" and request.path.endswith("/completions"):
            return await self._complete(request)
        if request.method == "GET" and request.path.endswith("/models"):
            model = {"id": self._upstream.policy.model, "object": "model", "created": 0, "owned_by": "policy"}
            return web.json_response({"object": "list", "data": [model]})
        raise Refusal(
            404,
            "not_found",
            f"{request.method} {request.path[:256]} is not served here. "
            "There is POST …/chat/completions, POST …/completions and GET …/models",
        )

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        upstream, relay = self._upstream, self._relay
        call = Call(request, upstream, relay.settings, self._limits)
        try:
            raw = upstream.scrub(await self._body(request))
            self._check_limits()
            fields = parse_call(raw, model=upstream.policy.model, sampling=relay.sampling)
        except Refusal as refusal:
            call.refuse(refusal)
            self._refused += 1
            if self._refused <= _MAX_REFUSALS:
                self._emit(call.record(self._next_index(), Tokens()))
            raise
        self._latest = call
        index = self._next_index()
        if not self._open:
            self._open_since = time.monotonic()
        self._open += 1
        try:
            return await call.run(fields)
        finally:
            self._open -= 1
            if not self._open:
                self._policy_s += time.monotonic() - self._open_since
            tokens = call.tokens()
            record = call.record(index, tokens)
            self.usage = Usage(
                calls=self.usage.calls + 1,
                failed_calls=self.usage.failed_calls + (not record.complete),
                prompt_tokens=self.usage.prompt_tokens + (tokens.prompt_tokens or 0),
                completion_tokens=self.usage.completion_tokens + (tokens.completion_tokens or 0),
            )
            self.failure = call.failure
            self._emit(record)

    async def _body(self, request: web.BaseRequest) -> bytes:
        limit = self._limits.request_bytes
        body = bytearray()
        try:
            with anyio.fail_after(self._relay.settings.idle_timeout_s):
                while piece := await request.content.readany():
                    body += piece
                    if len(body) > limit:
                        raise Refusal(413, "request_too_large", f"The request body is larger than {limit} bytes")
        except TimeoutError:
            raise Refusal(408, "request_timeout", "The request body did not arrive in time") from None
        except web.RequestPayloadError as error:
            raise Refusal(400, "bad_request", f"The request body is broken: {error}") from None
        return bytes(body)

    def _check_limits(self) -> None:
        limits = self._limits
        if self._open >= limits.concurrent:
            raise Refusal(429, "concurrency_limit", f"The trial already has {limits.concurrent} calls open")
        if self.usage.calls + self._open >= limits.calls:
            raise Refusal(429, "call_limit", f"The trial has made its {limits.calls} calls")

    def _next_index(self) -> int:
        self._index += 1
        return self._index - 1

    def _emit(self, record: CallRecord) -> None:
        try:
            self._on_call(record)
        except Exception:  # a full disk must not look like a broken policy to the workflow
            log.exception("the record of call %d could not be handed over", record.index)
