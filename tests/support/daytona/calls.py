"""Requests to the toolbox of a sandbox, and what goes wrong with all of them."""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from . import schema
from .machine import HOME, MachineDown
from .records import Sandbox
from .schema import DAEMON, ApiError
from .sessions import Sessions
from .world import World

Method = Callable[["Call"], Awaitable[web.StreamResponse]]


class Call:
    """A request to the toolbox of a running sandbox. Making one counts as activity."""

    def __init__(self, world: World, request: web.Request) -> None:
        self.request = request
        self.sandbox: Sandbox = world.find(request.match_info["id"])
        self.machine = self.sandbox.running()
        if self.sandbox.sessions is None:
            raise ApiError(502, "bad gateway: the toolbox is not ready", source=schema.PROXY)
        self.sessions: Sessions = self.sandbox.sessions
        self.now = world.clock.now()
        self.sandbox.active_at = self.now

    def path(self, name: str = "path") -> str:
        text = self.request.query.get(name, "")
        if not text:
            raise ApiError(400, f"{name} is required", code="INVALID_FILE_PATH", source=DAEMON)
        return self.absolute(text)

    def absolute(self, path: str) -> str:
        path = HOME + path[1:] if path.startswith("~") else path
        return posixpath.normpath(posixpath.join(self.sessions.workdir, path))


def routes(world: World, table: Mapping[tuple[str, str], Method]) -> list[web.RouteDef]:
    """:param table: what answers a verb and a path below ``/toolbox/{id}``."""

    def answering(method: Method) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await method(Call(world, request))
            except ConnectionError:
                raise
            except (MachineDown, TimeoutError) as error:
                raise ApiError(502, "bad gateway: the sandbox went away", source=schema.PROXY) from error
            except OSError as error:
                raise file_error(error) from error

        return handle

    return [web.route(verb, "/toolbox/{id}" + path, answering(method)) for (verb, path), method in table.items()]


def file_error(error: OSError) -> ApiError:
    kinds = {
        errno.ENOENT: (404, "FILE_NOT_FOUND"),
        errno.ENOTDIR: (404, "FILE_NOT_FOUND"),
        errno.EACCES: (403, "FILE_ACCESS_DENIED"),
        errno.EPERM: (403, "FILE_ACCESS_DENIED"),
    }
    status, code = kinds.get(error.errno or 0, (400, "INVALID_FILE_PATH"))
    return ApiError(status, f"{error.strerror}", code=code, source=DAEMON)
