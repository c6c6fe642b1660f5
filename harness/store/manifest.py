"""``manifest.json``: what a run was made from, and the rule by which it may be continued."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from harness.errors import StoreError
from harness.models import Record
from harness.store.files import Redact, clean, utc_now, write_json

Retry = Literal["failed", "unscored", "all"]

_VERSIONS = {"rollout_protocol": "0.4", "dataset_normalization": 1, "state_schema": 1}
"""Of the platform's formats that this code writes."""

_MAY_CHANGE_ON_RETRY = {"rollout", "image", "env", "secret_names", "timeouts"}


class DatasetInputs(Record):
    sha256: str
    """Of the file's bytes, in hexadecimal."""
    selected_source_rows: str
    """Selected positions in the file, compact: ``0-9,12``."""


class RolloutInputs(Record):
    name: str
    entrypoint: str
    source_digest: str


class Timeouts(Record):
    agent_timeout_sec: float | None = None
    grader_timeout_sec: float | None = None


class RunInputs(Record):
    """Everything that changes what a trial does. A run can only be continued with the same."""

    model_path: str
    dataset: DatasetInputs
    n: int
    rollout: RolloutInputs
    image: str | None = None
    """Base image of the sandboxes; None for the default."""
    env: dict[str, str] = Field(default_factory=dict)
    secret_names: list[str] = Field(default_factory=list)
    timeouts: Timeouts = Timeouts()
    versions: dict[str, Any] = Field(default_factory=lambda: dict(_VERSIONS))

    @field_validator("secret_names")
    @classmethod
    def _sorted(cls, names: list[str]) -> list[str]:
        return sorted(names)


class RunInfo(Record):
    """What a run says of itself besides its inputs. It may differ from one invocation to the next."""

    dataset_name: str
    sampled_rows: int
    total_dataset_rows: int
    pass_threshold: float = 1.0
    provenance: dict[str, Any] = Field(default_factory=dict)
    """``sdk_version``, ``git_head``, ``git_branch``, ``git_dirty``, ``config_path``..., as the platform reads them."""
    harness: dict[str, Any] = Field(default_factory=dict)
    """Version, sandbox provider, environment key, settings: names of secrets only, never their values."""


class Manifest:
    """The file, read or created.

    ``generation`` counts the rollout's sources from 1: a retry after an edit starts a new one, and the manifest keeps
    what the earlier ones were under ``harness.previous``.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data
        self.run_id: str = data["local_run_id"]
        self.created_at: str = data["created_at"]
        self.generation = len(data.get("harness", {}).get("previous", [])) + 1

    @classmethod
    def create(cls, path: Path, name: str, inputs: RunInputs, info: RunInfo, redact: Redact) -> Manifest:
        data = {
            "schema_version": 1,
            "local_run_id": uuid.uuid4().hex,
            "run_name": name,
            "created_at": utc_now(),
            "inputs": inputs.model_dump(),
            "provenance": clean({k: v for k, v in info.provenance.items() if v is not None}, redact),
            "harness": clean(info.harness, redact),
        }
        write_json(path, data, durable=True)
        return cls(data)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """:raises StoreError: it is not a manifest that this version can continue."""
        try:
            data = json.loads(path.read_bytes())
            if data["schema_version"] == 1 and isinstance(data["inputs"], dict):
                return cls(data)
            problem = f"it has schema version {data['schema_version']!r}"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"it is unreadable ({error})"
        raise StoreError(f"{path} cannot be continued: {problem}", hint="Start over under the same name with --fresh.")

    def accept(self, path: Path, name: str, inputs: RunInputs, retry: Retry | None) -> list[str]:
        """Check the inputs of a new invocation; with ``retry`` the rollout and its settings may have changed.

        :returns: the inputs that changed, empty for none.
        :raises StoreError: others changed.
        """
        old, new = self._data["inputs"], inputs.model_dump()
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        if not changed:
            return []
        renamed = old.get("rollout", {}).get("name") != inputs.rollout.name
        if retry is None or renamed or not _MAY_CHANGE_ON_RETRY.issuperset(changed):
            edited = not renamed and _MAY_CHANGE_ON_RETRY.issuperset(changed)
            raise StoreError(
                f"run {name!r} was created with different resolved inputs, so resuming it would mix versions inside "
                f"one set of metrics. Changed: {', '.join(changed)}. Restart under the same name with --fresh (the "
                "previous results are archived, never deleted).",
                hint="Or run the failures again with what you have now: --retry failed." if edited else "",
            )
        previous = {"replaced_at": utc_now(), "retry": retry, "inputs": {key: old.get(key) for key in changed}}
        harness = self._data.setdefault("harness", {})
        harness["previous"] = [*harness.get("previous", []), previous]
        self._data["inputs"] = new
        write_json(path, self._data, durable=True)
        self.generation += 1
        return changed
