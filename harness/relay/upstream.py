"""The way to the policy: one client session, and the only place where anything is asked a second time."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import Any, Self

import aiohttp
import anyio
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential,
    wait_random,
)

from harness.errors import PolicyError, PolicyRefused, PolicyUnreachable
from harness.policy.http import BROKEN, garbage, proxy_of, refused, request_headers, scrubber, unreachable
from harness.policy.resolve import Policy
from harness.relay.request import error_body
from harness.relay.settings import RelaySettings

_MAX_ERROR_BODY = 256 * 1024
_PASSING = (429, 500, 502, 503, 504)
"""Statuses of troubles that may be gone a moment later."""


class UpstreamFailure(Exception):
    """Raised when the policy gave no usable answer; carries what the sandbox is told.

    :param again: whether asking again can help.
    :param retry_after: seconds to wait before that, as the policy asked for.
    """

    def __init__(
        self, status: int, body: bytes, error: PolicyError, *, again: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(error.message)
        self.status, self.body, self.error = status, body, error
        self.again, self.retry_after = again, retry_after
        self.content_type = "application/json"


class Upstream:
    """Owns the connections to the policy. An async context manager."""

    def __init__(self, policy: Policy, settings: RelaySettings) -> None:
        self.policy = policy
        self.scrub = scrubber(policy)
        """Takes the policy's key out of bytes."""
        self._settings = settings
        self._name = f"the policy at {policy.base_url}"
        self._headers = request_headers(policy)
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

    async def open(
        self, path: str, body: bytes, headers: dict[str, str], on_attempt: Callable[[UpstreamFailure | None], None]
    ) -> Answer:
        """Send a request until there is an answer with a success status, its body still to be read.

        :param path: what follows the policy's base URL.
        :param on_attempt: called before each request, and with the failure of each that will be made again.
        :raises UpstreamFailure: no success within the bounds of the settings.
        """
        settings = self._settings
        spread = wait_exponential(settings.retry_first_s, settings.retry_max_s) + wait_random(0, settings.retry_first_s)

        def failure(state: RetryCallState) -> UpstreamFailure | None:
            error = state.outcome.exception() if state.outcome else None
            return error if isinstance(error, UpstreamFailure) else None

        def wait(state: RetryCallState) -> float:
            asked = error.retry_after if (error := failure(state)) else None
            return spread(state) if asked is None else min(asked, settings.retry_max_s)

        retrying = AsyncRetrying(
            before=lambda _: on_attempt(None),
            before_sleep=lambda state: on_attempt(failure(state)),
            retry=retry_if_exception(lambda error: isinstance(error, UpstreamFailure) and error.again),
            wait=wait,
            stop=stop_after_attempt(settings.attempts) | stop_before_delay(settings.retry_budget_s),
            sleep=anyio.sleep,
            reraise=True,
        )
        return await retrying(self._request, self.policy.base_url + path, body, self._headers | headers)

    async def _request(self, url: str, body: bytes, headers: dict[str, str]) -> Answer:
        assert self._session is not None
        try:
            response = await self._session.post(
                url, data=body, headers=headers, allow_redirects=False, proxy=self._proxy
            )
        except BROKEN as error:
            raise self.cut(error, again=True) from error
        answer = Answer(response, self)
        if response.status < 300:
            return answer
        status = response.status
        said = bytearray()
        try:
            while len(said) < _MAX_ERROR_BODY and (piece := await answer.piece()):
                said += piece
        finally:
            answer.close()
        data = self.scrub(bytes(said))
        if status < 400:
            raise self.failure(PolicyRefused(f"{self._name} redirects elsewhere (HTTP {status})"))
        failure = UpstreamFailure(
            status,
            data,
            refused(self.policy.base_url, self.policy.model, status, data),
            again=status in _PASSING and b"insufficient_quota" not in data,
            retry_after=_seconds(response.headers.get("Retry-After", "")),
        )
        failure.content_type = response.content_type
        raise failure

    # -- failures, in the words that the sandbox is told: what happened, not where the policy is

    def failure(self, error: PolicyError, status: int = 502, *, again: bool = False) -> UpstreamFailure:
        message = error.message.replace(self._name, "the policy")
        code = "policy_unreachable" if isinstance(error, PolicyUnreachable) else "policy_refused"
        return UpstreamFailure(status, error_body(status, code, message), error, again=again)

    def cut(self, error: BaseException, *, again: bool = False) -> UpstreamFailure:
        """The failure for an answer that did not come, or broke off."""
        late = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
        reason = unreachable(self.policy.base_url, error)
        return self.failure(reason, 504 if late else 502, again=again and not late and reason.retryable)

    def unfinished(self) -> UpstreamFailure:
        """The failure for a stream that ended without a finish reason, or within an event."""
        return self.failure(PolicyUnreachable(f"{self._name} ended its answer without a finish reason"))

    def garbage(self, data: bytes) -> UpstreamFailure:
        """The failure for a success status with something that is no completion."""
        return self.failure(garbage(self.policy.base_url, data))

    def too_large(self, limit: int) -> UpstreamFailure:
        return self.failure(PolicyRefused(f"{self._name} answered with more than {limit} bytes"))

    def said(self, data: bytes) -> UpstreamFailure:
        """The failure that the policy announced within its stream."""
        return UpstreamFailure(502, data, refused(self.policy.base_url, self.policy.model, 500, data))


class Answer:
    """A policy's answer with a success status. Its body arrives in pieces."""

    def __init__(self, response: aiohttp.ClientResponse, upstream: Upstream) -> None:
        self.status = response.status
        self.is_stream = response.content_type == "text/event-stream"
        self._response = response
        self._upstream = upstream

    async def piece(self) -> bytes:
        """Some bytes; none at the end.

        :raises UpstreamFailure: the answer broke off.
        """
        try:
            return await self._response.content.readany()
        except BROKEN as error:
            raise self._upstream.cut(error) from error

    def close(self) -> None:
        """Let go of it. Where the end was not read yet, the connection is closed, which stops the generation."""
        self._response.close() if not self._response.content.at_eof() else self._response.release()


def _seconds(value: str) -> float | None:
    """What a Retry-After header asks for; the rare ones that hold a date are passed over."""
    return float(value) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", value) else None


def _socket(address: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
    """A socket that notices when the policy's machine is gone, though nothing is sent for minutes."""
    made = socket.socket(*address[:3])
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    return made
