"""The harness's own settings: ``[tool.harness]`` of a rollout's pyproject.toml, over the workspace's ``harness.toml``.

Both have the same keys; in ``harness.toml`` they stand at the top (``[sandbox]`` for ``[tool.harness.sandbox]``). Where
both name a key the rollout's wins; tables are merged key by key, lists are replaced.

::

    [tool.harness]
    secrets = ["SEARCH_API_KEY"]        # secrets let into the sandbox; the grader has all of them anyway

    [tool.harness.sandbox]
    provider = "auto"                   # docker, daytona, local, process
    image = ""
    cpus = 1.0
    memory_mib = 2048
    disk_mib = 1024
    file_mib = 512
    processes = 512
    open_files = 1024
    allow = ["api.example.org:443", "*.example.com"]
    writable_root = false
    runtime = ""
    env = { LANG = "C.UTF-8" }

    [tool.harness.grader]
    workers = 2
    env = {}

    [tool.harness.artifacts]
    max_mib = 256
    max_files = 10000
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from harness.config.experiment import RESERVED_PREFIX, SECRET_NAME
from harness.config.toml import Table, check, issue, read_toml, refuse
from harness.config.workspace import Workspace
from harness.errors import ConfigError
from harness.models import Record, Resources
from harness.sandbox.base import ProviderName, SandboxSettings

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"((\*\.)?{_LABEL}(\.{_LABEL})*|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{{1,5}}))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _variables(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name) or name.startswith(RESERVED_PREFIX):
            raise refuse(f"must hold names of variables that do not start with {RESERVED_PREFIX}", name)
        if "\0" in value:
            raise refuse("must hold values without NUL", value)
    return env


Variables = Annotated[dict[str, str], AfterValidator(_variables)]


class GraderSettings(Table):
    """``[tool.harness.grader]``."""

    workers: int = Field(default=2, ge=1)
    """Worker processes that grade."""
    env: Variables = Field(default_factory=dict)
    """Plain variables for them."""


class ArtifactSettings(Table):
    """``[tool.harness.artifacts]``: what one trial may export. What goes beyond is skipped, with a warning."""

    max_mib: int = Field(default=256, ge=0)
    max_files: int = Field(default=10_000, ge=0)


class RolloutSettings(Record):
    """Both files, merged."""

    provider: Literal[ProviderName, "auto"] = "auto"
    secrets: tuple[str, ...] = ()
    """Names of the secrets that are let into the sandbox."""
    sandbox: SandboxSettings = SandboxSettings()
    grader: GraderSettings = GraderSettings()
    artifacts: ArtifactSettings = ArtifactSettings()


class _Sandbox(Table, Resources):
    """``[tool.harness.sandbox]`` as it is written: the resources stand beside the rest."""

    provider: Literal[ProviderName, "auto"] = "auto"
    image: str = ""
    env: Variables = Field(default_factory=dict)
    allow: list[str] = Field(default_factory=list)
    writable_root: bool = False
    runtime: str = ""

    @field_validator("allow")
    @classmethod
    def _allow(cls, value: list[str]) -> list[str]:
        hosts = [host.lower() for host in value]
        for host in hosts:
            match = _HOST.fullmatch(host)
            if not match or not 0 < int(match["port"] or 443) < 65536:
                raise refuse("must hold host names such as 'example.org', 'example.org:443' or '*.example.org'", host)
        return list(dict.fromkeys(hosts))


class _Tables(Table):
    """``[tool.harness]`` as it is written."""

    secrets: list[str] = Field(default_factory=list)
    sandbox: _Sandbox = Field(default_factory=_Sandbox)
    grader: GraderSettings = Field(default_factory=GraderSettings)
    artifacts: ArtifactSettings = Field(default_factory=ArtifactSettings)

    @field_validator("secrets")
    @classmethod
    def _secrets(cls, value: list[str]) -> list[str]:
        for name in value:
            if not SECRET_NAME.fullmatch(name):
                raise refuse(f"must hold secret names that match {SECRET_NAME.pattern}", name)
        return value


def load_settings(workspace: Workspace, rollout_dir: Path) -> RolloutSettings:
    """The settings of one rollout; a file that does not exist says nothing.

    :raises ConfigError: with every problem of both files.
    """
    problems: list[str] = []
    shared = _read(workspace.settings_file, (), problems)
    own = _read(rollout_dir / "pyproject.toml", ("tool", "harness"), problems)
    if problems:
        raise ConfigError("\n".join(problems))
    tables = _Tables(**_merge(shared, own))
    sandbox = tables.sandbox.model_dump(exclude={"provider"})
    resources = Resources(**{name: sandbox.pop(name) for name in Resources.model_fields})
    return RolloutSettings(
        provider=tables.sandbox.provider,
        secrets=tuple(dict.fromkeys(tables.secrets)),
        sandbox=SandboxSettings(resources=resources, **sandbox),
        grader=tables.grader,
        artifacts=tables.artifacts,
    )


def _read(path: Path, section: tuple[str, ...], problems: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    table: Any = read_toml(path)
    for name in section:
        table = table.get(name, {}) if isinstance(table, dict) else None
    name = ".".join(section)
    if not isinstance(table, dict):
        problems.append(f"[{name}] must be a table in {path}")
        return {}
    _, errors = check(_Tables, table)
    if errors:
        problems += [f"Invalid settings in {path}:", *(issue(name, error) for error in errors)]
    return table


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = _merge(below[key], value) if both else value
    return merged
