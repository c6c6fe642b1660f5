"""The default base image without a registry: made of Debian packages by mmdebstrap and imported into the engine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from subprocess import DEVNULL

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from harness.errors import ImageError, SandboxError
from harness.sandbox.base import Progress
from harness.sandbox.docker.build import LABEL, once
from harness.sandbox.docker.engine import Engine
from harness.sandbox.docker.pull import DEFAULT_IMAGE

_SUITE = "trixie"  # its python3 is 3.13, as the default image's tag says
_PACKAGES = ("python3", "python3-venv", "python-is-python3", "ca-certificates", "git", "procps")
_CHANGES = [
    "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    'CMD ["bash"]',
    f"LABEL {LABEL}=default",
]
_EXCLUDED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")
_TIMEOUT_S = 1800.0
_STOP_S = 20.0
_KEPT_LINES = 8


async def bootstrap(engine: Engine, progress: Progress, *, mirror: str = "") -> str:
    """Make the default image, unless it is there. Returns its id.

    :param mirror: of Debian; empty for mmdebstrap's own default.
    :raises ImageError: mmdebstrap is not installed, or failed; says what to do.
    """
    return await once(engine, DEFAULT_IMAGE, partial(_make, engine, progress, mirror))


async def _make(engine: Engine, progress: Progress, mirror: str) -> None:
    if shutil.which("mmdebstrap") is None:
        hint = "Install it (`sudo apt-get install mmdebstrap debian-archive-keyring`) and run this again."
        if sys.platform != "linux":
            hint = (
                f"Do this on a Linux machine, then bring the image over: `docker save {DEFAULT_IMAGE}`, `docker load`."
            )
        raise ImageError("The default image is made with mmdebstrap, which is not installed here.", hint=hint)
    command = ["mmdebstrap", "--variant=minbase", "--format=tar", f"--include={','.join(_PACKAGES)}"]
    command += [f"--dpkgopt=path-exclude={path}" for path in _EXCLUDED]
    command += [_SUITE, "-", *([mirror] if mirror else [])]
    progress(f"making {DEFAULT_IMAGE} from Debian {_SUITE} packages (this takes a few minutes)")
    lines: list[str] = []
    exits: list[int] = []
    errors: list[SandboxError] = []
    process = await anyio.open_process(command, stdin=DEVNULL, start_new_session=True)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_follow, process, lines, progress)
            try:
                await engine.import_image(
                    _root(process, exits),
                    reference=DEFAULT_IMAGE,
                    changes=_CHANGES,
                    on_message=lambda _: None,
                    timeout_s=_TIMEOUT_S,
                )
            except SandboxError as error:
                errors.append(error)
            await _stop(process)
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process)
    if any(exits):
        # mmdebstrap chooses unshare mode where it is not root; that needs entries in /etc/subuid.
        hint = "It needs a Debian mirror in reach, and root or unprivileged user namespaces (`man mmdebstrap`, MODES)."
        raise ImageError("\n".join([f"mmdebstrap ended with exit code {exits[0]}.", *lines]), hint=hint)
    if errors:
        raise errors[0]


async def _root(process: Process, exits: list[int]) -> AsyncIterator[bytes]:
    assert process.stdout is not None
    async for chunk in process.stdout:
        yield chunk
    exits.append(await process.wait())
    if exits[0]:
        raise OSError("mmdebstrap failed")  # or the engine would take the torso for the whole


async def _follow(process: Process, lines: list[str], progress: Progress) -> None:
    """Pass mmdebstrap's own lines on, and keep the last of them."""
    assert process.stderr is not None
    stream = BufferedByteReceiveStream(process.stderr)
    try:
        while True:
            line = (await stream.receive_until(b"\n", 64 * 1024)).decode(errors="replace").rstrip()
            lines[:] = [*lines[1 - _KEPT_LINES :], f"    {line}"]
            if line.startswith("I: "):
                progress(line.removeprefix("I: "))
    except (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError, anyio.DelimiterNotFound):
        return


async def _stop(process: Process) -> None:
    """End it and all that it started, gently first: it has temporary folders and perhaps mounts to clean up."""
    for ending in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, ending)
            with anyio.move_on_after(_STOP_S):
                await process.wait()
