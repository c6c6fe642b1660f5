"""The way to the policy: one client session, and the only place where anything is asked a second time."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, Self

import aiohttp
import anyio
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential, wait_random
from yarl import URL

from harness.errors import PolicyError, PolicyRefused, PolicyUnreachable
from harness.policy.http import garbage, proxy_of, refused, request_headers, unreachable
from harness.policy.resolve import Policy
from harness.relay.request import error_body
from harness.relay.settings import RelaySettings

MAX_ERROR_BODY = 256 * 1024
_REDACTED = b"[REDACTED]"
_SHORTEST_SECRET = 8
"""Shorter ones ("EMPTY", "none") are placeholders, and replacing them would damage answers."""
_BROKEN = (TimeoutError, aiohttp.ClientError, OSError, ValueError)


class UpstreamFailure(Exception):
    """Raised when the policy gave no usable answer; carries what the sandbox is told."""

    def __init__(self, status: int, body: bytes, content_type: str, error: PolicyError) -> None:
        super().__init__(error.message)
        self.status, self.body, self.content_type, self.error = status, body, content_type, error
        self.headers: dict[str, str] = {}
        self.retry_after: float | None = None
        self.again = False
        """Whether asking again can help."""


class Upstream:
    """Owns the connections to the policy. An async context manager."""

    def __init__(self, policy: Policy, settings: RelaySettings) -> None:
        self.policy = policy
        self._settings = settings
        key = policy.key.get_secret_value() if policy.key else None
        self._headers = request_headers(key, policy.headers)
        self._urls = {chat: URL(f"{policy.base_url}{path}") for chat, path in _PATHS.items()}
        self._secrets = _secrets(key, policy.headers)
        self._proxy = proxy_of(policy.base_url)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        settings = self._settings
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=settings.call_timeout_s,
                sock_connect=settings.connect_timeout_s,
                sock_read=settings.idle_timeout_s,
            ),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.move_on_after(5, shield=True):
            if self._session is not None:
                await self._session.close()

    def towards(self, policy: Policy) -> Upstream:
        """The way to another policy over the same client session, for as long as this one is open."""
        other = Upstream(policy, self._settings)
        other._session = self._session
        return other

    def scrub(self, data: bytes) -> bytes:
        """The data without the policy's key."""
        for secret in self._secrets:
            if secret in data:
                data = data.replace(secret, _REDACTED)
        return data

    def content_type(self, response: aiohttp.ClientResponse) -> str:
        return self.scrub(response.headers.get("Content-Type", "").encode("utf-8", "replace")).decode()

    async def open(self, chat: bool, body: bytes, headers: dict[str, str], on_attempt: Callable[[], None]) -> Answer:
        """Send a request until there is an answer with a success status, its body still to be read.

        :param on_attempt: called before each request.
        :raises UpstreamFailure: no success within the bounds of the settings.
        """
        began = time.monotonic()

        async def attempt() -> Answer:
            on_attempt()
            return await self._request(chat, body, headers)

        def spent(state: RetryCallState) -> bool:
            wait = state.upcoming_sleep
            late = time.monotonic() - began + wait > self._settings.retry_budget_s
            return late or state.attempt_number >= self._settings.attempts

        try:
            return await attempt()
        except UpstreamFailure as first:
            if not first.again:
                raise
            failure = first
        # The machinery costs more than a quick call does, so it is only set up when there is something to repeat.
        pending: list[UpstreamFailure] = [failure]

        async def next_attempt() -> Answer:
            if pending:
                raise pending.pop()
            return await attempt()

        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, UpstreamFailure) and error.again),
            wait=self._wait,
            stop=spent,
            sleep=anyio.sleep,
            reraise=True,
        )
        return await retrying(next_attempt)

    def _wait(self, state: RetryCallState) -> float:
        settings = self._settings
        error = state.outcome.exception() if state.outcome else None
        spread = wait_exponential(settings.retry_first_s, settings.retry_max_s) + wait_random(0, settings.retry_first_s)
        asked = error.retry_after if isinstance(error, UpstreamFailure) else None
        return spread(state) if asked is None else max(min(asked, settings.retry_max_s), 0.01)

    async def _request(self, chat: bool, body: bytes, headers: dict[str, str]) -> Answer:
        assert self._session is not None
        url = self.policy.base_url
        try:
            response = await self._session.post(
                self._urls[chat],
                data=body,
                headers=self._headers | headers,
                allow_redirects=False,
                proxy=self._proxy,
            )
        except _BROKEN as error:
            raise self._no_answer(error) from error
        if response.status < 300:
            return Answer(response, self)
        try:
            data = self.scrub(await _read(response, MAX_ERROR_BODY))
        except _BROKEN as error:
            raise self._no_answer(error, again=False) from error
        finally:
            response.release()
        if response.status < 400:
            error_ = PolicyRefused(f"the policy at {url} redirects elsewhere (HTTP {response.status})")
            raise self._failure(502, error_)
        failure = UpstreamFailure(
            response.status,
            data,
            self.content_type(response) or "application/json",
            refused(url, self.policy.model, response.status, data),
        )
        failure.retry_after = _retry_after(response.headers.get("Retry-After"))
        if failure.retry_after is not None:
            failure.headers["Retry-After"] = f"{failure.retry_after:.0f}"
        failure.again = response.status in (429, 500, 502, 503, 504) and b"insufficient_quota" not in data
        raise failure

    def _no_answer(self, error: BaseException, *, again: bool = True) -> UpstreamFailure:
        late = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
        reason = unreachable(self.policy.base_url, error)
        failure = self._failure(504 if late else 502, reason)
        failure.again = again and not late and reason.retryable
        return failure

    def _failure(self, status: int, error: PolicyError) -> UpstreamFailure:
        # The sandbox learns what happened, not where the policy is.
        message = error.message.replace(f" at {self.policy.base_url}", "")
        code = "policy_unreachable" if isinstance(error, PolicyUnreachable) else "policy_refused"
        return UpstreamFailure(status, error_body(status, code, message), "application/json", error)

    def cut(self, error: BaseException) -> UpstreamFailure:
        """The failure for an answer that broke off."""
        return self._no_answer(error, again=False)

    def unfinished(self) -> UpstreamFailure:
        """The failure for a stream that ended without a finish reason."""
        url = self.policy.base_url
        return self._failure(502, PolicyUnreachable(f"the policy at {url} ended its answer without a finish reason"))

    def garbage(self, data: bytes) -> UpstreamFailure:
        """The failure for a success status with something that is no completion."""
        return self._failure(502, garbage(self.policy.base_url, data))

    def too_large(self, limit: int) -> UpstreamFailure:
        error = PolicyRefused(f"the policy at {self.policy.base_url} answered with more than {limit} bytes")
        return self._failure(502, error)

    def said(self, data: bytes) -> UpstreamFailure:
        """The failure that the policy announced within its stream."""
        return self._failure(502, refused(self.policy.base_url, self.policy.model, 500, data))


class Answer:
    """A policy's answer with a success status. Its body arrives in pieces."""

    def __init__(self, response: aiohttp.ClientResponse, upstream: Upstream) -> None:
        self.status = response.status
        self.content_type = upstream.content_type(response)
        self._response = response
        self._upstream = upstream

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    async def piece(self) -> bytes:
        """Some bytes; none at the end.

        :raises UpstreamFailure: the answer broke off.
        """
        try:
            return await self._response.content.readany()
        except _BROKEN as error:
            raise self._upstream.cut(error) from error

    async def read(self, limit: int) -> bytes:
        """The whole body, without the policy's key.

        :raises UpstreamFailure: it broke off, or is larger than ``limit`` bytes.
        """
        try:
            data = await _read(self._response, limit + 1)
        except _BROKEN as error:
            raise self._upstream.cut(error) from error
        if len(data) > limit:
            raise self._upstream.too_large(limit)
        return self._upstream.scrub(data)

    def close(self) -> None:
        """Let go of it. Where the end was not read yet, the connection is closed, which stops the generation."""
        self._response.close() if not self._response.content.at_eof() else self._response.release()


_PATHS = {True: "/chat/completions", False: "/completions"}


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    pieces, size = [], 0
    while size < limit and (piece := await response.content.readany()):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)[:limit]


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _secrets(key: str | None, headers: dict[str, str]) -> list[bytes]:
    hidden = [value for name, value in headers.items() if any(w in name.lower() for w in ("auth", "key", "token"))]
    found: set[bytes] = set()
    for secret in (key, *hidden):
        if secret and len(secret) >= _SHORTEST_SECRET:
            escaped = json.dumps(secret)[1:-1]
            found |= {secret.encode(), escaped.encode(), escaped.replace("/", "\\/").encode()}
    return sorted(found, key=len, reverse=True)


def _socket(address: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
    """A socket that notices when the policy's machine is gone, though nothing is sent for minutes."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
