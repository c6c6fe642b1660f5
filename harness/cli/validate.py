"""``harness validate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer

from harness.cli.common import EXIT_WRONG, exit_with, platform_extra, show_json
from harness.errors import HarnessError
from harness.sandbox.select import Choice


def validate(
    target: Annotated[str, typer.Argument(help="An eval or training config, or a rollout's name or folder.")],
    dataset_file: Annotated[Path | None, typer.Option(help="Data set file (.jsonl, .csv, .parquet).")] = None,
    sandbox: Annotated[Choice | None, typer.Option(help="Where the entry point is loaded.")] = None,
    image: Annotated[str | None, typer.Option(help="Base image for docker: reference, digest or folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Check everything that a run needs, short of asking a model: config, data, dependencies, entry point, grader.

    **Exit codes**: 0 it would run · 2 it would not.
    """
    try:
        with platform_extra():
            from harness.platform import validate as checks
    except HarnessError as error:
        exit_with(error, as_json)
    found: list[checks.Check] = []

    def report(check: checks.Check) -> None:
        found.append(check)
        if not as_json:
            mark = {True: "ok  ", None: "note", False: "FAIL"}[check.ok]
            print(f"{mark}  {check.name}: {check.detail}" if check.detail else f"{mark}  {check.name}", flush=True)

    async def run() -> None:
        await checks.validate(
            target, dataset_file=dataset_file, sandbox=sandbox, image=image, progress=_progress, report=report
        )

    anyio.run(run)
    show_json({"checks": [check.model_dump() for check in found]}, as_json)
    raise typer.Exit(EXIT_WRONG if any(check.ok is False for check in found) else 0)


def _progress(line: str) -> None:
    print(f"→ {line}", file=sys.stderr)
