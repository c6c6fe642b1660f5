"""``harness templates``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import exit_with, show_json
from harness.errors import HarnessError
from harness.platform import templates

app = typer.Typer(no_args_is_help=True, help="Worked rollouts to start from.")
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
Root = Annotated[Path, typer.Option("--workspace", help="Folder that holds configs/, rollouts/ and data/.")]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List templates."""
    try:
        found = templates.list_templates()
    except HarnessError as error:
        exit_with(error, as_json)
    if as_json:
        show_json({"templates": [{"name": name, "description": text} for name, text in found.items()]}, as_json)
    else:
        for name, text in found.items():
            print(f"{name:26} {text}")


@app.command()
def apply(
    name: Annotated[str, typer.Argument(help="One of `harness templates list`.")],
    force: Force = False,
    workspace: Root = Path(),
    as_json: AsJson = False,
) -> None:
    """Copy a template into the workspace here: its rollout, both configs, its data."""
    try:
        written = templates.apply_template(name, workspace, force=force)
    except HarnessError as error:
        exit_with(error, as_json)
    show_written(written, f"Applied template '{name}'.", as_json)


def show_written(written: templates.Written, message: str, as_json: bool) -> None:
    """What was written and what comes next."""
    if as_json:
        show_json(written.model_dump(), as_json)
        return
    print(message)
    for file in written.files:
        print(f"  {file}")
    print("Next:")
    for step in written.next_steps:
        print(f"  {step}")
