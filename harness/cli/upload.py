"""``harness upload``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import exit_with, platform_extra
from harness.errors import HarnessError
from harness.store import DEFAULT_OUTPUT


def upload(
    run: Annotated[str, typer.Argument(help="A run's name, or its directory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of all runs.")] = DEFAULT_OUTPUT,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the platform would take it.")] = False,
) -> None:
    """Import a finished run into the platform, with its own `osmosis eval upload`, after its own checks."""
    try:
        with platform_extra():
            from harness.platform import upload as platform
        checked = platform.check_upload(run, output)
        for note in checked.notes:
            print(f"warning: {note}", file=sys.stderr)
        print(f"{checked.run_dir}: {checked.files} files, the platform will take it", file=sys.stderr)
        code = 0 if check else platform.upload(checked)
    except HarnessError as error:
        exit_with(error, as_json=False)
    raise typer.Exit(code)
