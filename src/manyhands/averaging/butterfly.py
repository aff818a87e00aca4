"""Butterfly all-reduce of one formed group: reduce-scatter, then all-gather, over one stream for each pair.

Each reducer owns a span of the vector; two members that own none have no stream. On the stream between two members,
each sends its part of the other's span, then the averaged chunks of its own span as they get ready; both sides know all
sizes, so nothing but values travels. A reducer adds in the order of ranks, so the result does not depend on who is
faster. What it sends, encoded once, is what everybody applies, the reducer included: all decode the same bytes.

Arithmetic on more than a few values runs beside the loop: the others' calls must not wait for it.

Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239, section 3.2.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch

from manyhands.averaging.codecs import BadEncoding, NotFinite, Plan, largest_magnitude
from manyhands.averaging.inbox import Inbox
from manyhands.averaging.messages import Group
from manyhands.averaging.spans import chunks_of, owned_spans
from manyhands.base.errors import PeerLost, RoundAborted
from manyhands.transport.api import Stream

T = TypeVar("T")

INLINE_NUMEL = 1 << 14
"""Work on fewer elements is done sooner than another thread could be asked to."""

CHECKED_NUMEL = 1 << 20
"""Elements that are received in one go when they are averaged already, and checked."""

MAX_CHUNKS = 1 << 14
"""Of one vector; a leader that wants smaller chunks does not get them."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, for sending from it or receiving into it."""
    return tensor.numpy().data.cast("B")


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN; reads memory once, as fast as it comes."""
    return not values.numel() or math.isfinite(largest_magnitude(values))


class Butterfly:
    """One member's part in one all-reduce.

    Args:
        group: with at least one member that is not in client mode, and at least one positive weight.
        rank: of this member.
        flat_N: this member's values, of the plan's dtype, on the CPU; never written.
        plan: how the vector is encoded; the same on all members.
    """

    def __init__(self, group: Group, rank: int, flat_N: torch.Tensor, plan: Plan) -> None:
        numel = flat_N.numel()
        self.averaged_N = torch.empty_like(flat_N)
        self._members = group.members
        self._rank = rank
        self._flat_N = flat_N
        self._plan = plan
        self._is_exact = plan.is_exact(0, numel)
        self._spans = owned_spans(numel, group.bandwidths(), group.min_span_numel, group.group_id)
        self._weights = [member.weight for member in group.members]
        self._chunk_numel = max(group.chunk_numel, math.ceil(numel / MAX_CHUNKS))
        self._own_chunks = chunks_of(self._spans[rank], self._chunk_numel)
        self._reduced = [asyncio.Event() for _ in self._own_chunks]
        self._encoded: list[torch.Tensor] = []  # the averaged chunks, unless they travel as they are
        chunk_bytes = max((self._num_bytes(chunk) for chunk in self._own_chunks), default=0)
        self._inboxes = {other: Inbox(chunk_bytes) for other in self._senders()}

    def partners(self) -> list[int]:
        """Ranks with which values are exchanged; two members that own no span have nothing to say to each other."""
        return [
            rank
            for rank in range(len(self._members))
            if rank != self._rank and (self._is_reducer(rank) or self._is_reducer(self._rank))
        ]

    def num_bytes_with(self, rank: int) -> int:
        """About what each way of the stream to a partner carries, in bytes."""
        return self._num_bytes(self._spans[rank]) + self._num_bytes(self._spans[self._rank])

    async def run(self, connect: Callable[[int], Awaitable[Stream]]) -> torch.Tensor:
        """Exchange values with all partners; returns the weighted mean, of the plan's dtype, shape [N].

        Args:
            connect: gives the stream to the partner of this rank; each is used as soon as it is there.
        Raises:
            RoundAborted: a member was lost, or its values are not finite or cannot be decoded; it is blamed.
        """
        await _all_or_none([self._reduce(), *(self._exchange_with(rank, connect) for rank in self.partners())])
        return self.averaged_N

    async def _exchange_with(self, rank: int, connect: Callable[[int], Awaitable[Stream]]) -> None:
        stream = await connect(rank)
        await _all_or_none([self._send_to(rank, stream), self._receive_from(rank, stream)])

    # sending

    async def _send_to(self, rank: int, stream: Stream) -> None:
        if self._weights[self._rank] > 0 and self._is_reducer(rank):
            await self._send_values(self._spans[rank], stream)
        num_sent = 0
        while num_sent < len(self._own_chunks):
            await self._reduced[num_sent].wait()
            num_ready = self._num_reduced(num_sent)
            if self._is_exact:  # they lie side by side
                ready = slice(self._own_chunks[num_sent].start, self._own_chunks[num_ready - 1].stop)
                await stream.send(bytes_of(self.averaged_N[ready]))
            else:
                await stream.send(*map(bytes_of, self._encoded[num_sent:num_ready]))
            num_sent = num_ready

    async def _send_values(self, span: slice, stream: Stream) -> None:
        """This member's values of a span; the next chunk is encoded while one is sent."""
        if self._is_exact:
            await stream.send(bytes_of(self._flat_N[span]))
            return
        chunks = chunks_of(span, self._chunk_numel)
        encoding = self._beside_loop(chunks[0], self._encode_own, chunks[0])
        for following in [*chunks[1:], None]:
            encoded = await encoding
            if following is not None:
                encoding = self._beside_loop(following, self._encode_own, following)
            await stream.send(bytes_of(encoded))

    def _encode_own(self, chunk: slice) -> torch.Tensor:
        return self._encode(self._flat_N[chunk], chunk)

    def _num_reduced(self, num_before: int) -> int:
        """How many chunks are averaged; they get ready in order."""
        waiting = (number for number in range(num_before, len(self._reduced)) if not self._reduced[number].is_set())
        return next(waiting, len(self._reduced))

    # receiving

    async def _receive_from(self, rank: int, stream: Stream) -> None:
        if rank in self._inboxes:
            inbox = self._inboxes[rank]
            for chunk in self._own_chunks:
                encoded = await inbox.room(self._num_bytes(chunk))
                await stream.receive_into(bytes_of(encoded))
                inbox.put(encoded)
        if self._is_exact:
            for piece in chunks_of(self._spans[rank], CHECKED_NUMEL):
                averaged = self.averaged_N[piece]
                await stream.receive_into(bytes_of(averaged))
                self._check_finite(rank, averaged)
        else:
            await self._receive_encoded(rank, stream)

    async def _receive_encoded(self, rank: int, stream: Stream) -> None:
        """The averaged chunks of another reducer; one is decoded while the next one comes."""
        decoding: Awaitable[None] | None = None
        for chunk in chunks_of(self._spans[rank], self._chunk_numel):
            encoded = torch.empty(self._num_bytes(chunk), dtype=torch.uint8)
            await stream.receive_into(bytes_of(encoded))
            if decoding is not None:
                await decoding
            decoding = self._beside_loop(chunk, self._decode, rank, encoded, chunk, self.averaged_N[chunk])
        if decoding is not None:
            await decoding

    def _check_finite(self, rank: int, values: torch.Tensor) -> None:
        if not is_finite(values):
            peer_id = self._members[rank].peer_id
            raise RoundAborted(f"the values of peer {peer_id} are not finite", [peer_id])

    # reducing

    async def _reduce(self) -> None:
        """Average the chunks of this member's own span."""
        for chunk, reduced in zip(self._own_chunks, self._reduced, strict=True):
            received = {rank: await inbox.take() for rank, inbox in self._inboxes.items()}
            await self._beside_loop(chunk, self._reduce_chunk, chunk, received)
            for inbox in self._inboxes.values():
                inbox.give_back()
            reduced.set()

    def _reduce_chunk(self, chunk: slice, received: Mapping[int, torch.Tensor]) -> None:
        """The weighted mean, in the order of ranks, as everybody will decode it."""
        total = sum(self._weights)
        mean = self.averaged_N[chunk].zero_()
        values_of = {self._rank: self._flat_N[chunk]}
        for rank, encoded in received.items():
            values_of[rank] = encoded.view(mean.dtype) if self._is_exact else torch.empty_like(mean)
        for rank, weight in enumerate(self._weights):
            if weight > 0:
                if rank in received and not self._is_exact:
                    self._decode(rank, received[rank], chunk, values_of[rank])
                mean.add_(values_of[rank], alpha=weight / total)
        if not is_finite(mean):
            for rank in received:
                self._check_finite(rank, values_of[rank])
            self._check_finite(self._rank, mean)
        if not self._is_exact:
            encoded = self._encode(mean, chunk)
            self._plan.decode(encoded, chunk.start, mean)
            self._encoded.append(encoded)

    def _encode(self, values: torch.Tensor, chunk: slice) -> torch.Tensor:
        encoded = torch.empty(self._num_bytes(chunk), dtype=torch.uint8)
        try:
            self._plan.encode(values, chunk.start, encoded)
        except NotFinite as error:
            peer_id = self._members[self._rank].peer_id
            raise RoundAborted(f"the values of peer {peer_id} are not finite: {error}", [peer_id]) from error
        return encoded

    def _decode(self, rank: int, encoded: torch.Tensor, chunk: slice, out: torch.Tensor) -> None:
        try:
            self._plan.decode(encoded, chunk.start, out)
        except BadEncoding as error:
            peer_id = self._members[rank].peer_id
            raise RoundAborted(f"the values of peer {peer_id} cannot be decoded: {error}", [peer_id]) from error

    def _num_bytes(self, part: slice) -> int:
        return self._plan.num_bytes(part.start, part.stop)

    def _beside_loop(self, chunk: slice, work: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Begin work on a chunk, on another thread if it takes longer than asking one."""
        loop = asyncio.get_running_loop()
        if chunk.stop - chunk.start >= INLINE_NUMEL:
            return loop.run_in_executor(None, work, *args)
        done: asyncio.Future[T] = loop.create_future()
        done.set_result(work(*args))
        return done

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
