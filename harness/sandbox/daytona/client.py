"""One connection to the service: the SDK's client with deadlines for all calls, limits kept, and errors of ours."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import aiohttp
import anyio
from daytona import AsyncDaytona, AsyncSandbox, DaytonaConfig
from daytona.common import errors as sdk
from daytona_api_client_async.exceptions import ApiException
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential
from yarl import URL

from harness.errors import ImageError, ProviderUnavailable, QuotaError, SandboxError, SandboxGone
from harness.guest import websocket
from harness.sandbox.daytona.limits import Gate, Kind, is_quota
from harness.sandbox.daytona.stream import CLOSE_S, NobodyThere, Refused, Socket

CALL_S = 60.0
"""Deadline of one request."""
LONGEST_S, CONNECT_S = 3600.0, 15.0
"""For what takes its time, a build's log: whole, and until there is a connection."""
KEY_HINT = "Make a key at app.daytona.io (Dashboard, Keys) and set DAYTONA_API_KEY to it."
FAILURES = (sdk.DaytonaError, ApiException, aiohttp.ClientError, OSError)
"""What a call of the SDK can raise; ``snapshot.activate`` lets the generated client's exceptions through."""
_TRANSIENT = (sdk.DaytonaTimeoutError, sdk.DaytonaConnectionError, aiohttp.ClientError, OSError)
_TRANSIENT_STATUS = (429, 500, 502, 503)
_GATES: dict[tuple[str, str], Gate] = {}


class ServiceFailed(SandboxError):
    """Raised when Daytona failed, or did not answer in time; another try can help."""

    retryable = True


class Client:
    """The SDK's client and a WebSocket client, made from the environment.

    :raises ProviderUnavailable: there is no key or no address, or the SDK is not one that this was written for.
    """

    def __init__(self) -> None:
        _check_environment()
        config = DaytonaConfig(api_url=service_url(), connection_pool_maxsize=None, use_deprecated_polling=True)
        try:
            with warnings.catch_warnings():
                # Events come over another socket that may be cut unseen; then the SDK looks once a second. Polling from
                # the start it looks ten times a second, and a create from a snapshot is answered when it has started.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.sdk = AsyncDaytona(config)
        except sdk.DaytonaError as error:
            raise ProviderUnavailable(f"Daytona: {error.message.partition('. ')[0]}", hint=KEY_HINT) from error
        # All clients of this process that have the same credentials share the organisation's limits.
        self.gate = _GATES.setdefault((service_url(), os.environ.get("DAYTONA_API_KEY", "")), Gate())
        self._api = URL(service_url())
        self.web = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            trust_env=bool(getproxies_environment()),
            timeout=aiohttp.ClientTimeout(total=LONGEST_S, sock_connect=CONNECT_S),
            middlewares=[self._guard],
            cookie_jar=aiohttp.DummyCookieJar(),
            ws_response_class=Socket,
        )
        self._lend(self.web)

    def _lend(self, web: aiohttp.ClientSession) -> None:
        """One session for the SDK's requests and our WebSockets.

        The SDK's own would show no headers but those of errors, and would look for proxies and passwords on the disk,
        in a thread, before each request. It takes no session and no hook by any public way, so this uses a private one,
        the only one in this package; pyproject.toml bounds the SDK's version because of it.
        """
        try:
            shared = self.sdk._shared_session
            shared._adopt(web)
            taken = shared.session is web
        except (AttributeError, TypeError):
            taken = False
        if not taken:
            web.detach()
            raise ProviderUnavailable(
                f"the Daytona SDK {version('daytona')} is not one that this harness knows",
                hint="Install the one that it was tested with: `pip install 'rollout-harness[daytona]'`.",
            )

    async def _guard(self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        """Take the limits from the service's own answers. A preview's or a toolbox's may be written inside a sandbox:
        it sets no limits, and leads this machine nowhere else."""
        response = await send(request)
        if request.url.origin() == self._api.origin() and request.url.path.startswith(f"{self._api.path.rstrip('/')}/"):
            self.gate.observe(response.headers)
        elif 300 <= response.status < 400:
            response.close()
            raise Refused(f"{response.status} from inside a sandbox")
        return response

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(10):
            await self.sdk.close()  # type: ignore[no-untyped-call]
            await self.web.close()

    async def call[T](
        self,
        send: Callable[[], Awaitable[T]],
        what: str,
        *,
        kind: Kind = "authenticated",
        attempts: int = 4,
        outside: anyio.CancelScope | None = None,
    ) -> T:
        """Make a call that may be made twice: when it may be made, with a deadline, again after what is transient.

        :param what: what is tried, as the start of a sentence: "cannot create sandbox x".
        :param outside: a scope whose deadline is put off by what is waited for the rate limit.
        :raises SandboxError: ``SandboxGone`` where there is no such thing (any more).
        """

        async def bounded() -> T:
            with anyio.fail_after(CALL_S):
                return await send()

        tries = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, Exception) and is_transient(error)),
            stop=stop_after_attempt(attempts),
            wait=wait_random_exponential(0.4, max=5),
            sleep=anyio.sleep,
            reraise=True,
        )
        try:
            return await tries(self.gate.call, kind, bounded, outside)
        except FAILURES as error:
            raise translate(error, what) from error

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
        headers = {"X-Daytona-Preview-Token": link.token or "", "X-Daytona-Skip-Preview-Warning": "true"}
        try:
            socket = await self.web.ws_connect(
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
        assert isinstance(socket, Socket)  # the session makes no others
        return socket


def translate(error: Exception, what: str) -> SandboxError:
    """Our error for one of the SDK's."""
    if isinstance(error, ApiException):
        error = sdk.create_daytona_error(str(error.body or error.reason), error.status)
    if not isinstance(error, sdk.DaytonaError):
        return ServiceFailed(f"{what}: {type(error).__name__} {error}".rstrip())
    said = error.message.splitlines()[0][:500] if error.message else type(error).__name__
    text = f"{what}: {said}"
    if isinstance(error, sdk.DaytonaAuthenticationError):
        return ProviderUnavailable(f"Daytona does not accept the key: {said}", hint=KEY_HINT)
    if is_quota(error):
        hint = "Lower --max-in-flight, free what uses the quota, or raise the organisation's tier."
        if "snapshot quota" in said.lower():
            hint = "Remove some: `harness images prune --sandbox daytona`."
        return QuotaError(text, hint=hint)
    if "per sandbox" in said.lower():
        return SandboxError(text, hint="Lower cpus, memory_mib or disk_mib in [tool.harness.sandbox].")
    if isinstance(error, sdk.DaytonaForbiddenError):
        hint = "Check DAYTONA_ORGANIZATION_ID, and what the key may do (sandboxes and snapshots: write and delete)."
        return ProviderUnavailable(f"Daytona forbids it: {said}", hint=hint)
    if "region" in said.lower() and error.status_code in (400, 404):
        return ProviderUnavailable(text, hint="Set DAYTONA_TARGET to one of the organisation's regions, or unset it.")
    if isinstance(error, (sdk.DaytonaNotFoundError, sdk.DaytonaGoneError, sdk.DaytonaSpotEvictedError)):
        return SandboxGone(text)
    if is_transient(error) or isinstance(error, sdk.DaytonaConflictError):  # something else is just being done to it
        return ServiceFailed(text)
    if re.search(r"snapshot \S+ (is|not) ", said.lower()):
        return ImageError(text, hint="Run again: a snapshot that is gone is built again.")
    return SandboxError(text)


def is_transient(error: Exception) -> bool:
    """Whether it is not known if the call was carried out, or another one can go well."""
    status = error.status if isinstance(error, ApiException) else getattr(error, "status_code", None)
    return isinstance(error, _TRANSIENT) or status in _TRANSIENT_STATUS


def _check_environment() -> None:
    """What the SDK would only stumble over."""
    url = urlsplit(service_url())
    if url.scheme not in ("http", "https") or not url.hostname:
        text = f"DAYTONA_API_URL is no address: {service_url()!r}"
        raise ProviderUnavailable(text, hint="It begins with https://, as https://app.daytona.io/api.")
    for name in ("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN", "DAYTONA_ORGANIZATION_ID"):
        if not re.fullmatch("[!-~]*", os.environ.get(name, "")):
            text = f"{name} has white space in it, or letters that no key has."
            raise ProviderUnavailable(text, hint="Set it again, without them.")


def service_url() -> str:
    """As the SDK finds it; ``DAYTONA_SERVER_URL`` is its older name."""
    named = os.environ.get("DAYTONA_API_URL") or os.environ.get("DAYTONA_SERVER_URL")
    return named or "https://app.daytona.io/api"
