"""The stand-in, driven by the official SDK; raw requests only where the SDK would not send them."""

import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import daytona_api_client_async as api_models
import daytona_toolbox_api_client_async as toolbox_models
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    CreateSnapshotParams,
    DaytonaConfig,
    Image,
    ListSandboxesQuery,
    Resources,
    SessionExecuteRequest,
)
from daytona.common import errors as sdk
from daytona_api_client import SandboxState as QueryState
from daytona_api_client import SnapshotState
from daytona_api_client_async import SandboxState
from daytona_api_client_async.exceptions import ApiException

from tests.support.daytona import (
    Break,
    Clock,
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
from tests.support.daytona.clock import RateLimits
from tests.support.daytona.dockerfile import DockerfileError, parse

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.namespaces,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
]

SERVER = """
import asyncio, base64, hashlib, sys
async def serve(reader, writer):
    head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode()
    if "upgrade: websocket" in head.lower():
        key = [l.split(": ")[1] for l in head.split("\\r\\n") if l.lower().startswith("sec-websocket-key")][0]
        digest = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
        writer.write(b"HTTP/1.1 101 Switching\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
                     b"Sec-WebSocket-Accept: "
                     + base64.b64encode(digest) + b"\\r\\n\\r\\n")
        while data := await reader.read(65536):  # echo, unmasked
            if data[0] & 15 == 8:
                break
            size, mask = data[1] & 127, data[2:6]
            writer.write(bytes([data[0], size]) + bytes(b ^ mask[i % 4] for i, b in enumerate(data[6 : 6 + size])))
    else:
        body = (sys.argv[1] + "|" + head).encode()
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
    await writer.drain()
    writer.close()
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", 8000) as server:
        print("listening", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""


@asynccontextmanager
async def client(service: DaytonaStandIn, **more: Any) -> AsyncIterator[AsyncDaytona]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        config = DaytonaConfig(
            **{"api_key": service.api_key, "api_url": service.url, "use_deprecated_polling": True} | more
        )
        daytona = AsyncDaytona(config)
    async with daytona:
        yield daytona


@pytest.fixture
async def service() -> AsyncIterator[DaytonaStandIn]:
    async with DaytonaStandIn() as service:
        yield service
    await until(lambda: not _processes())  # no sandbox outlives the service, but for the moment that dying takes


@pytest.fixture
async def daytona(service: DaytonaStandIn) -> AsyncIterator[AsyncDaytona]:
    async with client(service) as daytona:
        yield daytona


def _processes() -> list[str]:
    """Daemons of sandboxes that are children of this process."""
    mine = f"PPid:\t{os.getpid()}\n"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mine in (folder / "status").read_text() and b"daemon.pyc" in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


async def send(service: DaytonaStandIn, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    """A raw request to the API (or the toolbox). Returns status and JSON."""
    headers = {"Authorization": f"Bearer {service.api_key}"} | headers
    url = service.url + path if not path.startswith("/toolbox") else service.url.removesuffix("/api") + path
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body, headers=headers) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if text else None


def check(model: Any, data: Any) -> None:
    """That an answer is what the SDK's own model says: nothing missing, nothing it does not know."""
    made = model.from_dict(data)
    assert not made.additional_properties, made.additional_properties


async def listening(sandbox: AsyncSandbox, says: str = "hello") -> None:
    """Start the server above on port 8000 of a sandbox."""
    await sandbox.fs.upload_file(SERVER.encode(), "/tmp/server.py")
    await sandbox.process.create_session("server")
    run = SessionExecuteRequest(command=f"python3 /tmp/server.py {says}", run_async=True)
    started = await sandbox.process.execute_session_command("server", run)
    output = ""
    with anyio.fail_after(10):
        while "listening" not in output:
            output = (await sandbox.process.get_session_command_logs("server", started.cmd_id)).output or ""


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not true():
            await anyio.sleep(0.01)


async def gone(service: DaytonaStandIn, *sandboxes: str) -> None:
    await until(lambda: not set(sandboxes) & set(service.sandboxes))


async def state(service: DaytonaStandIn, sandbox: str, wanted: str) -> None:
    await until(lambda: service.sandboxes[sandbox].state == wanted)


# Life


async def test_sandbox_is_a_machine_of_its_own(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    first = await daytona.create(CreateSandboxFromSnapshotParams(name="one", env_vars={"WHO": "me"}, labels={"a": "b"}))
    second = await daytona.create()
    assert first.state == SandboxState.STARTED
    assert (await first.process.exec("echo $WHO $DAYTONA_SANDBOX_ID; echo err >&2; exit 3", cwd="/tmp")).result == (
        f"me {first.id}\nerr\n"
    )
    await first.fs.upload_file(b"x", "/usr-is-read-only-but-this-is-not")
    assert (await second.process.exec("ls / | grep -c usr-is")).result == "0\n"
    # Both listen on the same port, and nothing of the host or beyond can be reached.
    await listening(first, "first")
    await listening(second, "second")
    with socket.create_server(("127.0.0.1", 0)) as host:
        tried = await first.process.exec(
            f"echo > /dev/tcp/127.0.0.1/{host.getsockname()[1]} || echo > /dev/tcp/1.1.1.1/53"
        )
    assert tried.exit_code != 0
    assert (await first.process.exec("ls /proc | grep -c '^[0-9]'")).result < "9"
    assert (await daytona.get("one")).id == first.id
    await daytona.delete(first, wait=True)
    with pytest.raises(sdk.DaytonaNotFoundError):
        await daytona.get(first.id)
    assert list(service.sandboxes) == [second.id]
    assert (service.peak, service.requests.count("POST /sandbox")) == (2, 2)


async def test_close_says_what_was_left_and_ends_it() -> None:
    async with DaytonaStandIn() as service, client(service) as daytona:
        sandbox = await daytona.create()
        assert _processes()
    assert service.left_behind == [sandbox.id]
    await until(lambda: not _processes())


async def test_stop_keeps_files_and_start_renews_the_token(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    sandbox = await daytona.create()
    await sandbox.fs.upload_file(b"kept", "note")
    old = await sandbox.get_preview_link(8000)
    await sandbox.stop()
    assert sandbox.state == SandboxState.STOPPED
    with pytest.raises(sdk.DaytonaBadRequestError, match="no IP address"):
        await sandbox.process.exec("true")
    with pytest.raises(sdk.DaytonaBadRequestError, match="not started"):
        await sandbox.stop()
    await sandbox.start()
    assert await sandbox.fs.download_file("note") == b"kept"
    assert (await sandbox.get_preview_link(8000)).token != old.token


async def test_delete_is_not_at_once_and_not_twice(daytona: AsyncDaytona, service: DaytonaStandIn) -> None:
    service.faults.add("DELETE /sandbox/*", Stuck())
    sandbox = await daytona.create()
    await sandbox.delete()
    assert sandbox.state == SandboxState.DESTROYING
    with pytest.raises(sdk.DaytonaConflictError):
        await sandbox.delete()
    assert [each.state async for each in daytona.list()] == [SandboxState.DESTROYING]
    service.faults.release(sandbox.id)
    await gone(service, sandbox.id)
    with pytest.raises(sdk.DaytonaNotFoundError):
        await sandbox.delete()


async def test_clocks(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    idle = await daytona.create(CreateSandboxFromSnapshotParams(name="idle"))
    busy = await daytona.create(CreateSandboxFromSnapshotParams(name="busy"))
    ephemeral = await daytona.create(CreateSandboxFromSnapshotParams(name="eph", auto_stop_interval=5, ephemeral=True))
    mortal = await daytona.create(CreateSandboxFromSnapshotParams(name="ttl", auto_stop_interval=0, ttl_minutes=60))
    await service.clock.advance(10 * 60)
    await gone(service, ephemeral.id)
    await busy.refresh_activity()
    await service.clock.advance(6 * 60)
    await state(service, idle.id, "stopped")
    assert service.sandboxes[busy.id].state == "started"
    await idle.set_auto_delete_interval(30)
    await busy.set_ttl(300)
    await busy.set_autostop_interval(0)
    await service.clock.advance(50 * 60)
    await gone(service, idle.id, mortal.id)
    assert [each.name for each in service.sandboxes.values()] == ["busy"]


async def test_list_by_labels_states_and_cursor(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    made = [await daytona.create(CreateSandboxFromSnapshotParams(labels={"n": str(n), "all": "yes"})) for n in range(3)]
    await made[0].stop()

    async def listed(**query: Any) -> list[str]:
        return sorted([each.id async for each in daytona.list(ListSandboxesQuery(**query))])

    ids = [each.id for each in made]
    assert await listed(labels={"all": "yes"}, limit=1) == sorted(ids)
    assert service.requests.count("GET /sandbox") == 3
    assert await listed(labels={"all": "yes", "n": "1"}) == [ids[1]]
    assert await listed(states=[QueryState.STOPPED]) == [ids[0]]
    assert await listed(labels={"all": "no"}) == []
    await made[2].set_labels({"other": "x"})
    assert await listed(labels={"all": "yes"}) == sorted(ids[:2])
    assert (await send(service, "GET", "/sandbox?labels=[1"))[0] == 400
    assert (await send(service, "GET", "/sandbox?states=asleep"))[0] == 400


# What is refused


REFUSED: list[tuple[dict[str, object], int, str]] = [
    ({"snapshot": "nope"}, 400, "Snapshot nope not found"),
    ({"snapshot": "daytona-small", "cpu": 1}, 400, "Cannot specify Sandbox resources when using a snapshot"),
    ({"buildInfo": {"dockerfileContent": "FROM a"}, "disk": 11}, 400, "Disk request 11GB exceeds maximum"),
    ({"buildInfo": {"dockerfileContent": "FROM a"}, "memory": 1.5}, 400, "memory: Input should be a valid integer"),
    ({"buildInfo": {"dockerfileContent": "FROM a"}, "snapshot": "daytona-small"}, 400, "Cannot specify a snapshot"),
    ({"name": "x" * 256}, 400, "name: "),
    ({"labels": {"a": 1}}, 400, "labels.a: "),
    ({"labels": {"": "x"}}, 400, "labels"),
    ({"autoStop": 1}, 400, "property autoStop should not exist"),
    ({"target": "mars"}, 404, "mars"),
    ({"networkBlockAll": True, "networkAllowList": "1.2.3.4/32"}, 400, "mutually exclusive"),
    ({"networkAllowList": "::1/128"}, 400, "IPv4"),
    ({"autoDeleteInterval": -2}, 400, "autoDeleteInterval"),
    ({"secrets": [{"A": "unknown"}]}, 400, "Secret unknown not found"),
]


async def test_creates_that_are_refused(service: DaytonaStandIn) -> None:
    for body, status, says in REFUSED:
        answered, error = await send(service, "POST", "/sandbox", body)
        assert (answered, says in error["message"]) == (status, True), (body, error)
        assert set(error) >= {"statusCode", "message", "code", "source"}
    assert not service.sandboxes


async def test_names_are_unique_and_there_are_other_credentials(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    await daytona.create(CreateSandboxFromSnapshotParams(name="twin"))
    with pytest.raises(sdk.DaytonaConflictError):
        await daytona.create(CreateSandboxFromSnapshotParams(name="twin"))
    async with client(service, api_key=None, jwt_token=service.jwt, organization_id=service.organization_id) as other:
        assert (await other.get("twin")).organization_id == service.organization_id
    assert (await send(service, "GET", "/no-such-route"))[0] == 404


async def test_quota_counts_the_disk_of_stopped_sandboxes() -> None:
    async with DaytonaStandIn(quota=Quota(cpu=2, memory=3, disk=9, sandboxes=9)) as service, client(service) as daytona:
        first, second = [await daytona.create() for _ in range(2)]
        with pytest.raises(sdk.DaytonaBadRequestError, match=r"Total CPU limit exceeded\. Maximum allowed: 2\."):
            await daytona.create()
        await first.stop()
        third = await daytona.create()
        await second.stop()
        with pytest.raises(sdk.DaytonaBadRequestError, match=r"Total disk limit exceeded\. Maximum allowed: 9GiB\."):
            await daytona.create()
        await first.delete(wait=True)
        with pytest.raises(sdk.DaytonaBadRequestError, match="Total memory limit exceeded"):
            await daytona.create(CreateSandboxFromImageParams(image="a:1", resources=Resources(cpu=1, memory=3)))
        service.world.quota = Quota(sandboxes=2)
        with pytest.raises(sdk.DaytonaBadRequestError, match="Sandbox resource limit reached"):
            await daytona.create()
        assert third.id in service.sandboxes


# Images


async def test_snapshot_is_built_once_with_a_log_and_is_what_sandboxes_contain(
    service: DaytonaStandIn, daytona: AsyncDaytona
) -> None:
    image = (
        Image.base("python:3.13-slim")
        .env({"FROM_IMAGE": "yes"})
        .workdir("/work")
        .run_commands("echo built > note && echo to the log && mkdir /usr/extra && sleep 1.2")
        .entrypoint(["sh", "-c", "echo started $FROM_IMAGE $OWN in $PWD; exec sleep 1000"])
    )
    lines: list[str] = []
    made = await daytona.snapshot.create(
        CreateSnapshotParams(name="env:1", image=image, resources=Resources(cpu=2, memory=2, disk=5)),
        on_logs=lines.append,
    )
    assert made.state == SnapshotState.ACTIVE
    assert "to the log" in "".join(lines)
    sandbox = await daytona.create(CreateSandboxFromSnapshotParams(snapshot="env:1", env_vars={"OWN": "mine"}))
    assert (sandbox.cpu, sandbox.memory, sandbox.disk, sandbox.snapshot) == (2, 2, 5, "env:1")
    assert (await sandbox.process.exec("cat /work/note; ls -d /usr/extra")).result == "built\n/usr/extra\n"
    assert await sandbox.get_work_dir() == "/work"
    assert (await sandbox.process.get_entrypoint_logs()).stdout == "started yes mine in /work\n"
    # The same content from an image, and under another name, is not built again.
    same = await daytona.create(CreateSandboxFromImageParams(image=image))
    await daytona.snapshot.create(CreateSnapshotParams(name="env:2", image=image))
    assert (await same.process.exec("cat note")).result == "built\n"
    assert service.builder.runs == 1
    assert {each.name for each in (await daytona.snapshot.list()).items} == {"env:1", "env:2", "daytona-small"}
    with pytest.raises(sdk.DaytonaConflictError):
        await daytona.snapshot.create(CreateSnapshotParams(name="env:1", image=image))
    await daytona.snapshot.delete("env:2")
    assert (await daytona.snapshot.get("env:2")).state == SnapshotState.REMOVING
    with pytest.raises(sdk.DaytonaBadRequestError, match="Snapshot env:2 is removing"):
        await daytona.create(CreateSandboxFromSnapshotParams(snapshot="env:2"))
    await until(lambda: len(service.snapshots) == 2)
    with pytest.raises(sdk.DaytonaNotFoundError):
        await daytona.snapshot.get("env:2")


async def test_snapshots_that_nobody_uses_are_put_aside(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    await daytona.snapshot.create(CreateSnapshotParams(name="n", image="python:3.13"))
    with pytest.raises(ApiException, match="already active"):
        await daytona.snapshot.activate("n")
    await service.clock.advance(15 * 24 * 3600)
    states = {each.name: each.state for each in (await daytona.snapshot.list()).items}
    assert states == {"n": SnapshotState.INACTIVE, "daytona-small": SnapshotState.ACTIVE}
    with pytest.raises(sdk.DaytonaBadRequestError, match="Snapshot n is inactive"):
        await daytona.create(CreateSandboxFromSnapshotParams(snapshot="n"))
    assert (await daytona.snapshot.activate("n")).state == SnapshotState.PENDING
    with pytest.raises(ApiException, match="cannot be activated"):
        await daytona.snapshot.activate("n")
    await until(lambda: all(each.state == "active" for each in service.snapshots.values()))


async def test_a_build_needs_its_context(service: DaytonaStandIn) -> None:
    info = {"dockerfileContent": "FROM a:1\nCOPY x /x", "contextHashes": ["0" * 32]}
    assert (await send(service, "POST", "/snapshots", {"name": "n", "buildInfo": info}))[0] == 400
    key = f"/storage/contexts/{service.organization_id}/{'0' * 32}/context.tar"
    async with aiohttp.ClientSession() as session, session.head(service.url.removesuffix("/api") + key) as answer:
        assert answer.status == 403


async def test_builds_that_fail(service: DaytonaStandIn) -> None:
    async with DaytonaStandIn(images=("python:*",)) as service, client(service) as daytona:
        failing = Image.base("python:3.13").run_commands("echo before; exit 7")
        with pytest.raises(sdk.DaytonaError, match="non-zero code: 7"):
            await daytona.snapshot.create(CreateSnapshotParams(name="bad", image=failing))
        assert (await daytona.snapshot.get("bad")).state == SnapshotState.BUILD_FAILED
        with pytest.raises(sdk.DaytonaBadRequestError, match="Snapshot bad is build_failed"):
            await daytona.create(CreateSandboxFromSnapshotParams(snapshot="bad"))
        lines: list[str] = []
        with pytest.raises(sdk.DaytonaError, match="pull access denied for nope"):
            await daytona.create(CreateSandboxFromImageParams(image="nope:1"), on_snapshot_create_logs=lines.append)
        assert "pull access denied" in "".join(lines)
        with pytest.raises(sdk.DaytonaBadRequestError, match="must include a tag"):
            await daytona.snapshot.create(CreateSnapshotParams(name="untagged", image="python"))
        with pytest.raises(sdk.DaytonaBadRequestError, match="whitespace"):
            await daytona.snapshot.create(CreateSnapshotParams(name="spaced", image="a b:1"))
        for each in list(service.sandboxes):
            await (await daytona.get(each)).delete(wait=True)


def test_dockerfile_subset() -> None:
    recipe = parse('FROM a:1\nENV A="x y" B=z\nRUN one \\\n  # not a line\n  two\nUSER me\nCMD ["c"]\nENTRYPOINT e')
    assert (recipe.image, recipe.env, recipe.user) == ("a:1", {"A": "x y", "B": "z"}, "me")
    assert [step.argv[-1].split() for step in recipe.steps] == [["one", "two"]]
    assert (recipe.entrypoint, recipe.cmd) == (["/bin/sh", "-c", "e"], [])
    for text in (
        "",
        "RUN x",
        "FROM a b:1",
        "FROM a\nCOPY .",
        "FROM a\nCOPY --from=b . .",
        "FROM a\nFETCH x",
        "FROM a\nRUN",
    ):
        with pytest.raises(DockerfileError):
            parse(text)


# The toolbox


async def test_execute_times_out_and_merges_output(daytona: AsyncDaytona) -> None:
    sandbox = await daytona.create()
    with pytest.raises(sdk.DaytonaProcessExecutionTimeoutError) as caught:
        await sandbox.process.exec("sleep 30", timeout=1)
    assert (caught.value.status_code, caught.value.source) == (408, "DAYTONA_DAEMON")
    done = await sandbox.process.exec("echo out; echo err >&2; kill -9 $$", env={"X": "1"})
    assert (done.exit_code, done.result) == (137, "out\nerr\n")
    with pytest.raises(sdk.DaytonaNotFoundError):
        await sandbox.process.exec("true", cwd="/nowhere")


async def test_sessions(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    process = (await daytona.create()).process
    await process.create_session("s")
    with pytest.raises(sdk.DaytonaConflictError):
        await process.create_session("s")
    await process.execute_session_command("s", SessionExecuteRequest(command="cd /tmp; X=1"))
    done = await process.execute_session_command(
        "s", SessionExecuteRequest(command="cat <<E\n$PWD $X\nE\necho e >&2; false")
    )
    assert (done.exit_code, done.stdout, done.stderr) == (1, "/tmp 1\n", "e\n")
    asked = SessionExecuteRequest(
        command="read line; echo got $line; echo bad >&2; sleep 0.1; printf '\\303'; printf '\\274'"
    )
    running = await process.execute_session_command(
        "s", SessionExecuteRequest(**asked.model_dump() | {"run_async": True})
    )
    assert (await process.get_session_command("s", running.cmd_id)).exit_code is None
    out: list[str] = []
    err: list[str] = []

    async def follow() -> None:
        async def to_out(text: str) -> None:
            out.append(text)

        async def to_err(text: str) -> None:
            err.append(text)

        await process.get_session_command_logs_async("s", running.cmd_id, to_out, to_err)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            await process.send_session_command_input("s", running.cmd_id, "it\n")
    assert ("".join(out), "".join(err)) == ("got it\nü", "bad\n")
    assert (await process.get_session_command("s", running.cmd_id)).exit_code == 0
    with pytest.raises(sdk.DaytonaCommandAlreadyCompletedError):
        await process.send_session_command_input("s", running.cmd_id, "late")
    # `exit` ends the shell and with it the session; deleting kills what runs.
    with pytest.raises(sdk.DaytonaSessionEndedError):
        await process.execute_session_command("s", SessionExecuteRequest(command="exit 4"))
    with pytest.raises(sdk.DaytonaSessionEndedError):
        await process.execute_session_command("s", SessionExecuteRequest(command="true"))
    await process.create_session("t")
    await process.execute_session_command("t", SessionExecuteRequest(command="sleep 4242", run_async=True))
    assert len(await process.list_sessions()) == 2
    await process.delete_session("t")
    assert (
        await process.exec("for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; done | grep -c '^sleep 4242'")
    ).result == "0\n"
    with pytest.raises(sdk.DaytonaNotFoundError):
        await process.get_session("t")


async def test_terminals(daytona: AsyncDaytona) -> None:
    process = (await daytona.create()).process
    seen = bytearray()
    handle = await process.create_pty_session("p", seen.extend, cwd="/tmp", envs={"Q": "qq"})
    with pytest.raises(sdk.DaytonaConflictError):
        await process.create_pty_session("p", seen.extend)
    assert (await process.get_pty_session_info("p")).cwd == "/tmp"
    assert (await process.resize_pty_session("p", sdk_size(cols=91, rows=33))).cols == 91
    await handle.send_input("stty size; echo $Q-$PWD; exit 5\n")
    with anyio.fail_after(10):
        assert (await handle.wait()).exit_code == 5
    assert b"33 91" in seen
    assert b"qq-/tmp" in seen
    handle = await process.create_pty_session("k", seen.extend)
    await handle.kill()
    with anyio.fail_after(10):
        await handle.wait()
    assert await process.list_pty_sessions() == []


def sdk_size(cols: int, rows: int) -> Any:
    from daytona.common.pty import PtySize

    return PtySize(rows=rows, cols=cols)


async def test_files(daytona: AsyncDaytona, tmp_path: Path) -> None:
    fs = (await daytona.create()).fs
    data = os.urandom(3_000_000)
    await fs.upload_file(data, "/tmp/deep/ü (1)%20.bin")
    assert await fs.download_file("/tmp/deep/ü (1)%20.bin") == data
    await fs.upload_file_stream(data, "/tmp/streamed")
    assert b"".join([chunk async for chunk in await fs.download_file_stream("/tmp/streamed")]) == data
    (tmp_path / "local").write_bytes(b"local")
    await fs.upload_file(str(tmp_path / "local"), "rel")
    info = await fs.get_file_info("rel")
    assert (info.size, info.permissions, info.is_dir, info.path) == (5, "0644", False, "/home/daytona/rel")
    await fs.set_file_permissions("rel", "755")
    assert (await fs.get_file_info("rel")).permissions == "0755"
    await fs.create_folder("/tmp/dir", "700")
    await fs.move_files("rel", "/tmp/dir/moved")
    assert [each.name for each in await fs.list_files("/tmp/dir")] == ["moved"]
    with pytest.raises(sdk.DaytonaError, match="recursive"):
        await fs.delete_file("/tmp/dir")
    await fs.delete_file("/tmp/dir", recursive=True)
    with pytest.raises(sdk.DaytonaFileNotFoundError):
        await fs.get_file_info("/tmp/dir")
    with pytest.raises(sdk.DaytonaFileNotFoundError):
        await fs.download_file("/tmp/dir/moved")
    with pytest.raises(sdk.DaytonaError, match="400"):
        await fs.upload_file(b"", "/usr/read-only")


# Previews


@asynccontextmanager
async def opened(url: str, token: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url + "/ws", headers={"x-daytona-preview-token": token}) as socket,
    ):
        yield socket


async def fetch(url: str, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


async def test_previews(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    sandbox = await daytona.create()
    link = await sandbox.get_preview_link(8000)
    key = {"x-daytona-preview-token": link.token}
    assert (await fetch(link.url, **key))[0] == 502  # nothing listens
    await listening(sandbox)
    status, text = await fetch(f"{link.url}/path?q=1", **key, **{"X-Other": "kept"})
    assert (status, text.split("|")[0]) == (200, "hello")
    assert "GET /path?q=1 HTTP/1.1" in text
    assert "X-Other: kept" in text
    assert link.token not in text
    status, text = await fetch(f"{link.url}/?DAYTONA_SANDBOX_AUTH_KEY={link.token}&a=b")
    assert (status, link.token in text, "GET /?a=b " in text) == (200, False, True)
    assert (await fetch(link.url))[0] == 401
    browser = {"Accept": "text/html", "User-Agent": "Mozilla/5.0"}
    assert "Warning" in (await fetch(link.url, **key, **browser))[1]
    assert "hello" in (await fetch(link.url, **key, **browser, **{"X-Daytona-Skip-Preview-Warning": "true"}))[1]
    async with opened(link.url, link.token) as socket:
        await socket.send_str("ping")
        assert (await socket.receive_str(timeout=5)) == "ping"
    for port in (22, 2280, 22222, 33333, 10_000):
        assert (await send(service, "GET", f"/sandbox/{sandbox.id}/ports/{port}/preview-url"))[0] == 400
        assert (await fetch(link.url.replace("/8000-", f"/{port}-"), **key))[0] == 400
    signed = await sandbox.create_signed_preview_url(8000, 60)
    assert (await fetch(signed.url))[0] == 200
    await service.clock.advance(61)
    assert (await fetch(signed.url))[0] == 401
    service.faults.expire_tokens(sandbox.id)
    assert (await fetch(link.url, **key))[0] == 401
    with pytest.raises(aiohttp.WSServerHandshakeError):
        async with opened(link.url, link.token):
            pass
    assert (await fetch(link.url.replace(sandbox.id, "no-such"), **key))[0] == 404


async def test_preview_connections_break(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    sandbox = await daytona.create()
    await listening(sandbox)
    link = await sandbox.get_preview_link(8000)
    async with opened(link.url, link.token) as socket:
        await socket.send_str("ping")
        assert (await socket.receive_str(timeout=5)) == "ping"
        service.faults.silence(sandbox.id)
        await socket.send_str("lost")
        with pytest.raises(TimeoutError):
            await socket.receive(timeout=0.3)
        service.faults.cut(sandbox.id)
        assert (await socket.receive(timeout=5)).type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
    service.faults.add(f"PREVIEW /{sandbox.id}/8000", Break(after_bytes=400))
    async with opened(link.url, link.token) as socket:
        with anyio.fail_after(5):
            for _ in range(3):
                await socket.send_str("x" * 100)
            while not socket.closed:
                await socket.receive()
    service.faults.add(f"PREVIEW /{sandbox.id}/8000", Respond(503))
    assert (await fetch(link.url, **{"x-daytona-preview-token": link.token}))[0] == 503


async def test_preview_goes_idle() -> None:
    async with (
        DaytonaStandIn(preview_idle_s=60, preview_counts_as_activity=True) as service,
        client(service) as daytona,
    ):
        sandbox = await daytona.create()
        await listening(sandbox)
        link = await sandbox.get_preview_link(8000)
        async with opened(link.url, link.token) as socket:
            await service.clock.advance(59)
            await socket.send_str("ping")
            assert (await socket.receive_str(timeout=5)) == "ping"
            await service.clock.advance(61)
            assert (await socket.receive(timeout=5)).type != aiohttp.WSMsgType.TEXT
        assert service.previews.open == 0


# Limits and faults


async def test_rate_limit_headers() -> None:
    rates = {"authenticated": Rate(100), "failed-auth": Rate(1)}
    rates |= dict.fromkeys(("sandbox-create", "sandbox-lifecycle", "sandbox-list"), Rate(1))
    async with DaytonaStandIn(rates=rates) as service, client(service) as daytona:
        sandbox = await daytona.create()
        with pytest.raises(sdk.DaytonaRateLimitError) as caught:
            await daytona.create()
        headers = {name.lower(): value for name, value in caught.value.headers.items()}
        assert headers["x-ratelimit-limit-sandbox-create"] == "1"
        assert headers["x-ratelimit-remaining-sandbox-create"] == "0"
        assert headers["retry-after-sandbox-create"] == "60"
        assert headers["x-ratelimit-remaining-authenticated"] == "98"
        await service.clock.advance(61)
        await (await daytona.create()).stop()
        with pytest.raises(sdk.DaytonaRateLimitError) as caught:
            await sandbox.delete()
        assert any(name.lower() == "retry-after-sandbox-lifecycle" for name in caught.value.headers)
        for status in (200, 429):
            assert (await send(service, "GET", "/sandbox"))[0] == status
        async with aiohttp.ClientSession() as nobody:
            for status in (401, 429):
                async with nobody.get(f"{service.url}/sandbox") as answer:
                    assert answer.status == status
                    assert answer.headers["X-RateLimit-Remaining-failed-auth"] == "0"
        assert len(service.sandboxes) == 2


async def test_rate_windows() -> None:
    clock = Clock()
    limits = RateLimits(clock, {"a": Rate(2, 60)})
    assert [limits.hit(["a", "unknown"])[1] for _ in range(3)] == [True, True, False]
    await clock.advance(59)
    assert limits.hit(["a"])[1] is False
    await clock.advance(2)
    headers, passes = limits.hit(["a"])
    assert passes
    assert headers == {"X-RateLimit-Limit-a": "2", "X-RateLimit-Remaining-a": "1", "X-RateLimit-Reset-a": "60"}


async def test_faults_of_requests(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    service.faults.add("POST /sandbox", too_many(retry_after=7))
    with pytest.raises(sdk.DaytonaRateLimitError) as caught:
        await daytona.create()
    assert caught.value.headers["Retry-After-sandbox-create"] == "7"
    service.faults.add("POST /sandbox", Respond(503, "down"))
    with pytest.raises(sdk.DaytonaServiceUnavailableError):
        await daytona.create()
    assert not service.sandboxes
    # The sandbox is made, the answer is lost; the name finds it.
    service.faults.add("POST /sandbox", LoseResponse())
    with pytest.raises(sdk.DaytonaConnectionError):
        await daytona.create(CreateSandboxFromSnapshotParams(name="lost", labels={"run": "1"}))
    assert (await daytona.get("lost")).labels["run"] == "1"
    service.faults.add("POST /sandbox", Stuck())
    with pytest.raises(sdk.DaytonaTimeoutError):
        await daytona.create(CreateSandboxFromSnapshotParams(name="stuck"), timeout=1)
    stuck = await daytona.get("stuck")
    assert stuck.state == SandboxState.CREATING
    with pytest.raises(sdk.DaytonaConflictError):
        await stuck.delete()
    service.faults.release(stuck.id)
    await state(service, stuck.id, "started")
    service.faults.add("POST /sandbox", SlowStart(0.5))
    with anyio.fail_after(5):
        await daytona.create(CreateSandboxFromSnapshotParams(name="slow"))
    service.faults.add("POST /sandbox", Delay(0.6))  # is carried out, though nobody waits for it any more
    with pytest.raises(TimeoutError), anyio.fail_after(0.3):
        await daytona.create(CreateSandboxFromSnapshotParams(name="late"))
    with anyio.fail_after(5):
        while "late" not in {each.name for each in service.sandboxes.values()}:
            await anyio.sleep(0.05)
    service.faults.add("* /toolbox/*/process/execute", Delay(2))
    with pytest.raises(TimeoutError), anyio.fail_after(0.5):
        await stuck.process.exec("true")


async def test_faults_of_sandboxes(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    sandbox = await daytona.create()
    await sandbox.process.create_session("s")
    running = await sandbox.process.execute_session_command(
        "s", SessionExecuteRequest(command="sleep 99", run_async=True)
    )
    await service.faults.out_of_memory(sandbox.id)
    with pytest.raises(sdk.DaytonaSessionEndedError):
        await sandbox.process.execute_session_command("s", SessionExecuteRequest(command="true"))
    assert (await sandbox.process.get_session_command("s", running.cmd_id)).exit_code is None
    assert (await sandbox.process.exec("echo still here")).exit_code == 0
    service.faults.toolbox_down(sandbox.id)
    with pytest.raises(sdk.DaytonaBadGatewayError) as caught:
        await sandbox.process.exec("true")
    assert caught.value.source == "DAYTONA_PROXY"
    await sandbox.refresh_data()
    assert sandbox.state == SandboxState.STARTED
    await sandbox.delete()
    spot = await daytona.create(CreateSandboxFromSnapshotParams(spot=True))
    await service.faults.evict(spot.id)
    await spot.refresh_data()
    with pytest.raises(sdk.DaytonaSpotEvictedError):
        await spot.wait_for_sandbox_start()
    failed = await daytona.create()
    await service.faults.fail(failed.id, "out of memory")
    await failed.refresh_data()
    assert (failed.state, failed.error_reason) == (SandboxState.ERROR, "out of memory")
    await failed.delete(wait=True)


async def test_log_stream_breaks(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    process = (await daytona.create()).process
    await process.create_session("s")
    command = SessionExecuteRequest(command="while sleep 0.02; do echo tick; done", run_async=True)
    running = await process.execute_session_command("s", command)

    async def ignore(text: str) -> None:
        pass

    service.faults.add("GET /toolbox/*/logs", Break(after_bytes=50))
    with anyio.fail_after(5), pytest.raises(sdk.DaytonaError, match="1006"):
        await process.get_session_command_logs_async("s", running.cmd_id, ignore, ignore)
    service.faults.add("GET /toolbox/*/logs", Break(after_bytes=50, silent=True))
    with pytest.raises(TimeoutError), anyio.fail_after(0.5):
        await process.get_session_command_logs_async("s", running.cmd_id, ignore, ignore)


# The wire


async def test_answers_are_the_sdks_models(service: DaytonaStandIn, daytona: AsyncDaytona) -> None:
    sandbox = await daytona.create(CreateSandboxFromSnapshotParams(name="s", network_block_all=True, ttl_minutes=5))
    built = await daytona.create(CreateSandboxFromImageParams(image="python:3.13"))
    await daytona.snapshot.create(CreateSnapshotParams(name="n", image="python:3.13"))
    await sandbox.process.create_session("x")
    done = await sandbox.process.execute_session_command("x", SessionExecuteRequest(command="true"))
    await sandbox.process.create_pty_session("p", lambda _: None)

    async def get(path: str, method: str = "GET", body: object = None) -> Any:
        status, data = await send(service, method, path, body)
        assert status < 300, data
        return data

    base, box = f"/sandbox/{sandbox.id}", f"/toolbox/{sandbox.id}"
    check(api_models.Sandbox, await get(base))
    check(api_models.Sandbox, await get(f"/sandbox/{built.id}"))
    check(api_models.Sandbox, await get(f"{base}/network-settings", "POST", {"networkAllowList": "10.0.0.0/8"}))
    check(api_models.Sandbox, await get(f"{base}/public/true", "POST"))
    check(api_models.Sandbox, await get(f"{base}/autoarchive/60", "POST"))
    page = await get("/sandbox?limit=1")
    check(api_models.ListSandboxesResponse, page)
    check(api_models.SandboxListItem, page["items"][0])
    check(api_models.SandboxLabels, await get(f"{base}/labels", "PUT", {"labels": {"a": "b"}}))
    check(api_models.PortPreviewUrl, await get(f"{base}/ports/8000/preview-url"))
    check(api_models.SignedPortPreviewUrl, await get(f"{base}/ports/8000/signed-preview-url"))
    check(api_models.ToolboxProxyUrl, await get(f"{base}/toolbox-proxy-url"))
    check(api_models.Url, await get(f"{base}/build-logs-url"))
    check(api_models.PaginatedSnapshots, await get("/snapshots"))
    check(api_models.SnapshotDto, await get("/snapshots/n"))
    config = await get("/config")
    check(api_models.DaytonaConfiguration, config)
    check(api_models.RateLimitConfig, config["rateLimit"])
    check(api_models.Region, (await get("/regions"))[0])
    check(toolbox_models.ExecuteResponse, await get(f"{box}/process/execute", "POST", {"command": "true"}))
    check(toolbox_models.Session, await get(f"{box}/process/session/x"))
    check(toolbox_models.Command, await get(f"{box}/process/session/x/command/{done.cmd_id}"))
    check(toolbox_models.SessionCommandLogsResponse, await get(f"{box}/process/session/x/command/{done.cmd_id}/logs"))
    check(
        toolbox_models.SessionExecuteResponse, await get(f"{box}/process/session/x/exec", "POST", {"command": "true"})
    )
    check(toolbox_models.PtyListResponse, await get(f"{box}/process/pty"))
    check(toolbox_models.PtySessionInfo, await get(f"{box}/process/pty/p"))
    check(toolbox_models.FileInfo, await get(f"{box}/files/info?path=/tmp"))
    check(toolbox_models.FileInfo, (await get(f"{box}/files?path=/"))[0])
    check(toolbox_models.UserHomeDirResponse, await get(f"{box}/user-home-dir"))
    check(toolbox_models.WorkDirResponse, await get(f"{box}/work-dir"))
    status, error = await send(service, "GET", f"{box}/files/info?path=/none")
    assert status == 404
    check(toolbox_models.ErrorResponse, error)
    assert (await send(service, "GET", f"{box}/version", Authorization="Bearer no"))[0] == 401


async def test_standalone() -> None:
    argv = [sys.executable, "-m", "tests.support.daytona", "--unlimited"]
    async with await anyio.open_process(argv, stdout=subprocess.PIPE, stderr=None) as process:
        assert process.stdout is not None
        lines = BufferedByteReceiveStream(process.stdout)
        with anyio.fail_after(30):
            about = json.loads(await lines.receive_until(b"\n", 10_000))
        config = DaytonaConfig(api_key=about["api_key"], api_url=about["url"])
        async with AsyncDaytona(config) as daytona:
            await daytona.create(timeout=20)
        process.send_signal(signal.SIGTERM)
        with anyio.fail_after(10):
            said = json.loads(await lines.receive_until(b"\n", 10_000))
            assert await process.wait() == 0
    assert (said["created"], said["left"]) == (1, 1)
