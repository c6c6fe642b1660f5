"""The worked examples under the SDK alone: its loaders take their configs and data, its backend runs them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from osmosis_ai.eval.local.dataset import iter_raw_rows, normalize_row
from osmosis_ai.platform.cli.dataset import _validate_file
from osmosis_ai.platform.cli.eval_config import load_eval_submit_config
from osmosis_ai.platform.cli.rollout_entrypoint import load_rollout_entrypoint
from osmosis_ai.platform.cli.training_config import load_train_submit_config
from osmosis_ai.rollout import ExecutionRequest, ExecutionResult, LocalBackend, RolloutContext, RolloutStatus

from tests.support import leaks
from tests.support.policy import GIVEN_UP, Fault, Reply, ScriptedPolicy, shell_agent

ROOT = Path(__file__).parent.parent
NAMES = ["multiply", "shell-agent"]
Row = dict[str, Any]


def rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (ROOT / "data" / f"{name}.jsonl").read_text().splitlines()]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"example_{name.replace('-', '_')}", ROOT / f"rollouts/{name}/main.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def backend(name: str) -> LocalBackend:
    main = load(name)
    workflow, grader = next((w, g) for w, g in WIRED if hasattr(main, w))
    return LocalBackend(workflow=getattr(main, workflow), workflow_config=main.config, grader=getattr(main, grader))


WIRED = [("MultiplyWorkflow", "MultiplyGrader"), ("ShellWorkflow", "ShellGrader")]


async def run(policy: ScriptedPolicy, backend: LocalBackend, index: int, row: Row) -> ExecutionResult:
    prompt = [
        {"role": role, "content": row[f"{role}_prompt"]} for role in ("system", "user") if row.get(f"{role}_prompt")
    ]
    request = ExecutionRequest(
        id=f"row-{index}", prompt=prompt, label=row["ground_truth"], metadata=row.get("metadata")
    )
    with RolloutContext(chat_completions_url=policy.url, api_key="token", rollout_id=request.id):
        return (await backend.execute(request)).result


async def run_all(policy: ScriptedPolicy, name: str, chosen: list[Row]) -> list[ExecutionResult | None]:
    results: list[ExecutionResult | None] = [None] * len(chosen)
    shared = backend(name)

    async def one(index: int) -> None:
        results[index] = await run(policy, shared, index, chosen[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(chosen)):
            tasks.start_soon(one, index)
    return results


@pytest.fixture(autouse=True)
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("_OSMOSIS_ROLLOUT_ARTIFACT_ROOT", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_the_platform_takes_configs_data_and_entry_point(name: str) -> None:
    config = load_eval_submit_config(ROOT / f"configs/eval/{name}.toml")
    training = load_train_submit_config(ROOT / f"configs/training/{name}.toml")
    assert {config.experiment_dataset, training.experiment_dataset} == {name}
    assert _validate_file(ROOT / f"data/{name}.jsonl", "jsonl") == []
    load_rollout_entrypoint(ROOT / "rollouts" / config.experiment_rollout, config.experiment_entrypoint)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_a_prompt_and_a_label(name: str) -> None:
    path = ROOT / f"data/{name}.jsonl"
    normal = [normalize_row(raw, row_index=i, source_row_index=i) for i, raw in enumerate(iter_raw_rows(path, "jsonl"))]
    assert len(normal) >= 20
    assert all(row.label for row in normal)
    assert len({json.dumps(row.initial_messages) for row in normal}) == len(normal)


def test_no_label_of_shell_agent_is_in_what_the_sandbox_gets() -> None:
    for row in rows("shell-agent"):
        given = {key: value for key, value in row.items() if key != "ground_truth"}
        assert row["ground_truth"] not in json.dumps(given, ensure_ascii=False).replace("\\n", "\n")


@pytest.mark.anyio
async def test_multiply_scores_what_the_model_said(scripted_policy: ScriptedPolicy) -> None:
    chosen = rows("multiply")
    results = await run_all(scripted_policy, "multiply", chosen)
    calls = 0
    for row, result in zip(chosen, results, strict=True):
        assert result is not None
        assert result.status is RolloutStatus.SUCCESS
        assert result.sample is not None
        assert result.sample.reward == (1.0 if int(row["ground_truth"]) % 2 == 0 else 0.0)
        calls += int(result.sample.metrics["calls"])
    assert len(chosen) < calls == len(scripted_policy.requests)


@pytest.mark.anyio
async def test_multiply_reports_a_refusal(scripted_policy: ScriptedPolicy) -> None:
    scripted_policy.faults = [Fault("status", 400)]
    result = await run(scripted_policy, backend("multiply"), 0, rows("multiply")[0])
    assert result.status is RolloutStatus.FAILURE
    assert "policy answered 400: " in str(result.err_message)


@pytest.mark.anyio
async def test_shell_agent_scores_what_the_program_prints(scripted_policy: ScriptedPolicy, artifacts: Path) -> None:
    scripted_policy.script = shell_agent
    chosen = rows("shell-agent")
    results = await run_all(scripted_policy, "shell-agent", chosen)
    for index, (row, result) in enumerate(zip(chosen, results, strict=True)):
        assert result is not None
        assert result.status is RolloutStatus.SUCCESS, result.err_message
        assert result.sample is not None
        program = row["metadata"]["program"]
        assert (program, result.sample.reward) == (program, 0.0 if program in GIVEN_UP else 1.0)
        folder = artifacts / f"row-{index}/artifacts"
        assert sorted(path.name for path in folder.iterdir()) == ["output.txt", "program.py"]


def one_command(command: str) -> Reply:
    return Reply(tools=(("bash", {"command": command}),))


async def after(policy: ScriptedPolicy, *commands: str) -> tuple[ExecutionResult, list[str]]:
    """Run the first row's rollout with these commands, then no more; its result, and what the tool said."""
    replies = [*map(one_command, commands), Reply("That is all.")]
    policy.script = lambda body: replies.pop(0)
    result = await run(policy, backend("shell-agent"), 0, rows("shell-agent")[0])
    assert result.sample is not None
    return result, [str(m["content"]) for m in result.sample.messages if m["role"] == "tool"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("rm *", id="removed"),
        pytest.param("echo 'print(26.44' > mean.py", id="no-program"),
        pytest.param("rm mean.py && ln -s /dev/zero mean.py", id="a-device"),
        pytest.param("echo 26.44 > output.txt; exit 3", id="an-output-of-its-own"),
    ],
)
async def test_shell_agent_gives_nothing_for_a_trick(scripted_policy: ScriptedPolicy, command: str) -> None:
    result, _ = await after(scripted_policy, command)
    assert result.sample is not None
    assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, 0.0)


@pytest.mark.anyio
async def test_shell_agent_bounds_what_the_model_sees(scripted_policy: ScriptedPolicy) -> None:
    _, (flood, code, binary) = await after(
        scripted_policy, "yes | head -c 5000000", "echo no >&2; exit 3", r"printf '\xff\xfe'"
    )
    assert len(flood) < 9000
    assert "bytes left out" in flood
    assert code == "no\n\n[exit code 3]"
    assert binary.startswith("\ufffd\ufffd")


@pytest.mark.anyio
async def test_shell_agent_ends_what_a_command_started(scripted_policy: ScriptedPolicy) -> None:
    with leaks.nothing_left(leaks.children):
        _, (said,) = await after(scripted_policy, "sleep 300 & echo $!")
    assert said.split()[0].isdigit()


@pytest.mark.anyio
async def test_shell_agent_stops_at_its_limit(scripted_policy: ScriptedPolicy) -> None:
    scripted_policy.script = lambda body: one_command("true")
    result = await run(scripted_policy, backend("shell-agent"), 0, rows("shell-agent")[0])
    assert result.sample is not None
    assert result.sample.metrics["commands"] == 30
    assert len(scripted_policy.requests) == 30
