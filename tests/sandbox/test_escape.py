"""What hostile code in a sandbox can reach and use up: the same attempts against every provider that isolates.

Without isolation (``process``) some of them must succeed: that shows that the attempts are able to. Fork and memory
bombs are among the bad trials of ``tests/test_run.py``.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from tests.support.policy import Reply, ScriptedPolicy
from tests.support.workspace import ROOT, Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

LOCAL = pytest.param("local", marks=pytest.mark.namespaces)
DOCKER = pytest.param("docker", marks=pytest.mark.docker)
BRIDGES = ("docker", "br-", "virbr", "podman", "cni", "lxc")
IPC_CREAT, IPC_RMID = 0o1000, 0


def bridge_addresses() -> list[str]:
    if shutil.which("ip") is None:
        return []
    listed = subprocess.run(["ip", "-json", "addr"], capture_output=True, text=True, timeout=10, check=True).stdout
    return [
        address["local"]
        for interface in json.loads(listed)
        if interface["ifname"].startswith(BRIDGES)
        for address in interface["addr_info"]
        if address["scope"] == "global"
    ]


def greet(listener: socket.socket) -> None:
    """Say hello to whoever connects, until the listener is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.sendall(b"you are on the host")


@contextmanager
def targets() -> Iterator[dict[str, Any]]:
    """Things on this machine that no sandbox may reach, and where they are."""
    name = f"harness-target-{secrets.token_hex(4)}"
    libc = ctypes.CDLL(None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="target-")))
        folder.chmod(0o755)
        (folder / "file").write_text("of the host")
        shared = Path("/dev/shm", name)
        shared.write_text("of the host")
        stack.callback(shared.unlink)
        key = 0x5EED0000 + os.getpid() % 0xFFFF
        segment = libc.shmget(key, 4096, IPC_CREAT | 0o666)
        stack.callback(libc.shmctl, segment, IPC_RMID, None)
        listeners = [socket.create_server(("127.0.0.1", 0))]
        port = listeners[0].getsockname()[1]
        addresses = ["127.0.0.1"]
        for address in ["::1", *bridge_addresses()]:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                listeners.append(socket.create_server((address, port), family=family))
            except OSError:
                continue
            addresses.append(address)
        for unix in (str(folder / "socket"), "\0" + name):
            listeners.append(socket.socket(socket.AF_UNIX))
            listeners[-1].bind(unix)
            listeners[-1].listen()
        (folder / "socket").chmod(0o777)
        for listener in listeners:
            thread = threading.Thread(target=greet, args=(listener,))
            thread.start()
            stack.callback(thread.join)
        for listener in listeners:
            stack.callback(listener.close)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
        yield {
            "tcp": [(address, port) for address in addresses],
            "unix": str(folder / "socket"),
            "abstract": name,
            "file": str(folder / "file"),
            "shm": str(shared),
            "sysv": key,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "source": str(ROOT),
        }


def coded(secret: str) -> str:
    return bytes(byte ^ 0x5A for byte in secret.encode()).hex()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path / "ws")
    made.write_main(text=(Path(__file__).parent / "escape" / "main.py").read_text())
    made.settings(
        "[tool.harness.sandbox]\nmemory_mib = 256\ndisk_mib = 32\nfile_mib = 16\nprocesses = 64\nopen_files = 128\n"
        'env = { CANARY = "yellow-feathers" }\n'
    )
    return made


async def run(workspace: Workspace, policy: ScriptedPolicy, cases: list[str], *flags: str, **more: Any) -> list[Any]:
    """Run the cases, each beside a peaceful sibling, which must succeed. Returns the trials of the cases."""
    key, label = f"key-{secrets.token_hex(8)}", f"label-{secrets.token_hex(8)}"
    policy.key = key
    policy.script = lambda body: Reply("ok")
    needles = {"label": coded(label), "key": coded(key), "canary": coded("yellow-feathers")}
    with targets() as found:
        metadata = {**found, "needles": needles, **more}
        rows = [
            {"user_prompt": case, "ground_truth": label, "metadata": {**metadata, "case": case}}
            for wanted in cases
            for case in (wanted, "nothing")
        ]
        workspace.write_rows(rows)
        arguments = ["--policy-url", policy.url, "--policy-key-env", "THE_KEY", "--max-in-flight", "3", *flags]
        done = await anyio.to_thread.run_sync(
            lambda: workspace.run(*arguments, "--agent-timeout", "60", env={"THE_KEY": key}, timeout=240)
        )
    assert done.code == 0, done.err
    for trial in done.trials[1::2]:
        assert (trial["status"], trial["reward"]) == ("success", 1.0), trial
    return done.trials[::2]


def report(trial: Any) -> Any:
    assert trial["status"] == "success", trial["failure"]
    return json.loads(trial["samples"][0]["data"]["messages"][-1]["content"])["found"]


@pytest.mark.parametrize("provider", [LOCAL, DOCKER])
async def test_nothing_is_found_and_nothing_used_up(
    provider: str, workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    looked, inodes, descriptors, disk = await run(
        workspace, scripted_policy, ["look", "inodes", "descriptors", "disk"], "--sandbox", provider
    )
    found = report(looked)
    evidence = found.pop("secrets")
    assert evidence  # it can search: the canary is there
    assert [where for where in evidence if not where.startswith("canary")] == []
    assert {attempt: evidence for attempt, evidence in found.items() if evidence} == {}
    assert len(found) == 13
    if inodes["status"] == "success":
        assert max(report(inodes).values()) < 400_000
    else:
        assert inodes["failure"]["kind"] == "OutOfMemory", inodes
    assert 16 < report(descriptors)["descriptors"] <= 128
    if disk["status"] == "success":
        written = report(disk)
        assert (written["/"], written["/var/tmp"]) == (0, 0)
        assert max(written.values()) <= 64 << 20
    else:
        assert disk["failure"]["kind"] == "OutOfMemory", disk


async def test_the_attempts_find_much_where_nothing_is_isolated(
    workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    harmless = ["tcp", "unix", "host_files", "other_sandboxes"]
    (looked,) = await run(workspace, scripted_policy, ["look"], "--sandbox", "process", only=harmless)
    found = report(looked)
    assert all(found[attempt] for attempt in harmless), found
    assert len([hit for hit in found["tcp"] if "you are on the host" in hit]) >= 1
