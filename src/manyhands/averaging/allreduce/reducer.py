"""Computes the weighted mean of one span, chunk by chunk, while other chunks are still arriving."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from blake3 import blake3

from manyhands.averaging.allreduce.centered_clip import ENOUGH, centered_clip
from manyhands.averaging.allreduce.checks import Norms
from manyhands.averaging.allreduce.partition import Partition
from manyhands.averaging.codecs import BadEncoding, Gathered, NotFinite, Share, Unsent, is_finite, shares_of
from manyhands.averaging.memory import Memory, bytes_of, whole_lines
from manyhands.base.errors import RoundAborted
from manyhands.runtime.executor import run_to_end
from manyhands.runtime.waker import Waker

INLINE_NUMEL = 1 << 14
"""Below this number of elements, the work takes less time than a switch to another thread."""

NO_VALUES = "nobody's values came for a chunk"


class _SpoiltError(Exception):
    """A member's values cannot be averaged."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(how)
        self.rank = rank


@contextmanager
def _blaming(rank: int) -> Iterator[None]:
    try:
        yield
    except BadEncoding as error:
        raise _SpoiltError(rank, f"cannot be decoded: {error}") from error


class SpanReducer:
    """Averages the chunks of the span that this member owns.

    The thread that delivers the last missing part of a chunk also averages it, so no other thread has to wake up. Only
    one thread averages at a time, chunk after chunk.

    Args:
        averaged_N: receives the means; may be the memory of ``flat_N``, this member's values.
        encoded: memory for the means as sent, uint8; with an exact codec that of the means themselves.
        unsent: with a sparse codec, what this member has not sent so far.
        norms: measures the members' values as they arrive; None if they are not measured.
        is_robust: combines them by centered clipping, chunk by chunk, from ``ENOUGH`` members on.

    Attributes:
        inboxes: incoming chunks of each other member with a weight, by rank.
        presents: ranks that contributed, for each averaged chunk.
        hasher: BLAKE3 of the means as sent.
        progress: wakes when a chunk was averaged, which makes room for more.
    """

    def __init__(
        self,
        partition: Partition,
        rank: int,
        flat_N: torch.Tensor,
        averaged_N: torch.Tensor,
        encoded: torch.Tensor,
        memory: Memory,
        unsent: Unsent | None,
        norms: Norms | None,
        *,
        is_robust: bool = False,
    ) -> None:
        self.chunks = partition.chunks[rank]
        self.presents: list[list[int]] = []
        self.hasher = blake3(max_threads=1)
        self.progress = Waker()
        self._plan = plan = partition.plan
        self._is_exact = partition.is_exact
        self._rank = rank
        self._weights = weights = partition.weights
        self._scales = partition.scales
        self._flat_N = flat_N
        self._averaged_N = averaged_N
        self._encoded = encoded
        self._norms = norms
        self._is_robust = is_robust
        self._squares: dict[int, float] = {}  # by rank, sum of the squares of the last chunk's values
        self._products: dict[int, float] = {}  # by rank, of the first values of the last chunk, times shares
        self._num_multiplied = 0  # so many first values
        self._encode = unsent.encode if unsent is not None else plan.encode
        self._means = partition.means if isinstance(partition.means, Gathered) else None
        self._places = partition.mean_places[rank]
        senders = [other for other, weight in enumerate(weights) if other != rank and weight > 0 and self.chunks]
        room = whole_lines(max((place.stop - place.start for place in partition.places[rank]), default=0))
        self._is_crowded = len(senders) > MANY_SENDERS
        num_rooms = min(1 if self._is_crowded else QUEUED_CHUNKS, len(self.chunks))
        shape = len(senders) * num_rooms, room
        self._rooms = memory.vector(math.prod(shape), torch.uint8).view(shape)
        self.inboxes = {
            other: Inbox(self._rooms[at * num_rooms : (at + 1) * num_rooms]) for at, other in enumerate(senders)
        }
        is_in_place = bool(self.chunks) and flat_N.data_ptr() == averaged_N.data_ptr()
        kept_numel = max(map(_numel, self.chunks)) if is_in_place else 0
        self._kept_N = memory.vector(kept_numel, flat_N.dtype)  # own values of a chunk that its mean overwrites
        self._may_reduce = False
        self._reducing = threading.Lock()
        self._spoilt: dict[int, str] = {}  # what is wrong with a member's values; not reported yet
        self._error: Exception | None = None
        self._to_look = Waker()  # wakes run(), not for each chunk: receiving threads average them

    def put(self, rank: int, encoded: torch.Tensor) -> None:
        """Take a chunk that has come into a member's inbox; averages all that is complete."""
        if (inbox := self.inboxes.get(rank)) is not None:
            inbox.put(encoded)
            self._reduce_all()

    def lose(self, rank: int, *, is_violation: bool) -> None:
        """Expect nothing more from a member; chunks that it delivered count, unless they were the fault."""
        if (inbox := self.inboxes.get(rank)) is not None:
            if is_violation:
                self.inboxes.pop(rank, None)
            inbox.is_ended = True
            self._to_look.wake()

    def done(self, num_before: int) -> tuple[int, memoryview]:
        """The means to send next, after the first ``num_before`` chunks.

        These are all further chunks that are averaged. With many senders it is one chunk at a time, so that the records
        on their streams stay short.

        Returns:
            The number of chunks that have been sent once these bytes are, and the bytes.
        """
        num_done = min(len(self.presents), num_before + 1) if self._is_crowded else len(self.presents)
        start = self._places[num_before].start if num_before < len(self.chunks) else 0
        ready = slice(start, self._places[num_done - 1].stop if num_done > num_before else start)
        return num_done, bytes_of(self._encoded[ready])

    def has_more_than(self, num_chunks: int) -> Callable[[], bool]:
        """A condition that holds once more than ``num_chunks`` chunks are averaged."""
        return lambda: len(self.presents) > num_chunks

    async def run(self) -> AsyncIterator[tuple[int, str]]:
        """Average all chunks; yields each member whose values cannot be averaged, and what is wrong with them.

        Raises:
            RoundAborted: no member's values came for a chunk.
            NotFinite: this member's own values are not finite.
        """
        self._may_reduce = True
        while len(self.presents) < len(self.chunks):
            if self._is_due() and _numel(self.chunks[0]) >= INLINE_NUMEL:
                await run_to_end(self._reduce_all)
            else:
                self._reduce_all()
            await self._to_look.wait_until(self._must_look)
            for rank in list(self._spoilt):
                yield rank, self._spoilt.pop(rank)
            if self._error is not None:
                raise self._error

    def _must_look(self) -> bool:
        is_over = self._error is not None or len(self.presents) == len(self.chunks)
        return is_over or bool(self._spoilt) or (not self._reducing.locked() and self._is_due())

    def _is_due(self) -> bool:
        """Whether the next chunk can be averaged."""
        is_possible = self._may_reduce and self._error is None and len(self.presents) < len(self.chunks)
        return is_possible and all(inbox.is_ready for inbox in list(self.inboxes.values()))

    def _reduce_all(self) -> None:
        """Average what has come, unless another thread does so already and will see it."""
        while self._is_due() and self._reducing.acquire(blocking=False):
            try:
                if self._is_due():
                    self._reduce_next()
            except Exception as error:  # noqa: BLE001 (it ends the round, not the stream on which the last values came)
                self._error = error
            finally:
                self._reducing.release()
            self.progress.wake()
            if self._error is not None or self._spoilt or len(self.presents) == len(self.chunks):
                self._to_look.wake()

    def _reduce_next(self) -> None:
        inboxes = dict(self.inboxes)
        taken = {rank: inbox.take() for rank, inbox in inboxes.items()}
        received = {rank: encoded for rank, encoded in taken.items() if encoded is not None}
        present, spoilt = self._reduce(len(self.presents), received)
        for rank, encoded in taken.items():
            if encoded is None or rank in spoilt:
                self.inboxes.pop(rank, None)
            else:
                inboxes[rank].give_back()
        self._spoilt |= spoilt
        self.presents.append(present)

    def _reduce(self, number: int, received: dict[int, torch.Tensor]) -> tuple[list[int], dict[int, str]]:
        """Average a chunk in the order of ranks, as all members will decode it; returns its contributors and faults."""
        chunk = self.chunks[number]
        encoded = self._encoded[self._places[number]]
        own = self._flat_N[chunk]
        kept = self._kept_N[: _numel(chunk)]
        values = kept if kept.numel() else own  # where this member's values are once the mean is written
        spoilt: dict[int, str] = {}
        present = sorted([*received, *([self._rank] if self._weights[self._rank] > 0 else [])])
        if self._means is not None and self._rank in present:
            received[self._rank] = torch.empty(self._plan.num_bytes(chunk.start, chunk.stop), dtype=torch.uint8)
            self._encode(own, chunk.start, received[self._rank])
        while True:
            try:
                if self._means is not None:
                    self._pass_on(present, received, chunk, encoded, self._means)
                else:
                    self._average(present, own, kept, received, chunk, encoded)
                break
            except _SpoiltError as fault:
                spoilt[fault.rank] = str(fault)
                present.remove(fault.rank)
                if kept.numel():
                    own, kept = kept, kept[:0]
        self.hasher.update(bytes_of(encoded))
        if self._norms is not None:
            self._norms.add(chunk, self._squares, received, values)
            if self._means is None and not self._is_robust:
                self._multiply(present, chunk, received, values, self._norms)
            for rank in spoilt:
                self._norms.spoil(rank)
        return present, spoilt

    def _multiply(
        self,
        present: Sequence[int],
        chunk: slice,
        received: Mapping[int, torch.Tensor],
        own: torch.Tensor,
        norms: Norms,
    ) -> None:
        """Add the products of the members' values with the mean of a chunk, as far as they are not known."""
        norms.add_products(self._products)
        num_done = self._num_multiplied
        if num_done < _numel(chunk):
            rest = slice(chunk.start + num_done, chunk.stop)
            at = self._plan.num_bytes(chunk.start, rest.start)
            shares = shares_of(self._weights, self._scales, present)
            some = {rank: got[at:] for rank, got in received.items()}
            norms.multiply(rest, self._averaged_N[rest], shares, some, own[num_done:])

    def _pass_on(
        self,
        present: Sequence[int],
        received: Mapping[int, torch.Tensor],
        chunk: slice,
        encoded: torch.Tensor,
        means: Gathered,
    ) -> None:
        """Like :meth:`_average`, but write the contributions in place of the encoded mean."""
        mean = self._averaged_N[chunk]
        self._squares = {}
        for rank in present:
            with _blaming(rank):
                values = torch.empty_like(mean)
                whole = Share(1.0, 1.0)
                square = self._plan.add(received[rank], chunk.start, whole, values, is_first=True, is_largest=True)
            self._squares[rank] = square
        if not present:
            raise RoundAborted(NO_VALUES)
        means.fill(encoded, {rank: received[rank] for rank in present})
        means.decode(encoded, chunk.start, mean)

    def _average(
        self,
        present: Sequence[int],
        own: torch.Tensor,
        kept: torch.Tensor,
        received: Mapping[int, torch.Tensor],
        chunk: slice,
        encoded: torch.Tensor,
    ) -> None:
        """Write the mean of the members' chunks and encode it; raises :class:`_SpoiltError` if a member spoils it.

        Values of members that are clipped are scaled down by their shares.

        The mean may overwrite ``own``, which is saved to ``kept`` first, unless that is empty.
        """
        plan = self._plan
        num_done = 0
        sums = np.zeros((len(present), 2))
        shares = shares_of(self._weights, self._scales, present)
        is_robust = self._is_robust and len(present) >= ENOUGH
        parts = plan.cut(chunk.start, chunk.stop) if not is_robust else []
        if len(parts) == 1 and not parts[0].is_chosen and received and present:  # in one pass, as far as possible
            which = [self._room_of(received[rank]) if rank in received else -1 for rank in present]
            factors = [shares[rank].of(parts[0], is_largest=False) for rank in present]
            mean = self._averaged_N[chunk]
            num_done = parts[0].codec.average(own, kept, self._rooms, which, factors, mean, encoded, sums)
        self._squares = dict(zip(present, sums[:, 0].tolist(), strict=True))
        self._products, self._num_multiplied = {}, 0
        if num_done and not plan.uncompared(chunk):
            self._products = {rank: factors[at] * float(sums[at, 1]) for at, rank in enumerate(present)}
            self._num_multiplied = num_done
        if num_done == _numel(chunk):
            return
        at = plan.num_bytes(chunk.start, chunk.start + num_done)
        rest = slice(chunk.start + num_done, chunk.stop)
        if kept.numel():
            kept[num_done:].copy_(own[num_done:])
            own = kept
        self._add_up(shares, own[num_done:], {rank: got[at:] for rank, got in received.items()}, rest)
        if is_robust:
            self._clip_centered(present, own, received, chunk)
        if not self._is_exact:
            mean = self._averaged_N[rest]
            plan.encode(mean, rest.start, encoded[at:])
            plan.decode(encoded[at:], rest.start, mean)

    def _clip_centered(
        self, present: Sequence[int], own: torch.Tensor, received: Mapping[int, torch.Tensor], chunk: slice
    ) -> None:
        """Write the robust mean of the members' chunks in place of the plain one, where values can be compared."""
        mean = self._averaged_N[chunk]
        values = torch.empty(len(present), mean.numel(), dtype=mean.dtype)
        for row, rank in zip(values, present, strict=True):
            if rank == self._rank:
                row.copy_(own)
            elif self._is_exact:
                row.copy_(received[rank].view(own.dtype))
            else:
                self._plan.decode(received[rank], chunk.start, row)
        for gap in self._plan.uncompared(chunk):
            values[:, gap] = mean[gap]
        mean.copy_(centered_clip(values, [self._weights[rank] for rank in present]))

    def _room_of(self, encoded: torch.Tensor) -> int:
        """The index of the room in which a chunk was received."""
        return (encoded.data_ptr() - self._rooms.data_ptr()) // self._rooms.stride(0)

    def _add_up(
        self, shares: Mapping[int, Share], own: torch.Tensor, received: Mapping[int, torch.Tensor], chunk: slice
    ) -> None:
        """Write the mean, one member after the other."""
        if not shares:
            raise RoundAborted(NO_VALUES)
        mean = self._averaged_N[chunk]
        largest = max(shares, key=self._weights.__getitem__)
        for number, (rank, share) in enumerate(shares.items()):
            is_unencoded = rank == self._rank or self._is_exact
            if rank == self._rank:
                values = own
            elif self._is_exact:
                values = received[rank].view(own.dtype)
            else:
                values = received[rank]
            add = self._plan.add_values if is_unencoded else self._plan.add
            with _blaming(rank):
                square = add(values, chunk.start, share, mean, is_first=number == 0, is_largest=rank == largest)
            self._squares[rank] += square
        if not self._is_exact:
            return  # the codec has refused values that are not finite
        if is_finite(mean):
            return
        for rank in shares:
            if rank != self._rank and not is_finite(received[rank].view(own.dtype)):
                raise _SpoiltError(rank, "are not finite")
        raise NotFinite("NaN or infinite values cannot be averaged")


def _numel(part: slice) -> int:
    return int(part.stop - part.start)


QUEUED_CHUNKS = 3
"""Limit of the chunks of one sender in memory: one arriving, one being reduced, and one between them."""

MANY_SENDERS = 16
"""With more senders than this, one chunk of each is in memory; further chunks wait in the system's buffers."""


class Inbox:
    """The chunks of one sender on their way to the reducer, in reused memory. One thread puts; another may take.

    Args:
        rooms: uint8, shape [chunks to queue, bytes of the largest chunk].

    Attributes:
        is_ended: whether no further chunks will arrive.
    """

    def __init__(self, rooms: torch.Tensor) -> None:
        self.is_ended = False
        self._free = list(rooms)
        self._in_use: deque[torch.Tensor] = deque()
        self._full: deque[torch.Tensor] = deque()

    @property
    def has_room(self) -> bool:
        """Whether the sender may send another chunk."""
        return bool(self._free)

    def room(self, num_bytes: int) -> torch.Tensor:
        """Memory for the next chunk, uint8, shape [num_bytes]; requires :attr:`has_room`."""
        self._in_use.append(self._free.pop())  # the memory used last is in the processor's cache
        return self._in_use[-1][:num_bytes]

    def put(self, encoded: torch.Tensor) -> None:
        self._full.append(encoded)

    @property
    def is_ready(self) -> bool:
        """Whether the next chunk has come or is known never to come."""
        return bool(self._full) or self.is_ended

    def take(self) -> torch.Tensor | None:
        """The next chunk, if it is ready; None if it never comes."""
        return self._full.popleft() if self._full else None

    def give_back(self) -> None:
        """Free the memory of the chunk that was taken last."""
        self._free.append(self._in_use.popleft())
