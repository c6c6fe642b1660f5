"""No isolation at all: the guest is a plain process of this machine. For debugging, and only when asked for by name."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType

import anyio
import anyio.to_thread
from pydantic import ValidationError

import harness.guest
from harness.errors import SandboxError
from harness.guest import PROTOCOL
from harness.rollout.environment import host_environment
from harness.rollout.lock import Lock
from harness.sandbox import hostproc
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

_PREFIX = "harness-process-"
_MARKER_FILE = "sandbox.json"


class ProcessProvider(Provider):
    """Guests as plain processes, each in a temporary folder. A rollout can read and change all that you can.

    When the harness dies, the guest sees the end of its channel and ends with everything it started.
    """

    capabilities = Capabilities(name="process", isolation="none")

    async def doctor(self) -> list[Finding]:
        detail = "no isolation: a rollout runs with your rights, on your files and your network"
        return [Finding(check="isolation", ok=False, required=False, detail=detail, remedy="Use local or docker.")]

    async def prepare(self, lock: Lock, settings: SandboxSettings, progress: Progress) -> Environment:
        built = await host_environment(lock, progress)
        return Environment(
            key=f"process-{PROTOCOL}-{built.path.name}", handle=str(built.path), python=str(built.python)
        )

    async def create(self, spec: SandboxSpec) -> Sandbox:
        marker = hostproc.Marker.of("process", spec)
        folder = await anyio.to_thread.run_sync(_make_folder, marker)
        try:
            root = folder / "root"
            # The user's other processes count too, so a limit on their number would hit at random.
            boot = hostproc.boot(spec, root=str(root), uid=None, processes=None)
            return await hostproc.spawn(
                spec.name,
                harness.guest.command(spec.environment.python, str(folder / "lib"), boot),
                env=_variables(spec, root, marker),
                kill=lambda pid: _kill(pid, spec.name),
                on_destroyed=lambda: shutil.rmtree(folder, ignore_errors=True),
                cwd=str(root),
            )
        except BaseException:
            with anyio.move_on_after(hostproc.KILL_S, shield=True):
                await anyio.to_thread.run_sync(_clean, folder, spec.name)
            raise

    async def list(self) -> list[SandboxInfo]:
        return await anyio.to_thread.run_sync(_list)

    async def remove(self, info: SandboxInfo) -> None:
        folder = Path(info.id)
        if folder.parent != Path(tempfile.gettempdir()) or not folder.name.startswith(_PREFIX):
            raise SandboxError(f"{folder} is no folder of a process sandbox")
        await anyio.to_thread.run_sync(_clean, folder, info.name)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _make_folder(marker: hostproc.Marker) -> Path:
    """``root`` for the guest, ``lib`` to import it from, and who made it."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        (folder / _MARKER_FILE).write_text(marker.model_dump_json())
        for name in ("root", "root/home", "root/tmp", "lib"):
            (folder / name).mkdir()
        (folder / "lib" / "harness_guest").symlink_to(Path(harness.guest.__file__).resolve().parent)
    except OSError as error:
        raise SandboxError(f"sandbox {marker.name}: no temporary folder: {error}") from error
    return folder


def _variables(spec: SandboxSpec, root: Path, marker: hostproc.Marker) -> dict[str, str]:
    """Nothing of the user's own environment but where programs are."""
    binaries = Path(spec.environment.python).parent
    return {
        "PATH": f"{binaries}:{os.environ.get('PATH') or os.defpath}",
        "VIRTUAL_ENV": str(binaries.parent),
        "HOME": str(root / "home"),
        "TMPDIR": str(root / "tmp"),
        "LANG": "C.UTF-8",
        hostproc.MARKER: marker.model_dump_json(),
    }


def _kill(pid: int | None, name: str) -> None:
    """End a sandbox's processes: the guest's tree, and by their marker, which children inherit, those that left it."""
    if pid is not None:
        _kill_tree(pid)
    for stray, marker in hostproc.marked("process"):
        if marker.name == name:
            _kill_tree(stray)


def _kill_tree(pid: int) -> None:
    """End everything below a guest, then the guest: while it lives, orphans come back to it and cannot get away."""
    deadline = time.monotonic() + hostproc.KILL_S / 2
    while time.monotonic() < deadline and (below := [p for p in _descendants(pid) if hostproc.alive(p)]):
        for descendant in below:
            hostproc.kill(descendant)
        time.sleep(0.005)
    hostproc.kill(pid)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    queue = [pid]
    while queue:
        below = hostproc.children(queue.pop())
        found += below
        queue += below
    return found


def _clean(folder: Path, name: str) -> None:
    _kill(None, name)
    shutil.rmtree(folder, ignore_errors=True)


def _list() -> list[SandboxInfo]:
    running = {marker.name for _, marker in hostproc.marked("process")}
    found: list[SandboxInfo] = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValidationError):
            if folder.stat().st_uid != os.geteuid():
                continue
            marker = hostproc.Marker.model_validate_json((folder / _MARKER_FILE).read_bytes())
            found.append(
                SandboxInfo(
                    id=str(folder),
                    name=marker.name,
                    state="running" if marker.name in running else "exited",
                    created_at=(folder / _MARKER_FILE).stat().st_mtime,
                    owner=marker.owner,
                    labels=hostproc.labels(marker),
                )
            )
    return found
