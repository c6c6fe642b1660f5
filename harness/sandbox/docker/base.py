"""The image that a sandbox's image is built on: found, pulled or built, and asked for its Python."""

from __future__ import annotations

import os
import re
import secrets
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import ValidationError

from harness.errors import ImageError, SandboxError
from harness.models import Record
from harness.rollout.cache import cache_dir
from harness.rollout.lock import Lock
from harness.sandbox.base import Progress, SandboxSettings
from harness.sandbox.docker import container, context
from harness.sandbox.docker.build import LABEL, build, once
from harness.sandbox.docker.engine import Engine
from harness.sandbox.docker.pull import BOOTSTRAP, DEFAULT_IMAGE, pull
from harness.sandbox.owner import this_process
from harness.sandbox.packing import digest, digest_files

BASES = "harness-base"
"""Repository of the images built from folders."""

_MIN_PYTHON = (3, 12)
_PROBE_S = 60.0
_OUTPUT = 64 * 1024
_PROBE = """\
import json, platform, sys, sysconfig
print(json.dumps({"version": platform.python_version(), "machine": platform.machine(), "executable": sys.executable,
    "libc": "musl" if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "") else " ".join(platform.libc_ver())}))
"""
_CHOOSE = "Choose another image in [tool.harness.sandbox], or leave it empty for the default."


class Interpreter(Record):
    """A base image's Python."""

    version: str
    machine: str
    executable: str
    libc: str
    """``glibc 2.41``, ``musl``, or empty."""

    def platform(self) -> str:
        """As uv names it; the newest manylinux that the image's glibc can run."""
        if self.libc == "musl":
            return f"{self.machine}-unknown-linux-musl"
        minor = int(found[1]) if (found := re.match(r"glibc 2\.(\d+)", self.libc)) else 28
        newest = max((known for known in (17, 28, *range(31, 41)) if known <= minor), default=17)
        return f"{self.machine}-manylinux_2_{newest}"


async def get(engine: Engine, image: str, project: Path, progress: Progress) -> str:
    """The id of the base image: found, pulled, or built.

    :param image: empty for the default image; a reference, a digest, an id, or a folder with a Dockerfile, relative to
        the project.
    :raises ImageError: it cannot be had.
    """
    if not image:
        return await once(engine, DEFAULT_IMAGE, partial(_default, engine, progress))
    folder = project / image
    if image.startswith((".", "/")) or await to_thread.run_sync(folder.is_dir):
        return await _built(engine, folder, progress)
    return await once(engine, image, partial(pull, engine, image, progress))


async def _default(engine: Engine, progress: Progress) -> None:
    package = Path(__file__).parents[2]
    roots = (package / "_templates", package.parent)  # of an installed package, of a checkout
    folder = (
        next((root for root in roots if (root / "sandbox_images").is_dir()), roots[0]) / "sandbox_images" / "python"
    )
    hint = f"Where no registry can be reached, `{BOOTSTRAP}` makes it from Debian packages."
    if not await to_thread.run_sync((folder / "Dockerfile").is_file):
        raise ImageError(f"The default image {DEFAULT_IMAGE} is not there, and neither is its Dockerfile.", hint=hint)
    progress(f"building the default image {DEFAULT_IMAGE}")
    try:
        await build(engine, partial(context.directory, folder=folder), DEFAULT_IMAGE, {LABEL: "default"}, progress)
    except ImageError as error:
        text = f"The default image {DEFAULT_IMAGE} could not be pulled or built. {error.message}"
        raise ImageError(text, hint=error.hint or hint) from error


async def _built(engine: Engine, folder: Path, progress: Progress) -> str:
    if not await to_thread.run_sync((folder / "Dockerfile").is_file):
        raise ImageError(f"The image setting names {folder}, where there is no Dockerfile.", hint=_CHOOSE)
    tag = f"{BASES}:{digest(await to_thread.run_sync(digest_files, folder, '*'))}"

    async def make() -> None:
        progress(f"building {folder}/Dockerfile")
        try:
            await build(engine, partial(context.directory, folder=folder), tag, {LABEL: "base"}, progress)
        except ImageError as error:
            hint = f"Where no registry can be reached, let it start FROM {DEFAULT_IMAGE}, which `{BOOTSTRAP}` makes."
            raise ImageError(f"{folder}/Dockerfile: {error.message}", hint=error.hint or hint) from error

    return await once(engine, tag, make)


async def interpreter(engine: Engine, base_id: str, name: str, lock: Lock) -> Interpreter:
    """The Python of a base image, as it says itself in a throwaway container; remembered, for an id is its content.

    :param name: what the user calls the image.
    :raises ImageError: there is none, or none that the guest or the rollout can use.
    """
    path = cache_dir() / "docker" / "bases" / f"{base_id.removeprefix('sha256:')}.json"
    try:
        found = Interpreter.model_validate_json(await to_thread.run_sync(path.read_bytes))
    except (OSError, ValidationError):
        found = await _ask(engine, base_id, name)
        await to_thread.run_sync(_write, path, found.model_dump_json())
    if tuple(map(int, re.findall(r"\d+", found.version)[:2])) < _MIN_PYTHON:
        raise ImageError(f"Image {name} has Python {found.version}; sandboxes need 3.12 or newer.", hint=_CHOOSE)
    try:
        suits = SpecifierSet(lock.requires_python).contains(found.version, prereleases=True)
    except InvalidSpecifier as error:
        raise ImageError(f"{lock.project}: requires-python {lock.requires_python!r} is not a specifier.") from error
    if not suits:
        text = f"Image {name} has Python {found.version}; {lock.project.name} requires {lock.requires_python}."
        raise ImageError(text, hint=_CHOOSE)
    return found


async def _ask(engine: Engine, base_id: str, name: str) -> Interpreter:
    hint = "A base image needs `python3` on its PATH. Leave the image setting empty for one that suits."
    try:
        output, errors = await _run(engine, base_id, ["python3", "-I", "-c", _PROBE])
    except SandboxError as error:
        if "executable file not found" in error.message or "no such file or directory" in error.message:
            raise ImageError(f"Image {name} has no python3.", hint=hint) from error
        raise
    try:
        return Interpreter.model_validate_json(output)
    except ValidationError as error:
        said = (errors or output.decode(errors="replace")).strip()[-300:]
        text = f"Image {name}: its python3 does not work: it said {said!r}."
        raise ImageError(text, hint=hint) from error


async def _run(engine: Engine, image: str, command: list[str]) -> tuple[bytes, str]:
    """Run a program in a container of its own, isolated like a sandbox. Returns bounded output and errors."""
    name = f"harness-probe-{secrets.token_hex(6)}"
    body = {
        "Image": image,
        "Entrypoint": command,
        "Cmd": [],
        "User": f"{container.USER}:{container.USER}",
        "Labels": container.labels(this_process("")),
        **container.CHANNEL,
        "HostConfig": container.isolation(SandboxSettings(), await engine.facts()),
    }
    output = b""
    try:
        id = await engine.create(name, body)
        async with await engine.attach(id) as stream:
            await engine.start(id)
            with anyio.move_on_after(_PROBE_S):
                async for chunk in stream:
                    output += chunk
                    if len(output) > _OUTPUT:
                        break
            return output, stream.last_words
    finally:
        with anyio.CancelScope(shield=True):
            await engine.remove(name)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)
