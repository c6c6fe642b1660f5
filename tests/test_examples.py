"""The worked rollouts: the same rewards wherever they run, and no way in for what must stay outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.workspace import ROOT, Finished

pytestmark = [pytest.mark.timeout(400)]

PROVIDERS = [
    pytest.param("local", marks=pytest.mark.namespaces),
    pytest.param("docker", marks=pytest.mark.docker),
]


@pytest.fixture(scope="session", params=["multiply", "shell-agent"])
def scripted(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The example's name and a policy, in a process of its own, that plays its script."""
    name: str = request.param
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.policy", "--script", name], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    yield name, process.stdout.readline().strip()
    process.stdout.close()
    process.kill()
    process.wait()


def rewards_of(name: str, run_dir: str) -> dict[tuple[int, int], float | None]:
    lines = Path(run_dir, "index.jsonl").read_text().splitlines()
    return {(row["row_index"], row["run_index"]): row.get("reward") for row in map(json.loads, lines)}


SEEN: dict[str, dict[tuple[int, int], float | None]] = {}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_same_rewards_wherever_it_runs(scripted: tuple[str, str], provider: str, tmp_path: Path) -> None:
    name, url = scripted
    rows, n = (100, 2) if name == "multiply" else (20, 1)
    if provider == "docker" and not os.environ.get("HARNESS_TEST_ALL_ROWS"):
        rows //= 4  # at two or three containers a second, all of them take minutes
    command = [sys.executable, "-m", "harness", "run", f"configs/eval/{name}.toml", "--policy-url", url, "-y", "--json"]
    command += ["--sandbox", provider, "--limit", str(rows), "--n", str(n), "--max-in-flight", "6", "-o", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=390, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    document = Finished(done.returncode, done.stdout, done.stderr).document
    rewards = rewards_of(name, document["run_dir"])
    assert len(rewards) == rows * n
    assert set(rewards.values()) == {0.0, 1.0}, "a script has right and wrong answers, and nothing else"
    assert document["summary"]["failed"] == 0
    seen = SEEN.setdefault(name, rewards)
    assert {key: seen[key] for key in seen.keys() & rewards.keys()} == {
        key: rewards[key] for key in seen.keys() & rewards.keys()
    }
