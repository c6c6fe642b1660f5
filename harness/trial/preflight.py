"""One model call from inside one sandbox, before the fleet starts: do relay and policy work, and if not, which one?"""

from __future__ import annotations

from harness.errors import ChannelError, PolicyRefused, SandboxError
from harness.policy import Policy, check_policy
from harness.trial.session import Session, gone

PROBE_S = 120.0
PROBE = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "stream": False}


async def check_session(session: Session, policy: Policy) -> None:
    """Ask the policy one question through a loaded session, which stays fit for its trial.

    :raises PolicyError: the policy does not answer, from the host either.
    :raises SandboxError: the policy answers the host but not the sandbox.
    """
    try:
        probed = await session.guest.probe("/v1/chat/completions", PROBE, PROBE_S)
    except (ChannelError, TimeoutError) as error:
        raise await gone(session.sandbox, error) from None
    if probed.status == 200:
        session.lease.restart()
        return
    await check_policy(policy)  # says exactly what is wrong, where the policy is to blame
    failure = session.lease.failure
    if failure is not None:
        raise PolicyRefused(f"policy {policy.name} fails now and then: {failure.message}")
    answer = f"status {probed.status}: {probed.body[:500]}" if probed.status else probed.error
    raise SandboxError(
        f"the policy answers this machine, but a sandbox cannot reach it through the relay ({answer})",
        hint="This is a fault of the harness or of the sandbox image, not of the policy.",
    )
