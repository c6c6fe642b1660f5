"""A filter of system calls that no rollout needs: further user namespaces, kernel interfaces with a history of escapes.

bubblewrap takes it as classic BPF. Namespaces, capabilities and mounts isolate without it; it leaves less to attack.
"""

from __future__ import annotations

import errno
import platform
import struct

_CLONE_NEWUSER = 0x10000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_CLONE3 = 435
_IO_URING = (425, 426, 427)
# Audit architecture, clone, unshare; then add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd.
_NUMBERS = {
    "x86_64": (0xC000003E, 56, 272, (248, 249, 250, 298, 321, 323)),
    "aarch64": (0xC00000B7, 220, 97, (217, 218, 219, 241, 280, 282)),
}


def program(machine: str | None = None) -> bytes | None:
    """The filter for a machine (this one by default); None where it is not written for it."""
    known = _NUMBERS.get(machine or platform.machine())
    if known is None:
        return None
    architecture, clone, unshare, refused = known

    def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("=HBBI", code, then, otherwise, value)

    def refuse(number: int) -> bytes:
        return step(_RETURN, _ERRNO | number)

    steps = [step(_LOAD, _ARCHITECTURE), step(_EQUAL, architecture, 1), step(_RETURN, _KILL), step(_LOAD, _NUMBER)]
    # The x32 calls of x86-64 have numbers of their own.
    steps += [step(_AT_LEAST, 0x40000000, 0, 1), refuse(errno.ENOSYS)]
    # clone3's flags lie in memory, out of a filter's sight; the C library then falls back to clone.
    steps += [step(_EQUAL, _CLONE3, 0, 1), refuse(errno.ENOSYS)]
    for call in (*refused, *_IO_URING):
        steps += [step(_EQUAL, call, 0, 1), refuse(errno.EPERM)]
    steps += [step(_EQUAL, clone, 1), step(_EQUAL, unshare, 0, 3)]
    steps += [step(_LOAD, _FIRST_ARGUMENT), step(_ANY_BIT, _CLONE_NEWUSER, 0, 1), refuse(errno.EPERM)]
    return b"".join([*steps, step(_RETURN, _ALLOW)])
