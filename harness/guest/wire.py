"""The frame codec, shared by both ends: ``type:u8 stream:u32 length:u32 payload``, big-endian, payload at most 64 KiB.

Sans I/O: bytes in, frames out. Each stream has credit: a side may have at most ``WINDOW`` payload bytes under way
that the other has not consumed; the consumer gives back what it took with ``CREDIT``. Stream 0 (``CONTROL``) has no
credit: its messages are few and bounded.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

HEADER = struct.Struct(">BII")
MAX_PAYLOAD = 64 * 1024
WINDOW = 256 * 1024
MAX_MESSAGE = 64 * 1024 * 1024
"""Largest JSON message on stream 0, in bytes."""

CONTROL, OPEN, DATA, EOF, RESET, CREDIT = range(6)


class WireError(Exception):
    """Raised when the other side broke the protocol."""


class Frame(NamedTuple):
    type: int
    stream: int
    payload: bytes


def encode(type: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame as bytes. The payload must not exceed ``MAX_PAYLOAD``."""
    return HEADER.pack(type, stream, len(payload)) + payload


def encode_message(line: bytes) -> list[bytes]:
    """A JSON message (no newline inside) as the frames of stream 0."""
    data = line + b"\n"
    return [encode(CONTROL, 0, data[i : i + MAX_PAYLOAD]) for i in range(0, len(data), MAX_PAYLOAD)]


def encode_credit(stream: int, count: int) -> bytes:
    return encode(CREDIT, stream, count.to_bytes(4, "big"))


class Decoder:
    """Turns received bytes into frames, however they were cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes, give back the frames they complete.

        :raises WireError: unknown type, oversized payload, or a frame on a stream where it cannot be.
        """
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        start, size = 0, len(buffer)
        while size - start >= HEADER.size:
            kind, stream, length = HEADER.unpack_from(buffer, start)
            if kind > CREDIT:
                raise WireError(f"unknown frame type {kind}")
            if length > MAX_PAYLOAD:
                raise WireError(f"frame of {length} bytes, at most {MAX_PAYLOAD} allowed")
            if (kind == CONTROL) != (stream == 0):
                raise WireError(f"frame type {kind} on stream {stream}")
            if kind == CREDIT and length != 4:
                raise WireError("credit frame without its count")
            end = start + HEADER.size + length
            if end > size:
                break
            frames.append(Frame(kind, stream, bytes(buffer[start + HEADER.size : end])))
            start = end
        del buffer[:start]
        return frames

    def rest(self) -> bytes:
        """What was received and is not a whole frame yet."""
        return bytes(self._buffer)


class Lines:
    """Puts the messages of stream 0 together again."""

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """:raises WireError: a message longer than the limit."""
        self._buffer += data
        if b"\n" not in data:
            if len(self._buffer) > self._limit:
                raise WireError(f"message longer than {self._limit} bytes")
            return []
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        if any(len(line) > self._limit for line in lines):
            raise WireError(f"message longer than {self._limit} bytes")
        return [line for line in lines if line]
