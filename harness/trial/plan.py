"""What a command and its config ask for, read and checked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ConfigDict, Field

from harness.config import (
    EvalConfig,
    Redactor,
    RolloutSettings,
    Selection,
    Workspace,
    ambient_secrets,
    dataset_digest,
    load_eval_config,
    load_settings,
    load_training_config,
    resolve_dataset,
    resolve_secrets,
    select_rows,
)
from harness.errors import ConfigError
from harness.models import Record
from harness.policy import Policy, resolve_policy
from harness.rollout.source import Rollout
from harness.sandbox.select import Choice
from harness.store import DEFAULT_OUTPUT, DatasetInputs, Retry, RolloutInputs, RunInputs, Timeouts, check_name
from harness.trial.training import as_eval


class RunFlags(Record):
    """The command line of ``harness run``."""

    config: Path
    name: str | None = None
    output: Path = DEFAULT_OUTPUT
    dataset_file: Path | None = None
    secrets_file: Path | Literal["-"] | None = None
    rows: str | None = None
    limit: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1)
    sandbox: Choice | None = None
    image: str | None = None
    policy_url: str | None = None
    model: str | None = None
    policy: Literal["embedded"] | None = None
    policy_key_env: str | None = None
    max_in_flight: int | None = Field(default=None, ge=1)
    agent_timeout: float | None = Field(default=None, gt=0)
    grader_timeout: float | None = Field(default=None, gt=0)
    fresh: bool = False
    retry: Retry | None = None
    keep: bool = False


class Job(Protocol):
    """What must be known before sandboxes can be made."""

    @property
    def rollout(self) -> Rollout: ...

    @property
    def settings(self) -> RolloutSettings: ...

    @property
    def sandbox(self) -> Choice: ...

    @property
    def policy(self) -> Policy | None: ...

    @property
    def sampling(self) -> Mapping[str, Any]: ...

    def grader_env(self) -> dict[str, str]: ...


class Plan(Record):
    """A run, resolved."""

    flags: RunFlags
    config: EvalConfig
    rollout: Rollout
    settings: RolloutSettings
    dataset: Path
    selection: Selection
    n: int
    max_in_flight: int
    agent_timeout_s: float | None
    grader_timeout_s: float | None
    sandbox: Choice
    policy: Policy | None
    """None: the embedded model, which has an address only once it runs."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Fields for model calls that set none themselves."""
    notes: list[str] = Field(default_factory=list)
    """What the user should know of the config."""
    model_name: str
    secrets: dict[str, str]
    redactor: Redactor
    inputs: RunInputs

    model_config = ConfigDict(arbitrary_types_allowed=True)

    @property
    def work_items(self) -> int:
        return len(self.selection.rows) * self.n

    def table(self) -> dict[str, Any]:
        """What will be run, for people and for ``--json``."""
        rows = len(self.selection.rows)
        return {
            "Rollout": self.rollout.name,
            "Entrypoint": self.rollout.entrypoint,
            "Model": self.model_name,
            "Policy": self.policy.base_url if self.policy else "embedded, on this machine",
            "Dataset": f"{self.config.experiment.dataset} ({self.dataset.name})",
            "Rows": f"{rows} of {self.selection.total_rows}",
            "Runs Per Row": self.n,
            "Work Items": self.work_items,
            "Sandbox": self.sandbox,
            "In Flight": self.max_in_flight,
            "Agent Timeout": f"{self.agent_timeout_s:g} s" if self.agent_timeout_s is not None else "none",
            "Output": str(self.flags.output),
        }

    def grader_env(self) -> dict[str, str]:
        """Variables of the grader's process: this one's less the policy's key, and what config and settings add."""
        env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        if self.flags.policy_key_env:
            env.pop(self.flags.policy_key_env, None)
        return {**env, **self.config.env, **self.settings.grader.env, **self.secrets}


def make_plan(flags: RunFlags, environ: Mapping[str, str], prompt: Callable[[str], str] | None) -> Plan:
    """Read the config, the rollout, its settings, the rows and the secrets. Blocks: call it in a thread.

    :param prompt: asks the user for a secret; None when nobody can be asked.
    :raises UsageError: anything in them is wrong.
    :raises RolloutError: the rollout's folder is.
    """
    if flags.name is not None:
        check_name(flags.name)
    there = next(folder for folder in (flags.output.absolute(), *flags.output.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise ConfigError(f"--output {flags.output}: {there} is not a folder")
    most_in_flight = max(4, 2 * (os.cpu_count() or 1))
    config, sampling, notes = _load(flags.config, most_in_flight)
    rollout = Rollout.open(config.workspace, config.experiment.rollout, config.experiment.entrypoint)
    settings = load_settings(config.workspace, rollout.path)
    dataset = resolve_dataset(config.workspace, config.experiment.dataset, flags.dataset_file)
    limit = flags.limit if flags.limit is not None else config.evaluation.limit
    selection = select_rows(dataset, flags.rows, limit)
    secrets = resolve_secrets(config.secrets, flags.secrets_file, environ, prompt)
    unknown = [name for name in settings.secrets if name not in secrets]
    if unknown:
        raise ConfigError(
            f"[tool.harness] of rollout {rollout.name!r} lets in {', '.join(unknown)}, not required by the config",
            hint="Name them under [secrets] required in the config too.",
        )
    policy = None
    model_name = "embedded/SmolLM2-135M-Instruct"
    if flags.policy is None:
        policy = resolve_policy(
            config.experiment.model_path,
            policy_url=flags.policy_url,
            model=flags.model,
            key_env=flags.policy_key_env,
            environ=environ,
        )
        model_name = flags.model or config.experiment.model_path
    elif flags.policy_url is not None:
        raise ConfigError("--policy embedded and --policy-url exclude each other")
    sandbox_env = {**config.env, **settings.sandbox.env, **{name: secrets[name] for name in settings.secrets}}
    settings = settings.model_copy(
        update={
            "sandbox": settings.sandbox.model_copy(
                update={"env": sandbox_env, "image": flags.image if flags.image is not None else settings.sandbox.image}
            )
        }
    )
    n = flags.n if flags.n is not None else config.evaluation.n
    agent_timeout = _first(flags.agent_timeout, config.evaluation.agent_workflow_timeout_s)
    grader_timeout = _first(flags.grader_timeout, config.evaluation.grader_timeout_s)
    key = policy.key.get_secret_value() if policy is not None and policy.key is not None else ""
    return Plan(
        flags=flags,
        config=config,
        rollout=rollout,
        settings=settings,
        dataset=dataset,
        selection=selection,
        n=n,
        max_in_flight=flags.max_in_flight or config.evaluation.batch_size or most_in_flight,
        agent_timeout_s=agent_timeout,
        grader_timeout_s=grader_timeout,
        sandbox=flags.sandbox or settings.provider,
        policy=policy,
        model_name=model_name,
        sampling=sampling,
        notes=notes,
        secrets=secrets,
        redactor=Redactor([*secrets.values(), *ambient_secrets(environ), *([key] if key else [])]),
        inputs=RunInputs(
            model_path=model_name,
            dataset=DatasetInputs(
                sha256=dataset_digest(dataset),
                selected_source_rows=_compact([row.source_index for row in selection.rows]),
            ),
            n=n,
            rollout=RolloutInputs(
                name=rollout.name, entrypoint=rollout.entrypoint, source_digest=rollout.source_digest()
            ),
            image=settings.sandbox.image or None,
            env=config.env,
            secret_names=list(config.secrets),
            timeouts=Timeouts(agent_timeout_sec=agent_timeout, grader_timeout_sec=grader_timeout),
        ),
    )


def _load(path: Path, most_in_flight: int) -> tuple[EvalConfig, dict[str, Any], list[str]]:
    if Workspace.of(path).root / "configs/training" in path.expanduser().resolve().parents:
        return as_eval(load_training_config(path), most_in_flight)
    return load_eval_config(path), {}, []


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _compact(positions: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``."""
    spans: list[list[int]] = []
    for position in sorted(positions):
        if spans and position == spans[-1][1] + 1:
            spans[-1][1] = position
        else:
            spans.append([position, position])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
