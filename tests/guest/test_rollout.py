"""What is found in an entry point, and how a workflow's run ends; each in an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.sdk import write_rollout

CLASSES = dedent("""
    from osmosis_ai.rollout import AgentWorkflow, AgentWorkflowConfig, Grader, GraderConfig, LocalBackend

    class W(AgentWorkflow):
        async def run(self, ctx):
            return []

    class G(Grader):
        async def grade(self, ctx):
            ctx.set_reward(1.0)
""")
SERVE = """
    import os
    import uvicorn
    from osmosis_ai.rollout.server import create_rollout_server

    class Other(W):
        pass

    def main():
        backend = LocalBackend(workflow=W, workflow_config=AgentWorkflowConfig(name="c"), grader=G)
        app = create_rollout_server(backend=backend)
        uvicorn.run(app, host="0.0.0.0", port=int(os.environ["_OSMOSIS_ROLLOUT_PORT"]))

    if __name__ == "__main__":
        main()
        raise AssertionError("served")
"""
LOAD = """
import json, os, pathlib, sys
from harness.guest.rollout import LoadError, load

def show(folder, entrypoint):
    try:
        wiring = load(pathlib.Path(folder), entrypoint)
    except LoadError as error:
        print(json.dumps({"error": error.error}), flush=True)
    else:
        modules = [name for name in ("fastapi", "uvicorn.server") if name in sys.modules]
        config = getattr(wiring.workflow_config, "name", None)
        print(json.dumps({**wiring.names(), "source": wiring.source, "config": config, "modules": modules}), flush=True)
"""
LOADER = f"""{LOAD}
import osmosis_ai.rollout
for line in sys.stdin:
    if not (child := os.fork()):
        show(*json.loads(line))
        os._exit(0)
    os.waitpid(child, 0)
"""
Load = Callable[..., Any]


def in_python(code: str, *arguments: str) -> Any:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loader() -> Iterator[subprocess.Popen[str]]:
    """Forks for each rollout, so that the SDK is imported once."""
    command = [sys.executable, "-c", LOADER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def load(tmp_path: Path, loader: subprocess.Popen[str]) -> Load:
    def load(main: str, entrypoint: str = "main.py", **files: str) -> Any:
        assert loader.stdin is not None
        assert loader.stdout is not None
        folder = write_rollout(tmp_path / "rollout", main, **files)
        print(json.dumps([str(folder), entrypoint]), file=loader.stdin, flush=True)
        return json.loads(loader.stdout.readline())

    return load


def load_error(load: Load, main: str, **files: str) -> Any:
    error = load(main, **files)["error"]
    assert error["category"] == "validation_error"
    return error


def test_what_main_wires_is_taken_and_nothing_is_served(tmp_path: Path) -> None:
    folder = write_rollout(tmp_path, CLASSES + dedent(SERVE))
    assert in_python(f"{LOAD}\nshow({str(folder)!r}, 'main.py')") == {
        "sdk": "0.3.8",
        "generation": "0.3",
        "workflow": "W",
        "grader": "G",
        "source": "main",
        "config": "c",
        "modules": [],
    }


SERVERS = {
    "asyncio": """
        import asyncio, uvicorn
        from osmosis_ai.rollout.server import create_rollout_server
        async def main():
            app = create_rollout_server(backend=LocalBackend(workflow=W))
            await uvicorn.Server(uvicorn.Config(app, port=0)).serve()
        asyncio.run(main())
        raise AssertionError("served")
    """,
    "another server": """
        from http.server import HTTPServer, SimpleHTTPRequestHandler
        backend = LocalBackend(workflow=W)
        HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler).serve_forever()
    """,
    "module level, code after it": """
        from osmosis_ai.rollout.server import create_rollout_server
        app = create_rollout_server(backend=LocalBackend(workflow=W))
        @app.get("/extra")
        def extra(): ...
        app.state.ready = True
        def helper(): ...
    """,
    "references": """
        import uvicorn
        from osmosis_ai.rollout.server import create_rollout_server
        uvicorn.run(create_rollout_server(backend=LocalBackend(workflow="code:W", workflow_config="code:config")))
    """,
    "sys.exit at the end": """
        import sys
        LocalBackend(workflow=W)
        sys.exit(3)
    """,
    "the served one of two": """
        import uvicorn
        from osmosis_ai.rollout.server import create_rollout_server
        class Wrong(W): ...
        one, two = LocalBackend(workflow=Wrong), LocalBackend(workflow=W)
        uvicorn.run(create_rollout_server(backend=two))
    """,
    "a thread": """
        import threading, uvicorn
        from osmosis_ai.rollout.server import create_rollout_server
        app = create_rollout_server(backend=LocalBackend(workflow=W))
        thread = threading.Thread(target=uvicorn.run, args=(app,))
        thread.start()
        thread.join()
    """,
}


@pytest.mark.parametrize("main", SERVERS.values(), ids=SERVERS.keys())
def test_every_way_to_serve_is_stopped(load: Load, main: str) -> None:
    found = load(CLASSES + dedent(main), code=CLASSES + 'config = AgentWorkflowConfig(name="c")')
    assert (found["workflow"], found["source"]) == ("W", "main")


def test_harbor_wiring_needs_no_harbor(load: Load) -> None:
    main = """
        import uvicorn
        from pathlib import Path
        from harbor.models.environment_type import EnvironmentType
        from harbor.models.trial.config import EnvironmentConfig
        from harbor.trial.queue import TrialQueue
        from osmosis_ai.rollout.backend.harbor import HarborBackend, TaskMode
        from osmosis_ai.rollout.server import create_rollout_server
        backend = HarborBackend(
            orchestrator=TrialQueue(n_concurrent=8), tasks_dir=Path("tasks"), agent=W, grader="code:G",
            task_mode=TaskMode.TEMPLATE, environment_config=EnvironmentConfig(type=EnvironmentType.DOCKER),
        )
        app = create_rollout_server(backend=backend, lifespan=backend.prewarm_lifespan())
        uvicorn.run(app)
    """
    found = load(CLASSES + dedent(main), code=CLASSES)
    assert (found["workflow"], found["grader"], found["source"]) == ("W", "G", "main")


def test_harbors_own_agents_are_refused(load: Load) -> None:
    main = """
        from osmosis_ai.rollout.backend.harbor import HarborBackend
        HarborBackend(agent="terminus-2")
    """
    assert "'terminus-2'" in load_error(load, CLASSES + dedent(main))["message"]


def test_the_namespace_rule(load: Load) -> None:
    main = """
        from abc import abstractmethod
        class Base(AgentWorkflow):
            @abstractmethod
            def helper(self): ...
        Alias = W
        config = AgentWorkflowConfig(name="c")
    """
    found = load(CLASSES + dedent(main))
    assert (found["workflow"], found["grader"], found["config"], found["source"]) == ("W", "G", "c", "namespace")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "class V(AgentWorkflow):\n    async def run(self, ctx): ...",
            "Multiple AgentWorkflow subclasses found in 'main.py': V, W. Keep only one AgentWorkflow subclass in the "
            "entrypoint module, or move extra classes to a separate file.",
        ),
        ("del W", "No AgentWorkflow subclass found in 'main.py'"),
        (
            "a, b = GraderConfig(name='a'), GraderConfig(name='b')",
            "Multiple GraderConfig instances found in 'main.py': a, b. Keep only one GraderConfig instance in the "
            "entrypoint module, or move extra classes to a separate file.",
        ),
        ("b = LocalBackend(workflow=W), LocalBackend(workflow=W)", "main.py builds 2 backends and hands none"),
    ],
    ids=["two workflows", "none", "two configs", "two backends"],
)
def test_ambiguity_is_an_error(load: Load, more: str, message: str) -> None:
    assert load_error(load, f"{CLASSES}\n{more}\n")["message"].startswith(message)


def test_an_entry_point_that_is_not_there(load: Load) -> None:
    error = load("", "src/main.py")["error"]
    assert error["message"] == "Entrypoint file not found: src/main.py"


def test_a_syntax_error_says_where(load: Load) -> None:
    error = load_error(load, "x = 1\nclass (:\n")
    assert error["types"][0] == "SyntaxError"
    assert "main.py, line 2" in error["message"]


def test_a_missing_dependency_says_what_to_add(load: Load) -> None:
    error = load_error(load, "import tools", tools="import nonexistent.thing")
    assert error["message"] == (
        "main.py cannot be loaded: ModuleNotFoundError: No module named 'nonexistent' "
        "(add the package that provides 'nonexistent' to the dependencies in pyproject.toml)"
    )
    assert "tools.py" in error["traceback"]
    assert "harness/guest" not in error["traceback"]


def test_an_exit_at_import_is_an_error(load: Load) -> None:
    error = load_error(load, "import sys\nsys.exit('no key')\n")
    assert "sys.exit('no key')" in error["message"]


def test_an_exception_before_serving_is_an_error(load: Load) -> None:
    main = "LocalBackend(workflow=W)\nraise OSError('boom')"
    assert "boom" in load_error(load, CLASSES + main)["message"]


def test_uvicorn_is_itself_again_afterwards(tmp_path: Path) -> None:
    main = """
        import uvicorn
        class Late(AgentWorkflow):
            async def run(self, ctx): ...
            def late(self):
                import socket
                socket.create_server(("127.0.0.1", 0)).close()
                return uvicorn.Config(None).__class__.__module__, uvicorn.run
        LocalBackend(workflow=Late)
    """
    folder = write_rollout(tmp_path, CLASSES + dedent(main))
    code = f"""
import json, pathlib
from harness.guest.rollout import load
module, run = load(pathlib.Path({str(folder)!r}), "main.py").workflow().late()
try:
    run("no_such_module:app", port=0)
except SystemExit as exit:  # what uvicorn does when it cannot import the app
    print(json.dumps([module, exit.code != 0]))
"""
    assert in_python(code) == ["uvicorn.config", True]


RUNS = """
    import asyncio, datetime, enum, time
    from osmosis_ai.rollout import (
        AgentWorkflow, AgentWorkflowConfig, AgentWorkflowOutput, RolloutSample, SampleSource, get_rollout_context,
    )

    config = AgentWorkflowConfig(name="shared", seen=[])

    class Source(SampleSource):
        def __init__(self, sample):
            self.sample = sample
        async def get_sample(self):
            return self.sample

    class Odd:
        def __str__(self):
            raise RuntimeError("no text")

    class Colour(enum.Enum):
        RED = "red"

    def register(sample):
        get_rollout_context().set_sample_source(Source(sample))

    class W(AgentWorkflow):
        async def run(self, ctx):
            assert ctx.config is self.config and ctx.config is not config
            ctx.config.seen.append(1)
            assert len(ctx.config.seen) == 1
            return await getattr(self, ctx.metadata["case"])(ctx)

        async def returned_list(self, ctx):
            c = get_rollout_context()
            return [*ctx.prompt, {"url": c.chat_completions_url, "key": c.api_key, "id": c.rollout_id}]

        async def returned_output(self, ctx):
            return AgentWorkflowOutput(messages=[{"role": "a"}], metrics={"m": "1.5"})

        async def ambient(self, ctx):
            register(RolloutSample(messages=[{"role": "a"}], trajectory_messages=None, extra_fields={"e": {1: (1, 2)}}))

        async def nothing(self, ctx):
            return None

        async def wrong_type(self, ctx):
            return "text"

        def synchronous(self, ctx):
            return []

        async def raised(self, ctx):
            raise LookupError("lost")

        async def own_timeout(self, ctx):
            raise TimeoutError("the tool gave up")

        async def exits(self, ctx):
            raise SystemExit(7)

        async def hangs(self, ctx):
            await asyncio.sleep(60)

        async def late(self, ctx):
            time.sleep(0.7)
            return []

        async def swallows(self, ctx):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return []

        async def two_sources(self, ctx):
            register(RolloutSample())
            register(RolloutSample())

        async def not_a_sample(self, ctx):
            register(5)

        async def odd_values(self, ctx):
            loop = []
            loop.append(loop)
            return AgentWorkflowOutput(messages=[{
                "nan": float("nan"), "bytes": b"a\\xff", "date": datetime.date(2026, 1, 2), "enum": Colour.RED,
                "set": {1}, "odd": Odd(), "model": config, "surrogate": "\\ud800", "huge": 10 ** 5000,
                "keys": {3: 4, None: 5}, "loop": loop,
            }])

        async def odd_telemetry(self, ctx):
            sample = RolloutSample(messages=[])
            sample.metrics = {"nan": 1.0}
            sample.metrics.update(nan=float("nan"), good=True, odd=Odd())
            sample.metrics.update(nested=[1, float("inf"), {Colour.RED: 1, 2: 2}])
            register(sample)
"""
RUN = """
import asyncio, json, pathlib, sys
from harness.guest.rollout import load
from harness.guest.workflow import run_workflow
wiring = load(pathlib.Path(sys.argv[1]), "main.py")
results = {}
for case in [name for name in vars(wiring.workflow) if not name.startswith("_") and name != "run"]:
    run = run_workflow(wiring, prompt=[{"role": "user"}], metadata={"case": case}, artifacts_dir=None,
                       rollout_id="r/1", url="http://u", token="t", timeout_s=None if case == "nothing" else 0.5)
    results[case] = asyncio.run(run)
print(json.dumps(results, allow_nan=False))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return in_python(RUN, str(write_rollout(tmp_path_factory.mktemp("runs"), RUNS)))


def sample(result: Any) -> Any:
    assert result["how"] == "returned", result
    assert [entry["name"] for entry in result["samples"]] == [""]
    return result["samples"][0]["data"]


def test_a_returned_list_is_the_sample(runs: Any) -> None:
    result = runs["returned_list"]
    messages = [{"role": "user"}, {"url": "http://u", "key": "t", "id": "r/1"}]
    assert sample(result) == {
        "messages": messages,
        "trajectory_messages": messages,
        "label": None,
        "reward": None,
        "remove_sample": False,
        "metrics": {},
        "extra_fields": {},
    }
    assert result["labelled"] is True
    assert result["agent_s"] < 0.5


def test_a_returned_output_brings_its_metrics(runs: Any) -> None:
    assert sample(runs["returned_output"])["metrics"] == {"m": 1.5}


def test_without_a_return_the_registered_source_is_asked(runs: Any) -> None:
    data = sample(runs["ambient"])
    assert (data["messages"], data["trajectory_messages"]) == ([{"role": "a"}], None)
    assert data["extra_fields"] == {"e": {"1": [1, 2]}}
    assert runs["ambient"]["labelled"] is False
    assert runs["nothing"]["samples"] == []


@pytest.mark.parametrize(
    ("case", "kind", "category", "message"),
    [
        ("raised", "LookupError", "agent_error", "lost"),
        ("own_timeout", "TimeoutError", "timeout", "the tool gave up"),
        (
            "wrong_type",
            "TypeError",
            "validation_error",
            "run() must return AgentWorkflowOutput, a message list, or None; got str",
        ),
        ("synchronous", "TypeError", "validation_error", "object list can't be used in 'await' expression"),
        ("two_sources", "ValueError", "validation_error", "RolloutContext already has a sample source registered"),
        ("not_a_sample", "ValidationError", "validation_error", "1 validation error for ExecutionResult"),
    ],
)
def test_exceptions_are_reported_as_the_sdk_reports_them(
    runs: Any, case: str, kind: str, category: str, message: str
) -> None:
    result = runs[case]
    assert result["how"] == "raised"
    assert (result["error"]["types"][0], result["error"]["category"]) == (kind, category)
    assert result["error"]["message"].startswith(message)


def test_tracebacks_begin_in_the_users_code(runs: Any) -> None:
    lines = runs["raised"]["error"]["traceback"].splitlines()
    assert "main.py" in lines[1]
    assert lines[-1] == "LookupError: lost"


@pytest.mark.parametrize("case", ["hangs", "late", "swallows"])
def test_a_deadline_holds_however_late_the_workflow_returns(runs: Any, case: str) -> None:
    assert runs[case]["how"] == "timeout"
    assert runs[case]["error"]["message"] == "workflow exceeded its 0.5s deadline"
    assert runs[case]["error"]["category"] == "timeout"


def test_an_exit_is_an_exit(runs: Any) -> None:
    assert (runs["exits"]["how"], runs["exits"]["code"]) == ("exited", 7)


def test_messages_survive_values_that_json_does_not_know(runs: Any) -> None:
    (message,) = sample(runs["odd_values"])["messages"]
    assert message.pop("model")["name"] == "shared"
    assert message == {
        "nan": None,
        "bytes": "a\ufffd",
        "date": "2026-01-02",
        "enum": "red",
        "set": [1],
        "odd": "<Odd>",
        "surrogate": "?",
        "huge": None,
        "keys": {"3": 4, "None": 5},
        "loop": ["<nested too deeply>"],
    }


def test_telemetry_drops_what_json_does_not_know(runs: Any) -> None:
    assert sample(runs["odd_telemetry"])["metrics"] == {"good": True, "nested": [1, {"2": 2}]}
