"""The lock by which one living process at a time owns a run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import StoreError
from harness.store.files import writing


@contextmanager
def locked(path: Path, name: str) -> Iterator[None]:
    """Hold the lock file of the run ``name``: the one that the platform's own runner takes. It ends with the process.

    The file lies outside the run directory, because ``--fresh`` renames that.

    :raises StoreError: another process holds it.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            raise StoreError(
                f"run {name!r} is in use by process {holder or 'unknown'} (lock {path})",
                hint="Wait for it to finish, stop it, or use another --name.",
            ) from None
        with writing(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)
