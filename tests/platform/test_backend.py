"""``SandboxBackend`` behind the SDK's own server: what ``LocalBackend`` answers, it answers, from a sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from osmosis_ai.rollout.client.client import RolloutClient

from harness.rollout.source import Rollout
from tests.platform.support import (
    body,
    local_backend,
    result,
    sandbox_backend,
    serve,
    statuses,
    submit,
    write_rollout,
)
from tests.support.policy import ScriptedPolicy
from tests.support.policy import serve as serve_policy

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
LOCAL = pytest.param("local", marks=pytest.mark.namespaces)
DOCKER = pytest.param("docker", marks=pytest.mark.docker)


@pytest.fixture
def rollout(tmp_path: Path) -> Rollout:
    return write_rollout(tmp_path / "ws")


SAME: dict[str, dict[str, Any]] = {
    "graded": {},
    "no grading asked for": {"grade": False},
    "neither label nor metadata": {"label": None},
    "metadata alone": {"label": None, "metadata": {"grade": "yes"}, "said": "metadata"},
    "empty metadata": {"label": None, "metadata": {}, "said": "metadata"},
    "no prompt": {"initial_messages": []},
    "ambient sample": {"said": "source hello"},
    "ambient sample, ungraded": {"said": "source hello", "grade": False},
    "no trajectory": {"said": "hidden"},
    "no sample": {"said": "none"},
    "no sample, ungraded": {"said": "none", "grade": False},
    "two sources": {"said": "twice"},
    "wrong return type": {"said": "number"},
    "infinite metric": {"said": "infinite"},
    "ValueError": {"said": "raise ValueError"},
    "KeyError": {"said": "raise KeyError"},
    "its own TimeoutError": {"said": "raise TimeoutError"},
    "its own exception": {"said": "raise Stubborn"},
    "too slow": {"said": "sleep 30", "agent_timeout_sec": 0.5},
    "swallows the cancellation": {"said": "swallow 30", "agent_timeout_sec": 0.5},
    "blocks the loop": {"said": "block 0.8", "agent_timeout_sec": 0.5},
    "expired before it began": {"said": "sleep 1", "agent_timeout_sec": 0},
    "negative time": {"said": "sleep 1", "agent_timeout_sec": -3},
    "grader raises": {"label": "raise"},
    "grader raises ValueError": {"label": "value"},
    "grader is too slow": {"label": "sleep 30", "grader_timeout_sec": 0.5},
    "NaN": {"label": "nan"},
    "no reward": {"label": "nothing"},
    "removed": {"label": "remove"},
    "numeric text": {"label": "text"},
    "replaced sample": {"label": "replace"},
}


def requests() -> list[dict[str, Any]]:
    return [body(f"r{i}", fields.get("said", "ok")) | {k: v for k, v in fields.items() if k != "said"}
            for i, fields in enumerate(SAME.values())]  # fmt: skip


async def answers(url: str) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    limit = anyio.Semaphore(2)

    async def one(http: httpx.AsyncClient, request: dict[str, Any]) -> None:
        async with limit:
            found[request["rollout_id"]] = await result(http, request)

    async with httpx.AsyncClient(base_url=url, timeout=60) as http, anyio.create_task_group() as tasks:
        for request in requests():
            tasks.start_soon(one, http, request)
    return [found[f"r{i}"] for i in range(len(SAME))]


@pytest.mark.namespaces
async def test_every_result_equals_that_of_the_local_backend(
    rollout: Rollout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_OSMOSIS_ROLLOUT_ARTIFACT_ROOT", str(tmp_path / "theirs"))
    async with serve(local_backend(rollout)) as url:
        theirs = await answers(url)
    monkeypatch.setenv("_OSMOSIS_ROLLOUT_ARTIFACT_ROOT", str(tmp_path / "ours"))
    async with serve(sandbox_backend(rollout)) as url:
        ours = await answers(url)
    assert dict(zip(SAME, ours, strict=True)) == dict(zip(SAME, theirs, strict=True))

    def transcripts(root: Path) -> dict[str, Any]:
        return {
            path.parent.name: json.loads(path.read_text().replace(str(root), ""))["steps"]
            for path in root.glob("*/trajectory.json")
        }

    assert transcripts(tmp_path / "ours") == transcripts(tmp_path / "theirs")


@pytest.mark.namespaces
async def test_statuses_come_in_order_and_files_lie_where_the_platform_collects(
    rollout: Rollout, artifact_root: Path, scripted_policy: ScriptedPolicy
) -> None:
    rollout_id = "ns::a b é"
    request = body(
        rollout_id,
        "artifact 7",
        label="artifact",
        extra_fields={"row_index": 3},
        chat_completions_url=scripted_policy.url,
    )
    backend = sandbox_backend(rollout)
    async with serve(backend) as url, httpx.AsyncClient(base_url=url) as http:
        seen, final = await statuses(http, rollout_id, await submit(http, request))
        assert seen == [each for each in ("queued", "running", "grading", "success") if each in seen]
        assert seen[-2:] == ["grading", "success"]
        asked = await result(
            http, body("asks", "ask 6 * 7", chat_completions_url=scripted_policy.url, llm_api_key="k" * 9)
        )
    assert final["sample"]["reward"] == 1.0
    folder = artifact_root / rollout_id
    assert (folder / "artifacts/deep/file.txt").read_text() == "7"
    assert (folder / "artifacts/judged.txt").read_text() == "judged 7"
    assert not (folder / "artifacts/link").is_symlink()
    trajectory = json.loads((folder / "trajectory.json").read_text())
    assert trajectory["extra"]["osmosis"]["rollout_id"] == rollout_id
    assert trajectory["extra"]["osmosis"]["request_extra_fields"] == {"row_index": 3}
    diagnostics = json.loads((folder / "diagnostics.json").read_text())
    assert diagnostics["timings_sec"]["agent_s"] > 0
    assert any("link" in warning for warning in diagnostics["warnings"])
    assert "42" in asked["sample"]["messages"][-1]["content"]
    assert len((artifact_root / "asks/calls.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("sandbox", [LOCAL, DOCKER])
async def test_each_rollout_calls_its_own_endpoint_with_its_own_key(rollout: Rollout, sandbox: str) -> None:
    async with (
        serve_policy(key="first-key-aaaa") as first,
        serve_policy(key="other-key-bbbb") as other,
        serve(sandbox_backend(rollout, sandbox)) as url,
        httpx.AsyncClient(base_url=url, timeout=90) as http,
    ):
        health = (await http.get("/health")).json()
        assert health["chat_endpoint"] == {"environment": sandbox, "requires_public_url": False}
        found: dict[str, dict[str, Any]] = {}

        async def one(name: str, policy: ScriptedPolicy, key: str) -> None:
            found[name] = await result(http, body(name, "ask 3 * 4", chat_completions_url=policy.url, llm_api_key=key))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "a", first, "first-key-aaaa")
            tasks.start_soon(one, "b", other, "other-key-bbbb")
            tasks.start_soon(one, "c", other, "first-key-aaaa")
    assert [found[name]["status"] for name in "abc"] == ["success", "success", "failure"]
    assert found["c"]["err_category"] == "agent_error"
    assert "401" in found["c"]["err_message"]
    assert "first-key-aaaa" not in json.dumps(found)


@pytest.mark.parametrize("sandbox", [LOCAL, DOCKER])
async def test_the_sdk_client_drives_it(rollout: Rollout, sandbox: str, scripted_policy: ScriptedPolicy) -> None:
    async with serve(sandbox_backend(rollout, sandbox)) as url:
        client = RolloutClient(url=url)
        try:
            handles = [
                await client.run_rollout_async(
                    [{"role": "user", "content": f"ask {i} * 4"}], scripted_policy.url, f"r{i}", "key-0123", label="yes"
                )
                for i in range(4)
            ]
            results = [await handle for handle in handles]
            idle = await client.wait_idle(timeout_sec=30, poll_interval_sec=0.1)
        finally:
            await client.aclose()
    assert [each.status for each in results] == ["success"] * 4
    assert idle["lifecycle"] == {"accepting_rollouts": True, "active_rollouts": 0}


@pytest.mark.namespaces
async def test_time_in_the_queue_is_the_agents_time(rollout: Rollout) -> None:
    async with (
        serve(sandbox_backend(rollout, max_in_flight=1)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await result(http, body("warm"))
        first = await submit(http, body("first", "sleep 1.5"))
        late = await result(http, body("late", "sleep 5", agent_timeout_sec=1.0))
        await statuses(http, "first", first)
    assert late["err_category"] == "timeout"
    assert late["err_message"].startswith("workflow exceeded its 1.0s deadline (")
    assert late["err_message"].endswith("s of it spent queued)")


@pytest.mark.namespaces
async def test_an_exit_a_crash_and_a_huge_prompt_cost_one_rollout_each(rollout: Rollout) -> None:
    async with serve(sandbox_backend(rollout)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        gone = await result(http, body("exit", "exit"))
        huge = await result(http, body("huge", "size " + "x" * 50_000_000))
        fine = await result(http, body("fine"))
    assert (gone["status"], gone["err_category"]) == ("failure", "agent_error")
    assert gone["err_message"] == "the workflow ended its process with exit status 3"
    assert huge["status"] in ("success", "failure")
    if huge["status"] == "success":
        assert huge["sample"]["messages"][0]["content"] == "50000000"
    else:
        assert "MiB" in huge["err_message"] or "bytes" in huge["err_message"]
    assert fine["status"] == "success"


@pytest.mark.namespaces
async def test_what_cannot_be_prepared_fails_each_rollout_with_the_reason(rollout: Rollout) -> None:
    (rollout.path / "main.py").write_text("import nowhere_to_be_found\n")
    async with serve(sandbox_backend(rollout)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        broken = await result(http, body("a"))
        health = (await http.get("/health")).json()
    assert (broken["status"], broken["err_category"]) == ("failure", "validation_error")
    assert "nowhere_to_be_found" in broken["err_message"]
    assert health["status"] == "error"
    assert "nowhere_to_be_found" in health["error"]


async def test_an_endpoint_that_is_no_url_is_the_requests_fault(rollout: Rollout) -> None:
    async with serve(sandbox_backend(rollout)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        wrong = await result(http, body("a", chat_completions_url="ftp://x"))
    assert (wrong["status"], wrong["err_category"]) == ("failure", "validation_error")
    assert "chat_completions_url" in wrong["err_message"]
