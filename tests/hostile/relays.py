"""Relays that spoil what they forward."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

from manyhands.transport.api import Pay, Stream, Transport
from manyhands.transport.tls import _socket_of

FLOOD_BYTES = 1 << 20
DELAY_S = 60.0

Spoil = Callable[[bytes], Awaitable[bytes]]


async def drops(data: bytes) -> bytes:
    return b""


async def delays(data: bytes) -> bytes:
    await asyncio.sleep(DELAY_S)
    return data


async def reorders(data: bytes) -> bytes:
    return data[::-1]


async def floods(data: bytes) -> bytes:
    return data + bytes(FLOOD_BYTES)


@dataclass
class Spoiling:
    """Has a peer spoil what it relays.

    Attributes:
        transport: of the peer.
        spoil: what it does with all that it forwards from now on; None if it is honest.
        spoils_from: so many bytes of each direction it forwards as they are.
    """

    transport: Transport
    spoil: Spoil | None = None
    spoils_from: int = 0

    def __post_init__(self) -> None:
        self.transport.forward = self._forward  # type: ignore[method-assign]

    async def _forward(self, one: Stream, other: Stream, chunk_bytes: int, pay: Pay) -> None:
        with ExitStack() as stack:
            here, there = (stack.enter_context(_socket_of(end)) for end in (one, other))
            ways = (here, there), (there, here)
            directions = [asyncio.ensure_future(self._one_way(*way, chunk_bytes)) for way in ways]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
                await asyncio.gather(*directions, return_exceptions=True)

    async def _one_way(self, source: socket.socket, sink: socket.socket, chunk_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        num_bytes = 0
        while data := await loop.sock_recv(source, chunk_bytes):
            num_bytes += len(data)
            if self.spoil is not None and num_bytes > self.spoils_from:
                data = await self.spoil(data)
            await loop.sock_sendall(sink, data)
