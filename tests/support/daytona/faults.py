"""Faults that a test orders: rules for requests to come, and things that happen to a sandbox now."""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import web

if TYPE_CHECKING:
    from .world import World


@dataclass(frozen=True)
class Respond:
    """Answer at once with an error, instead of doing anything."""

    status: int
    message: str = "Injected fault"
    code: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def too_many(throttler: str = "sandbox-create", *, retry_after: int = 1, limit: int = 300) -> Respond:
    """The service's 429."""
    values = {"X-RateLimit-Limit": limit, "X-RateLimit-Remaining": 0, "X-RateLimit-Reset": retry_after}
    headers = {f"{name}-{throttler}": str(value) for name, value in {**values, "Retry-After": retry_after}.items()}
    return Respond(429, "ThrottlerException: Too Many Requests", headers=headers)


@dataclass(frozen=True)
class Delay:
    """Wait before the request is looked at."""

    seconds: float


@dataclass(frozen=True)
class LoseResponse:
    """Do it, then close the connection without an answer."""


@dataclass(frozen=True)
class SlowStart:
    """For creates: the sandbox stays ``creating`` this much longer."""

    seconds: float


@dataclass(frozen=True)
class Stuck:
    """For creates and deletes: ``creating`` or ``destroying`` without end, until ``Faults.release``."""


@dataclass(frozen=True)
class Break:
    """For WebSockets and preview connections: ``cut`` them, or let them fall silent both ways (half-open)."""

    after_bytes: int = 0
    silent: bool = False


Action = Respond | Delay | LoseResponse | SlowStart | Stuck | Break
FAULTS = web.RequestKey("faults", list[Action])
"""Where a request carries those that were ordered for it."""


@dataclass
class _Rule:
    match: str
    action: Action
    left: int | None


class Faults:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rules: list[_Rule] = []

    def add(self, match: str, action: Action, times: int | None = 1) -> None:
        """Do ``action`` to the next ``times`` requests (None: to all) that ``match``.

        :param match: a shell pattern for ``METHOD /path`` with the path after ``/api``: ``POST /sandbox``,
            ``DELETE /sandbox/*``, ``* /toolbox/<id>/process/*``, ``PREVIEW /<id>/<port>``.
        """
        self._rules.append(_Rule(match, action, times))

    def clear(self) -> None:
        self._rules.clear()

    @property
    def left(self) -> int:
        """How many requests the rules that have a number still wait for."""
        return sum(rule.left or 0 for rule in self._rules)

    def take(self, method: str, path: str) -> list[Action]:
        taken = []
        for rule in self._rules:
            if rule.left != 0 and fnmatchcase(f"{method} {path}", rule.match):
                taken.append(rule.action)
                rule.left = None if rule.left is None else rule.left - 1
        return taken

    async def vanish(self, sandbox: str) -> None:
        """It was never there: no processes, no record, 404."""
        await self._world.vanish(self._world.find(sandbox))

    async def evict(self, sandbox: str) -> None:
        """Spot capacity was taken back: destroyed, and its record says so."""
        await self._world.evict(self._world.find(sandbox))

    async def fail(self, sandbox: str, reason: str = "Sandbox crashed") -> None:
        """State ``error``, processes gone."""
        await self._world.fail(self._world.find(sandbox), reason)

    async def out_of_memory(self, sandbox: str) -> None:
        """The kernel kills all that runs in it, the sandbox and its toolbox stay."""
        await self._world.find(sandbox).running().call("kill", pid=-1, number=int(signal.SIGKILL))

    def toolbox_down(self, sandbox: str, down: bool = True) -> None:
        """502 from the proxy for toolbox and previews, while the state is ``started``; open connections are cut."""
        record = self._world.find(sandbox)
        record.toolbox_down = down
        if down:
            self.cut(sandbox)

    def expire_tokens(self, sandbox: str) -> None:
        self._world.find(sandbox).new_token()

    def cut(self, sandbox: str) -> None:
        """Close all of its open WebSockets and preview connections, without a word."""
        for link in list(self._world.find(sandbox).links):
            link.cut()

    def silence(self, sandbox: str) -> None:
        """Leave them open, forward nothing more."""
        for link in self._world.find(sandbox).links:
            link.silent = True

    def release(self, sandbox: str) -> None:
        """End what ``Stuck`` began."""
        self._world.find(sandbox).released.set()


class Request(NamedTuple):
    method: str
    path: str
    endpoint: str
    """The path with names for its variable parts: ``/sandbox/{id}``."""
    status: int
    at: float


class RequestLog:
    """The requests so far: counts of all, and the last 50,000."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._last: deque[Request] = deque(maxlen=50_000)

    def add(self, request: Request) -> None:
        self.counts[f"{request.method} {request.endpoint}"] += 1
        self._last.append(request)

    def count(self, pattern: str) -> int:
        """How many match a shell pattern for ``METHOD endpoint``, as ``POST /sandbox`` or ``* /toolbox/*``."""
        return sum(number for name, number in self.counts.items() if fnmatchcase(name, pattern))

    def __iter__(self) -> Iterator[Request]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)
