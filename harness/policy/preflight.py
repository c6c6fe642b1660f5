"""One tiny completion from the host, before anything is started."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from harness.policy.http import BROKEN, garbage, proxy_of, refused, request_headers, scrubber, unreachable
from harness.policy.resolve import Policy

_TIMEOUT = aiohttp.ClientTimeout(total=120, sock_connect=10)
_MAX_BODY = 1024 * 1024


async def check_policy(policy: Policy) -> None:
    """Ask the policy for a few tokens. Being rate limited counts as being there.

    :raises PolicyUnreachable: refused, no such host, timed out, 5xx.
    :raises PolicyRefused: TLS, 401, 403, 404, 400, or an answer that is no completion.
    """
    body: dict[str, Any] = {"model": policy.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}
    status, answer = await _post(policy, body)
    if status == 400 and b"max_completion_tokens" in answer:  # the reasoning models' name for it, and they think first
        del body["max_tokens"]
        status, answer = await _post(policy, body | {"max_completion_tokens": 256})
    if status == 429:
        return
    if status >= 300:
        raise refused(policy.base_url, policy.model, status, answer)
    try:
        message = json.loads(answer)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise garbage(policy.base_url, answer)


async def _post(policy: Policy, body: dict[str, Any]) -> tuple[int, bytes]:
    url, headers = f"{policy.base_url}/chat/completions", request_headers(policy)
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, proxy=proxy_of(url)) as session,
            session.post(url, json=body, headers=headers, allow_redirects=False) as response,
        ):
            answer = bytearray()  # bounded: a server that never stops must not fill the memory
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > _MAX_BODY:
                    break
            return response.status, scrubber(policy)(bytes(answer))
    except BROKEN as error:
        raise unreachable(policy.base_url, error) from error
