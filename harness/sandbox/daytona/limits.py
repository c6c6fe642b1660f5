"""What the organisation may ask for, and when: one gate for all calls of this process to one service.

Requests are counted by the service per throttler, which it names in headers (``X-RateLimit-Remaining-sandbox-create``,
``Retry-After-sandbox-lifecycle``); the gate keeps those counts: a full window makes callers wait here and not run into
it. Sandboxes are limited by quotas, which no header tells: the first refusal says how many there is room for.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import anyio
from daytona.common.errors import DaytonaError, DaytonaRateLimitError

Kind = Literal["sandbox-create", "sandbox-lifecycle", "authenticated"]
WINDOW_S = 60.0
MAX_HOLD_S = 900.0
JITTER_S = 1.0
TELL_S = 5.0
QUOTA_RETRY_S, QUOTA_RETRY_MAX_S = 0.25, 60.0
QUOTA_ALONE_S = 60.0
"""How long to wait for room when no sandbox of this process is there that could make some."""
_HEADER = re.compile(r"(retry-after|x-ratelimit-limit|x-ratelimit-remaining|x-ratelimit-reset)-?(.*)")
_OF_ONE_KIND = ("sandbox-create", "sandbox-lifecycle", "sandbox-list")
_QUOTA_WORDS = ("limit exceeded", "limit reached", "quota", "insufficient", "no available runners")


def is_quota(error: DaytonaError) -> bool:
    """Whether the service has no room for another sandbox now. It says so in words only, with status 400 or 403."""
    text = error.message.lower()
    full = any(word in text for word in _QUOTA_WORDS) and "per sandbox" not in text
    return full and error.status_code in (400, 402, 403, 409, 503)


@dataclass
class _Window:
    """One throttler's count: ``left`` calls until ``ends``, none before ``opens`` (monotonic seconds)."""

    limit: float = math.inf
    left: float = math.inf
    ends: float = 0.0
    opens: float = 0.0


class Gate:
    """:param say: takes a line for the user when everyone has to wait, or when there will be fewer sandboxes."""

    def __init__(self, say: Callable[[str], None] = lambda line: None) -> None:
        self.say = say
        self.existing = 0
        """Sandboxes of this process."""
        self._trying = 0
        self._why = ""
        self.room: int | None = None
        """How many sandboxes there is room for, once the service has refused one; null before."""
        self._windows: dict[str, _Window] = {}
        self._changed = anyio.Event()
        self._probe_at = 0.0
        self._backoff_s = QUOTA_RETRY_S
        self._told: dict[str, float] = {}

    # Requests

    def observe(self, headers: Mapping[str, str]) -> None:
        """Take over what an answer's headers say, whatever its status."""
        now = time.monotonic()
        found: dict[str, dict[str, float]] = {}
        for name, value in headers.items():
            if known := _HEADER.fullmatch(name.lower()):
                with suppress(ValueError):
                    seconds = float(value) if float(value) < 1e9 else float(value) - time.time()  # or a Unix time
                    found.setdefault(known[2], {})[known[1].removeprefix("x-ratelimit-")] = max(0.0, seconds)
        for throttler, said in found.items():
            window = self._windows.setdefault(throttler, _Window())
            window.limit = said.get("limit", window.limit)
            if "retry-after" in said:
                window.opens = max(window.opens, now + min(said["retry-after"], MAX_HOLD_S))
            if "remaining" in said:
                left = said["remaining"]
                # Answers overtake each other, and calls that are under way are counted here but not yet there.
                window.left = min(window.left, left) if now < window.ends else left
                window.ends = now + min(said.get("reset", WINDOW_S), MAX_HOLD_S)

    async def call[T](self, kind: Kind, send: Callable[[], Awaitable[T]]) -> T:
        """Make a call as soon as it may be made; again when the service says that it was too early.

        The caller sets the deadline.
        """
        attempt = 0
        while True:
            while (delay := self._delay(kind)) > 0:
                if delay > TELL_S:
                    self._tell(kind, f"Daytona's rate limit ({kind}) is used up; waiting {delay:.0f} s", delay)
                await anyio.sleep(delay + random.uniform(0, JITTER_S))
            for window in self._of(kind):
                window.left -= 1
            try:
                return await send()
            except DaytonaRateLimitError as error:
                self.observe(error.headers)
                if not self._delay(kind):  # it did not say for how long
                    window = self._windows.setdefault(kind, _Window())
                    window.opens = time.monotonic() + min(2.0**attempt, WINDOW_S)
                attempt += 1

    def _of(self, kind: Kind) -> list[_Window]:
        """The windows that count for a kind; of throttlers that we do not know, all."""
        return [window for name, window in self._windows.items() if name not in _OF_ONE_KIND or name == kind]

    def _delay(self, kind: Kind) -> float:
        now = time.monotonic()
        delay = 0.0
        for window in self._of(kind):
            delay = max(delay, window.opens - now)
            if window.left < 1:
                if now < window.ends:
                    delay = max(delay, window.ends - now)
                else:
                    window.left, window.ends = window.limit, now + WINDOW_S
        return delay

    # Sandboxes

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """One try to make a sandbox, as soon as there may be room for it."""
        while self.room is not None and self.existing + self._trying >= self.room:
            wait = self._probe_at - time.monotonic()
            if wait <= 0:  # perhaps others have given something back: one may try
                self._probe_at = time.monotonic() + self._backoff_s
                break
            changed = self._changed
            with anyio.move_on_after(wait):
                await changed.wait()
        self._trying += 1
        try:
            yield
        finally:
            self._trying -= 1
            if not self._trying and self._why:  # now it is known how many were made
                why, self._why = self._why, ""
                then = f"going on with {self.room} sandboxes at a time" if self.room else "waiting for room"
                self._tell("quota", f"Daytona: {why}; {then}", 30.0)
            self._wake()

    def accepted(self) -> None:
        """A sandbox was made; ``release`` when it is gone."""
        self.existing += 1
        if self.room is not None and self.existing > self.room:  # there is more than was thought: the next may try, too
            self.room = self.existing + 1
            self._backoff_s = QUOTA_RETRY_S

    def refused(self, why: str) -> None:
        """The service had no room for another sandbox."""
        room = self.existing + self._trying - 1  # the others that are under way may have better luck
        if self.room is None or room < self.room:
            self._why = why
        self.room = room
        self._probe_at = time.monotonic() + self._backoff_s * random.uniform(1.0, 1.5)
        self._backoff_s = min(self._backoff_s * 2, QUOTA_RETRY_MAX_S)

    def release(self) -> None:
        """A sandbox is gone: its room comes back, if not at once."""
        self.existing -= 1
        self._probe_at, self._backoff_s = 0.0, QUOTA_RETRY_S
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def _tell(self, what: str, line: str, every_s: float) -> None:
        now = time.monotonic()
        if now >= self._told.get(what, 0.0):
            self._told[what] = now + every_s
            self.say(line)
