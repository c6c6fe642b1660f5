"""Where built things are kept, and how each is built once however many processes ask for it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import platformdirs

from harness.errors import StoreError

_POLL_S = 0.05
_CLEANUP_S = 60.0


def cache_dir() -> Path:
    """The harness's cache, made if need be: ``$HARNESS_CACHE``, else in the user's cache folder.

    :raises StoreError: it cannot be made or written.
    """
    path = Path(os.environ.get("HARNESS_CACHE") or platformdirs.user_cache_path("rollout-harness")).absolute()
    hint = "Set HARNESS_CACHE to a folder that can be written."
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(f"cache folder {path}: {error}", hint=hint) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreError(f"cache folder {path} cannot be written", hint=hint)
    return path


async def build_once(key: str, directory: Path, build: Callable[[Path], Awaitable[None]]) -> Path:
    """Find ``directory / key``, or build it: one builder at a time across all processes of this machine.

    ``build`` fills an empty folder on the same file system, which then takes the entry's name in one rename: an entry
    that is there is whole. A build that fails or is cancelled leaves nothing; what a dead one left, the next of that
    key removes.

    :param key: a content address; a plain file name.
    :returns: the entry. Finding a ready one takes one ``stat``.
    :raises StoreError: the cache cannot be written.
    """
    entry = directory / key
    while not entry.exists():
        with try_lock(directory / f"{key}.lock") as held:
            if held and not entry.exists():
                await _build(entry, build)
        if not held:
            await anyio.sleep(_POLL_S)
    return entry


async def _build(entry: Path, build: Callable[[Path], Awaitable[None]]) -> None:
    # A name of its own: the children of a builder that was killed may still be writing into theirs.
    part = entry.with_name(f"{entry.name}.{secrets.token_hex(4)}.part")
    try:
        await anyio.to_thread.run_sync(_begin, entry, part)
        await build(part)
        await anyio.to_thread.run_sync(_publish, part, entry)
    finally:
        with anyio.move_on_after(_CLEANUP_S, shield=True):
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(part, ignore_errors=True))


def _begin(entry: Path, part: Path) -> None:
    for left in entry.parent.glob(f"{entry.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)
    with _store_errors(part):
        part.mkdir(mode=0o755)


def _publish(part: Path, entry: Path) -> None:
    with _store_errors(entry):
        part.chmod(0o755)
        os.sync()  # one flush for thousands of small files: a power cut must not leave an entry of empty ones
        part.rename(entry)


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error}", hint="Free some space, or set HARNESS_CACHE to another folder.") from error


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
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
