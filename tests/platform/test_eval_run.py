"""The platform's own command line against our backend, and its upload's checks over our run directories."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import anyio.to_thread
import pytest

from tests.platform.support import write_rollout
from tests.platform.test_frameworks import ROOT, harness_run
from tests.sdk import environment
from tests.support.policy import Reply, ScriptedPolicy

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

CONFIG = """
[experiment]
rollout = "x"
entrypoint = "main.py"
model_path = "hosted_vllm/scripted"
dataset = "x"
[evaluation]
n = 2
agent_workflow_timeout_s = 120
[secrets]
required = []
"""
# `osmosis eval run` installs the groups that uv installs by default; the harness leaves them out of sandboxes.
SERVED_HERE = f"""
[dependency-groups]
dev = ["rollout-harness[platform,local]"]

[tool.uv.sources]
rollout-harness = {{ path = "{ROOT}", editable = true }}
"""


def eval_workspace(root: Path) -> Path:
    """A workspace under git, as the command line wants it, whose ``main.py`` says ``SandboxBackend``."""
    rollout = write_rollout(
        root,
        backend="SandboxBackend",
        imports="from harness import SandboxBackend",
        options=', sandbox="local"',
    )
    project = rollout.path / "pyproject.toml"
    project.write_text(project.read_text() + SERVED_HERE)
    for folder in ("configs/eval", "configs/training", "data"):
        (root / folder).mkdir(parents=True)
    (root / "configs/eval/x.toml").write_text(CONFIG)
    rows = [{"user_prompt": f"ask {i}", "ground_truth": "yes"} for i in range(3)]
    (root / "data/x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    return root


def run_eval(bin_: Path, root: Path, policy: ScriptedPolicy) -> subprocess.CompletedProcess[str]:
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("_OSMOSIS_")},
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "HOSTED_VLLM_API_BASE": policy.url,
        "HOSTED_VLLM_API_KEY": "key-of-the-provider",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "UV_PYTHON": sys.executable,
        "UV_PYTHON_DOWNLOADS": "never",
    }
    command = [str(bin_ / "osmosis"), "--plain", "eval", "run", "configs/eval/x.toml", "--dataset-file", "data/x.jsonl"]
    return subprocess.run(
        [*command, "-y", "-o", "out", "--name", "r"],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )


@pytest.mark.namespaces
async def test_osmosis_eval_run_with_a_sandbox_for_each_rollout_and_no_tunnel(
    tmp_path: Path, pytestconfig: pytest.Config, scripted_policy: ScriptedPolicy
) -> None:
    assert pytestconfig.cache is not None
    bin_ = environment(pytestconfig.cache.mkdir("osmosis-eval"), "osmosis-ai[eval]==0.3.8").parent
    scripted_policy.script = lambda body: Reply("all right")
    root = eval_workspace(tmp_path / "ws")
    done = await anyio.to_thread.run_sync(run_eval, bin_, root, scripted_policy)
    log = (root / "out/r/logs.txt").read_text() if (root / "out/r/logs.txt").exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
    metrics = json.loads((root / "out/r/metrics.json").read_text())
    assert metrics["summary"]["completed_samples"] == 6
    assert metrics["summary"]["pass_rate"] == 1.0
    assert "cloudflared" not in log
    calls = list(root.glob("out/r/rollout_trials/*/calls.jsonl"))
    assert len(calls) == 6
    assert "key-of-the-provider" not in "".join(path.read_text() for path in calls)


@pytest.mark.namespaces
async def test_the_platform_would_take_what_harness_run_writes(tmp_path: Path, scripted_policy: ScriptedPolicy) -> None:
    scripted_policy.script = lambda body: Reply("6\n#### 6")
    run_dir = await anyio.to_thread.run_sync(
        harness_run, ROOT / "configs/eval/multiply.toml", scripted_policy, tmp_path
    )
    checked = upload_check("r", tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "the platform will take it" in checked.stderr

    index = run_dir / "index.jsonl"
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:-1]))
    checked = upload_check("r", tmp_path)
    assert checked.returncode == 2
    assert "incomplete" in checked.stderr
    shutil.rmtree(run_dir)
    assert "there is no run" in upload_check("r", tmp_path).stderr


def upload_check(run: str, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness", "upload", run, "-o", str(output), "--check"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
