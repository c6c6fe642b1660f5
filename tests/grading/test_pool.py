"""Graders in real worker processes: what they can do to a trial, and what they cannot do to the next."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from harness.errors import EntryPointError
from harness.grading import GradeRequest, GradeResult, GraderInfo, GraderPool
from harness.models import Sample
from tests.sdk import PYTHON_0_3, worker_env, write_rollout

pytestmark = pytest.mark.anyio

MAIN = """
    import asyncio, os, subprocess, sys, time
    from pathlib import Path
    from osmosis_ai.rollout import AgentWorkflow, Grader, GraderConfig, LocalBackend, RolloutSample, get_rollout_context
    from osmosis_ai.rollout.server import create_rollout_server

    class W(AgentWorkflow):
        async def run(self, ctx): ...

    LOCK = asyncio.Lock()
    print("printed at import")

    class G(Grader):
        async def grade(self, ctx):
            self.config.grades.append(1)
            case = getattr(self, ctx.metadata["case"])
            if not ctx.metadata.get("sync"):
                await case(ctx)
            else:
                case(ctx)

        async def ok(self, ctx):
            assert ctx.label == "42" and ctx.project_path is None and get_rollout_context() is None
            ctx.sample.metrics["seen"] = len(ctx.sample.messages)
            ctx.set_reward(0.5)

        async def about(self, ctx):
            async with LOCK:
                ctx.sample.extra_fields.update(
                    pid=os.getpid(), grades=len(self.config.grades), env=dict(os.environ), cwd=os.getcwd(),
                    label=ctx.sample.label, before=ctx.sample.reward,
                    artifact=None if ctx.artifacts_dir is None else (ctx.artifacts_dir / "a.txt").read_text(),
                )
            ctx.set_reward(True)

        async def raises(self, ctx):
            print("before it raises")
            raise LookupError("no such answer")

        async def own_timeout(self, ctx):
            raise TimeoutError("the judge gave up")

        async def hangs(self, ctx):
            await asyncio.sleep(60)

        def blocks(self, ctx):
            print("blocking")
            time.sleep(60)

        def late(self, ctx):
            time.sleep(0.6)
            ctx.set_reward(1.0)

        async def exits(self, ctx):
            sys.exit(3)

        async def exits_in_a_task(self, ctx):
            asyncio.create_task(self.exits(ctx))
            await asyncio.sleep(60)

        async def aborts(self, ctx):
            os.abort()

        async def prints(self, ctx):
            print("first")
            for _ in range(10):
                sys.stdout.write("x" * (1 << 20))
            print("last")
            ctx.set_reward(1.0)

        async def nan(self, ctx):
            ctx.set_reward(float("nan"))

        async def smuggled(self, ctx):
            ctx.sample = RolloutSample.model_construct(reward=float("inf"), messages=[])

        async def nothing(self, ctx): ...

        async def removes(self, ctx):
            ctx.sample.reward = 1.0
            ctx.sample.remove_sample = True

        async def replaces(self, ctx):
            ctx.sample = RolloutSample(messages=[{"role": "new"}], reward=2)

        async def replaces_badly(self, ctx):
            ctx.sample = "text"

        async def daemon(self, ctx):
            subprocess.Popen(["sleep", "61"])
            subprocess.Popen(["sleep", "62"], start_new_session=True)
            ctx.set_reward(1.0)

        async def forks(self, ctx):
            if not os.fork():
                time.sleep(30)
            os.abort()

        async def garbage(self, ctx):
            for fd in range(3, 20):
                try:
                    os.write(fd, b"garbage that is no message")
                except OSError:
                    pass
            await asyncio.sleep(60)

    class S(G):
        def grade(self, ctx):
            ctx.set_reward(1.0)

    config = GraderConfig(name="g", grades=[])
    backend = LocalBackend(workflow=W, grader=G, grader_config=config)
    create_rollout_server(backend=backend)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollout(tmp_path_factory.mktemp("rollout"), MAIN)


@pytest.fixture
async def pool(folder: Path) -> AsyncIterator[GraderPool]:
    async with make_pool(folder) as pool:
        yield pool


def make_pool(folder: Path, *, python: Path = PYTHON_0_3, workers: int = 1, **env: str) -> GraderPool:
    return GraderPool(python, folder, "main.py", worker_env(**env), workers, grace_s=0.5)


def request(case: str, **more: Any) -> GradeRequest:
    data = {"messages": [{"role": "user"}, {"role": "assistant"}], "reward": 9.0, "trajectory_messages": None}
    metadata = {"case": case, "sync": case in ("blocks", "late")}
    given = {"label": "42", "metadata": metadata, "samples": [Sample(name="", data=data)], "timeout_s": 20.0, **more}
    return GradeRequest(rollout_id="r", **given)


def pid_of(result: GradeResult) -> int:
    assert result.failure is None, result
    return int(result.samples[0].data["extra_fields"]["pid"])


async def test_a_graded_sample_has_its_reward_and_all_the_rest(pool: GraderPool) -> None:
    assert await pool.check() == GraderInfo(workflow="W", grader="G", sdk="0.3.8", generation="0.3")
    result = await pool.grade(request("ok"))
    assert (result.reward, result.failure, result.remove_sample, result.log) == (0.5, None, False, "")
    assert result.samples[0].data == {
        "messages": [{"role": "user"}, {"role": "assistant"}],
        "trajectory_messages": None,
        "label": None,
        "reward": 0.5,
        "remove_sample": False,
        "metrics": {"seen": 2},
        "extra_fields": {},
    }
    assert 0 < result.seconds < 20


async def test_a_worker_stays_warm_and_sees_only_its_own_environment(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("from the sandbox")
    async with make_pool(folder, MINE="1") as pool:
        first = await pool.grade(request("about", labelled=True, artifacts_dir=tmp_path))
        second = await pool.grade(request("about"))
    seen = [result.samples[0].data["extra_fields"] for result in (first, second)]
    assert first.reward == 1.0
    assert seen[0]["pid"] == seen[1]["pid"]
    assert [fields["grades"] for fields in seen] == [1, 2]  # one config object for all, as on the platform
    assert set(seen[0]["env"]) - {"LC_CTYPE"} == set(worker_env(MINE="1"))
    assert seen[0]["cwd"] == str(folder)
    assert (seen[0]["label"], seen[1]["label"]) == ("42", None)
    assert seen[0]["before"] is None  # a reward that comes out of a sandbox counts for nothing
    assert (seen[0]["artifact"], seen[1]["artifact"]) == ("from the sandbox", None)


FAILURES = [
    ("raises", "LookupError", "agent_error", "no such answer", True),
    ("own_timeout", "TimeoutError", "timeout", "the judge gave up", True),
    ("late", "TimeoutError", "timeout", "grader exceeded its 0.5s deadline", True),
    ("hangs", "TimeoutError", "timeout", "grader exceeded its 0.5s deadline", True),
    ("blocks", "TimeoutError", "timeout", "grader exceeded its 0.5s deadline", False),
    ("exits", "SystemExit", "agent_error", "grader called sys.exit(3)", False),
    ("exits_in_a_task", "GraderCrashed", "agent_error", "the grader's process exited with status 3", False),
    ("aborts", "GraderCrashed", "agent_error", "the grader's process was killed by SIGABRT", False),
    ("forks", "GraderCrashed", "agent_error", "the grader's process was killed by SIGABRT", False),
    ("garbage", "GraderCrashed", "agent_error", "the grader's process gave no valid answer", False),
    ("nan", "ValidationError", "validation_error", "1 validation error for RolloutSample", True),
    ("smuggled", "ValueError", "validation_error", "Sample has the reward inf, which is not a finite number", True),
    ("nothing", "ValueError", "validation_error", "Sample has no reward after grading", True),
    ("replaces_badly", "AttributeError", "agent_error", "'str' object has no attribute 'remove_sample'", True),
]


async def test_a_failure_costs_its_own_trial_only(folder: Path) -> None:
    async with make_pool(folder) as pool:
        before = pid_of(await pool.grade(request("about")))
        for case, kind, category, message, survives in FAILURES:
            timeout = 0.5 if category == "timeout" else 20.0
            result = await pool.grade(request(case, timeout_s=timeout, labelled=True))
            assert result.failure is not None, case
            assert result.failure.party == "grader"
            assert (result.failure.kind, result.failure.category) == (kind, category), case
            assert result.failure.message.startswith(message), case
            assert (result.reward, result.samples[0].data["reward"]) == (None, None)
            assert result.samples[0].data["label"] == "42"
            assert len(result.samples[0].data["messages"]) == 2
            after = pid_of(await pool.grade(request("about")))
            assert (after == before) is survives, case
            before = after


async def test_what_a_grader_printed_is_in_the_log_of_its_trial(pool: GraderPool) -> None:
    result = await pool.grade(request("raises"))
    assert result.log.startswith("before it raises\nTraceback")
    assert "printed at import" not in result.log
    assert result.failure is not None
    assert "main.py" in result.failure.traceback
    assert "worker.py" not in result.failure.traceback
    killed = await pool.grade(request("blocks", timeout_s=0.2))
    assert killed.log == "blocking\n"
    assert (await pool.grade(request("about"))).log == ""


async def test_a_flood_of_output_is_cut_in_the_middle(pool: GraderPool) -> None:
    result = await pool.grade(request("prints"))
    assert result.reward == 1.0
    assert result.log.startswith("first\nxxx")
    assert result.log.endswith("xxxlast\n")
    assert "bytes left out" in result.log
    assert len(result.log) < 70_000


async def test_removed_and_replaced_samples(pool: GraderPool) -> None:
    removed = await pool.grade(request("removes"))
    assert (removed.failure, removed.remove_sample, removed.reward) == (None, True, None)
    assert removed.samples[0].data["reward"] is None
    replaced = await pool.grade(request("replaces"))
    assert (replaced.reward, replaced.samples[0].data["messages"]) == (2.0, [{"role": "new"}])


async def test_no_sample_is_a_failure_and_one_that_is_none_is_the_workflows(pool: GraderPool) -> None:
    result = await pool.grade(request("nothing", samples=[]))
    assert result.failure is not None
    assert result.failure.message.startswith("No sample to grade.")
    result = await pool.grade(request("ok", samples=[Sample(name="", data={"messages": 5})]))
    assert result.failure is not None
    assert (result.failure.party, result.failure.kind) == ("rollout", "ValidationError")


async def test_without_label_and_metadata_nothing_is_graded(pool: GraderPool) -> None:
    result = await pool.grade(request("ok", label=None, metadata=None))
    assert result.failure is not None
    assert result.failure.kind == "NotGraded"


async def test_a_process_that_a_grader_leaves_neither_blocks_nor_outlives_the_pool(folder: Path) -> None:
    async with make_pool(folder) as pool:
        worker = pid_of(await pool.grade(request("about")))
        assert (await pool.grade(request("daemon"))).reward == 1.0
        assert (await pool.grade(request("ok"))).reward == 0.5
        sleeping = processes("sleep\0" + "61\0")
        assert len(sleeping) == 1
    assert gone(worker)
    assert processes("sleep\0" + "61\0") == []
    for pid in processes("sleep\0" + "62\0"):  # in a session of its own: out of reach
        os.kill(pid, signal.SIGKILL)


def state(pid: int | str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def gone(pid: int) -> bool:
    """Dead, and perhaps not yet buried; its threads too, which may hold its descriptors a moment longer."""
    return state(pid) == "gone" or (state(pid) == "Z" and len(list(Path(f"/proc/{pid}/task").glob("*"))) <= 1)


async def until_gone(pid: int) -> None:
    while not gone(pid):  # nothing tells when another's child ends
        await anyio.sleep(0.02)


def processes(command: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_text() == command and state(folder.name) != "Z":
                found.append(int(folder.name))
        except OSError:
            continue
    return found


async def test_workers_grade_side_by_side(folder: Path) -> None:
    results: list[GradeResult] = []

    async def grade(pool: GraderPool) -> None:
        results.append(await pool.grade(request("about")))

    async with make_pool(folder, workers=2) as pool, anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(grade, pool)
    assert len({pid_of(result) for result in results}) == 2


async def test_a_cancelled_grading_kills_its_worker(folder: Path) -> None:
    async with make_pool(folder) as pool:
        before = pid_of(await pool.grade(request("about")))
        with anyio.move_on_after(0.3) as scope:
            await pool.grade(request("blocks"))
        assert scope.cancelled_caught
        assert gone(before)
        assert (await pool.grade(request("ok"))).reward == 0.5


async def test_a_worker_that_died_idle_is_replaced(folder: Path) -> None:
    async with make_pool(folder) as pool:
        before = pid_of(await pool.grade(request("about")))
        os.kill(before, signal.SIGKILL)
        with anyio.fail_after(5):
            await until_gone(before)
        assert (await pool.grade(request("ok"))).reward == 0.5


@pytest.mark.parametrize(
    ("main", "message"),
    [
        ("import nonexistent", "main.py cannot be loaded: ModuleNotFoundError: No module named 'nonexistent' (add"),
        ("x = 1", "No AgentWorkflow subclass found in 'main.py'"),
        (
            "import os\nprint('why')\nos._exit(4)",
            "main.py cannot be loaded in the host: its process exited with status 4",
        ),
    ],
    ids=["dependency", "no workflow", "exit"],
)
async def test_an_entry_point_that_cannot_be_loaded_is_reported_not_retried(
    tmp_path: Path, main: str, message: str
) -> None:
    async with make_pool(write_rollout(tmp_path, main)) as pool:
        with pytest.raises(EntryPointError) as caught:
            await pool.check()
        assert caught.value.message.startswith(message)
        assert caught.value.hint == ("why" if "why" in main else "")
        result = await pool.grade(request("ok"))
        assert result.failure is not None
        assert (result.failure.kind, result.failure.party) == ("EntryPointError", "grader")


async def test_no_python_is_a_failure(folder: Path, tmp_path: Path) -> None:
    async with make_pool(folder, python=tmp_path / "python") as pool:
        result = await pool.grade(request("ok"))
    assert result.failure is not None
    assert "cannot be started" in result.failure.message


async def test_a_rollout_without_a_grader(tmp_path: Path) -> None:
    main = """
        from osmosis_ai.rollout import AgentWorkflow
        class W(AgentWorkflow):
            async def run(self, ctx): ...
    """
    async with make_pool(write_rollout(tmp_path, main)) as pool:
        assert (await pool.check()).grader is None
        result = await pool.grade(request("ok"))
    assert result.failure is not None
    assert result.failure.kind == "NotGraded"


async def test_a_synchronous_grader_fails_as_on_the_platform(tmp_path: Path) -> None:
    async with make_pool(write_rollout(tmp_path, MAIN.replace("grader=G,", "grader=S,"))) as pool:
        result = await pool.grade(request("ok"))
    assert result.failure is not None
    assert result.failure.message == "object NoneType can't be used in 'await' expression"


async def test_workers_die_with_the_harness(folder: Path) -> None:
    host = f"""
import anyio, os, pathlib, signal, sys
from tests.grading.test_pool import make_pool, request, pid_of
async def main():
    async with make_pool(pathlib.Path({str(folder)!r})) as pool:
        print(pid_of(await pool.grade(request("about"))), flush=True)
        async with anyio.create_task_group() as group:
            group.start_soon(pool.grade, request("blocks", timeout_s=60))
            await anyio.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
anyio.run(main)
"""
    done = await anyio.run_process([sys.executable, "-c", host], check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout)
    with anyio.fail_after(10):
        await until_gone(worker)


MAIN_0_2 = """
    from osmosis_ai.rollout.agent_workflow import AgentWorkflow
    from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext
    from osmosis_ai.rollout.grader import Grader

    class W(AgentWorkflow):
        async def run(self, ctx: AgentWorkflowContext): ...

    class G(Grader):
        async def grade(self, ctx: GraderContext):
            for name, reward in ctx.metadata["rewards"].items():
                ctx.set_sample_reward(name, float("nan") if reward == "nan" else reward)
            for name in ctx.metadata.get("removed", ()):
                ctx.get_samples()[name].remove_sample = True
"""


async def test_several_samples_of_the_older_sdk(tmp_path: Path, python_0_2: Path) -> None:
    samples = [Sample(name=name, data={"id": name, "messages": [], "reward": None}) for name in "ab"]

    def graded(rewards: dict[str, Any], *removed: str) -> GradeRequest:
        return request("", metadata={"rewards": rewards, "removed": removed}, samples=samples)

    async with make_pool(write_rollout(tmp_path, MAIN_0_2), python=python_0_2) as pool:
        info = await pool.check()
        assert (info.generation, info.sdk, info.grader) == ("0.2", "0.2.31", "G")
        both = await pool.grade(graded({"a": 1.0, "b": "0.5"}))
        assert (both.reward, [sample.data["reward"] for sample in both.samples]) == (0.75, [1.0, 0.5])
        one = await pool.grade(graded({"a": 1.0}, "b"))
        assert (one.reward, one.remove_sample) == (1.0, False)
        none = await pool.grade(graded({}, "a", "b"))
        assert (none.reward, none.remove_sample) == (None, True)
        failures: list[tuple[dict[str, Any], str]] = [
            ({"a": 1.0}, "Sample b has no reward after grading"),
            ({"a": 1.0, "b": "nan"}, "Sample b has the reward nan, which is not a finite number"),
            ({"c": 1.0}, "Sample c not found"),
        ]
        for rewards, message in failures:
            result = await pool.grade(graded(rewards))
            assert result.failure is not None
            assert (result.failure.message, result.failure.category) == (message, "validation_error")
            assert [sample.data["reward"] for sample in result.samples] == [None, None]
