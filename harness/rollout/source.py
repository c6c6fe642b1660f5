"""A rollout on disk: its folder, its entry point, the digest of its source, and the tar that goes into a sandbox.

Nothing here executes or imports the rollout. What counts as source is the platform's rule (osmosis-ai 0.3.8,
``source_scan.py``), so digests are equal to those of its own local runs. All of it blocks: call it in a thread.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import traceback
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import ConfigError, EntryPointError, RolloutError
from harness.models import Record

if TYPE_CHECKING:
    from harness.config.workspace import Workspace  # at run time config imports sandbox, which imports this package

EXCLUDE_DIRS = frozenset(
    {"__pycache__", ".git", ".venv", "venv", "dist", "build", "node_modules", ".pytest_cache", ".ruff_cache"}
)
EXCLUDE_PATTERNS = ("uv.lock", "*.egg-info")
BYTECODE = frozenset({".pyc", ".pyo"})

MAX_CODE_MIB = 128
"""Largest tar of a rollout's code. It is held in memory, and sent to every sandbox."""
_BIGGEST = 5


class Rollout(Record):
    """A rollout that exists and whose entry point is a Python file."""

    name: str
    path: Path
    """Its folder, absolute."""
    entrypoint: str
    """Relative to ``path``, with forward slashes."""

    @classmethod
    def open(cls, workspace: Workspace, name: str, entrypoint: str) -> Rollout:
        """Find ``rollouts/<name>/<entrypoint>``.

        :raises ConfigError: there is no such folder.
        :raises EntryPointError: the entry point is not there, is not Python, lies elsewhere, or has a syntax error.
        """
        here = f"rollouts/{name}/"
        root = workspace.rollouts.resolve()
        path = (root / name).resolve()
        if path == root or not path.is_relative_to(root):
            raise ConfigError(f"Rollout must stay within rollouts/, got: {name}")
        if not path.is_dir():
            raise ConfigError(f"Rollout directory not found: {here}\n  Expected at: {path}")
        if Path(entrypoint).is_absolute():
            raise EntryPointError(f"Entrypoint must be a path relative to {here}, got: {entrypoint}")
        if Path(entrypoint).suffix != ".py":
            raise EntryPointError(f"Entrypoint must point to a Python file ending in .py, got: {entrypoint}")
        file = (path / entrypoint).resolve()
        if not file.is_relative_to(path):
            raise EntryPointError(f"Entrypoint must stay within {here}, got: {entrypoint}")
        if not file.is_file():
            raise EntryPointError(f"Entrypoint file not found in {here}: {entrypoint}\n  Expected at: {file}")
        relative = Path(os.path.normpath(entrypoint))
        if any(map(_excluded, relative.parts)):
            raise EntryPointError(
                f"Entrypoint must be part of the source, got: {entrypoint}",
                hint=f"Files in {', '.join(sorted(EXCLUDE_DIRS))} are not.",
            )
        rollout = cls(name=name, path=path, entrypoint=relative.as_posix())
        rollout._check_syntax()
        return rollout

    @property
    def pyproject(self) -> Path:
        return self.path / "pyproject.toml"

    def source_digest(self, exclude: Path | None = None) -> str:
        """SHA-256 over the names and contents of the source files, in hex.

        :param exclude: an absolute folder to leave out: a run's output that lies within the rollout.
        :raises RolloutError: a link to a folder or to nothing, or a file that cannot be read.
        """
        digest = hashlib.sha256()
        try:
            for file in sorted(self._files(exclude)):
                digest.update(str(file.relative_to(self.path)).encode())
                digest.update(file.read_bytes())
        except OSError as error:
            raise RolloutError(f"Cannot read the source of rollout {self.name!r}: {error}") from error
        except UnicodeEncodeError as error:
            raise RolloutError(f"rollout source contains a file name that is not UTF-8: {error.object!r}") from error
        return digest.hexdigest()

    def code_tar(self, exclude: Path | None = None) -> bytes:
        """The source, without bytecode, as an uncompressed tar: the same bytes for the same source.

        It is sorted and has no times and no owners. Links to files are followed, permission bits are kept.

        :raises RolloutError: as ``source_digest``, or the code is larger than ``MAX_CODE_MIB``.
        """
        try:
            files = [
                file
                for file in sorted(self._files(exclude))
                if file.suffix not in BYTECODE and file.name != ".env" and not file.name.startswith(".env.")
            ]
            sizes = {file: file.stat().st_size for file in files}
            if sum(sizes.values()) > MAX_CODE_MIB << 20:
                raise self._too_big(sizes)
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for file in files:
                    data = file.read_bytes()
                    entry = tarfile.TarInfo(file.relative_to(self.path).as_posix())
                    entry.size = len(data)
                    entry.mode = file.stat().st_mode & 0o777
                    tar.addfile(entry, io.BytesIO(data))
        except OSError as error:
            raise RolloutError(f"Cannot read the source of rollout {self.name!r}: {error}") from error
        return buffer.getvalue()

    def _files(self, exclude: Path | None) -> Iterator[Path]:
        """Source files, in no order."""

        def fail(error: OSError) -> None:
            raise error

        for folder, folders, names in os.walk(self.path, onerror=fail):
            here = Path(folder)
            folders[:] = [name for name in folders if not _excluded(name)]
            for name in (*folders, *names):
                path = here / name
                if _excluded(name) or (exclude and path.is_relative_to(exclude)):
                    continue
                if path.is_symlink() and not path.is_file():
                    raise RolloutError(
                        f"rollout source contains a directory or broken symlink: {path} -> {path.readlink()}; "
                        "replace it with a real directory or file so the digest can describe what it covers"
                    )
                if path.is_file():
                    yield path

    def _too_big(self, sizes: dict[Path, int]) -> RolloutError:
        biggest = sorted(sizes, key=lambda file: -sizes[file])[:_BIGGEST]
        return RolloutError(
            f"The code of rollout {self.name!r} has {sum(sizes.values()) >> 20} MiB, more than {MAX_CODE_MIB}. "
            "Its biggest files:\n"
            + "\n".join(f"  - {file.relative_to(self.path)}: {sizes[file] / (1 << 20):.1f} MiB" for file in biggest),
            hint="Code is copied into every sandbox; put large files into a dependency or into the sandbox's image.",
        )

    def _check_syntax(self) -> None:
        """Compile the entry point, without executing it."""
        shown = f"rollouts/{self.name}/{self.entrypoint}"
        try:
            source = (self.path / self.entrypoint).read_bytes()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an invalid escape is the rollout's business
                compile(source, shown, "exec", dont_inherit=True)
        except SyntaxError as error:
            # around source line and caret stand a line that names the file and one that repeats the message
            lines = "".join(traceback.format_exception_only(error)).splitlines()[:-1]
            caret = "".join(f"\n{line}" for line in lines if not line.startswith('  File "'))
            line = error.lineno or 1
            raise EntryPointError(f"{shown}:{line}: {type(error).__name__}: {error.msg}{caret}") from error
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise EntryPointError(f"{shown} cannot be read: {error or type(error).__name__}") from error


def _excluded(part: str) -> bool:
    return part in EXCLUDE_DIRS or any(fnmatch(part, pattern) for pattern in EXCLUDE_PATTERNS)
