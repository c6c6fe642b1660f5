"""Environment images: one per lock and base image, content-addressed, built once, removed least recently used first.

The key covers the base image's id, the lock, the guest, and how the image is laid out, so a change of any of them is
another image, and the same inputs find the same one again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
from anyio import to_thread

from harness.guest import ENV, PROTOCOL
from harness.rollout.environment import site_packages
from harness.rollout.lock import Lock
from harness.sandbox.base import Environment, Progress, SandboxSettings, StoredImage
from harness.sandbox.docker import base, context
from harness.sandbox.docker.build import LABEL, build, forget, once, used_at
from harness.sandbox.docker.engine import Engine
from harness.sandbox.docker.pull import DEFAULT_IMAGE
from harness.sandbox.packing import digest, digest_files

ENVIRONMENTS = "harness-env"
"""Repository of the environment images."""

_LAYOUT = "1"


async def ensure(engine: Engine, lock: Lock, settings: SandboxSettings, progress: Progress) -> Environment:
    """Find, or build, the environment image of a lock.

    :raises ImageError: the base image cannot be had or used, or the build failed.
    :raises DependencyError: the dependencies cannot be installed for the base image's Python.
    """
    base_id = await base.get(engine, settings.image, lock.project, progress)
    name = settings.image or DEFAULT_IMAGE
    found = await base.interpreter(engine, base_id, name, lock)
    guest = await to_thread.run_sync(digest_files, context.GUEST, "*.py")
    key = digest(_LAYOUT, str(PROTOCOL), base_id, lock.digest, guest)
    tag = f"{ENVIRONMENTS}:{key}"

    async def make() -> None:
        packages = await site_packages(lock, found.version, found.platform(), progress)
        progress(f"building image {tag} from {name}")
        labels = {LABEL: "environment", "harness.base": base_id, "harness.lock": lock.digest}
        fill = partial(
            context.environment,
            base=base_id,
            python=found.executable,
            version=found.version,
            packages=packages,
            labels=labels,
        )
        try:
            await build(engine, fill, tag, {}, progress, network="none")
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(60):
                await _remove_torsos(engine, lock)
            raise

    id = await once(engine, tag, make)
    return Environment(key=key, handle=id, python=f"{ENV}/bin/python")


async def _remove_torsos(engine: Engine, lock: Lock) -> None:
    """Remove what a failed build leaves: its last step's image, without a tag."""
    for image in await engine.images(f"harness.lock={lock.digest}", untagged=True):
        await engine.remove_image(image["Id"])


async def stored(engine: Engine) -> list[StoredImage]:
    """The images that we made, the least recently used first."""
    sizes: dict[str, int] = {image["Id"]: int(image["Size"]) for image in await engine.images("")}
    found = []
    for image in await engine.images(LABEL):
        labels = image.get("Labels") or {}
        # A user's own image FROM one of ours has its labels, too; it has another name.
        for name in image.get("RepoTags") or ():
            tag = name.removeprefix("docker.io/library/").removeprefix("localhost/")  # Podman's full names
            if tag.partition(":")[0] in (ENVIRONMENTS, base.BASES) or tag == DEFAULT_IMAGE:
                created = float(image["Created"])
                record = StoredImage(
                    id=image["Id"],
                    tag=tag,
                    kind=labels[LABEL],
                    size=int(image["Size"]) - sizes.get(labels.get("harness.base", ""), 0),
                    created_at=created,
                    used_at=await to_thread.run_sync(used_at, tag) or created,
                )
                found.append(record)
    return sorted(found, key=lambda image: image.used_at)


async def prune(engine: Engine, budget: int, progress: Callable[[str], None]) -> list[StoredImage]:
    """Remove the least recently used of our images until the rest takes at most ``budget`` bytes; says which.

    The default image stays, and so does what a container or another image uses.
    """
    images = [image for image in await stored(engine) if image.kind != "default"]
    total = sum(image.size for image in images)
    removed = []
    # Environments first: a base cannot go while something is built on it.
    for image in sorted(images, key=lambda image: image.kind != "environment"):
        if total <= budget:
            break
        if await engine.remove_image(image.tag):
            progress(f"removed image {image.tag} ({image.size / 1e6:.0f} MB)")
            total -= image.size
            removed.append(image)
            await to_thread.run_sync(forget, image.tag)
    return removed
