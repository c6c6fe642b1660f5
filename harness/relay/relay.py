"""The relay: what answers a sandbox's model calls from the policy, and what each sandbox is allowed."""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import anyio
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from anyio.abc import ByteStream

from harness.models import CallRecord, Failure, Usage
from harness.policy.resolve import Policy
from harness.relay.call import Call, client_retry, path_of
from harness.relay.capture import Tokens
from harness.relay.egress import EgressRecord, Rules, is_connect, serve_connect
from harness.relay.request import Refusal, parse_call
from harness.relay.serve import GONE, HttpConnection, StreamTransport
from harness.relay.settings import CallLimits, RelaySettings
from harness.relay.upstream import Upstream

log = logging.getLogger(__name__)

_SETTLE_S = 5.0
"""How long a cancelled call may take to write its record."""
_MAX_REFUSALS = 100
"""Refused calls that are recorded; a sandbox could make any number of them."""
_NO_SAMPLING: Mapping[str, Any] = MappingProxyType({})


class Relay:
    """Answers model calls from one policy. An async context manager that owns the connections to it.

    :param policy: which model answers.
    :param settings: how patient to be.
    :param sampling: fields put into requests that do not set them: ``temperature``, or ``return_token_ids`` and
        ``logprobs`` for a policy that gives token ids.
    """

    def __init__(
        self,
        policy: Policy,
        settings: RelaySettings | None = None,
        *,
        sampling: Mapping[str, Any] = _NO_SAMPLING,
    ) -> None:
        self.policy = policy
        self.settings = settings or RelaySettings()
        self.sampling = dict(sampling)
        self.upstream = Upstream(policy, self.settings)

    async def __aenter__(self) -> Self:
        await self.upstream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.upstream.__aexit__(*error)

    def admit(
        self,
        *,
        on_call: Callable[[CallRecord], None],
        allow: tuple[str, ...] = (),
        limits: CallLimits | None = None,
        on_egress: Callable[[EgressRecord], None] | None = None,
    ) -> Lease:
        """Give one sandbox the right to call the policy.

        :param on_call: takes the record of each call when the call is over, which for concurrent calls is not the order
            of ``index``. Called from the event loop; must neither block nor raise.
        :param allow: hosts that the sandbox may reach through ``CONNECT``, see ``harness.relay.egress``.
        :param on_egress: takes the record of each such attempt.
        :raises ConfigError: ``allow`` holds something that is no host.
        """
        return Lease(self, on_call, Rules(allow), limits or CallLimits(), on_egress)


class Lease:
    """One sandbox's right to call the policy, until it is revoked."""

    def __init__(
        self,
        relay: Relay,
        on_call: Callable[[CallRecord], None],
        rules: Rules,
        limits: CallLimits,
        on_egress: Callable[[EgressRecord], None] | None,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.failure: Failure | None = None
        """The last failure of the policy that reached the sandbox."""
        self._relay, self._limits, self._rules = relay, limits, rules
        self._upstream = relay.upstream
        self._on_call, self._on_egress = on_call, on_egress
        self._bearer = f"Bearer {self.token}".encode()
        self._server = web.Server(self._handle, request_factory=self._make_request, handler_cancellation=True)
        self._connections: set[anyio.CancelScope] = set()
        self._ended = anyio.Event()
        self._revoked = False
        self._calls = self._failed = self._prompt = self._completion = 0
        self._index = self._refused = self._open = 0
        self._open_since = self._policy_s = 0.0

    @property
    def usage(self) -> Usage:
        """What the calls that are over have used."""
        return Usage(
            calls=self._calls,
            failed_calls=self._failed,
            prompt_tokens=self._prompt,
            completion_tokens=self._completion,
        )

    @property
    def policy_s(self) -> float:
        """Seconds in which at least one call was open."""
        return self._policy_s + (time.monotonic() - self._open_since if self._open else 0.0)

    def route(self, policy: Policy) -> None:
        """Have this sandbox's calls answered by another policy than the relay's own from now on."""
        self._upstream = self._relay.upstream.towards(policy)

    async def serve(self, stream: ByteStream) -> None:
        """Serve one connection from the sandbox until it closes, then close the stream.

        Never raises for anything that the peer or the policy does.
        """
        scope = anyio.CancelScope()
        if len(self._connections) >= self._limits.connections:
            await anyio.aclose_forcefully(stream)
            return
        self._connections.add(scope)
        try:
            with scope:
                await self._serve(stream)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_SETTLE_S):
                if scope.cancel_called:
                    await anyio.aclose_forcefully(stream)
                else:
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
                await serve_connect(stream, first, self._rules, self._egress)
            return
        connection = HttpConnection(self._server)
        try:
            await StreamTransport(stream, connection).run(first)
        finally:
            if connection.idle is not None:
                with anyio.CancelScope(shield=True), anyio.move_on_after(_SETTLE_S):
                    await connection.idle.wait()

    def _egress(self, record: EgressRecord) -> None:
        log.info("egress %s", record.model_dump_json())
        if self._on_egress is not None:
            self._on_egress(record)

    def _make_request(
        self, message: RawRequestMessage, payload: Any, protocol: web.RequestHandler, writer: Any, task: Any
    ) -> web.BaseRequest:
        size = self._limits.request_bytes
        loop = task.get_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=size)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, HttpConnection)
        connection.idle = anyio.Event()
        try:
            return await self._answer(request)
        except Refusal as refusal:
            headers = {"x-should-retry": "false", "Content-Type": "application/json"}
            response = web.Response(status=refusal.status, body=refusal.body(), headers=headers)
            if refusal.status in (401, 413, 505):
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
        if self._revoked or not hmac.compare_digest(given, self._bearer):
            raise Refusal(401, "invalid_api_key", "This token is not valid here, or its trial has ended")
        if not self._upstream.policy.base_url:
            raise Refusal(503, "no_policy", "No model answers here: none was given, or the trial has not begun")
        if request.version < (1, 1):  # without chunks, a cut answer could not be told from a whole one
            raise Refusal(505, "http_version", "HTTP/1.1 is required")
        path = request.path
        if request.method == "POST" and path.endswith("/completions"):
            return await self._complete(request, chat=path.endswith("/chat/completions"))
        if request.method == "GET" and path.endswith("/models"):
            return self._models()
        raise Refusal(
            404,
            "not_found",
            f"{request.method} {path_of(request)} is not served here. "
            "There is POST …/chat/completions, POST …/completions and GET …/models",
        )

    def _models(self) -> web.StreamResponse:
        model = {"id": self._upstream.policy.model, "object": "model", "created": 0, "owned_by": "policy"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.BaseRequest, *, chat: bool) -> web.StreamResponse:
        relay = self._relay
        try:
            raw = self._upstream.scrub(await self._body(request))
            self._check_limits()
            call = parse_call(
                raw,
                chat=chat,
                model=self._upstream.policy.model,
                sampling=relay.sampling,
                ask_usage=relay.settings.ask_usage,
            )
        except Refusal as refusal:
            self._record_refusal(request, refusal)
            raise
        running = Call(self._next_index(), request, call, len(raw), self._upstream, relay.settings, self._limits)
        if not self._open:
            self._open_since = time.monotonic()
        self._open += 1
        try:
            return await running.run()
        finally:
            self._open -= 1
            if not self._open:
                self._policy_s += time.monotonic() - self._open_since
            tokens = running.tokens()
            record = running.record(tokens)
            self._count(record, tokens)
            self.failure = running.failure() or self.failure
            self._emit(record)

    async def _body(self, request: web.BaseRequest) -> bytes:
        limit = self._limits.request_bytes
        too_large = Refusal(413, "request_too_large", f"The request body is larger than {limit} bytes")
        if (request.content_length or 0) > limit:
            raise too_large
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            with anyio.fail_after(self._relay.settings.idle_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except TimeoutError:
            raise Refusal(408, "request_timeout", "The request body did not arrive in time") from None
        except web.RequestPayloadError as error:
            raise Refusal(400, "bad_request", f"The request body is broken: {error}") from None

    def _check_limits(self) -> None:
        limits = self._limits
        if self._open >= limits.concurrent:
            raise Refusal(429, "concurrency_limit", f"The trial already has {limits.concurrent} calls open")
        if self._calls + self._open >= limits.calls:
            raise Refusal(429, "call_limit", f"The trial has made its {limits.calls} calls")
        if limits.total_tokens is not None and self._prompt + self._completion >= limits.total_tokens:
            raise Refusal(429, "token_limit", f"The trial has used up its {limits.total_tokens} tokens")

    def _next_index(self) -> int:
        self._index += 1
        return self._index - 1

    def _count(self, record: CallRecord, tokens: Tokens) -> None:
        self._calls += 1
        self._failed += not record.complete
        self._prompt += tokens.prompt or 0
        self._completion += tokens.completion or 0

    def _record_refusal(self, request: web.BaseRequest, refusal: Refusal) -> None:
        self._refused += 1
        if self._refused > _MAX_REFUSALS:
            return
        self._emit(
            CallRecord(
                index=self._next_index(),
                attempt=0,
                client_retry=client_retry(request),
                path=path_of(request),
                stream=False,
                request=None,
                status=refusal.status,
                response=None,
                error=refusal.message,
                complete=False,
                started_at=time.time(),
                duration_s=0.0,
            )
        )

    def _emit(self, record: CallRecord) -> None:
        try:
            self._on_call(record)
        except Exception:  # a full disk must not look like a broken policy to the workflow
            log.exception("the record of call %d could not be handed over", record.index)
