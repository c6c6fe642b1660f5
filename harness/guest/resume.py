"""A byte stream both ways that outlives its connections. Sans I/O; the same at both ends.

Each message says where its bytes begin and how many bytes of the other direction have been received:
``kind:u8 offset:u64 received:u64 payload``, big-endian. What the other side has not acknowledged is kept and sent again
on the next connection, which starts with both sides saying what they have (``rewind``): nothing is lost, nothing comes
twice.
"""

from __future__ import annotations

import struct

HEADER = struct.Struct(">BQQ")
DATA, END = 0, 1
CHUNK = 64 * 1024
WINDOW = 512 * 1024
"""Unacknowledged bytes from which a writer has to wait."""
ACK_EVERY = 32 * 1024


class ResumeError(Exception):
    """Raised when the other side says what cannot be. The stream is of no use any more."""


class Resumable:
    """One end. ``write`` and then send what ``next_message`` gives; hand what arrives to ``receive``."""

    def __init__(self) -> None:
        self.received = 0
        """Bytes that have arrived in order."""
        self.last_words: bytes | None = None
        """What the other side said when it ended its direction, after all its bytes."""
        self._kept = bytearray()
        self._base = 0
        """Offset of the first byte that is kept."""
        self._next = 0
        """Offset of the next byte for this connection."""
        self._told = 0
        """How many received bytes the other side knows of."""
        self._end: bytes | None = None
        self._end_sent = False

    @property
    def full(self) -> bool:
        return len(self._kept) >= WINDOW

    @property
    def settled(self) -> bool:
        """Whether the other side has everything that was written."""
        return not self._kept

    def write(self, data: bytes) -> None:
        self._kept += data

    def end(self, last_words: bytes) -> None:
        """Nothing more will be written."""
        self._end = last_words

    def next_message(self) -> bytes | None:
        """The next message to send, null when there is none. Once returned it counts as sent."""
        start = self._next - self._base
        chunk = bytes(self._kept[start : start + CHUNK])
        if chunk:
            self._next += len(chunk)
            return self._message(DATA, self._next - len(chunk), chunk)
        if self._end is not None and not self._end_sent:
            self._end_sent = True
            return self._message(END, self._next, self._end)
        if self.received - self._told >= ACK_EVERY:
            return self.keep_alive()
        return None

    def keep_alive(self) -> bytes:
        """A message that only says what has been received, for a connection that has been quiet."""
        return self._message(DATA, self._next, b"")

    def receive(self, message: bytes) -> bytes:
        """Take a message, give back its bytes that are new.

        :raises ResumeError: it does not fit what was sent or received before.
        """
        if len(message) < HEADER.size:
            raise ResumeError("a message without its head")
        kind, offset, received = HEADER.unpack_from(message)
        payload = message[HEADER.size :]
        self._acknowledge(received)
        if kind not in (DATA, END) or offset > self.received:
            raise ResumeError(f"a message of kind {kind} at {offset}, expected at {self.received}")
        if kind == END:
            if offset != self.received:
                raise ResumeError(f"an end at {offset}, but {self.received} bytes have come")
            self.last_words = payload
            return b""
        fresh = payload[self.received - offset :]
        if fresh and self.last_words is not None:
            raise ResumeError("bytes after the end")
        self.received += len(fresh)
        return fresh

    def rewind(self, received: int) -> None:
        """A new connection, whose other side has so many of our bytes.

        :raises ResumeError: it cannot have: it is another stream's end.
        """
        self._acknowledge(received)
        self._next = self._base
        self._told = self.received  # this side has said it at the start of the connection
        self._end_sent = False

    def _acknowledge(self, received: int) -> None:
        if not self._base <= received <= self._next:
            raise ResumeError(f"{received} bytes acknowledged, {self._next} sent")
        del self._kept[: received - self._base]
        self._base = received

    def _message(self, kind: int, offset: int, payload: bytes) -> bytes:
        self._told = self.received
        return HEADER.pack(kind, offset, self.received) + payload
