"""The one place that runs uv: its environment, deadline, progress lines, and errors without credentials."""

from __future__ import annotations

import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
_DROPPED = frozenset(
    [
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "PYTHONHOME",
        "PYTHONPATH",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPYCACHEPREFIX",
        "PIP_TARGET",
        "UV_PYTHON",
        "UV_PROJECT",
        "UV_PROJECT_ENVIRONMENT",
        "UV_WORKING_DIR",
        "UV_LOCKED",
        "UV_FROZEN",
        "UV_SYSTEM_PYTHON",
        "UV_NO_PROJECT",
        "UV_NO_VERIFY_HASHES",
        "UV_LINK_MODE",
        "UV_CONSTRAINT",
        "UV_OVERRIDE",
        "UV_EXCLUDE",
        "UV_NO_EDITABLE",
        "UV_OUTPUT_FILE",
        "UV_VENV_SEED",
    ]
)
_HTTP_USERINFO = re.compile(r"(?<=://)[^/@\s'\"]+@")


def redact(text: str) -> str:
    """The text without the user names and passwords of its URLs."""
    return _HTTP_USERINFO.sub("***@", text)


def settings() -> dict[str, str]:
    """Variables that change what uv resolves or installs, credentials included: to be hashed, never shown."""
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("UV_") and name not in _DROPPED
    }


async def run_uv(
    arguments: Sequence[str | Path],
    *,
    what: str,
    cwd: Path,
    progress: Progress,
    stdin: str | None = None,
    timeout: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run uv in a folder, whose ``[tool.uv]`` and ``uv.toml`` it then follows. Cancelling kills it.

    :param what: what is being done, as the start of an error: "cannot resolve ...".
    :param progress: takes each line that uv says about its work.
    :returns: its standard output.
    :raises DependencyError: uv failed, with its own message; or the deadline passed.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    process = await anyio.open_process(
        [find_uv_bin(), *map(str, arguments), "--no-progress", "--color", "never", "--no-python-downloads"],
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        cwd=cwd,
        env={**inherited, "GIT_TERMINAL_PROMPT": "0", **(env or {})},
        umask=0o022,  # what it makes is read by the sandboxes' users
        start_new_session=True,
    )
    output = bytearray()
    lines: deque[str] = deque(maxlen=_MAX_ERROR_LINES)
    # asyncio does not await pending pipes of a killed process; ``async with`` closes them and reaps it.
    async with process:
        with anyio.move_on_after(timeout) as scope:
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
        raise DependencyError(f"{what}: uv did not finish within {timeout:.0f} s", hint="\n  ".join(lines))
    if process.returncode != 0:
        raise DependencyError(f"{what}: {_message(lines, process.returncode)}", hint=_hint("\n".join(lines)))
    return output.decode(errors="replace")


async def _feed(process: anyio.abc.Process, text: str | None) -> None:
    if text is not None and process.stdin is not None:
        try:
            await process.stdin.send(text.encode())
            await process.stdin.aclose()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # it failed before it read everything, and says why


async def _collect(process: anyio.abc.Process, output: bytearray) -> None:
    assert process.stdout is not None
    async for chunk in process.stdout:
        if len(output) < _MAX_OUTPUT:
            output += chunk


async def _report(process: anyio.abc.Process, lines: deque[str], progress: Progress) -> None:
    assert process.stderr is not None
    rest = b""
    async for chunk in process.stderr:
        *complete, rest = (rest + chunk).split(b"\n")
        for raw in complete:
            _line(raw, lines, progress)
        rest = rest[-_MAX_LINE:]
    _line(rest, lines, progress)


def _line(raw: bytes, lines: deque[str], progress: Progress) -> None:
    line = redact(raw[:_MAX_LINE].decode(errors="replace").rstrip())
    if line.strip():
        lines.append(line)
        if not any(earlier.startswith("error:") for earlier in lines):
            progress(line.strip())


def _message(lines: deque[str], code: int | None) -> str:
    """uv's error, without the progress lines before it."""
    kept = list(lines)
    for index, line in enumerate(kept):
        if line.startswith("error:"):
            kept = [line.removeprefix("error:").strip(), *kept[index + 1 :]]
            break
    return "\n  ".join(kept) or f"uv ended with code {code}"


def _hint(text: str) -> str:
    if "No space left on device" in text:
        return "The disk is full. Free some space, or set HARNESS_CACHE and UV_CACHE_DIR to another disk."
    if re.search(r"dns error|Failed to fetch|error sending request|connect", text, re.IGNORECASE):
        return "The package index could not be reached. Check the network, the index URL and its credentials."
    return ""
