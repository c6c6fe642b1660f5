"""The frozen records that cross rooms. Units are in the names: ``_s`` seconds, ``_mib`` mebibytes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.errors import Category, Party

Message = dict[str, Any]


class Record(BaseModel):
    """Base of all records: frozen, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Row(Record):
    """One data-set record, normalised as the platform does it."""

    index: int
    """Position within the selected rows, from 0 (the platform's ``row_index``)."""
    source_index: int
    """Position in the file, from 0."""
    prompt: list[Message]
    """``[system?, user?]``; may be empty in metadata mode."""
    label: str | None = None
    """The ground truth. It never enters a sandbox."""
    metadata: dict[str, Any] | None = None


class Resources(Record):
    """What one sandbox may use."""

    cpus: float = Field(default=1.0, ge=0.01, le=4096)
    memory_mib: int = Field(default=2048, ge=64, le=1 << 26)
    disk_mib: int = Field(default=1024, ge=16)
    """Size of everything the sandbox can write (each of the work folder and /tmp may hold this much)."""
    file_mib: int = Field(default=512, ge=1)
    """Size of one file."""
    processes: int = Field(default=512, ge=8)
    open_files: int = Field(default=1024, ge=64, le=1 << 20)


class Failure(Record):
    """Why a trial has no reward, or why a phase failed: who broke, how, and whether trying again can help."""

    party: Party
    category: Category
    kind: str
    """Name of the error or exception class: ``SandboxGone``, ``ValueError``, ``OutOfMemory``."""
    message: str
    retryable: bool = False
    traceback: str = ""


class Sample(Record):
    """What a trial yields. ``data`` is the SDK's own ``RolloutSample`` as JSON, untouched.

    Under SDK 0.3 a trial yields one sample, named ``""``; under 0.2 one per registered source, named by its id.
    """

    name: str
    data: dict[str, Any]


class Usage(Record):
    """Tokens that the policy reported, and the calls that reported none."""

    calls: int = 0
    failed_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Timing(Record):
    """Where a trial's wall-clock time went, in seconds. Only ``agent_s`` counts against the agent's time."""

    queued_s: float = 0.0
    provision_s: float = 0.0
    """Creating the sandbox until its guest said hello."""
    load_s: float = 0.0
    """Copying the code in and importing the entry point."""
    agent_s: float = 0.0
    policy_s: float = 0.0
    """Part of ``agent_s`` in which at least one model call was open."""
    collect_s: float = 0.0
    teardown_s: float = 0.0
    grade_s: float = 0.0
    total_s: float = 0.0


TrialStatus = Literal["success", "failed", "skipped", "cancelled"]


class TrialRecord(Record):
    """The final state of one trial; written to ``rollout_trials/<rollout_id>/trial.json``.

    ``reward`` is null unless ``status`` is ``success``: a trial that could not be scored is never a zero.
    """

    schema_version: Literal[1] = 1
    rollout_id: str
    row_index: int
    source_row_index: int
    run_index: int
    status: TrialStatus
    reward: float | None = None
    samples: list[Sample] = Field(default_factory=list)
    failure: Failure | None = None
    usage: Usage = Usage()
    timing: Timing = Timing()
    attempts: int = 1
    sandbox: dict[str, Any] = Field(default_factory=dict)
    """Provider, sandbox id, exit code, out-of-memory flag, peak memory, last guest lines."""
    warnings: list[str] = Field(default_factory=list)
    """What went wrong beside the result: a teardown that failed, artifacts that were skipped, logs that were cut."""


class CallRecord(Record):
    """One model call, one line of ``calls.jsonl``. Bodies are what went over the wire, bounded."""

    schema_version: Literal[1] = 1
    index: int
    """Order in which the relay dispatched the trial's calls, from 0: the training order."""
    attempt: int
    """How many requests the policy saw for this call."""
    client_retry: int = 0
    """``x-stainless-retry-count`` of the request."""
    path: str
    stream: bool
    request: dict[str, Any] | None
    status: int | None
    """Status that the sandbox saw; null when it went away first."""
    response: dict[str, Any] | None
    """The answer as one chat completion, merged from the chunks of a stream."""
    error: str | None = None
    complete: bool
    """Whether the whole answer, with its finish reason, reached the sandbox."""
    started_at: float
    """Unix time."""
    first_byte_s: float | None = None
    duration_s: float
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    tokens_complete: bool = False
    """Whether the token ids are there and as many as the usage says."""
    truncated: bool = False
    """Whether a body above was cut to its bound."""
