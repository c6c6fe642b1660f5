"""The control API: ``/api`` of the service."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from . import schema
from .builds import Build
from .clock import Rate, RateLimits, iso
from .describe import describe, describe_snapshot
from .faults import FAULTS
from .proxy import PORTS, RESERVED
from .records import PUBLIC_SNAPSHOT, Sandbox
from .schema import ApiError
from .world import World

PAGE, MAX_PAGE = 100, 200
_STATES = frozenset((
    "creating", "restoring", "destroyed", "destroying", "started", "stopped", "starting", "stopping", "error",
    "build_failed", "pending_build", "building_snapshot", "unknown", "pulling_snapshot", "archived", "archiving",
    "resizing", "snapshotting", "forking", "pausing", "paused", "resuming",
))  # fmt: skip

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def throttlers(method: str, path: str) -> tuple[str, ...]:
    """Which of the service's counters a request counts for."""
    if method == "POST" and path == "/sandbox":
        return "authenticated", "sandbox-create"
    if method == "GET" and path == "/sandbox":
        return "authenticated", "sandbox-list"
    if path.startswith("/sandbox/") and (
        method == "DELETE" or path.endswith(("/start", "/stop", "/archive", "/recover"))
    ):
        return "authenticated", "sandbox-lifecycle"
    return ("authenticated",)


class Api:
    """:param urls: of the API, the toolbox proxy and the preview proxy; known when the service listens."""

    def __init__(self, world: World, rates: RateLimits, organization: str, urls: Callable[[str], str]) -> None:
        self._world = world
        self._rates = rates
        self._organization = organization
        self._urls = urls

    def routes(self) -> list[web.RouteDef]:
        def sandbox(path: str) -> str:
            return "/api/sandbox/{id}" + path

        return [
            web.post("/api/sandbox", self.create),
            web.get("/api/sandbox", self.list),
            web.get(sandbox(""), self.get),
            web.delete(sandbox(""), self.delete),
            web.post(sandbox("/{change:start|stop}"), self.change),
            web.post(sandbox("/{clock:autostop|autoarchive|autodelete|ttl}/{minutes}"), self.set_clock),
            web.post(sandbox("/last-activity"), self.last_activity),
            web.post(sandbox("/network-settings"), self.network_settings),
            web.post(sandbox("/public/{public:true|false}"), self.set_public),
            web.put(sandbox("/labels"), self.labels),
            web.get(sandbox("/ports/{port}/preview-url"), self.preview_url),
            web.get(sandbox("/ports/{port}/signed-preview-url"), self.signed_preview_url),
            web.post(sandbox("/ports/{port}/signed-preview-url/{token}/expire"), self.expire_signed),
            web.get(sandbox("/toolbox-proxy-url"), self.toolbox_url),
            web.get(sandbox("/signing-key"), self.signing_key),
            web.get("/api/{kind:sandbox|snapshots}/{id}/build-logs-url", self.build_logs_url),
            web.get("/api/{kind:sandbox|snapshots}/{id}/build-logs", self.build_logs),
            web.post("/api/snapshots", self.create_snapshot),
            web.get("/api/snapshots", self.list_snapshots),
            web.get("/api/snapshots/{id}", self.get_snapshot),
            web.delete("/api/snapshots/{id}", self.delete_snapshot),
            web.post("/api/snapshots/{id}/activate", self.activate_snapshot),
            web.get("/api/config", self.config),
            web.get("/api/regions", self.regions),
            web.get("/api/shared-regions", self.regions),
        ]

    def _find(self, request: web.Request) -> Sandbox:
        return self._world.find(request.match_info["id"])

    def _say(self, sandbox: Sandbox, *, listed: bool = False) -> dict[str, Any]:
        return describe(sandbox, self._organization, self._urls("toolbox"), listed=listed)

    async def create(self, request: web.Request) -> web.Response:
        asked = schema.parse(schema.CreateSandbox, await request.read())
        return web.json_response(self._say(await self._world.create(asked, request[FAULTS])))

    async def get(self, request: web.Request) -> web.Response:
        # A sandbox that was taken away (and not deleted) still tells so.
        return web.json_response(self._say(self._world.find(request.match_info["id"], destroyed=True)))

    async def list(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            labels = json.loads(query.get("labels", "{}"))
            wanted = set(labels.items())
        except (ValueError, AttributeError, TypeError) as error:
            raise ApiError(400, "Invalid labels JSON format") from error
        limit = _integer(query.get("limit", str(PAGE)), "limit", 1, MAX_PAGE)
        states = {each for value in query.getall("states", []) for each in value.split(",")}
        if not states <= _STATES:
            raise ApiError(400, f"each value in states must be one of: {', '.join(sorted(_STATES))}")
        found = [
            each
            for each in self._world.live()
            if wanted <= set(each.labels.items())
            and (not states or each.state in states)
            and each.name.startswith(query.get("name", ""))
            and each.id.startswith(query.get("id", ""))
        ]
        found.sort(key=lambda each: (-each.created_at, each.id))
        if cursor := query.get("cursor"):
            try:
                created, last = json.loads(base64.urlsafe_b64decode(cursor))
            except ValueError as error:
                raise ApiError(400, "Invalid cursor") from error
            found = [each for each in found if (-each.created_at, each.id) > (-created, last)]
        page, more = found[:limit], None
        if len(found) > limit:
            more = base64.urlsafe_b64encode(json.dumps([page[-1].created_at, page[-1].id]).encode()).decode()
        return web.json_response({"items": [self._say(each, listed=True) for each in page], "nextCursor": more})

    async def delete(self, request: web.Request) -> web.Response:
        sandbox = self._find(request)
        await self._world.delete(sandbox, request[FAULTS])
        return web.json_response(self._say(sandbox))

    async def change(self, request: web.Request) -> web.Response:
        sandbox = self._find(request)
        await (self._world.start if request.match_info["change"] == "start" else self._world.stop)(sandbox)
        return web.json_response(self._say(sandbox))

    async def set_clock(self, request: web.Request) -> web.Response:
        sandbox, which = self._find(request), request.match_info["clock"]
        minutes = _integer(request.match_info["minutes"], which, -1 if which == "autodelete" else 0, 525_600)
        match which:
            case "autostop":
                sandbox.auto_stop = minutes
            case "autoarchive":
                sandbox.auto_archive = minutes
            case "autodelete":
                sandbox.auto_delete = minutes
            case _:
                sandbox.destroy_at = self._world.clock.now() + minutes * 60 if minutes else None
        return web.json_response(self._say(sandbox))

    async def last_activity(self, request: web.Request) -> web.Response:
        self._find(request).active_at = self._world.clock.now()
        return web.Response(status=201)

    async def network_settings(self, request: web.Request) -> web.Response:
        sandbox = self._find(request)
        asked = schema.parse(schema.NetworkSettings, await request.read())
        schema.check_network(asked.network_block_all, asked.network_allow_list, asked.domain_allow_list)
        sandbox.network = asked
        return web.json_response(self._say(sandbox))

    async def set_public(self, request: web.Request) -> web.Response:
        sandbox = self._find(request)
        sandbox.public = request.match_info["public"] == "true"
        return web.json_response(self._say(sandbox))

    async def labels(self, request: web.Request) -> web.Response:
        sandbox = self._find(request)
        sandbox.labels = schema.parse(schema.SetLabels, await request.read()).labels
        return web.json_response({"labels": sandbox.labels})

    async def preview_url(self, request: web.Request) -> web.Response:
        sandbox, port = self._find(request), _port(request)
        url = f"{self._urls('preview')}/{port}-{sandbox.id}"
        return web.json_response({"sandboxId": sandbox.id, "url": url, "token": sandbox.token})

    async def signed_preview_url(self, request: web.Request) -> web.Response:
        sandbox, port = self._find(request), _port(request)
        seconds = _integer(request.query.get("expiresInSeconds", "60"), "expiresInSeconds", 1, 86_400)
        token = secrets.token_hex(16)
        sandbox.signed[token] = port, self._world.clock.now() + seconds
        url = f"{self._urls('preview')}/{port}-{token}"
        return web.json_response({"sandboxId": sandbox.id, "port": port, "token": token, "url": url})

    async def expire_signed(self, request: web.Request) -> web.Response:
        if self._find(request).signed.pop(request.match_info["token"], None) is None:
            raise ApiError(404, "Signed preview token not found")
        return web.Response(status=200)

    async def toolbox_url(self, request: web.Request) -> web.Response:
        self._find(request)
        return web.json_response({"url": self._urls("toolbox")})

    async def signing_key(self, request: web.Request) -> web.Response:
        return web.json_response(self._find(request).signing_key)

    def _build(self, request: web.Request) -> Build:
        world, number = self._world, request.match_info["id"]
        return (
            world.find(number).build if request.match_info["kind"] == "sandbox" else world.find_snapshot(number).build
        )

    async def build_logs_url(self, request: web.Request) -> web.Response:
        self._build(request)
        kind, number = request.match_info["kind"], request.match_info["id"]
        return web.json_response({"url": f"{self._urls('api')}/{kind}/{number}/build-logs"})

    async def build_logs(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        build = self._build(request)
        await response.prepare(request)
        async for data in build.log(request.query.get("follow") == "true"):
            await response.write(data)
        await response.write_eof()
        return response

    async def create_snapshot(self, request: web.Request) -> web.Response:
        asked = schema.parse(schema.CreateSnapshot, await request.read())
        return web.json_response(describe_snapshot(await self._world.create_snapshot(asked), self._organization))

    async def list_snapshots(self, request: web.Request) -> web.Response:
        page = _integer(request.query.get("page", "1"), "page", 1, 1 << 31)
        limit = _integer(request.query.get("limit", str(PAGE)), "limit", 1, MAX_PAGE)
        found = sorted(self._world.snapshots.values(), key=lambda each: (-each.created_at, each.id))
        items = [describe_snapshot(each, self._organization) for each in found[(page - 1) * limit : page * limit]]
        pages = -(-len(found) // limit)
        return web.json_response({"items": items, "total": len(found), "page": page, "totalPages": pages})

    async def get_snapshot(self, request: web.Request) -> web.Response:
        return web.json_response(
            describe_snapshot(self._world.find_snapshot(request.match_info["id"]), self._organization)
        )

    async def activate_snapshot(self, request: web.Request) -> web.Response:
        await self._world.activate_snapshot(self._world.find_snapshot(request.match_info["id"]))
        return await self.get_snapshot(request)

    async def delete_snapshot(self, request: web.Request) -> web.Response:
        await self._world.remove_snapshot(self._world.find_snapshot(request.match_info["id"]))
        return web.Response(status=200)

    async def config(self, request: web.Request) -> web.Response:
        def rate(name: str) -> dict[str, float]:
            found = self._rates.rates.get(name, Rate(0))
            return {"ttl": found.window_s, "limit": found.limit}

        here = "http://127.0.0.1"
        return web.json_response({
            "version": "0.226.1",
            "oidc": {"issuer": here, "clientId": "none", "audience": "none", "provider": "oidc"},
            "linkedAccountsEnabled": False,
            "announcements": {},
            "proxyTemplateUrl": self._urls("preview") + "/{{PORT}}-{{sandboxId}}",
            "proxyToolboxUrl": self._urls("toolbox"),
            "defaultSnapshot": PUBLIC_SNAPSHOT,
            "dashboardUrl": here,
            "maxAutoArchiveInterval": 43200,
            "maintananceMode": False,
            "environment": "test",
            "rateLimit": {
                "failedAuth": rate("failed-auth"),
                "authenticated": rate("authenticated"),
                "sandboxCreate": rate("sandbox-create"),
                "sandboxLifecycle": rate("sandbox-lifecycle"),
                "sandboxList": rate("sandbox-list"),
            },
        })  # fmt: skip

    async def regions(self, request: web.Request) -> web.Response:
        known = {"organizationId": None, "regionType": "shared", "createdAt": iso(0), "updatedAt": iso(0)}
        return web.json_response([{"id": each, "name": each, **known} for each in self._world.regions])


def _integer(text: str, name: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise ApiError(400, f"{name} must be an integer number") from error
    if not least <= number <= most:
        raise ApiError(400, f"{name} must be between {least} and {most}")
    return number


def _port(request: web.Request) -> int:
    port = _integer(request.match_info["port"], "port", 1, 65535)
    if port not in PORTS or port in RESERVED:
        raise ApiError(400, f"Port {port} cannot be previewed: ports {PORTS[0]} to {PORTS[-1]} can")
    return port
