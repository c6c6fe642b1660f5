"""The first process of a sandbox, until the rollout's code is there and the child is forked.

It reads the channel synchronously, with no event loop, so that the child is forked from a quiet process: forked, not
started, because an interpreter costs 20 ms. From then on this process is its supervisor.
"""

from __future__ import annotations

import asyncio
import ctypes
import io
import json
import os
import resource
import select
import signal
import socket
import sys
import tarfile
from pathlib import Path
from typing import Any, NoReturn

from . import PROTOCOL, ROOT, child, wire
from .supervisor import EXIT_CHANNEL, EXIT_LEASE, EXIT_PROTOCOL, Running, Supervisor, die

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


def main() -> NoReturn:
    boot = json.loads(sys.argv[1])
    channel_in, channel_out = _take_channel()
    _harden(boot)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    python = ".".join(map(str, sys.version_info[:3]))
    hello = {"type": "hello", "version": PROTOCOL, "python": python, "pid": os.getpid(), "port": port}
    try:
        load, code, rest = _receive_code(channel_in, channel_out, hello, boot["lease_s"])
    except wire.WireError as error:
        die(EXIT_PROTOCOL, f"host broke the protocol: {error}")
    except OSError:
        die(EXIT_CHANNEL)
    root = Path(boot.get("root") or ROOT)
    for folder in ("rollout", "artifacts", "home"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(code)) as tar:
        tar.extractall(root / "rollout", filter="data")
    del code
    running = _fork_child(boot, load, root, port, (channel_in, channel_out, listener.fileno()))
    supervisor = Supervisor(boot, load, root, listener, running, channel_in, channel_out)
    die(asyncio.run(supervisor.serve(rest)))


def _take_channel() -> tuple[int, int]:
    """Move the channel away from descriptors 0 and 1, where anything that prints would write into it."""
    channel_in, channel_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return channel_in, channel_out


def _harden(boot: dict[str, Any]) -> None:
    if boot.get("uid") is not None:
        os.setgroups([])
        os.setresgid(boot["gid"], boot["gid"], boot["gid"])
        os.setresuid(boot["uid"], boot["uid"], boot["uid"])
    os.umask(0o022)
    # Python catches SIGINT, so PID 1 would get it from its own children; the child takes it back for itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    # Not dumpable: no process of the same user can read this one's memory or open its descriptors through /proc.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _limit(limits: dict[str, Any]) -> None:
    """Limits of the child and all that it starts; null: the provider sees to it."""
    mib = 1024 * 1024
    for name, kind, unit in (
        ("processes", resource.RLIMIT_NPROC, 1),
        ("open_files", resource.RLIMIT_NOFILE, 1),
        ("file_mib", resource.RLIMIT_FSIZE, mib),
        ("memory_mib", resource.RLIMIT_DATA, mib),
    ):
        if limits.get(name) is not None:
            wanted = int(limits[name]) * unit
            hard = resource.getrlimit(kind)[1]
            value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _receive_code(
    channel_in: int, channel_out: int, hello: dict[str, Any], lease_s: float
) -> tuple[dict[str, Any], bytes, bytes]:
    """Say hello and wait for ``load`` and the code. Returns both, and the bytes that came after them.

    The host sends the code in one go and waits for ``loaded``, so a plain loop that gives credit back is all it needs.
    """
    _write_all(channel_out, b"".join(wire.encode_message(json.dumps(hello).encode())))
    decoder, lines = wire.Decoder(), wire.Lines()
    load: dict[str, Any] | None = None
    code = bytearray()
    while True:
        if not select.select([channel_in], [], [], lease_s)[0]:
            die(EXIT_LEASE, f"the host was silent for {lease_s:g} s")
        data = os.read(channel_in, 1 << 18)
        if not data:
            die(EXIT_CHANNEL)
        frames = decoder.feed(data)
        for position, frame in enumerate(frames):
            if frame.type == wire.CONTROL:
                for line in lines.feed(frame.payload):
                    message = json.loads(line)
                    if message["type"] == "load":
                        load = message
                    elif message["type"] == "exit":
                        die(0)
                    elif message["type"] == "ping":
                        _write_all(
                            channel_out, wire.encode_message(json.dumps({**message, "type": "pong"}).encode())[0]
                        )
            elif frame.type == wire.DATA:
                code += frame.payload
                _write_all(channel_out, wire.encode_credit(frame.stream, len(frame.payload)))
            elif frame.type == wire.EOF and load is not None:
                _write_all(channel_out, wire.encode(wire.EOF, frame.stream))
                rest = b"".join(wire.encode(*late) for late in frames[position + 1 :]) + decoder.rest()
                return load, bytes(code), rest


def _fork_child(boot: dict[str, Any], load: dict[str, Any], root: Path, port: int, private: tuple[int, ...]) -> Running:
    control, childs_end = socket.socketpair()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            # Where there is no PID namespace, nothing else would end the child of a supervisor that was killed.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            for descriptor in (*private, control.fileno(), out_read, err_read):
                os.close(descriptor)
            os.dup2(out_write, 1)
            os.dup2(err_write, 2)
            os.close(out_write)
            os.close(err_write)
            _limit(boot.get("limits", {}))
            child.main(childs_end, load, str(root), port)
        finally:
            os._exit(70)
    childs_end.close()
    os.close(out_write)
    os.close(err_write)
    return Running(pid, control, out_read, err_read)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
