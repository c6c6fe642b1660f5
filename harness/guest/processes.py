"""Every process of the sandbox: signalling them, ending them, counting their memory."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

KILL_DEADLINE_S = 5.0
_PROC = Path("/proc")
_FILE_BYTES = 1024
"""What the kernel holds for a file of a temporary file system, be it empty."""
_OOM_FILES = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


def _descendants() -> list[int]:
    """All processes below this one. Orphans are below it too, since it is a subreaper."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = (_PROC / entry / "stat").read_bytes()
                parents.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(entry))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def signal_all(number: int) -> None:
    """Signal everything in the sandbox but this process."""
    if os.getpid() == 1:  # the kernel sends it to all of this PID namespace at once: nothing can fork its way out
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)
        return
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(child: int) -> None:
    """End everything in the sandbox but this process, and wait until it is gone, or ``KILL_DEADLINE_S``.

    The child itself is left to be reaped by the supervisor, which wants its status.
    """
    deadline = time.monotonic() + KILL_DEADLINE_S
    while time.monotonic() < deadline:
        signal_all(signal.SIGKILL)
        alive = [pid for pid in _descendants() if not _is_zombie(pid)]
        if not alive:
            return
        time.sleep(0.005)


def _is_zombie(pid: int) -> bool:
    try:
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def memory_mib(root: Path) -> float:
    """Anonymous and shared memory of every other process, and what the temporary file systems take.

    Shared memory is counted once per process: an overestimate, on the safe side.
    """
    total = 0
    for pid in _descendants():
        with contextlib.suppress(OSError, ValueError):
            for line in (_PROC / str(pid) / "status").read_bytes().splitlines():
                if line.startswith((b"RssAnon:", b"RssShmem:")):
                    total += int(line.split()[1]) * 1024
    if os.getpid() == 1:
        for folder in (root, Path("/tmp"), Path("/dev/shm")):  # the sandbox's own, private ones
            with contextlib.suppress(OSError):
                usage = os.statvfs(folder)
                total += (usage.f_blocks - usage.f_bfree) * usage.f_frsize
                total += (usage.f_files - usage.f_ffree) * _FILE_BYTES
    return total / (1024 * 1024)


def oom_kills() -> int:
    """How many processes of this control group the kernel has ended for want of memory; 0 where it does not say."""
    for path in _OOM_FILES:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in path.read_bytes().splitlines():
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
    return 0
