"""The reducer's work: the weighted mean of one span, chunk by chunk, while other chunks still come."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from blake3 import blake3

from manyhands.averaging.codecs import ErrorFeedback
from manyhands.averaging.inbox import Inbox
from manyhands.averaging.member_values import MemberValues, Spoiled, bytes_of, is_finite
from manyhands.averaging.memory import empty_vector
from manyhands.base.errors import RoundAborted
from manyhands.runtime.executor import run_to_end

INLINE_NUMEL = 1 << 14
"""Work on fewer elements is done sooner than another thread could be asked to."""

GONE = torch.empty(0, dtype=torch.uint8)
"""In an inbox: nothing comes after it."""
NO_VALUES = "nobody's values came for a chunk"


class SpanReducer:
    """Averages the chunks of the span that this member owns.

    Args:
        codec: how they travel.
        rank: of this member.
        chunks: of the span, in order.
        weights: by rank; 0 for those that do not take part.
        flat_N: this member's values.
        averaged_N: where the means go.
        feedback: what earlier rounds lost of the means that this member reduced.

    Attributes:
        chunks: those.
        inboxes: what comes from each other member with a weight, by rank.
        presents: ranks that contributed, for each chunk that is averaged.
        hasher: of the means as they travel.
    """

    def __init__(
        self,
        codec: MemberValues,
        rank: int,
        chunks: Sequence[slice],
        weights: Sequence[float],
        flat_N: torch.Tensor,
        averaged_N: torch.Tensor,
        feedback: ErrorFeedback | None,
    ) -> None:
        self.chunks = list(chunks)
        self.presents: list[list[int]] = []
        self.hasher = blake3(max_threads=1)
        self._codec = codec
        self._rank = rank
        self._weights = weights
        self._flat_N = flat_N
        self._averaged_N = averaged_N
        self._feedback = feedback
        self._is_done = [asyncio.Event() for _ in self.chunks]
        sizes = [codec.num_bytes(chunk) for chunk in self.chunks]
        stops = list(itertools.accumulate(sizes))
        self._places = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
        if codec.is_exact:
            span = slice(self.chunks[0].start, self.chunks[-1].stop) if self.chunks else slice(0, 0)
            self._encoded = averaged_N[span].view(torch.uint8)
        else:
            self._encoded = empty_vector(sum(sizes), torch.uint8)
        senders = [other for other, weight in enumerate(weights) if other != rank and weight > 0]
        self.inboxes = {other: Inbox(max(sizes)) for other in senders} if self.chunks else {}

    def lose(self, rank: int, *, is_violation: bool) -> None:
        """Nothing more comes from a member; what it has delivered counts, unless that was the fault."""
        if is_violation:
            self.inboxes.pop(rank, None)
        elif rank in self.inboxes:
            self.inboxes[rank].put(GONE)

    async def done(self, num_before: int) -> tuple[int, memoryview]:
        """Wait for chunk number ``num_before``; how many are averaged then, and the new ones as they travel."""
        await self._is_done[num_before].wait()
        waiting = (number for number in range(num_before, len(self.chunks)) if not self._is_done[number].is_set())
        num_done = next(waiting, len(self.chunks))
        ready = slice(self._places[num_before].start, self._places[num_done - 1].stop)
        return num_done, bytes_of(self._encoded[ready])

    async def run(self, blame: Callable[[int, str], None]) -> None:
        """Average all chunks.

        Args:
            blame: told who has sent values that cannot be averaged, and why.
        Raises:
            RoundAborted: nobody's values came for a chunk, or this member's own are not finite.
        """
        for number, chunk in enumerate(self.chunks):
            received: dict[int, torch.Tensor] = {}
            for rank, inbox in list(self.inboxes.items()):
                encoded = await inbox.take()
                if encoded is GONE:
                    self.inboxes.pop(rank, None)
                elif rank in self.inboxes:
                    received[rank] = encoded
            if chunk.stop - chunk.start >= INLINE_NUMEL:
                present, spoilt = await run_to_end(self._reduce, number, received)
            else:
                present, spoilt = self._reduce(number, received)
            for rank, reason in spoilt.items():
                blame(rank, reason)
            for rank in received:
                if rank in self.inboxes:
                    self.inboxes[rank].give_back()
            self.presents.append(present)
            self._is_done[number].set()

    def _reduce(self, number: int, received: Mapping[int, torch.Tensor]) -> tuple[list[int], dict[int, str]]:
        """The weighted mean, in the order of ranks, as everybody will decode it; returns who is in it, and who not."""
        chunk, encoded = self.chunks[number], self._encoded[self._places[number]]
        present = sorted([*received, *([self._rank] if self._weights[self._rank] > 0 else [])])
        spoilt: dict[int, str] = {}
        while (fault := self._add_up(present, received, chunk)) is not None:
            rank, spoilt[rank] = fault
            present.remove(rank)
        if not self._codec.is_exact:
            mean = self._averaged_N[chunk]
            self._codec.requantize(mean, chunk, encoded, self._feedback)
        self.hasher.update(bytes_of(encoded))
        return present, spoilt

    def _add_up(
        self, present: Iterable[int], received: Mapping[int, torch.Tensor], chunk: slice
    ) -> tuple[int, str] | None:
        """Write the mean; returns a member whose values spoil it, and how, or None."""
        ranks = list(present)
        if not ranks:
            raise RoundAborted(NO_VALUES)
        mean = self._averaged_N[chunk]
        total = sum(self._weights[rank] for rank in ranks)
        for rank in ranks:
            share, is_first = self._weights[rank] / total, rank == ranks[0]
            values = self._plain_values_of(rank, received, chunk)
            try:
                if values is None:
                    self._codec.add(rank, received[rank], chunk, share, mean, is_first=is_first)
                elif is_first:
                    torch.mul(values, share, out=mean)
                else:
                    mean.add_(values, alpha=share)
            except Spoiled as error:
                return rank, error.reason
        if is_finite(mean):
            return None
        for rank in ranks:
            values = self._plain_values_of(rank, received, chunk)
            if rank != self._rank and values is not None:  # what a codec decodes is finite
                try:
                    self._codec.check_finite(rank, values)
                except Spoiled as error:
                    return rank, error.reason
        self._codec.check_finite(self._rank, mean)
        return None

    def _plain_values_of(self, rank: int, received: Mapping[int, torch.Tensor], chunk: slice) -> torch.Tensor | None:
        """What a member gave for a chunk, unless it is encoded."""
        if rank == self._rank:
            return self._flat_N[chunk]
        return received[rank].view(self._flat_N.dtype) if self._codec.is_exact else None
