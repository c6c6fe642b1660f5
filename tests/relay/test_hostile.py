"""What a sandbox may send that is not a proper call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.relay.support import box, completion, says, scripted

pytestmark = pytest.mark.anyio

PATH = b"POST /v1/chat/completions HTTP/1.1\r\nHost: relay\r\n"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n", b"{}"),
        (b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"),
        (b"Transfer-Encoding: chunked, identity\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n{}\r\n0\r\n\r\n"),
        (b"Content-Length: -2\r\n\r\n", b"{}"),
        (b"X: " + b"y" * 100_000 + b"\r\n\r\n", b""),
        (b"".join(b"X%d: y\r\n" % i for i in range(500)) + b"\r\n", b""),
        (b"Content-Length : 2\r\n\r\n", b"{}"),
        (b"Bad\x00Header: y\r\n\r\n", b""),
    ],
    ids=["two lengths", "length and chunks", "odd encoding", "bad chunk", "negative", "huge", "many", "space", "nul"],
)
async def test_ambiguous_requests_are_refused_and_the_connection_closed(head: bytes, body: bytes) -> None:
    async with scripted(says(completion())) as server, box(server.policy()) as it:
        peer = await it.connect()
        token = b"Authorization: Bearer " + it.lease.token.encode() + b"\r\n"
        follow_up = PATH + token + b"Content-Length: 2\r\n\r\n{}"
        await peer.stream.send(PATH + token + head + body + follow_up)
        reply = await peer.reply()
        assert reply.status == 400
        assert "message" in reply.json()["error"]
        assert await peer.closed()
        assert server.seen == []


async def test_pipelined_requests_are_answered_in_order() -> None:
    answers = [says(completion(str(i))) for i in range(3)]
    async with scripted(*answers) as server, box(server.policy()) as it:
        peer = await it.connect()
        for _ in range(3):
            await peer.post({})
        replies = [await peer.reply() for _ in range(3)]
        assert [reply.json()["choices"][0]["message"]["content"] for reply in replies] == ["0", "1", "2"]


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer wrong", "Basic x", "Bearer \u00e9", "bearer {token}"])
async def test_wrong_token_is_a_401(given: str) -> None:
    async with scripted(says(completion())) as server, box(server.policy()) as it:
        peer = await it.connect()
        await peer.post({}, Authorization=given.format(token=it.lease.token))
        reply = await peer.reply()
        assert (reply.status, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert server.seen == []
        assert it.records == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"nonsense", "not JSON"),
        (b"[1]", "JSON object"),
        (b'{"temperature": NaN}', "not JSON"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        ({"n": 2}, "n=1"),
        ({"stream": "yes"}, "stream"),
        ({"api_base": "http://x"}, "api_base"),
        ({"extra_body": {"api_key": "x"}}, "api_key"),
        ({"extra_body": {"extra_body": {}}}, "extra_body"),
        ({"litellm_metadata": {}, "aws_region": "x"}, "aws_region, litellm_metadata"),
        ({"models": ["a"]}, "models"),
    ],
)
async def test_bad_bodies_are_told_what_is_wrong(body: Any, said: str) -> None:
    async with scripted(says(completion())) as server, box(server.policy()) as it:
        peer = await it.connect()
        await peer.post(body)
        reply = await peer.reply()
        assert reply.status == 400
        assert said in reply.json()["error"]["message"]
        assert server.seen == []
        assert (await peer.ask()).status == 200  # the connection is still good
        assert [record.status for record in it.records] == [400, 200]


async def test_the_last_of_two_equal_keys_wins_for_relay_and_policy_alike() -> None:
    async with scripted(says(completion())) as server, box(server.policy()) as it:
        peer = await it.connect()
        await peer.post(b'{"model": "a", "seed": 1, "seed": 2, "model": "b"}')
        assert (await peer.reply()).status == 200
        assert server.seen[0].body == {"model": "the-model", "seed": 2}


async def test_lone_surrogates_do_not_reach_the_journal() -> None:
    answer = json.dumps(completion()).replace("hello", "h\\ud83d").encode()
    async with scripted(says(answer)) as server, box(server.policy()) as it:
        peer = await it.connect()
        await peer.post(b'{"messages": [{"role": "user", "content": "x\\ud800y"}]}')
        assert (await peer.reply()).body == answer
        (record,) = await it.recorded(1)
        assert json.loads(record.model_dump_json())["request"]["messages"][0]["content"] == "x?y"


@pytest.mark.parametrize("line", ["GET /", "GET /v1/chat/completions", "DELETE /v1/models", "POST /v1/embeddings"])
async def test_anything_else_is_a_404_that_says_what_there_is(line: str) -> None:
    async with scripted(says(completion())) as server, box(server.policy()) as it:
        peer = await it.connect()
        await peer.stream.send(f"{line} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {it.lease.token}\r\n\r\n".encode())
        reply = await peer.reply()
        assert reply.status == 404
        assert "/chat/completions" in reply.json()["error"]["message"]


async def test_models_and_plain_completions_are_served() -> None:
    text = {"object": "text_completion", "choices": [{"index": 0, "text": "t", "finish_reason": "stop"}]}
    async with scripted(says(text)) as server, box(server.policy()) as it:
        peer = await it.connect()
        head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {it.lease.token}\r\n\r\n"
        await peer.stream.send(head.encode())
        assert (await peer.reply()).json()["data"][0]["id"] == "the-model"
        await peer.post({"prompt": "p", "stream": True}, path="/v1/completions")
        reply = await peer.reply()
        assert reply.events() == [text, "[DONE]"]
        assert server.seen[0].path == "/v1/completions"
        assert (await it.recorded(1))[0].complete


async def test_http_1_0_is_refused_because_its_answers_cannot_be_cut_visibly() -> None:
    async with scripted(says(completion())) as server, box(server.policy()) as it:
        peer = await it.connect()
        request = (
            f"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer {it.lease.token}\r\nContent-Length: 2\r\n"
        )
        await peer.stream.send(request.encode() + b"\r\n{}")
        assert (await peer.reply()).status == 505
        assert server.seen == []


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00", b"\r\n\r\n", b"CON", b"\x00" * 100_000, b"GET"])
async def test_noise_and_early_ends_cost_only_the_connection(data: bytes) -> None:
    async with scripted(says(completion())) as server, box(server.policy()) as it:
        peer = await it.connect()
        await peer.stream.send(data)
        await peer.stream.aclose()
        assert (await (await it.connect()).ask()).status == 200
