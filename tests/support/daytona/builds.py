"""Declarative builds: a Dockerfile becomes layers, once per content, with a log that can be followed."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import AsyncIterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

import anyio
import anyio.to_thread

from . import dockerfile
from .machine import BASE_ENV, HOME, Layers, MachineDown, MachineRoom, chunks, remove_tree

LOG_BYTES = 4 * 1024 * 1024
STEP_S = 1800.0


class Build:
    """One image. ``state`` is pending, building, active or build_failed."""

    def __init__(self, content: str, contexts: Mapping[str, bytes] = MappingProxyType({})) -> None:
        self.ref = f"daytona-{hashlib.sha256(' '.join([content, *contexts]).encode()).hexdigest()}"
        self.content = content
        self.contexts = contexts
        self.state = "pending"
        self.reason: str | None = None
        self.recipe = dockerfile.Recipe()
        self.layers: Layers | None = None
        self.ended = anyio.Event()
        self._log = bytearray()
        self._more = anyio.Event()

    @property
    def command(self) -> list[str]:
        """What a sandbox runs first."""
        return [*self.recipe.entrypoint, *self.recipe.cmd]

    @property
    def env(self) -> dict[str, str]:
        return {**BASE_ENV, **self.recipe.env}

    @property
    def workdir(self) -> str:
        return self.recipe.workdir or HOME

    def say(self, text: bytes) -> None:
        self._log += text[: max(0, LOG_BYTES - len(self._log))]
        self._more.set()
        self._more = anyio.Event()

    async def log(self, follow: bool) -> AsyncIterator[bytes]:
        seen = 0
        while True:
            more = self._more
            if seen < len(self._log):
                yield bytes(self._log[seen:])
                seen = len(self._log)
            elif not follow or self.ended.is_set():
                return
            else:
                await more.wait()

    def end(self, state: str, reason: str | None = None) -> None:
        self.state, self.reason = state, reason
        if reason:
            self.say(f"{reason}\n".encode())
        self.ended.set()
        self._more.set()


class Builder:
    """Runs builds on the machine's network, as the service's builders have one.

    :param images: shell patterns of the base images that exist.
    :param env: variables of every RUN line, apart from the image's own; for a mirror of a package registry.
    """

    def __init__(self, room: MachineRoom, images: tuple[str, ...], env: Mapping[str, str] | None) -> None:
        self._room = room
        self._images = images
        self._env = dict(env if env is not None else _registry_env())
        self._builds: dict[str, Build] = {}
        self.runs = 0
        """Builds that really ran."""

    def get(self, content: str, contexts: Mapping[str, bytes] = MappingProxyType({})) -> tuple[Build, bool]:
        """The build of a Dockerfile, and whether it is new and has to be ``run``. What failed is tried again."""
        build = Build(content, contexts)
        old = self._builds.get(build.ref)
        if old is not None and old.state != "build_failed":
            return old, False
        self._builds[build.ref] = build
        return build, True

    async def run(self, build: Build, delay_s: float = 0.0) -> None:
        await anyio.sleep(delay_s)
        build.state = "building"
        self.runs += 1
        name = f"build-{self.runs}"
        try:
            build.recipe = dockerfile.parse(build.content)
            build.say(f"Step 1 : FROM {build.recipe.image}\n".encode())
            if not any(fnmatchcase(build.recipe.image, pattern) for pattern in self._images):
                raise dockerfile.DockerfileError(f"pull access denied for {build.recipe.image}")
            layers = Layers(self._room.folder / "layers" / name)
            context = layers.folder / "root" / dockerfile.CONTEXT[1:]
            await anyio.to_thread.run_sync(_unpack, build.contexts, context)
            machine = await self._room.start(name, None, build=layers, network=True)
            try:
                for number, step in enumerate(build.recipe.steps, 2):
                    build.say(f"Step {number} : {step.text}\n".encode())
                    env = {**BASE_ENV, "HOME": "/root", **self._env, **step.env}
                    child = await machine.spawn(step.argv, env, step.cwd, merge=True)
                    try:
                        with anyio.fail_after(STEP_S):
                            async for data in chunks(child.descriptors[1]):
                                build.say(data)
                            code = await child.wait()
                    finally:
                        for descriptor in child.descriptors:
                            os.close(descriptor)
                    if code:
                        raise dockerfile.DockerfileError(f"The command '{step.text}' returned a non-zero code: {code}")
            finally:
                with anyio.CancelScope(shield=True):
                    await machine.kill()
                    await self._room.remove(name)
            await anyio.to_thread.run_sync(remove_tree, context)
            build.layers = layers
            build.end("active")
        except (dockerfile.DockerfileError, MachineDown, OSError) as error:
            build.end("build_failed", f"Error building image: {error}")


def _unpack(contexts: Mapping[str, bytes], folder: Path) -> None:
    folder.mkdir()
    for data in contexts.values():
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(folder, filter="tar")


def _registry_env() -> dict[str, str]:
    prefixes = (
        "PIP_",
        "UV_",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "SSL_CERT",
    )
    found = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return {name: value for name, value in found.items() if not name.endswith(("CACHE_DIR", "CACHE"))}
