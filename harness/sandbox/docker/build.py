"""Making an image once on this machine, however many processes ask, with its log as progress."""

from __future__ import annotations

import hashlib
import platform
import shutil
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from harness.errors import ImageError, ProviderUnavailable, SandboxError
from harness.rollout.cache import cache_dir, try_lock
from harness.sandbox.base import Progress
from harness.sandbox.docker import context
from harness.sandbox.docker.engine import Engine
from harness.sandbox.docker.pull import patiently
from harness.sandbox.docker.refusals import FULL_HINT
from harness.sandbox.packing import digest

LABEL = "harness.image"
"""Label of every image of ours; says what it is: ``default``, ``base`` (of a folder's Dockerfile), ``environment``."""
LOW_DISK = 1 << 30

_BUILD_S = 3600.0
_KEPT_LINES = 10


async def once(engine: Engine, reference: str, make: Callable[[], Awaitable[None]]) -> str:
    """The id of an image that is there; else ``make`` it, in one process at a time.

    :raises ImageError: it was not there afterwards.
    """
    if (found := await engine.image(reference)) is None:
        name = hashlib.sha256(f"{engine.url} {reference}".encode()).hexdigest()[:24]
        async with _locked(cache_dir() / "docker" / "locks" / name):
            if (found := await engine.image(reference)) is None:
                await make()
                found = await engine.image(reference)
    if found is None:
        raise ImageError(f"Image {reference} is gone although it was made just now.", hint="Run again.")
    await to_thread.run_sync(_mark_used, reference)
    return str(found["Id"])


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    while True:
        with try_lock(path) as held:
            if held:
                yield
                return
        await anyio.sleep(0.1)


async def build(
    engine: Engine,
    fill: Callable[[tarfile.TarFile], None],
    tag: str,
    labels: dict[str, str],
    progress: Progress,
    *,
    network: str = "",
) -> None:
    """Build an image from the context that ``fill`` writes.

    :param network: of the steps that run; empty for the engine's default.
    :raises ImageError: the disk is too full to begin, or the build failed; with the end of its log.
    """
    if (free := await free_disk(engine)) is not None and free < LOW_DISK:
        raise ImageError(f"Only {free / 2**20:.0f} MiB are free where the engine keeps its images.", hint=FULL_HINT)
    lines: list[str] = []

    def on_message(message: dict[str, Any]) -> None:
        for line in str(message.get("stream", "")).splitlines():
            if line.strip():
                lines[:] = [*lines[1 - _KEPT_LINES :], line.rstrip()]
                progress(line.rstrip())

    async def send(chunks: AsyncIterator[bytes]) -> None:
        await engine.build(chunks, tag=tag, labels=labels, on_message=on_message, timeout_s=_BUILD_S, network=network)

    try:
        async for attempt in patiently(f"image {tag}", progress):  # its FROM lines pull
            with attempt:
                await context.upload(fill, send)
    except SandboxError as error:
        if error.retryable or isinstance(error, ProviderUnavailable):
            raise
        raise ImageError("\n".join([error.message, *(f"    {line}" for line in lines)]), hint=error.hint) from error
    except OSError as error:
        raise ImageError(f"What image {tag} is built from cannot be read: {error}") from error


async def free_disk(engine: Engine) -> int | None:
    """Bytes free where the engine keeps its data; None when that is on another machine (Docker Desktop's included)."""
    root = Path((await engine.facts()).root)
    if not engine.local or platform.system() != "Linux" or not await to_thread.run_sync(root.is_dir):
        return None
    return (await to_thread.run_sync(shutil.disk_usage, root)).free


def _used_record(reference: str) -> Path:
    """The file whose time says when this machine last used an image; it holds the reference."""
    return cache_dir() / "docker" / "used" / digest(reference)


def _mark_used(reference: str) -> None:
    path = _used_record(reference)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference)


def used_at(reference: str) -> float | None:
    try:
        return _used_record(reference).stat().st_mtime
    except OSError:
        return None


def forget(reference: str) -> None:
    _used_record(reference).unlink(missing_ok=True)
