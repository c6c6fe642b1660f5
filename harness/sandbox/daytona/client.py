"""One connection to the service: the SDK's client with deadlines for all calls, limits kept, and errors of ours."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import aiohttp
import anyio
from daytona import AsyncDaytona, AsyncSandbox, DaytonaConfig
from daytona.common import errors as sdk

from harness.errors import ImageError, ProviderUnavailable, QuotaError, SandboxError, SandboxGone
from harness.guest import websocket
from harness.sandbox.daytona.limits import Gate, is_quota
from harness.sandbox.daytona.stream import CLOSE_S, NobodyThere, Refused, Socket

CALL_S = 60.0
"""Deadline of one request."""
LONGEST_S, CONNECT_S = 3600.0, 15.0
"""For what takes its time, a build's log: whole, and until there is a connection."""
KEY_HINT = "Make a key at app.daytona.io (Dashboard, Keys) and set DAYTONA_API_KEY to it."
_TOKEN, _SKIP_WARNING = "X-Daytona-Preview-Token", "X-Daytona-Skip-Preview-Warning"
TRANSIENT = (sdk.DaytonaTimeoutError, sdk.DaytonaConnectionError, TimeoutError, OSError, aiohttp.ClientError)
FAILURES = (sdk.DaytonaError, aiohttp.ClientError, OSError)
"""What a call of the SDK can raise."""
_TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)
_GATES: dict[tuple[str, str], Gate] = {}


class ServiceFailed(SandboxError):
    """Raised when Daytona failed, or did not answer in time; another try can help."""

    retryable = True


class Client:
    """The SDK's client and a WebSocket client, made from the environment as the SDK reads it.

    :raises ProviderUnavailable: there is no key.
    """

    def __init__(self) -> None:
        config = DaytonaConfig(connection_pool_maxsize=None, use_deprecated_polling=True)
        try:
            with warnings.catch_warnings():
                # Events come over another socket that may be cut unseen; then the SDK looks once a second. Polling from
                # the start it looks ten times a second, and a create from a snapshot is answered when it has started.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.sdk = AsyncDaytona(config)
        except sdk.DaytonaError as error:
            raise ProviderUnavailable(f"Daytona: {error.message.splitlines()[0]}", hint=KEY_HINT) from error
        self.url = self.sdk._api_url
        self.target = self.sdk._target
        # All clients of this process that have the same credentials share the organisation's limits.
        key = str(self.sdk._api_key or self.sdk._jwt_token)
        self.gate = _GATES.setdefault((self.url, hashlib.sha256(key.encode()).hexdigest()), Gate())
        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(self._observe)
        # One session for the SDK's requests and our WebSockets. The SDK's own would show no headers, and would look for
        # proxies and passwords on the disk, in a thread, before each request.
        self.web = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            trust_env=bool(getproxies_environment()),
            timeout=aiohttp.ClientTimeout(total=LONGEST_S, sock_connect=CONNECT_S),
            trace_configs=[trace],
        )
        self.sdk._shared_session._adopt(self.web)

    async def _observe(self, _: object, __: object, ended: aiohttp.TraceRequestEndParams) -> None:
        self.gate.observe(ended.response.headers)

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(10):
            await self.sdk.close()  # type: ignore[no-untyped-call]
            await self.web.close()

    async def get_json(self, path: str) -> Any:
        """What the API answers to a GET that the SDK has no method for."""
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with self.web.get(
            self.url + path, headers=self.sdk._api_client.default_headers, timeout=timeout
        ) as answer:
            answer.raise_for_status()
            return await answer.json()

    def dialler(self, sandbox: AsyncSandbox, port: int) -> Callable[[bool], Awaitable[Socket]]:
        """Makes WebSockets to a port of a sandbox, through its preview link."""
        links: list[Any] = []

        async def dial(fresh: bool) -> Socket:
            try:
                if fresh or not links:
                    links[:] = [await sandbox.get_preview_link(port, request_timeout=CALL_S)]
                try:
                    return await self._dial(links[0])
                except Refused:
                    await sandbox.refresh_data(request_timeout=CALL_S)
                    if sandbox.state != "started":
                        raise NobodyThere(f"the sandbox is {sandbox.state}") from None
                    raise
            except sdk.DaytonaNotFoundError as error:
                raise NobodyThere(error.message) from error
            except sdk.DaytonaError as error:
                raise aiohttp.ClientConnectionError(error.message) from error

        return dial

    async def _dial(self, link: Any) -> Socket:
        headers = {_TOKEN: link.token or "", _SKIP_WARNING: "true"}
        try:
            return await self.web.ws_connect(
                link.url,
                headers=headers,
                max_msg_size=websocket.MAX_MESSAGE,
                compress=0,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            )
        except aiohttp.WSServerHandshakeError as error:
            # 502 says that nothing listens yet; all else (a bad token can lead to a page to log in at, with status 200)
            # that the sandbox is not as it was.
            if error.status < 500:
                raise Refused(f"{error.status} {error.message}") from error
            raise


def translate(error: Exception, what: str) -> SandboxError:
    """Our error for one of the SDK's.

    :param what: what was tried, as the start of a sentence: "cannot create sandbox x".
    """
    if not isinstance(error, sdk.DaytonaError):
        return ServiceFailed(f"{what}: {type(error).__name__} {error}".rstrip())
    said = error.message.splitlines()[0][:500] if error.message else type(error).__name__
    text = f"{what}: {said}"
    if isinstance(error, sdk.DaytonaAuthenticationError):
        return ProviderUnavailable(f"Daytona does not accept the key: {said}", hint=KEY_HINT)
    if is_quota(error):
        return QuotaError(
            text, hint="Lower --max-in-flight, free what uses the quota, or raise the organisation's tier."
        )
    if isinstance(error, sdk.DaytonaForbiddenError):
        hint = "Check DAYTONA_ORGANIZATION_ID, and what the key may do (sandboxes and snapshots: write and delete)."
        return ProviderUnavailable(f"Daytona forbids it: {said}", hint=hint)
    if "region" in said.lower() and error.status_code in (400, 404):
        return ProviderUnavailable(text, hint="Set DAYTONA_TARGET to one of the organisation's regions, or unset it.")
    if isinstance(error, sdk.DaytonaRateLimitError):
        return QuotaError(text)
    if isinstance(error, (sdk.DaytonaNotFoundError, sdk.DaytonaGoneError, sdk.DaytonaSpotEvictedError)):
        return SandboxGone(text)
    if isinstance(error, TRANSIENT) or error.status_code in _TRANSIENT_STATUS:
        return ServiceFailed(text)
    if "snapshot" in said.lower():
        return ImageError(text, hint="Run again: a snapshot that is gone is built again.")
    return SandboxError(text)


def is_transient(error: Exception) -> bool:
    """Whether it is not known if the call was carried out, or another one can go well."""
    return isinstance(error, TRANSIENT) or getattr(error, "status_code", None) in _TRANSIENT_STATUS


async def patiently[T](call: Callable[[], Awaitable[T]], attempts: int = 4) -> T:
    """A call that may be made twice, with a deadline, again after what is transient."""
    pause = 0.2
    while True:
        attempts -= 1
        try:
            with anyio.fail_after(CALL_S):
                return await call()
        except FAILURES as error:
            if not attempts or not is_transient(error):
                raise
        await anyio.sleep(pause)
        pause *= 2


def configuration(environ: Mapping[str, str] = os.environ) -> str:
    """The address that the environment names, for messages."""
    url = environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api"
    return urlsplit(url).netloc or url
