"""Butterfly all-reduce of one formed group: reduce-scatter, then all-gather, over one stream for each pair.

Each reducer owns a span of the vector; two members that own none have no stream. On the stream between two members,
each sends its part of the other's span, then the averaged chunks of its own span as they get ready; both sides know all
sizes, so nothing but values travels. A reducer adds in the order of ranks, so the result does not depend on who is
faster.

Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239, section 3.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import torch

from manyhands.averaging.messages import Group
from manyhands.averaging.spans import chunks_of, owned_spans
from manyhands.base.errors import PeerLost, RoundAborted
from manyhands.transport.api import Stream

QUEUED_CHUNKS = 2
"""Chunks that one sender may be ahead of the reducer: bounds the memory to this many for each sender."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, for sending from it or receiving into it."""
    return tensor.numpy().data.cast("B")


class Butterfly:
    """One member's part in one all-reduce.

    Args:
        group: with at least one member that is not in client mode, and at least one positive weight.
        rank: of this member.
        flat_N: this member's values, float32 on the CPU; never written.
        chunk_numel: elements that are reduced in one go.
    """

    def __init__(self, group: Group, rank: int, flat_N: torch.Tensor, chunk_numel: int) -> None:
        members = group.members
        self.averaged_N = torch.empty_like(flat_N)
        self._members = members
        self._rank = rank
        self._flat_N = flat_N
        self._spans = owned_spans(flat_N.numel(), group.bandwidths(), group.min_span_numel, group.group_id)
        self._weights = [member.weight for member in members]
        self._own_chunks = chunks_of(self._spans[rank], chunk_numel)
        self._chunk_numel = chunk_numel
        self._reduced = [asyncio.Event() for _ in self._own_chunks]
        self._received: dict[int, asyncio.Queue[torch.Tensor]] = {
            other: asyncio.Queue(QUEUED_CHUNKS) for other in self._senders()
        }

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
        """Exchange values with all partners; returns the weighted mean, float32, shape [N].

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
        for chunk, reduced in zip(self._own_chunks, self._reduced, strict=True):
            await reduced.wait()
            await stream.send(bytes_of(self.averaged_N[chunk]))

    async def _receive_from(self, rank: int, stream: Stream) -> None:
        if rank in self._received:
            for chunk in self._own_chunks:
                values = torch.empty(chunk.stop - chunk.start, dtype=torch.float32)
                await self._receive(rank, stream, values)
                await self._received[rank].put(values)
        for chunk in chunks_of(self._spans[rank], self._chunk_numel):
            await self._receive(rank, stream, self.averaged_N[chunk])

    async def _receive(self, rank: int, stream: Stream, values: torch.Tensor) -> None:
        await stream.receive_into(bytes_of(values))
        self._check_finite(rank, values)

    def _check_finite(self, rank: int, values: torch.Tensor) -> None:
        if not torch.isfinite(values).all():
            peer_id = self._members[rank].peer_id
            raise RoundAborted(f"the values of peer {peer_id} are not finite", [peer_id])

    async def _reduce(self) -> None:
        """Average the chunks of this member's own span, in the order of ranks."""
        total = sum(self._weights)
        for chunk, reduced in zip(self._own_chunks, self._reduced, strict=True):
            mean = self.averaged_N[chunk].zero_()
            for rank, weight in enumerate(self._weights):
                if weight > 0:
                    values = self._flat_N[chunk] if rank == self._rank else await self._received[rank].get()
                    mean.add_(values, alpha=weight / total)
            self._check_finite(self._rank, mean)
            reduced.set()

    def _senders(self) -> list[int]:
        """Ranks that send values to this member's span."""
        others = (rank for rank, weight in enumerate(self._weights) if rank != self._rank and weight > 0)
        return list(others) if self._own_chunks else []

    def _is_reducer(self, rank: int) -> bool:
        span = self._spans[rank]
        return bool(span.start < span.stop)


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
