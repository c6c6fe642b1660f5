"""One sandbox: its guest brought in and started through the toolbox, what became of it, its end."""

from __future__ import annotations

import importlib.util
import io
import json
import marshal
import re
import shlex
import zipfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import anyio
from daytona import AsyncSandbox

import harness.guest
from harness.errors import SandboxError, SandboxGone
from harness.guest import ROOT
from harness.sandbox.base import Exit, Sandbox, SandboxSpec
from harness.sandbox.daytona.client import CALL_S, Client, ServiceFailed
from harness.sandbox.daytona.stream import ResumingStream

PORT = 7070
GUEST = "/tmp/harness-guest.zip"  # written by the machine's daemon before any rollout's code is there
LOG = "/tmp/harness-guest.log"
READY_S = 60.0
GONE = ("destroyed", "destroying")


class DaytonaSandbox(Sandbox):
    """One sandbox with its guest."""

    stream: ResumingStream

    def __init__(
        self, client: Client, remote: AsyncSandbox, stream: ResumingStream, remove: Callable[[], Awaitable[None]]
    ) -> None:
        """:param remove: has it deleted, or raises ``SandboxError``."""
        self._client = client
        self.id = remote.id
        self.name = remote.name
        self.stream = stream
        self._remote = remote
        self._remove = remove
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
                look = partial(self._remote.refresh_data, request_timeout=CALL_S / 4)
                await self._client.call(look, "Daytona does not answer", attempts=3)
            except SandboxGone:
                return Exit(state="gone", detail="Daytona knows no such sandbox any more")
            except SandboxError as error:
                return Exit(state="engine_unreachable", detail=error.message)
            return await self._by_state(state_of(self._remote))
        return Exit(state="engine_unreachable", detail=f"Daytona did not answer within {CALL_S:.0f} s")

    async def _by_state(self, state: str) -> Exit:
        reason = self._remote.error_reason or ""
        if self._remote.spot_evicted_at:
            return Exit(state="gone", detail="evicted: its spot capacity was taken back")
        if state in GONE:
            return Exit(state="gone", detail=f"the sandbox is {state}")
        if state != "started":
            if re.search(r"memory|\boom", reason.lower()):
                return Exit(state="out_of_memory", detail=reason)
            return Exit(state="killed", detail=f"the sandbox is {state}{f': {reason}' if reason else ''}")
        try:
            return await self._ask_toolbox()
        except SandboxError as error:
            return Exit(state="engine_unreachable", detail=error.message)

    async def _ask_toolbox(self) -> Exit:
        """What became of the bridge, where it could not say so itself."""
        pid = self.stream.pid or 0
        look = (
            "cat /sys/fs/cgroup/memory.events 2>/dev/null; "
            f"test {pid} -gt 0 && kill -0 {pid} 2>/dev/null && echo alive; echo; tail -c 8192 {LOG} 2>/dev/null"
        )
        # Older daemons run no shell of their own.
        ask = partial(self._remote.process.exec, shlex.join(["sh", "-c", look]), timeout=10)
        said = await self._client.call(ask, "the sandbox is started, but its toolbox does not answer")
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
                    await self._remove()
                    self._destroyed = True


async def start_guest(
    client: Client, remote: AsyncSandbox, spec: SandboxSpec, remove: Callable[[], Awaitable[None]]
) -> DaytonaSandbox:
    """Bring the guest into a started sandbox and dial it. Two calls, and one for the link to dial.

    :raises SandboxError: it cannot be started, or does not answer.
    """
    stream = ResumingStream(client.dialler(remote, PORT), spec.lease_s)
    sandbox = DaytonaSandbox(client, remote, stream, remove)
    limits = spec.settings.resources.model_dump(include={"processes", "open_files", "file_mib"})
    boot = {"root": ROOT, "uid": None, "gid": None, "lease_s": spec.lease_s, "limits": {**limits, "memory_mib": None}}
    options = {"port": PORT, "log": LOG, "keep_alive_s": stream.keep_alive_s, "boot": boot}
    code = f"import sys; sys.path.insert(0, {GUEST!r}); from harness_guest.bridge import main; main()"
    command = shlex.join([spec.environment.python, "-I", "-S", "-c", code, json.dumps(options)])
    what = f"the guest in sandbox {remote.name} did not start"
    try:
        with anyio.fail_after(READY_S):
            await client.call(partial(remote.fs.upload_file, guest_zip(), GUEST, timeout=int(CALL_S)), what)
            # Run twice by mistake, the second would find the port taken.
            started = await client.call(partial(remote.process.exec, command, timeout=int(READY_S)), what)
        if not started.exit_code or "in use" in started.result:
            await stream.open(READY_S)
            return sandbox
    except BaseException as error:
        await stream.aclose()
        if not isinstance(error, (SandboxError, anyio.BrokenResourceError, TimeoutError)):
            raise
        exit = await sandbox.outcome()
        if isinstance(error, SandboxError) and exit.state in ("running", "out_of_memory"):
            raise
        lines = f"\nlast lines of the guest:\n{exit.last_lines}" if exit.last_lines else ""
        raise ServiceFailed(f"{what}: {exit.detail or exit.state}{lines}") from error
    raise ServiceFailed(f"{what}: {started.result[-2000:]}")


def state_of(remote: AsyncSandbox) -> str:
    """As it was when it was last asked for."""
    return str(remote.state.value) if remote.state else ""


@cache
def guest_zip() -> bytes:
    """The guest's package, with its source for any Python and its byte code for one like this."""
    output = io.BytesIO()
    folder = Path(harness.guest.__file__).parent
    with zipfile.ZipFile(output, "w") as archive:
        for path in sorted(folder.glob("*.py")):
            inside = f"harness_guest/{path.name}"
            source = path.read_bytes()
            # Checked by nobody (flag 1): times in an archive mean nothing. Another Python passes it over.
            head = importlib.util.MAGIC_NUMBER + b"\1\0\0\0" + importlib.util.source_hash(source)
            code = marshal.dumps(compile(source, f"{GUEST}/{inside}", "exec", dont_inherit=True))
            archive.writestr(zipfile.ZipInfo(inside), source, zipfile.ZIP_DEFLATED)
            archive.writestr(zipfile.ZipInfo(f"{inside}c"), head + code, zipfile.ZIP_DEFLATED)
    return output.getvalue()
