"""The provider against the stand-in service: real sandboxes, the unmodified SDK, and the faults that a service has."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import ByteStream

pytest.importorskip("daytona")
from harness.channel import Guest
from harness.errors import OutOfMemory, ProviderUnavailable, QuotaError, SandboxError, SandboxGone
from harness.sandbox.base import Environment, SandboxSettings, SandboxSpec
from harness.sandbox.daytona import DaytonaProvider, limits, provider
from harness.sandbox.daytona.sandbox import DaytonaSandbox
from harness.sandbox.owner import this_process
from harness.trial.session import gone
from tests.support.daytona import (
    Break,
    DaytonaStandIn,
    Delay,
    LoseResponse,
    Quota,
    Rate,
    Respond,
    SlowStart,
    Stuck,
    too_many,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.namespaces,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
]

PYTHON = str(Path(sys.base_prefix).resolve() / "bin/python3")
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


def spec(**more: Any) -> SandboxSpec:
    """Of a sandbox from the service's own snapshot, whose Python is all that a guest needs."""
    environment = Environment(key="none", handle="daytona-small", python=PYTHON)
    name = f"harness-{uuid.uuid4().hex[:20]}"
    fields = {"name": name, "owner": this_process("test"), "environment": environment, "settings": SandboxSettings()}
    return SandboxSpec(**{**fields, **more})


@asynccontextmanager
async def account(
    monkeypatch: pytest.MonkeyPatch, heartbeat_s: float = 240.0, **options: Any
) -> AsyncIterator[tuple[DaytonaStandIn, DaytonaProvider]]:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(DaytonaStandIn(**options))
        monkeypatch.setenv("DAYTONA_API_URL", service.url)
        monkeypatch.setenv("DAYTONA_API_KEY", service.api_key)
        for name in ("DAYTONA_TARGET", "DAYTONA_ORGANIZATION_ID", "DAYTONA_JWT_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield service, await stack.enter_async_context(DaytonaProvider(heartbeat_s=heartbeat_s))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "LATE_S", 1.0)
    monkeypatch.setattr(limits, "JITTER_S", 0.1)


@pytest.fixture
async def here(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[DaytonaStandIn, DaytonaProvider]]:
    async with account(monkeypatch) as both:
        yield both
        await settled(both[0])


async def settled(service: DaytonaStandIn) -> None:
    """Nothing is left behind, once what is being destroyed is gone."""
    await until(lambda: not service.sandboxes)


async def serve(connection: ByteStream) -> None:
    await connection.receive()
    await connection.send(ANSWER)
    await connection.send_eof()


@asynccontextmanager
async def conversation(sandbox: DaytonaSandbox, lease_s: float = 60.0) -> AsyncIterator[Guest]:
    """A guest that took code which cannot be imported here, for want of the SDK; its port works as any."""
    async with Guest(sandbox.stream, serve=serve, on_log=lambda *_: None, lease_s=lease_s) as guest:
        await guest.hello(30)
        await guest.load(
            entrypoint="main.py", code=bytes(1024), env={}, token="t", log_bytes=1000, proxy=False, timeout=30
        )
        yield guest


async def asks(guest: Guest) -> None:
    assert (await guest.probe("/v1/x", {}, 30)).status == 200


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not true():  # nothing tells of it
            await anyio.sleep(0.02)


async def test_a_sandbox_is_isolated_labelled_and_bounded_and_leaves_nothing(
    here: tuple[DaytonaStandIn, DaytonaProvider],
) -> None:
    service, daytona = here
    wanted = spec(trial="t1", attempt=2)
    async with await daytona.create(wanted) as sandbox:
        [made] = service.sandboxes.values()
        assert (made.name, made.network.network_block_all, made.auto_stop, made.auto_delete) == (
            wanted.name,
            True,
            15,
            0,
        )
        assert made.destroy_at is not None
        async with conversation(sandbox) as guest:
            await asks(guest)
        [listed] = await daytona.list()
        assert (listed.id, listed.name, listed.state, listed.owner) == (made.id, made.name, "started", wanted.owner)
        assert listed.labels["harness.trial"] == "t1"
        assert abs(listed.age_s()) < 60
    await settled(service)
    assert service.requests.count("POST /sandbox") == 1
    assert await daytona.list() == []


async def test_a_cut_preview_connection_is_dialled_again(here: tuple[DaytonaStandIn, DaytonaProvider]) -> None:
    service, daytona = here
    async with await daytona.create(spec()) as sandbox, conversation(sandbox) as guest:
        for number in range(3):
            service.faults.cut(sandbox.id)
            await asks(guest)
            assert sandbox.stream.dials == number + 2


async def test_an_expired_token_is_replaced(here: tuple[DaytonaStandIn, DaytonaProvider]) -> None:
    service, daytona = here
    async with await daytona.create(spec()) as sandbox, conversation(sandbox) as guest:
        service.faults.expire_tokens(sandbox.id)
        service.faults.cut(sandbox.id)
        await asks(guest)


async def test_what_is_answered_inside_a_sandbox_sets_no_limits_and_leads_nowhere(
    here: tuple[DaytonaStandIn, DaytonaProvider],
) -> None:
    service, daytona = here
    away = Respond(302, headers={"Location": f"{service.url}/leak"})
    shut = Respond(429, headers={"Retry-After-authenticated": "900", "X-RateLimit-Remaining-sandbox-create": "0"})
    async with await daytona.create(spec()) as sandbox, conversation(sandbox) as guest:
        for answer in (away, shut):
            service.faults.add("PREVIEW *", answer)
            service.faults.cut(sandbox.id)
            await asks(guest)
            service.faults.add("POST /toolbox/*/process/execute", answer)
            with anyio.fail_after(30):
                await sandbox.outcome()
                async with await daytona.create(spec()):
                    pass
    assert not [request for request in service.requests if "leak" in request.path]


async def test_a_half_open_connection_is_replaced(here: tuple[DaytonaStandIn, DaytonaProvider]) -> None:
    service, daytona = here
    async with await daytona.create(spec(lease_s=4)) as sandbox, conversation(sandbox, 4) as guest:
        service.faults.silence(sandbox.id)
        await asks(guest)
        assert sandbox.stream.dials == 2


async def test_the_service_does_not_stop_a_sandbox_that_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with account(monkeypatch, heartbeat_s=0.1) as (service, daytona):
        async with await daytona.create(spec()) as sandbox, conversation(sandbox) as guest:
            for _ in range(4):
                service.requests.counts.clear()
                await until(lambda: service.requests.count("POST /sandbox/{id}/last-activity") > 1)
                await service.clock.advance(10 * 60)
            await asks(guest)
        await settled(service)


async def test_the_service_deletes_what_a_dead_host_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with account(monkeypatch) as (service, daytona):
        await daytona.create(spec())
        await service.clock.advance(16 * 60)
        await settled(service)


OUTCOMES: dict[str, tuple[Callable[[DaytonaStandIn, str], Awaitable[Any]], str, type[Exception]]] = {
    "vanished": (lambda service, id: service.faults.vanish(id), "gone", SandboxGone),
    "evicted": (lambda service, id: service.faults.evict(id), "gone", SandboxGone),
    "failed": (lambda service, id: service.faults.fail(id, "disk broke"), "killed", SandboxGone),
    "memory": (lambda service, id: service.faults.out_of_memory(id), "out_of_memory", OutOfMemory),
    "stopped": (lambda service, id: service.world.stop(service.world.find(id)), "killed|gone", SandboxGone),
}


@pytest.mark.parametrize("fault", OUTCOMES)
async def test_faults_are_told_apart(here: tuple[DaytonaStandIn, DaytonaProvider], fault: str) -> None:
    service, daytona = here
    happen, state, kind = OUTCOMES[fault]
    async with await daytona.create(spec(lease_s=3)) as sandbox, conversation(sandbox, 3) as guest:
        await happen(service, sandbox.id)
        await until(lambda: not guest.alive)
        exit = await sandbox.outcome()
        assert exit.state in state.split("|"), exit
        error = await gone(sandbox, SandboxGone("x"))
        assert type(error) is kind
        assert error.retryable == (kind is SandboxGone)


async def test_a_dead_toolbox_is_no_death_of_the_sandbox(here: tuple[DaytonaStandIn, DaytonaProvider]) -> None:
    service, daytona = here
    async with await daytona.create(spec(lease_s=3)) as sandbox, conversation(sandbox, 3) as guest:
        service.faults.toolbox_down(sandbox.id)
        await until(lambda: not guest.alive)
        exit = await sandbox.outcome()
        assert exit.state == "engine_unreachable"
        assert "502" in exit.detail or "gateway" in exit.detail


async def test_an_answer_that_was_lost_is_no_second_sandbox(here: tuple[DaytonaStandIn, DaytonaProvider]) -> None:
    service, daytona = here
    service.faults.add("POST /sandbox", LoseResponse())
    async with await daytona.create(spec()) as sandbox, conversation(sandbox) as guest:
        await asks(guest)
        assert service.world.created == 1


async def test_a_create_that_timed_out_is_adopted_when_it_comes(
    here: tuple[DaytonaStandIn, DaytonaProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, daytona = here
    monkeypatch.setattr(provider, "CREATE_S", 1.0)
    service.faults.add("POST /sandbox", SlowStart(1.5))
    async with await daytona.create(spec()) as sandbox, conversation(sandbox) as guest:
        await asks(guest)
        assert service.world.created == 1


async def test_a_create_that_never_ends_is_deleted_and_can_be_tried_again(
    here: tuple[DaytonaStandIn, DaytonaProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, daytona = here
    monkeypatch.setattr(provider, "CREATE_S", 1.0)
    monkeypatch.setattr(provider, "REMOVE_S", 2.0)
    service.faults.add("POST /sandbox", Stuck())
    wanted = spec()
    async with left_by_another(daytona) as (other, said):
        with pytest.raises(SandboxError) as failed:
            await other.create(wanted)
        assert failed.value.retryable
    assert f"{wanted.name} may still exist" in said[0]  # the service deletes none that is creating
    service.faults.release(wanted.name)
    [left] = service.sandboxes.values()
    await until(lambda: left.state == "started")
    await service.clock.advance(16 * 60)


@asynccontextmanager
async def left_by_another(daytona: DaytonaProvider) -> AsyncIterator[tuple[DaytonaProvider, list[str]]]:
    """A provider of the same account, and what is said when it is left."""
    said: list[str] = []
    daytona.client.gate.say = said.append
    async with DaytonaProvider() as other:
        yield other, said


async def test_a_cancelled_create_that_is_carried_out_late_is_named(
    here: tuple[DaytonaStandIn, DaytonaProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, daytona = here
    monkeypatch.setattr(provider, "LATE_S", 0.2)
    service.faults.add("POST /sandbox", Delay(2.0))
    wanted = spec()
    async with left_by_another(daytona) as (other, said), anyio.create_task_group() as tasks:
        tasks.start_soon(other.create, wanted)
        await until(lambda: service.faults.left == 0)
        tasks.cancel_scope.cancel()
    assert wanted.name in said[0]
    said.clear()
    await until(lambda: bool(service.sandboxes))
    await until(lambda: all(each.state == "started" for each in service.sandboxes.values()))
    for info in await daytona.list():
        await daytona.remove(info)
    service.faults.add("POST /sandbox", too_many(retry_after=60))
    async with left_by_another(daytona) as (other, said), anyio.create_task_group() as tasks:
        tasks.start_soon(other.create, spec())
        await until(lambda: bool(said))  # that it waits for the limit
        tasks.cancel_scope.cancel()
    assert len(said) == 1  # what was refused comes at no time


async def test_a_cancelled_create_leaves_nothing(here: tuple[DaytonaStandIn, DaytonaProvider]) -> None:
    service, daytona = here
    service.faults.add("POST /sandbox", SlowStart(1.0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daytona.create, spec())
        await until(lambda: service.world.created == 1)
        tasks.cancel_scope.cancel()
    await settled(service)
    assert service.world.created == 1


async def test_errors_of_the_service_are_tried_again(here: tuple[DaytonaStandIn, DaytonaProvider]) -> None:
    service, daytona = here
    faults = {
        "POST /sandbox": 503,
        "POST /toolbox/*/files/bulk-upload": 502,
        "POST /toolbox/*/process/execute": 408,
        "GET /sandbox/*/preview-url": 500,
        "PREVIEW *": 502,
    }
    for match, status in faults.items():
        service.faults.add(match, Respond(status))
    async with await daytona.create(spec()) as sandbox, conversation(sandbox) as guest:
        await asks(guest)
        service.faults.add("PREVIEW *", Respond(502), times=3)
        service.faults.cut(sandbox.id)
        await asks(guest)
    assert service.requests.count("GET /sandbox/{id}/ports/{port}/preview-url") == 2  # a 502 is no reason for another
    met = [request.status for request in service.requests if request.status >= 405]  # it was looked for after the 503
    assert sorted(met) == sorted([*faults.values(), 502, 502, 502])


async def test_a_call_that_takes_too_long_is_the_services_fault(
    here: tuple[DaytonaStandIn, DaytonaProvider],
) -> None:
    service, daytona = here
    late = Respond(408, "command execution timeout", code="PROCESS_EXECUTION_TIMEOUT")
    service.faults.add("POST /toolbox/*/process/execute", late, times=None)
    with pytest.raises(SandboxError, match="command execution timeout") as failed:
        await daytona.create(spec())
    assert failed.value.retryable
    assert failed.value.party == "sandbox"


async def test_a_rate_limit_makes_every_create_wait(
    here: tuple[DaytonaStandIn, DaytonaProvider],
) -> None:
    service, daytona = here
    service.faults.add("POST /sandbox", too_many(retry_after=2))
    began = anyio.current_time()

    async def one() -> None:
        async with await daytona.create(spec()):
            assert anyio.current_time() - began >= 2

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await until(lambda: service.requests.count("POST /sandbox") == 1)
        tasks.start_soon(one)
    assert service.requests.count("POST /sandbox") == 3


async def test_no_call_is_made_that_the_headers_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    async with account(monkeypatch, rates={"sandbox-create": Rate(2, 1.0)}) as (service, daytona):
        for _ in range(5):
            async with await daytona.create(spec()):
                pass
        assert service.requests.count("POST /sandbox") == 5
        assert not [request for request in service.requests if request.status == 429]


async def test_how_many_refusals_are_left_stops_no_call() -> None:
    gate = limits.Gate()
    gate.observe({"X-RateLimit-Remaining-failed-auth": "0", "X-RateLimit-Reset-failed-auth": "60"})
    with anyio.fail_after(10):
        await gate.call("authenticated", anyio.lowlevel.checkpoint)


async def test_a_full_quota_shrinks_how_many_run_at_once_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    async with account(monkeypatch, quota=Quota(2, 100, 100)) as (service, daytona):
        daytona.client.gate.say = said.append

        async def one() -> None:
            async with await daytona.create(spec()) as sandbox, conversation(sandbox) as guest:
                await asks(guest)
                await until(lambda: bool(said))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(one)
        await settled(service)
        assert service.world.created == 5
        assert service.peak <= 2
        assert any("Total CPU limit exceeded" in line and "2 sandboxes at a time" in line for line in said), said


async def test_a_quota_that_others_use_up_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "QUOTA_ALONE_S", 1.0)
    async with account(monkeypatch, quota=Quota(10, 10, 30, sandboxes=0)) as (service, daytona):
        with pytest.raises(QuotaError, match="Sandbox resource limit reached"):
            await daytona.create(spec())
        assert service.world.created == 0
        assert 1 < service.requests.count("POST /sandbox") < 8  # it waits between them, longer and longer


async def test_waiting_for_the_limit_is_no_time_of_a_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "REMOVE_S", 1.0)
    async with account(monkeypatch, rates={"sandbox-lifecycle": Rate(1, 3.0)}) as (service, daytona):
        made = [await daytona.create(spec()) for _ in range(2)]
        async with anyio.create_task_group() as tasks:
            for sandbox in made:
                tasks.start_soon(sandbox.destroy)
        await settled(service)


@pytest.mark.parametrize("healed", [True, False])
async def test_what_could_not_be_deleted_is_tried_once_more_and_then_named(
    here: tuple[DaytonaStandIn, DaytonaProvider], monkeypatch: pytest.MonkeyPatch, healed: bool
) -> None:
    service, daytona = here
    monkeypatch.setattr(provider, "REMOVE_S", 1.0)
    service.faults.add("DELETE /sandbox/*", Respond(401 if healed else 503), times=None)  # a key is revoked, or a fault
    async with left_by_another(daytona) as (other, said):
        sandbox = await other.create(spec())
        with pytest.raises(SandboxError):
            await sandbox.destroy()
        if healed:
            service.faults.clear()
    service.faults.clear()
    if not healed:
        assert sandbox.name in said.pop()
        [info] = await daytona.list()
        await daytona.remove(info)
    assert said == []


@pytest.mark.parametrize("status", [404, 409, 500])
async def test_a_delete_ends_well_when_the_sandbox_is_gone(
    here: tuple[DaytonaStandIn, DaytonaProvider], status: int
) -> None:
    service, daytona = here
    sandbox = await daytona.create(spec())
    if status == 404:
        await service.faults.vanish(sandbox.id)
    else:
        service.faults.add("DELETE /sandbox/*", Respond(status))
    await sandbox.destroy()
    await sandbox.destroy()


async def test_a_delete_that_cannot_be_is_bounded_and_an_error(
    here: tuple[DaytonaStandIn, DaytonaProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, daytona = here
    monkeypatch.setattr(provider, "REMOVE_S", 1.0)
    sandbox = await daytona.create(spec())
    service.faults.add("DELETE /sandbox/*", Respond(503), times=None)
    with pytest.raises(SandboxError, match="was not deleted within"):
        await sandbox.destroy()
    service.faults.clear()
    await sandbox.destroy()


async def test_a_delete_that_is_stuck_is_the_services_own_affair(
    here: tuple[DaytonaStandIn, DaytonaProvider],
) -> None:
    service, daytona = here
    service.faults.add("DELETE /sandbox/*", Stuck())
    sandbox = await daytona.create(spec())
    with anyio.fail_after(10):
        await sandbox.destroy()
    assert await daytona.list() == []
    service.faults.release(sandbox.id)


async def test_a_slow_preview_or_broken_first_dial_is_tried_again(
    here: tuple[DaytonaStandIn, DaytonaProvider],
) -> None:
    service, daytona = here
    service.faults.add("PREVIEW *", Break(after_bytes=10), times=2)
    service.faults.add("PREVIEW *", Delay(0.2), times=1)
    async with await daytona.create(spec()) as sandbox, conversation(sandbox) as guest:
        await asks(guest)


async def test_the_doctor_finds_nothing_wrong(here: tuple[DaytonaStandIn, DaytonaProvider]) -> None:
    _, daytona = here
    assert all(finding.ok for finding in await daytona.doctor())


async def test_an_unknown_snapshot_is_one_clear_error(here: tuple[DaytonaStandIn, DaytonaProvider]) -> None:
    service, daytona = here
    with pytest.raises(ProviderUnavailable, match="harness-none"):  # and so for every trial: the run stops
        await daytona.create(spec(environment=Environment(key="n", handle="harness-none", python=PYTHON)))
    assert service.requests.count("POST /sandbox") == 1
