"""``harness run``."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import anyio
import typer
from pydantic import ValidationError

from harness.cli.common import exit_with, show_json
from harness.errors import ConfigError, HarnessError
from harness.report import make_reporter, show_plan, show_results
from harness.sandbox.select import Choice
from harness.store import DEFAULT_OUTPUT, Retry
from harness.trial.plan import RunFlags, make_plan
from harness.trial.prepare import preview
from harness.trial.run import WorkIsLeft, execute


def run(
    config: Annotated[Path, typer.Argument(help="Eval config, `configs/eval/<name>.toml` of any workspace.")],
    name: Annotated[str | None, typer.Option(help="Name of the run. The same name again continues it.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of all runs.")] = DEFAULT_OUTPUT,
    dataset_file: Annotated[Path | None, typer.Option(help="Data set file (.jsonl, .csv, .parquet).")] = None,
    secrets_file: Annotated[str | None, typer.Option(help="Lines of NAME=value; `-` reads standard input.")] = None,
    rows: Annotated[str | None, typer.Option(help='Rows of the file to run, from 0: "3,7,10-20".')] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Attempts for each row.")] = None,
    sandbox: Annotated[
        Choice | None,
        typer.Option(help="Where trials run. auto: docker if an engine answers, else local. process has no isolation."),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Base image for docker: reference, digest or folder.")] = None,
    policy_url: Annotated[str | None, typer.Option(help="Base URL of any OpenAI-compatible server.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name to ask the policy for.")] = None,
    policy: Annotated[
        Literal["embedded"] | None, typer.Option(help="Answer with a small model on this machine; needs no key.")
    ] = None,
    policy_key_env: Annotated[str | None, typer.Option(help="Variable that holds the policy's key.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="Trials at the same time.")] = None,
    agent_timeout: Annotated[float | None, typer.Option(help="Seconds for the workflow of one trial.")] = None,
    grader_timeout: Annotated[float | None, typer.Option(help="Seconds for the grading of one trial.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; the old run of this name is archived.")] = False,
    retry: Annotated[
        Retry | None, typer.Option(help="Run again what has a final state: failed, without a reward, or all.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep each sandbox's work folder, in rollout_trials/<id>/sandbox.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and what would be built; start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line for each trial, no colours.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before starting.")] = False,
) -> None:
    """Run every row of a config's data set and grade the results.

    Each trial gets a sandbox of its own. Results are written as they come: a run that was stopped goes on where it was
    when it is started again under its name.

    **Exit codes**: 0 every trial has a final state (failed ones too) · 1 work is left · 2 something was wrong and
    nothing was started.
    """
    try:
        secrets = secrets_file if secrets_file is None or secrets_file == "-" else Path(secrets_file)
        flags = RunFlags(
            config=config,
            name=name,
            output=output,
            dataset_file=dataset_file,
            secrets_file=secrets,
            rows=rows,
            limit=limit,
            n=n,
            sandbox=sandbox,
            image=image,
            policy_url=policy_url,
            model=model,
            policy=policy,
            policy_key_env=policy_key_env,
            max_in_flight=max_in_flight,
            agent_timeout=agent_timeout,
            grader_timeout=grader_timeout,
            fresh=fresh,
            retry=retry,
            keep=keep,
        )
        asks = sys.stdin.isatty() and sys.stderr.isatty() and not as_json
        plan = make_plan(flags, os.environ, getpass.getpass if asks else None)
        show_plan(plan.table(), quiet=as_json, plain=plain)
        if dry_run:
            steps = anyio.run(preview, plan)
            print("\n".join(steps) if steps else "nothing has to be built", file=sys.stderr)
            show_json({**plan.table(), "Would Build": steps}, as_json)
            return
        if asks and not yes:
            typer.confirm(f"{plan.work_items} rollouts x model {plan.model_name}: continue?", abort=True, err=True)
        reporter = make_reporter(quiet=as_json, plain=plain)
        result = anyio.run(execute, plan, reporter)
    except WorkIsLeft as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    except ValidationError as error:
        first = error.errors()[0]
        exit_with(ConfigError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}"), as_json)
    except HarnessError as error:
        exit_with(error, as_json)
    show_results(result, quiet=as_json, plain=plain)
    show_json(result.document, as_json)
    raise typer.Exit(0 if result.complete else 1)
