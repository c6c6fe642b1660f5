"""Sandboxes on Daytona: made from a snapshot, the guest started by the toolbox, the channel a WebSocket that we dial.

Nothing in a sandbox can reach the network: organisations on lower tiers could not be given any, and none is needed.
"""

from __future__ import annotations

import importlib.util
import io
import json
import marshal
import shlex
import zipfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import anyio
from daytona import AsyncSandbox, CreateSandboxFromSnapshotParams, ListSandboxesQuery
from daytona.common import errors as sdk

import harness.guest
from harness.errors import ProviderUnavailable, QuotaError, SandboxError, SandboxGone
from harness.guest import ROOT
from harness.rollout.lock import Lock
from harness.sandbox.base import (
    Capabilities,
    Environment,
    Exit,
    Finding,
    Progress,
    Provider,
    Sandbox,
    SandboxInfo,
    SandboxSettings,
    SandboxSpec,
)
from harness.sandbox.daytona import snapshots
from harness.sandbox.daytona.client import (
    CALL_S,
    Client,
    ServiceFailed,
    configuration,
    is_transient,
    patiently,
    translate,
)
from harness.sandbox.daytona.limits import QUOTA_ALONE_S, is_quota
from harness.sandbox.daytona.stream import ResumingStream
from harness.sandbox.labels import PREFIX, labels, owner_of

PORT = 7070
GUEST = "/tmp/harness-guest.zip"  # written by the machine's daemon before any rollout's code is there
LOG = "/tmp/harness-guest.log"
MARK = {f"{PREFIX}managed": "true"}
"""The service finds sandboxes by a label's value only."""
AUTO_STOP_MIN = 15
TTL_MIN = 120
HEARTBEAT_S = 240.0
TTL_EVERY = 10
"""Heartbeats between two renewals of the time to live."""
CREATE_S = 300.0
ADMISSION_S = 1800.0
READY_S = 60.0
REMOVE_S = 30.0
LATE_S = 5.0
TRIES = 3
_GONE = ("destroyed", "destroying")


class DaytonaSandbox(Sandbox):
    stream: ResumingStream

    def __init__(self, provider: DaytonaProvider, remote: AsyncSandbox, stream: ResumingStream) -> None:
        self.id = remote.id
        self.name = remote.name
        self.stream = stream
        self._provider = provider
        self._remote = remote
        self._destroying = anyio.Lock()
        self._destroyed = False

    async def outcome(self) -> Exit:
        said = self.stream.last_words
        if said is not None:
            code, lines = said["code"], said["last_lines"]
            if code == 137 and said["oom_kills"]:
                return Exit(state="out_of_memory", code=code, detail="the memory limit was reached", last_lines=lines)
            return Exit(state="killed" if code > 128 else "exited", code=code, last_lines=lines)
        with anyio.move_on_after(CALL_S):
            try:
                await patiently(lambda: self._remote.refresh_data(request_timeout=CALL_S / 4), attempts=3)
            except sdk.DaytonaNotFoundError:
                return Exit(state="gone", detail="Daytona knows no such sandbox any more")
            except Exception as error:
                return Exit(state="engine_unreachable", detail=translate(error, "Daytona does not answer").message)
            return await self._by_state(str(self._remote.state.value if self._remote.state else ""))
        return Exit(state="engine_unreachable", detail=f"Daytona did not answer within {CALL_S:.0f} s")

    async def _by_state(self, state: str) -> Exit:
        reason = self._remote.error_reason or ""
        if self._remote.spot_evicted_at:
            return Exit(state="gone", detail="evicted: its spot capacity was taken back")
        if state in _GONE:
            return Exit(state="gone", detail=f"the sandbox is {state}")
        if state != "started":
            if "memory" in reason.lower() or "oom" in reason.lower():
                return Exit(state="out_of_memory", detail=reason)
            return Exit(state="killed", detail=f"the sandbox is {state}{f': {reason}' if reason else ''}")
        try:
            return await self._ask_toolbox()
        except sdk.DaytonaError as error:
            text = translate(error, "the sandbox is started, but its toolbox does not answer").message
            return Exit(state="engine_unreachable", detail=text)

    async def _ask_toolbox(self) -> Exit:
        """What became of the bridge, where it could not say so itself."""
        pid = self.stream.pid or 0
        look = (
            "cat /sys/fs/cgroup/memory.events 2>/dev/null; "
            f"test {pid} -gt 0 && kill -0 {pid} 2>/dev/null && echo alive; echo; tail -c 8192 {LOG} 2>/dev/null"
        )
        said = await patiently(lambda: self._remote.process.exec(look, timeout=10))
        facts, _, lines = said.result.partition("\n\n")
        if facts.endswith("alive"):
            return Exit(state="running", detail="the guest runs, but no connection to it can be made")
        with suppress(ValueError, TypeError, KeyError, IndexError):
            code = int(json.loads(lines.splitlines()[-1])["code"])
            return Exit(state="killed" if code > 128 else "exited", code=code, last_lines=lines)
        kills = [line.split()[1] for line in facts.splitlines() if line.startswith("oom_kill ")]
        if kills == ["0"]:
            return Exit(state="killed", detail="killed by signal 9", last_lines=lines)
        detail = "the memory limit was reached" if kills else "all its processes were killed: most likely out of memory"
        return Exit(state="out_of_memory", detail=detail, last_lines=lines)

    async def destroy(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._destroying:
                if not self._destroyed:
                    await self.stream.aclose()
                    await self._provider._delete(self.name, self._remote)
                    self._destroyed = True
                    self._provider._forget(self.id)


class DaytonaProvider(Provider):
    """The account of DAYTONA_API_KEY, in DAYTONA_TARGET; the SDK's other variables hold, too.

    :param heartbeat_s: how often the service is told that sandboxes are still wanted.
    """

    capabilities = Capabilities(name="daytona", isolation="remote", remote=True, uses_images=True)

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

    async def doctor(self) -> list[Finding]:
        where = configuration()
        try:
            with anyio.fail_after(CALL_S / 2):
                listing = self.client.sdk.list(ListSandboxesQuery(labels=MARK, limit=1), request_timeout=CALL_S / 4)
                async for _ in listing:
                    break
                regions = [str(each["id"]) for each in await self.client.get_json("/regions")]
        except ProviderUnavailable as error:
            return [Finding(check="daytona key", ok=False, detail="no key", remedy=error.hint)]
        except (sdk.DaytonaError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            failure = translate(error, f"{where} cannot be reached")
            remedy = failure.hint or "Check the network, HTTPS_PROXY, and DAYTONA_API_URL."
            return [Finding(check="daytona service", ok=False, detail=failure.message, remedy=remedy)]
        findings = [Finding(check="daytona service", ok=True, detail=f"the key is accepted by {where}")]
        if target := self.client.target:
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
            return await self._start_guest(remote, spec)
        except BaseException as error:
            # A refusal leaves nothing behind; what was not answered, or was cancelled, may.
            refused = isinstance(error, QuotaError) or (isinstance(error, SandboxError) and not error.retryable)
            with anyio.CancelScope(shield=True):
                try:
                    if remote is not None or not refused:
                        await self._delete(spec.name, remote)
                except SandboxError as leftover:
                    error.add_note(f"Sandbox {spec.name} may still exist: {leftover.message}")
                if remote is not None:
                    self._forget(remote.id)
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
            except sdk.DaytonaError as error:
                raise translate(error, f"cannot look for sandbox {name}") from error
            await anyio.sleep(0.5)

    async def _adopt(self, found: AsyncSandbox, what: str) -> AsyncSandbox:
        try:
            await found.wait_for_sandbox_start(timeout=CREATE_S)
        except sdk.DaytonaError as error:
            failure = translate(error, what)
            raise failure if failure.retryable else SandboxGone(failure.message) from error
        self.client.gate.accepted()
        return found

    async def _start_guest(self, remote: AsyncSandbox, spec: SandboxSpec) -> DaytonaSandbox:
        stream = ResumingStream(self.client.dialler(remote, PORT), spec.lease_s)
        resources = spec.settings.resources.model_dump(include={"processes", "open_files", "file_mib"})
        boot = {
            "root": ROOT,
            "uid": None,
            "gid": None,
            "lease_s": spec.lease_s,
            "limits": {**resources, "memory_mib": None},
        }
        options = {"port": PORT, "log": LOG, "keep_alive_s": stream.keep_alive_s, "boot": boot}
        code = f"import sys; sys.path.insert(0, {GUEST!r}); from harness_guest.bridge import main; main()"
        command = shlex.join([spec.environment.python, "-I", "-S", "-c", code, json.dumps(options)])
        try:
            with anyio.fail_after(READY_S):
                await patiently(lambda: remote.fs.upload_file(guest_zip(), GUEST, timeout=int(CALL_S)))
                # Run twice by mistake, the second would find the port taken.
                started = await patiently(lambda: remote.process.exec(command, timeout=int(READY_S)))
            if started.exit_code and b"in use" not in started.result.encode():
                raise ServiceFailed(f"the guest in sandbox {remote.name} did not start: {started.result[-2000:]}")
            await stream.open(READY_S)
        except (sdk.DaytonaError, aiohttp.ClientError, OSError, anyio.BrokenResourceError) as error:
            await stream.aclose()
            raise await self._no_start(remote, stream, error) from error
        except BaseException:
            await stream.aclose()
            raise
        return DaytonaSandbox(self, remote, stream)

    async def _no_start(self, remote: AsyncSandbox, stream: ResumingStream, error: Exception) -> SandboxError:
        what = f"the guest in sandbox {remote.name} did not start"
        exit = await DaytonaSandbox(self, remote, stream).outcome()
        if isinstance(error, sdk.DaytonaError) and exit.state in ("running", "out_of_memory"):
            return translate(error, what)
        lines = f"\nlast lines of the guest:\n{exit.last_lines}" if exit.last_lines else ""
        return ServiceFailed(f"{what}: {exit.detail or exit.state}{lines}")

    async def _delete(self, name: str, remote: AsyncSandbox | None) -> None:
        """Have a sandbox removed, whether its create call was answered or not."""
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
                    if str(remote.state.value if remote.state else "") in _GONE:
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

    def _forget(self, id: str) -> None:
        if self._alive.pop(id, None) is not None:
            self.client.gate.release()

    async def _beat(self) -> None:
        """Tell the service that sandboxes are still wanted: a model that thinks for long is no activity to it."""
        beats = 0
        while True:
            await anyio.sleep(self._heartbeat_s)
            beats += 1
            for remote in list(self._alive.values()):
                try:
                    await self.client.gate.call(
                        "authenticated", partial(remote.refresh_activity, request_timeout=CALL_S / 4)
                    )
                    if beats % TTL_EVERY == 0:
                        await remote.set_ttl(TTL_MIN, request_timeout=CALL_S / 4)
                except sdk.DaytonaError:
                    pass  # whether it is gone is found out by whoever uses it

    async def list(self) -> list[SandboxInfo]:
        found: list[SandboxInfo] = []
        try:
            async for each in self.client.sdk.list(ListSandboxesQuery(labels=MARK), request_timeout=CALL_S):
                state = str(each.state.value if each.state else "")
                if state in _GONE:
                    continue
                found.append(
                    SandboxInfo(
                        id=each.id,
                        name=each.name,
                        state=state,
                        created_at=snapshots._unix(each.created_at),
                        owner=owner_of(each.labels),
                        labels={key: value for key, value in each.labels.items() if key.startswith(PREFIX)},
                    )
                )
        except sdk.DaytonaError as error:
            raise translate(error, "cannot list the sandboxes") from error
        return found

    async def remove(self, info: SandboxInfo) -> None:
        try:
            remote = await patiently(lambda: self.client.sdk.get(info.id, request_timeout=CALL_S / 4))
        except (sdk.DaytonaNotFoundError, sdk.DaytonaGoneError):
            return
        except sdk.DaytonaError as error:
            raise translate(error, f"cannot delete sandbox {info.name}") from error
        with anyio.CancelScope(shield=True):
            await self._delete(info.name, remote)


@cache
def guest_zip() -> bytes:
    """The guest's package, with its source for any Python and its byte code for one like this."""
    output = io.BytesIO()
    folder = Path(harness.guest.__file__).parent
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.glob("*.py")):
            inside = f"harness_guest/{path.name}"
            source = path.read_bytes()
            # Checked by nobody (flag 1): times in an archive mean nothing. Another Python passes it over.
            head = importlib.util.MAGIC_NUMBER + b"\1\0\0\0" + importlib.util.source_hash(source)
            code = marshal.dumps(compile(source, f"{GUEST}/{inside}", "exec", dont_inherit=True))
            archive.writestr(zipfile.ZipInfo(inside), source)
            archive.writestr(zipfile.ZipInfo(f"{inside}c"), head + code)
    return output.getvalue()
