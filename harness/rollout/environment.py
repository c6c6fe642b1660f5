"""Environments built from a lock: a virtual environment for this machine, or a folder of packages for an image."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import anyio
import anyio.to_thread

from harness.errors import DependencyError
from harness.models import Record
from harness.rollout.cache import build_once, cache_dir
from harness.rollout.lock import Lock, explicit_indexes, interpreter, local_paths, own_python, read_pyproject
from harness.rollout.uv import Progress, run_uv

# Copies: an entry must outlive uv's cache, and a change of it, in either direction.
_INSTALL = ("pip", "install", "--no-deps", "--link-mode", "copy", "--no-break-system-packages")
_DESCRIBE = (
    "import json, platform, sys, sysconfig; "
    "print(json.dumps([platform.python_version(), sysconfig.get_config_var('SOABI') or '', sysconfig.get_platform(), "
    "sys.base_prefix]))"
)


class HostEnvironment(Record):
    """A rollout's virtual environment on this machine: immutable, relocatable, readable by everyone."""

    path: Path
    python: Path
    """Its interpreter, ``path / "bin" / "python"``."""
    version: str
    """Of Python: ``3.13.5``."""
    base_prefix: Path
    """The installation that its interpreter belongs to."""


async def host_environment(lock: Lock, progress: Progress) -> HostEnvironment:
    """Find, or build, the virtual environment of a lock. One that is there is found in milliseconds, with no network.

    :raises DependencyError: no Python that the rollout allows, a download or a build that failed, a full disk.
    """
    python = await interpreter(lock.requires_python, lock.project, progress)
    version, abi, platform, prefix = await _describe(python)
    key = _key("venv", lock.digest, version, abi, platform, str(python))

    async def build(part: Path) -> None:
        progress(f"building the environment of {lock.project.name} (Python {version})")
        what = f"cannot build the environment of {lock.project}"
        venv: list[str | Path] = ["venv", "--no-project", "--relocatable", "--allow-existing", "--python", python, part]
        await run_uv(venv, what=what, cwd=lock.project, progress=lambda _: None)
        await _install(lock, ["--python", part / "bin" / "python", "--compile-bytecode"], what, progress)
        await anyio.to_thread.run_sync(_open_to_all, part)

    path = await build_once(key, cache_dir() / "environments", build)
    return HostEnvironment(
        path=path, python=path / "bin" / "python", version=version, base_prefix=Path(await anyio.Path(prefix).resolve())
    )


async def site_packages(lock: Lock, python_version: str, platform: str, progress: Progress) -> Path:
    """Find, or build, a folder with the packages of a lock for another Python or machine, to bake into an image.

    :param python_version: of the image: ``3.13`` or ``3.13.5``.
    :param platform: as uv names it: ``x86_64-unknown-linux-gnu``, ``aarch64-manylinux_2_28``.
    :returns: the folder; console scripts lie in its ``bin``, with an interpreter line that means nothing in the image.
        Bytecode is there when the image's Python has this Python's minor version.
    :raises DependencyError: a package that has no files for that platform, a download that failed, a full disk.
    """
    compiled = python_version.split(".")[:2] == [str(number) for number in sys.version_info[:2]]
    key = _key("packages", lock.digest, python_version, platform, str(compiled))

    async def build(part: Path) -> None:
        progress(f"fetching the packages of {lock.project.name} for Python {python_version} on {platform}")
        flags: list[str | Path] = ["--python", own_python(), "--target", part]
        flags += ["--python-version", python_version, "--python-platform", platform]
        await _install(
            lock,
            [*flags, "--compile-bytecode" if compiled else "--no-compile-bytecode"],
            f"cannot fetch the packages of {lock.project} for Python {python_version} on {platform}",
            progress,
        )
        await anyio.to_thread.run_sync(_open_to_all, part)

    return await build_once(key, cache_dir() / "packages", build)


async def _install(lock: Lock, flags: list[str | Path], what: str, progress: Progress) -> None:
    if not lock.requirements.strip():
        return
    flags += explicit_indexes(read_pyproject(lock.project))
    flags += await anyio.to_thread.run_sync(_refreshed, lock)
    # From standard input, in the project's folder: relative paths and [tool.uv] mean what they mean there.
    arguments = [*_INSTALL, *flags, "-r", "-"]
    await run_uv(arguments, what=what, cwd=lock.project, progress=progress, stdin=lock.requirements)


def _refreshed(lock: Lock) -> list[str]:
    """Flags to build path dependencies anew: uv's cache would not see a change in their sources, as the digest does."""
    flags: list[str] = []
    for path in local_paths(lock.project, lock.requirements):
        if path.is_dir():
            named = (path / "pyproject.toml").exists() and read_pyproject(path).get("project", {}).get("name")
            flags += ["--refresh-package", str(named)] if named else ["--refresh"]
    return flags


def _key(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


async def _describe(python: Path) -> tuple[str, str, str, str]:
    """Version, ABI, platform and base prefix of an interpreter."""
    if python == own_python():
        version = ".".join(map(str, sys.version_info[:3]))
        return version, sysconfig.get_config_var("SOABI") or "", sysconfig.get_platform(), sys.base_prefix
    try:
        done = await anyio.run_process([str(python), "-I", "-c", _DESCRIBE], stderr=subprocess.STDOUT)
        version, abi, platform, prefix = map(str, json.loads(done.stdout))
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise DependencyError(f"the interpreter {python} does not run: {error}") from error
    return re.sub(r"[^\d.].*", "", version), abi, platform, prefix


def _open_to_all(root: Path) -> None:
    """Let every user read: sandboxes run as others, and uv's cache may come from a time of a stricter umask."""
    for folder, folders, files in os.walk(root):
        for path in [Path(folder, name) for name in (*folders, *files)]:
            if not path.is_symlink():
                mode = path.stat().st_mode
                wanted = mode | 0o444 | (0o111 if mode & 0o111 else 0)
                if wanted != mode:
                    path.chmod(wanted & 0o7777)
