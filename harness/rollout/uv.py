"""The one place that runs uv: its environment, deadline, progress lines, and errors without credentials."""

from __future__ import annotations

import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc
from uv import find_uv_bin

from harness.errors import DependencyError

Progress = Callable[[str], None]
"""Takes one line that says what long work is doing now. Called from the event loop only."""

DEADLINE_S = 3600.0
_MAX_OUTPUT = 32 * 1024 * 1024
_MAX_ERROR_LINES = 30
_MAX_LINE = 2000

# Settings of the user's shell that would redirect uv to another environment or contradict our flags.
_DROPPED = frozenset((
    "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX",
    "PIP_TARGET", "UV_PYTHON", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT", "UV_WORKING_DIR", "UV_LOCKED", "UV_FROZEN",
    "UV_SYSTEM_PYTHON", "UV_NO_PROJECT", "UV_NO_VERIFY_HASHES", "UV_LINK_MODE", "UV_CONSTRAINT", "UV_OVERRIDE",
    "UV_EXCLUDE", "UV_NO_EDITABLE", "UV_OUTPUT_FILE", "UV_VENV_SEED",
))  # fmt: skip
_HTTP_USERINFO = re.compile(r"(?<=://)[^/@\s'\"]+@")


def redact(text: str) -> str:
    """The text without the user names and passwords of its URLs."""
    return _HTTP_USERINFO.sub("***@", text)


def settings() -> dict[str, str]:
    """Variables that change what uv resolves or installs, credentials included: to be hashed, never shown."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("UV_") and name not in _DROPPED}


async def run_uv(
    arguments: Sequence[str | Path],
    *,
    what: str,
    cwd: Path,
    progress: Progress,
    stdin: str | None = None,
) -> str:
    """Run uv in a folder, whose ``[tool.uv]`` and ``uv.toml`` it then follows. Cancelling kills it.

    :param what: what is being done, as the start of an error: "cannot resolve ...".
    :param progress: takes each line that uv says about its work.
    :returns: its standard output.
    :raises DependencyError: uv failed, with its own message; or the deadline passed.
    """
    env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    process = await anyio.open_process(
        [find_uv_bin(), *map(str, arguments), "--no-progress", "--color", "never", "--no-python-downloads"],
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        cwd=cwd,
        env={**env, "GIT_TERMINAL_PROMPT": "0"},
        umask=0o022,  # what it makes is read by the sandboxes' users
        start_new_session=True,
    )
    output = bytearray()
    lines: deque[str] = deque(maxlen=_MAX_ERROR_LINES)
    # asyncio does not await pending pipes of a killed process; ``async with`` closes them and reaps it.
    async with process:
        with anyio.move_on_after(DEADLINE_S) as scope:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_feed, process, stdin)
                    tasks.start_soon(_collect, process, output)
                    tasks.start_soon(_report, process, lines, progress)
                    await process.wait()
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, 9)  # build back ends are its children
    if scope.cancelled_caught:
        raise DependencyError(f"{what}: uv did not finish within {DEADLINE_S:.0f} s", hint="\n  ".join(lines))
    if process.returncode != 0:
        message = "\n  ".join(lines)
        raise DependencyError(f"{what}: {message or f'uv ended with code {process.returncode}'}", hint=_hint(message))
    return output.decode(errors="replace")


async def _feed(process: anyio.abc.Process, text: str | None) -> None:
    if text is not None and process.stdin is not None:
        # It may fail before it has read everything, and then says why.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await process.stdin.send(text.encode())
            await process.stdin.aclose()


async def _collect(process: anyio.abc.Process, output: bytearray) -> None:
    assert process.stdout is not None
    async for chunk in process.stdout:
        if len(output) < _MAX_OUTPUT:
            output += chunk


async def _report(process: anyio.abc.Process, lines: deque[str], progress: Progress) -> None:
    """Pass on each line that uv says; those from its error on are kept for ours."""
    assert process.stderr is not None
    rest, failed = b"", False
    async for chunk in process.stderr:
        *complete, rest = (rest + chunk).split(b"\n")
        rest = rest[-_MAX_LINE:]
        for raw in complete:
            line = redact(raw[:_MAX_LINE].decode(errors="replace").rstrip())
            if line.startswith("error:") and not failed:
                failed = True
                lines.clear()
                line = line.removeprefix("error:").strip()
            if line:
                lines.append(line)
                if not failed:
                    progress(line.strip())


def _hint(text: str) -> str:
    if "No space left on device" in text:
        return "The disk is full. Free some space, or set HARNESS_CACHE and UV_CACHE_DIR to another disk."
    if re.search(r"dns error|Failed to fetch|error sending request|connect", text, re.IGNORECASE):
        return "The package index could not be reached. Check the network, the index URL and its credentials."
    return ""
