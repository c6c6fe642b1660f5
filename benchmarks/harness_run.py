"""``harness run`` as a measured process: its own CPU and memory, and the rate of its trials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WORKSPACE = Path(__file__).parent / "workspace"
ROOT = Path(__file__).parent.parent


@contextmanager
def policy(delay_s: float = 0.0) -> Iterator[str]:
    """A policy in a process of its own; its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.policy", str(delay_s)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Measured:
    """One run."""

    trials: int
    rate: float
    """Trials a second, from the first one's first model call to the last one's last."""
    cpu_ms: float
    """CPU time of the harness's own process for each trial, its start and preparation left out."""
    peak_mib: float
    """Most memory of that process."""
    threads: int
    """Most threads of that process."""
    first_call_s: float
    """From the start of the command to the first trial's first model call."""
    phases: dict[str, float]
    """Median seconds of each phase."""


def run(
    provider: str,
    url: str,
    *,
    trials: int,
    in_flight: int,
    extra: tuple[str, ...] = (),
    watch: Callable[[int], None] = lambda pid: None,
) -> Measured:
    """Run ``trials`` two-call trials. Raises if one has another reward than 1.

    :param watch: called with the harness's process id, again and again while it runs.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        data = Path(folder, "rows.jsonl")
        data.write_text(
            "".join(json.dumps({"user_prompt": f"{n}", "ground_truth": "ok"}) + "\n" for n in range(trials))
        )
        command = [sys.executable, "-m", "harness", "run", str(WORKSPACE / "configs/eval/two-call.toml")]
        command += ["--policy-url", url, "--sandbox", provider, "--max-in-flight", str(in_flight), "--json", "-y"]
        command += ["--dataset-file", str(data), "-o", folder, "--name", "run", *extra]
        began = time.time()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        marks: list[tuple[float, float]] = []
        peak, threads = 0.0, 0
        while process.poll() is None:
            used, peak_now, threads_now = _usage(process.pid)
            if used:
                marks.append((time.time(), used))
                peak, threads = max(peak, peak_now), max(threads, threads_now)
            watch(process.pid)
            time.sleep(0.02)
        out, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"harness run failed ({process.returncode}):\n{err[-3000:]}{out[-3000:]}")
        records = [json.loads(path.read_text()) for path in Path(folder, "run/rollout_trials").glob("*/trial.json")]
        wrong = [record for record in records if record["reward"] != 1]
        if wrong or len(records) != trials:
            raise SystemExit(f"{len(wrong)} of {len(records)} trials went wrong: {wrong[:1]}")
        calls = [
            json.loads(line)
            for path in Path(folder, "run/rollout_trials").glob("*/calls.jsonl")
            for line in path.read_text().splitlines()
        ]
        first = min(call["started_at"] for call in calls)
        last = max(call["started_at"] + call["duration_s"] for call in calls)
        cpu_before = max((used for at, used in marks if at <= first), default=0.0)
        phases = {
            name: sorted(record["timing"][name] for record in records)[trials // 2] for name in records[0]["timing"]
        }
        return Measured(
            trials=trials,
            rate=(trials - 1) / (last - first),
            cpu_ms=(marks[-1][1] - cpu_before) / trials * 1000,
            peak_mib=peak,
            threads=threads,
            first_call_s=first - began,
            phases=phases,
        )


def _usage(pid: int) -> tuple[float, float, int]:
    """CPU seconds, peak MiB and threads of a process, its children left out."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0, 0.0, 0
    peak = next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0.0)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), peak, int(fields[17])
