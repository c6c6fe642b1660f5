"""A workspace of a test's own, and the command line run on it as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent

MAIN = """
import asyncio, json, os, signal, subprocess, sys, time, urllib.request
from osmosis_ai.rollout import AgentWorkflow, Grader, get_rollout_context

def ask(messages):
    context = get_rollout_context()
    body = json.dumps({"messages": messages}).encode()
    headers = {"Authorization": "Bearer " + context.api_key, "Content-Type": "application/json"}
    request = urllib.request.Request(context.chat_completions_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]

class Workflow(AgentWorkflow):
    async def run(self, ctx):
        WORKFLOW

class Judge(Grader):
    async def grade(self, ctx):
        GRADER
"""
WORKFLOW = "return [*ctx.prompt, await asyncio.to_thread(ask, ctx.prompt)]"
GRADER = "ctx.set_reward(1.0 if ctx.label in str(ctx.sample.messages[-1]['content']) else 0.0)"

PYPROJECT = """
[project]
name = "under-test"
version = "0.1.0"
requires-python = ">=3.12"
dependencies = ["osmosis-ai==0.3.8"]
"""


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """What ``--json`` printed."""
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def trials(self) -> list[dict[str, Any]]:
        """Every ``trial.json`` of the run."""
        folder = Path(self.document["run_dir"], "rollout_trials")
        return sorted(
            (json.loads(path.read_text()) for path in folder.glob("*/trial.json")),
            key=lambda trial: (trial["row_index"], trial["run_index"]),
        )


class Workspace:
    """``configs/eval/x.toml``, ``rollouts/x/`` and ``data/x.jsonl`` below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rollout = root / "rollouts/x"
        self.config = root / "configs/eval/x.toml"
        self.data = root / "data/x.jsonl"
        for folder in (self.rollout, self.config.parent, self.data.parent):
            folder.mkdir(parents=True)
        self.write_main()
        (self.rollout / "pyproject.toml").write_text(PYPROJECT)
        self.write_config()
        self.write_rows([{"user_prompt": "say ok", "ground_truth": "ok"}])

    def write_main(self, workflow: str = WORKFLOW, grader: str = GRADER, *, text: str | None = None) -> None:
        """The entry point: bodies of the two methods, or the whole text."""
        made = MAIN.replace("WORKFLOW", workflow.replace("\n", "\n        "))
        made = made.replace("GRADER", grader.replace("\n", "\n        "))
        (self.rollout / "main.py").write_text(made if text is None else text)

    def write_config(self, evaluation: str = "", secrets: Sequence[str] = (), env: str = "") -> None:
        self.config.write_text(
            '[experiment]\nrollout = "x"\nentrypoint = "main.py"\nmodel_path = "vllm/m"\ndataset = "x"\n'
            f"[evaluation]\n{evaluation}\n[env]\n{env}\n[secrets]\nrequired = {json.dumps(list(secrets))}\n"
        )

    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def settings(self, text: str) -> None:
        """Add to the rollout's pyproject.toml."""
        (self.rollout / "pyproject.toml").write_text(PYPROJECT + text)

    def command(self, *arguments: str) -> list[str]:
        return [
            sys.executable, "-m", "harness", "run", str(self.config), "-o", str(self.root / "out"), "--name", "r", "-y",
            *arguments,
        ]  # fmt: skip

    def run(self, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 100) -> Finished:
        """``harness run`` with ``--json``, to its end."""
        done = subprocess.run(
            self.command("--json", *arguments),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)
