"""What a call leaves behind: the merged answer, its usage, its tokens."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from harness.relay.request import load_json


class Merger:
    """Merges the chunks of a stream into the completion they stand for."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.finished = False
        """Whether the finish reason has come."""
        self.error: bytes | None = None
        """The event in which the policy said that it failed."""

    def feed(self, data: bytes) -> bool:
        """Take the data of one event; says whether it was a whole JSON object. What is none is passed over."""
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
        for key, value in chunk.items():
            if value is not None or key not in self._top:
                self._top[key] = value
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._merge_choice(choice)
        return True

    def _merge_choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        index = index if isinstance(index, int) else 0
        merged = self._choices.setdefault(index, {"index": index, "finish_reason": None})
        for key, value in choice.items():
            if key == "delta":
                if isinstance(value, dict):
                    _merge_delta(merged.setdefault("message", {"role": "assistant", "content": None}), value)
            elif key == "logprobs" and isinstance(value, dict):
                _extend(merged.setdefault("logprobs", {}), value)
            elif key in ("token_ids", "text"):
                _extend(merged, {key: value})
            elif value is not None:
                merged[key] = value
        if merged["finish_reason"] is not None:
            self.finished = True

    def result(self) -> dict[str, Any] | None:
        """The completion so far; null when nothing came."""
        if not self._top and not self._choices:
            return None
        top = dict(self._top)
        if top.get("object") == "chat.completion.chunk":
            top["object"] = "chat.completion"
        return top | {"choices": [_finished(self._choices[index]) for index in sorted(self._choices)]}


def _finished(choice: dict[str, Any]) -> dict[str, Any]:
    choice = _joined(choice)
    calls = choice.get("message", {}).get("tool_calls")
    if isinstance(calls, list):
        choice["message"]["tool_calls"] = [_joined({k: v for k, v in call.items() if k != "index"}) for call in calls]
    return choice


def _merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "role":
            message["role"] = value or message["role"]
        elif key == "tool_calls" and isinstance(value, list):
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if isinstance(part, dict):
                    _merge_tool_call(calls, part)
        else:
            _extend(message, {key: value})


def _merge_tool_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index")
    if not isinstance(index, int):  # some servers send whole calls without an index
        known = next((i for i, call in enumerate(calls) if call.get("id") == part.get("id")), None)
        index = known if known is not None else len(calls) if part.get("id") or not calls else len(calls) - 1
    call = next((call for call in calls if call["index"] == index), None)
    if call is None:
        call = {"index": index, "id": None, "type": "function", "function": {}}
        calls.append(call)
    call["id"] = call["id"] or part.get("id")
    call["type"] = part.get("type") or call["type"]
    function = part.get("function")
    if isinstance(function, dict):
        _extend(call["function"], function)


class _Pieces(list[str]):
    """A growing text: joined once, because adding strings to strings is quadratic in the length of the answer."""


def _extend(target: dict[str, Any], more: dict[str, Any]) -> None:
    """Add text to text and lists to lists; anything else replaces, null never does."""
    for key, value in more.items():
        have = target.get(key)
        if isinstance(value, str):
            if isinstance(have, _Pieces):
                have.append(value)
            else:
                target[key] = _Pieces([value])
        elif isinstance(value, list) and isinstance(have, list) and not isinstance(have, _Pieces):
            have.extend(value)
        elif value is not None or key not in target:
            target[key] = value


def _joined(value: Any) -> Any:
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, dict):
        return {key: _joined(item) for key, item in value.items()}
    return value


class Tokens(NamedTuple):
    """Token counts and, where the policy gave them, ids and log-probabilities of the completion."""

    prompt: int | None = None
    completion: int | None = None
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = None

    @property
    def complete(self) -> bool:
        return self.completion_ids is not None and len(self.completion_ids) == self.completion


def tokens_of(response: dict[str, Any] | None) -> Tokens:
    """Find tokens where the servers put them.

    vLLM: ``prompt_token_ids`` (top level), ``choices[].token_ids``, and ``token_id:N`` as tokens of log-probabilities;
    SGLang: ``choices[].meta_info.output_token_logprobs`` (log-probability, id, text) and ``output_ids``; llama.cpp:
    ``id`` in each entry of ``logprobs.content``.
    """
    if not response:
        return Tokens()
    usage = response.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    logprobs, logprob_ids = _logprobs(choice.get("logprobs"))
    meta = choice.get("meta_info")
    if isinstance(meta, dict):
        entries = meta.get("output_token_logprobs")
        if isinstance(entries, list) and all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
            logprobs, logprob_ids = _floats([e[0] for e in entries]), _ints([e[1] for e in entries])
        logprob_ids = _ints(meta.get("output_ids")) or logprob_ids
    return Tokens(
        prompt=_count(usage.get("prompt_tokens")),
        completion=_count(usage.get("completion_tokens")),
        prompt_ids=_ints(response.get("prompt_token_ids")) or _ints(choice.get("prompt_token_ids")),
        completion_ids=_ints(choice.get("token_ids")) or logprob_ids,
        logprobs=logprobs,
    )


def _logprobs(value: Any) -> tuple[list[float] | None, list[int] | None]:
    if not isinstance(value, dict):
        return None, None
    content = value.get("content")
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        return _floats(value.get("token_logprobs")), None
    ids = [_entry_id(entry) for entry in content]
    return _floats([entry.get("logprob") for entry in content]), _ints(ids)


def _entry_id(entry: dict[str, Any]) -> Any:
    token = entry.get("token")
    if isinstance(token, str) and token.startswith("token_id:") and token[9:].isdecimal():
        return int(token[9:])
    return entry.get("id")


def _ints(value: Any) -> list[int] | None:
    if not isinstance(value, list) or not value or not all(type(item) is int and item >= 0 for item in value):
        return None
    return value


def _floats(value: Any) -> list[float] | None:
    if not isinstance(value, list) or not value:
        return None
    if not all(type(item) in (int, float) and math.isfinite(item) for item in value):
        return None
    return [float(item) for item in value]


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def bounded(value: dict[str, Any] | None, size: int, limit: int) -> tuple[dict[str, Any] | None, bool]:
    """A body as it is recorded: whole when its ``size`` is within the limit, else without what made it large."""
    if value is None or size <= limit:
        return value, False
    kept = {key: item for key, item in value.items() if not isinstance(item, list | dict | str) or key == "model"}
    return kept, True
