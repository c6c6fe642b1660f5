"""shell-agent: the model drives a ``bash`` tool to repair a small program.

A row's metadata holds a program with a fault, a sample of its input, and a second input that the model is not shown.
The workflow lays the program out in a fresh folder, runs the model's commands there, and at the end runs the program,
as the model left it, on the second input. Program and output are exported as artifacts. The grader compares them with
the row's ground truth and executes nothing: what the program *should* have printed is known to the grader alone, so
the only way to that output is a program that works.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

import uvicorn
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.backend.local import LocalBackend
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext, get_rollout_context
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.server import create_rollout_server
from osmosis_ai.rollout.types import AgentWorkflowConfig, AgentWorkflowOutput, ConcurrencyConfig

Message = dict[str, Any]

PROGRAM, OUTPUT = "program.py", "output.txt"
"""Names of the two artifacts."""
MAX_ARTIFACT = 64 * 1024

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a bash command in the working folder. Returns its output and its exit code.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "The command."}},
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "submit",
            "description": "Say that the program is repaired. Ends the work.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


class ShellConfig(AgentWorkflowConfig):
    max_tool_calls: int = 30
    max_tokens: int = 4096
    call_timeout_s: float = 600.0
    command_timeout_s: float = 20.0
    output_limit: int = 8192
    """Bytes of a command's output that the model sees; the middle of a longer one is left out."""


config = ShellConfig(name="shell-agent", concurrency=ConcurrencyConfig(max_concurrent=16))


def post(url: str, key: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One JSON request.

    :raises RuntimeError: the policy refused; the message has its status and the beginning of its answer.
    """
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"policy answered {error.code}: {error.read(500).decode(errors='replace')}") from error


async def complete(messages: list[Message], config: ShellConfig) -> Message:
    """Ask the rollout's policy for the next message, which may call tools."""
    rollout = get_rollout_context()
    assert rollout is not None, "the backend runs a workflow inside a rollout context"
    body = {
        "model": "osmosis-rollout",
        "messages": messages,
        "tools": TOOLS,
        "max_completion_tokens": config.max_tokens,
    }
    url = rollout.chat_completions_url.rstrip("/") + "/chat/completions"
    answer = await asyncio.to_thread(post, url, rollout.api_key or "", body, config.call_timeout_s)
    reply = answer["choices"][0]["message"]
    message: Message = {"role": "assistant", "content": reply.get("content") or ""}
    if reply.get("tool_calls"):
        message["tool_calls"] = reply["tool_calls"]
    return message


def ends(file: IO[bytes], limit: int) -> bytes:
    """What was written to a file; of more than ``limit`` bytes, the two ends."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size <= limit:
        return file.read()
    head = file.read(limit // 2)
    file.seek(size - limit // 2)
    return head + b"\n[... %d bytes left out ...]\n" % (size - 2 * (limit // 2)) + file.read(limit // 2)


async def run(
    command: list[str], folder: Path, timeout_s: float, limit: int, stdin: bytes = b""
) -> tuple[int | None, str]:
    """Run a command, and end every process of its group when it is over.

    Output goes to a file, not a pipe, which a process that outlives the command could hold open.

    :returns: the exit code, ``None`` after a timeout, and standard output and standard error together.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OSMOSIS_", "OPENAI_"))}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as source:
        source.write(stdin)
        source.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=env, stdin=source, stdout=output, stderr=output, start_new_session=True
        )
        code: int | None = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return code, ends(output, limit).decode(errors="replace")


class ShellWorkflow(AgentWorkflow[ShellConfig]):
    async def run(self, ctx: AgentWorkflowContext[ShellConfig]) -> AgentWorkflowOutput:
        if ctx.artifacts_dir is None:
            raise RuntimeError("no folder for artifacts: there would be nothing to judge")
        settings, task = ctx.config or config, ctx.metadata or {}
        with tempfile.TemporaryDirectory(prefix="shell-agent-") as name:
            folder = Path(name)
            program = folder / task["program"]
            program.write_text(task["source"], encoding="utf-8")
            (folder / "sample.txt").write_text(task["sample"], encoding="utf-8")

            messages, commands = await self.repair(list(ctx.prompt), folder, settings)

            if program.is_file():  # the model may have removed it
                with program.open("rb") as file:
                    (ctx.artifacts_dir / PROGRAM).write_bytes(file.read(MAX_ARTIFACT))
                command = [sys.executable, "-I", program.name]
                _, printed = await run(
                    command, folder, settings.command_timeout_s, settings.output_limit, task["second_input"].encode()
                )
                (ctx.artifacts_dir / OUTPUT).write_text(printed, encoding="utf-8")
        return AgentWorkflowOutput(messages=messages, metrics={"commands": commands})

    async def repair(self, messages: list[Message], folder: Path, settings: ShellConfig) -> tuple[list[Message], int]:
        """Let the model work until it submits, calls no tool, or has used up its tool calls."""
        commands = 0
        while True:
            messages.append(await complete(messages, settings))
            calls = messages[-1].get("tool_calls") or []
            for call in calls:
                name = call["function"]["name"]
                if name == "submit":
                    result = "submitted"
                elif name != "bash":
                    result = f"there is no tool {name!r}"
                elif commands >= settings.max_tool_calls:
                    result = "no commands are left"
                else:
                    commands += 1
                    result = await self.bash(call["function"]["arguments"], folder, settings)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            submitted = any(call["function"]["name"] == "submit" for call in calls)
            if submitted or not calls or commands >= settings.max_tool_calls:
                return messages, commands

    async def bash(self, arguments: str, folder: Path, settings: ShellConfig) -> str:
        try:
            command = json.loads(arguments)["command"]
        except (ValueError, KeyError, TypeError):
            return 'the arguments must be a JSON object: {"command": "..."}'
        code, printed = await run(
            ["bash", "-c", str(command)], folder, settings.command_timeout_s, settings.output_limit
        )
        ending = f"exit code {code}" if code is not None else f"killed after {settings.command_timeout_s:g} s"
        return f"{printed}\n[{ending}]".lstrip("\n")


class ShellGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        if ctx.label is None or ctx.artifacts_dir is None:
            raise ValueError("nothing to compare: the row has no ground truth, or there is no folder for artifacts")
        right = parses(ctx.artifacts_dir / PROGRAM) and text(ctx.artifacts_dir / OUTPUT).split() == ctx.label.split()
        ctx.set_reward(1.0 if right else 0.0)


def text(path: Path) -> str:
    """The beginning of an artifact, which is whatever the sandbox made it; empty when it is not there."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(MAX_ARTIFACT).decode(errors="replace")


def parses(path: Path) -> bool:
    source = text(path)
    try:
        return bool(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def main() -> None:
    backend = LocalBackend(workflow=ShellWorkflow, workflow_config=config, grader=ShellGrader)
    app = create_rollout_server(backend=backend)
    port = int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000"))
    # Outlive the platform load balancer's idle timeout of 2100 s, or it reuses connections that are just being closed.
    uvicorn.run(app, host="0.0.0.0", port=port, timeout_keep_alive=2160)


if __name__ == "__main__":
    main()
