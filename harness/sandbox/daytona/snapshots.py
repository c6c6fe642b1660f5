"""Environments as snapshots: one per recipe, named by its content, built by the service once and found again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Set
from contextlib import suppress
from datetime import datetime
from functools import partial

import anyio
from daytona import CreateSnapshotParams
from daytona import Resources as Size
from daytona.common import errors as sdk

from harness.errors import DependencyError, ImageError, ProviderUnavailable, QuotaError, SandboxError, SandboxGone
from harness.guest import ENV
from harness.models import Resources
from harness.rollout.lock import Lock
from harness.sandbox.base import Environment, Progress, SandboxSettings, StoredImage
from harness.sandbox.daytona import recipe
from harness.sandbox.daytona.client import Client, is_transient, translate

PREFIX = "harness-"
MAX_DISK_GIB = 10
BUILD_S = 3600.0
POLL_S = 1.0
_KEPT_LINES = 15


def size(resources: Resources) -> Size:
    """The sandbox's resources in the service's units, rounded up.

    :raises SandboxError: more disk than a sandbox can have.
    """
    disk = math.ceil(2 * resources.disk_mib / 1024) + 1  # the work folder and /tmp, and room for what is written beside
    if disk > MAX_DISK_GIB:
        raise SandboxError(
            f"disk_mib = {resources.disk_mib} needs a sandbox of {disk} GiB; Daytona's have at most {MAX_DISK_GIB}.",
            hint=f"Set disk_mib in [tool.harness.sandbox] to at most {(MAX_DISK_GIB - 1) * 1024 // 2}.",
        )
    return Size(cpu=math.ceil(resources.cpus), memory=math.ceil(resources.memory_mib / 1024), disk=disk)


async def ensure(client: Client, lock: Lock, settings: SandboxSettings, progress: Progress) -> Environment:
    """Find, or have built, the snapshot of a lock.

    :raises DependencyError: its dependencies cannot be installed.
    :raises ImageError: the base image cannot be had, or does not build.
    :raises SandboxError: more disk is wanted than a sandbox can have.
    """
    wanted = size(settings.resources)
    image, files = await recipe.make(lock, settings.image, progress)
    parts = [image.dockerfile(), files, wanted.cpu, wanted.memory, wanted.disk, os.environ.get("DAYTONA_TARGET")]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    name = f"{PREFIX}{key}"
    with anyio.move_on_after(BUILD_S):
        await _active(client, CreateSnapshotParams(name=name, image=image, resources=wanted), progress)
        return Environment(key=key, handle=name, python=f"{ENV}/bin/python")
    raise ImageError(f"Daytona: snapshot {name} was not ready after {BUILD_S / 60:.0f} minutes.")


async def _active(client: Client, wanted: CreateSnapshotParams, progress: Progress) -> None:
    """Wait until the snapshot is usable; make it where nobody does. Its name lets one build run, whoever asks."""
    name, service = wanted.name, client.sdk.snapshot
    # The service puts aside what nobody used for two weeks. And an older build's failure says nothing of one now.
    mend = {"inactive": service.activate, "error": service.delete, "build_failed": service.delete}
    waiting = refusal = ""
    while True:
        try:
            found = await client.call(partial(service.get, name), f"cannot look for snapshot {name}")
        except SandboxGone:
            if await _build(client, wanted, progress):
                return
            continue  # another process was first
        state = str(found.state.value)
        if state == "active":
            return
        if state != waiting:
            progress(f"snapshot {name} is {state}: waiting")
            waiting = state
        if state in mend:
            try:
                await client.call(partial(mend.pop(state), found), f"snapshot {name} is {state}")
            except (QuotaError, ProviderUnavailable):
                raise
            except SandboxError as error:
                refusal = error.message  # perhaps only because another process has done it
        elif state in ("inactive", "error", "build_failed"):
            raise ImageError(f"Daytona: snapshot {name} is {state}: {found.error_reason or refusal}")
        await anyio.sleep(POLL_S)


async def _build(client: Client, wanted: CreateSnapshotParams, progress: Progress) -> bool:
    """Have it built, with its log as progress. Returns whether it was we who made it."""
    lines: list[str] = []
    installing = False

    def on_logs(text: str) -> None:
        nonlocal installing
        for line in filter(None, map(str.strip, text.splitlines())):
            lines[:] = [*lines[1 - _KEPT_LINES :], line[:300]]
            installing = installing or recipe.STEP in line
            progress(line if len(line) < 300 else f"{line[:120]} …")

    progress(f"building snapshot {wanted.name}")
    try:
        make = partial(client.sdk.snapshot.create, wanted, on_logs=on_logs, timeout=BUILD_S)
        await client.gate.call("authenticated", make)
        return True
    except sdk.DaytonaError as error:
        if is_transient(error) or isinstance(error, sdk.DaytonaConflictError):
            return False  # it may be there all the same
        if error.status_code is not None:
            raise translate(error, f"Daytona does not build snapshot {wanted.name}") from error
        with suppress(SandboxError):
            await client.call(partial(client.sdk.snapshot.delete, wanted.name), "cannot remove what failed")
        text = "\n".join([f"Daytona: {error.message.splitlines()[0]}", *(f"    {line}" for line in lines)])
        if installing:
            hint = (
                "A package from an index of your own: pin it there in [tool.uv.sources]; it is then fetched here and "
                "travels. One that is built from source: use an image with its tools ([tool.harness.sandbox] image)."
            )
            raise DependencyError(text, hint=hint) from error
        hint = "The base image needs python3 (3.12 or newer) with venv and pip, and a tag that a registry knows."
        raise ImageError(text, hint=hint) from error


async def stored(client: Client) -> list[StoredImage]:
    """The snapshots that we made, the least recently used first."""
    found: list[StoredImage] = []
    page = pages = 1
    while page <= pages:
        ask = partial(client.sdk.snapshot.list, page=page, limit=100)
        listed = await client.call(ask, "cannot list the snapshots")
        for each in listed.items:
            if re.fullmatch(PREFIX + "[0-9a-f]{32}", each.name):
                created = unix_time(each.created_at)
                record = StoredImage(
                    id=each.id,
                    tag=each.name,
                    kind="environment",
                    size=int(float(each.size or 0) * 2**30),
                    created_at=created,
                    used_at=unix_time(each.last_used_at) or created,
                )
                found.append(record)
        page, pages = page + 1, listed.total_pages
    return sorted(found, key=lambda each: each.used_at)


async def prune(client: Client, budget: int, used: Set[str | None], progress: Progress) -> list[StoredImage]:
    """Remove the least recently used of our snapshots until the rest takes at most ``budget`` bytes; says which.

    :param used: names or ids of those that stay.
    """
    found, removed = await stored(client), []
    total = sum(each.size for each in found)
    for each in found:
        if total <= budget:
            break
        if used & {each.tag, each.id}:
            continue
        with suppress(SandboxGone):
            await client.call(partial(client.sdk.snapshot.delete, each.id), f"cannot remove snapshot {each.tag}")
        progress(f"removed snapshot {each.tag} ({each.size / 1e6:.0f} MB)")
        total -= each.size
        removed.append(each)
    return removed


def unix_time(said: object) -> float:
    try:
        return datetime.fromisoformat(str(said)).timestamp()
    except ValueError:
        return 0.0
