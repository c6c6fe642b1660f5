"""Model calls from the sandbox's side of the connection, one line of the table of client behaviours after the other."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from pydantic import SecretStr

from harness.policy.resolve import Policy
from harness.relay.settings import CallLimits
from tests.relay.support import (
    DONE,
    HELLO,
    KEY,
    QUICK,
    Peer,
    Step,
    box,
    chunk,
    completion,
    raw,
    says,
    scripted,
    streams,
    until,
    waits,
)

pytestmark = pytest.mark.anyio


async def test_plain_answer_passes_byte_for_byte_and_is_recorded() -> None:
    body = b'{ "choices":[{"index":0, "message":{"content":"h\\u00e9"},"finish_reason":"stop"}],  "usage":null }'
    async with scripted(says(body)) as server, box(server.policy(), sampling={"temperature": 0.5, "top_p": 1}) as it:
        peer = await it.connect()
        reply = await peer.ask(temperature=1.0)
        assert (reply.status, reply.body, reply.whole) == (200, body, True)
        seen = server.seen[0]
        assert seen.path == "/v1/chat/completions"
        assert seen.body["model"] == "the-model"
        assert (seen.body["temperature"], seen.body["top_p"]) == (1.0, 1)
        assert seen.headers["Authorization"] == f"Bearer {KEY}"
        (record,) = await it.recorded(1)
        assert record.complete
        assert record.response is not None
        assert record.response["choices"][0]["message"]["content"] == "hé"
        assert (record.status, record.attempt, record.index, record.stream) == (200, 1, 0, False)
        assert it.lease.failure is None


async def test_only_known_headers_reach_the_policy() -> None:
    async with scripted(says(completion())) as server, box(server.policy()) as it:
        peer = await it.connect()
        await peer.post(
            {"messages": []}, Cookie="a=b", X_Api_Key="mine", X_Rollout_Id="r1", X_Stainless_Retry_Count="2"
        )
        assert (await peer.reply()).status == 200
        headers = server.seen[0].headers
        assert "Cookie" not in headers
        assert "X-Api-Key" not in headers
        assert headers["X-Rollout-Id"] == "r1"
        assert it.lease.token not in str(headers)
        assert (await it.recorded(1))[0].client_retry == 2


async def test_stream_passes_whole_events_and_is_merged() -> None:
    call: dict[str, Any] = {
        "index": 0,
        "id": "t1",
        "type": "function",
        "function": {"name": "bash", "arguments": '{"c'},
    }
    more = {"index": 0, "function": {"arguments": '":1}'}}
    usage = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    pieces = (
        b": comment\n\n" + chunk({"role": "assistant", "reasoning_content": "I "})[:30],
        chunk({"role": "assistant", "reasoning_content": "I "})[30:],
        chunk({"reasoning_content": "think"}) + chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [more]}) + chunk({}, "tool_calls", usage=usage),
        DONE,
    )
    async with scripted(streams(*pieces)) as server, box(server.policy()) as it:
        reply = await (await it.connect()).ask(stream=True)
        assert reply.whole
        assert reply.body == b"".join(pieces)
        assert reply.headers["content-type"] == "text/event-stream"
        assert server.seen[0].body["stream_options"] == {"include_usage": True}
        (record,) = await it.recorded(1)
        assert record.complete
        assert record.response is not None
        message = record.response["choices"][0]["message"]
        assert message["reasoning_content"] == "I think"
        assert message["tool_calls"] == [
            {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"c":1}'}}
        ]
        assert record.response["object"] == "chat.completion"
        assert record.response["choices"][0]["finish_reason"] == "tool_calls"
        assert (record.prompt_tokens, record.completion_tokens) == (7, 4)
        assert (it.lease.usage.calls, it.lease.usage.total_tokens) == (1, 11)


@pytest.mark.parametrize(("status", "requests"), [(500, 3), (429, 3), (503, 3), (400, 1), (401, 1), (404, 1)])
@pytest.mark.parametrize("stream", [False, True])
async def test_final_error_keeps_status_and_body_and_forbids_client_retries(
    status: int, requests: int, stream: bool
) -> None:
    async with scripted(says({"error": {"message": f"no, {KEY}"}}, status)) as server, box(server.policy()) as it:
        peer = await it.connect()
        reply = await peer.ask(stream=stream)
        assert reply.status == status
        assert reply.json() == {"error": {"message": "no, [REDACTED]"}}
        assert reply.headers["x-should-retry"] == "false"
        assert len(server.seen) == requests
        (record,) = await it.recorded(1)
        assert (record.attempt, record.status, record.complete) == (requests, status, False)
        assert it.lease.failure is not None
        assert it.lease.failure.party == "policy"
        assert it.lease.failure.retryable == (status in (429, 500, 503))
        assert it.lease.usage.failed_calls == 1
        assert KEY.encode() not in peer.everything
        assert KEY not in record.model_dump_json() + it.lease.failure.message


@pytest.mark.parametrize(
    "first", [says({}, 500), says({}, 429, {"Retry-After": "0"}), raw()], ids=["500", "429", "drop"]
)
async def test_passing_trouble_is_retried_out_of_sight(first: Step) -> None:
    async with scripted(first, says(completion())) as server, box(server.policy()) as it:
        assert (await (await it.connect()).ask()).status == 200
        assert len(server.seen) == 2
        record = (await it.recorded(1))[0]
        assert (record.attempt, record.complete, record.error) == (2, True, None)
        assert it.lease.failure is None


async def test_exhausted_quota_is_not_retried() -> None:
    body = {"error": {"code": "insufficient_quota", "message": "pay"}}
    async with scripted(says(body, 429)) as server, box(server.policy()) as it:
        assert (await (await it.connect()).ask()).status == 429
        assert len(server.seen) == 1


async def test_refused_connection_is_a_502_that_does_not_say_where() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        policy = Policy(name="x", base_url=f"http://127.0.0.1:{unused.getsockname()[1]}/v1", model="m", key=None)
        async with box(policy) as it:
            reply = await (await it.connect()).ask(stream=True)
            assert reply.status == 502
            assert reply.json()["error"]["code"] == "policy_unreachable"
            assert "127.0.0.1" not in reply.body.decode()
            assert it.lease.failure is not None
            assert it.lease.failure.kind == "PolicyUnreachable"
            assert "refused the connection" in it.lease.failure.message
            assert (await it.recorded(1))[0].attempt == 3


@pytest.mark.parametrize(
    "pieces",
    [
        (HELLO[0], "cut"),
        HELLO[:2],
        (HELLO[0], HELLO[1][:40]),
        (HELLO[0], 0.1, DONE),
        (*HELLO, HELLO[0][:40], "cut"),
        (*HELLO, HELLO[0][:40]),
    ],
    ids=["cut", "no finish reason", "half an event", "done, no finish reason", "finish, cut", "finish, half an event"],
)
async def test_truncated_stream_never_ends_well(pieces: tuple[bytes | float | str, ...]) -> None:
    async with scripted(streams(*pieces)) as server, box(server.policy()) as it:
        reply = await (await it.connect()).ask(stream=True)
        assert reply.status == 200
        assert not reply.whole
        assert "[DONE]" not in reply.events()
        assert reply.events()[0]["choices"][0]["delta"]["content"] == "hel"
        assert "error" in reply.events()[-1]
        (record,) = await it.recorded(1)
        assert not record.complete
        assert record.error
        assert record.response is not None
        assert it.lease.failure is not None
        assert it.lease.failure.retryable


async def test_stream_cut_before_its_first_event_has_a_true_status() -> None:
    async with scripted(streams("cut")) as server, box(server.policy()) as it:
        reply = await (await it.connect()).ask(stream=True)
        assert (reply.status, reply.whole) == (502, True)
        assert len(server.seen) == 1


async def test_finish_reason_without_done_is_a_good_end() -> None:
    async with scripted(streams(*HELLO)) as server, box(server.policy()) as it:
        reply = await (await it.connect()).ask(stream=True)
        assert reply.whole
        assert (await it.recorded(1))[0].complete


async def test_last_event_without_its_blank_line_is_completed() -> None:
    async with scripted(streams(*HELLO, b"data: [DONE]")) as server, box(server.policy()) as it:
        reply = await (await it.connect()).ask(stream=True)
        assert reply.whole
        assert reply.body.endswith(DONE)
        assert (await it.recorded(1))[0].complete


async def test_error_event_of_the_policy_goes_down_once_and_ends_hard() -> None:
    bad = b'event: error\ndata: {"error": {"message": "boom ' + KEY.encode() + b'"}}\n\n'
    async with scripted(streams(HELLO[0], 0.1, bad, DONE)) as server, box(server.policy()) as it:
        peer = await it.connect()
        reply = await peer.ask(stream=True)
        assert not reply.whole
        assert reply.body.count(b"boom") == 1
        assert KEY.encode() not in peer.everything
        assert it.lease.failure is not None
        assert "boom" in it.lease.failure.message
        assert KEY not in it.lease.failure.message + (await it.recorded(1))[0].model_dump_json()


async def test_key_is_scrubbed_from_streams_however_they_are_cut() -> None:
    event = chunk({"content": f"the key is {KEY}!"}, "stop")
    middle = event.index(KEY.encode()) + 9
    async with scripted(streams(event[:middle], 0.05, event[middle:], DONE)) as server, box(server.policy()) as it:
        peer = await it.connect()
        reply = await peer.ask(stream=True)
        assert reply.whole
        assert b"[REDACTED]!" in reply.body
        assert KEY.encode() not in peer.everything
        assert KEY not in (await it.recorded(1))[0].model_dump_json()


async def test_plain_answer_to_a_streaming_request_becomes_a_stream() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "t", "function": {"name": "f"}}]}
    answer = completion(choice={"message": message, "finish_reason": "tool_calls"})
    async with scripted(says(answer)) as server, box(server.policy()) as it:
        reply = await (await it.connect()).ask(stream=True)
        assert reply.whole
        first, done = reply.events()
        assert done == "[DONE]"
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert first["usage"]["total_tokens"] == 5
        record = (await it.recorded(1))[0]
        assert record.complete
        assert record.response == answer


@pytest.mark.parametrize(
    "step", [says(b"<html>hi"), says([1]), says({"ok": 1}), says({}, 307), raw(b"SSH-2.0-x\r\n")], ids=range(5)
)
@pytest.mark.parametrize("stream", [False, True])
async def test_garbage_is_a_502(step: Step, stream: bool) -> None:
    async with scripted(step) as server, box(server.policy()) as it:
        reply = await (await it.connect()).ask(stream=stream)
        assert reply.status == 502
        assert it.lease.failure is not None
        assert it.lease.failure.kind == "PolicyRefused"
        assert len(server.seen) == 1


async def test_answer_cut_in_its_body_is_a_502_and_not_asked_again() -> None:
    cut = raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
    async with scripted(cut) as server, box(server.policy()) as it:
        assert (await (await it.connect()).ask()).status == 502
        assert len(server.seen) == 1


async def test_silent_policy_is_a_504() -> None:
    settings = QUICK.model_copy(update={"idle_timeout_s": 0.2})
    async with scripted(waits(30, says({}))) as server, box(server.policy(), settings) as it:
        assert (await (await it.connect()).ask()).status == 504
        assert len(server.seen) == 1
        with anyio.fail_after(5):
            await server.cancelled.wait()


# -- heartbeats

BEATING = QUICK.model_copy(update={"bootstrap_s": 0.2, "heartbeat_s": 0.15})


async def test_heartbeats_before_headers_and_between_events_only() -> None:
    event = HELLO[1]
    late = waits(0.5, streams(HELLO[0], event[:20], 0.5, event[20:], 0.5, HELLO[2], DONE))
    async with scripted(late) as server, box(server.policy(), BEATING) as it:
        reply = await (await it.connect()).ask(stream=True)
        assert reply.whole
        before, _, after = reply.body.partition(HELLO[0])
        assert before.startswith(b": ping\n\n")
        held, _, rest = after.partition(event)
        assert held.replace(b": ping\n\n", b"") == b""
        assert b": ping\n\n" in rest
        assert reply.body.replace(b": ping\n\n", b"") == b"".join((*HELLO, DONE))
        assert (await it.recorded(1))[0].complete


async def test_error_within_the_bootstrap_window_keeps_its_status() -> None:
    async with scripted(waits(0.05, says({}, 400))) as server, box(server.policy(), BEATING) as it:
        assert (await (await it.connect()).ask(stream=True)).status == 400


async def test_error_after_the_bootstrap_window_is_an_event_and_a_hard_end() -> None:
    async with (
        scripted(waits(0.5, says({"error": {"message": "late"}}, 400))) as server,
        box(server.policy(), BEATING) as it,
    ):
        reply = await (await it.connect()).ask(stream=True)
        assert (reply.status, reply.whole) == (200, False)
        assert b"event: error\n" in reply.body
        assert reply.events()[-1]["error"]["message"] == "late"
        assert it.lease.failure is not None


# -- leaving early


@pytest.mark.parametrize("stream", [False, True])
async def test_client_disconnect_stops_the_generation(stream: bool) -> None:
    step = streams(HELLO[0], "hold") if stream else waits(60, says({}))
    async with scripted(step) as server, box(server.policy()) as it:
        peer = await it.connect()
        await peer.post({"stream": stream})
        if stream:
            await peer._until(b"hel")
        else:
            await until(lambda: server.seen)
        await peer.stream.aclose()
        with anyio.fail_after(5):
            await server.cancelled.wait()
        (record,) = await it.recorded(1)
        assert not record.complete
        assert it.lease.failure is None


async def test_revoke_drops_open_calls_and_refuses_everything_later() -> None:
    async with scripted(streams(HELLO[0], "hold")) as server, box(server.policy()) as it:
        peer, idle = await it.connect(), await it.connect()
        await peer.post({"stream": True})
        await peer._until(b"hel")
        assert it.lease.policy_s > 0
        with anyio.fail_after(5):
            await it.lease.revoke()
        assert len(it.records) == 1  # written before revoke returns
        assert await peer.closed()
        assert not peer.everything.endswith(b"0\r\n\r\n")
        assert await idle.closed()
        late = await it.connect()
        assert (await late.ask()).status == 401
        assert await late.closed()
        assert len(server.seen) == 1


async def test_slow_call_does_not_hold_up_others() -> None:
    async with scripted(waits(30, says({})), says(completion())) as server, box(server.policy()) as it:
        slow, quick = await it.connect(), await it.connect()
        await slow.post({})
        await until(lambda: server.seen)
        assert (await quick.ask()).status == 200
        assert [record.index for record in await it.recorded(1)] == [1]
        assert it.records[0].complete


async def test_slow_reader_gets_everything() -> None:
    big = [chunk({"content": "x" * 50_000}) for _ in range(100)]
    async with scripted(streams(*big, *HELLO, DONE)) as server, box(server.policy()) as it:
        peer = await it.connect()
        await peer.post({"stream": True})
        await anyio.sleep(0.3)
        reply = await peer.reply()
        assert reply.whole
        assert reply.body == b"".join((*big, *HELLO, DONE))


# -- limits


async def test_limits_are_told_and_recorded() -> None:
    limits = CallLimits(calls=2, request_bytes=500, response_bytes=2000)
    async with (
        scripted(says(completion("x" * 3000)), says(completion())) as server,
        box(server.policy(), limits=limits) as it,
    ):
        peer = await it.connect()
        assert (await peer.ask()).status == 502
        assert (await peer.ask()).status == 200
        reply = await peer.ask()
        assert (reply.status, reply.json()["error"]["code"]) == (429, "call_limit")
        assert reply.headers["x-should-retry"] == "false"
        assert (await (await it.connect()).ask(pad="x" * 600)).status == 413
        assert [record.status for record in it.records] == [502, 200, 429, 413]
        assert [record.index for record in it.records] == [0, 1, 2, 3]
        assert it.lease.usage.calls == 2


async def test_concurrency_limit() -> None:
    limits = CallLimits(concurrent=1)
    async with scripted(waits(0.3, says(completion()))) as server, box(server.policy(), limits=limits) as it:
        first, second = await it.connect(), await it.connect()
        await first.post({})
        await until(lambda: server.seen)
        assert (await second.ask()).json()["error"]["code"] == "concurrency_limit"
        assert (await first.reply()).status == 200


async def test_large_bodies_are_recorded_without_their_messages() -> None:
    settings = QUICK.model_copy(update={"record_bytes": 1000})
    async with scripted(says(completion("y" * 2000))) as server, box(server.policy(), settings) as it:
        assert (await (await it.connect()).ask(pad="x" * 2000, seed=3)).status == 200
        (record,) = await it.recorded(1)
        assert record.truncated
        assert record.request == {"model": "the-model", "seed": 3}
        assert record.completion_tokens == 2


async def test_key_shorter_than_a_secret_does_not_damage_answers() -> None:
    async with scripted(says(completion("EMPTY glass"))) as server:
        policy = Policy(name="x", base_url=server.url, model="m", key=SecretStr("EMPTY"))
        async with box(policy) as it:
            reply = await (await it.connect()).ask()
            assert reply.json()["choices"][0]["message"]["content"] == "EMPTY glass"


async def test_cancelled_serve_stops_the_generation_and_leaves_no_task() -> None:
    async with scripted(streams(HELLO[0], "hold")) as server, box(server.policy()) as it:
        before = len(asyncio.all_tasks())
        ours, theirs = socket.socketpair()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.lease.serve, await SocketStream.from_socket(ours))
            peer = Peer(await SocketStream.from_socket(theirs), it.lease.token)
            await peer.post({"stream": True})
            await peer._until(b"hel")
            tasks.cancel_scope.cancel()
        assert len(it.records) == 1
        assert not it.records[0].complete
        assert await peer.closed()
        with anyio.fail_after(5):
            await server.cancelled.wait()
        await until(lambda: len(asyncio.all_tasks()) == before)


async def test_connections_beyond_the_limit_are_dropped() -> None:
    async with scripted(says(completion())) as server, box(server.policy(), limits=CallLimits(connections=1)) as it:
        first = await it.connect()
        assert (await first.ask()).status == 200
        assert await (await it.connect()).closed()
        await first.stream.aclose()
        await until(lambda: not it.lease._connections)
        assert (await (await it.connect()).ask()).status == 200
