from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from harness.errors import ProviderUnavailable, SandboxError
from harness.guest import ENV, LIB
from harness.models import Resources
from harness.sandbox import bwrap, hostproc, local
from harness.sandbox.base import Environment
from harness.sandbox.local import LocalProvider
from tests.sandbox import standin
from tests.sandbox.standin import ask, spec

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.namespaces,
    pytest.mark.skipif(platform.system() != "Linux", reason="namespaces are Linux's"),
]

PREFIX = str(Path(sys.base_prefix).resolve())
MODES = [pytest.param(False, id="user-namespace")]
if os.geteuid() == 0:
    MODES.append(pytest.param(True, id="root"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    path = standin.build_environment(tmp_path_factory.mktemp("local"))
    return Environment(key="k", handle=str(path), python=f"{ENV}/bin/python")


@pytest.fixture(params=MODES)
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[LocalProvider]:
    before = _descriptors()
    async with LocalProvider(_command=standin.command, _as_root=request.param) as made:
        yield made
        assert await standin.listed(made) == []
    assert _descriptors() <= before + 1  # the event loop's first subprocess may open one for good


async def test_sees_nothing_of_the_host(provider: LocalProvider, environment: Environment, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("label")
    async with standin.sandbox(provider, spec(environment)) as made:
        seen = await ask(made, "import os; r = sorted(os.listdir('/'))")
        assert set(seen) <= {
            "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "opt", "proc", "sandbox", "sbin", "tmp", "usr",
            Path(sys.base_prefix).parts[1],
        }  # fmt: skip
        for path in (secret, "/etc/shadow", "/run", "/sys", "/var", Path.home() / ".bashrc", Path(environment.handle)):
            assert not await ask(made, f"import os; r = os.path.exists({str(path)!r})"), path
        assert (
            await ask(made, "import os; r = os.listdir('/tmp') + os.listdir('/sandbox') + os.listdir('/dev/shm')") == []
        )
        assert await ask(made, "import os; r = [p for p in os.listdir('/proc') if p.isdigit()]") == ["1"]
        variables = await ask(made, "import os; r = dict(os.environ)")
        assert set(variables) <= {"PATH", "VIRTUAL_ENV", "HOME", "USER", "LOGNAME", "LANG", "LC_CTYPE", "PWD"}
        assert await ask(made, "import socket; r = socket.gethostname()") == "sandbox"
        assert await ask(made, "import os, pwd; r = pwd.getpwuid(os.getuid()).pw_name") == "sandbox"
        assert "\0" not in await ask(made, "r = open('/proc/1/environ').read().replace('\\0', ' ')")
        assert "journal" not in await ask(made, "r = open('/proc/1/cmdline').read()")


async def test_has_no_privileges(provider: LocalProvider, environment: Environment) -> None:
    async with standin.sandbox(provider, spec(environment)) as made:
        status = dict(
            line.split(":\t", 1)
            for line in (await ask(made, "r = open('/proc/self/status').read()")).splitlines()
            if ":\t" in line
        )
        assert status["NoNewPrivs"] == "1"
        assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapAmb")} == {0}
        assert "0" not in status["Uid"].split()
        assert status["Groups"].split() in ([], status["Gid"].split()[:1])
        unshare = "import ctypes; r = ctypes.CDLL(None).unshare(0x10000000)"
        assert await ask(made, unshare) == -1
        if not (os.geteuid() == 0 and status["Uid"].split()[0] == "1000"):  # a real root must not run that mode
            assert "Error" in await ask(made, "open('/proc/sys/kernel/hostname', 'w').write('x')")
        assert "Error" in await ask(made, "import os; os.setuid(0)")


async def test_has_no_network_but_loopback(provider: LocalProvider, environment: Environment) -> None:
    async with standin.sandbox(provider, spec(environment)) as made:
        assert await ask(made, "import socket; r = [n for _, n in socket.if_nameindex()]") == ["lo"]
        assert "unreachable" in await ask(made, "import socket; socket.create_connection(('192.0.2.1', 80), 5)")
        loop = "import socket as s; l = s.create_server(('127.0.0.1', 0)); s.create_connection(l.getsockname()); r = 1"
        assert await ask(made, loop) == 1


async def test_writes_only_to_bounded_folders(provider: LocalProvider, environment: Environment) -> None:
    async with standin.sandbox(provider, spec(environment, resources=Resources(disk_mib=16))) as made:
        for path in (
            "/",
            "/usr",
            "/etc",
            "/dev",
            "/opt/harness/env",
            "/opt/harness/lib/harness_guest",
            sys.base_prefix,
        ):
            assert "Error" in await ask(made, f"open({path!r} + '/x', 'w')"), path
        for path in ("/tmp", "/sandbox", "/dev/shm"):
            fill = f"f = open({path!r} + '/x', 'wb', 0)\nfor _ in range(18): f.write(bytes(1 << 20))"
            assert "No space left" in await ask(made, fill), path


async def test_environment_and_guest_are_there(provider: LocalProvider, environment: Environment) -> None:
    async with standin.sandbox(provider, spec(environment)) as made:
        assert await ask(made, "import sys; r = [sys.prefix, sys.base_prefix]") == [
            ENV,
            PREFIX,
        ]
        assert await ask(
            made, f"import sys; sys.path.insert(0, {LIB!r}); import harness_guest; r = harness_guest.PROTOCOL"
        )
        assert await ask(made, "import os; r = os.getcwd()") == "/sandbox"
        boot = await ask(made, "r = boot")
        assert boot["limits"] == {"processes": 512, "open_files": 1024, "file_mib": 512, "memory_mib": 2048}


async def test_outcome_tells_how_it_ended(provider: LocalProvider, environment: Environment) -> None:
    for code, state, status in (
        ("os._exit(7)", "exited", 7),
        ("os._exit(0)", "exited", 0),
        ("os.abort()", "killed", 134),
    ):
        async with standin.sandbox(provider, spec(environment)) as made:
            assert (await made.outcome()).state == "running"
            # Signals with the default action do not reach a PID 1 from inside, so the abort is a child's end passed on.
            if "abort" in code:
                code = "pid = os.fork()\nif not pid: os.abort()\nos._exit(128 + os.waitpid(pid, 0)[1] % 128)"
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await ask(
                    made,
                    f"import os, sys; print('last ' + 'words ' * 9999 + 'end', file=sys.stderr, flush=True)\n{code}",
                )
            outcome = await made.outcome()
            assert (outcome.state, outcome.code) == (state, status)
            assert outcome.last_lines.endswith("words end\n")
            assert len(outcome.last_lines) <= hostproc.TAIL_BYTES


async def test_destroy_ends_every_process(provider: LocalProvider, environment: Environment) -> None:
    made = await provider.create(spec(environment))
    daemon = "import os, time\nfor _ in range(5):\n  if not os.fork():\n    os.setsid(); time.sleep(600)\nr = 1"
    assert await ask(made, daemon) == 1
    info = next(iter(await standin.listed(provider)))
    assert (info.name, info.owner, info.labels) == (made.name, standin.owner(), {"trial": "t", "attempt": "2"})
    assert abs(info.age_s()) < 60
    first = int(made.id.split(":")[0])
    below = [first, *_below(first)]
    assert len(below) >= 7
    await made.destroy()
    await made.destroy()
    assert not [pid for pid in below if hostproc.alive(pid)]
    assert (await made.outcome()).state in ("killed", "exited")  # it reads the end of its input, and may be first


async def test_remove_by_listing(provider: LocalProvider, environment: Environment) -> None:
    made = await provider.create(spec(environment))
    await ask(made, "r = 1")
    info = next(iter(await standin.listed(provider)))
    await provider.remove(info)
    await provider.remove(info)  # "already gone" is success
    assert await standin.listed(provider) == []
    await made.destroy()


async def test_many_at_once_have_users_of_their_own(environment: Environment) -> None:
    async with LocalProvider(_command=standin.command) as provider:
        users: list[int] = []

        async def one(number: int) -> None:
            async with standin.sandbox(provider, spec(environment, name=f"s{number}")) as made:
                users.append(await ask(made, "import os; r = os.getuid()"))
                together.append(number)
                if len(together) == 8:
                    full.set()
                await full.wait()

        together: list[int] = []
        full = anyio.Event()
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(one, number)
        assert len(set(users)) == (8 if os.geteuid() == 0 else 1)
        assert not local._slots


async def test_cancelled_create_leaves_nothing(environment: Environment) -> None:
    before = _below(os.getpid())
    async with LocalProvider(_command=standin.command) as provider:
        await provider.doctor()
        for delay in (0.0, 0.001, 0.003, 0.01):
            with anyio.move_on_after(delay) as scope:
                async with standin.sandbox(provider, spec(environment)):
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
        assert await standin.listed(provider) == []
        assert not local._slots
        assert set(_below(os.getpid())) <= set(before)


async def test_outlives_idle_worker_threads(environment: Environment) -> None:
    # The parent-death signal is sent when the thread that started the process ends.
    async with (
        LocalProvider(_command=standin.command) as provider,
        standin.sandbox(provider, spec(environment)) as made,
    ):
        assert threading.current_thread() is threading.main_thread()
        assert int(made.id.split(":")[0]) in hostproc.started_by(os.getpid(), os.getpid())
        assert await ask(made, "r = 1") == 1


DYING = """
import anyio, os, sys
from tests.sandbox import standin
from harness.sandbox.base import Environment
from harness.sandbox.local import LocalProvider
async def main():
    environment = Environment(key="k", handle=sys.argv[1], python="/opt/harness/env/bin/python")
    made = await LocalProvider(_command=standin.command).create(standin.spec(environment))
    await standin.ask(made, "r = 1")
    print(made.id, flush=True)
    await anyio.sleep_forever()
anyio.run(main)
"""


async def test_dies_with_the_harness(environment: Environment) -> None:
    root = Path(__file__).parents[2]
    async with await anyio.open_process(
        [sys.executable, "-c", DYING, environment.handle], cwd=root, stderr=None
    ) as harness:
        assert harness.stdout is not None
        pid = int((await harness.stdout.receive()).split(b":")[0])
        below = [pid, *hostproc.children(pid)]
        assert len(below) == 2
        harness.kill()
        await standin.until(lambda: not any(map(hostproc.alive, below)))


@pytest.mark.parametrize(
    ("uid_map", "expected"),
    [
        pytest.param("0 0 4294967295", local.FIRST_UID + os.getpid() % 4096 * 1024, id="machine"),
        pytest.param("0 100000 65536", 65536 - 1024, id="container"),
        pytest.param("0 1000 1\n1 100000 65536", 65537 - 1024, id="rootless"),
        pytest.param("0 1000 1", None, id="single-user"),
    ],
)
async def test_users_come_from_those_there_are(uid_map: str, expected: int | None) -> None:
    assert local.first_uid(uid_map) == expected


async def test_a_lost_environment_is_an_error(environment: Environment) -> None:
    async with LocalProvider(_command=standin.command) as provider:
        lost = environment.model_copy(update={"handle": "/nonexistent"})
        with pytest.raises(SandboxError, match="lost its Python"):
            await provider.create(spec(lost))


async def test_doctor_says_what_is_wrong(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bwrap.find()
    assert found is not None
    # A bwrap that cannot make namespaces, as on a machine that forbids them.
    broken = tmp_path / "bwrap"
    broken.write_text(
        f'#!/bin/sh\ncase "$1" in --help|--version) exec {found.path} "$1";; esac\n'
        "echo 'bwrap: No permissions to create new namespace' >&2; exit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with LocalProvider(_command=standin.command) as provider:
        findings = {finding.check: finding for finding in await provider.doctor()}
        assert findings["bubblewrap"].ok
        assert not findings["namespaces"].ok
        assert "No permissions" in findings["namespaces"].detail
        with pytest.raises(ProviderUnavailable, match="No permissions") as caught:
            await provider.create(spec(environment))
        assert caught.value.hint == findings["namespaces"].remedy != ""


async def test_an_unfit_bwrap_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho 'usage: bwrap --bind'\n")
    old.chmod(0o755)
    assert bwrap.find([str(old)]) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    found = bwrap.find()
    assert found is None or found.path != str(old)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a Path would open one more


def _below(pid: int) -> list[int]:
    found = hostproc.children(pid)
    return [below for child in found for below in (child, *_below(child)) if hostproc.alive(below)]
