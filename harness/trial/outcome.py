"""From how things ended to who is at fault."""

from __future__ import annotations

import signal

from harness.channel import Ended, ErrorInfo
from harness.errors import Category, HarnessError
from harness.models import Failure, Resources

_CATEGORIES: dict[str, Category] = {
    "timeout": "timeout",
    "validation_error": "validation_error",
    "http_error": "http_error",
    "agent_error": "agent_error",
}
_MCP = "This litellm needs a later mcp than the agent framework: pin litellm==1.94.3 in the rollout's dependencies."
_VALIDATION = {"ValueError", "TypeError", "AssertionError"}


def of_error(error: HarnessError) -> Failure:
    """A failure that the harness raised itself."""
    return Failure(
        party=error.party,
        category=error.category,
        kind=type(error).__name__,
        message=str(error),
        retryable=error.retryable,
    )


def of_ending(
    ended: Ended,
    *,
    timeout_s: float | None,
    resources: Resources,
    policy: Failure | None,
    unanswered: Failure | None = None,
    queued_s: float = 0.0,
) -> Failure | None:
    """Why a workflow that ended like this has no result; None when it has one.

    :param queued_s: how much of its time was gone before it began.
    :param unanswered: what the policy still owed: a deadline that passes meanwhile is not the rollout's fault.
    :param policy: the last failure of the policy that reached the sandbox: who raised after one is not to blame.
    """
    if ended.how == "returned":
        return None
    if ended.how == "raised":
        return _of_exception(ended, policy)
    queued = f" ({queued_s:.1f}s of it spent queued)" if queued_s >= 0.1 else ""
    message = {
        "exited": f"the workflow ended its process with exit status {ended.code}",
        "signaled": f"the workflow was killed by {_signal_name(ended.signal)}",
        "timeout": f"workflow exceeded its {timeout_s}s deadline{queued}",
        "cancelled": "the workflow was cancelled",
        "out_of_memory": f"the workflow used more than its {resources.memory_mib} MiB of memory"
        " (raise memory_mib in [tool.harness.sandbox])",
    }[ended.how]
    if ended.how == "timeout" and unanswered is not None:
        return unanswered.model_copy(update={"message": f"{unanswered.message}\n  {message}"})
    kind = {
        "exited": "SystemExit",
        "signaled": "Killed",
        "timeout": "TimeoutError",
        "cancelled": "Cancelled",
        "out_of_memory": "OutOfMemory",
    }[ended.how]
    category: Category = "timeout" if ended.how == "timeout" else "agent_error"
    return Failure(party="rollout", category=category, kind=kind, message=message)


def _of_exception(ended: Ended, policy: Failure | None) -> Failure:
    error = ended.error or ErrorInfo(types=["Exception"], message="the workflow raised and did not say what")
    message = error.message or error.types[0]
    if "cannot import name" in message and "mcp.types" in message:
        message += f"\n  {_MCP}"
    if policy is not None:
        return policy.model_copy(
            update={"message": f"{policy.message}\n  the workflow then raised {error.types[0]}: {message}"}
        )
    category = _CATEGORIES.get(error.category or "")
    if category is None:
        names = set(error.types)
        category = "timeout" if "TimeoutError" in names else "agent_error"
        category = "validation_error" if names & _VALIDATION else category
    return Failure(party="rollout", category=category, kind=error.types[0], message=message, traceback=error.traceback)


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
