"""A rollout whose rows say what happens, and the SDK's server in this process with one backend or the other."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import anyio
import httpx
import uvicorn
from osmosis_ai.rollout import ExecutionBackend, LocalBackend
from osmosis_ai.rollout.server import create_rollout_server

from harness import SandboxBackend
from harness.rollout.source import Rollout

PYPROJECT = """
[project]
name = "under-test"
version = "0.1.0"
requires-python = ">=3.12"
dependencies = ["osmosis-ai==0.3.8"]
"""

MAIN = """
import asyncio, json, os, pathlib, sys, time, urllib.request
from osmosis_ai.rollout import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowOutput, ConcurrencyConfig, Grader
from osmosis_ai.rollout import LocalBackend, RolloutSample, SampleSource, get_rollout_context
from osmosis_ai.rollout.server import create_rollout_server
IMPORTS

class Source(SampleSource):
    def __init__(self, **fields):
        self.fields = fields
    async def get_sample(self):
        return RolloutSample(**self.fields)

def ask(messages):
    context = get_rollout_context()
    body = json.dumps({"model": "mine", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + context.api_key, "Content-Type": "application/json"}
    request = urllib.request.Request(context.chat_completions_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]

class Stubborn(Exception):
    pass

class Workflow(AgentWorkflow):
    async def run(self, ctx):
        what, _, rest = (ctx.prompt[-1]["content"] if ctx.prompt else "ok").partition(" ")
        assert ctx.config is self.config
        if what == "ask":
            return [*ctx.prompt, await asyncio.to_thread(ask, ctx.prompt)]
        if what == "sleep":
            await asyncio.sleep(float(rest))
        if what == "block":
            time.sleep(float(rest))
        if what == "swallow":
            try:
                await asyncio.sleep(float(rest))
            except asyncio.CancelledError:
                pass
        if what == "raise":
            kinds = dict(ValueError=ValueError, KeyError=KeyError, TimeoutError=TimeoutError, Stubborn=Stubborn)
            raise kinds[rest]("the reason")
        if what == "exit":
            sys.exit(3)
        if what == "artifact":
            (ctx.artifacts_dir / "deep").mkdir()
            (ctx.artifacts_dir / "deep/file.txt").write_text(rest)
            (ctx.artifacts_dir / "link").symlink_to("/etc/passwd")
        if what == "none":
            return None
        if what == "number":
            return 7
        if what == "infinite":
            return AgentWorkflowOutput(messages=[], metrics={"x": float("inf")})
        if what == "source":
            said = [{"role": "user", "content": rest}]
            get_rollout_context().set_sample_source(Source(messages=said, metrics={"n": 1}))
            return None
        if what == "twice":
            get_rollout_context().set_sample_source(Source())
            get_rollout_context().set_sample_source(Source())
        if what == "hidden":
            said = [{"role": "user", "content": "x"}]
            get_rollout_context().set_sample_source(Source(messages=said, trajectory_messages=None))
            return None
        if what == "size":
            return [{"role": "assistant", "content": str(len(rest))}]
        if what == "metadata":
            return [{"role": "assistant", "content": json.dumps(ctx.metadata, sort_keys=True)}]
        return AgentWorkflowOutput(messages=[*ctx.prompt, {"role": "assistant", "content": "done"}], metrics={"a": 1.5})

class Judge(Grader):
    async def grade(self, ctx):
        assert get_rollout_context() is None and ctx.project_path is None
        what, _, rest = (ctx.label or (ctx.metadata or {}).get("grade") or "").partition(" ")
        if what == "raise":
            raise RuntimeError("no idea")
        if what == "value":
            raise ValueError("bad")
        if what == "sleep":
            await asyncio.sleep(float(rest))
        if what == "nan":
            ctx.set_reward(float("nan"))
        if what == "nothing":
            return
        if what == "remove":
            ctx.sample.remove_sample = True
            return
        if what == "text":
            ctx.set_reward("0.25")
            return
        if what == "replace":
            ctx.sample = RolloutSample(messages=[{"role": "user", "content": "other"}], reward=0.5)
            return
        if what == "artifact":
            text = (ctx.artifacts_dir / "deep/file.txt").read_text()
            (ctx.artifacts_dir / "judged.txt").write_text("judged " + text)
        if what == "cwd":
            ctx.set_reward(float(pathlib.Path("main.py").exists()))
            return
        ctx.set_reward(1.0)

config = AgentWorkflowConfig(name="w", concurrency=ConcurrencyConfig(max_concurrent=CONCURRENCY))

def main():
    backend = BACKEND(workflow=Workflow, workflow_config=config, grader=Judge OPTIONS)
    app = create_rollout_server(backend=backend)
    import uvicorn
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["_OSMOSIS_ROLLOUT_PORT"]))

if __name__ == "__main__":
    main()
"""


def write_rollout(
    root: Path, *, backend: str = "LocalBackend", imports: str = "", options: str = "", concurrency: int | None = 2
) -> Rollout:
    """``rollouts/x`` below a workspace's root."""
    folder = root / "rollouts/x"
    folder.mkdir(parents=True, exist_ok=True)
    text = MAIN.replace("IMPORTS", imports).replace("BACKEND", backend).replace(" OPTIONS", options)
    (folder / "main.py").write_text(text.replace("CONCURRENCY", str(concurrency)))
    if not (folder / "pyproject.toml").exists():
        (folder / "pyproject.toml").write_text(dedent(PYPROJECT))
    return Rollout(name="x", path=folder, entrypoint="main.py")


def local_backend(rollout: Rollout) -> LocalBackend:
    """The SDK's own, in this process."""
    spec = importlib.util.spec_from_file_location("rollout_under_test", rollout.path / rollout.entrypoint)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return LocalBackend(workflow=module.Workflow, workflow_config=module.config, grader=module.Judge)


def sandbox_backend(rollout: Rollout, sandbox: Any = "local", **options: Any) -> SandboxBackend:
    return SandboxBackend.of_rollout(rollout, sandbox=sandbox, max_in_flight=options.pop("max_in_flight", 2), **options)


@asynccontextmanager
async def serve(backend: ExecutionBackend, **options: Any) -> AsyncIterator[str]:
    """The SDK's server around a backend; its URL. Ends as at SIGTERM."""
    app = create_rollout_server(backend=backend, **options)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_keep_alive=60)
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listener])
            while not server.started:  # uvicorn has no event for it
                await anyio.sleep(0.01)
            failure: Exception | None = None
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            except Exception as error:  # raised when the server has ended; inside the group it would be cut down
                failure = error
            server.should_exit = True
        if failure is not None:
            raise failure


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def body(rollout_id: str, said: str = "ok", **fields: Any) -> dict[str, Any]:
    """A ``POST /rollout``."""
    return {
        "rollout_id": rollout_id,
        "initial_messages": [{"role": "user", "content": said}],
        "chat_completions_url": "",
        "label": "yes",
    } | fields


async def until(true: Callable[[], bool], within: float = 30) -> None:
    """Wait for something that nothing announces."""
    with anyio.fail_after(within):
        while not true():
            await anyio.sleep(0.02)


async def idle(http: httpx.AsyncClient) -> None:
    """Wait until no rollout has a task, nor a sandbox."""
    with anyio.fail_after(30):
        while (await http.get("/health")).json()["lifecycle"]["active_rollouts"]:
            await anyio.sleep(0.1)


async def submit(http: httpx.AsyncClient, request: dict[str, Any]) -> str:
    """Its polling lease."""
    answer = await http.post("/rollout", json=request)
    assert answer.status_code == 202, answer.text
    token: str = answer.json()["polling_lease_token"]
    return token


async def statuses(http: httpx.AsyncClient, rollout_id: str, lease: str) -> tuple[list[str], dict[str, Any]]:
    """Poll to the end: each status that was seen, and the result."""
    seen: list[str] = []
    while True:
        answer = await http.get(
            f"/rollout/{httpx.URL('/' + rollout_id).raw_path.decode()[1:]}/result",
            headers={"X-Osmosis-Rollout-Lease": lease},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        if not seen or seen[-1] != result["status"]:
            seen.append(result["status"])
        if seen[-1] in ("success", "failure", "cancelled"):
            return seen, result


async def result(http: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    return (await statuses(http, request["rollout_id"], await submit(http, request)))[1]
