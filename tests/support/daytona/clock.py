"""The service's clock, which a test can put forward, and what it keeps: request windows."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple


class Clock:
    """Seconds since the epoch; runs with real time, and jumps when told to."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self.on_jump: list[Callable[[], Awaitable[None]]] = []

    def now(self) -> float:
        return time.time() + self._ahead

    async def advance(self, seconds: float) -> None:
        """Jump, and return when all that became due has been done (or begun, where it takes time)."""
        self._ahead += seconds
        for follow in self.on_jump:
            await follow()


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Rate(NamedTuple):
    limit: int
    window_s: float = 60.0


class RateLimits:
    """Fixed windows per throttler, as the service keeps them: whoever exceeds one is shut out for a whole window."""

    def __init__(self, clock: Clock, rates: Mapping[str, Rate]) -> None:
        self._clock = clock
        self.rates = dict(rates)
        self._windows: dict[str, tuple[float, int]] = {}
        self._blocked: dict[str, float] = {}

    def hit(self, throttlers: Iterable[str]) -> tuple[dict[str, str], bool]:
        """Count one request. Returns the headers of its answer, and whether it may pass."""
        headers: dict[str, str] = {}
        for name in throttlers:
            if name not in self.rates:
                continue
            rate, now = self.rates[name], self._clock.now()
            end, hits = self._windows.get(name, (0.0, 0))
            if now >= end:
                end, hits = now + rate.window_s, 0
            self._windows[name] = end, hits = end, hits + 1
            if hits > rate.limit and self._blocked.get(name, 0.0) <= now:
                self._blocked[name] = now + rate.window_s
            blocked = self._blocked.get(name, 0.0) - now
            headers[f"X-RateLimit-Limit-{name}"] = str(rate.limit)
            headers[f"X-RateLimit-Remaining-{name}"] = str(max(0, rate.limit - hits))
            headers[f"X-RateLimit-Reset-{name}"] = str(math.ceil(end - now))
            if blocked > 0:
                headers[f"Retry-After-{name}"] = str(math.ceil(blocked))
                return headers, False
        return headers, True
