"""One bulk stream over several connections.

On a long link with losses a single TCP connection is slow, whatever the link could carry: it halves its window at each
loss and takes many round trips to widen it again. With several connections each loss costs less. The bytes are
distributed round-robin in blocks of a fixed size, without headers, directly from and into the caller's memory.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from manyhands.base.deadline import time_limit
from manyhands.base.errors import ProtocolViolation
from manyhands.base.identity import PeerId
from manyhands.rpc.frames import MAX_STRIPES, Stripe
from manyhands.transport.api import Delivery, Stream, total_of
from manyhands.transport.piecewise import Piecewise

BLOCK_BYTES = 1 << 18

RTT_OF_ONE_S = 0.025
"""Round trip per connection, in seconds: a link with a round trip of 100 ms gets four connections."""

RTT_OF_ONE_BBR_S = 0.05
"""Round trip per connection with BBR, in seconds. Losses do not slow BBR down, and more connections only
compete."""

BYTES_OF_ONE = 1 << 20
"""Bytes per connection: for fewer, a further handshake does not pay."""

MAX_INCOMPLETE = 16
"""Streams of one remote peer that may lack connections at the same time."""


def num_stripes(rtt_s: float, size_bytes: int, *, has_bbr: bool) -> int:
    """Return how many connections to use for ``size_bytes`` at this round trip; one if it is unknown."""
    rtt_of_one_s = RTT_OF_ONE_BBR_S if has_bbr else RTT_OF_ONE_S
    by_rtt = round(rtt_s / rtt_of_one_s) if math.isfinite(rtt_s) else 1
    return max(1, min(by_rtt, size_bytes // BYTES_OF_ONE, MAX_STRIPES))


class StripedStream(Piecewise):
    """Several connections to one peer, used as one :class:`manyhands.transport.api.Stream`."""

    def __init__(self, stripes: Sequence[Stream]) -> None:
        self.is_bulk = True
        self.remote = stripes[0].remote
        self.remote_host = stripes[0].remote_host
        self._stripes = list(stripes)
        self._sent = 0
        self._received = 0
        self._sending = asyncio.Lock()

    @property
    def bytes_sent(self) -> int:
        return sum(stripe.bytes_sent for stripe in self._stripes)

    @property
    def bytes_received(self) -> int:
        return sum(stripe.bytes_received for stripe in self._stripes)

    @property
    def last_received(self) -> float:
        return max(stripe.last_received for stripe in self._stripes)

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        async with self._sending:
            dealt: list[list[memoryview]] = [[] for _ in self._stripes]
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                self._deal(view, self._sent, dealt)
                self._sent += len(view)
            await self._all([s.send(*views) for s, views in zip(self._stripes, dealt, strict=True) if views])

    async def receive_into(self, view: memoryview) -> None:
        dealt: list[list[memoryview]] = [[] for _ in self._stripes]
        self._deal(view, self._received, dealt)
        self._received += len(view)
        await self._all([_receive(s, views) for s, views in zip(self._stripes, dealt, strict=True) if views])

    def delivery(self) -> Delivery | None:
        deliveries = [delivery for stripe in self._stripes if (delivery := stripe.delivery()) is not None]
        if len(deliveries) < len(self._stripes):
            return None
        total = total_of(deliveries)
        return total._replace(busy_s=total.busy_s / len(deliveries))

    def pace(self, bytes_per_s: float) -> None:
        for stripe in self._stripes:
            stripe.pace(bytes_per_s / len(self._stripes))

    async def close(self, timeout_s: float = 1.0) -> None:
        await asyncio.gather(*(stripe.close(timeout_s) for stripe in self._stripes))

    async def wait_closed(self) -> None:
        """Wait until all connections are closed: some may still deliver what was sent before."""
        waits = [asyncio.ensure_future(stripe.wait_closed()) for stripe in self._stripes]
        try:
            await asyncio.wait(waits)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def abort(self) -> None:
        for stripe in self._stripes:
            stripe.abort()

    def _deal(self, view: memoryview, position: int, dealt: list[list[memoryview]]) -> None:
        while len(view):
            block, offset = divmod(position, BLOCK_BYTES)
            num_bytes = min(BLOCK_BYTES - offset, len(view))
            dealt[block % len(dealt)].append(view[:num_bytes])
            view = view[num_bytes:]
            position = position + num_bytes

    async def _all(self, parts: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run one coroutine per connection; if one fails, the stream has a gap and is aborted."""
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            self.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


async def _receive(stripe: Stream, views: Sequence[memoryview]) -> None:
    for view in views:
        await stripe.receive_into(view)


class StripeSets:
    """Accepted connections that wait for the others of their stream.

    Args:
        timeout_s: time for the others to arrive.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[tuple[PeerId, bytes], dict[int, Stream]] = {}
        self._counts: dict[tuple[PeerId, bytes], int] = {}
        self._complete: dict[tuple[PeerId, bytes], asyncio.Future[None]] = {}
        self._num_waiting: Counter[PeerId] = Counter()

    async def join(self, stripe: Stripe, stream: Stream) -> StripedStream | None:
        """Wait for the other connections; the last one to arrive gets the whole stream.

        Raises:
            ProtocolViolation: it does not match the others, or too many streams are incomplete.
            Timeout: the others did not arrive.
        """
        key = (stream.remote, stripe.stream_id)
        if stripe.index >= stripe.count:
            raise ProtocolViolation(
                stream.remote, f"sent connection {stripe.index} of a stream with {stripe.count}, counted from 0"
            )
        if key not in self._waiting:
            if self._num_waiting[stream.remote] >= MAX_INCOMPLETE:
                raise ProtocolViolation(stream.remote, f"has more than {MAX_INCOMPLETE} streams that lack connections")
            self._num_waiting[stream.remote] += 1
            self._waiting[key] = {}
            self._complete[key] = asyncio.get_running_loop().create_future()
            self._counts[key] = stripe.count
        stripes = self._waiting[key]
        complete = self._complete[key]
        if stripe.index in stripes or stripe.count != self._counts[key]:
            text = f"sent connection {stripe.index} of a stream with {stripe.count}, which does not match the others"
            raise ProtocolViolation(stream.remote, text)
        stripes[stripe.index] = stream
        if len(stripes) == stripe.count:
            self._forget(key)
            complete.set_result(None)
            return StripedStream([stripes[index] for index in sorted(stripes)])
        try:
            async with time_limit(self._timeout_s, f"for the other connections of a stream of peer {stream.remote}"):
                await asyncio.wait([complete])
        finally:
            if not complete.done():
                self._forget(key)
        return None

    def _forget(self, key: tuple[PeerId, bytes]) -> None:
        if self._waiting.pop(key, None) is not None:
            del self._complete[key], self._counts[key]
            self._num_waiting[key[0]] -= 1
            if not self._num_waiting[key[0]]:
                del self._num_waiting[key[0]]
