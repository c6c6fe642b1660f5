"""``harness serve``: the platform's rollout server for a rollout whose ``main.py`` knows nothing of the harness."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from osmosis_ai.rollout.server import create_rollout_server

from harness.config import Workspace
from harness.errors import UsageError
from harness.models import Record
from harness.platform.backend import MAX_QUEUE_DEPTH, SandboxBackend
from harness.rollout.source import Rollout
from harness.sandbox.select import Choice

KEEP_ALIVE_S = 2160
"""Outlives the platform's load balancer (2100 s), which else reuses connections that are just being closed."""


class ServeFlags(Record):
    """The command line of ``harness serve``."""

    rollout: str
    """A name under ``rollouts/`` here, or a rollout's folder."""
    entrypoint: str = "main.py"
    host: str = "127.0.0.1"
    port: int = 8000
    sandbox: Choice | None = None
    image: str | None = None
    max_in_flight: int | None = None
    max_queue_depth: int = MAX_QUEUE_DEPTH
    key_env: str | None = None
    """Variable with the bearer that every request must carry."""


def open_rollout(name: str, entrypoint: str = "main.py") -> Rollout:
    """The rollout of that name in the workspace here, or in that folder.

    :raises UsageError: there is none.
    :raises EntryPointError: its entry point is not usable.
    """
    given = Path(name)
    folder = given if given.is_dir() and (given / "pyproject.toml").exists() else Path("rollouts") / name
    folder = folder.resolve()
    if not folder.is_dir():
        raise UsageError(
            f"there is no rollout {name!r}: {folder} is no folder",
            hint="Name a folder under rollouts/ of the folder you are in, or give a path.",
        )
    return Rollout.open(_Beside(root=folder.parent.parent, folder=folder.parent), folder.name, entrypoint)


class _Beside(Workspace):
    """The workspace of a rollout that may lie in any folder."""

    folder: Path

    @property
    def rollouts(self) -> Path:
        return self.folder


def serve(flags: ServeFlags) -> None:
    """Serve until SIGINT or SIGTERM.

    :raises UsageError: nothing was started: no such rollout, wrong settings.
    """
    backend = SandboxBackend.of_rollout(
        open_rollout(flags.rollout, flags.entrypoint),
        sandbox=flags.sandbox,
        image=flags.image,
        max_in_flight=flags.max_in_flight,
        max_queue_depth=flags.max_queue_depth,
    )
    key = None
    if flags.key_env is not None:
        key = os.environ.get(flags.key_env, "").strip()
        if not key:
            raise UsageError(f"--key-env names {flags.key_env}, which has no value")

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        backend.keeper.start()
        yield

    app = create_rollout_server(backend=backend, lifespan=lifespan, api_key=key)
    logging.getLogger("harness").setLevel(logging.INFO)
    uvicorn.run(app, host=flags.host, port=flags.port, timeout_keep_alive=KEEP_ALIVE_S)
