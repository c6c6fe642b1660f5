"""Trials a second of ``harness run``, as a ratio to the limit of this machine: ``python -m benchmarks.throughput``.

The limit is the same image (or environment), command and imports, started and removed through the bare Engine API or
through bare bubblewrap at the same concurrency: what a sandbox for each trial costs when nothing is done with it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from aiodocker import Docker
from rich.console import Console
from rich.table import Table

from benchmarks.harness_run import WORKSPACE, Measured, policy, run
from harness.guest import ENV
from harness.rollout.environment import host_environment
from harness.rollout.lock import resolve
from harness.sandbox import bwrap
from harness.sandbox.base import SandboxSettings
from harness.sandbox.select import make_provider

IMPORTS = "import asyncio, http.client, json; import osmosis_ai.rollout"
"""What the guest and the two-call rollout import."""


async def rate(count: int, concurrency: int, once: Callable[[], Awaitable[None]]) -> float:
    """How many times a second ``once`` can be done."""
    left = iter(range(count))
    started = time.monotonic()

    async def worker() -> None:
        for _ in left:
            await once()

    async with anyio.create_task_group() as tasks:
        for _ in range(concurrency):
            tasks.start_soon(worker)
    return count / (time.monotonic() - started)


async def docker_limit(count: int, concurrency: int) -> float:
    lock = await resolve(WORKSPACE / "rollouts/two-call", lambda line: None)
    async with make_provider("docker") as provider:
        environment = await provider.prepare(lock, SandboxSettings(), lambda line: None)
    config: dict[str, Any] = {
        "Image": environment.handle,
        "Cmd": [f"{ENV}/bin/python", "-c", IMPORTS],
        "User": "1000:1000",
        "HostConfig": {"NetworkMode": "none", "LogConfig": {"Type": "none"}},
    }
    async with Docker() as docker:

        async def once() -> None:
            container = await docker.containers.create(config)
            await container.start()
            assert (await container.wait())["StatusCode"] == 0
            await container.delete(force=True)

        return await rate(count, concurrency, once)


async def local_limit(count: int, concurrency: int) -> float:
    lock = await resolve(WORKSPACE / "rollouts/two-call", lambda line: None)
    environment = await host_environment(lock, lambda line: None)
    found = bwrap.find()
    assert found is not None
    command = [found.path, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    command += ["--unshare-all", "--die-with-parent", "--as-pid-1", "--", str(environment.python), "-c", IMPORTS]

    async def once() -> None:
        await anyio.run_process(command)

    return await rate(count, concurrency, once)


LIMITS = {"docker": docker_limit, "local": local_limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--providers", nargs="+", default=["docker", "local"], choices=list(LIMITS))
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--trials", type=int, default=60)
    options = parser.parse_args()
    table = Table("provider", "in flight", "limit /s", "harness /s", "ratio", "host CPU ms/trial", "first call s")
    with policy() as url:
        for provider in options.providers:
            run(provider, url, trials=2, in_flight=1)  # builds what is not there yet
            for in_flight in options.in_flight:
                limit = anyio.run(LIMITS[provider], options.trials, in_flight)
                got = run(provider, url, trials=options.trials, in_flight=in_flight)
                table.add_row(
                    provider,
                    str(in_flight),
                    f"{limit:.2f}",
                    f"{got.rate:.2f}",
                    f"{got.rate / limit:.2f}",
                    f"{got.cpu_ms:.0f}",
                    f"{got.first_call_s:.1f}",
                )
    console = Console()
    console.print(table)
    with policy(3.0) as url:
        for provider in options.providers:
            console.print(memory(provider, url))


def memory(provider: str, url: str) -> str:
    """Memory for each trial in flight: the difference between many and one, with a policy that takes 3 s a call."""
    few: Measured = run(provider, url, trials=2, in_flight=1)
    many = run(provider, url, trials=64, in_flight=32)
    each = (many.peak_mib - few.peak_mib) / 31
    return f"{provider}: {few.peak_mib:.0f} MiB with 1 in flight, {each:.2f} MiB more for each further one"


if __name__ == "__main__":
    main()
