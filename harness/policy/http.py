"""Talking HTTP to a policy, and what can go wrong there, in words: one place for the preflight and the relay."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Callable
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from harness.errors import PolicyError, PolicyRefused, PolicyUnreachable
from harness.policy.resolve import Policy

BROKEN = (TimeoutError, aiohttp.ClientError, OSError, ValueError)
"""What a request raises when there is no answer, or a broken one; ``unreachable`` puts it into words."""
_EXCERPT = 300
_SHORTEST_SECRET = 8
"""Shorter keys ("EMPTY", "none") are placeholders, and replacing them would damage answers."""


def request_headers(policy: Policy) -> dict[str, str]:
    """Headers of a request to the policy. ``identity``: bytes pass through as the policy wrote them."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "rollout-harness"}
    return headers | ({"Authorization": f"Bearer {policy.key.get_secret_value()}"} if policy.key else {})


def scrubber(policy: Policy) -> Callable[[bytes], bytes]:
    """A function that takes the policy's key out of bytes, also where JSON has escaped it."""
    key = policy.key.get_secret_value() if policy.key else ""
    escaped = json.dumps(key)[1:-1]
    forms = {key.encode(), escaped.encode(), escaped.replace("/", "\\/").encode()}

    def scrub(data: bytes) -> bytes:
        for form in forms:
            data = data.replace(form, b"[REDACTED]")
        return data

    return scrub if len(key) >= _SHORTEST_SECRET else bytes


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for a URL; none for names that bypass it."""
    parsed = URL(url)
    host = parsed.host or ""
    if host in ("localhost", "127.0.0.1", "::1") or proxy_bypass(host):
        return None
    return getproxies().get(parsed.scheme)


def unreachable(url: str, error: BaseException) -> PolicyError:
    """The error for a request that got no answer, or a broken one. ``retryable`` tells whether another try can help."""
    hint = "Is the server running, and is the URL right?"
    kind: type[PolicyError] = PolicyUnreachable
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            reason, kind = f"TLS failed: {_root(error)}", PolicyRefused
            hint = "Check the certificate and the URL's scheme (http or https)."
        case aiohttp.ClientConnectorDNSError():
            reason, hint = f"its host name cannot be resolved: {_root(error)}", "Check the host name and the network."
        case aiohttp.ClientConnectorError(os_error=OSError(errno=errno.ECONNREFUSED)):
            reason = "it refused the connection"
        case aiohttp.ServerDisconnectedError():
            reason = "it closed the connection without an answer"
        case aiohttp.ConnectionTimeoutError():
            reason = "connecting timed out"
        case asyncio.TimeoutError():
            reason, hint = "it did not answer in time", "Is the server overloaded, or the model still loading?"
        case aiohttp.ClientPayloadError():
            reason, hint = "its answer was cut off", "Look at the server's own log."
        case aiohttp.ClientResponseError() | ValueError():
            reason, kind, hint = "it does not speak HTTP as expected", PolicyRefused, "Check the URL's port and scheme."
        case _:
            reason = str(_root(error)) or type(error).__name__
    return kind(f"the policy at {url} cannot be reached: {reason}", hint=hint)


def refused(url: str, model: str, status: int, body: bytes) -> PolicyError:
    """The error for an answer with an error status."""
    kind: type[PolicyError] = PolicyRefused
    match status:
        case 401 | 403:
            what, hint = "refused the key", "Check the key, or --policy-key-env."
        case 404:
            what = f"knows no model {model!r}, or nothing at this path"
            hint = "Check --model, and whether the URL should end in /v1."
        case 429:
            kind, what, hint = PolicyUnreachable, "is rate limited", "Lower --max-in-flight."
        case _ if status >= 500:
            kind, what, hint = PolicyUnreachable, "failed", "Look at the server's own log."
        case _:
            what, hint = "refused the request", ""
    return kind(f"the policy at {url} {what} (HTTP {status}): {_excerpt(body)}", hint=hint)


def garbage(url: str, body: bytes) -> PolicyError:
    """The error for a success status with something that is no completion."""
    return PolicyRefused(
        f"the policy at {url} answered something that is no completion: {_excerpt(body)}",
        hint="Is this the base URL of an OpenAI-compatible server?",
    )


def _excerpt(body: bytes) -> str:
    """An error body's message, or its beginning, on one line."""
    text = body[:65536].decode("utf-8", "replace")
    try:
        value = json.loads(text)
        error = value.get("error", value) if isinstance(value, dict) else value
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, RecursionError):
        pass
    line = " ".join(text.split())
    return (line[:_EXCERPT] + "…" if len(line) > _EXCERPT else line) or "(empty body)"


def _root(error: BaseException) -> BaseException:
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        return cause if not isinstance(cause, socket.gaierror) else OSError(cause.strerror or "unknown host")
    return error
