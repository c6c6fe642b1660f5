"""Takes files out of a sandbox: an uncompressed tar of an untrusted sender, unpacked so that nothing leaves its folder.

The archive is parsed here and not by ``tarfile``, which reads extended headers of any size into memory and follows what
links and sparse maps say. What the guest sends is understood (ustar, and paths of pax headers); everything but
regular files is skipped and named. Every folder is opened
relative to the one above it without following links, and every file is created, never opened.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import ByteStream
from pydantic import Field

from harness.errors import ChannelError
from harness.models import Record
from harness.store.files import writing

_BLOCK = tarfile.BLOCKSIZE
_CHUNK = 256 * 1024
_MAX_HEADER = 64 * 1024
_MAX_SKIPPED = 100
_MAX_DEPTH = 64
_MAX_PATH = 1024 - len("rollout_trials//artifacts/") - 32
"""The platform takes paths of 1024 characters, counted from the run directory."""

_NO_DATA = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_CONFLICTS = (errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)


class ArtifactLimits(Record):
    """How much one trial may hand out."""

    files: int = 10_000
    total_bytes: int = 1 << 30
    file_bytes: int = 256 << 20


class ArtifactReport(Record):
    """What came out of a sandbox."""

    files: int = 0
    bytes: int = 0
    skipped: list[tuple[str, str]] = Field(default_factory=list)
    """Path and reason, at most 100."""
    skipped_more: int = 0
    error: str | None = None
    """Why the archive ended early. What came before it is kept; a file that was cut is listed in ``skipped``."""


class _BadArchive(Exception):
    """The archive cannot be read any further."""


class _Skip(Exception):
    """This entry is not wanted; the next may be."""


async def receive_artifacts(
    stream: ByteStream, destination: Path, limits: ArtifactLimits | None = None
) -> ArtifactReport:
    """Unpack a tar into ``destination``, which is created when missing. Never raises for what the sandbox sends.

    The caller sets the deadline. Files that are there already are left alone.

    :raises StoreError: the disk refuses.
    """
    with writing(destination):
        folder = await anyio.to_thread.run_sync(_open_destination, destination)
    archive = _Archive(stream, limits or ArtifactLimits(), folder, destination)
    error: str | None = None
    try:
        await archive.unpack()
    except _BadArchive as reason:
        error = str(reason)
    except (tarfile.HeaderError, anyio.BrokenResourceError, anyio.ClosedResourceError, ChannelError) as reason:
        error = f"the archive ended early: {str(reason) or type(reason).__name__}"
    finally:
        os.close(folder)
    return ArtifactReport(
        files=archive.files,
        bytes=archive.bytes,
        skipped=archive.skipped,
        skipped_more=archive.skipped_more,
        error=error,
    )


def remove_unsafe(folder: Path) -> list[tuple[str, str]]:
    """Remove links, special files and names the platform refuses from an artifacts folder; returns paths and reasons.

    The rollout's grader may have written there too, and one stray link would make the whole run unfit for upload.
    """
    removed: list[tuple[str, str]] = []
    for parent, folders, names in os.walk(folder):
        for name in [*names, *folders]:
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            mode = path.lstat().st_mode
            try:
                if stat.S_ISREG(mode):
                    _parts(relative)
                elif not stat.S_ISDIR(mode):
                    raise _Skip("not a regular file")
            except _Skip as reason:
                path.unlink()
                removed.append((_printable(relative), str(reason)))
    return removed


def _open_destination(destination: Path) -> int:
    destination.mkdir(parents=True, exist_ok=True)
    return os.open(destination, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


class _Archive:
    def __init__(self, stream: ByteStream, limits: ArtifactLimits, folder: int, destination: Path) -> None:
        self.files = 0
        self.bytes = 0
        self.skipped: list[tuple[str, str]] = []
        self.skipped_more = 0
        self._stream = stream
        self._limits = limits
        self._folder = folder
        self._destination = destination
        self._buffer = bytearray()
        self._taken = 0

    async def unpack(self) -> None:
        name = ""  # from an extended header, for the entry that follows it
        entries = 0
        while any(header := await self._take(_BLOCK)):
            info = tarfile.TarInfo.frombuf(bytes(header), "utf-8", "surrogateescape")
            entries += 1
            if entries > 10 * self._limits.files + 1000:
                raise _BadArchive("the archive has too many entries")
            if info.size < 0:
                raise _BadArchive("the archive has an entry of negative size")
            if info.type == tarfile.XHDTYPE:
                if info.size > _MAX_HEADER:
                    raise _BadArchive(f"the archive has an extended header of {info.size} bytes")
                data = await self._take(info.size + -info.size % _BLOCK)
                name = _pax_path(bytes(data[: info.size]))
            else:
                await self._entry(info, name or info.name)
                name = ""

    async def _entry(self, info: tarfile.TarInfo, name: str) -> None:
        if info.type == tarfile.DIRTYPE:
            return
        if info.type in _NO_DATA:
            self._skip(name, "not a regular file")
            return
        size = info.size
        try:
            if info.type not in _REGULAR:
                raise _Skip("not a regular file")
            parts = _parts(name)
            if size > self._limits.file_bytes:
                raise _Skip(f"larger than {self._limits.file_bytes} bytes")
            if self.files >= self._limits.files:
                raise _Skip(f"more than {self._limits.files} files")
            if self.bytes + size > self._limits.total_bytes:
                raise _Skip(f"more than {self._limits.total_bytes} bytes in all")
            with writing(self._destination / name):
                file = await anyio.to_thread.run_sync(_create, self._folder, parts, info.mode)
        except _Skip as reason:
            self._skip(name, str(reason))
            await self._drain(size + -size % _BLOCK)
            return
        try:
            left = size
            while left:
                data = await self._take(min(left, _CHUNK))
                left -= len(data)
                with writing(self._destination / name):
                    await anyio.to_thread.run_sync(_write, file, data)
        except BaseException:
            self._skip(name, f"cut: not all of its {size} bytes arrived")
            raise
        finally:
            os.close(file)
        self.files += 1
        self.bytes += size
        await self._drain(-size % _BLOCK)

    async def _take(self, size: int) -> bytearray:
        """Exactly ``size`` bytes."""
        while len(self._buffer) < size:
            try:
                data = await self._stream.receive(_CHUNK)
            except anyio.EndOfStream:
                raise _BadArchive("the archive is cut short") from None
            self._buffer += data
            self._taken += len(data)
            # What is skipped is sent all the same: bound that too.
            if self._taken > 2 * self._limits.total_bytes + (64 << 20):
                raise _BadArchive("the archive is far larger than the limits")
        taken = self._buffer[:size]
        del self._buffer[:size]
        return taken

    async def _drain(self, size: int) -> None:
        while size:
            size -= len(await self._take(min(size, _CHUNK)))

    def _skip(self, name: str, reason: str) -> None:
        if len(self.skipped) < _MAX_SKIPPED:
            self.skipped.append((_printable(name), reason))
        else:
            self.skipped_more += 1


def _create(folder: int, parts: Sequence[str], mode: int) -> int:
    """A new file below ``folder``, and the folders above it. No link on the way is followed."""
    folder = os.dup(folder)
    try:
        for part in parts[:-1]:
            with suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=folder)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = below
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(parts[-1], flags, 0o600, dir_fd=folder)
        os.fchmod(file, 0o755 if mode & 0o111 else 0o644)
        return file
    except OSError as error:
        if error.errno in _CONFLICTS:
            raise _Skip(f"cannot be created beside what is there ({error.strerror})") from error
        raise
    finally:
        os.close(folder)


def _write(file: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _parts(name: str) -> list[str]:
    if name.startswith("/"):
        raise _Skip("an absolute path")
    if any(ord(char) < 32 or char in "\\\x7f" or "\ud800" <= char <= "\udfff" for char in name):
        raise _Skip("a backslash, control character or invalid UTF-8 in its name")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _Skip("a path that leaves its folder")
    if not parts or name.endswith("/"):
        raise _Skip("no file name")
    if (
        len("/".join(parts)) > _MAX_PATH
        or len(parts) > _MAX_DEPTH
        or max(len(os.fsencode(part)) for part in parts) > 255
    ):
        raise _Skip("a path that is too long or too deep")
    if len(parts) == 1 and parts[0].casefold() == "manifest.json":
        raise _Skip("a reserved name")
    return parts


def _pax_path(data: bytes) -> str:
    """The path that an extended header names, or nothing. Its records are ``<length> <key>=<value>`` and a newline."""
    path = ""
    start = 0
    while start < len(data) and data[start]:
        space = data.find(b" ", start, start + 8)
        digits = data[start:space] if space > 0 else b""
        end = start + int(digits) if digits.isdigit() else 0
        if not space < end <= len(data) or data[end - 1 : end] != b"\n":
            raise _BadArchive("the archive has a broken extended header")
        key, _, value = data[space + 1 : end - 1].partition(b"=")
        if key == b"path":
            path = value.decode("utf-8", "surrogateescape")
        start = end
    return path


def _printable(name: str) -> str:
    return name[:200].encode("utf-8", "replace").decode()
