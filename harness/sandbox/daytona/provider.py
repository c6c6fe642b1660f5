"""Sandboxes on Daytona: made from a snapshot, the guest started by the toolbox, the channel a WebSocket that we dial.

Nothing in a sandbox can reach the network: organisations on lower tiers could not be given any, and none is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import anyio
from daytona import AsyncSandbox, CreateSandboxFromSnapshotParams, ListSandboxesQuery
from daytona.common import errors as sdk

from harness.background import Background
from harness.errors import ImageError, ProviderUnavailable, SandboxError, SandboxGone
from harness.rollout.lock import Lock
from harness.sandbox.base import (
    Capabilities,
    Environment,
    Finding,
    Progress,
    Provider,
    SandboxInfo,
    SandboxSettings,
    SandboxSpec,
    StoredImage,
)
from harness.sandbox.daytona import snapshots
from harness.sandbox.daytona.client import CALL_S, FAILURES, Client, ServiceFailed, is_transient, service_url, translate
from harness.sandbox.daytona.limits import QUOTA_ALONE_S, is_quota
from harness.sandbox.daytona.sandbox import GONE, DaytonaSandbox, start_guest, state_of
from harness.sandbox.labels import PREFIX, labels, owner_of

MARK = {f"{PREFIX}managed": "true"}
"""The service finds sandboxes by a label's value only."""
AUTO_STOP_MIN = 15
TTL_MIN = 120
HEARTBEAT_S = 240.0
HEARTBEATS_AT_ONCE = 16
TTL_EVERY = 10
"""Heartbeats between two renewals of the time to live."""
CREATE_S = 300.0
ADMISSION_S = 1800.0
REMOVE_S = 30.0
LATE_S = 5.0
TRIES = 3
LEFT_HINT = (
    "`harness sandboxes reap --sandbox daytona` removes it; Daytona itself stops and deletes what nobody has used for "
    f"{AUTO_STOP_MIN} minutes."
)


class DaytonaProvider(Provider):
    """The account of DAYTONA_API_KEY, in DAYTONA_TARGET; the SDK's other variables hold, too.

    :param heartbeat_s: how often the service is told that sandboxes are still wanted.
    """

    capabilities = Capabilities(name="daytona", isolation="remote", kept=True)

    def __init__(self, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._heartbeat_s = heartbeat_s
        self._connected: Client | None = None
        self._made: dict[str, AsyncSandbox | None] = {}
        """By name, what may exist: from the create call to the end of the delete call. Null: not answered."""
        self._alive: dict[str, AsyncSandbox] = {}
        """Those of them that are wanted."""

    async def __aenter__(self) -> Self:
        self._background = Background()
        (await self._background.__aenter__()).start_soon(self._beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._background.__aexit__(kind, error, trace)
            await self._remove_rest()
        finally:
            client, self._connected = self._connected, None
            if client is not None:
                await client.aclose()

    @property
    def client(self) -> Client:
        """:raises ProviderUnavailable: there is no key."""
        if self._connected is None:
            self._connected = Client()
        return self._connected

    async def stored(self) -> list[StoredImage]:
        return await snapshots.stored(self.client)

    async def prune(self, budget: int, progress: Progress) -> list[StoredImage]:
        used = {each.snapshot for each in await self._sandboxes()}
        return await snapshots.prune(self.client, budget, used, progress)

    async def doctor(self) -> list[Finding]:
        where = urlsplit(service_url()).netloc

        async def ask() -> None:
            with anyio.fail_after(CALL_S / 4):
                await self.client.sdk.snapshot.list(page=1, limit=1)

        try:
            await self.client.call(ask, f"{where} cannot be reached", attempts=1)
        except SandboxError as error:
            remedy = error.hint or "Check the network, HTTPS_PROXY, and DAYTONA_API_URL."
            return [Finding(check="daytona service", ok=False, detail=error.message, remedy=remedy)]
        return [Finding(check="daytona service", ok=True, detail=f"the key is accepted by {where}")]

    async def prepare(self, lock: Lock, settings: SandboxSettings, progress: Progress) -> Environment:
        return await snapshots.ensure(self.client, lock, settings, progress)

    async def create(self, spec: SandboxSpec) -> DaytonaSandbox:
        try:
            remote = await self._make(spec)
            self.client.gate.accepted()
            self._made[spec.name] = self._alive[spec.name] = remote
            return await start_guest(self.client, remote, spec, partial(self._remove, spec.name))
        except BaseException as error:
            if spec.name in self._made:
                with anyio.CancelScope(shield=True), suppress(SandboxError):  # it is tried again, and told, at the end
                    await self._remove(spec.name, patient=isinstance(error, Exception))
            raise

    async def _make(self, spec: SandboxSpec) -> AsyncSandbox:
        """A started sandbox of that name, however many calls it takes: the name makes sure that there is only one."""
        gate, what = self.client.gate, f"cannot create sandbox {spec.name}"
        params = CreateSandboxFromSnapshotParams(
            name=spec.name,
            snapshot=spec.environment.handle,
            labels={**MARK, **labels(spec.owner, trial=spec.trial, attempt=spec.attempt, lease_s=spec.lease_s)},
            network_block_all=True,
            auto_stop_interval=AUTO_STOP_MIN,
            auto_delete_interval=0,
            ttl_minutes=TTL_MIN,
        )

        async def send() -> AsyncSandbox:
            before = spec.name in self._made
            self._made.setdefault(spec.name)
            try:
                return await self.client.sdk.create(params, timeout=CREATE_S)
            except sdk.DaytonaError as error:
                if _refused(error) and not before:
                    del self._made[spec.name]
                raise

        alone_until = anyio.current_time() + QUOTA_ALONE_S
        tries = 0
        with anyio.move_on_after(ADMISSION_S):
            while True:
                async with gate.attempt():
                    try:
                        return await gate.call("sandbox-create", send)
                    except sdk.DaytonaError as error:
                        failure = error
                    if is_quota(failure):
                        gate.refused(failure.message.splitlines()[0])
                        if not gate.existing and anyio.current_time() > alone_until:
                            break
                    else:
                        tries += 1
                        if _refused(failure):
                            break
                        if (found := await self._find(spec.name, LATE_S)) is not None:
                            return await self._adopt(found, what)
                        if tries >= TRIES:
                            break
            told = translate(failure, what)
            if isinstance(told, ImageError):  # so it is for every other one
                raise ProviderUnavailable(told.message, hint=told.hint) from failure
            raise told from failure
        raise ServiceFailed(f"{what}: there was no room for it within {ADMISSION_S / 60:.0f} minutes")

    async def _find(self, name: str, late_s: float, outside: anyio.CancelScope | None = None) -> AsyncSandbox | None:
        """A sandbox that is there, or comes into being within ``late_s``, as one whose create was not answered may."""
        deadline = anyio.current_time() + late_s
        while True:
            with suppress(SandboxGone):
                look = partial(self.client.sdk.get, name, request_timeout=CALL_S / 4)
                found = await self.client.call(look, f"cannot look for sandbox {name}", outside=outside)
                return None if state_of(found) in GONE else found
            if anyio.current_time() >= deadline:
                return None
            await anyio.sleep(0.5)

    async def _adopt(self, found: AsyncSandbox, what: str) -> AsyncSandbox:
        try:
            await found.wait_for_sandbox_start(timeout=CREATE_S)
        except FAILURES as error:
            failure = translate(error, what)
            raise failure if failure.retryable else SandboxGone(failure.message) from error
        return found

    async def _remove(self, name: str, *, patient: bool = True) -> None:
        """Have a sandbox of this process deleted, whether its create call was answered or not.

        :param patient: whether its create call was waited for; else it may be carried out later still.
        """
        known = self._alive.pop(name, None) is not None  # no more heartbeats, come what may
        try:
            remote = self._made.get(name)
            if await self._delete(name, remote, 0.0 if remote else LATE_S) or patient:
                self._made.pop(name, None)
        finally:
            if known:
                self.client.gate.release()

    async def _remove_rest(self) -> None:
        """Try once more what could not be deleted in its time; say what may exist even then."""

        async def again(name: str) -> None:
            with suppress(SandboxError):
                await self._remove(name, patient=False)

        with anyio.move_on_after(REMOVE_S, shield=True):
            async with anyio.create_task_group() as tasks:
                for name in self._made.keys() - self._alive.keys():
                    tasks.start_soon(again, name)
        if left := self._made.keys() - self._alive.keys():
            self.client.gate.say(f"Daytona: {', '.join(sorted(left))} may still exist, or come late. {LEFT_HINT}")

    async def _delete(self, name: str, remote: AsyncSandbox | None, late_s: float) -> bool:
        """Returns whether there was one. What is waited for the rate limit does not count as its time."""
        with anyio.move_on_after(REMOVE_S) as own:
            while True:
                try:
                    remote = remote or await self._find(name, late_s, own)
                    if remote is not None:
                        delete = partial(remote.delete, timeout=REMOVE_S)
                        what = f"cannot delete sandbox {name}"
                        await self.client.call(delete, what, kind="sandbox-lifecycle", attempts=1, outside=own)
                    return remote is not None
                except SandboxGone:
                    return True
                except ServiceFailed:  # it is just starting, or being deleted already, or nobody knows
                    remote = None
                await anyio.sleep(0.5)
        raise SandboxError(f"sandbox {name} was not deleted within {REMOVE_S:.0f} s", hint=LEFT_HINT)

    async def _beat(self) -> None:
        """Tell the service that sandboxes are still wanted: a model that thinks for long is no activity to it."""
        beats, some = 0, anyio.CapacityLimiter(HEARTBEATS_AT_ONCE)

        async def refresh(remote: AsyncSandbox) -> None:
            async def beat() -> None:
                await remote.refresh_activity()
                if beats % TTL_EVERY == 0:
                    await remote.set_ttl(TTL_MIN)

            async with some:
                with suppress(SandboxError):  # whether it is gone is found out by whoever uses it
                    await self.client.call(beat, "no heartbeat", attempts=1)

        while True:
            await anyio.sleep(self._heartbeat_s)
            beats += 1
            async with anyio.create_task_group() as tasks:
                for remote in self._alive.values():
                    tasks.start_soon(refresh, remote)

    async def _sandboxes(self) -> Sequence[AsyncSandbox]:
        async def ask() -> Sequence[AsyncSandbox]:
            return [each async for each in self.client.sdk.list(ListSandboxesQuery(labels=MARK))]

        found = await self.client.call(ask, "cannot list the sandboxes", kind="sandbox-list")
        return [each for each in found if state_of(each) not in GONE]

    async def list(self) -> list[SandboxInfo]:
        return [
            SandboxInfo(
                id=each.id,
                name=each.name,
                state=state_of(each),
                created_at=snapshots.unix_time(each.created_at),
                owner=owner_of(each.labels),
                labels={key: value for key, value in each.labels.items() if key.startswith(PREFIX)},
            )
            for each in await self._sandboxes()
        ]

    async def remove(self, info: SandboxInfo) -> None:
        with anyio.CancelScope(shield=True):
            await self._delete(info.name, None, 0.0)


def _refused(error: sdk.DaytonaError) -> bool:
    """Whether a create call certainly made nothing. After a conflict an earlier one was carried out."""
    if is_quota(error) or isinstance(error, sdk.DaytonaRateLimitError):
        return True
    unknown = error.status_code is None or is_transient(error)
    return not unknown and not isinstance(error, sdk.DaytonaConflictError)
