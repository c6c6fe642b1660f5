"""``harness images``."""

from __future__ import annotations

import sys

import anyio
import typer

from harness.cli.common import exit_with
from harness.errors import HarnessError

app = typer.Typer(no_args_is_help=True, help="Base and environment images for the docker provider.")


def _progress(line: str) -> None:
    print(f"→ {line}", file=sys.stderr)


@app.command()
def bootstrap() -> None:
    """Make the default base image from Debian packages, where no registry can be reached.

    Needs mmdebstrap and a running Docker engine; takes about a minute.
    """
    try:
        print(anyio.run(_bootstrap))
    except HarnessError as error:
        exit_with(error, as_json=False)


async def _bootstrap() -> str:
    from harness.sandbox.bootstrap import bootstrap as make
    from harness.sandbox.docker.engine import Engine

    engine = Engine()
    try:
        return await make(engine, _progress)
    finally:
        await engine.aclose()
