"""One sandbox with its guest, from the create call until it is gone.

A session is kept by a task of its own, so that it can be made ahead of need by one task and used by another, and so
that whoever uses it cannot forget to destroy it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskStatus

from harness.channel import Guest, Loaded
from harness.errors import ChannelError, EntryPointError, HarnessError, OutOfMemory, SandboxGone
from harness.models import CallRecord
from harness.relay import EgressRecord, Lease, Relay
from harness.sandbox.base import Environment, Exit, Owner, Provider, Sandbox, SandboxSettings, SandboxSpec

HELLO_S = 120.0
LOAD_S = 300.0
TEARDOWN_S = 60.0
EXIT_S = 0.5


@dataclass(frozen=True)
class Blueprint:
    """Everything that all sandboxes of a run have in common."""

    provider: Provider
    environment: Environment
    settings: SandboxSettings
    owner: Owner
    relay: Relay
    entrypoint: str
    code: bytes
    """The rollout's code as a tar."""
    log_bytes: int = 1 << 20
    lease_s: float = 60.0
    journal: Callable[[str], None] = lambda name: None
    """Told each sandbox's name before it is made."""


@dataclass
class Listener:
    """Where a session's model calls and log lines go: to its trial, once it has one."""

    on_call: Callable[[CallRecord], None] = lambda record: None
    on_log: Callable[[str, str], None] = lambda source, text: None


@dataclass
class Session:
    """A loaded sandbox that waits for its trial, or runs it."""

    name: str
    sandbox: Sandbox
    guest: Guest
    lease: Lease
    loaded: Loaded
    provision_s: float
    load_s: float
    exit: Exit | None = None
    """What became of the sandbox; asked only when it was not released in good health."""
    teardown_s: float = 0.0
    warnings: list[str] = field(default_factory=list)
    _listener: Listener = field(default_factory=Listener)
    _early_log: list[tuple[str, str]] = field(default_factory=list)
    _dropped: dict[str, int] = field(default_factory=dict)
    _released: anyio.Event = field(default_factory=anyio.Event)
    _gone: anyio.Event = field(default_factory=anyio.Event)

    @property
    def alive(self) -> bool:
        return self.guest.alive and not self._released.is_set()

    def attach(self, listener: Listener) -> None:
        """Send what is recorded from now on, and what was printed while loading, to this listener."""
        self._listener = listener
        for source, text in self._early_log:
            listener.on_log(source, text)
        self._early_log.clear()

    async def release(self) -> None:
        """Have the sandbox destroyed, and wait until it is gone."""
        self._released.set()
        await self._gone.wait()


async def keep(blueprint: Blueprint, *, trial: str = "", attempt: int = 0, task_status: TaskStatus[Session]) -> None:
    """Make a sandbox, load the code, hand the session to whoever started this, and destroy it when it is released.

    :raises HarnessError: before the session was handed over; nothing is left behind then. Afterwards it never raises.
    """
    name = f"harness-{uuid.uuid4().hex[:20]}"
    blueprint.journal(name)
    started = time.monotonic()
    spec = SandboxSpec(
        name=name,
        owner=blueprint.owner,
        environment=blueprint.environment,
        settings=blueprint.settings,
        trial=trial,
        attempt=attempt,
        lease_s=blueprint.lease_s,
    )
    session: Session | None = None
    log: list[tuple[str, str]] = []

    def on_log(source: str, text: str, dropped: int) -> None:
        if session is None:
            log.append((source, text))
            return
        session._listener.on_log(source, text)
        session._dropped[source] = dropped

    def on_call(record: CallRecord) -> None:
        if session is not None:
            session._listener.on_call(record)

    def on_egress(record: EgressRecord) -> None:
        on_log("egress", record.model_dump_json() + "\n", 0)

    lease = Lease(blueprint.relay, on_call=on_call, on_egress=on_egress, allow=blueprint.settings.allow)
    sandbox = await blueprint.provider.create(spec)
    healthy = False
    try:
        async with Guest(sandbox.stream, serve=lease.serve, on_log=on_log, lease_s=blueprint.lease_s) as guest:
            try:
                await guest.hello(HELLO_S)
                provisioned = time.monotonic()
                loaded = await guest.load(
                    entrypoint=blueprint.entrypoint,
                    code=blueprint.code,
                    env=blueprint.settings.variables(),
                    token=lease.token,
                    log_bytes=blueprint.log_bytes,
                    proxy=bool(blueprint.settings.allow),
                    timeout=LOAD_S,
                )
            except (ChannelError, TimeoutError) as error:
                raise await gone(sandbox, error) from None
            if not loaded.ok:
                raise load_error(loaded, "".join(text for _, text in log))
            session = Session(
                name=name,
                sandbox=sandbox,
                guest=guest,
                lease=lease,
                loaded=loaded,
                provision_s=provisioned - started,
                load_s=time.monotonic() - provisioned,
                _early_log=log,
            )
            task_status.started(session)
            await session._released.wait()
            healthy = guest.alive
            guest.exit()
    except Exception as error:
        if session is None:
            raise
        session.warnings.append(f"internal error of sandbox {name}: {error!r}")  # its trial's, and nobody else's
    finally:
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + TEARDOWN_S) as scope:
            teardown = time.monotonic()
            await lease.revoke()
            if session is not None and not healthy:
                session.exit = await sandbox.outcome()
            try:
                await sandbox.destroy()
            except Exception as error:
                if session is not None:
                    session.warnings.append(f"sandbox {name} may still exist: {error}")
        if session is not None:
            if scope.cancelled_caught:
                session.warnings.append(f"sandbox {name} was not confirmed gone within {TEARDOWN_S:g} s")
            session.warnings += [f"{n} bytes of {source} were left out" for source, n in session._dropped.items() if n]
            session.teardown_s = time.monotonic() - teardown
            session._gone.set()


async def gone(sandbox: Sandbox, error: BaseException) -> HarnessError:
    """The error for a sandbox whose channel broke or that stopped answering, by what the provider says became of it."""
    if isinstance(error, HarnessError) and not error.retryable:
        return error  # it broke the protocol: that is the answer
    exit = await sandbox.outcome()
    if exit.state == "out_of_memory":
        return OutOfMemory(
            f"sandbox {sandbox.name} used more memory than it may", hint="raise memory_mib in [tool.harness.sandbox]"
        )
    detail = f": {exit.detail}" if exit.detail else ""
    code = f", exit code {exit.code}" if exit.code is not None else ""
    last = f"\nlast lines of the guest:\n{exit.last_lines}" if exit.last_lines else ""
    what = {
        "running": "stopped answering",
        "engine_unreachable": "cannot be asked for: its engine does not answer",
        "engine_restarted": "was lost when its engine was restarted",
    }
    state = what.get(exit.state, exit.state.replace("_", " "))
    return SandboxGone(f"sandbox {sandbox.name} {state}{code}{detail}{last}")


def load_error(loaded: Loaded, printed: str) -> HarnessError:
    """The error for an entry point that could not be imported in the sandbox."""
    if loaded.error is None:
        return EntryPointError("the entry point could not be loaded", hint=printed[-2000:])
    trace = loaded.error.traceback.strip()
    return EntryPointError(loaded.error.message, hint=trace.replace("\n", "\n  "))


def describe(session: Session) -> dict[str, Any]:
    """What a trial's record says about its sandbox."""
    found: dict[str, Any] = {"id": session.sandbox.id, "name": session.name, "sdk": session.loaded.sdk}
    if session.exit is not None:
        found["exit"] = session.exit.model_dump()
    return found
