from __future__ import annotations

import pytest

from harness.channel import Ended, ErrorInfo
from harness.errors import ChannelClosed, ProtocolError, ProviderUnavailable, SandboxGone
from harness.models import Failure, Resources
from harness.trial import outcome

POLICY = Failure(party="policy", category="agent_error", kind="PolicyUnreachable", message="503", retryable=True)


def failure_of(ended: Ended, policy: Failure | None = None) -> Failure:
    failure = outcome.of_ending(ended, timeout_s=2.5, resources=Resources(memory_mib=100), policy=policy)
    assert failure is not None
    return failure


def test_a_workflow_that_returned_has_no_failure_even_if_a_call_failed() -> None:
    ended = Ended(how="returned")
    assert outcome.of_ending(ended, timeout_s=None, resources=Resources(), policy=POLICY) is None


@pytest.mark.parametrize(
    ("types", "category", "expected"),
    [
        (["KeyError", "LookupError", "Exception"], None, "agent_error"),
        (["ValidationError", "ValueError", "Exception"], None, "validation_error"),
        (["ReadTimeout", "TimeoutError", "OSError"], None, "timeout"),
        (["SandboxApiException"], "http_error", "http_error"),
        (["Odd"], "no such category", "agent_error"),
    ],
)
def test_exceptions_have_the_sdks_category(types: list[str], category: str | None, expected: str) -> None:
    failure = failure_of(Ended(how="raised", error=ErrorInfo(types=types, message="m", category=category)))
    assert (failure.party, failure.kind, failure.category) == ("rollout", types[0], expected)
    assert not failure.retryable


def test_who_raised_because_the_policy_failed_is_not_to_blame() -> None:
    failure = failure_of(Ended(how="raised", error=ErrorInfo(types=["APIError"], message="boom")), POLICY)
    assert (failure.party, failure.retryable) == ("policy", True)
    assert "503" in failure.message
    assert "boom" in failure.message


@pytest.mark.parametrize(
    ("ended", "kind", "category", "words"),
    [
        (Ended(how="timeout"), "TimeoutError", "timeout", "workflow exceeded its 2.5s deadline"),
        (Ended(how="out_of_memory"), "OutOfMemory", "agent_error", "100 MiB"),
        (Ended(how="exited", code=3), "SystemExit", "agent_error", "exit status 3"),
        (Ended(how="signaled", signal=11), "Killed", "agent_error", "SIGSEGV"),
        (Ended(how="signaled", signal=999), "Killed", "agent_error", "signal 999"),
    ],
)
def test_endings(ended: Ended, kind: str, category: str, words: str) -> None:
    failure = failure_of(ended)
    assert (failure.kind, failure.category, failure.retryable) == (kind, category, False)
    assert words in failure.message


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (SandboxGone("x"), True),
        (ChannelClosed("x"), True),
        (ProtocolError("x"), False),
        (ProviderUnavailable("x"), False),
    ],
)
def test_only_lost_infrastructure_is_tried_again(error: SandboxGone | ChannelClosed, retryable: bool) -> None:
    failure = outcome.of_error(error)
    party = "rollout" if isinstance(error, ProtocolError) else "sandbox"
    assert (failure.party, failure.retryable) == (party, retryable)
