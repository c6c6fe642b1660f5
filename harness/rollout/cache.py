"""Where built things are kept, and how each is built once however many processes ask for it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import platformdirs

from harness.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLL_S = 0.05
_CLEANUP_S = 60.0


def cache_dir() -> Path:
    """The harness's cache: ``$HARNESS_CACHE``, else the user's cache folder, else one in the system's temporary folder.

    :raises StoreError: none of them can be made or written.
    """
    override = os.environ.get("HARNESS_CACHE")
    if override:
        return _usable(Path(override).absolute(), private=False)
    try:
        return _usable(Path(platformdirs.user_cache_path("rollout-harness")).absolute(), private=False)
    except StoreError:
        # No home, or one that cannot be written: service accounts, read-only containers.
        return _usable(Path(tempfile.gettempdir()) / f"rollout-harness-{os.getuid()}", private=True)


def _usable(path: Path, *, private: bool) -> Path:
    hint = "Set HARNESS_CACHE to a folder that can be written."
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        stat = path.lstat()
    except (OSError, RuntimeError) as error:
        raise StoreError(f"cache folder {path}: {error}", hint=hint) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreError(f"cache folder {path} cannot be written", hint=hint)
    # In a shared folder anyone may have made it before us; what lies in it would run in our sandboxes.
    if private and (stat.st_uid != os.getuid() or stat.st_mode & 0o077 or path.is_symlink()):
        raise StoreError(f"cache folder {path} belongs to someone else or is open to others", hint=hint)
    return path


async def build_once(key: str, directory: Path, build: Callable[[Path], Awaitable[None]]) -> Path:
    """Find ``directory / key``, or build it: one builder at a time across all processes of this machine.

    ``build`` fills an empty folder on the same file system, which then takes the entry's name in one rename: an entry
    that is there is whole. A build that fails or is cancelled leaves nothing; what a dead one left, the next removes.

    :param key: a content address; a plain file name.
    :returns: the entry. Finding a ready one takes one ``stat``.
    :raises StoreError: the cache cannot be written.
    """
    entry = directory / key
    if entry.exists():
        return entry
    while True:
        with _try_lock(directory / f"{key}.lock") as held:
            if entry.exists():
                return entry
            if held:
                await _build(entry, build)
                return entry
        await anyio.sleep(_POLL_S)


async def _build(entry: Path, build: Callable[[Path], Awaitable[None]]) -> None:
    # A name of its own: the children of a builder that was killed may still be writing into theirs.
    part = entry.with_name(f"{entry.name}.{secrets.token_hex(4)}.part")
    try:
        await anyio.to_thread.run_sync(_begin, part)
        await build(part)
        await anyio.to_thread.run_sync(_publish, part, entry)
    finally:
        with anyio.move_on_after(_CLEANUP_S, shield=True):
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(part, ignore_errors=True))


def _begin(part: Path) -> None:
    """Make the folder, and remove those of builders that died: our predecessor's, and each whose lock is free."""
    key = _key(part)
    for other in part.parent.glob("*.part"):
        if _key(other) == key:
            shutil.rmtree(other, ignore_errors=True)
        else:
            with _try_lock(other.with_name(f"{_key(other)}.lock")) as held:
                if held:
                    shutil.rmtree(other, ignore_errors=True)
    with _store_errors(part):
        part.mkdir(mode=0o755)


def _key(part: Path) -> str:
    return part.name.rsplit(".", 2)[0]


def _publish(part: Path, entry: Path) -> None:
    with _store_errors(entry):
        part.chmod(0o755)
        os.sync()  # one flush for thousands of small files: a power cut must not leave an entry of empty ones
        part.rename(entry)
        folder = os.open(entry.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error}", hint="Free some space, or set HARNESS_CACHE to another folder.") from error


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Whether the lock was free. Lock files stay: removing one would let two in. The kernel frees a dead holder's."""
    with _store_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
