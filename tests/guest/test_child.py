"""The forked child, under a supervisor that is only a fork: isolated, without ``site``, one socket."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any, Self

import pytest
from uv import find_uv_bin

import harness.guest
from harness.guest import control
from tests.sdk import PYTHON_0_3, write_rollout

SUPERVISOR = """
import json, os, socket, sys
lib, fd, load, root = sys.argv[1:]
sys.path.insert(0, lib)
from harness_guest import child
connection = socket.socket(fileno=int(fd))
connection.set_inheritable(False)
if not (pid := os.fork()):
    os.setsid()
    child.main(connection, json.loads(load), root, 4242)
connection.close()
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
"""
WORKFLOW = """
    import asyncio, json, os, sys, threading, time
    from pathlib import Path
    from osmosis_ai.rollout import AgentWorkflow, get_rollout_context

    class W(AgentWorkflow):
        async def run(self, ctx):
            return await globals()[ctx.prompt[0]["content"]](ctx)
"""


class Child:
    def __init__(self, python: Path, root: Path, lib: Path, load: dict[str, Any]) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(60)
        command = [
            str(python),
            "-I",
            "-S",
            "-c",
            SUPERVISOR,
            str(lib),
            str(theirs.fileno()),
            json.dumps(load),
            str(root),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={"HOST_ONLY": "x"},
        )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.process.kill()
        self.process.communicate()

    def receive(self) -> dict[str, Any]:
        message = control.receive(self.connection)
        assert message is not None, self.process.communicate()
        return message

    def run(self, content: str, timeout_s: float | None = 30.0) -> dict[str, Any]:
        assert (loaded := self.receive())["ok"], loaded
        message = {"type": "run", "rollout_id": "ns::a b", "prompt": [{"content": content}], "metadata": {"k": 1}}
        self.connection.sendall(control.encode({**message, "timeout_s": timeout_s}))
        ended = self.receive()
        assert ended["type"] == "ended"
        return ended

    def output(self) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=30)
        return out.decode(), err.decode()


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    shutil.copytree(Path(harness.guest.__file__).parent, tmp_path / "lib" / "harness_guest")
    return tmp_path / "lib"


class Start:
    def __init__(self, root: Path, lib: Path) -> None:
        self.root = root
        self.lib = lib
        self.children: list[Child] = []

    def __call__(
        self, main: str, *, python: Path = PYTHON_0_3, load: dict[str, Any] | None = None, **files: str
    ) -> Child:
        write_rollout(self.root / "rollout", main, **files)
        message = {"type": "load", "entrypoint": "main.py", "env": {"MINE": "1"}, "token": "secret", **(load or {})}
        child = Child(python, self.root, self.lib, message)
        self.children.append(child)
        return child


@pytest.fixture
def start(tmp_path: Path, lib: Path) -> Iterator[Start]:
    start = Start(tmp_path / "sandbox", lib)
    yield start
    for child in start.children:
        child.__exit__()


def workflow(body: str) -> str:
    return dedent(WORKFLOW) + dedent(body)


def messages(ended: dict[str, Any]) -> Any:
    assert ended["how"] == "returned", ended
    return ended["samples"][0]["data"]["messages"]


def test_the_child_sees_what_a_rollout_should_see(start: Start) -> None:
    main = workflow("""
        import helper, nested
        AT_IMPORT = dict(os.environ)
        async def look(ctx):
            await asyncio.to_thread((ctx.artifacts_dir / "made.txt").write_text, "x")
            print("hello")
            print("caf\\u00e9 \\ud800", file=sys.stderr)
            c = get_rollout_context()
            return [{
                "env": dict(os.environ), "at_import": AT_IMPORT, "path": sys.path, "cwd": os.getcwd(), "argv": sys.argv,
                "prefix": [sys.prefix, sys.base_prefix], "name": __name__, "module": type(ctx).__module__,
                "dumpable": os.access("/proc/self/environ", os.R_OK), "debug": asyncio.get_running_loop().get_debug(),
                "oom": Path("/proc/self/oom_score_adj").read_text(), "stdin": sys.stdin.read(),
                "context": [c.chat_completions_url, c.api_key, c.rollout_id], "metadata": ctx.metadata,
            }]
    """)
    (start.root / "rollout" / "src").mkdir(parents=True)
    (start.root / "rollout" / "src" / "nested.py").touch()
    with start(main, helper="", load={"proxy": True}) as child:
        (seen,) = messages(child.run("look"))
        out, err = child.output()
        assert child.process.returncode == 0
    root, url = str(start.root), "http://127.0.0.1:4242/v1"
    prefix = str(PYTHON_0_3.parent.parent)
    env = seen["env"]
    assert "HOST_ONLY" not in env
    assert env["MINE"] == "1"
    assert env["PATH"].startswith(f"{prefix}/bin:")
    assert (env["VIRTUAL_ENV"], env["HOME"], env["TMPDIR"]) == (prefix, f"{root}/home", "/tmp")
    assert (env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"], env["OSMOSIS_API_KEY"]) == (url, "secret", "secret")
    assert (env["LITELLM_LOCAL_MODEL_COST_MAP"], env["OPENAI_AGENTS_DISABLE_TRACING"]) == ("True", "1")
    assert (env["HTTPS_PROXY"], env["NO_PROXY"]) == ("http://127.0.0.1:4242", "127.0.0.1,localhost")
    assert env["OSMOSIS_CHAT_COMPLETIONS_URL"] == f"{url}/rollouts/ns%3A%3Aa%20b"
    assert env["OSMOSIS_ROLLOUT_ID"] == "ns::a b"
    assert not [name for name in env if name.startswith("_OSMOSIS")]
    assert "OSMOSIS_ROLLOUT_ID" not in seen["at_import"]
    assert seen["context"] == [f"{url}/rollouts/ns%3A%3Aa%20b", "secret", "ns::a b"]
    assert seen["path"][:2] == [f"{root}/rollout", f"{root}/rollout/src"]
    assert str(start.lib) not in seen["path"]
    assert (seen["cwd"], seen["argv"]) == (f"{root}/rollout", [f"{root}/rollout/main.py"])
    assert seen["prefix"] == [sys.prefix, sys.base_prefix]
    assert (seen["name"], seen["metadata"], seen["stdin"]) == ("__main__", {"k": 1}, "")
    assert (seen["dumpable"], seen["debug"], seen["oom"].strip()) == (True, False, "1000")
    assert (start.root / "artifacts" / "made.txt").read_text() == "x"
    assert (out, err) == ("hello\n", "café \\ud800\n")


PYTHONS = ["3.12", "3.13", "3.14"]


@pytest.mark.parametrize("version", PYTHONS)
def test_a_venv_of_each_python_is_a_real_one(start: Start, tmp_path: Path, version: str) -> None:
    uv = find_uv_bin()
    make = [uv, "venv", "-q", "--no-python-downloads", "--python", version, str(tmp_path / "venv")]
    if subprocess.run(make, capture_output=True, check=False).returncode:
        pytest.skip(f"no Python {version} here")
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "linked.pth").write_text(f"{tmp_path}/linked\nimport sys; sys.from_pth = True\n")
    write_rollout(tmp_path / "linked", "", thing="VALUE = 5")
    main = """
        import json, sys, subprocess, site, sysconfig, multiprocessing, thing
        def there(queue):
            import thing
            queue.put([sys.prefix, thing.VALUE])
        if __name__ == "__main__":
            queue = multiprocessing.get_context("spawn").SimpleQueue()
            process = multiprocessing.get_context("spawn").Process(target=there, args=(queue,))
            process.start()
            process.join()
            command = [sys.executable, "-c", "import sys; print(sys.prefix)"]
            other = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            print(json.dumps([
                [sys.prefix, sys.exec_prefix, sysconfig.get_path("data"), other], sys.prefix != sys.base_prefix,
                queue.get(), sys.from_pth, site.ENABLE_USER_SITE, sys.flags.isolated, sys.flags.no_site,
            ]))
    """
    with start(main, python=python) as child:
        loaded = child.receive()  # there is no SDK, which is said only after main.py ran
        out, _ = child.output()
    venv = str(tmp_path / "venv")
    assert json.loads(out) == [[venv] * 4, True, [venv, 5], True, False, 0, 0]
    assert loaded["ok"] is False
    assert loaded["error"]["message"] == "main.py cannot be loaded: osmosis-ai is not among the rollout's dependencies"


def test_a_rollout_that_cannot_be_loaded_says_why(start: Start) -> None:
    with start("import sys\nprint('loading')\nraise ValueError('no key')") as child:
        loaded = child.receive()
        assert (loaded["type"], loaded["ok"], loaded["sdk"]) == ("loaded", False, "")
        assert loaded["error"]["message"] == "main.py cannot be loaded: ValueError: no key"
        assert child.output()[0] == "loading\n"


ENDS = workflow("""
    class Odd(BaseException): ...
    async def exits(ctx): sys.exit("bye")
    async def exits_in_a_task(ctx):
        asyncio.get_running_loop().create_task(exits(ctx))
        await asyncio.sleep(30)
    async def interrupt(ctx): raise KeyboardInterrupt
    async def odd(ctx): raise Odd("odd")
    async def leftovers(ctx):
        threading.Thread(target=time.sleep, args=(60,)).start()
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
        async def stubborn():
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass
        ctx.task = asyncio.create_task(stubborn())
        sys.stdout.write("unfinished line")
        return [{"role": "done"}]
    async def fat_trajectory(ctx):
        return [{"role": "x" * (40 << 20)}]
    async def fat(ctx):
        return [{"role": "x" * (70 << 20)}]
    async def hangs(ctx): time.sleep(1)
    async def breaks_streams(ctx):
        sys.stdout.close()
        sys.stderr = None
        raise ValueError("unheard")
    async def forks(ctx):
        if not os.fork():
            sys.exit(9)
        os.wait()
        return [{"role": "parent"}]
    async def crashes(ctx): os.abort()
""")


def test_leftover_threads_and_tasks_keep_nothing_alive(start: Start) -> None:
    with start(ENDS) as child:
        assert messages(child.run("leftovers")) == [{"role": "done"}]
        assert child.output()[0] == "unfinished line"
        assert child.process.returncode == 0


def test_a_forked_process_does_not_speak_for_the_rollout(start: Start) -> None:
    with start(ENDS) as child:
        assert messages(child.run("forks")) == [{"role": "parent"}]


@pytest.mark.parametrize(
    ("content", "how", "detail"),
    [
        ("exits", "exited", 1),
        ("exits_in_a_task", "exited", 1),
        ("interrupt", "raised", "KeyboardInterrupt"),
        ("odd", "raised", "Odd"),
        ("breaks_streams", "raised", "ValueError"),
        ("hangs", "timeout", "TimeoutError"),
    ],
)
def test_every_end_is_reported(start: Start, content: str, how: str, detail: object) -> None:
    with start(ENDS) as child:
        ended = child.run(content, 0.5 if content == "hangs" else 30.0)
        child.output()
    assert ended["how"] == how
    assert (ended["code"] if how == "exited" else ended["error"]["types"][0]) == detail


def test_a_crash_leaves_a_traceback_on_stderr(start: Start) -> None:
    with start(ENDS) as child:
        with pytest.raises(AssertionError):
            child.run("crashes")
        assert child.process.returncode == 250  # -SIGABRT


def test_a_sample_too_large_loses_its_trajectory_first(start: Start) -> None:
    with start(ENDS) as child:
        data = child.run("fat_trajectory")["samples"][0]["data"]
        assert len(data["messages"][0]["role"]) == 40 << 20
        assert data["trajectory_messages"] is None


def test_a_sample_too_large_is_a_failure(start: Start) -> None:
    with start(ENDS) as child:
        ended = child.run("fat")
    assert ended["how"] == "raised"
    assert ended["error"]["category"] == "validation_error"
    assert "too large" in ended["error"]["message"]
    assert ended["samples"][0]["data"]["messages"] == []


def test_the_child_ends_with_its_supervisor(start: Start) -> None:
    with start(workflow("async def never(ctx): ...")) as child:
        assert child.receive()["ok"]
        child.connection.shutdown(socket.SHUT_RDWR)
        assert child.process.wait(30) == 0


def test_several_samples_of_the_older_sdk(start: Start, python_0_2: Path) -> None:
    main = """
        import os, sys, uvicorn
        from osmosis_ai.rollout.agent_workflow import AgentWorkflow
        from osmosis_ai.rollout.backend.local import LocalBackend
        from osmosis_ai.rollout.context import SampleSource, get_rollout_context
        from osmosis_ai.rollout.server import create_rollout_server
        from osmosis_ai.rollout.types import RolloutSample

        class Source(SampleSource):
            async def get_sample(self, name):
                return RolloutSample(id=name, messages=[{"role": name, "fastapi": "fastapi" in sys.modules}])

        class W(AgentWorkflow):
            async def run(self, ctx):
                get_rollout_context().register_sample_source("a", Source())
                get_rollout_context().register_sample_source("b", Source())
                return 5

        if __name__ == "__main__":
            app = create_rollout_server(backend=LocalBackend(workflow=W))
            uvicorn.run(app, port=int(os.environ["_OSMOSIS_ROLLOUT_PORT"]))
    """
    with start(main, python=python_0_2) as child:
        ended = child.run("")
    assert ended["labelled"] is False
    assert [sample["name"] for sample in ended["samples"]] == ["a", "b"]
    assert [sample["data"]["id"] for sample in ended["samples"]] == ["a", "b"]
    assert ended["samples"][1]["data"]["messages"] == [{"role": "b", "fastapi": False}]
