"""A rollout's dependencies, resolved once: the lock that every environment is built from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import anyio
import anyio.to_thread
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from harness.errors import DependencyError, StoreError
from harness.models import Record
from harness.rollout.cache import cache_dir
from harness.rollout.uv import Progress, redact, run_uv, settings


class Lock(Record):
    """Resolved dependencies of one rollout."""

    project: Path
    """The rollout's folder (holds pyproject.toml)."""
    requirements: str
    """Pinned requirements with hashes, as ``uv export`` writes them; without the project itself."""
    requires_python: str
    """Specifier from pyproject.toml; ``>=3.12`` when it names none."""
    sdk: str
    """Version of osmosis-ai in the lock; empty when it is not there."""
    digest: str
    """Content address of everything above but the path, sources and index settings included."""


DEFAULT_PYTHON = ">=3.12"
_COMPILE = ("pip", "compile", "pyproject.toml", "--universal", "--generate-hashes", "--no-strip-extras")
_EXPORT = ("--no-annotate", "--no-header")
_SDK = re.compile(r"^osmosis[-_.]ai(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE | re.IGNORECASE)
_CREDENTIALS = re.compile(r"\bhttps?://[^/@\s]+@\S*")
_NOT_SOURCE = frozenset({".git", ".venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache"})


async def resolve(project: Path, progress: Progress) -> Lock:
    """Resolve a rollout's dependencies: from its ``uv.lock``, else anew, remembered until its inputs change.

    Nothing is written into the project. Groups named ``dev`` are left out, path dependencies are taken non-editable.

    :raises DependencyError: no or a broken pyproject.toml, a stale uv.lock, dependencies that do not resolve.
    """
    project = Path(await anyio.Path(project).absolute())
    document = await anyio.to_thread.run_sync(read_pyproject, project)
    table = document.get("project")
    if not isinstance(table, dict):
        raise DependencyError(f"{project / 'pyproject.toml'} has no [project] table")
    requires_python = str(table.get("requires-python") or DEFAULT_PYTHON)
    if _lock_file(project) is not None:
        requirements = await _export(project, requires_python, progress)
    else:
        requirements = await _compile(project, requires_python, progress)
    if found := _CREDENTIALS.search(requirements):
        raise DependencyError(
            f"{project / 'pyproject.toml'}: the URL {redact(found[0])} carries credentials",
            hint="Keep them out of URLs: use UV_INDEX_<NAME>_USERNAME and _PASSWORD, a keyring, or ~/.netrc.",
        )
    sdk = _SDK.search(requirements)
    return Lock(
        project=project,
        requirements=requirements,
        requires_python=requires_python,
        sdk=sdk[1] if sdk else "",
        digest=await anyio.to_thread.run_sync(_digest, project, requirements, requires_python, document),
    )


def read_pyproject(project: Path) -> dict[str, Any]:
    """:raises DependencyError: it is missing, unreadable or no TOML."""
    path = project / "pyproject.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DependencyError(
            f"{project} has no pyproject.toml",
            hint="A rollout lists its dependencies there: [project] with name, version and dependencies.",
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DependencyError(f"{path}: {error}") from error


def _lock_file(project: Path) -> Path | None:
    """The project's uv.lock, or that of the uv workspace it lies in."""
    if (project / "uv.lock").exists():
        return project / "uv.lock"
    for parent in project.parents:
        if (parent / "uv.lock").exists() and (parent / "pyproject.toml").exists():
            workspace = read_pyproject(parent).get("tool", {}).get("uv", {}).get("workspace")
            if isinstance(workspace, dict) and any(
                project in parent.glob(str(member)) for member in workspace.get("members", [])
            ):
                return parent / "uv.lock"
    return None


async def _export(project: Path, requires_python: str, progress: Progress) -> str:
    python = await interpreter(requires_python, project, progress)
    try:
        # Only the rollout's own project is left out: other members of a workspace are dependencies like any.
        return await run_uv(
            ["export", "--locked", "--no-emit-project", "--no-editable", "--no-dev", "--python", python, *_EXPORT],
            what=f"cannot read the lock of {project}",
            cwd=project,
            progress=progress,
        )
    except DependencyError as error:
        if "needs to be updated" in error.message:
            raise DependencyError(
                f"{project}: uv.lock does not match pyproject.toml", hint=f"Run `uv lock` in {project}."
            ) from error
        raise


async def _compile(project: Path, requires_python: str, progress: Progress) -> str:
    """Resolve for every platform and Python that the project allows, without writing a lock beside it."""
    remembered = _memory(project)
    if (known := await anyio.to_thread.run_sync(_recall, remembered, project)) is not None:
        return known
    progress(f"resolving the dependencies of {project.name}")
    requirements = await run_uv(
        [*_COMPILE, *_EXPORT, "--python", own_python(), "--python-version", _lowest(requires_python)],
        what=f"cannot resolve the dependencies of {project}",
        cwd=project,
        progress=progress,
    )
    # An environment must not point into the project.
    requirements = re.sub(r"^-e ", "", requirements, flags=re.MULTILINE)
    await anyio.to_thread.run_sync(_remember, remembered, project, requirements)
    return requirements


def own_python() -> Path:
    """The interpreter below the harness's own virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


async def interpreter(requires_python: str, project: Path, progress: Progress) -> Path:
    """An interpreter that the rollout allows: the harness's own, else one that uv finds on this machine.

    :raises DependencyError: there is none.
    """
    if allows(requires_python, sys.version_info[:3]):
        return own_python()
    try:
        found = await run_uv(
            ["python", "find", "--no-project", requires_python],
            what="no interpreter",
            cwd=project,
            progress=lambda _: None,
        )
    except DependencyError as error:
        own = ".".join(map(str, sys.version_info[:3]))
        raise DependencyError(
            f"{project} requires Python {requires_python}, but the harness runs on Python {own} and no other was found",
            hint="Install a matching Python (`uv python install`), or change requires-python in its pyproject.toml.",
        ) from error
    return Path(await anyio.Path(found.strip()).resolve())


def allows(specifier: str, version: tuple[int, ...]) -> bool:
    """Whether a ``requires-python`` admits a release. What it cannot read it takes as "yes": uv has the last word."""
    try:
        return ".".join(map(str, version)) in SpecifierSet(specifier)
    except InvalidSpecifier:
        return True


def _lowest(specifier: str) -> str:
    """The oldest Python to resolve for, as ``major.minor``."""
    found = re.findall(r"(?:>=?|~=|==)\s*(\d+)\.(\d+)", specifier)
    return ".".join(map(str, max(((int(a), int(b)) for a, b in found), default=(3, 12))))


def local_paths(project: Path, requirements: str) -> Iterator[Path]:
    """Folders and files of this machine that the requirements name."""
    for line in requirements.splitlines():
        name = line.split(" ;")[0].split(" --hash")[0].rstrip(" \\")
        if " @ " in name:
            name = name.split(" @ ", 1)[1].strip()
        name = re.sub(r"\[[^\]]*\]$", "", name)
        if name.startswith("file:"):
            yield Path(unquote(urlsplit(name).path))
        elif name.startswith((".", "/")):
            yield Path(os.path.normpath(project / name))


def explicit_indexes(document: dict[str, Any]) -> list[str]:
    """Flags for indexes that serve only the packages pinned to them, which bare requirements no longer say."""
    indexes = document.get("tool", {}).get("uv", {}).get("index", [])
    flags = []
    for index in indexes if isinstance(indexes, list) else []:
        if isinstance(index, dict) and index.get("explicit") and "url" in index:
            flags += ["--index", f"{index['name']}={index['url']}" if "name" in index else str(index["url"])]
    # Safe here, whatever the name says: each file must match a hash of the lock, from whichever index it comes.
    return [*flags, "--index-strategy", "unsafe-best-match"] if flags else []


def _digest(project: Path, requirements: str, requires_python: str, document: dict[str, Any]) -> str:
    tool_uv = document.get("tool", {}).get("uv", {})
    indexes = {
        name: redact(value)
        for name, value in settings().items()
        if re.search(r"INDEX|FIND_LINKS", name) and not name.endswith(("_PASSWORD", "_USERNAME"))
    }
    sources = _sources_digest(project, requirements)
    return _sha256(requirements, requires_python, json.dumps([tool_uv, indexes], sort_keys=True, default=str), sources)


def _sha256(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _sources_digest(project: Path, requirements: str) -> str:
    """Of the names and bytes of path dependencies' sources, without what a build leaves in their folders."""
    hasher = hashlib.sha256()
    for path in sorted(set(local_paths(project, requirements))):
        for file in [path] if path.is_file() else _sources(path):
            name, content = file.relative_to(path).as_posix(), file.read_bytes()
            hasher.update(f"{len(name)}:{name}{len(content)}:".encode() + content)
    return hasher.hexdigest()


def _sources(path: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(path):
        here = Path(folder)
        left_out = _NOT_SOURCE | {"build", "dist"} if here == path else _NOT_SOURCE
        folders[:] = sorted(name for name in folders if name not in left_out and not name.endswith(".egg-info"))
        for name in sorted(files):
            if not name.endswith(".pyc") and (here / name).is_file():
                yield here / name


def _memory(project: Path) -> Path:
    """Where the resolution of these inputs is remembered: pyproject.toml, uv's settings and configuration files."""
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path(os.environ.get("HOME") or "/") / ".config")
    files = [Path(config, "uv", "uv.toml"), Path("/etc/uv/uv.toml")]
    if named := os.environ.get("UV_CONFIG_FILE"):
        files.append(Path(named))
    files += [folder / name for folder in (project, *project.parents) for name in ("uv.toml", "pyproject.toml")]
    contents = [f"{file}: {file.read_bytes().hex()}" for file in files if file.is_file() and os.access(file, os.R_OK)]
    return cache_dir() / "resolutions" / f"{_sha256(str(project), json.dumps(settings()), *contents)}.json"


def _recall(path: Path, project: Path) -> str | None:
    try:
        known = json.loads(path.read_bytes())
        requirements = str(known["requirements"])
        # What path dependencies say about their own dependencies counts as well.
        return requirements if known["sources"] == _sources_digest(project, requirements) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(path: Path, project: Path, requirements: str) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = {"requirements": requirements, "sources": _sources_digest(project, requirements)}
        part.write_text(json.dumps(known))
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StoreError(f"{path}: {error}") from error
