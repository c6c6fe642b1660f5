"""Server-sent events: cutting a stream at event boundaries, and making one of a plain answer."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import to_json

PING = b": ping\n\n"
DONE = b"[DONE]"
_BOUNDARY = re.compile(rb"\r?\n\r?\n")


class EventCutter:
    """Cuts received bytes at event boundaries: only whole events go further, so anything may go between them."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they came; give back those that complete events, unchanged."""
        rest = self._rest
        start = max(0, len(rest) - 3)
        rest += data
        cut = max(rest.rfind(b"\n\n", start) + 2, rest.rfind(b"\n\r\n", start) + 3)
        if cut < 3:
            return b""
        whole = bytes(rest[:cut])
        del rest[:cut]
        return whole

    @property
    def pending(self) -> int:
        """Bytes held back because their event is not complete."""
        return len(self._rest)

    def rest(self) -> bytes:
        """What is left when the stream has ended: a last event without its blank line."""
        data = bytes(self._rest)
        self._rest.clear()
        return data


def payloads(whole: bytes) -> list[bytes]:
    """The data of each event in bytes that end at an event boundary; comments have none."""
    found: list[bytes] = []
    for block in _BOUNDARY.split(whole):
        if block.startswith(b"data:") and b"\n" not in block:
            found.append(block[5:].strip())
        elif block:
            lines = [line[5:].strip() for line in block.splitlines() if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
    return found


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """An error body as the event that OpenAI clients raise on."""
    return b"event: error\ndata: " + body + b"\n\n"


def as_stream(completion: dict[str, Any]) -> bytes:
    """A whole completion as a stream: one chunk with everything, then the end."""
    chunk = {key: value for key, value in completion.items() if key != "choices"}
    if chunk.get("object") == "chat.completion":
        chunk["object"] = "chat.completion.chunk"
    chunk["choices"] = [_as_delta(choice) for choice in completion["choices"]]
    return event(chunk) + b"data: " + DONE + b"\n\n"


def _as_delta(choice: dict[str, Any]) -> dict[str, Any]:
    if "message" not in choice:
        return choice
    delta = dict(choice["message"])
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls) if isinstance(call, dict)]
    return {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}
