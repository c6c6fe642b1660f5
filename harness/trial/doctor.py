"""Whether a run can work on this machine: each part by itself, and then all of them together in one real sandbox."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

import anyio.to_thread
from uv import find_uv_bin

from harness.errors import HarnessError, PolicyError
from harness.policy import Policy, check_policy, resolve_policy
from harness.relay import Relay
from harness.rollout.cache import cache_dir
from harness.rollout.lock import resolve
from harness.rollout.source import Rollout
from harness.sandbox.base import Finding, Progress, Provider, SandboxSettings
from harness.sandbox.owner import this_process
from harness.sandbox.reaper import reap
from harness.sandbox.select import Choice, make_provider
from harness.trial.fleet import Fleet
from harness.trial.preflight import check_session
from harness.trial.session import Blueprint

LOW_DISK = 1 << 30
_PYPROJECT = """\
[project]
name = "doctor"
version = "0"
requires-python = ">=3.12"
dependencies = ["osmosis-ai>=0.3.8,<0.4"]
"""
_MAIN = """\
from osmosis_ai.rollout import AgentWorkflow, Grader

class Nothing(AgentWorkflow):
    async def run(self, ctx):
        return []

class Zero(Grader):
    async def grade(self, ctx):
        ctx.set_reward(0.0)
"""


async def examine(choice: Choice, policy: Policy | None, progress: Progress) -> list[Finding]:
    """Everything that a run needs. Never raises for what is wrong; a run works if every required finding is ok.

    :param policy: null to leave the policy out.
    """
    findings = [_python(), _uv(), await anyio.to_thread.run_sync(_disk)]
    provider, found = await _provider(choice)
    findings += found
    if policy is not None:
        try:
            await check_policy(policy)
            findings.append(Finding(check="policy", ok=True, detail=f"{policy.model} at {policy.base_url} answers"))
        except PolicyError as error:
            findings.append(_failed("policy", error))
    if provider is not None:
        findings += await _inside(provider, policy, progress)
    return findings


def _python() -> Finding:
    return Finding(
        check="python", ok=sys.version_info >= (3, 12), detail=f"{platform.python_version()} at {sys.prefix}"
    )


def _uv() -> Finding:
    try:
        return Finding(check="uv", ok=True, detail=find_uv_bin())
    except FileNotFoundError as error:
        return Finding(check="uv", ok=False, detail=str(error), remedy="Install it: `pip install uv`.")


def _disk() -> Finding:
    try:
        cache = cache_dir()
        free = shutil.disk_usage(cache).free
    except (HarnessError, OSError) as error:
        return _failed("disk", error)
    return Finding(
        check="disk",
        ok=free >= LOW_DISK,
        detail=f"{free / 2**30:.1f} GiB free for built environments at {cache}",
        remedy="" if free >= LOW_DISK else "Free some space there, or set HARNESS_CACHE to another folder.",
    )


async def _provider(choice: Choice) -> tuple[Provider | None, list[Finding]]:
    """The provider that a run would take, and what each that was asked says of itself."""
    findings: list[Finding] = []
    for name in ("docker", "local") if choice == "auto" else (choice,):
        try:
            provider = make_provider(name)
            async with provider:
                found = await provider.doctor()
        except HarnessError as error:
            found = [_failed(name, error)]
        if all(finding.ok for finding in found if finding.required):
            # One that works is enough: what the others lack is told, but stops nothing.
            return provider, [f.model_copy(update={"required": False}) for f in findings] + found
        findings += found
    return None, findings


async def _inside(provider: Provider, policy: Policy | None, progress: Progress) -> list[Finding]:
    """Make an environment and a sandbox as a run does, and call the relay, and the policy through it, from inside."""
    name = provider.capabilities.name
    asked = policy or resolve_policy(
        "none/none", policy_url="http://127.0.0.1:9/v1", model=None, key_env=None, environ={}
    )
    findings: list[Finding] = []
    step = f"{name} environment"
    try:
        with tempfile.TemporaryDirectory(prefix="harness-doctor-") as folder:
            path = Path(folder)
            (path / "pyproject.toml").write_text(_PYPROJECT)
            (path / "main.py").write_text(_MAIN)
            rollout = Rollout(name="doctor", path=path, entrypoint="main.py")
            async with provider, Relay(asked) as relay:
                _, problems = await reap(provider)
                if problems:
                    findings.append(Finding(check="leftovers", ok=False, required=False, detail="; ".join(problems)))
                settings = SandboxSettings()
                environment = await provider.prepare(await resolve(path, progress), settings, progress)
                findings.append(Finding(check=step, ok=True, detail=environment.handle))
                step = f"{name} sandbox"
                blueprint = Blueprint(
                    provider=provider,
                    environment=environment,
                    settings=settings,
                    owner=this_process("doctor"),
                    relay=relay,
                    entrypoint="main.py",
                    code=await anyio.to_thread.run_sync(rollout.code_tar),
                )
                started = time.monotonic()
                async with Fleet(blueprint, max_in_flight=1, ahead=0) as fleet:
                    session = await fleet.open()
                    seconds = time.monotonic() - started
                    detail = f"ready in {seconds:.1f} s, osmosis-ai {session.loaded.sdk}"
                    findings.append(Finding(check=step, ok=True, detail=detail))
                    step = "relay, from a sandbox"
                    probed = await session.guest.probe("/", {}, 30)
                    findings.append(
                        Finding(
                            check=step,
                            ok=probed.status is not None,
                            detail=probed.error or "answers",
                            remedy="" if probed.status else "This is a fault of the harness or of the sandbox image.",
                        )
                    )
                    if policy is not None and probed.status is not None:
                        step = "policy, from a sandbox"
                        await check_session(session, policy)
                        findings.append(Finding(check=step, ok=True, detail="answers"))
                    await session.release()
    except (HarnessError, OSError, TimeoutError) as error:
        findings.append(_failed(step, error))
    return findings


def _failed(check: str, error: Exception) -> Finding:
    if isinstance(error, HarnessError):
        return Finding(check=check, ok=False, detail=error.message, remedy=error.hint)
    return Finding(check=check, ok=False, detail=f"{type(error).__name__}: {error}")
