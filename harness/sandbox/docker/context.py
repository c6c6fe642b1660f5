"""Build contexts, streamed to the engine as they are read: never a whole one in memory or twice on disk."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import anyio
from anyio import from_thread, to_thread
from anyio.streams.memory import MemoryObjectSendStream

from harness.guest import ENV, LIB
from harness.sandbox.packing import own_shebang

GUEST = Path(__file__).parents[2] / "guest"
_CHUNK = 256 * 1024
_FINISH = f"{ENV}/finish.py"

FINISH = """\
\"\"\"Run while the image is built, on a folder: byte code for it, and a name for the sandbox's user.\"\"\"
import compileall
import pathlib
import sys

if __name__ == "__main__":
    compileall.compile_dir(sys.argv[1], quiet=2, workers=0)
    users = pathlib.Path("/etc/passwd")
    names = users.read_text() if users.exists() else ""
    if not any(line.split(":")[2:3] == ["1000"] for line in names.splitlines()):
        users.write_text(names + "sandbox:x:1000:1000::/sandbox/home:/bin/sh\\n")
"""


async def upload(
    fill: Callable[[tarfile.TarFile], None], consume: Callable[[AsyncIterator[bytes]], Awaitable[None]]
) -> None:
    """Write a tar with ``fill``, in a thread, while ``consume`` takes its bytes. Raises the first error of either."""
    send, receive = anyio.create_memory_object_stream[bytes](4)
    errors: list[Exception] = []

    async def produce() -> None:
        async with send:
            try:
                await to_thread.run_sync(_write, fill, send)
            except anyio.BrokenResourceError:
                pass  # the consumer failed, and says why
            except Exception as error:
                errors.append(error)

    async def chunks() -> AsyncIterator[bytes]:
        async for chunk in receive:
            yield chunk
        if errors:
            raise errors[0]  # or the engine would take the torso for the whole

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(produce)
        async with receive:
            try:
                await consume(chunks())
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]


def _write(fill: Callable[[tarfile.TarFile], None], send: MemoryObjectSendStream[bytes]) -> None:
    with tarfile.open(mode="w|", fileobj=_Chunks(send), bufsize=_CHUNK) as tar:
        fill(tar)


class _Chunks(io.RawIOBase):
    def __init__(self, send: MemoryObjectSendStream[bytes]) -> None:
        self._send = send

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # tarfile writes bytes only
        from_thread.run(self._send.send, bytes(data))
        return len(data)


def environment(
    tar: tarfile.TarFile, base: str, python: str, version: str, packages: Path, labels: Mapping[str, str]
) -> None:
    """The context of an environment image: a virtual environment, the guest, and the Dockerfile.

    One stage is enough: the steps that run only add files (byte code), so no layer holds anything twice. The guest
    comes last: another guest costs one small layer.

    :param base: id of the base image.
    :param python: the interpreter in the base image; ``version`` is its full version.
    :param packages: a folder as ``uv pip install --target`` makes it: packages, and console scripts in ``bin``.
    :param labels: of every step's image, so that what a failed build leaves can be found.
    """
    site = f"{ENV}/lib/python{'.'.join(version.split('.')[:2])}/site-packages"
    run = f'RUN ["{ENV}/bin/python", "-I", "-S", "{_FINISH}", "%s"]'
    lines = [
        f"FROM {base.removeprefix('sha256:')}",
        "USER 0:0",
        "LABEL " + " ".join(f'"{key}"="{value}"' for key, value in labels.items()),
        f"COPY {ENV.lstrip('/')}/ {ENV}/",
        run % ENV,
        f"COPY {LIB.lstrip('/')}/ {LIB}/",
        run % LIB,
    ]
    _text(tar, "Dockerfile", "\n".join([*lines, ""]))
    _text(tar, _FINISH, FINISH)
    home, _, name = python.rpartition("/")
    _text(tar, f"{ENV}/pyvenv.cfg", f"home = {home}\ninclude-system-site-packages = false\nversion = {version}\n")
    for link, target in (("python", python), ("python3", "python"), (name, "python")):
        if link != name or name not in ("python", "python3"):
            entry = tarfile.TarInfo(f"{ENV}/bin/{link}".lstrip("/"))
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    _tree(tar, packages, site, skip=packages / "bin")
    if (packages / "bin").is_dir():
        for script in sorted((packages / "bin").iterdir()):
            if script.is_file():
                _bytes(tar, f"{ENV}/bin/{script.name}", own_shebang(script.read_bytes()), 0o755)
    for module in guest_files():
        _bytes(tar, f"{LIB}/harness_guest/{module.relative_to(GUEST)}", module.read_bytes())


def directory(tar: tarfile.TarFile, folder: Path) -> None:
    """A user's own folder with a Dockerfile, as it is."""
    _tree(tar, folder, "", skip=folder / ".git")


def guest_files() -> list[Path]:
    return sorted(GUEST.rglob("*.py"))


def _tree(tar: tarfile.TarFile, source: Path, target: str, skip: Path) -> None:
    for folder, folders, files in os.walk(source):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if here / name != skip)
        links = [name for name in folders if (here / name).is_symlink()]
        folders[:] = [name for name in folders if name not in links]
        for name in sorted([*files, *links]):
            path = here / name
            entry = tar.gettarinfo(path, arcname=f"{target}/{path.relative_to(source)}".lstrip("/"))
            if entry is None or not (entry.isreg() or entry.issym() or entry.islnk()):
                continue
            if entry.islnk():  # files of a package cache are often linked to each other
                entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", path.stat().st_size
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            if entry.isreg():
                entry.mode = 0o755 if entry.mode & 0o100 else 0o644
                with path.open("rb") as file:
                    tar.addfile(entry, file)
            else:
                tar.addfile(entry)


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    _bytes(tar, name, text.encode())


def _bytes(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name.lstrip("/"))
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))
