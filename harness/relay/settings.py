"""How patient the relay is, and how much one sandbox may ask of it."""

from __future__ import annotations

from pydantic import Field

from harness.models import Record

MIB = 1024 * 1024


class RelaySettings(Record):
    """Times in seconds, sizes in bytes."""

    connect_timeout_s: float = Field(default=10.0, gt=0)
    idle_timeout_s: float = Field(default=600.0, gt=0)
    """Longest silence of the policy, before its headers and within its answer."""
    call_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest single request to the policy."""
    bootstrap_s: float = Field(default=10.0, gt=0)
    """Until then a streaming call waits in silence for the policy's true status; then heartbeats begin, under 200."""
    heartbeat_s: float = Field(default=10.0, gt=0)
    """Longest silence towards the sandbox within a streamed answer."""
    attempts: int = Field(default=5, ge=1)
    """Requests to the policy for one call, the first included."""
    retry_budget_s: float = Field(default=120.0, ge=0)
    """No new attempt is begun when this much time has gone by since the first."""
    retry_first_s: float = Field(default=0.5, gt=0)
    retry_max_s: float = Field(default=30.0, gt=0)
    """Bounds of the exponential wait between attempts; the second also caps Retry-After."""
    record_bytes: int = Field(default=8 * MIB, ge=0)
    """Requests and responses larger than this are recorded without their messages."""
    ask_usage: bool = True
    """Ask the policy for the usage of streamed answers when the sandbox did not (``stream_options.include_usage``)."""


class CallLimits(Record):
    """What one sandbox may ask for. Null: no limit."""

    concurrent: int = Field(default=64, ge=1)
    """Calls open at the same time."""
    calls: int = Field(default=10_000, ge=1)
    connections: int = Field(default=256, ge=1)
    request_bytes: int = Field(default=32 * MIB, ge=1)
    response_bytes: int = Field(default=64 * MIB, ge=1)
    total_tokens: int | None = Field(default=None, ge=1)
    """Prompt and completion tokens of all calls together; calls are refused once it is used up."""
