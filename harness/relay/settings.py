"""How patient the relay is, and how much one sandbox may ask of it."""

from __future__ import annotations

from harness.models import Record

MIB = 1024 * 1024


class RelaySettings(Record):
    """Times in seconds, sizes in bytes."""

    connect_timeout_s: float = 10.0
    idle_timeout_s: float = 600.0
    """Longest silence of the policy, before its headers and within its answer."""
    call_timeout_s: float = 3600.0
    """Longest single request to the policy."""
    bootstrap_s: float = 10.0
    """Until then a streaming call waits in silence for the policy's true status; then heartbeats begin, under 200."""
    heartbeat_s: float = 10.0
    """Longest silence towards the sandbox within a streamed answer."""
    attempts: int = 5
    """Requests to the policy for one call, the first included."""
    retry_budget_s: float = 120.0
    """No new attempt is begun when this much time has gone by since the first."""
    retry_first_s: float = 0.5
    retry_max_s: float = 30.0
    """Bounds of the exponential wait between attempts; the second also caps Retry-After."""
    record_bytes: int = 8 * MIB
    """Requests and responses larger than this are recorded without their messages."""


class CallLimits(Record):
    """What one sandbox may ask for."""

    concurrent: int = 64
    """Calls open at the same time."""
    calls: int = 10_000
    connections: int = 256
    request_bytes: int = 32 * MIB
    response_bytes: int = 64 * MIB
