"""``harness sandboxes``: what sandboxes exist, and whose they are."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import anyio
import typer
from rich.console import Console
from rich.table import Table

from harness.cli.common import exit_with, show_json
from harness.errors import HarnessError
from harness.sandbox.base import ProviderName, SandboxInfo
from harness.sandbox.owner import is_dead
from harness.sandbox.reaper import reap
from harness.sandbox.select import choose

app = typer.Typer(no_args_is_help=True, help="Sandboxes that exist now: list them, remove those of runs that died.")

Sandbox = Annotated[ProviderName, typer.Option(help="Whose sandboxes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.command("list")
def list_(sandbox: Sandbox = "docker", as_json: AsJson = False) -> None:
    """Every sandbox that a harness made on this provider, with its run, its owner and whether that still lives."""
    infos = _run(_list, sandbox, as_json)
    show_json({"sandboxes": [_describe(info) for info in infos]}, as_json)
    if as_json:
        return
    table = Table("name", "state", "age", "run", "owner", "")
    for info in infos:
        owner = info.owner
        table.add_row(
            info.name,
            info.state,
            f"{info.age_s():.0f} s",
            owner.run if owner else "?",
            f"{owner.pid} on {owner.host}" if owner else "?",
            "its run died" if owner and is_dead(owner) else "",
        )
    Console().print(table)


@app.command("reap")
def reap_(sandbox: Sandbox = "docker", as_json: AsJson = False) -> None:
    """Remove the sandboxes of runs that died on this machine, and nobody else's. Every run does this when it starts.

    **Exit codes**: 0 nothing is left · 1 something may still exist · 2 the provider cannot be asked.
    """
    removed, problems = _run(_reap, sandbox, as_json)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    if not as_json:
        print(f"removed {len(removed)} sandboxes of runs that died")
    show_json({"removed": [_describe(info) for info in removed], "problems": problems}, as_json)
    raise typer.Exit(1 if problems else 0)


def _run(work: Any, sandbox: ProviderName, as_json: bool) -> Any:
    try:
        return anyio.run(work, sandbox)
    except HarnessError as error:
        exit_with(error, as_json)


async def _list(sandbox: ProviderName) -> list[SandboxInfo]:
    async with await choose(sandbox) as provider:
        return await provider.list()


async def _reap(sandbox: ProviderName) -> tuple[list[SandboxInfo], list[str]]:
    async with await choose(sandbox) as provider:
        return await reap(provider)


def _describe(info: SandboxInfo) -> dict[str, Any]:
    return {**info.model_dump(), "age_s": info.age_s(), "dead": info.owner is not None and is_dead(info.owner)}
