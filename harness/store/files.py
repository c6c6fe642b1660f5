"""How the run directory is written: atomically, without secrets, and with one error for everything a disk can do."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.errors import StoreError

Redact = Callable[[str], str]
"""Replaces every secret value in a text. Called from worker threads too."""

_MAX_DEPTH = 100
_MIN_KEY = 8
"""Shorter keys of objects are never redacted: a short secret would rename ``id`` or ``role``."""


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what a disk can do into a ``StoreError`` that names the path and says what is safe."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise StoreError(
            f"cannot write {path}: {'the disk is full' if full else error.strerror or error}",
            hint="Every result that events.jsonl holds is safe. "
            + ("Free some space" if full else "Make the folder writable")
            + " and run the same command again: only the missing trials run.",
        ) from error


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file so that readers, and a later run after a kill, see the old bytes or the new ones.

    :param durable: also survive a power cut; costs two disk flushes.
    :raises StoreError: the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(descriptor)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):  # give the space back
                temporary.unlink()
            raise
        if durable:
            sync_folder(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False)
    write_atomic(path, (text + "\n").encode(), durable=durable)


def json_line(value: Any, *, canonical: bool = False) -> bytes:
    """One line of JSON; canonical: keys sorted and no spaces."""
    separators = (",", ":") if canonical else None
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=canonical, separators=separators)
    return (text + "\n").encode()


def sync_folder(folder: Path) -> None:
    """Make a create or a rename in ``folder`` survive a power cut, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean(value: Any, redact: Redact, depth: int = 0) -> Any:
    """A copy that JSON and UTF-8 can hold, without secrets.

    NaN and infinity become null, lone surrogates ``?``, unknown objects their text; nesting ends at 100 levels.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth > _MAX_DEPTH:
        return "[nested too deeply]"
    if isinstance(value, dict):
        return {_clean_key(key, redact): clean(item, redact, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item, redact, depth + 1) for item in value]
    return redact(str(value)).encode("utf-8", "replace").decode()


def _clean_key(key: object, redact: Redact) -> str:
    text = str(key)
    return (redact(text) if len(text) >= _MIN_KEY else text).encode("utf-8", "replace").decode()
