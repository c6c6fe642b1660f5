"""One clear message for each way in which a policy can be wrong."""

from __future__ import annotations

import socket
from typing import Any

import anyio
import pytest
from aiohttp import web
from pydantic import SecretStr

from harness.errors import PolicyError, PolicyRefused, PolicyUnreachable
from harness.policy.preflight import check_policy
from harness.policy.resolve import Policy
from tests.relay.support import KEY, Step, completion, raw, says, scripted

pytestmark = pytest.mark.anyio


def policy_at(url: str) -> Policy:
    return Policy(name="t", base_url=url, model="the-model", key=SecretStr(KEY))


async def failure_at(url: str) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        await check_policy(policy_at(url))
    return caught.value


@pytest.mark.parametrize("step", [says(completion()), says({}, 429)], ids=["answer", "rate limited"])
async def test_policy_that_is_there(step: Step) -> None:
    async with scripted(step) as server:
        await check_policy(server.policy())
        (seen,) = server.seen
        assert seen.path == "/v1/chat/completions"
        assert seen.body["model"] == "the-model"
        assert seen.headers["Authorization"] == f"Bearer {KEY}"


async def test_reasoning_models_take_the_other_name_of_the_limit() -> None:
    refusal = says({"error": {"message": "Use 'max_completion_tokens' instead."}}, 400)
    async with scripted(refusal, says(completion())) as server:
        await check_policy(server.policy())
        assert "max_completion_tokens" in server.seen[1].body
        assert "max_tokens" not in server.seen[1].body


@pytest.mark.parametrize(
    ("step", "kind", "said"),
    [
        (says({"error": {"message": f"bad key {KEY}"}}, 401), PolicyRefused, "refused the key (HTTP 401): bad key"),
        (says({"error": "no"}, 403), PolicyRefused, "refused the key (HTTP 403): no"),
        (says({"detail": "x"}, 404), PolicyRefused, "knows no model 'the-model'"),
        (says({"error": {"message": "too hot"}}, 400), PolicyRefused, "(HTTP 400): too hot"),
        (says(b"<h1>\noops</h1>", 500), PolicyUnreachable, "failed (HTTP 500): <h1> oops</h1>"),
        (says({}, 302), PolicyRefused, "(HTTP 302)"),
        (says(b"<html>"), PolicyRefused, "no completion: <html>"),
        (says({"choices": []}), PolicyRefused, "no completion"),
        (raw(b"SSH-2.0-OpenSSH\r\n"), PolicyRefused, "does not speak HTTP"),
        (raw(), PolicyUnreachable, "closed the connection without an answer"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"), PolicyUnreachable, "was cut off"),
    ],
)
async def test_each_fault_has_its_message(step: Step, kind: type[PolicyError], said: str) -> None:
    async with scripted(step) as server:
        error = await failure_at(server.url)
        assert type(error) is kind
        assert said in error.message
        assert server.url in error.message
        assert KEY not in str(error)


async def test_nobody_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        error = await failure_at(f"http://127.0.0.1:{unused.getsockname()[1]}/v1")
    assert type(error) is PolicyUnreachable
    assert "refused the connection" in error.message


async def test_no_such_host() -> None:
    error = await failure_at("http://nowhere.invalid/v1")
    assert type(error) is PolicyUnreachable
    assert "cannot be resolved" in error.message


async def test_https_to_a_plain_server() -> None:
    async with scripted(says(completion())) as server:
        error = await failure_at(server.url.replace("http:", "https:"))
        assert type(error) is PolicyRefused
        assert "TLS" in error.message


async def test_answer_without_end_is_not_read_for_ever() -> None:
    async def flood(request: web.BaseRequest, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    async with scripted(flood) as server:
        with anyio.fail_after(10):
            assert "no completion" in (await failure_at(server.url)).message
