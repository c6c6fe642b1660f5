"""The agent frameworks of the platform's templates, with tool calls, each trial in a sandbox; both SDK generations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from tests.platform.agents import multiplies_with_a_tool
from tests.support.policy import Reply, ScriptedPolicy, serve

pytestmark = [pytest.mark.anyio, pytest.mark.namespaces, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent.parent
OLD = Path(__file__).parent / "resources/sdk_0_2"
"""A workspace with the same rollouts written for SDK 0.2.31."""


def harness_run(config: Path, policy: ScriptedPolicy, output: Path, env: dict[str, str] | None = None) -> Path:
    """Two trials on local sandboxes; the run's directory."""
    command = [
        sys.executable, "-m", "harness", "run", str(config), "--policy-url", policy.url, "--sandbox", "local",
        "--limit", "2", "--n", "1", "-o", str(output), "--name", "r", "--max-in-flight", "2", "--json", "-y",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=550, cwd=ROOT, check=False, env={**os.environ, **(env or {})}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Path(json.loads(done.stdout)["run_dir"])


def trials(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("rollout_trials/*/trial.json"))]


@pytest.mark.parametrize("name", ["multiply-local-strands", "multiply-local-openai"])
@pytest.mark.parametrize("root", [ROOT, OLD], ids=["sdk-0.3", "sdk-0.2"])
async def test_the_agent_calls_its_tool_and_is_graded(
    name: str, root: Path, tmp_path: Path, scripted_policy: ScriptedPolicy
) -> None:
    scripted_policy.script = multiplies_with_a_tool
    config = root / f"configs/eval/{name}.toml"
    run_dir = await anyio.to_thread.run_sync(harness_run, config, scripted_policy, tmp_path)
    done = trials(run_dir)
    assert [(trial["status"], trial["reward"]) for trial in done] == [("success", 1.0)] * 2
    transcript = json.loads((run_dir / f"rollout_trials/{done[0]['rollout_id']}/trajectory.json").read_text())
    called = [step for step in transcript["steps"] if step.get("tool_calls")]
    assert len(called) == 1
    assert called[0]["observation"]["results"][0]["content"]


async def test_a_judges_key_stays_in_the_host(tmp_path: Path, scripted_policy: ScriptedPolicy) -> None:
    scripted_policy.script = lambda body: Reply("It is so.")
    async with serve(lambda body: Reply("Fair.\nScore: 7"), key="judge-key-0123456789") as judge:
        env = {"JUDGE_BASE_URL": judge.url, "JUDGE_API_KEY": "judge-key-0123456789"}
        config = ROOT / "configs/eval/llm-judge.toml"
        run_dir = await anyio.to_thread.run_sync(harness_run, config, scripted_policy, tmp_path, env)
    done = trials(run_dir)
    assert [(trial["status"], trial["reward"]) for trial in done] == [("success", 0.7)] * 2
    assert done[0]["samples"][0]["data"]["metrics"]["judge_score"] == 7
    files = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    assert not [data for data in files if b"judge-key-0123456789" in data]
