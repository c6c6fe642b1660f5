"""What a trial on Daytona costs this machine, on the stand-in service: ``python -m benchmarks.daytona [--trials 500]``.

All trials are in flight at once, each with two model calls of a policy that takes its time, so that it is the harness's
own part that is measured: memory and CPU time a trial, threads, and how much later than the service allows its guest
speaks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from anyio.abc import ByteStream
from daytona import AsyncDaytona, CreateSandboxFromSnapshotParams, DaytonaConfig, SessionExecuteRequest
from rich.console import Console
from rich.table import Table

from benchmarks.harness_run import ROOT, WORKSPACE, Measured, policy, run
from harness.channel import Guest
from harness.rollout.lock import resolve
from harness.sandbox.base import Environment, SandboxSettings, SandboxSpec
from harness.sandbox.daytona import DaytonaProvider
from harness.sandbox.daytona.sandbox import guest_zip
from harness.sandbox.owner import this_process

MEMORY_MIB, CPU_MS, OVERHEAD_MS = 1.0, 40.0, 50.0
READY = "import asyncio, json, socket, tarfile"
"""What a guest imports before it can say anything."""


@contextmanager
def service() -> Iterator[None]:
    """The stand-in as a process, without limits, and the variables that lead to it."""
    command = [sys.executable, "-m", "tests.support.daytona", "--unlimited"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        os.environ |= {"DAYTONA_API_URL": about["url"], "DAYTONA_API_KEY": about["api_key"]}
        yield
    finally:
        process.terminate()
        process.wait()


async def prepared() -> Environment:
    lock = await resolve(WORKSPACE / "rollouts/two-call", lambda line: None)
    async with DaytonaProvider() as provider:
        return await provider.prepare(lock, SandboxSettings(), lambda line: None)


async def overheads(environment: Environment, count: int) -> list[float]:
    """Seconds until the guest's first word, over what the same steps take with the bare SDK, one at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        sdk = AsyncDaytona(DaytonaConfig(use_deprecated_polling=True))
    found: list[float] = []
    async with sdk, DaytonaProvider() as provider:
        for _ in range(count):
            began = time.monotonic()
            bare = await sdk.create(CreateSandboxFromSnapshotParams(snapshot=environment.handle))
            await bare.fs.upload_file(guest_zip(), "/tmp/guest.zip")
            await bare.process.create_session("s")
            command = SessionExecuteRequest(command=f"{environment.python} -I -S -c '{READY}'")
            await bare.process.execute_session_command("s", command)
            await bare.get_preview_link(7070)
            least = time.monotonic() - began
            await bare.delete()
            spec = SandboxSpec(
                name=f"harness-{uuid.uuid4().hex[:20]}",
                owner=this_process("benchmark"),
                environment=environment,
                settings=SandboxSettings(),
            )
            began = time.monotonic()
            async with await provider.create(spec) as sandbox, _guest(sandbox.stream) as guest:
                await guest.hello(30)
                found.append(time.monotonic() - began - least)
    return found


def _guest(stream: ByteStream) -> Guest:
    return Guest(stream, serve=lambda connection: connection.aclose(), on_log=lambda *_: None, lease_s=60)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.daytona")
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--policy-s", type=float, default=10.0)
    options = parser.parse_args()
    with service(), policy(options.policy_s) as url:
        environment = anyio.run(prepared)
        one = _run(url, 2)
        many = _run(url, options.trials)
        overhead = statistics.median(anyio.run(overheads, environment, 10)) * 1000
    memory = (many.peak_mib - one.peak_mib) / (options.trials - 2)
    table = Table("Measure", "Found", "At most", title=f"{options.trials} trials in flight")
    table.add_row("memory a trial", f"{memory:.2f} MiB (base {one.peak_mib:.0f} MiB)", f"{MEMORY_MIB:g} MiB")
    table.add_row("CPU a trial", f"{many.cpu_ms:.1f} ms", f"{CPU_MS:g} ms")
    table.add_row("threads", f"{many.threads} (2 trials: {one.threads})", "none a trial")
    table.add_row("guest's first word, over the service", f"{overhead:.0f} ms", f"{OVERHEAD_MS:g} ms")
    Console().print(table)


def _run(url: str, trials: int) -> Measured:
    return run("daytona", url, trials=trials, in_flight=trials)


if __name__ == "__main__":
    main()
