"""Containers as sandboxes: what a program inside sees of its isolation, what becomes of it, that nothing is left."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import CancelScope
from anyio.abc import SocketAttribute, SocketStream

from harness.errors import ProviderUnavailable, SandboxError
from harness.models import Resources
from harness.rollout.lock import Lock
from harness.sandbox.base import Environment, SandboxSettings, SandboxSpec
from harness.sandbox.docker import DockerProvider
from harness.sandbox.docker.pull import DEFAULT_IMAGE
from harness.sandbox.owner import this_process
from tests.support.gateway import Gateway

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

RUN = f"test-{secrets.token_hex(4)}"


def program(source: str) -> DockerProvider:
    """A provider whose guest is a small program in the plain default image."""
    return DockerProvider(command=lambda python, lib, boot: [python, "-I", "-c", source])


def spec(image: str = DEFAULT_IMAGE, **settings: Any) -> SandboxSpec:
    return SandboxSpec(
        name=f"{RUN}-{secrets.token_hex(4)}",
        owner=this_process(RUN),
        environment=Environment(key="test", handle=image, python="python3"),
        settings=SandboxSettings(**settings),
        trial="row-1",
    )


def make_lock(project: Path, requirements: str = "", requires_python: str = ">=3.12", digest: str = "test") -> Lock:
    return Lock(
        project=project,
        requirements=requirements,
        requires_python=requires_python,
        sdk="",
        digest=digest,
    )


@asynccontextmanager
async def nothing_left(provider: DockerProvider) -> AsyncIterator[None]:
    async with provider:
        try:
            yield
        finally:
            left = [info for info in await provider.list() if info.owner is not None and info.owner.run == RUN]
            for info in left:
                await provider.remove(info)
        assert left == []


async def said(source: str, **settings: Any) -> Any:
    """What a program inside prints, as JSON."""
    provider = program("import json, os\n" + source)
    async with nothing_left(provider), await provider.create(spec(**settings)) as sandbox:
        with anyio.fail_after(30):
            output = b"".join([chunk async for chunk in sandbox.stream])
        assert output, (await sandbox.outcome()).last_lines
        return json.loads(output)


async def test_it_runs_as_nobody_in_particular_with_no_rights_and_no_network() -> None:
    seen = await said("""
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()], "pid": os.getpid(),
    "caps": [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privs": status["NoNewPrivs"], "seccomp": status["Seccomp"],
    "interfaces": sorted(os.listdir("/sys/class/net")), "routes": open("/proc/net/route").read().splitlines()[1:],
    "env": dict(os.environ), "sock": os.path.exists("/var/run/docker.sock"),
}))""")
    assert seen["ids"][:3] == [1000, 1000, 1000]
    assert set(seen["ids"][3]) <= {1000}
    assert seen["pid"] == 1
    assert seen["caps"] == [0, 0, 0, 0, 0]
    assert seen["no_new_privs"] == "1"
    assert seen["seccomp"] == "2"
    assert seen["interfaces"] == ["lo"]
    assert seen["routes"] == []
    assert sorted(seen["env"]) == ["HOME", "HOSTNAME", "LANG", "PATH"]
    assert not seen["sock"]


async def test_plain_variables_travel_over_the_channel_and_never_in_the_containers_description() -> None:
    provider = program("import sys; sys.stdin.read()")
    wanted = spec(env={"API_TOKEN": "s3cr3t-value"})
    async with nothing_left(provider), await provider.create(wanted) as sandbox:
        assert "s3cr3t-value" not in json.dumps(await provider.engine.inspect(sandbox.id))


async def test_files_can_be_written_where_they_should_and_nowhere_else() -> None:
    seen = await said(
        """
def attempt(do):
    try:
        do()
        return "ok"
    except OSError as error:
        return os.strerror(error.errno)

def fill(path):
    with open(path, "wb", 0) as file:
        for _ in range(80):
            file.write(bytes(1 << 20))

def many(folder):
    os.mkdir(folder)
    for number in range(20000):
        open(f"{folder}/{number}", "x").close()

def script(path):
    with open(path, "w") as file:
        file.write("#!/bin/sh\\nexit 0\\n")
    os.chmod(path, 0o755)
    assert os.system(path) == 0

print(json.dumps({
    "root": attempt(lambda: open("/x", "w")), "usr": attempt(lambda: open("/usr/x", "w")),
    "sys": attempt(lambda: open("/sys/kernel/mm/transparent_hugepage/enabled", "w")),
    "proc": attempt(lambda: open("/proc/sys/kernel/core_pattern", "w")),
    "runs": [attempt(lambda: script(f"{folder}/run")) for folder in ("/sandbox", "/tmp")],
    "one_file": attempt(lambda: fill("/sandbox/big")), "size": os.path.getsize("/sandbox/big"),
    "disk": [attempt(lambda: fill("/sandbox/big2")), attempt(lambda: fill("/sandbox/big3"))],
    "inodes": attempt(lambda: many("/tmp/many")), "modes": [oct(os.stat(p).st_mode) for p in ("/sandbox", "/tmp")],
}))""",
        resources=Resources(disk_mib=64, file_mib=32, memory_mib=512),
    )
    assert seen["root"] == seen["usr"] == "Read-only file system"
    assert seen["sys"] != "ok"
    assert seen["proc"] != "ok"
    assert seen["runs"] == ["ok", "ok"]
    assert (seen["one_file"], seen["size"]) == ("File too large", 32 << 20)
    assert seen["disk"][1] == "No space left on device"
    assert seen["inodes"] == "No space left on device"
    assert seen["modes"] == ["0o41777", "0o41777"]


async def test_a_writable_root_is_only_writable_by_its_owner() -> None:
    seen = await said("print(json.dumps([os.access('/', os.W_OK), open('/proc/mounts').read().split(' / ')[1][:30]]))")
    assert seen[0] is False
    assert " ro," in f" {seen[1].split(' ', 1)[1]}"
    seen = await said("print(json.dumps(open('/proc/mounts').read().split(' / ')[1][:30]))", writable_root=True)
    assert " rw," in f" {seen.split(' ', 1)[1]}"


async def test_processes_open_files_and_cpus_are_limited() -> None:
    seen = await said(
        """
import time
children, files = [], []
try:
    while len(children) < 200:
        pid = os.fork()
        if not pid:
            time.sleep(30)
            os._exit(0)
        children.append(pid)
except OSError as error:
    forks = [len(children), error.errno]
for pid in children:
    os.kill(pid, 9)
try:
    while len(files) < 500:
        files.append(os.open("/dev/null", 0))
except OSError as error:
    opened = [len(files), error.errno]
print(json.dumps({"forks": forks, "opened": opened}))""",
        resources=Resources(processes=32, open_files=64),
    )
    assert seen["forks"] == [31, 11]
    assert seen["opened"][0] < 64
    assert seen["opened"][1] == 24


@pytest.mark.parametrize(
    ("source", "state", "code"),
    [
        pytest.param("import sys; print('bye', file=sys.stderr); sys.exit(3)", "exited", 3, id="exit"),
        pytest.param("import os; os.abort()", "killed", 139, id="signal"),
        pytest.param("x = bytearray(b'x') * (1 << 30)", "out_of_memory", 137, id="memory"),
    ],
)
async def test_what_became_of_it_is_told(source: str, state: str, code: int) -> None:
    provider = program(source)
    wanted = spec(resources=Resources(memory_mib=64))
    async with nothing_left(provider), await provider.create(wanted) as sandbox:
        with anyio.fail_after(30):
            assert b"".join([chunk async for chunk in sandbox.stream]) == b""
        outcome = await sandbox.outcome()
        assert (outcome.state, outcome.code) == (state, code)
        assert ("bye" in outcome.last_lines) == (state == "exited")


async def test_a_running_one_and_a_vanished_one_are_told_apart() -> None:
    provider = program("import sys; sys.stdin.read()")
    async with nothing_left(provider), await provider.create(spec()) as sandbox:
        assert (await sandbox.outcome()).state == "running"
        await provider.engine.remove(sandbox.id)
        outcome = await sandbox.outcome()
        assert (outcome.state, outcome.code) == ("killed", 137)
        await sandbox.destroy()
        await sandbox.destroy()


async def test_the_last_words_are_bounded() -> None:
    provider = program("import sys; sys.stderr.write('x' * 1_000_000 + 'the end'); sys.exit(1)")
    async with nothing_left(provider), await provider.create(spec()) as sandbox:
        with anyio.fail_after(30):
            assert [chunk async for chunk in sandbox.stream] == []
        words = (await sandbox.outcome()).last_lines
        assert len(words) == 8192
        assert words.endswith("the end")


async def test_the_guest_reads_the_end_of_its_input_when_the_host_goes() -> None:
    provider = program("import sys; sys.stdin.buffer.read(); sys.exit(9)")
    async with nothing_left(provider):
        sandbox = await provider.create(spec())
        await sandbox.stream.aclose()
        with anyio.fail_after(10):
            while (outcome := await sandbox.outcome()).state == "running":
                await anyio.sleep(0.05)
        assert outcome.code == 9
        await sandbox.destroy()


async def test_listed_ones_carry_their_owner_and_can_be_removed() -> None:
    provider = program("import sys; sys.stdin.read()")
    async with nothing_left(provider):
        wanted = spec()
        sandbox = await provider.create(wanted)
        (info,) = [info for info in await provider.list() if info.name == wanted.name]
        assert info.id == sandbox.id
        assert info.owner == wanted.owner
        assert info.state == "running"
        assert info.labels["harness.trial"] == "row-1"
        assert info.age_s() < 60
        await provider.remove(info)
        await provider.remove(info)
        assert wanted.name not in {info.name for info in await provider.list()}
        await sandbox.destroy()


async def test_a_create_that_is_cancelled_at_any_moment_leaves_nothing() -> None:
    provider = program("import sys; sys.stdin.read()")
    choice = random.Random(7)
    made: list[str] = []
    async with nothing_left(provider):
        await provider.engine.facts()

        async def one(delay: float) -> None:
            with anyio.move_on_after(delay):
                sandbox = await provider.create(spec())
                made.append(sandbox.id)
                with anyio.CancelScope(shield=True):
                    await sandbox.destroy()

        for _ in range(5):
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(one, choice.choice([0.0, choice.random() * 0.03, choice.random() * 1.0]))
    assert len(made) < 20


async def test_a_create_whose_name_is_taken_fails_and_leaves_the_other_alone() -> None:
    provider = program("import sys; sys.stdin.read()")
    wanted = spec()
    async with nothing_left(provider), await provider.create(wanted) as sandbox:
        with pytest.raises(SandboxError, match="already in use"):
            await provider.create(wanted)
        assert (await sandbox.outcome()).state == "running"


async def test_a_program_that_cannot_be_started_leaves_nothing() -> None:
    provider = DockerProvider(command=lambda python, lib, boot: ["/no/such/program"])
    async with nothing_left(provider):
        with pytest.raises(SandboxError, match="no such file"):
            await provider.create(spec())


async def test_an_image_that_is_gone_says_so() -> None:
    provider = program("pass")
    async with nothing_left(provider):
        with pytest.raises(ProviderUnavailable, match="not there any more"):  # nor will the next one find it
            await provider.create(spec("sha256:" + "0" * 64))


@pytest.mark.parametrize("url", ["unix:///no/such/docker.sock", "tcp://127.0.0.1:9"])
async def test_an_engine_that_does_not_answer_is_named_with_what_to_do(url: str) -> None:
    async with DockerProvider(url) as provider:
        (finding,) = await provider.doctor()
        assert not finding.ok
        assert finding.required
        assert "dockerd" in finding.remedy
        with pytest.raises(ProviderUnavailable, match=url.rpartition("/")[2]) as caught:
            await provider.create(spec())
        assert "DOCKER_HOST" in caught.value.hint


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    if not Path("/var/run/docker.sock").exists():
        pytest.skip("the engine has no socket at /var/run/docker.sock")
    return Gateway(tmp_path)


async def test_a_trial_costs_three_calls(gateway: Gateway) -> None:
    provider = DockerProvider(gateway.url, command=lambda python, lib, boot: ["cat"])
    async with anyio.create_task_group() as tasks, nothing_left(provider):
        await tasks.start(gateway.serve)
        async with await provider.create(spec()) as sandbox:  # the first asks what the engine and the image are
            assert sandbox.id
        gateway.calls.clear()
        async with await provider.create(spec()) as sandbox:
            await sandbox.stream.send(b"hello")
            assert await sandbox.stream.receive() == b"hello"
        calls = [(call.split()[0], call.split("?")[0].rpartition("/")[2]) for call in gateway.calls]
        assert calls == [("POST", "create"), ("POST", "attach"), ("POST", "start")]
        tasks.cancel_scope.cancel()


async def test_an_engine_that_goes_away_is_told_from_one_that_was_never_there(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.sandbox.docker.provider._REMOVE_S", 1)
    monkeypatch.setattr("harness.sandbox.docker.provider.ENGINE_S", 1)
    provider = DockerProvider(gateway.url, command=lambda python, lib, boot: ["cat"])
    async with nothing_left(program("")), provider, anyio.create_task_group() as tasks:
        cut: CancelScope = await tasks.start(gateway.serve)
        sandbox = await provider.create(spec())
        cut.cancel()
        with anyio.fail_after(10), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await sandbox.stream.receive()
        assert (await sandbox.outcome()).state == "engine_unreachable"
        with pytest.raises(ProviderUnavailable, match="has not been back for 1 s"):
            await provider.create(spec())
        with pytest.raises(SandboxError):
            await sandbox.destroy()
        async with DockerProvider() as direct:  # it removed itself when its host was gone
            assert await direct.engine.inspect(sandbox.id) is None
        tasks.cancel_scope.cancel()


async def test_something_else_than_an_engine_is_not_taken_for_one() -> None:
    async def answer(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\nhello")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(SocketAttribute.local_port)
        async with DockerProvider(f"tcp://127.0.0.1:{port}") as provider:
            with pytest.raises(ProviderUnavailable, match="not a Docker engine"):
                await provider.engine.facts()
        tasks.cancel_scope.cancel()


async def test_the_doctor_finds_this_engine_well() -> None:
    async with DockerProvider() as provider:
        findings = {finding.check: finding for finding in await provider.doctor()}
    assert all(finding.ok for finding in findings.values() if finding.required)
    assert "Docker" in findings["docker engine"].detail
    assert {"docker api", "docker storage", "docker limits", "docker image"} <= findings.keys()


async def test_what_the_engine_cannot_give_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    async with DockerProvider() as provider:
        many = SandboxSettings(resources=Resources(cpus=4096))
        with pytest.raises(SandboxError, match="CPUs"):
            await provider.prepare(make_lock(tmp_path), many, print)
        with pytest.raises(SandboxError, match="no runtime 'runsc-nope'"):
            await provider.prepare(make_lock(tmp_path), SandboxSettings(runtime="runsc-nope"), print)
