"""A rollout that tries to get out of its sandbox, one attempt after another, and reports what it could do.

The row's metadata says what to try (``case``) and where the targets are. The sample's last message is a JSON object:
what succeeded, by attempt, with the evidence.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import re
import resource
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from osmosis_ai.rollout import AgentWorkflow, Grader, get_rollout_context

libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == "aarch64"
DEVICES = {
    "null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "shm", "mqueue", "fd", "stdin", "stdout",
    "stderr", "core", "console",
}  # fmt: skip
Targets = dict[str, Any]
Found = Iterator[str]


def succeeds(function: str, *arguments: Any) -> bool:
    return int(getattr(libc, function)(*arguments)) != -1


def system_call(x86: int, arm: int, *arguments: Any) -> bool:
    return int(libc.syscall(arm if ARM else x86, *arguments)) != -1


def opens(path: str | Path, flags: int = os.O_WRONLY) -> bool:
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def reached(path: str) -> bool:
    try:
        Path(path).stat()
    except OSError:
        return False
    return True


def interfaces(targets: Targets) -> Found:
    yield from (name for _, name in socket.if_nameindex() if name != "lo")
    yield from Path("/proc/net/route").read_text().splitlines()[1:]
    yield from (line for line in Path("/proc/net/ipv6_route").read_text().splitlines() if line.split()[-1] != "lo")


def tcp(targets: Targets) -> Found:
    for host, port in targets["tcp"]:
        try:
            with socket.create_connection((host, port), timeout=2) as connection:
                yield f"{host}: {connection.recv(20)!r}"
        except OSError:
            pass


def names(targets: Targets) -> Found:
    for name in ("host.docker.internal", "gateway.docker.internal", targets["hostname"]):
        try:
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, 80)}
        except OSError:
            continue
        yield from (f"{name} is {address}" for address in found if not address.startswith(("127.", "::1")))


def unix(targets: Targets) -> Found:
    for address in (
        targets["unix"],
        "\0" + targets["abstract"],
        "/var/run/docker.sock",
        "/run/containerd/containerd.sock",
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(address)
            except OSError:
                continue
            yield repr(address)


def kernel_files(targets: Targets) -> Found:
    wanted = [
        *map(Path, ("/proc/sysrq-trigger", "/proc/kcore", "/proc/1/oom_score_adj", "/sys/kernel/uevent_helper")),
        *(Path("/proc/sys", name) for name in ("kernel/core_pattern", "kernel/modprobe", "vm/overcommit_memory")),
        *Path("/sys/fs/cgroup").glob("**/release_agent"),
        *Path("/sys/fs/cgroup").glob("**/memory*limit_in_bytes"),
        *Path("/sys/fs/cgroup").glob("**/memory.max"),
        *Path("/sys/fs/cgroup").glob("**/cgroup.procs"),
    ]  # fmt: skip
    yield from (str(path) for path in wanted if opens(path))
    yield from (path for path in ("/proc/kcore", "/proc/kmsg", "/dev/mem") if opens(path, os.O_RDONLY))


def mounts(targets: Targets) -> Found:
    new_ns, new_user, new_net = 0x20000, 0x10000000, 0x40000000
    if succeeds("mount", b"none", b"/tmp", b"tmpfs", 0, None):
        yield "mount tmpfs"
    if succeeds("mount", b"/", b"/tmp", None, 4096, None):
        yield "bind mount"
    if succeeds("mount", None, b"/", None, 32, None):  # MS_REMOUNT, read-write
        yield "remount of the root"
    if succeeds("umount2", b"/proc", 2):
        yield "umount"
    if succeeds("chroot", b"/tmp"):
        yield "chroot"
    for flags in (new_ns, new_user, new_user | new_ns, new_net):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if succeeds("unshare", flags) else 1)
        if os.waitpid(pid, 0)[1] == 0:
            yield f"unshare {flags:#x}"


def supervisor(targets: Targets) -> Found:
    for pid in {1, os.getppid()}:
        here = Path(f"/proc/{pid}")
        for name in ("mem", "environ", "maps", "auxv"):
            if opens(here / name, os.O_RDONLY) and (name == "mem" or (here / name).read_bytes()):
                yield f"{here / name}"
        for name in ("fd", "root", "cwd"):
            with suppress(OSError):
                yield f"{here / name}: {sorted(each.name for each in (here / name).iterdir())}"
        if succeeds("ptrace", 16, pid, None, None) or succeeds("ptrace", 0x4206, pid, None, None):  # ATTACH, SEIZE
            yield f"ptrace {pid}"
        buffer = ctypes.create_string_buffer(8)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
        if system_call(310, 270, pid, vector, 1, vector, 1, 0):
            yield f"process_vm_readv {pid}"
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue
        yield from (f"descriptor {n} of {pid}" for n in range(16) if system_call(438, 438, handle, n, 0))
        os.close(handle)


def devices(targets: Targets) -> Found:
    yield from (path.name for path in Path("/dev").iterdir() if path.name not in DEVICES)
    for kind, name in ((0o020000, "memory"), (0o060000, "disk")):
        try:
            os.mknod(f"/tmp/{name}", 0o666 | kind, os.makedev(1 if name == "memory" else 254, 1))
        except OSError:
            continue
        yield f"mknod {name}"


def privileges(targets: Targets) -> Found:
    for name, call in (
        ("setuid", lambda: os.setuid(0)),
        ("setgroups", lambda: os.setgroups([0])),
        ("hostname", lambda: socket.sethostname("x")),
        ("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, -5)),
        ("limits", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))),
    ):
        try:
            call()  # type: ignore[no-untyped-call]
        except (OSError, ValueError):
            continue
        yield name
    status = Path("/proc/self/status").read_text()
    for name in ("CapPrm", "CapEff", "CapAmb"):
        if int(re.findall(rf"{name}:\s+(\w+)", status)[0], 16):
            yield name
    if "NoNewPrivs:\t1" not in status:
        yield "new privileges"
    program = Path("/tmp/rootly")
    program.write_bytes(Path("/bin/sh").read_bytes())
    program.chmod(0o6755)
    for path in (program, *(p for p in Path("/usr/bin").iterdir() if p.is_file() and p.stat().st_mode & 0o6000)):
        if path.name in ("rootly", "su", "bash", "dash"):
            asked = subprocess.run([path, "-c", "id -u"], capture_output=True, stdin=subprocess.DEVNULL, check=False)
            if asked.stdout.strip() == b"0":
                yield str(path)


def kernel_calls(targets: Targets) -> Found:
    if system_call(248, 217, b"user", b"harness", b"x", 1, -3):
        yield "add_key"
    if system_call(250, 219, 0, -3, 1):
        yield "keyctl"
    ctypes.set_errno(0)
    if system_call(321, 280, 0, None, 0) or ctypes.get_errno() == errno.EINVAL:
        yield "bpf"
    if system_call(304, 265, -1, b"/", 0):
        yield "open_by_handle_at"
    if system_call(246, 104, 0, 0, None, 0):
        yield "kexec_load"


def host_files(targets: Targets) -> Found:
    yield from (path for path in (targets["file"], targets["shm"], "/etc/shadow") if opens(path, os.O_RDONLY))
    yield from (path for path in (targets["source"], "/var/lib/docker/overlay2", "/proc/1/root/root") if reached(path))
    if int(libc.shmget(targets["sysv"], 0, 0)) != -1:
        yield "System V shared memory"


def other_sandboxes(targets: Targets) -> Found:
    for process in Path("/proc").glob("[0-9]*"):
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if any(word in command for word in ("pytest", "dockerd", "harness run", "bwrap")):
            yield f"{process}: {command[:80]}"
    try:
        os.kill(targets["pid"], 0)
    except OSError:
        return
    yield f"process {targets['pid']}"


def clocks(targets: Targets) -> Found:
    try:
        time.clock_settime(time.CLOCK_REALTIME, time.time())
    except OSError:
        pass
    else:
        yield "clock_settime"
    if succeeds("settimeofday", (ctypes.c_long * 2)(int(time.time()), 0), None):
        yield "settimeofday"
    timex = ctypes.create_string_buffer(b"\x02", 256)  # ADJ_FREQUENCY
    if succeeds("adjtimex", timex):
        yield "adjtimex"


CODE = bytes(byte ^ 0x5A for byte in range(256))
"""What is looked for is only ever here in this code, so that the search does not find itself."""


def _contents() -> Iterator[tuple[str, bytes]]:
    for name, value in os.environ.items():
        yield f"variable {name}", value.encode()
    for folder in ("/sandbox", "/tmp", "/dev/shm", "/etc", "/opt/harness/lib", "/run"):
        for parent, _, files in os.walk(folder):
            for name in files:
                path = Path(parent, name)
                with suppress(OSError):
                    if path.is_file() and path.stat().st_size < 16 << 20:
                        yield str(path), path.read_bytes()
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "cmdline"):
            with suppress(OSError):
                yield f"{process / name}", (process / name).read_bytes()
        with suppress(OSError), (process / "mem").open("rb", buffering=0) as memory:
            for line in (process / "maps").read_text().splitlines():
                start, end = (int(number, 16) for number in line.split()[0].split("-"))
                if " rw" in line and end - start < 256 << 20:
                    with suppress(OSError, OverflowError, ValueError):
                        memory.seek(start)
                        yield f"{process / 'mem'}", memory.read(end - start)


def secrets(targets: Targets) -> Found:
    for where, content in _contents():
        coded = content.translate(CODE)
        yield from (
            f"{name} in {where}" for name, needle in targets["needles"].items() if bytes.fromhex(needle) in coded
        )


ATTEMPTS: tuple[Callable[[Targets], Found], ...] = (
    interfaces, tcp, names, unix, kernel_files, mounts, supervisor, devices, privileges, kernel_calls, host_files,
    other_sandboxes, clocks, secrets,
)  # fmt: skip


def look(targets: Targets) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for attempt in ATTEMPTS:
        if attempt.__name__ in targets.get("only", [attempt.__name__]):
            found[attempt.__name__] = []
            for evidence in attempt(targets):
                found[attempt.__name__].append(evidence)
    return found


def inodes(targets: Targets) -> dict[str, Any]:
    made = {}
    for folder in ("/tmp", "/sandbox", "/dev/shm"):
        made[folder] = 0
        try:
            while made[folder] < 3_000_000:
                os.close(os.open(f"{folder}/i{made[folder]}", os.O_CREAT))
                made[folder] += 1
        except OSError:
            pass
    return made


def descriptors(targets: Targets) -> dict[str, Any]:
    kept: list[tuple[socket.socket, socket.socket]] = []
    try:
        while len(kept) < 100_000:
            kept.append(socket.socketpair())
    except OSError:
        pass
    count = 2 * len(kept)
    for pair in kept:
        for end in pair:
            end.close()
    return {"descriptors": count}


def disk(targets: Targets) -> dict[str, Any]:
    written = {}
    for folder in ("/dev/shm", "/sandbox", "/tmp", "/var/tmp", "/"):
        written[folder] = 0
        try:
            for number in range(100):
                with Path(f"{folder}/f{number}").open("wb", buffering=0) as file:
                    for _ in range(64):
                        written[folder] += file.write(bytes(1 << 20))
        except OSError:
            pass
        for number in range(100):
            with suppress(OSError):
                Path(f"{folder}/f{number}").unlink()
    return written


CASES: dict[str, Callable[[Targets], dict[str, Any]]] = {
    "look": look, "inodes": inodes, "descriptors": descriptors, "disk": disk, "nothing": lambda targets: {},
}  # fmt: skip


def ask(messages: list[dict[str, Any]]) -> str:
    context: Any = get_rollout_context()
    request = urllib.request.Request(
        context.chat_completions_url + "/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + context.api_key, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


class Workflow(AgentWorkflow[Any]):
    async def run(self, ctx: Any) -> list[dict[str, Any]]:
        answer = await asyncio.to_thread(ask, ctx.prompt)
        report = CASES[ctx.metadata["case"]](ctx.metadata)
        return [*ctx.prompt, {"role": "assistant", "content": json.dumps({"answer": answer, "found": report})}]


class Judge(Grader):
    async def grade(self, ctx: Any) -> None:
        ctx.set_reward(1.0 if ctx.label else 0.0)
