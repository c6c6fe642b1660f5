"""``harness images``."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
import typer
from rich.console import Console
from rich.table import Table

from harness.cli.common import exit_with, show_json
from harness.errors import ConfigError, HarnessError

if TYPE_CHECKING:  # a command imports no more than it needs
    from harness.sandbox.base import Environment, Provider

app = typer.Typer(no_args_is_help=True, help="Prepared environments: docker images, daytona snapshots.")

Where = Annotated[Literal["docker", "daytona"], typer.Option("--sandbox", help="Whose images, or snapshots.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@app.command("list")
def list_(sandbox: Where = "docker", as_json: AsJson = False) -> None:
    """The images, or snapshots, that harnesses made there, least recently used first."""
    images = _run(sandbox, lambda provider: provider.stored(), as_json)
    show_json({"images": [image.model_dump() for image in images]}, as_json)
    if as_json:
        return
    table = Table("image", "kind", "size", "last used")
    for image in images:
        days = (time.time() - image.used_at) / 86400
        table.add_row(image.tag, image.kind, f"{image.size / 1e6:.0f} MB", f"{days:.1f} days ago")
    Console().print(table, f"{sum(image.size for image in images) / 1e9:.2f} GB", sep="\n")


@app.command()
def build(
    rollout: Annotated[Path, typer.Argument(help="A rollout's folder, `rollouts/<name>`.")],
    image: Annotated[str | None, typer.Option(help="Base image: reference, digest or folder.")] = None,
    sandbox: Where = "docker",
    as_json: AsJson = False,
) -> None:
    """Build a rollout's environment now, so that a later run starts at once. Prints its id."""
    environment = _run(sandbox, lambda provider: _build(provider, rollout.resolve(), image), as_json)
    if not as_json:
        print(environment.handle)
    show_json(environment.model_dump(), as_json)


@app.command()
def prune(
    budget: Annotated[str, typer.Option(help="What may stay, such as 500M or 10G; 0 removes all.")] = "10G",
    sandbox: Where = "docker",
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used images of ours until the rest fits the budget. Never another program's.

    The default base image stays, and so does what a container uses.
    """
    removed = _run(sandbox, lambda provider: provider.prune(_bytes(budget), _progress), as_json)
    if not as_json:
        print(f"removed {len(removed)} images, {sum(image.size for image in removed) / 1e6:.0f} MB")
    show_json({"removed": [image.model_dump() for image in removed]}, as_json)


@app.command()
def bootstrap(as_json: AsJson = False) -> None:
    """Make the default base image from Debian packages, where no registry can be reached. Prints its id.

    Needs mmdebstrap and a running Docker engine; takes about a minute.
    """
    id = _run("docker", _bootstrap, as_json)
    if not as_json:
        print(id)
    show_json({"id": id}, as_json)


def _progress(line: str) -> None:
    print(f"→ {line}", file=sys.stderr)


def _run[T](sandbox: Literal["docker", "daytona"], work: Callable[[Provider], Awaitable[T]], as_json: bool) -> T:
    from harness.sandbox.select import make_provider

    async def connected() -> T:
        async with make_provider(sandbox) as provider:
            return await work(provider)

    try:
        return anyio.run(connected)
    except HarnessError as error:
        exit_with(error, as_json)


async def _bootstrap(provider: Provider) -> str:
    from harness.sandbox.bootstrap import bootstrap as make
    from harness.sandbox.docker import DockerProvider

    assert isinstance(provider, DockerProvider)
    return await make(provider.engine, _progress)


async def _build(provider: Provider, folder: Path, image: str | None) -> Environment:
    from harness.config import Workspace, load_settings
    from harness.rollout.lock import resolve

    settings = load_settings(Workspace(root=folder.parent.parent), folder).sandbox
    if image is not None:
        settings = settings.model_copy(update={"image": image})
    return await provider.prepare(await resolve(folder, _progress), settings, _progress)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    if found is None:
        raise ConfigError(f"--budget {text!r} is not a size", hint="Write 500M, 10G or a number of bytes.")
    return int(float(found[1]) * _UNITS[found[2]])
