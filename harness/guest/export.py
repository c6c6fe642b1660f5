"""Sends a folder of the sandbox to the host as a tar. The host trusts none of it; this end only keeps it orderly."""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path
from typing import Any

from .mux import Stream

CHUNK = 64 * 1024
MAX_SKIPPED = 100


async def send(folder: Path, stream: Stream) -> dict[str, Any]:
    """Write an uncompressed tar of the regular files below ``folder``. Links and special files are skipped and named.

    Returns ``files`` (count), ``bytes`` (of content) and ``skipped`` (at most 100 of {``path``, ``reason``}).
    """
    files = size = 0
    skipped: list[dict[str, str]] = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names) + [f for f in folders if (Path(parent) / f).is_symlink()]:
            path = Path(parent) / name
            relative = os.fsencode(path.relative_to(folder)).decode("utf-8", "replace")
            try:
                length = await _send_file(path, relative, stream)
            except OSError as error:
                if isinstance(error, ConnectionError):
                    raise
                if len(skipped) < MAX_SKIPPED:
                    skipped.append({"path": relative, "reason": error.strerror or str(error)})
                continue
            files += 1
            size += length
    await stream.write(bytes(2 * tarfile.BLOCKSIZE))
    return {"files": files, "bytes": size, "skipped": skipped}


async def _send_file(path: Path, name: str, stream: Stream) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file")
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = status.st_size, status.st_mode & 0o777, int(status.st_mtime)
        await stream.write(info.tobuf(tarfile.PAX_FORMAT, errors="replace"))
        left = info.size
        while left:
            # Nothing writes any more, but a sparse or odd file may still come up short: pad it to what was promised.
            data = file.read(min(CHUNK, left)) or bytes(min(CHUNK, left))
            left -= len(data)
            await stream.write(data)
        await stream.write(bytes(-info.size % tarfile.BLOCKSIZE))
    return info.size
