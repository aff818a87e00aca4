"""The bulk streams of one endpoint: striped over several connections where useful, and rate-limited."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from manyhands.base.identity import PeerId
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.dialling import Opened, OpenOne
from manyhands.rpc.frames import Hello, Stripe
from manyhands.rpc.serving import Guard
from manyhands.rpc.streams import OpenStreams
from manyhands.rpc.striping import StripedStream, StripeSets, num_stripes
from manyhands.rpc.upload_cap import CappedStream, UploadCap
from manyhands.transport import tcp
from manyhands.transport.api import Stream

BulkAcceptor = Callable[[PeerId, bytes, Stream], Awaitable[None]]
"""Called with (remote, header, stream) for each bulk stream. The stream is aborted when the acceptor returns."""


class BulkStreams:
    """Opens and serves bulk streams.

    Args:
        streams: the open streams of the endpoint; new ones are added.
        rng: for the ids of striped streams, which are unique per peer.

    Attributes:
        acceptors, guards: by kind of stream.
    """

    def __init__(self, streams: OpenStreams, config: RpcConfig, rng: random.Random) -> None:
        self.acceptors: dict[str, BulkAcceptor] = {}
        self.guards: dict[str, Guard] = {}
        self._streams = streams
        self._rng = rng
        self._opened: dict[Stream, list[Opened]] = {}
        cap = config.max_upload_mbit_s
        self._cap = UploadCap(cap) if cap is not None else None
        self._stripe_sets = StripeSets(config.hello_timeout_s)

    async def open(self, open_one: OpenOne, hello: Hello, *, rtt_s: float, size_bytes: int) -> Stream:
        """Open as many connections to a peer as the round trip and the size justify.

        Args:
            open_one: opens one connection with a hello.
        Raises:
            Unavailable: none could be opened.
            Refused: the peer refuses this stream.
        """
        count = num_stripes(rtt_s, size_bytes, has_bbr=tcp.has_bbr())
        hellos = [hello]
        if count > 1:
            stream_id = self._rng.randbytes(16)
            stripes = (Stripe(stream_id, index, count) for index in range(count))
            hellos = [msgspec.structs.replace(hello, stripe=stripe) for stripe in stripes]
        opened = await self._open_all(open_one, hellos)
        parts = [self._capped(one.stream, hello.purpose) for one in opened]
        stream = parts[0] if count == 1 else StripedStream(parts)
        self._opened[stream] = opened
        return stream

    def relays_of(self, stream: Stream) -> set[PeerId]:
        """Return the peers that relay a stream that :meth:`open` returned."""
        return {one.way.relay for one in self._opened.get(stream, ()) if one.way.relay is not None}

    def check(self, remote: PeerId, kind: str) -> None:
        """Call the guard of a kind of stream.

        Raises:
            Refused: the guard refuses this peer.
        """
        if (guard := self.guards.get(kind)) is not None:
            guard(remote)

    def release(self, stream: Stream) -> None:
        """Abort a stream that :meth:`open` returned, and count its bytes."""
        stream.abort()
        for one in self._opened.pop(stream, ()):
            self._streams.release(one.stream)

    async def serve(self, stream: Stream, hello: Hello, acceptor: BulkAcceptor) -> None:
        """Serve an accepted connection after its welcome: a whole stream, or one stripe of it.

        Raises:
            ProtocolViolation, Timeout: the stripe does not fit, or the other stripes did not arrive.
        """
        if hello.stripe is None:
            await acceptor(stream.remote, hello.header, self._capped(stream, hello.purpose))
            return
        whole = await self._stripe_sets.join(hello.stripe, self._capped(stream, hello.purpose))
        if whole is None:
            await stream.wait_closed()  # the task that has the whole stream aborts all stripes
            return
        try:
            await acceptor(stream.remote, hello.header, whole)
        finally:
            whole.abort()

    async def _open_all(self, open_one: OpenOne, hellos: Sequence[Hello]) -> list[Opened]:
        """Open one stream for each hello, or none at all."""
        dials = [asyncio.ensure_future(open_one(hello)) for hello in hellos]
        try:
            return await asyncio.gather(*dials)
        except BaseException:
            for dial in dials:
                dial.cancel()
            for outcome in await asyncio.gather(*dials, return_exceptions=True):
                if isinstance(outcome, Opened):
                    self._streams.release(outcome.stream)
            raise

    def _capped(self, stream: Stream, kind: str) -> Stream:
        return stream if self._cap is None else CappedStream(stream, self._cap, kind)
