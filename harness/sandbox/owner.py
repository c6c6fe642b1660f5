"""Who owns a sandbox, and whether that process still lives: a leftover, or a living sibling's sandbox."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

from harness.sandbox.base import Owner


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # not Linux: the time of the last boot says the same
        found = subprocess.run(
            ["sysctl", "-n", "kern.boottime"], capture_output=True, text=True, timeout=5, check=False
        )
        return found.stdout.strip()


@cache
def _machine() -> str:
    """A hash: systemd asks that the identity itself is not shown around."""
    try:
        return hashlib.sha256(Path("/etc/machine-id").read_bytes().strip()).hexdigest()[:16]
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        return ""


def _started(pid: int) -> str:
    """Start time of a process; empty when there is none with this pid, or just its remains."""
    if sys.platform == "linux":
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
            return "" if state in "ZX" else fields[18]
        except (OSError, IndexError, ValueError):
            return ""
    found = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=5, check=False
    )
    return found.stdout.strip()


def this_process(run: str) -> Owner:
    """The owner of every sandbox that this process makes for a run."""
    pid = os.getpid()
    return Owner(
        host=socket.gethostname(),
        machine=_machine(),
        boot_id=_boot_id(),
        namespace=_namespace(),
        pid=pid,
        started=_started(pid),
        run=run,
    )


def is_dead(owner: Owner) -> bool:
    """Whether the owner certainly lives no more. Nothing can be said of other machines' and containers' processes."""
    if owner.boot_id == _boot_id():
        return owner.namespace == _namespace() and _started(owner.pid) != owner.started
    return owner.host == socket.gethostname() and owner.machine == _machine() != ""
