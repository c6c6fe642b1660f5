from __future__ import annotations

import base64
import hashlib
import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.guest import websocket
from harness.guest.websocket import BINARY, CLOSE, CONTINUATION, PING, Decoder, WebSocketError

KEY = base64.b64encode(b"0123456789abcdef")
HEAD = (
    b"GET /x HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Key: " + KEY + b"\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def masked(opcode: int, payload: bytes, *, final: bool = True) -> bytes:
    """A frame as clients send it."""
    mask, size = os.urandom(4), len(payload)
    first = bytes([opcode | (0x80 if final else 0)])
    if size < 126:
        head = bytes([0x80 | size])
    elif size < 1 << 16:
        head = bytes([0x80 | 126]) + size.to_bytes(2, "big")
    else:
        head = bytes([0x80 | 127]) + size.to_bytes(8, "big")
    return first + head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


def test_a_handshake_is_answered_as_the_standard_says() -> None:
    answer = websocket.accept(HEAD)
    digest = hashlib.sha1(KEY + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n" in answer


@pytest.mark.parametrize(
    "head",
    [
        HEAD.replace(b"GET", b"POST"),
        HEAD.replace(b"Upgrade: websocket\r\n", b""),
        HEAD.replace(b"Version: 13", b"Version: 8"),
        HEAD.replace(KEY, b"c2hvcnQ="),
        HEAD.replace(KEY, b"no base64!"),
        b"\r\n\r\n",
        bytes(range(256)),
    ],
)
def test_other_requests_are_refused(head: bytes) -> None:
    with pytest.raises(WebSocketError):
        websocket.accept(head)


@given(st.lists(st.binary(max_size=70_000), max_size=6), st.integers(1, 5000))
def test_messages_arrive_whole_however_they_are_cut(payloads: list[bytes], step: int) -> None:
    data = b"".join(masked(BINARY, payload) for payload in payloads)
    decoder = Decoder()
    found = [message for at in range(0, len(data), step) for message in decoder.feed(data[at : at + step])]
    assert found == [(BINARY, payload) for payload in payloads]


def test_fragments_are_put_together_with_a_ping_between_them() -> None:
    data = masked(BINARY, b"one ", final=False) + masked(PING, b"?") + masked(CONTINUATION, b"two")
    assert Decoder().feed(data) == [(PING, b"?"), (BINARY, b"one two")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (websocket.encode(BINARY, b"unmasked"), websocket.PROTOCOL),
        (masked(CONTINUATION, b"of nothing"), websocket.PROTOCOL),
        (masked(BINARY, b"a", final=False) + masked(BINARY, b"b"), websocket.PROTOCOL),
        (masked(PING, b"x" * 126), websocket.PROTOCOL),
        (masked(CLOSE, b"", final=False), websocket.PROTOCOL),
        (masked(3, b""), websocket.PROTOCOL),
        (b"\xc2\x80\0\0\0\0", websocket.PROTOCOL),
        (masked(BINARY, b"x" * 200)[:4], websocket.TOO_BIG),
        (masked(BINARY, b"x" * 80, final=False) + masked(CONTINUATION, b"x" * 80), websocket.TOO_BIG),
        (b"\x82\xff" + b"\xff" * 8, websocket.TOO_BIG),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "bytes",  # masks are random
)
def test_what_breaks_the_protocol_is_refused(data: bytes, code: int) -> None:
    with pytest.raises(WebSocketError) as caught:
        Decoder(limit=100).feed(data)
    assert caught.value.code == code


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_no_bytes_do_more_than_that_or_are_kept_without_bound(chunks: list[bytes]) -> None:
    decoder = Decoder(limit=1000)
    with suppress(WebSocketError):
        for chunk in chunks:
            assert all(len(payload) <= 1000 for _, payload in decoder.feed(chunk))
            assert len(decoder._buffer) <= 1014
