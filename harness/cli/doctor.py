"""``harness doctor``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.table import Table

from harness.cli.common import exit_with, show_json
from harness.errors import HarnessError
from harness.policy import resolve_policy
from harness.sandbox.select import Choice


def doctor(
    sandbox: Annotated[Choice, typer.Option(help="The provider to examine.")] = "auto",
    policy_url: Annotated[str | None, typer.Option(help="Also examine the policy at this base URL.")] = None,
    model: Annotated[str, typer.Option(help="Model name to ask that policy for.")] = "policy",
    policy_key_env: Annotated[str | None, typer.Option(help="Variable that holds the policy's key.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Say what is wrong on this machine and what to do about it. Makes one real sandbox.

    **Exit codes**: 0 `harness run` can work · 1 it cannot · 2 the command is wrong.
    """
    from harness.trial.doctor import examine

    def progress(line: str) -> None:
        print(f"→ {line}", file=sys.stderr)

    try:
        policy = None
        if policy_url is not None:
            policy = resolve_policy(
                model, policy_url=policy_url, model=model, key_env=policy_key_env, environ=os.environ
            )
        findings = anyio.run(examine, sandbox, policy, progress)
    except HarnessError as error:
        exit_with(error, as_json)
    healthy = all(finding.ok for finding in findings if finding.required)
    show_json({"ok": healthy, "findings": [finding.model_dump() for finding in findings]}, as_json)
    if not as_json:
        table = Table.grid(padding=(0, 2))
        for finding in findings:
            mark = "[green]ok[/]" if finding.ok else "[red]fails[/]" if finding.required else "[yellow]note[/]"
            table.add_row(mark, finding.check, "\n".join(filter(None, (finding.detail, finding.remedy))))
        Console().print(table)
    raise typer.Exit(0 if healthy else 1)
