"""The service as a whole: one loopback listener for the API and the toolbox, one for previews."""

from __future__ import annotations

import hmac
import logging
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import anyio
import anyio.abc
import anyio.to_thread
from aiohttp import web

from .api import Api, Handler, throttlers
from .builds import Builder
from .clock import Clock, Rate, RateLimits, iso
from .faults import FAULTS, Action, Delay, Faults, LoseResponse, Request, RequestLog, Respond
from .files import Files
from .machine import MachineRoom, remove_tree
from .proxy import PreviewProxy
from .records import Quota, Sandbox, Snapshot
from .schema import PROXY, ApiError
from .storage import Storage
from .toolbox import Toolbox
from .world import World

TIERS: Mapping[int, tuple[Quota, tuple[int, int]]] = {
    1: (Quota(10, 10, 30), (10_000, 300)),
    2: (Quota(100, 200, 300), (20_000, 400)),
    3: (Quota(250, 500, 2000), (40_000, 500)),
    4: (Quota(500, 1000, 5000), (50_000, 600)),
}
"""Per tier: the quota, and requests a minute, in general and of creates."""
FAILED_AUTH = 100
"""Refused requests a minute; a guess."""
SWEEP_S = 0.5
_log = logging.getLogger(__name__)


class DaytonaStandIn:
    """The Daytona service on loopback, with real processes behind it. An async context manager.

    :param mode: what a sandbox is: ``process``, a tree of processes in namespaces of its own.
    :param tier: which of the service's quotas and rate limits hold, where ``quota`` and ``rates`` do not say otherwise.
    :param rates: per throttler, requests a window; an empty mapping: no limits.
    :param images: shell patterns of the base images that exist; all of them contain this machine's ``/usr`` and Python.
    :param start_delay_s: added to what starting a sandbox takes here. ``build_env``: variables of builds' RUN lines.
    :param preview_idle_s: when the preview proxy closes a silent connection; None: never.
    """

    def __init__(
        self,
        mode: Literal["process"] = "process",
        *,
        tier: int = 4,
        quota: Quota | None = None,
        rates: Mapping[str, Rate] | None = None,
        regions: tuple[str, ...] = ("us", "eu"),
        images: tuple[str, ...] = ("*",),
        build_env: Mapping[str, str] | None = None,
        start_delay_s: float = 0.0,
        delete_delay_s: float = 0.05,
        preview_idle_s: float | None = None,
        preview_counts_as_activity: bool = False,
        preview_warning: bool = True,
        secret_names: tuple[str, ...] = (),
        port: int = 0,
    ) -> None:
        if mode != "process":
            raise ValueError(f"unknown mode {mode!r}")
        self.api_key = f"dtn_{secrets.token_hex(24)}"
        self.jwt = f"jwt.{secrets.token_hex(16)}"
        """Works like the key, and must come with the organisation's id in ``X-Daytona-Organization-ID``."""
        self.organization_id = "0c3a1d9e-6f5b-4d0e-9a53-7a6f1f6f2a10"
        self.clock = Clock()
        self.requests = RequestLog()
        self.left_behind: list[str] = []
        """After closing: ids of the sandboxes that nobody had deleted."""
        default_quota, (general, creates) = TIERS[tier]
        limits = {
            "failed-auth": FAILED_AUTH,
            "authenticated": general,
            "sandbox-create": creates,
            "sandbox-lifecycle": general,
            "sandbox-list": general,
        }
        self._quota = quota or default_quota
        self.rates = RateLimits(
            self.clock, {name: Rate(limit) for name, limit in limits.items()} if rates is None else rates
        )
        self._options: dict[str, Any] = {
            "regions": regions,
            "start_delay_s": start_delay_s,
            "delete_delay_s": delete_delay_s,
            "secret_names": secret_names,
        }
        self._preview_options: dict[str, Any] = {
            "idle_s": preview_idle_s,
            "counts_as_activity": preview_counts_as_activity,
            "warning": preview_warning,
        }
        self._images, self._build_env, self._port = images, build_env, port
        self._origin = self._preview = ""

    @property
    def url(self) -> str:
        """For ``DAYTONA_API_URL``."""
        return f"{self._origin}/api"

    @property
    def sandboxes(self) -> dict[str, Sandbox]:
        """By id; those that are being destroyed too."""
        return {each.id: each for each in self.world.live()}

    @property
    def snapshots(self) -> dict[str, Snapshot]:
        return dict(self.world.snapshots)

    @property
    def peak(self) -> int:
        """The most sandboxes there ever were at once."""
        return self.world.peak

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as resources:
            folder = Path(tempfile.mkdtemp(prefix="daytona-"))
            resources.push_async_callback(anyio.to_thread.run_sync, remove_tree, folder)
            room = MachineRoom(folder)
            self.builder = Builder(room, self._images, self._build_env)
            async with AsyncExitStack() as tasks:
                self._group = group = await tasks.enter_async_context(anyio.create_task_group())
                tasks.callback(group.cancel_scope.cancel)
                self.world = World(self.clock, room, self.builder, group, quota=self._quota, **self._options)
                resources.push_async_callback(self._close_world)
                self.faults = Faults(self.world)
                self.clock.on_jump.append(self.world.sweep)
                self.previews = PreviewProxy(self.world, self.faults, self.requests, **self._preview_options)
                listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
                resources.push_async_callback(listener.aclose)
                self._preview = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
                group.start_soon(listener.serve, self.previews.serve)
                resources.push_async_callback(await self._listen())
                group.start_soon(self._sweep)
                self._tasks, self._resources = tasks.pop_all(), resources.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.aclose()
        with anyio.CancelScope(shield=True):
            await self._resources.aclose()

    async def _listen(self) -> Callable[[], Awaitable[None]]:
        app = web.Application(middlewares=[self._middleware], client_max_size=64 * 1024 * 1024)
        app.add_routes(Api(self.world, self.rates, self.organization_id, self._url_of).routes())
        storage = Storage(self.world, self.organization_id, self._url_of)
        app.add_routes([*Toolbox(self.world).routes(), *Files(self.world).routes(), *storage.routes()])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port, backlog=1024)
        await site.start()
        self._origin = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner.cleanup

    async def _close_world(self) -> None:
        self.left_behind = await self.world.close()

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(SWEEP_S)
            await self.world.sweep()

    def _url_of(self, what: str) -> str:
        below = {"api": self.url, "toolbox": f"{self._origin}/toolbox", "storage": f"{self._origin}/storage"}
        return {**below, "preview": self._preview}[what]

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path, resource = request.path.removeprefix("/api"), request.match_info.route.resource
        endpoint = (resource.canonical if resource else path).removeprefix("/api")
        request[FAULTS] = actions = self.faults.take(request.method, path)
        headers: dict[str, str] = {}
        status = 0
        try:
            try:
                answer = partial(self._answer, request, handler, path, actions, headers)
                if request.path.startswith("/api") and request.method != "GET":
                    await request.read()  # who has hung up cannot be asked any more
                    response = await self._carry_out(answer)
                else:
                    response = await answer()
            except web.HTTPException as error:
                raise ApiError(error.status, f"Cannot {request.method} {request.path}") from error
            except (ApiError, ConnectionError):
                raise
            except Exception as error:
                _log.exception("%s %s", request.method, request.path)
                raise ApiError(500, "Internal server error") from error
        except ApiError as error:
            envelope = error.envelope(request.method, request.path, iso(self.clock.now()))
            status = error.status
            response = web.json_response(envelope, status=status, headers=error.headers)
        else:
            status = response.status
        finally:
            self.requests.add(Request(request.method, path, endpoint, status, self.clock.now()))
        if not response.prepared:
            response.headers.update(headers)
        if any(isinstance(each, LoseResponse) for each in actions) and request.transport:
            request.transport.abort()
        return response

    async def _answer(
        self, request: web.Request, handler: Handler, path: str, actions: list[Action], headers: dict[str, str]
    ) -> web.StreamResponse:
        if not request.path.startswith("/storage"):  # has credentials of its own
            try:
                self._authorize(request)
            except ApiError:
                self._count(headers, "failed-auth")
                raise
        if request.path.startswith("/api"):
            self._count(headers, *throttlers(request.method, path))
        for action in actions:
            if isinstance(action, Delay):
                await anyio.sleep(action.seconds)
            elif isinstance(action, Respond):
                source = {"source": PROXY} if path.startswith("/toolbox") else {}
                raise ApiError(action.status, action.message, code=action.code, headers=action.headers, **source)
        return await handler(request)

    async def _carry_out[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """To its end, even if the caller hangs up meanwhile."""
        done, outcome = anyio.Event(), list[Callable[[], T]]()

        async def run() -> None:
            try:
                result = await work()
                outcome.append(lambda: result)
            except Exception as error:
                outcome.append(partial(_raise, error))
            done.set()

        self._group.start_soon(run)
        await done.wait()
        return outcome[0]()

    def _count(self, headers: dict[str, str], *counters: str) -> None:
        counted, passes = self.rates.hit(counters)
        headers.update(counted)
        if not passes:
            raise ApiError(429, "ThrottlerException: Too Many Requests")

    def _authorize(self, request: web.Request) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        organization = request.headers.get("X-Daytona-Organization-ID")
        with_key = hmac.compare_digest(token, self.api_key.encode())
        if not with_key and not hmac.compare_digest(token, self.jwt.encode()):
            raise ApiError(401, "Invalid credentials")
        if organization is None and not with_key and request.path.startswith("/api"):
            raise ApiError(403, "Organization ID is required")
        if organization is not None and organization != self.organization_id:
            raise ApiError(403, "You don't have access to this organization")


def _raise(error: Exception) -> NoReturn:
    raise error
