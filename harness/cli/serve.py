"""``harness serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli.common import exit_with, platform_extra
from harness.errors import HarnessError
from harness.sandbox.select import Choice


def serve(
    rollout: Annotated[str, typer.Argument(help="A name under rollouts/, or a rollout's folder.")],
    entrypoint: Annotated[str, typer.Option(help="File in that folder.")] = "main.py",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="_OSMOSIS_ROLLOUT_PORT", show_envvar=False, help="Port to listen on.")
    ] = 8000,
    sandbox: Annotated[Choice | None, typer.Option(help="Where rollouts run.")] = None,
    image: Annotated[str | None, typer.Option(help="Base image for docker: reference, digest or folder.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="Rollouts at the same time.")] = None,
    max_queue_depth: Annotated[int, typer.Option(min=0, help="Rollouts that may wait; more get 429.")] = 1024,
    key_env: Annotated[str | None, typer.Option(help="Variable with the bearer that requests must carry.")] = None,
) -> None:
    """Serve a rollout to the platform's controller, or to any client of its protocol, each in a sandbox of its own.

    The same as `SandboxBackend` in the rollout's `main.py`, which here stays as it is.
    """
    try:
        with platform_extra():
            from harness.platform import server
        flags = server.ServeFlags(
            rollout=rollout,
            entrypoint=entrypoint,
            host=host,
            port=port,
            sandbox=sandbox,
            image=image,
            max_in_flight=max_in_flight,
            max_queue_depth=max_queue_depth,
            key_env=key_env,
        )
        server.serve(flags)
    except HarnessError as error:
        exit_with(error, as_json=False)
