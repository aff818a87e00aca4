"""Butterfly all-reduce of one formed group: reduce-scatter, then all-gather, over one stream for each pair.

Each reducer owns a span of the vector; two members that own none have no stream. On the stream between two members,
each sends its part of the other's span, then the averaged chunks of its own span as they get ready; both sides know all
sizes, so nothing but values travels. A reducer adds in the order of ranks, so the result does not depend on who is
faster.

Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239, section 3.2.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import torch

from manyhands.averaging.messages import Group
from manyhands.averaging.spans import chunks_of, owned_spans, reducer_shares
from manyhands.base.errors import PeerLost, RoundAborted
from manyhands.transport.api import Stream

QUEUED_CHUNKS = 3
"""Chunks of one sender in memory: one that comes in, one that is reduced, and one between them."""

INLINE_NUMEL = 1 << 14
"""Chunks of fewer elements are averaged sooner than another thread could be asked to."""

CHECKED_NUMEL = 1 << 20
"""Elements that are received in one go when they are averaged already, and checked."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, for sending from it or receiving into it."""
    return tensor.numpy().data.cast("B")


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN; reads memory once, as fast as it comes."""
    if not values.numel():
        return True
    least, greatest = torch.aminmax(values)
    return math.isfinite(least.item()) and math.isfinite(greatest.item())


class Butterfly:
    """One member's part in one all-reduce.

    Args:
        group: with at least one member that is not in client mode, and at least one positive weight.
        rank: of this member.
        flat_N: this member's values, float32 or float64 on the CPU; never written.
        chunk_numel: elements that are reduced in one go.
    """

    def __init__(self, group: Group, rank: int, flat_N: torch.Tensor, chunk_numel: int) -> None:
        members = group.members
        shares = [0.0 if member.is_client else 1.0 for member in members]
        self.averaged_N = torch.empty_like(flat_N)
        self._members = members
        self._rank = rank
        self._flat_N = flat_N
        shares = reducer_shares(flat_N.numel(), shares, group.min_span_numel, group.group_id)
        self._spans = owned_spans(flat_N.numel(), shares)
        self._weights = [member.weight for member in members]
        self._own_chunks = chunks_of(self._spans[rank], chunk_numel)
        self._reduced = [asyncio.Event() for _ in self._own_chunks]
        self._inboxes = {other: _Inbox(chunk_numel, flat_N.dtype) for other in self._senders()}

    def partners(self) -> list[int]:
        """Ranks with which values are exchanged; two members that own no span have nothing to say to each other."""
        return [
            rank
            for rank in range(len(self._members))
            if rank != self._rank and (self._is_reducer(rank) or self._is_reducer(self._rank))
        ]

    def num_bytes_with(self, rank: int) -> int:
        """About what each way of the stream to a partner carries, in bytes."""
        sizes: list[int] = [self._spans[member].stop - self._spans[member].start for member in (rank, self._rank)]
        element_size: int = self._flat_N.element_size()
        return sum(sizes) * element_size

    async def run(self, connect: Callable[[int], Awaitable[Stream]]) -> torch.Tensor:
        """Exchange values with all partners; returns the weighted mean, of the same dtype, shape [N].

        Args:
            connect: gives the stream to the partner of this rank; each is used as soon as it is there.
        Raises:
            RoundAborted: a member was lost, or its values are not finite; it is blamed.
        """
        await _all_or_none([self._reduce(), *(self._exchange_with(rank, connect) for rank in self.partners())])
        return self.averaged_N

    async def _exchange_with(self, rank: int, connect: Callable[[int], Awaitable[Stream]]) -> None:
        stream = await connect(rank)
        await _all_or_none([self._send_to(rank, stream), self._receive_from(rank, stream)])

    async def _send_to(self, rank: int, stream: Stream) -> None:
        if self._weights[self._rank] > 0 and self._is_reducer(rank):
            await stream.send(bytes_of(self._flat_N[self._spans[rank]]))
        num_sent = 0
        while num_sent < len(self._own_chunks):
            await self._reduced[num_sent].wait()
            ready = self._own_chunks[num_sent : self._num_reduced(num_sent)]
            await stream.send(bytes_of(self.averaged_N[ready[0].start : ready[-1].stop]))
            num_sent += len(ready)

    def _num_reduced(self, num_before: int) -> int:
        """How many chunks are averaged; they get ready in order."""
        waiting = (number for number in range(num_before, len(self._reduced)) if not self._reduced[number].is_set())
        return next(waiting, len(self._reduced))

    async def _receive_from(self, rank: int, stream: Stream) -> None:
        if rank in self._inboxes:
            inbox = self._inboxes[rank]
            for chunk in self._own_chunks:
                values = await inbox.room(chunk.stop - chunk.start)
                await stream.receive_into(bytes_of(values))
                inbox.put(values)
        for piece in chunks_of(self._spans[rank], CHECKED_NUMEL):
            averaged = self.averaged_N[piece]
            await stream.receive_into(bytes_of(averaged))
            self._check_finite(rank, averaged)

    def _check_finite(self, rank: int, values: torch.Tensor) -> None:
        if not is_finite(values):
            peer_id = self._members[rank].peer_id
            raise RoundAborted(f"the values of peer {peer_id} are not finite", [peer_id])

    async def _reduce(self) -> None:
        """Average the chunks of this member's own span."""
        loop = asyncio.get_running_loop()
        for chunk, reduced in zip(self._own_chunks, self._reduced, strict=True):
            received = {rank: await inbox.take() for rank, inbox in self._inboxes.items()}
            if chunk.stop - chunk.start < INLINE_NUMEL:
                self._reduce_chunk(chunk, received)
            else:  # beside the loop
                await loop.run_in_executor(None, self._reduce_chunk, chunk, received)
            for inbox in self._inboxes.values():
                inbox.give_back()
            reduced.set()

    def _reduce_chunk(self, chunk: slice, received: Mapping[int, torch.Tensor]) -> None:
        """The weighted mean, in the order of ranks."""
        total = sum(self._weights)
        mean = self.averaged_N[chunk].zero_()
        for rank, weight in enumerate(self._weights):
            if weight > 0:
                values = self._flat_N[chunk] if rank == self._rank else received[rank]
                mean.add_(values, alpha=weight / total)
        if not is_finite(mean):
            for rank, values in received.items():
                self._check_finite(rank, values)
            self._check_finite(self._rank, mean)

    def _senders(self) -> list[int]:
        """Ranks that send values to this member's span."""
        others = (rank for rank, weight in enumerate(self._weights) if rank != self._rank and weight > 0)
        return list(others) if self._own_chunks else []

    def _is_reducer(self, rank: int) -> bool:
        span = self._spans[rank]
        return bool(span.start < span.stop)


class _Inbox:
    """The chunks of one sender on their way to the reducer, in memory that is used again and again."""

    def __init__(self, chunk_numel: int, dtype: torch.dtype) -> None:
        self._chunk_numel = chunk_numel
        self._dtype = dtype
        self._free: asyncio.Queue[torch.Tensor] = asyncio.Queue()
        self._full: asyncio.Queue[torch.Tensor] = asyncio.Queue()
        self._lent: deque[torch.Tensor] = deque()
        self._num_made = 0

    async def room(self, numel: int) -> torch.Tensor:
        """Memory for a chunk, shape [numel]; waits while the sender is too far ahead."""
        if self._free.empty() and self._num_made < QUEUED_CHUNKS:
            self._num_made += 1
            buffer = torch.empty(self._chunk_numel, dtype=self._dtype)
        else:
            buffer = await self._free.get()
        self._lent.append(buffer)
        return buffer[:numel]

    def put(self, values: torch.Tensor) -> None:
        """A chunk has come in."""
        self._full.put_nowait(values)

    async def take(self) -> torch.Tensor:
        """The next chunk."""
        return await self._full.get()

    def give_back(self) -> None:
        """The chunk that was taken last is not needed any more."""
        self._free.put_nowait(self._lent.popleft())


async def _all_or_none(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all parts; when one fails, cancel the others and raise what it met."""
    tasks = [asyncio.get_running_loop().create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for error in failed:
        if isinstance(error, PeerLost):
            raise RoundAborted(f"a member was lost in mid-round: {error.reason}", [error.peer_id]) from error
        if error is not None:
            raise error
