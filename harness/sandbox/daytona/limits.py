"""What the organisation may ask for, and when: one gate for all calls of this process to one service.

Requests are counted by the service per throttler, which it names in headers (``X-RateLimit-Remaining-sandbox-create``,
``Retry-After-sandbox-lifecycle``); the gate keeps those counts: a full window makes callers wait here and not run into
it. Sandboxes are limited by quotas, which no header tells: the first refusal says how many there is room for.
"""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

import anyio
from anyio import CancelScope
from daytona.common.errors import DaytonaError, DaytonaRateLimitError

from harness.errors import QuotaError

Kind = Literal["sandbox-create", "sandbox-lifecycle", "sandbox-list", "authenticated"]
WINDOW_S = 60.0
PATIENCE_S = 600.0
"""How long a call waits at most until it may be made."""
JITTER_S = 1.0
TELL_S = 5.0
QUOTA_RETRY_S, QUOTA_RETRY_MAX_S = 0.25, 60.0
QUOTA_ALONE_S = 60.0
"""How long to wait for room when no sandbox of this process is there that could make some."""
_HEADER = re.compile(r"(retry-after|x-ratelimit-limit|x-ratelimit-remaining|x-ratelimit-reset)-?(.*)")
_OF_ONE_KIND = ("sandbox-create", "sandbox-lifecycle", "sandbox-list")
_FAILED = "failed-auth"
"""Counts what was refused only: that it is used up concerns every call, how much is left none."""
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
    def __init__(self) -> None:
        self.say: Callable[[str], None] = logging.getLogger(__name__).warning
        """Takes a line that the user must not miss, whatever else is printed: that everyone has to wait, that there
        will be fewer sandboxes, that some may be left."""
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
                    found.setdefault(known[2], {})[known[1].removeprefix("x-ratelimit-")] = _number(value)
        for throttler, said in found.items():
            window = self._windows.setdefault(throttler, _Window())
            window.limit = said.get("limit", window.limit)
            if "retry-after" in said:
                window.opens = max(window.opens, now + said["retry-after"])
            if "remaining" in said and throttler != _FAILED:
                left = said["remaining"]
                # Answers overtake each other, and calls that are under way are counted here but not yet there.
                window.left = min(window.left, left) if now < window.ends else left
                window.ends = now + said.get("reset", WINDOW_S)

    async def call[T](self, kind: Kind, send: Callable[[], Awaitable[T]], outside: CancelScope | None = None) -> T:
        """Make a call as soon as it may be made; again when the service says that it was too early.

        :param outside: a scope whose deadline is put off by what is waited here.
        :raises QuotaError: it may not be made within ``PATIENCE_S``.
        """
        attempt, unexplained = 0, 0.0
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while (delay := max(self._delay(kind), unexplained)) > 0:
                limit, unexplained = f"Daytona's rate limit ({kind}) is used up", 0.0
                if time.monotonic() + delay > deadline:
                    raise QuotaError(f"{limit} for another {delay:.0f} s", hint="Try again then.")
                if delay > TELL_S:
                    self._tell(kind, f"{limit}; waiting {delay:.0f} s", delay)
                delay += random.uniform(0, JITTER_S)
                if outside is not None:
                    outside.deadline += delay
                await anyio.sleep(delay)
            for window in self._of(kind):
                window.left -= 1
            try:
                return await send()
            except DaytonaRateLimitError:
                # The client has observed the answer, if the service itself gave it.
                unexplained = min(2.0**attempt, WINDOW_S)
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


def _number(value: str) -> float:
    """A header's number, or the seconds until the time that it names. Raises ``ValueError`` when it is neither."""
    try:
        number = float(value)
    except ValueError:
        number = parsedate_to_datetime(value).timestamp()
    return max(0.0, number if number < 1e9 else number - time.time())
