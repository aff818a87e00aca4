"""Connections through a relay, for transports whose streams are objects of one process and not sockets."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from manyhands.base.deadline import time_limit
from manyhands.base.errors import DialFailed, DialReason, PeerLost, Timeout
from manyhands.base.identity import Identity, PeerId
from manyhands.transport.api import ControlStream, Pay, Stream

ID_BYTES = 64
"""Size of the first message of each end: its peer id, padded; it stands for the TLS handshake."""


class ObjectStream(ControlStream, Protocol):
    """A stream whose other end can change: once a relay forwards it, that is another peer."""

    remote: PeerId
    is_bulk: bool


class RelayedInProcess:
    """The methods of a transport for connections through a relay."""

    identity: Identity

    def public_ip6(self) -> str:
        return ""

    async def dial_through(self, carrier: Stream, peer_id: PeerId, timeout_s: float, *, is_bulk: bool) -> ObjectStream:
        stream = await self._handed_over(carrier, timeout_s, b"b" if is_bulk else b"c", str(peer_id))
        if stream.remote != peer_id:
            stream.abort()
            raise DialFailed(f"peer {peer_id}", DialReason.WRONG_IDENTITY, f"found {stream.remote}")
        return stream

    async def accept_through(self, carrier: Stream, timeout_s: float) -> ObjectStream:
        return await self._handed_over(carrier, timeout_s, b"", f"a peer through {carrier.remote}")

    async def _handed_over(self, stream: Stream, timeout_s: float, kind: bytes, where: str) -> ObjectStream:
        """Tell the other end who this one is, and learn who that is and what kind of stream it wants."""
        carrier = cast("ObjectStream", stream)
        greeting = bytearray(ID_BYTES)
        try:
            async with time_limit(timeout_s, "in the handshake through a relay"):
                await carrier.send((kind or b"?") + self.identity.peer_id.encode().ljust(ID_BYTES - 1))
                await carrier.receive_into(memoryview(greeting))
        except (PeerLost, Timeout) as error:
            carrier.abort()
            raise DialFailed(where, DialReason.REJECTED, str(error)) from error
        carrier.remote = PeerId(greeting[1:].decode().rstrip())
        carrier.is_bulk = (kind or greeting[:1]) == b"b"
        return carrier

    async def forward(self, one: Stream, other: Stream, chunk_bytes: int, pay: Pay) -> None:
        ends_of_both = cast("ObjectStream", one), cast("ObjectStream", other)

        async def one_way(source: ObjectStream, sink: ObjectStream) -> None:
            while True:
                data = await source.receive()
                await pay(len(data))
                await sink.send(data)

        directions = [asyncio.ensure_future(one_way(*ends)) for ends in (ends_of_both, ends_of_both[::-1])]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            one.abort()
            other.abort()
