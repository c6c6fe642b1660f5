"""Tokens as the servers give them, and merging."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.relay.capture import Merger, tokens_of
from harness.relay.sse import EventCutter, payloads
from tests.relay.support import DONE, chunk, completion


def merged(*events: bytes) -> dict[str, Any]:
    merger = Merger()
    for data in payloads(b"".join(events)):
        merger.feed(data)
    result = merger.result()
    assert result is not None
    return result


def logprobs(*entries: tuple[str, float, int | None]) -> dict[str, Any]:
    content = [{"token": t, "logprob": p} | ({} if i is None else {"id": i}) for t, p, i in entries]
    return {"logprobs": {"content": content}}


def test_vllm_tokens_of_a_stream() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    response = merged(
        chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2], choice={"token_ids": None}),
        chunk({"content": "a"}, choice={"token_ids": [10, 11], **logprobs(("a", -0.5, None), ("b", -1, None))}),
        chunk({"content": "b"}, "stop", choice={"token_ids": [12], **logprobs(("c", -2.0, None))}, usage=usage),
    )
    tokens = tokens_of(response)
    assert tokens.prompt_token_ids == [1, 2]
    assert tokens.completion_token_ids == [10, 11, 12]
    assert tokens.logprobs == [-0.5, -1.0, -2.0]
    assert tokens.tokens_complete


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ({"token_ids": [1, 2]}, [1, 2]),
        (logprobs(("token_id:7", -1.0, None), ("token_id:8", -1.0, None)), [7, 8]),
        (logprobs(("a", -1.0, 7), ("b", -1.0, 8)), [7, 8]),
        ({"meta_info": {"output_token_logprobs": [[-1.0, 7, "a"], [-1.0, 8, None]]}}, [7, 8]),
    ],
    ids=["vllm", "vllm tokens as ids", "llama.cpp", "sglang"],
)
def test_token_ids_of_plain_answers(choice: dict[str, Any], ids: list[int]) -> None:
    tokens = tokens_of(completion(choice=choice))
    assert tokens.completion_token_ids == ids
    assert tokens.tokens_complete


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [1]},
        {"token_ids": [1, None]},
        {"token_ids": "12"},
        {"logprobs": {"content": 3}},
        {"meta_info": []},
    ],
)
def test_tokens_that_do_not_add_up_are_not_complete(choice: dict[str, Any]) -> None:
    assert not tokens_of(completion(choice=choice)).tokens_complete


def test_tool_calls_without_an_index() -> None:
    def call(**fields: Any) -> bytes:
        return chunk({"tool_calls": [fields]})

    response = merged(
        call(id="a", function={"name": "f", "arguments": "{}"}),
        call(id="b", function={"name": "g", "arguments": "{"}),
        call(function={"arguments": "}"}),
    )
    calls = response["choices"][0]["message"]["tool_calls"]
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("a", "f", "{}"),
        ("b", "g", "{}"),
    ]


@given(st.lists(st.integers(0, 400), max_size=30), st.sampled_from([b"\n", b"\r\n"]))
def test_cutting_anywhere_changes_nothing_and_yields_whole_events_only(cuts: list[int], newline: bytes) -> None:
    stream = b"".join(chunk({"content": str(i)}) for i in range(3)) + b": c\n\nevent: x\ndata: 1\ndata: 2\n\n" + DONE
    stream = stream.replace(b"\n", newline)
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    cutter = EventCutter()
    out = [cutter.feed(stream[a:b]) for a, b in pairwise(edges)]
    assert b"".join(out) + cutter.end() == stream
    assert all(not piece or piece.endswith(newline * 2) for piece in out)
    assert [data for piece in out for data in payloads(piece)] == payloads(stream)
    assert payloads(stream)[-2:] == [b"1\n2", b"[DONE]"]
