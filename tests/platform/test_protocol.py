"""The protocol's errors, byte for byte, and clients that behave badly."""

from __future__ import annotations

from pathlib import Path

import anyio
import httpx
import pytest

from harness.rollout.source import Rollout
from tests.platform.support import body, idle, result, sandbox_backend, serve, statuses, submit, until, write_rollout

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
LOCAL = pytest.param("local", marks=pytest.mark.namespaces)
DOCKER = pytest.param("docker", marks=pytest.mark.docker)
LEASE = "X-Osmosis-Rollout-Lease"


@pytest.fixture
def rollout(tmp_path: Path) -> Rollout:
    return write_rollout(tmp_path / "ws")


@pytest.mark.namespaces
async def test_every_error_status_has_its_body(rollout: Rollout) -> None:
    backend = sandbox_backend(rollout, max_in_flight=1, max_queue_depth=1)
    async with serve(backend) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        lease = await submit(http, body("a", "sleep 60"))
        again = await http.post("/rollout", json=body("a"))
        assert (again.status_code, again.json()) == (409, {"detail": "rollout_id is already registered"})
        await submit(http, body("b", "sleep 60"))
        await anyio.sleep(0.1)
        full = await http.post("/rollout", json=body("c"))
        assert (full.status_code, full.json()) == (429, {"detail": "rollout queue is full; retry later"})
        assert full.headers["Retry-After"] == "5"

        unknown = await http.get("/rollout/zzz/result", headers={LEASE: "x"})
        assert (unknown.status_code, unknown.json()) == (404, {"detail": "unknown rollout_id"})
        wrong = await http.get("/rollout/a/result", headers={LEASE: "x"})
        assert (wrong.status_code, wrong.json()) == (403, {"detail": "invalid polling lease"})
        assert (await http.get("/rollout/a/result")).status_code == 422
        for bad in ({"rollout_id": "a/b"}, {"rollout_id": ".."}, {"llm_api_key": ""}, {"rollout_id": ""}):
            assert (await http.post("/rollout", json=body("x") | bad)).status_code == 422, bad
        selector = await http.post("/rollout/cancel", json={"ids": ["a"], "all": True})
        assert (selector.status_code, selector.json()) == (
            422,
            {"detail": "pass exactly one selector: ids, prefix, or all"},
        )
        await http.post("/rollout/cancel", json={"all": True})
        assert (await statuses(http, "a", lease))[1]["status"] == "cancelled"
        await idle(http)
        assert (await result(http, body("d")))["status"] == "success"  # there is room again


@pytest.mark.namespaces
async def test_a_server_with_a_key_answers_nobody_else(rollout: Rollout) -> None:
    async with (
        serve(sandbox_backend(rollout), api_key="secret") as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for refused in (await http.get("/health"), await http.post("/rollout", json=body("a"))):
            assert (refused.status_code, refused.json()) == (401, {"detail": "unauthorized"})
        http.headers["Authorization"] = "Bearer secret"
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("sandbox", [LOCAL, DOCKER])
async def test_cancelled_rollouts_end_and_their_sandboxes_with_them(rollout: Rollout, sandbox: str) -> None:
    """That nothing is left of them is checked after every test."""
    backend = sandbox_backend(rollout, sandbox, max_in_flight=1)
    async with serve(backend) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        assert (await result(http, body("done")))["status"] == "success"
        running = await submit(http, body("p-running", "sleep 600"))
        await until(lambda: backend.rollout_status("p-running") == {"status": "running"})
        queued = await submit(http, body("p-queued", "sleep 600"))
        await until(lambda: backend.rollout_status("p-queued") is not None)
        cancelled = await http.post("/rollout/cancel", json={"prefix": "p-"})
        assert cancelled.json() == {"dispositions": {"p-running": "cancelled_running", "p-queued": "cancelled_queued"}}
        again = await http.post("/rollout/cancel", json={"ids": ["p-running", "done", "nobody"]})
        assert again.json()["dispositions"]["done"] == "not_found"
        assert again.json()["dispositions"]["nobody"] == "not_found"
        assert again.json()["dispositions"]["p-running"] in ("cancelled_running", "not_found")
        for name, lease in (("p-running", running), ("p-queued", queued)):
            final = (await statuses(http, name, lease))[1]
            assert (final["status"], final["err_message"], final["sample"]) == ("cancelled", "cancelled", None)
        await idle(http)
        last = await http.post("/rollout/cancel", json={"ids": ["p-running"]})
        assert last.json() == {"dispositions": {"p-running": "not_found"}}


@pytest.mark.parametrize("sandbox", [LOCAL, DOCKER])
async def test_a_client_that_vanishes_loses_its_sandbox(rollout: Rollout, sandbox: str) -> None:
    backend = sandbox_backend(rollout, sandbox)
    times = {"result_wait_timeout_sec": 0.5, "polling_lease_timeout_sec": 2.0}
    async with serve(backend, **times) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        lease = await submit(http, body("gone", "sleep 600"))
        await idle(http)  # nobody polls: the lease ends it
        answer = await http.get("/rollout/gone/result", headers={LEASE: lease})
    expired = answer.json()
    assert (expired["status"], expired["err_message"]) == ("failure", "polling lease expired")
    assert expired["err_category"] == "lease_expired"


@pytest.mark.parametrize("sandbox", [LOCAL, DOCKER])
async def test_a_shutdown_takes_everything_down(
    rollout: Rollout, sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osmosis_ai.rollout.server.app._SHUTDOWN_DRAIN_SEC", 0.2)
    backend = sandbox_backend(rollout, sandbox)
    async with serve(backend) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        for name in "abc":
            await submit(http, body(name, "sleep 600"))
        await until(lambda: backend.rollout_status("a") == {"status": "running"}, within=60)
    assert {backend.rollout_status(name) == {"status": "cancelled"} for name in "abc"} == {True}


@pytest.mark.namespaces
async def test_a_shutdown_while_preparing(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osmosis_ai.rollout.server.app._SHUTDOWN_DRAIN_SEC", 0.1)
    async with serve(sandbox_backend(rollout)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        await submit(http, body("a", "sleep 600"))
