"""What a call leaves behind: the merged answer, its usage, its tokens."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, NamedTuple

from harness.relay.request import load_json

_FOLD = 1000
_ADDED_UP = ("delta", "text", "token_ids", "logprobs")
"""What grows from chunk to chunk of a choice. Of anything else, the last value counts."""
_REPEATED = ("role", "id", "type", "index")
"""Within these, texts that some servers send again with every chunk."""


class Merger:
    """Merges the chunks of a stream into the completion they stand for."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._choices: dict[int, list[dict[str, Any]]] = {}
        self.finished = False
        """Whether the finish reason has come."""
        self.error: bytes | None = None
        """The event in which the policy said that it failed."""

    def feed(self, data: bytes) -> bool:
        """Take the data of one event; says whether it was a whole JSON object."""
        try:
            chunk = load_json(data)
        except ValueError:
            return False
        if not isinstance(chunk, dict):
            return False
        if chunk.get("error"):
            self.error = data
            return True
        choices = chunk.pop("choices", None)
        self._top |= {key: value for key, value in chunk.items() if value is not None or key not in self._top}
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._add(choice)
        return True

    def _add(self, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        parts = self._choices.setdefault(index if isinstance(index, int) else 0, [])
        parts.append(choice)
        if len(parts) >= _FOLD:  # chunks take far more memory than what they say
            parts[:] = [_merged_choice(parts)]
        self.finished = self.finished or choice.get("finish_reason") is not None

    def result(self) -> dict[str, Any] | None:
        """The completion so far; null when nothing came."""
        if not self._top and not self._choices:
            return None
        top = dict(self._top)
        if top.get("object") == "chat.completion.chunk":
            top["object"] = "chat.completion"
        return top | {"choices": [_finished(index, parts) for index, parts in sorted(self._choices.items())]}


def _finished(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": None} | _merged_choice(parts)
    delta = choice.pop("delta", None)
    if isinstance(delta, dict):
        choice["message"] = message = {"role": "assistant", "content": None, **delta}
        if "tool_calls" in delta:
            calls = map(_object, _list(delta["tool_calls"]))
            message["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
    return choice


def _merged_choice(parts: list[dict[str, Any]]) -> dict[str, Any]:
    last = {key: value for part in parts for key, value in part.items() if value is not None}
    return last | _added_up([{key: part[key] for key in _ADDED_UP if key in part} for part in parts])


def _added_up(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One object of many: texts and lists are joined, objects added up too, of anything else the last one counts."""
    total: dict[str, Any] = {}
    for key in dict.fromkeys(chain.from_iterable(parts)):
        values = [part[key] for part in parts if part.get(key) is not None]
        if key == "tool_calls":
            total[key] = _tool_calls([call for value in values if isinstance(value, list) for call in value])
        elif not values:
            continue
        elif key in _REPEATED:
            total[key] = values[-1]
        elif all(isinstance(value, str) for value in values):
            total[key] = "".join(values)
        elif all(isinstance(value, list) for value in values):
            total[key] = list(chain.from_iterable(values))
        elif all(isinstance(value, dict) for value in values):
            total[key] = _added_up(values)
        else:
            total[key] = values[-1]
    return total


def _tool_calls(parts: list[Any]) -> list[dict[str, Any]]:
    calls: dict[object, list[dict[str, Any]]] = {}
    current: object = None
    for part in parts:
        if isinstance(part, dict):
            # Some servers send no index: there a new id begins a new call.
            own = (part.get("index"), part.get("id"))
            current = next((mark for mark in own if isinstance(mark, int | str)), current)
            calls.setdefault(current, []).append(part)
    return [_added_up(call) for call in calls.values()]


class Tokens(NamedTuple):
    """Token counts and, where the policy gave them, ids and log-probabilities of the completion."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    tokens_complete: bool = False
    """Whether the ids are there and as many as the usage says."""


def tokens_of(response: dict[str, Any] | None) -> Tokens:
    """Find tokens where the servers put them.

    vLLM: ``prompt_token_ids`` (top level), ``choices[].token_ids``, and ``token_id:N`` as tokens of log-probabilities;
    SGLang: ``choices[].meta_info.output_token_logprobs`` (log-probability, id, text) and ``output_ids``; llama.cpp:
    ``id`` in each entry of ``logprobs.content``.
    """
    response = _object(response)
    choice = _object(next(iter(_list(response.get("choices"))), None))
    usage, meta = _object(response.get("usage")), _object(choice.get("meta_info"))
    logprobs = _object(choice.get("logprobs"))
    entries = [_object(entry) for entry in _list(logprobs.get("content"))]
    pairs = [_list(entry) for entry in _list(meta.get("output_token_logprobs"))]
    if pairs:
        found, ids = [pair[0] if pair else None for pair in pairs], [pair[1] if pair[1:] else None for pair in pairs]
    else:
        found, ids = [entry.get("logprob") for entry in entries], [_entry_id(entry) for entry in entries]
    completion_ids = _ints(choice.get("token_ids")) or _ints(meta.get("output_ids")) or _ints(ids)
    completion_tokens = _count(usage.get("completion_tokens"))
    return Tokens(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=completion_tokens,
        prompt_token_ids=_ints(response.get("prompt_token_ids")) or _ints(choice.get("prompt_token_ids")),
        completion_token_ids=completion_ids,
        logprobs=_floats(found or logprobs.get("token_logprobs")),
        tokens_complete=completion_ids is not None and len(completion_ids) == completion_tokens,
    )


def _entry_id(entry: dict[str, Any]) -> Any:
    token = str(entry.get("token"))
    return int(token[9:]) if token.startswith("token_id:") and token[9:].isdecimal() else entry.get("id")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _ints(value: Any) -> list[int] | None:
    items = _list(value)
    return items if items and all(type(item) is int and item >= 0 for item in items) else None


def _floats(value: Any) -> list[float] | None:
    items = _list(value)
    good = items and all(type(item) in (int, float) and math.isfinite(item) for item in items)
    return [float(item) for item in items] if good else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def bounded(value: dict[str, Any] | None, size: int, limit: int) -> tuple[dict[str, Any] | None, bool]:
    """A body as it is recorded: whole when its ``size`` is within the limit, else without what made it large."""
    if value is None or size <= limit:
        return value, False
    kept = {key: item for key, item in value.items() if not isinstance(item, list | dict | str) or key == "model"}
    return kept, True
