"""``harness validate``: would this run, here and on the platform? Everything short of asking a model."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread

from harness.config import (
    EvalConfig,
    TrainingConfig,
    load_eval_config,
    load_training_config,
    resolve_dataset,
    select_rows,
)
from harness.errors import HarnessError
from harness.grading import GradeRequest, GraderPool
from harness.models import Record, Row, Sample
from harness.platform.keeper import ServeJob
from harness.platform.server import open_rollout
from harness.rollout.source import Rollout
from harness.sandbox.owner import this_process
from harness.sandbox.select import Choice
from harness.trial.fleet import Fleet
from harness.trial.prepare import prepare
from harness.trial.provenance import provenance, will_differ
from harness.trial.session import Blueprint

GRADE_S = 120.0
_MIN_ROWS = 4
"""The platform takes no smaller data set."""


class Check(Record):
    """One thing that was looked at. ``ok`` null: it works, but somebody should read ``detail``."""

    name: str
    ok: bool | None
    detail: str = ""


async def validate(
    target: str,
    *,
    dataset_file: Path | None = None,
    sandbox: Choice | None = None,
    image: str | None = None,
    progress: Callable[[str], None],
    report: Callable[[Check], None],
) -> None:
    """Check a config (``.toml``), or a rollout by name or folder, and say so one by one. Stops at what all else needs.

    :param sandbox: where the entry point is loaded; nothing else runs there.
    :param report: takes each check when it is done.
    """
    row: Row | None = None
    try:
        if target.endswith(".toml"):
            config = await anyio.to_thread.run_sync(load_config, Path(target))
            report(Check(name="config", ok=True, detail=f"{config.kind} config {config.path.name}"))
            rollout = Rollout.open(config.workspace, config.experiment.rollout, config.experiment.entrypoint)
            for check in await anyio.to_thread.run_sync(_names_and_git, config):
                report(check)
            dataset = resolve_dataset(config.workspace, config.experiment.dataset, dataset_file)
            selection = await anyio.to_thread.run_sync(select_rows, dataset)
            row = selection.rows[0]
            report(Check(name="data", ok=True, detail=f"{selection.total_rows} rows in {dataset.name}"))
            report(await anyio.to_thread.run_sync(_upload_rules, dataset, selection.total_rows))
        else:
            rollout = open_rollout(target)
        report(Check(name="rollout", ok=True, detail=f"{rollout.name}/{rollout.entrypoint}"))
        job = ServeJob.of(rollout, sandbox=sandbox, image=image)
    except HarnessError as error:
        report(Check(name="files", ok=False, detail=str(error)))
        return
    try:
        async with prepare(job, progress) as prepared:
            report(Check(name="dependencies", ok=True, detail="resolved, and built for sandbox and host"))
            report(_wired(await prepared.graders.check()))
            blueprint = Blueprint(
                provider=prepared.provider,
                environment=prepared.environment,
                settings=job.settings.sandbox,
                owner=this_process("validate"),
                relay=prepared.relay,
                entrypoint=rollout.entrypoint,
                code=prepared.code,
            )
            async with Fleet(blueprint, max_in_flight=1, ahead=0) as fleet:
                session = await fleet.open()
                where = prepared.provider.capabilities.name
                found = f"{session.loaded.workflow} in a {where} sandbox, SDK {session.loaded.sdk}"
                report(Check(name="entry point", ok=True, detail=f"{found}, {session.loaded.import_s:.1f} s"))
                await session.release()
            report(await _dry_run(prepared.graders, row))
    except HarnessError as error:
        report(Check(name="sandbox", ok=False, detail=str(error)))


def load_config(path: Path) -> EvalConfig | TrainingConfig:
    """Either kind, by the folder it lies in.

    :raises ConfigError: with every problem of the file.
    """
    training = "training" in path.expanduser().resolve().parts[-2:]
    return load_training_config(path) if training else load_eval_config(path)


def _names_and_git(config: EvalConfig | TrainingConfig) -> list[Check]:
    missing = [name for name in config.secrets if not os.environ.get(name)]
    checks = []
    if missing:
        detail = f"no value here for {', '.join(missing)}: export them, or pass --secrets-file to `harness run`"
        checks.append(Check(name="secrets", ok=None, detail=detail))
    experiment = config.experiment
    found = provenance(config.path, config.workspace.root, experiment.branch, experiment.commit_sha)
    checks += [Check(name="git", ok=None, detail=note) for note in will_differ(found)]
    return checks


def _upload_rules(dataset: Path, total: int) -> Check:
    """The platform's own checks of a data set where its SDK has them, else the one that is most often broken."""
    try:
        check = importlib.import_module("osmosis_ai.platform.cli.dataset")._validate_file
        problems: list[Any] = check(dataset, dataset.suffix.lower()[1:])
    except (ImportError, AttributeError):
        problems = [f"the platform takes data sets of at least {_MIN_ROWS} rows"] if total < _MIN_ROWS else []
    return Check(name="platform rules for data", ok=not problems, detail="; ".join(map(str, problems)))


def _wired(info: Any) -> Check:
    if info.grader is None:
        return Check(name="grader", ok=False, detail="the entry point wires no grader: there would be no reward")
    return Check(name="grader", ok=True, detail=f"{info.grader} loads in the host")


async def _dry_run(graders: GraderPool, row: Row | None) -> Check:
    """Grade an answer that nobody gave. What the grader makes of it says little; that it crashes says much."""
    prompt = row.prompt if row is not None else [{"role": "user", "content": "hi"}]
    messages = [*prompt, {"role": "assistant", "content": "(no answer: this is a dry run)"}]
    result = await graders.grade(
        GradeRequest(
            rollout_id="validate",
            label=row.label if row is not None else "",
            metadata=row.metadata if row is not None else None,
            samples=[Sample(name="", data={"messages": messages})],
            labelled=True,
            timeout_s=GRADE_S,
        )
    )
    if result.failure is None:
        return Check(name="grader dry run", ok=True, detail=f"reward {result.reward} for an empty answer")
    detail = f"{result.failure.kind}: {result.failure.message} (for an empty answer of plain text)"
    return Check(name="grader dry run", ok=None, detail=detail)
