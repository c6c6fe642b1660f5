"""The Docker provider against the engine's own limit, and for long: ``python -m benchmarks.docker``.

Sizes are flags and small by default. Other programs share a machine: limit and harness are measured in turns, and only
ratios from the same turns mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
from aiodocker import Docker

from benchmarks.harness_run import WORKSPACE, policy, run
from benchmarks.throughput import docker_limit
from harness.models import CallRecord
from harness.sandbox.docker import DockerProvider
from harness.sandbox.owner import is_dead, this_process
from harness.trial.fleet import Fleet
from harness.trial.plan import RunFlags, make_plan
from harness.trial.prepare import prepare
from harness.trial.session import Blueprint, Listener

ENGINE = ("dockerd", "containerd", "containerd-shim", "runc")


def throughput(url: str, trials: int, in_flight: int, turns: int) -> None:
    limits, rates = [], []
    for _ in range(turns):
        limits.append(anyio.run(docker_limit, trials, in_flight))
        rates.append(run("docker", url, trials=trials, in_flight=in_flight).rate)
    ratios = [rate / limit for rate, limit in zip(rates, limits, strict=True)]
    print(
        f"{in_flight} in flight: engine {statistics.median(limits):.2f}/s, harness {statistics.median(rates):.2f}/s,"
        f" ratio {statistics.median(ratios):.2f} (turns: {', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    )


async def starts(url: str, count: int) -> None:
    """Cold: from the create call to the loaded guest. Warm: from a free slot to a waiting guest's first model call."""
    cold: list[float] = []
    warm: list[float] = []
    called: list[float] = []

    def on_call(record: CallRecord) -> None:
        called.append(record.started_at)

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        data = Path(folder, "rows.jsonl")
        await anyio.Path(data).write_text(json.dumps({"user_prompt": "x", "ground_truth": "ok"}) + "\n")
        flags = RunFlags(
            config=WORKSPACE / "configs/eval/two-call.toml", dataset_file=data, policy_url=url, sandbox="docker"
        )
        plan = make_plan(flags, {}, None)
        async with AsyncExitStack() as stack:
            made = await stack.enter_async_context(prepare(plan, lambda line: None))
            blueprint = Blueprint(
                provider=made.provider,
                environment=made.environment,
                settings=plan.settings.sandbox,
                owner=this_process("benchmark"),
                relay=made.relay,
                entrypoint=plan.rollout.entrypoint,
                code=made.code,
            )
            async with Fleet(blueprint, max_in_flight=1, ahead=1, demand=count + 1) as fleet:
                session = await fleet.take()
                for number in range(count):
                    with anyio.fail_after(60):
                        while not fleet._idle:  # noqa: ASYNC110  # the next one shall wait, loaded
                            await anyio.sleep(0.02)
                    await fleet.give_back(session)
                    called.clear()
                    free = time.time()
                    session = await fleet.take()
                    cold.append(session.provision_s + session.load_s)
                    session.attach(Listener(on_call=on_call))
                    await session.guest.run(rollout_id=str(number), prompt=[], metadata=None, timeout=60)
                    warm.append(called[0] - free)
                await fleet.give_back(session)
    for name, seconds in (("cold start", cold), ("first model call of a waiting guest", warm)):
        cuts = statistics.quantiles(seconds, n=10)
        print(f"{name}: median {cuts[4] * 1000:.0f} ms, 90 % below {cuts[8] * 1000:.0f} ms")


def many(in_flight: int, delay_s: float) -> None:
    """Everything in flight at once, with a policy that takes its time."""
    with policy(delay_s) as url:
        before = engine_cpu()
        got = run("docker", url, trials=in_flight, in_flight=in_flight)
    print(
        f"{in_flight} in flight, policy of {delay_s:g} s: {got.peak_mib:.0f} MiB and {got.threads} threads at most,"
        f" {got.cpu_ms:.0f} ms of CPU a trial; engine {(engine_cpu() - before) / in_flight * 1000:.0f} ms a trial"
    )


def engine_cpu() -> float:
    """CPU seconds that the engine's processes, and children they have waited for, have used."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = stat.read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        if name in ENGINE:
            total += sum(map(int, fields.split()[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def endurance(url: str, trials: int) -> None:
    """Does a long run grow? Resident memory, descriptors and threads of the early and of the late run."""
    seen: list[tuple[float, int, int]] = []

    def watch(pid: int) -> None:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            memory = int(status.partition("VmRSS:")[2].split()[0]) / 1024
            seen.append(
                (memory, len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status.partition("Threads:")[2].split()[0]))
            )
        except (OSError, IndexError, ValueError):
            pass

    disk = anyio.run(used)
    run("docker", url, trials=trials, in_flight=4, watch=watch)
    fifth = len(seen) // 5
    early, late = (
        [statistics.median(values) for values in zip(*part, strict=True)]
        for part in (seen[fifth : 2 * fifth], seen[-fifth:])
    )
    left = anyio.run(leftovers)
    print(
        f"{trials} in a row, early and late: {early[0]:.0f} and {late[0]:.0f} MiB, {early[1]:.0f} and {late[1]:.0f}"
        f" descriptors, {early[2]:.0f} and {late[2]:.0f} threads; {left} containers left;"
        f" the engine's disk has {(anyio.run(used) - disk) / 2**20:+.0f} MiB more in use (by all of its users)"
    )


async def leftovers() -> int:
    async with DockerProvider() as provider:
        return sum(info.owner is not None and is_dead(info.owner) for info in await provider.list())


async def used() -> int:
    async with Docker() as docker:
        root = (await docker.system.info())["DockerRootDir"]
    return shutil.disk_usage(root).used if await anyio.Path(root).is_dir() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40, help="in one turn of the throughput")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--in-flight", nargs="+", type=int, default=[8])
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--many", type=int, default=40, help="trials in flight with a policy of 5 s")
    parser.add_argument("--row", type=int, default=100, help="trials in a row")
    options = parser.parse_args()
    with policy() as url:
        run("docker", url, trials=2, in_flight=1)  # builds what is not there yet
        for in_flight in options.in_flight:
            throughput(url, options.trials, in_flight, options.turns)
        anyio.run(starts, url, options.starts)
        many(options.many, 5.0)
        endurance(url, options.row)


if __name__ == "__main__":
    main()
