"""CONNECT to allowed hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from harness.errors import ConfigError
from harness.policy.resolve import Policy
from harness.relay.egress import Rules
from tests.relay.support import Box, Peer, box

pytestmark = pytest.mark.anyio

POLICY = Policy(name="none", base_url="http://127.0.0.1:9/v1", model="m", key=None)


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that sends back what it got, then its end."""

    async def handle(stream: SocketStream) -> None:
        async with stream:
            async for data in stream:
                await stream.send(data)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield listener.extra(SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


async def connect(it: Box, target: str, extra: bytes = b"") -> Peer:
    peer = await it.connect()
    await peer.stream.send(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode() + extra)
    return peer


async def test_tunnel_carries_bytes_both_ways_and_counts_them() -> None:
    async with echo() as port, box(POLICY, allow=(f"127.0.0.1:{port}",)) as it:
        peer = await connect(it, f"127.0.0.1:{port}", b"early")
        assert (await peer._until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await peer.stream.send(b"x" * 300_000)
        body, whole = await peer._exactly(300_005)
        assert whole
        assert body == b"early" + b"x" * 300_000
        await peer.stream.send_eof()
        assert await peer.closed()
        (record,) = it.egress
        assert (record.host, record.port, record.status) == ("127.0.0.1", port, 200)
        assert (record.sent_bytes, record.received_bytes) == (300_005, 300_005)


@pytest.mark.parametrize(
    ("allow", "target", "status", "said"),
    [
        ((), "files.example.com:443", 403, "add it to [tool.harness.sandbox]"),
        (("files.example.com",), "files.example.com:80", 403, "not allowed"),
        (("*.example.com",), "example.com:443", 403, "not allowed"),
        (("localhost:{port}",), "localhost:{port}", 403, "not public"),
        (("nowhere.invalid",), "nowhere.invalid:443", 502, "cannot be resolved"),
        (("example.com",), "example.com", 400, "host and a port"),
        (("example.com",), "example.com:99999", 400, "host and a port"),
        (("[::1]:443",), "[::1]:1", 403, "not allowed"),
    ],
)
async def test_refusals_say_why(allow: tuple[str, ...], target: str, status: int, said: str) -> None:
    async with echo() as port, box(POLICY, allow=tuple(pattern.format(port=port) for pattern in allow)) as it:
        peer = await connect(it, target.format(port=port))
        reply = await peer.reply()
        assert reply.status == status
        assert said in reply.json()["error"]["message"]
        assert await peer.closed()
        assert (it.egress[0].status, it.egress[0].address, it.egress[0].error) == (
            status,
            None,
            str(it.egress[0].error),
        )


async def test_listed_name_and_listed_address_together_reach_a_private_host() -> None:
    async with echo() as port, box(POLICY, allow=(f"localhost:{port}", f"127.0.0.1:{port}")) as it:
        peer = await connect(it, f"localhost:{port}")
        assert (await peer._until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await it.lease.revoke()
        assert await peer.closed()
        assert it.egress[0].address == "127.0.0.1"


async def test_head_that_never_ends_is_refused() -> None:
    async with box(POLICY, allow=("example.com",)) as it:
        peer = await it.connect()
        await peer.stream.send(b"CONNECT example.com:443 HTTP/1.1\r\nX: " + b"y" * 20_000)
        assert (await peer.reply()).status == 431


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f::1", True),
        ("::ffff:93.184.215.14", True),
        *((a, False) for a in ("10.0.0.1", "127.0.0.1", "169.254.169.254", "192.168.1.1", "172.17.0.1", "0.0.0.0")),
        *((a, False) for a in ("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fd00::1")),
        *((a, False) for a in ("ff02::1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "::7f00:1")),
    ],
)
def test_only_public_addresses_are_connected_to(address: str, public: bool) -> None:
    rules = Rules(("example.com",))
    assert rules.may_connect(ipaddress.ip_address(address), 443) is public


@pytest.mark.parametrize(
    ("pattern", "host", "port", "allowed"),
    [
        ("Example.com", "example.com", 443, True),
        ("example.com", "www.example.com", 443, False),
        ("*.example.org", "a.b.example.org", 443, True),
        ("*.example.org", "badexample.org", 443, False),
        ("*.example.org:8443", "a.example.org", 8443, True),
        ("10.0.0.3:443", "10.0.0.3", 443, True),
        ("[fd00::1]:99", "fd00::1", 99, True),
    ],
)
def test_patterns(pattern: str, host: str, port: int, allowed: bool) -> None:
    assert Rules((pattern,)).allows(host, port) is allowed


@pytest.mark.parametrize(
    "pattern", ["", "*", "http://example.com", "a b", "example.com:http", "*.*.org", "ex*mple.org"]
)
def test_patterns_that_are_none(pattern: str) -> None:
    with pytest.raises(ConfigError):
        Rules((pattern,))
