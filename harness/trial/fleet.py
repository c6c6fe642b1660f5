"""Sandboxes ahead of need: while trials run the next ones are made, so that creation is on no trial's critical path."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Self

import anyio

from harness.background import Background
from harness.errors import HarnessError, SandboxError
from harness.trial.session import Blueprint, Session, keep


class Fleet:
    """Makes and hands out sessions, and is the one place that limits how many sandboxes exist.

    At most ``max_in_flight`` sessions are in use and at most ``ahead`` wait, loaded, for a trial. Leaving the
    ``async with`` destroys all of them.

    :param demand: how many sessions will be asked for at least; none is made ahead of that.
    """

    def __init__(self, blueprint: Blueprint, *, max_in_flight: int, ahead: int, demand: int = 0) -> None:
        self.blueprint = blueprint
        self._in_use = anyio.Semaphore(max_in_flight)
        self._max_in_flight = max_in_flight
        self._ahead = ahead
        self._demand = demand
        self._making = 0
        self._idle: deque[Session] = deque()
        self._waiting: deque[_Request] = deque()
        self._background = Background()
        self._tasks = self._background.tasks

    async def __aenter__(self) -> Self:
        await self._background.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.__aexit__(kind, error, trace)

    def fill(self) -> None:
        """Start making what is missing. Called whenever a session was taken, asked for or lost."""
        while self._making < len(self._waiting) + min(self._ahead, self._demand) - len(self._idle):
            self._making += 1
            self._tasks.start_soon(self._make)

    async def take(self) -> Session:
        """A live, loaded session, as soon as fewer than ``max_in_flight`` are in use. Give it back with ``give_back``.

        :raises HarnessError: it could not be made.
        """
        await self._in_use.acquire()
        try:
            self._demand = max(self._demand - 1, 0)
            while self._idle:
                session = self._idle.popleft()
                if session.alive:
                    return session
                await session.release()
            request = _Request()
            self._waiting.append(request)
            try:
                self.fill()
                await request.answered.wait()
            except BaseException:
                if request.session is not None:
                    self._idle.appendleft(request.session)
                elif request in self._waiting:
                    self._waiting.remove(request)
                raise
            if request.error is not None:
                raise request.error
            assert request.session is not None
            return request.session
        except BaseException:
            self._in_use.release()
            raise
        finally:
            self.fill()

    async def give_back(self, session: Session) -> None:
        """Have a session's sandbox destroyed; returns when it is gone."""
        try:
            await session.release()
        finally:
            self._in_use.release()

    def put(self, session: Session) -> None:
        """Offer a session that nobody has used, to whoever waits for one first."""
        if self._waiting:
            self._waiting.popleft().answer(session=session)
        else:
            self._idle.append(session)

    async def open(self) -> Session:
        """A session outside all counting, for a check before the fleet starts. ``put`` it, or ``release`` it.

        :raises HarnessError: it could not be made.
        """
        session: Session = await self._tasks.start(keep, self.blueprint)
        return session

    async def _make(self) -> None:
        try:
            session = await self.open()
        except Exception as error:
            known = error if isinstance(error, HarnessError) else SandboxError(f"no sandbox could be made: {error!r}")
            if self._waiting:
                self._waiting.popleft().answer(error=known)
        else:
            self.put(session)
        finally:
            self._making -= 1


class _Request:
    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.session: Session | None = None
        self.error: HarnessError | None = None

    def answer(self, *, session: Session | None = None, error: HarnessError | None = None) -> None:
        self.session, self.error = session, error
        self.answered.set()
