"""The server's side of RFC 6455, as far as one channel of binary messages needs it. Sans I/O."""

from __future__ import annotations

import base64
import binascii
import hashlib

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
MAX_HEAD = 16 * 1024
MAX_MESSAGE = 128 * 1024
POLICY, TOO_BIG, PROTOCOL = 1008, 1009, 1002
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class WebSocketError(Exception):
    """Raised when the other side breaks the protocol; ``code`` is for the close frame."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def accept(head: bytes) -> bytes:
    """The answer to a request's head that asks for a WebSocket.

    :param head: up to and with its empty line.
    :raises WebSocketError: it asks for something else.
    """
    first, *lines = head.split(b"\r\n")
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    tokens = [token.strip().lower() for token in headers.get(b"connection", b"").split(b",")]
    key = headers.get(b"sec-websocket-key", b"")
    try:
        nonce = base64.b64decode(key, validate=True)
    except binascii.Error:
        nonce = b""
    if not (
        first.startswith(b"GET ")
        and first.endswith(b" HTTP/1.1")
        and headers.get(b"upgrade", b"").lower() == b"websocket"
        and b"upgrade" in tokens
        and headers.get(b"sec-websocket-version") == b"13"
        and len(nonce) == 16
    ):
        raise WebSocketError(PROTOCOL, "not a WebSocket handshake")
    answer = base64.b64encode(hashlib.sha1(key + _MAGIC).digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + answer + b"\r\n\r\n"
    )


def encode(opcode: int, payload: bytes = b"") -> bytes:
    """One unmasked frame, as servers send them."""
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 127)) + size.to_bytes(8, "big")
    return head + payload


def encode_close(code: int, reason: str = "") -> bytes:
    return encode(CLOSE, code.to_bytes(2, "big") + reason.encode()[:100])


class Decoder:
    """Turns a client's bytes into messages, however they were cut or fragmented."""

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self._buffer = bytearray()
        self._limit = limit
        self._opcode = 0
        self._fragments = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take bytes, give back the messages and control frames they complete, each with its opcode.

        :raises WebSocketError: an unmasked frame, one that is too long, or one that cannot be where it is.
        """
        self._buffer += data
        messages: list[tuple[int, bytes]] = []
        while (frame := self._frame()) is not None:
            final, opcode, payload = frame
            if opcode >= CLOSE:
                messages.append((opcode, payload))
                continue
            if (opcode == CONTINUATION) != bool(self._opcode):
                raise WebSocketError(PROTOCOL, "a fragment out of order")
            self._opcode = self._opcode or opcode
            self._fragments += payload
            if len(self._fragments) > self._limit:
                raise WebSocketError(TOO_BIG, f"a message of more than {self._limit} bytes")
            if final:
                messages.append((self._opcode, bytes(self._fragments)))
                self._opcode = 0
                self._fragments.clear()
        return messages

    def _frame(self) -> tuple[bool, int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        final, opcode, size, start = bool(buffer[0] & 0x80), buffer[0] & 0x0F, buffer[1] & 0x7F, 2
        if buffer[0] & 0x70 or opcode not in (CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG):
            raise WebSocketError(PROTOCOL, f"a frame that begins with {buffer[0]:#x}")
        if not buffer[1] & 0x80:
            raise WebSocketError(PROTOCOL, "an unmasked frame")
        if opcode >= CLOSE and (size > 125 or not final):
            raise WebSocketError(PROTOCOL, "a control frame that is long or fragmented")
        if size >= 126:
            start += 2 if size == 126 else 8
            if len(buffer) < start:
                return None
            size = int.from_bytes(buffer[2:start], "big")
        if size > self._limit:
            raise WebSocketError(TOO_BIG, f"a frame of {size} bytes, at most {self._limit} allowed")
        end = start + 4 + size
        if len(buffer) < end:
            return None
        mask = bytes(buffer[start : start + 4])
        payload = _unmask(bytes(buffer[start + 4 : end]), mask)
        del buffer[:end]
        return final, opcode, payload


def _unmask(payload: bytes, mask: bytes) -> bytes:
    size = len(payload)
    pad = (mask * (size // 4 + 1))[
        :size
    ]  # one exclusive or over all of it: a loop over bytes takes a hundred times as long
    return (int.from_bytes(payload, "big") ^ int.from_bytes(pad, "big")).to_bytes(size, "big")
