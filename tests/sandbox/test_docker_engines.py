"""One engine reached in every way that users have, and Podman in its place: sandboxes are made, told of and lost alike.

Each way is the real thing: a TCP port (with TLS) in front of the machine's engine, sshd, a docker context,
Podman's service.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import create_server
from typing import Any

import anyio
import pytest
from anyio import CancelScope, to_thread
from anyio.abc import ByteReceiveStream, ByteStream, SocketAttribute
from anyio.from_thread import start_blocking_portal
from anyio.streams.tls import TLSListener, TLSStream

from harness.errors import ProviderUnavailable, SandboxError
from harness.models import Resources
from harness.sandbox.base import SandboxSettings
from harness.sandbox.docker import DockerProvider
from harness.sandbox.docker.pull import DEFAULT_IMAGE
from tests.sandbox.test_docker import make_lock, nothing_left, program, spec
from tests.support.engine import copy_image, private_engine
from tests.support.policy import Reply, ScriptedPolicy
from tests.support.workspace import Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

SOCKET = Path("/var/run/docker.sock")
OBEY = "import os, sys\nfor line in sys.stdin: exec(line)"
FULL = b"x = bytearray(b'x') * (1 << 30)\n"


@dataclass
class Way:
    """A way to an engine."""

    name: str
    env: dict[str, str]
    """What the user has set."""
    cut: Callable[[], None]
    """Ends every connection that there is; new ones can be made."""


def need(*programs: str) -> None:
    """Skip where a program is not installed, as tests that need Docker are skipped without an engine."""
    if missing := [each for each in programs if find(each) is None]:
        reason = f"not installed: {', '.join(missing)}"
        (pytest.fail if os.environ.get("HARNESS_REQUIRE_DOCKER") == "1" else pytest.skip)(reason)


def find(name: str) -> str | None:
    return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@contextmanager
def service(command: list[str], folder: Path, ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        # In a folder of its own: Podman leaves a file where it was started when memory runs out.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + 30
        while not ready():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait(20)


# -- tcp and TLS


@dataclass
class Port:
    """A port on loopback whose connections go to an engine's socket."""

    number: int
    socket: Path
    open: set[CancelScope] = field(default_factory=set)

    async def carry(self, client: ByteStream) -> None:
        with CancelScope() as scope, suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            self.open.add(scope)
            async with client, await anyio.connect_unix(self.socket) as engine, anyio.create_task_group() as tasks:
                tasks.start_soon(pump, client, engine)
                await pump(engine, client)
        self.open.discard(scope)

    def cut(self) -> None:
        for scope in list(self.open):
            scope.cancel()


async def pump(source: ByteReceiveStream, target: ByteStream) -> None:
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        async for data in source:
            await target.send(data)
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        if isinstance(target, TLSStream):  # which knows no half of an end
            await target.aclose()
        else:
            await target.send_eof()


@asynccontextmanager
async def listening(socket: Path, tls: ssl.SSLContext | None) -> AsyncIterator[Port]:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = Port(listener.extra(SocketAttribute.local_port), socket)
        served = TLSListener(listener, tls, standard_compatible=False) if tls else listener
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(served.serve, port.carry)
            yield port
            tasks.cancel_scope.cancel()


@contextmanager
def tcp(folder: Path, tls: ssl.SSLContext | None = None, name: str = "tcp", socket: Path = SOCKET) -> Iterator[Way]:
    if not socket.exists():
        pytest.skip(f"the engine has no socket at {socket}")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(listening(socket, tls)) as port:
        yield Way(name, {"DOCKER_HOST": f"tcp://127.0.0.1:{port.number}"}, partial(portal.call, port.cut))


CERTIFICATES = """
openssl req -new -x509 -nodes -newkey rsa:2048 -days 2 -subj /CN=ca -keyout ca-key.pem -out ca.pem
openssl req -new -nodes -newkey rsa:2048 -subj /CN=localhost -keyout server-key.pem -out server.csr
printf 'subjectAltName = IP:127.0.0.1\\nextendedKeyUsage = serverAuth\\n' > server.cnf
openssl x509 -req -days 2 -in server.csr -CA ca.pem -CAkey ca-key.pem -set_serial 1 -extfile server.cnf -out server.pem
openssl req -new -nodes -newkey rsa:2048 -subj /CN=client -keyout key.pem -out client.csr
printf 'extendedKeyUsage = clientAuth\\n' > client.cnf
openssl x509 -req -days 2 -in client.csr -CA ca.pem -CAkey ca-key.pem -set_serial 2 -extfile client.cnf -out cert.pem
"""
"""As Docker's documentation ("Protect the Docker daemon socket") makes them."""


@contextmanager
def tls(folder: Path) -> Iterator[Way]:
    need("openssl")
    subprocess.run(["sh", "-ec", CERTIFICATES], cwd=folder, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "server.pem", folder / "server-key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    with tcp(folder, context, "tls") as way:
        way.env |= {"DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(folder)}
        yield way


@contextmanager
def docker_context(folder: Path) -> Iterator[Way]:
    with tcp(folder, name="context") as way:
        description = {"Name": "far", "Metadata": {}, "Endpoints": {"docker": {"Host": way.env.pop("DOCKER_HOST")}}}
        meta = folder / ".docker/contexts/meta" / hashlib.sha256(b"far").hexdigest() / "meta.json"
        meta.parent.mkdir(parents=True)
        meta.write_text(json.dumps(description))
        (folder / ".docker/config.json").write_text(json.dumps({"currentContext": "far"}))
        way.env["HOME"] = str(folder)
        yield way


# -- ssh


@contextmanager
def ssh(folder: Path) -> Iterator[Way]:
    need("sshd", "ssh", "ssh-keygen")
    if not SOCKET.exists():
        pytest.skip(f"the engine has no socket at {SOCKET}")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # what the service's unit makes where there is systemd
    for name in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    port = free_port()
    known = f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}"
    (folder / "known_hosts").write_text(known)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
    )
    (folder / "config").write_text(
        f"Host *\nIdentityFile {folder}/user\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known_hosts\n"
    )
    script(folder / "bin/ssh", f'#!/bin/sh\nexec {find("ssh")} -F {folder}/config "$@"\n')  # it does not heed HOME
    command = [str(find("sshd")), "-D", "-e", "-f", str(folder / "sshd_config")]
    with service(command, folder, lambda: "listening" in (folder / "log").read_text()) as sshd:

        def cut() -> None:
            for session in Path(f"/proc/{sshd.pid}/task/{sshd.pid}/children").read_text().split():
                os.kill(int(session), signal.SIGKILL)

        host = f"ssh://{getpass.getuser()}@127.0.0.1:{port}"
        yield Way("ssh", {"DOCKER_HOST": host, "PATH": f"{folder}/bin:{os.environ['PATH']}"}, cut)


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


# -- Podman

RUNC = """#!/usr/bin/env python3
# runc, without the limit of processes that Podman asks for: in some containers and machines root may not raise it.
import json, os, sys
if "--bundle" in sys.argv:
    path = sys.argv[sys.argv.index("--bundle") + 1] + "/config.json"
    with open(path) as file:
        config = json.load(file)
    limits = config["process"].get("rlimits", [])
    config["process"]["rlimits"] = [limit for limit in limits if limit["type"] != "RLIMIT_NPROC"]
    with open(path, "w") as file:
        json.dump(config, file)
os.execvp("runc", ["runc", *sys.argv[1:]])
"""


@contextmanager
def podman(folder: Path) -> Iterator[Way]:
    need("podman", "runc")
    if os.geteuid() != 0:
        pytest.skip("Podman with storage of its own needs root here")
    runtime = script(folder / "bin/runc", RUNC)
    socket = folder / "podman.sock"
    command = ["podman", "--cgroup-manager", "cgroupfs", "--runtime", str(runtime), "--storage-driver", "overlay"]
    for option in ("root", "runroot", "tmpdir"):
        command += [f"--{option}", str(folder / option)]
    try:
        with service([*command, "system", "service", "--time=0", f"unix://{socket}"], folder, socket.is_socket):
            anyio.run(copy_image, DEFAULT_IMAGE, f"unix://{socket}")
            with tcp(folder, name="podman", socket=socket) as way:
                yield way
    finally:
        subprocess.run(["umount", "-l", folder / "root/overlay"], stderr=subprocess.DEVNULL, check=False)


WAYS = {"tcp": tcp, "tls": tls, "context": docker_context, "ssh": ssh, "podman": podman}


@pytest.fixture(scope="module", params=WAYS)
def made(request: pytest.FixtureRequest, private_temporary_folder: None) -> Iterator[Way]:
    with tempfile.TemporaryDirectory() as folder, WAYS[request.param](Path(folder)) as way:
        yield way


@pytest.fixture
def way(made: Way, monkeypatch: pytest.MonkeyPatch) -> Way:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


only = partial(pytest.mark.parametrize, "made", indirect=True)


async def test_sandboxes_are_made_told_of_and_lost_as_with_any_engine(way: Way) -> None:
    provider = program(OBEY)
    wanted = [spec(resources=Resources(memory_mib=64)) for _ in range(4)]
    async with nothing_left(provider):
        assert [finding for finding in await provider.doctor() if finding.required and not finding.ok] == []
        async with await provider.create(wanted[0]) as sandbox:
            await sandbox.stream.send(b"print('hello', flush=True)\n")
            assert await sandbox.stream.receive() == b"hello\n"
            assert (await sandbox.outcome()).state == "running"
            await sandbox.stream.send(FULL)
            await until_ended(sandbox.stream)
            # Podman tells of the kill, not why. The guest sees the reason when it is not the guest itself.
            assert (await sandbox.outcome()).state == ("killed" if way.name == "podman" else "out_of_memory")
        async with await provider.create(wanted[1]) as sandbox:
            (info,) = [info for info in await provider.list() if info.name == wanted[1].name]
            assert info.owner == wanted[1].owner
            await provider.remove(info)
            await until_ended(sandbox.stream)
            outcome = await sandbox.outcome()
            assert (outcome.state, outcome.code) == ("killed", 137)
        async with await provider.create(wanted[2]) as sandbox:
            await to_thread.run_sync(way.cut)
            await until_ended(sandbox.stream)
            await provider.engine.back(20)
            with anyio.fail_after(20):
                while wanted[2].name in {info.name for info in await provider.list()}:  # it has ended by itself
                    await anyio.sleep(0.05)
            assert (await sandbox.outcome()).state != "running"
        async with await provider.create(wanted[3]) as sandbox:
            await sandbox.stream.send(b"sys.exit(3)\n")
            await until_ended(sandbox.stream)
            assert (await sandbox.outcome()).code == 3


async def until_ended(stream: ByteStream) -> None:
    with anyio.fail_after(30), suppress(anyio.BrokenResourceError):
        async for _ in stream:
            pass


@only(["ssh", "podman"])
async def test_a_run_whose_connection_is_cut_goes_on(way: Way, tmp_path: Path, scripted_policy: ScriptedPolicy) -> None:
    workspace = Workspace(tmp_path / "ws")

    cuts = [way.cut]

    def answer(body: dict[str, Any]) -> Reply:
        if cuts and "say ok" in str(body):  # not the question that the run asks before it starts
            cuts.pop()()
        return Reply("ok")

    scripted_policy.script = answer
    run = partial(workspace.run, "--sandbox", "docker", "--policy-url", scripted_policy.url)
    finished = await to_thread.run_sync(run)
    assert finished.code == 0, finished.err
    (trial,) = finished.trials
    assert (trial["reward"], trial["attempts"]) == (1.0, 2), trial
    async with DockerProvider() as provider:
        assert [info for info in await provider.list() if info.owner and info.owner.run == trial["rollout_id"]] == []


async def test_a_certificate_that_the_users_authority_did_not_sign_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("engine", "user"):
        (tmp_path / name).mkdir()
    with tls(tmp_path / "engine") as way, tls(tmp_path / "user"):
        for name, value in (way.env | {"DOCKER_CERT_PATH": str(tmp_path / "user")}).items():
            monkeypatch.setenv(name, value)
        assert "CERTIFICATE_VERIFY_FAILED" in await refusal("DOCKER_CERT_PATH")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
        assert "cannot be read" in await refusal("DOCKER_CERT_PATH")


async def refusal(hint: str) -> str:
    """Why the engine that the user's settings name cannot be had."""
    async with DockerProvider() as provider:
        with pytest.raises(ProviderUnavailable) as caught:
            await provider.engine.facts()
    assert hint in caught.value.hint
    return caught.value.message


@only(["ssh"])
async def test_ssh_says_why_it_does_not_get_to_an_engine(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, host = Path(way.env["PATH"].partition("/bin:")[0]), way.env["DOCKER_HOST"]
    config = (folder / "config").read_text()
    monkeypatch.setenv("DOCKER_HOST", f"{host}/no/such.sock")
    assert "/no/such.sock cannot be reached there" in await refusal(f"ssh {host} ls -l /no/such.sock")
    monkeypatch.setenv("DOCKER_HOST", host)
    try:
        (folder / "config").write_text(config.replace("/user\n", "/stranger\n"))
        assert "Permission denied (publickey)" in await refusal(f"ssh {host} ls")
        (folder / "config").write_text(config.replace("known_hosts\n", "none\n"))
        assert "Host key verification failed" in await refusal(f"ssh {host} ls")
    finally:
        (folder / "config").write_text(config)


@only(["ssh"])
async def test_ssh_carries_more_connections_than_sshd_allows_sessions(way: Way) -> None:
    async with DockerProvider() as provider, anyio.create_task_group() as tasks:
        opened = [anyio.Event() for _ in range(12)]
        for event in opened:
            tasks.start_soon(provider.engine.events, "harness.none=1", "", event.set, lambda _: None)
        with anyio.fail_after(20):
            for event in opened:
                await event.wait()
        tasks.cancel_scope.cancel()


@only(["context"])
async def test_the_address_goes_before_the_context(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONTEXT", "nowhere")
    assert "nowhere" in await refusal("docker context ls")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{SOCKET}")
    async with DockerProvider() as provider:
        assert (await provider.engine.facts()).name == "Docker"


@only(["podman"])
async def test_podman_keeps_images_under_our_names_and_refuses_a_runtime(way: Way, tmp_path: Path) -> None:
    async def root() -> AsyncIterator[bytes]:
        yield bytes(10240)

    async with DockerProvider() as provider:
        changes = ['CMD ["/bin/sh"]', "LABEL harness.image=environment"]
        await provider.engine.import_image(
            root(), reference="harness-env:imported", changes=changes, on_message=lambda _: None, timeout_s=30
        )
        stored = {image.tag for image in await provider.stored()}
        assert {DEFAULT_IMAGE, "harness-env:imported"} <= stored
        assert "harness-env:imported" in {image.tag for image in await provider.prune(0, print)}
        assert {image.tag for image in await provider.stored()} == {DEFAULT_IMAGE}
        # It would run the sandbox with its own all the same.
        with pytest.raises(SandboxError, match="Podman engine has no runtime 'runsc'"):
            await provider.prepare(make_lock(tmp_path), SandboxSettings(runtime="runsc"), print)


async def test_a_sandbox_in_gvisor(tmp_path: Path) -> None:
    if find("runsc") is None:
        pytest.skip("not installed: runsc")
    # Any kernel will do for this platform; old builds look for a network where there is none.
    runsc = script(tmp_path / "runsc", '#!/bin/sh\nexec runsc --platform=ptrace --network=none "$@"\n')
    with private_engine() as engine:
        engine.options = ["--add-runtime", f"runsc={runsc}"]
        with engine.running():
            await copy_image(DEFAULT_IMAGE, engine.url)
            provider = DockerProvider(engine.url, command=lambda python, lib, boot: [python, "-I", "-c", OBEY])
            async with nothing_left(provider), await provider.create(spec(runtime="runsc")) as sandbox:
                await sandbox.stream.send(b"print(open('/proc/version').read(), end='', flush=True)\n")
                with anyio.fail_after(30):
                    assert (await sandbox.stream.receive()).decode() != Path("/proc/version").read_text()
                await sandbox.stream.send(b"sys.exit(3)\n")
                await until_ended(sandbox.stream)
                assert (await sandbox.outcome()).code == 3
