"""What eval and training configs share: ``[experiment]``, ``[advanced]``, ``[env]``, ``[secrets]``, and their loader.

The wording is the platform's (osmosis-ai 0.3.8, ``platform/cli/shared_config.py``). It stops at the first kind of
problem; here all are reported, in the same order, so a message starts with what the platform would say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from harness.config.toml import Table, check, explain, issue, key, read_toml
from harness.config.workspace import Kind, Workspace
from harness.errors import ConfigError
from harness.models import Record

ENV_NAME = re.compile(r"^[A-Z_][A-Z0-9_]*$")
SECRET_NAME = re.compile(r"^[A-Z][A-Z0-9_]*$")
COMMIT_SHA = re.compile(r"^[0-9a-fA-F]{7,40}$")
RESERVED_PREFIX = "_OSMOSIS_"


class Experiment(Record):
    """``[experiment]``."""

    rollout: str
    entrypoint: str
    model_path: str
    dataset: str
    branch: str | None = None
    commit_sha: str | None = None

    @field_validator("branch")
    @classmethod
    def _branch(cls, value: str | None) -> str | None:
        if value is not None and (not value or any(char.isspace() for char in value)):
            raise ValueError("must not be empty or contain whitespace")
        return value

    @field_validator("commit_sha")
    @classmethod
    def _commit_sha(cls, value: str | None) -> str | None:
        if value is not None and not COMMIT_SHA.fullmatch(value):
            raise ValueError(
                "must be a hexadecimal Git commit SHA (7-40 hex characters), "
                f"e.g. a full 40-character SHA; got {value!r}"
            )
        return value

    @model_validator(mode="after")
    def _one_reference(self) -> Self:
        if self.branch is not None and self.commit_sha is not None:
            raise ValueError("Provide either branch or commit_sha, not both")
        return self


class ExperimentConfig(Record):
    """A loaded config file. Subclasses add their own sections."""

    kind: ClassVar[Kind]
    label: ClassVar[str]
    secrets_required: ClassVar[bool] = False
    sections: ClassVar[Mapping[str, type[Table]]]

    path: Path
    """The file, absolute."""
    workspace: Workspace
    experiment: Experiment
    env: dict[str, str] = Field(default_factory=dict)
    """``[env]``: plain variables for the workflow and the grader."""
    secrets: tuple[str, ...] = ()
    """``[secrets] required``: names only, values come from ``resolve_secrets``."""
    advanced: dict[str, Any] = Field(default_factory=dict)
    """``[advanced]``: for the platform alone; a local run ignores it."""


def load[C: ExperimentConfig](cls: type[C], path: Path) -> C:
    """Read a config file.

    :raises ConfigError: with every problem of the file.
    """
    path = path.expanduser().resolve()
    raw = read_toml(path)
    workspace = Workspace.of(path, cls.kind)
    problems: list[str] = []
    issues = [
        f"  - {name}: Unrecognized section"
        for name in raw
        if name not in {"experiment", "advanced", "env", "secrets", *cls.sections}
    ]

    given = _table(raw, "experiment", path, problems, required=True)
    if isinstance(raw.get("experiment"), dict):
        problems += [
            f"Missing '{name}' in [experiment] section of {path}"
            for name, field in Experiment.model_fields.items()
            if field.is_required() and name not in given
        ]
    experiment, errors = check(Experiment, given)
    issues += [issue("experiment", error) for error in errors if error["type"] != "missing"]

    parsed: dict[str, Table | None] = {}
    values: list[str] = []
    for name, model in cls.sections.items():
        parsed[name], errors = check(model, _table(raw, name, path, problems))
        issues += [issue(name, error) for error in errors if error["type"] == "extra_forbidden"]
        values += [f"{key(name, error)} {explain(error)}" for error in errors if error["type"] != "extra_forbidden"]

    advanced = _table(raw, "advanced", path, problems)
    env = _table(raw, "env", path, problems)
    issues += [f"  - env.{name}: must be a string, got {v!r}" for name, v in env.items() if not isinstance(v, str)]
    secrets = _secrets(raw, path, problems, required=cls.secrets_required)
    if issues:
        problems += [f"Invalid {cls.kind} config:", *issues]
    problems += _env_problems(env, path)
    problems += _secret_problems(secrets, env, path)
    if experiment:
        try:
            workspace.check_rollout(experiment.rollout, experiment.entrypoint, cls.label)
        except ConfigError as error:
            problems.append(error.message)
    problems += values
    if problems:
        raise ConfigError("\n".join(problems))
    return cls.model_validate(
        {
            "path": path,
            "workspace": workspace,
            "experiment": experiment,
            "env": env,
            "secrets": tuple(secrets),
            "advanced": advanced,
            **parsed,
        }
    )


def _env_problems(env: Mapping[str, Any], path: Path) -> list[str]:
    problems = []
    for name in env:
        if not ENV_NAME.fullmatch(name):
            problems.append(f"Invalid env var name '{name}' in [env] of {path}: must match {ENV_NAME.pattern}")
        elif name.startswith(RESERVED_PREFIX):
            problems.append(
                f"'{name}' in [env] of {path}: env var names starting with {RESERVED_PREFIX} are reserved by the "
                "platform; choose a different name."
            )
    return problems


def _table(
    raw: dict[str, Any], name: str, path: Path, problems: list[str], *, required: bool = False
) -> dict[str, Any]:
    if name not in raw:
        if required:
            problems.append(f"Missing [{name}] section in {path}")
        return {}
    if isinstance(raw[name], dict):
        return dict(raw[name])
    problems.append(f"[{name}] must be a table in {path}")
    return {}


def _secrets(raw: dict[str, Any], path: Path, problems: list[str], *, required: bool) -> list[str]:
    before = len(problems)
    table = _table(raw, "secrets", path, problems, required=required)
    if "secrets" not in raw or len(problems) > before:
        return []
    if unknown := sorted(set(table) - {"required"}):
        problems.append(
            f"[secrets] in {path} only supports the 'required' field; unknown key(s): {', '.join(unknown)}."
        )
    if "required" not in table:
        problems.append(f"Missing 'required' in [secrets] section of {path}")
        return []
    names = table["required"]
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    problems.append(
        f"'required' in [secrets] of {path} must be a list of strings, e.g. required = [\"OPENAI_API_KEY\"]."
    )
    return []


def _secret_problems(names: list[str], env: Mapping[str, Any], path: Path) -> list[str]:
    problems = []
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.append(
            f"Duplicate secret name(s) in [secrets].required of {path}: {', '.join(twice)}. Each name must appear once."
        )
    problems += [
        f"Invalid secret name '{name}' in {path}: use uppercase letters, digits, and underscores, starting with a "
        f"letter (e.g. MY_SECRET). Must match {SECRET_NAME.pattern}."
        for name in dict.fromkeys(names)
        if not SECRET_NAME.fullmatch(name)
    ]
    if both := sorted(set(env) & set(names)):
        problems.append(
            f"Name(s) appear in both [env] and [secrets] of {path}: {', '.join(both)}. "
            "Each env var name must come from exactly one place."
        )
    return problems
