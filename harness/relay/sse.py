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
        if cut < 3:  # neither was found
            return b""
        whole = bytes(rest[:cut])
        del rest[:cut]
        return whole

    def end(self) -> bytes:
        """What is left when the stream has ended: a last event that lacked its blank line, which is added."""
        return self.feed(b"\n\n") if self._rest else b""


def payloads(whole: bytes) -> list[bytes]:
    """The data of each event in bytes that end at an event boundary; comments have none."""
    blocks = (block.splitlines() for block in _BOUNDARY.split(whole))
    data = (b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:")) for lines in blocks)
    return [each for each in data if each]


def error_event(body: bytes) -> bytes:
    """An error body as the event that OpenAI clients raise on."""
    return b"event: error\ndata: " + body + b"\n\n"


def as_stream(completion: dict[str, Any]) -> bytes:
    """A whole completion as a stream: one chunk with everything, then the end."""
    chunk = {key: value for key, value in completion.items() if key != "choices"}
    if chunk.get("object") == "chat.completion":
        chunk["object"] = "chat.completion.chunk"
    chunk["choices"] = [_as_delta(choice) for choice in completion["choices"]]
    return b"data: " + to_json(chunk) + b"\n\ndata: " + DONE + b"\n\n"


def _as_delta(choice: dict[str, Any]) -> dict[str, Any]:
    if "message" not in choice:
        return choice
    delta = dict(choice["message"])
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls) if isinstance(call, dict)]
    return {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}
