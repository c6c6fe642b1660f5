"""What all trials of a run need, made once: dependencies, environment, graders, policy, relay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread

from harness.errors import HarnessError
from harness.grading import GraderPool
from harness.policy import Policy, embedded_policy
from harness.relay import Relay
from harness.rollout.environment import host_environment
from harness.rollout.lock import Lock, resolve
from harness.sandbox.base import Environment, Progress, Provider
from harness.sandbox.reaper import reap, reaped_at_death
from harness.sandbox.select import choose
from harness.trial.plan import Job


@dataclass(frozen=True)
class Prepared:
    """Ready for trials, for as long as ``prepare`` is open."""

    provider: Provider
    environment: Environment
    graders: GraderPool
    policy: Policy
    relay: Relay
    code: bytes
    warnings: list[str]


@asynccontextmanager
async def prepare(plan: Job, progress: Progress) -> AsyncIterator[Prepared]:
    """Choose the provider, resolve and build, load the grader, start the policy and the relay.

    :raises HarnessError: any of it cannot be had; what was started is stopped again.
    """
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(await choose(plan.sandbox))
        removed, warnings = await reap(provider)
        if removed:
            progress(f"removed {len(removed)} sandboxes of runs that died")
        if provider.capabilities.kept:
            stack.enter_context(reaped_at_death(provider))
        if provider.capabilities.isolation == "none":
            warnings.append("--sandbox process isolates nothing: the rollout can read and change all that you can")
        lock = await resolve(plan.rollout.path, progress)
        environment, graders = await _at_once(
            lambda: provider.prepare(lock, plan.settings.sandbox, progress),
            lambda: _graders(plan, lock, stack, progress),
        )
        policy = plan.policy
        if policy is None:
            policy = await stack.enter_async_context(embedded_policy(progress))
        relay = await stack.enter_async_context(Relay(policy, sampling=plan.sampling))
        code = await anyio.to_thread.run_sync(plan.rollout.code_tar)
        yield Prepared(provider, environment, graders, policy, relay, code, warnings)


class _Would(Exception):
    """Raised in the place of the first step of a build."""


async def preview(plan: Job) -> list[str]:
    """What ``prepare`` would have to build, a line each; empty when all of it is there. Builds nothing.

    :raises HarnessError: the provider cannot work here, or the dependencies do not resolve.
    """

    def refuse(line: str) -> None:
        raise _Would(line)

    lock = await resolve(plan.rollout.path, lambda line: None)
    steps: list[str] = []
    async with await choose(plan.sandbox) as provider:
        for build in (
            lambda: provider.prepare(lock, plan.settings.sandbox, refuse),
            lambda: host_environment(lock, refuse),
        ):
            try:
                await build()
            except _Would as step:
                steps.append(str(step))
    return list(dict.fromkeys(steps))


async def _graders(plan: Job, lock: Lock, stack: AsyncExitStack, progress: Progress) -> GraderPool:
    host = await host_environment(lock, progress)
    pool = GraderPool(
        host.python,
        plan.rollout.path,
        plan.rollout.entrypoint,
        plan.grader_env(),
        workers=plan.settings.grader.workers,
    )
    await stack.enter_async_context(pool)
    await pool.check()
    return pool


async def _at_once[A, B](first: Callable[[], Awaitable[A]], second: Callable[[], Awaitable[B]]) -> tuple[A, B]:
    """Both results; when one fails the other is cancelled and its error is raised by itself, not in a group."""
    a: list[A] = []
    b: list[B] = []

    async def run_first() -> None:
        a.append(await first())

    async def run_second() -> None:
        b.append(await second())

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_first)
            tasks.start_soon(run_second)
    except BaseExceptionGroup as group:
        known, others = group.split(HarnessError)
        if known is None or others is not None:
            raise
        raise known.exceptions[0] from None
    return a[0], b[0]
