"""``harness init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import exit_with
from harness.cli.templates import AsJson, Force, Root, show_written
from harness.errors import HarnessError
from harness.platform import templates


def init(
    name: Annotated[str, typer.Argument(help="Name of the rollout: lowercase letters, digits, hyphens.")],
    force: Force = False,
    workspace: Root = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a new rollout with its eval and training configs and some data, ready to run."""
    try:
        written = templates.init_rollout(name, workspace, force=force)
    except HarnessError as error:
        exit_with(error, as_json)
    show_written(written, f"Initialized rollout '{name}'.", as_json)
