"""Messages over a socket pair: four bytes of length, big-endian, then one JSON object.

The child in a sandbox talks to its supervisor like this, and a grader worker to its pool.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from typing import Any

from . import wire

HEADER = struct.Struct(">I")
MAX_MESSAGE = wire.MAX_MESSAGE - 64 * 1024
"""Largest message, in bytes: what fits on the channel's stream 0 with a little added on the way."""


def encode(message: dict[str, Any]) -> bytes:
    """:raises ValueError: a value that JSON does not know (NaN, infinity), or a message over ``MAX_MESSAGE``."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(body)} bytes, at most {MAX_MESSAGE} allowed")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """:raises ValueError: not one JSON object of finite numbers, as the standard has it."""
    try:
        message = json.loads(body, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("a message that is no JSON object")
    return message


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def body_length(header: bytes) -> int:
    """:raises ValueError: more than ``MAX_MESSAGE``."""
    (length,) = HEADER.unpack(header)
    if length > MAX_MESSAGE:
        raise ValueError(f"a message of {length} bytes, at most {MAX_MESSAGE} allowed")
    return int(length)


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """The next message of a blocking socket; None when the other side went away.

    :raises ValueError: the other side broke the protocol.
    """
    header = _read(sock, HEADER.size)
    body = None if header is None else _read(sock, body_length(header))
    return None if body is None else decode(body)


def _read(sock: socket.socket, count: int) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < count:
        try:
            chunk = sock.recv(min(count - len(buffer), 1 << 20))
        except OSError:
            return None
        if not chunk:
            return None
        buffer += chunk
    return bytes(buffer)
