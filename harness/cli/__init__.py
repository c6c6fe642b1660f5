"""The command line: one file a command, no logic. ``python -m harness`` starts here."""

from __future__ import annotations

import typer

from harness.cli import doctor, images, init, run, sandboxes, serve, templates, upload, validate

app = typer.Typer(
    name="harness",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Run LLM-agent rollouts, each in its own sandbox, for evaluation and reinforcement learning.",
)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("init")(init.init)
app.command("validate")(validate.validate)
app.command("upload")(upload.upload)
app.add_typer(templates.app, name="templates")
app.command("doctor")(doctor.doctor)
app.add_typer(images.app, name="images")
app.add_typer(sandboxes.app, name="sandboxes")


def main() -> None:
    """Entry point of ``harness`` and ``python -m harness``."""
    app()
