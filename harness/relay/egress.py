"""Allowed hosts: an HTTP CONNECT proxy on the same byte streams, for sandboxes that have no network of their own.

A pattern is ``host`` (port 443), ``host:port``, ``*.example.org`` or ``*.example.org:8443`` (its subdomains, not the
name itself), or an address. Names are resolved here, and the address that was checked is the one that is connected to.
Private, loopback, link-local and multicast addresses are refused unless the address itself is listed, whatever the
name: who controls a listed name could point it anywhere.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import anyio
from anyio.abc import ByteStream, SocketStream

from harness.errors import ConfigError
from harness.models import Record
from harness.relay.request import error_body
from harness.relay.serve import GONE

_MAX_HEAD = 16 * 1024
_HEAD_S = 30.0
_CONNECT_S = 15.0
_HALF_OPEN_S = 60.0
_METHOD = b"CONNECT "
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*")
_TARGET = re.compile(rb"CONNECT (\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5}) HTTP/1\.[01]")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class EgressRecord(Record):
    """One attempt to reach a host."""

    host: str
    port: int
    address: str | None = None
    """What was connected to; null when nothing was."""
    status: int
    """HTTP status of the answer to CONNECT."""
    error: str | None = None
    sent_bytes: int = 0
    """From the sandbox."""
    received_bytes: int = 0
    started_at: float
    """Unix time."""
    duration_s: float


class Rules:
    """What a sandbox may reach.

    :raises ConfigError: a pattern that is neither a host nor an address.
    """

    def __init__(self, allow: tuple[str, ...]) -> None:
        self._listed: set[tuple[str | Address, int]] = set()
        for pattern in allow:
            host, port = _split(pattern)
            self._listed.add((_address(host) or host, port))

    def allows(self, host: str, port: int) -> bool:
        """Whether the host is listed, as a name or as an address."""
        parents = (f"*{host[i:]}" for i, letter in enumerate(host) if letter == ".")
        return any((name, port) in self._listed for name in (_address(host) or host, *parents))

    def may_connect(self, address: Address, port: int) -> bool:
        """Whether a resolved address is public, or listed itself."""
        return (address, port) in self._listed or _is_public(address)


def is_connect(first: bytes) -> bool:
    """Whether a connection that begins with these bytes is, or may become, a CONNECT."""
    return first[: len(_METHOD)] == _METHOD[: len(first)]


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def serve_connect(
    stream: ByteStream, first: bytes, rules: Rules, on_record: Callable[[EgressRecord], None]
) -> None:
    """Answer one CONNECT and carry its bytes until both sides are done."""
    tunnel = _Tunnel(stream, rules)
    began, started_at = time.monotonic(), time.time()
    try:
        await tunnel.run(first)
    except _Refused as refused:
        tunnel.status, tunnel.error = refused.status, str(refused)
        await _refuse(stream, refused)
    except GONE:
        pass
    finally:
        on_record(
            EgressRecord(
                host=tunnel.host,
                port=tunnel.port,
                address=tunnel.address,
                status=tunnel.status,
                error=tunnel.error,
                sent_bytes=tunnel.sent,
                received_bytes=tunnel.received,
                started_at=started_at,
                duration_s=time.monotonic() - began,
            )
        )


async def _refuse(stream: ByteStream, refused: _Refused) -> None:
    body = error_body(refused.status, "egress_refused", str(refused))
    head = f"HTTP/1.1 {refused.status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with suppress(*GONE), anyio.move_on_after(_HEAD_S):
        await stream.send(head.encode() + b"Connection: close\r\n\r\n" + body)


class _Tunnel:
    def __init__(self, stream: ByteStream, rules: Rules) -> None:
        self._stream, self._rules = stream, rules
        self.host, self.port = "", 0
        self.address: str | None = None
        self.status = 499  # the sandbox went away first
        self.error: str | None = None
        self.sent = self.received = 0

    async def run(self, first: bytes) -> None:
        rest = await self._read_head(first)
        async with await self._connect() as remote:
            self.status = 200
            await self._stream.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send, remote, rest, tasks.cancel_scope)
                with suppress(*GONE):
                    while data := await remote.receive():
                        self.received += len(data)
                        await self._stream.send(data)
                tasks.cancel_scope.cancel()

    async def _send(self, remote: SocketStream, data: bytes, tunnel: anyio.CancelScope) -> None:
        try:
            while True:
                await remote.send(data)
                self.sent += len(data)
                data = await self._stream.receive()
        except anyio.EndOfStream:
            # The sandbox has sent all it will; the answer may still come, but not for ever.
            with suppress(*GONE):
                await remote.send_eof()
            await anyio.sleep(_HALF_OPEN_S)
        except GONE:
            pass
        tunnel.cancel()

    async def _read_head(self, data: bytes) -> bytes:
        """Find out where to; gives back what came after the head."""
        with anyio.move_on_after(_HEAD_S) as waiting:
            while b"\r\n\r\n" not in data:
                if len(data) > _MAX_HEAD:
                    raise _Refused(431, "The request head is too large")
                data += await self._stream.receive()
        if waiting.cancelled_caught:
            raise _Refused(408, "The request did not arrive in time")
        head, _, rest = data.partition(b"\r\n\r\n")
        match = _TARGET.fullmatch(head.split(b"\r\n", 1)[0])
        if match is None or not 0 < int(match[2]) < 65536:
            raise _Refused(400, "CONNECT needs a host and a port")
        self.host, self.port = match[1].decode("ascii").strip("[]").lower().rstrip("."), int(match[2])
        return rest

    async def _connect(self) -> SocketStream:
        host, port = self.host, self.port
        if not self._rules.allows(host, port):
            raise _Refused(
                403,
                f"{host}:{port} is not allowed. To allow it, add it to [tool.harness.sandbox] in the rollout's "
                f'pyproject.toml: allow = ["{_listed(host, port)}"]',
            )
        try:
            with anyio.fail_after(_CONNECT_S):
                found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise _Refused(504, f"{host} cannot be resolved in time") from None
        except (OSError, UnicodeError) as error:
            raise _Refused(502, f"{host} cannot be resolved: {error}") from None
        addresses = list(dict.fromkeys(ipaddress.ip_address(entry[4][0]) for entry in found))
        usable = [address for address in addresses if self._rules.may_connect(address, port)]
        if not usable:
            first = str(addresses[0])
            listed = _listed(first, port)
            raise _Refused(403, f'{host} resolves to {first}, which is not public. To allow it, add "{listed}" as well')
        reason = ""
        for address in usable:
            try:
                with anyio.fail_after(_CONNECT_S):
                    remote = await anyio.connect_tcp(str(address), port)
            except (OSError, TimeoutError) as error:
                reason = str(error.__cause__ or error) or "timed out"
                continue
            self.address = str(address)
            return remote
        raise _Refused(502, f"{host}:{port} cannot be reached: {reason}")


def _listed(host: str, port: int) -> str:
    """As ``allow`` wants it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(pattern: str) -> tuple[str, int]:
    host, port = pattern.strip().lower(), "443"
    if host.startswith("["):
        host, _, rest = host[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif host.count(":") == 1:
        host, port = host.split(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"allowed host {pattern!r} has no valid port")
    host = host.rstrip(".")
    if _address(host) is None and not _NAME.fullmatch(host):
        raise ConfigError(
            f"allowed host {pattern!r} is neither a host name nor an address",
            hint='Write "files.example.com", "files.example.com:8443" or "*.example.org".',
        )
    return host, int(port)


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


_ROUTED = ipaddress.ip_network("2000::/3")


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_public(address.ipv4_mapped)
        if address not in _ROUTED or address.sixtofour is not None or address.teredo is not None:
            return False  # what translators and tunnels make of an address cannot be judged
    return address.is_global and not address.is_multicast and not address.is_reserved
