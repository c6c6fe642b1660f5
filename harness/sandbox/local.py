"""Sandboxes from Linux namespaces, made by bubblewrap: no daemon, no root, no image.

One ``bwrap`` process is one sandbox. It holds the guest, as PID 1 of a PID namespace of its own, and all that the guest
starts; killing either ends all of it, and its temporary file systems go with its mount namespace. It dies with
the harness.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import anyio
import anyio.to_thread

import harness.guest
from harness.errors import ProviderUnavailable, SandboxError
from harness.guest import ENV, LIB, PROTOCOL, ROOT
from harness.rollout.environment import host_environment
from harness.rollout.lock import Lock
from harness.sandbox import bwrap, hostproc
from harness.sandbox.base import (
    Capabilities,
    Environment,
    Finding,
    Progress,
    Provider,
    Sandbox,
    SandboxInfo,
    SandboxSettings,
    SandboxSpec,
)

GUEST = Path(harness.guest.__file__).resolve().parent
FIRST_UID = 200_000
UIDS_PER_PROCESS = 1024
_RANGES = 4096

Command = Callable[[str, str, dict[str, object]], list[str]]

_slots: set[int] = set()


def _take_slot() -> int:
    slot = next(number for number in itertools.count() if number not in _slots)
    _slots.add(slot)
    return slot


def first_uid(uid_map: str) -> int | None:
    """The first of the users that our sandboxes get, one each: limits on processes count per user.

    Harnesses that run at the same time rarely share a range, and then share only such limits.

    :param uid_map: ``/proc/self/uid_map``; a container may have far fewer users than the machine.
    :returns: null when there are no users to give away.
    """
    end = max(int(first) + int(count) for first, _, count in map(str.split, uid_map.splitlines()))
    if end >= FIRST_UID + _RANGES * UIDS_PER_PROCESS:
        return FIRST_UID + os.getpid() % _RANGES * UIDS_PER_PROCESS
    return end - UIDS_PER_PROCESS if end > 2 * UIDS_PER_PROCESS else None


class LocalProvider(Provider):
    """Sandboxes on this machine. As root, each guest drops to a user of its own instead of having a user namespace.

    :param _command: builds the sandbox's first command, for tests that look at a sandbox without a guest.
    :param _as_root: whether to work as root does; by default, whether this process is root.
    """

    capabilities = Capabilities(name="local", isolation="namespaces")

    def __init__(self, *, _command: Command = harness.guest.command, _as_root: bool | None = None) -> None:
        self._command = _command
        self._first_uid = first_uid(Path("/proc/self/uid_map").read_text()) if os.geteuid() == 0 else None
        self._as_root = self._first_uid is not None if _as_root is None else _as_root
        self._bwrap: bwrap.Bwrap | None = None
        self._examining = anyio.Lock()
        self._findings: list[Finding] | None = None

    async def doctor(self) -> list[Finding]:
        async with self._examining:
            if self._findings is None:
                self._bwrap = await anyio.to_thread.run_sync(bwrap.find)
                self._findings = await bwrap.examine(self._bwrap, as_root=self._as_root)
            return list(self._findings)

    async def prepare(self, lock: Lock, settings: SandboxSettings, progress: Progress) -> Environment:
        await self._usable()
        built = await host_environment(lock, progress)
        return Environment(
            key=f"local-{PROTOCOL}-{built.path.name}", handle=str(built.path), python=f"{ENV}/bin/python"
        )

    async def create(self, spec: SandboxSpec) -> Sandbox:
        found = await self._usable()
        slot = _take_slot()
        uid = self._first_uid + slot if self._as_root and self._first_uid is not None else None
        descriptors: list[int] = []

        def data(content: bytes) -> int:
            descriptors.append(bwrap.memory_file(content))
            return descriptors[-1]

        try:
            prefix = await anyio.to_thread.run_sync(_base_prefix, spec.environment.handle)
            flags = bwrap.isolation(found, as_root=self._as_root, disk_mib=spec.settings.resources.disk_mib, data=data)
            flags += bwrap.users(bwrap.UID if uid is None else uid, data)
            mounts = {ENV: spec.environment.handle, f"{LIB}/harness_guest": str(GUEST)}
            if not prefix.is_relative_to("/usr"):
                mounts[str(prefix)] = str(prefix)
            for inside, outside in mounts.items():
                flags += [*bwrap.parents(inside), "--ro-bind", outside, inside]
            for name, value in _variables().items():
                flags += ["--setenv", name, value]
            # Last: until here the root is a temporary file system in which bwrap makes the mount points.
            flags += ["--remount-ro", "/", "--chdir", ROOT]
            boot = hostproc.boot(spec, root=ROOT, uid=uid, processes=spec.settings.resources.processes)
            return await hostproc.spawn(
                spec.name,
                [found.path, *flags, "--", *self._command(spec.environment.python, LIB, boot)],
                env={hostproc.MARKER: hostproc.Marker.of("local", spec).model_dump_json()},
                kill=lambda pid: None if pid is None else _kill(pid),
                on_destroyed=lambda: _slots.discard(slot),
                pass_fds=descriptors,
            )
        except BaseException:
            _slots.discard(slot)
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def list(self) -> list[SandboxInfo]:
        # Leftovers are rare: the kernel kills a sandbox when the harness that made it dies.
        return await anyio.to_thread.run_sync(_list)

    async def remove(self, info: SandboxInfo) -> None:
        pid, _, ticks = info.id.partition(":")
        with anyio.move_on_after(hostproc.KILL_S):
            while hostproc.start_ticks(int(pid)) == ticks and hostproc.alive(int(pid)):
                await anyio.to_thread.run_sync(_kill, int(pid))
                await anyio.sleep(0.01)
            return
        raise SandboxError(f"sandbox {info.name}: process {pid} did not end")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def _usable(self) -> bwrap.Bwrap:
        for finding in await self.doctor():
            if finding.required and not finding.ok:
                raise ProviderUnavailable(f"local sandboxes: {finding.check}: {finding.detail}", hint=finding.remedy)
        assert self._bwrap is not None
        return self._bwrap


def _variables() -> dict[str, str]:
    return {
        "PATH": f"{ENV}/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
        "VIRTUAL_ENV": ENV,
        "HOME": f"{ROOT}/home",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "LANG": "C.UTF-8",
    }


def _base_prefix(environment: str) -> Path:
    """The Python installation that a virtual environment stands on."""
    try:
        return Path(environment, "bin", "python").resolve(strict=True).parent.parent
    except OSError as error:
        raise SandboxError(
            f"the environment {environment} has lost its Python: {error}", hint="Remove that folder; it is built again."
        ) from error


def _kill(pid: int) -> None:
    """End a sandbox by its PID 1: bwrap then ends too, but not before the kernel has emptied the PID namespace.

    Stopped, bwrap cannot start a PID 1 that we would not see, and whose parent-death signal is not set yet.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        below = hostproc.children(pid)
        for child in below:
            hostproc.kill(child)
        os.kill(pid, signal.SIGCONT if below else signal.SIGKILL)


def _list() -> list[SandboxInfo]:
    found: dict[str, SandboxInfo] = {}
    for pid, marker in hostproc.marked("local"):
        # While a sandbox starts, the process that becomes its guest carries the marker too; the oldest is bwrap.
        if marker.name not in found:
            found[marker.name] = SandboxInfo(
                id=f"{pid}:{hostproc.start_ticks(pid)}",
                name=marker.name,
                state="running",
                created_at=hostproc.started_at(pid),
                owner=marker.owner,
                labels=hostproc.labels(marker),
            )
    return list(found.values())
