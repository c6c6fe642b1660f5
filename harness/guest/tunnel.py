"""Model calls on their way to the host: each TCP connection to the loopback port is a stream of raw bytes."""

from __future__ import annotations

import asyncio
import socket

from . import wire
from .mux import Mux, Stream, StreamReset


async def carry(mux: Mux, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One TCP connection of the sandbox, as raw bytes, to the host."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        stream = mux.open("http")
    except StreamReset:
        writer.transport.abort()
        return
    upward = asyncio.create_task(_pump_up(reader, stream))
    try:
        while data := await stream.read():
            writer.write(data)
            await writer.drain()
        writer.close()
    except (StreamReset, ConnectionError):
        # A hard abort must look like one: a clean close could pass for the end of an answer.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
    finally:
        upward.cancel()
        stream.reset()


async def _pump_up(reader: asyncio.StreamReader, stream: Stream) -> None:
    try:
        while data := await reader.read(wire.MAX_PAYLOAD):
            await stream.write(data)
        stream.write_eof()
    except StreamReset:
        pass
    except ConnectionError:
        stream.reset()
