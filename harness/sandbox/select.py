"""Which provider a run uses. The providers' modules are imported only when they are wanted."""

from __future__ import annotations

import importlib.util
from typing import Literal

from harness.errors import ProviderUnavailable
from harness.sandbox.base import Finding, Provider, ProviderName

Choice = Literal["auto", "docker", "daytona", "local", "process"]


def make_provider(name: ProviderName) -> Provider:
    """The provider of that name, not connected yet."""
    if name == "docker":
        from harness.sandbox.docker import DockerProvider

        return DockerProvider()
    if name == "local":
        from harness.sandbox.local import LocalProvider

        return LocalProvider()
    if name == "process":
        from harness.sandbox.process import ProcessProvider

        return ProcessProvider()
    if importlib.util.find_spec("daytona") is None:
        hint = "Install the extra: `pip install 'rollout-harness[daytona]'`."
        raise ProviderUnavailable("the daytona provider needs the Daytona SDK, which is not installed", hint=hint)
    from harness.sandbox.daytona import DaytonaProvider

    return DaytonaProvider()


async def choose(choice: Choice) -> Provider:
    """The provider asked for; ``auto`` takes docker if an engine answers, else local.

    :raises ProviderUnavailable: it cannot work here; says why and what to do.
    """
    if choice != "auto":
        provider = make_provider(choice)
        blocking = await _blocking(provider)
        if blocking:
            raise ProviderUnavailable(
                f"the {choice} provider cannot work here: {_detail(blocking)}", hint=_remedy(blocking)
            )
        return provider
    tried: list[str] = []
    for name in ("docker", "local"):
        provider = make_provider(name)
        blocking = await _blocking(provider)
        if not blocking:
            return provider
        tried.append(f"{name}: {_detail(blocking)}\n    {_remedy(blocking)}")
    raise ProviderUnavailable(
        "no sandbox provider works on this machine",
        hint="\n  ".join([*tried, "`--sandbox process` runs without any isolation, for debugging your own code only."]),
    )


async def _blocking(provider: Provider) -> list[Finding]:
    async with provider:
        return [finding for finding in await provider.doctor() if finding.required and not finding.ok]


def _detail(findings: list[Finding]) -> str:
    return "; ".join(f"{finding.check}: {finding.detail}" for finding in findings)


def _remedy(findings: list[Finding]) -> str:
    return " ".join(finding.remedy for finding in findings if finding.remedy)
