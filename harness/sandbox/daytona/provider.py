"""Sandboxes on Daytona: made from a snapshot, the guest started by the toolbox, the channel a WebSocket that we dial.

Nothing in a sandbox can reach the network: organisations on lower tiers could not be given any, and none is needed.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

import aiohttp
import anyio
from daytona import AsyncSandbox, CreateSandboxFromSnapshotParams, ListSandboxesQuery
from daytona.common import errors as sdk

from harness.errors import ProviderUnavailable, QuotaError, SandboxError, SandboxGone
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
from harness.sandbox.daytona.client import (
    CALL_S,
    FAILURES,
    Client,
    ServiceFailed,
    configuration,
    is_transient,
    patiently,
    translate,
)
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


class DaytonaProvider(Provider):
    """The account of DAYTONA_API_KEY, in DAYTONA_TARGET; the SDK's other variables hold, too.

    :param heartbeat_s: how often the service is told that sandboxes are still wanted.
    """

    capabilities = Capabilities(name="daytona", isolation="remote", kept=True)

    def __init__(self, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._heartbeat_s = heartbeat_s
        self._connected: Client | None = None
        self._alive: dict[str, AsyncSandbox] = {}
        self._tasks: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)
            self._tasks = None
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
        return await snapshots.prune(self.client, budget, progress)

    async def doctor(self) -> list[Finding]:
        where = configuration()
        try:
            with anyio.fail_after(CALL_S / 2):
                listing = self.client.sdk.list(ListSandboxesQuery(labels=MARK, limit=1), request_timeout=CALL_S / 4)
                async for _ in listing:
                    break
        except ProviderUnavailable as error:
            return [Finding(check="daytona key", ok=False, detail="no key", remedy=error.hint)]
        except FAILURES as error:
            failure = translate(error, f"{where} cannot be reached")
            remedy = failure.hint or "Check the network, HTTPS_PROXY, and DAYTONA_API_URL."
            return [Finding(check="daytona service", ok=False, detail=failure.message, remedy=remedy)]
        findings = [Finding(check="daytona service", ok=True, detail=f"the key is accepted by {where}")]
        if target := self.client.target:
            with suppress(aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
                regions = [str(each["id"]) for each in await self.client.get_json("/regions")]
                known = target in regions
                remedy = "" if known else f"Set DAYTONA_TARGET to one of {', '.join(regions)}, or unset it."
                findings.append(Finding(check="daytona region", ok=known, detail=f"region {target}", remedy=remedy))
        return findings

    async def prepare(self, lock: Lock, settings: SandboxSettings, progress: Progress) -> Environment:
        self.client.gate.say = progress
        return await snapshots.ensure(self.client, lock, settings, progress)

    async def create(self, spec: SandboxSpec) -> DaytonaSandbox:
        remote: AsyncSandbox | None = None
        try:
            remote = await self._make(spec)
            self._alive[remote.id] = remote
            return await start_guest(self.client, remote, spec, partial(self._remove, spec.name, remote))
        except BaseException as error:
            # A refusal leaves nothing behind; what was not answered, or was cancelled, may.
            refused = isinstance(error, QuotaError) or (isinstance(error, SandboxError) and not error.retryable)
            with anyio.CancelScope(shield=True):
                try:
                    if remote is not None or not refused:
                        await self._remove(spec.name, remote)
                except SandboxError as leftover:
                    error.add_note(f"Sandbox {spec.name} may still exist: {leftover.message}")
            raise

    async def _make(self, spec: SandboxSpec) -> AsyncSandbox:
        what = f"cannot create sandbox {spec.name}"
        try:
            with anyio.fail_after(ADMISSION_S):
                return await self._made(spec, what)
        except TimeoutError:
            raise ServiceFailed(f"{what}: there was no room for it within {ADMISSION_S / 60:.0f} minutes") from None

    async def _made(self, spec: SandboxSpec, what: str) -> AsyncSandbox:
        """A started sandbox of that name, however many calls it takes: the name makes sure that there is only one."""
        gate = self.client.gate
        params = CreateSandboxFromSnapshotParams(
            name=spec.name,
            snapshot=spec.environment.handle,
            labels={**MARK, **labels(spec.owner, trial=spec.trial, attempt=spec.attempt, lease_s=spec.lease_s)},
            network_block_all=True,
            auto_stop_interval=AUTO_STOP_MIN,
            auto_delete_interval=0,
            ttl_minutes=TTL_MIN,
        )
        alone_until = anyio.current_time() + QUOTA_ALONE_S
        tries = 0
        while True:
            async with gate.attempt():
                try:
                    made = await gate.call("sandbox-create", lambda: self.client.sdk.create(params, timeout=CREATE_S))
                    gate.accepted()
                    return made
                except sdk.DaytonaError as error:
                    failure = error
                if not is_quota(failure):
                    tries += 1
                    # After a conflict an earlier call of ours was carried out; after the rest it may have been.
                    unknown = failure.status_code is None or is_transient(failure)
                    if not unknown and not isinstance(failure, sdk.DaytonaConflictError):
                        raise translate(failure, what) from failure
                    found = await self._find(spec.name)
                    if found is not None:
                        return await self._adopt(found, what)
                    if tries >= TRIES:
                        raise translate(failure, what) from failure
                    continue
                gate.refused(failure.message.splitlines()[0])
            if not gate.existing and anyio.current_time() > alone_until:
                raise translate(failure, what) from failure

    async def _find(self, name: str) -> AsyncSandbox | None:
        """A sandbox whose create was not answered well: it may come into being after that."""
        deadline = anyio.current_time() + LATE_S
        while True:
            try:
                return await patiently(lambda: self.client.sdk.get(name, request_timeout=CALL_S / 4))
            except sdk.DaytonaNotFoundError:
                if anyio.current_time() > deadline:
                    return None
            except FAILURES as error:
                raise translate(error, f"cannot look for sandbox {name}") from error
            await anyio.sleep(0.5)

    async def _adopt(self, found: AsyncSandbox, what: str) -> AsyncSandbox:
        try:
            await found.wait_for_sandbox_start(timeout=CREATE_S)
        except FAILURES as error:
            failure = translate(error, what)
            raise failure if failure.retryable else SandboxGone(failure.message) from error
        self.client.gate.accepted()
        return found

    async def _remove(self, name: str, remote: AsyncSandbox | None) -> None:
        """Have a sandbox of this process deleted, whether its create call was answered or not."""
        known = remote is not None and self._alive.pop(remote.id, None) is not None  # no more heartbeats, come what may
        try:
            await self._delete(name, remote)
        finally:
            if known:
                self.client.gate.release()

    async def _delete(self, name: str, remote: AsyncSandbox | None) -> None:
        with anyio.move_on_after(REMOVE_S):
            if remote is None:
                remote = await self._find(name)
            while remote is not None:
                try:
                    await self.client.gate.call("sandbox-lifecycle", partial(remote.delete, timeout=REMOVE_S))
                    return
                except (sdk.DaytonaNotFoundError, sdk.DaytonaGoneError):
                    return
                except sdk.DaytonaError as error:
                    if not isinstance(error, sdk.DaytonaConflictError) and not is_transient(error):
                        raise translate(error, f"cannot delete sandbox {name}") from error
                # Not now: it is just starting, or being deleted already, or nobody knows.
                try:
                    await remote.refresh_data(request_timeout=CALL_S / 4)
                    if state_of(remote) in GONE:
                        return
                except sdk.DaytonaNotFoundError:
                    return
                except sdk.DaytonaError:
                    pass
                await anyio.sleep(0.5)
            return
        raise SandboxError(
            f"sandbox {name} was not deleted within {REMOVE_S:.0f} s",
            hint=f"It is stopped and deleted by Daytona itself when nobody has used it for {AUTO_STOP_MIN} minutes.",
        )

    async def _beat(self) -> None:
        """Tell the service that sandboxes are still wanted: a model that thinks for long is no activity to it."""
        beats, some = 0, anyio.CapacityLimiter(HEARTBEATS_AT_ONCE)

        async def refresh(remote: AsyncSandbox) -> None:
            # Whether it is gone is found out by whoever uses it.
            async with some:
                with suppress(sdk.DaytonaError, OSError):
                    beat = partial(remote.refresh_activity, request_timeout=CALL_S / 4)
                    await self.client.gate.call("authenticated", beat)
                    if beats % TTL_EVERY == 0:
                        await remote.set_ttl(TTL_MIN, request_timeout=CALL_S / 4)

        while True:
            await anyio.sleep(self._heartbeat_s)
            beats += 1
            async with anyio.create_task_group() as tasks:
                for remote in self._alive.values():
                    tasks.start_soon(refresh, remote)

    async def list(self) -> list[SandboxInfo]:
        found: list[SandboxInfo] = []
        try:
            async for each in self.client.sdk.list(ListSandboxesQuery(labels=MARK), request_timeout=CALL_S):
                state = str(each.state.value) if each.state else ""
                if state in GONE:
                    continue
                found.append(
                    SandboxInfo(
                        id=each.id,
                        name=each.name,
                        state=state,
                        created_at=snapshots.unix_time(each.created_at),
                        owner=owner_of(each.labels),
                        labels={key: value for key, value in each.labels.items() if key.startswith(PREFIX)},
                    )
                )
        except FAILURES as error:
            raise translate(error, "cannot list the sandboxes") from error
        return found

    async def remove(self, info: SandboxInfo) -> None:
        try:
            remote = await patiently(lambda: self.client.sdk.get(info.id, request_timeout=CALL_S / 4))
        except (sdk.DaytonaNotFoundError, sdk.DaytonaGoneError):
            return
        except FAILURES as error:
            raise translate(error, f"cannot delete sandbox {info.name}") from error
        with anyio.CancelScope(shield=True):
            await self._delete(info.name, remote)
