"""Butterfly all-reduce within one group: reduce-scatter, then all-gather, over one stream for each pair of members.

Each reducer owns a span of the vector; two members without spans have no stream. On its stream to a partner, a member
sends its part of the partner's span. It then sends the averaged chunks of its own span as they become ready, and last
the contributors to each chunk, and of their values the size and the products with the mean (:mod:`.checks`). Each side
announces what it sends, so that a member with a different vector is detected before its values count. A reducer adds
in the order of ranks, so the result does not depend on timing. It encodes each mean once, and all members, the reducer
included, decode the same bytes.

A lost member does not end the all-reduce. Chunks that it had delivered count, later chunks are the mean of the others,
and its own span is missing. Then all is exchanged again without it (:mod:`manyhands.averaging.round.round_machine`).

Arithmetic on more than a few values runs off the event loop, so that calls from other peers need not wait for it.

Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239, section 3.2.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import struct
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

import torch
from blake3 import blake3

from manyhands.averaging.allreduce.checks import CLOSE, LEAVES_OUT, Norms, SpanCheck, Told
from manyhands.averaging.allreduce.means import BadRecord, Means, MeansRecords, parts_of
from manyhands.averaging.allreduce.partition import Partition, chunks_of
from manyhands.averaging.allreduce.reducer import INLINE_NUMEL, Inbox, SpanReducer
from manyhands.averaging.codecs import ABSENT, BadEncoding, Gathered, NotFinite, Plan, Unsent, is_finite
from manyhands.averaging.memory import Memory, bytes_of, whole_lines
from manyhands.averaging.messages import MAX_REASON_LENGTH, Complaint, Group, SpanResult
from manyhands.averaging.timing import SOON_S
from manyhands.base.errors import PeerLost, RoundAborted
from manyhands.runtime.waker import Waker
from manyhands.transport.api import Stream

_LABEL = struct.Struct("<QQ")
"""Sent before the values and before the means of a span: number of elements, and number of bytes that follow."""

PIECE_NUMEL = 1023 * 64
"""Unencoded values are checked in pieces of this size, while they are in the processor's cache. As float32, a piece is
one record on a short link (:mod:`manyhands.transport.sealed_stream`)."""
MEANS_NUMEL = 4 * PIECE_NUMEL
"""Unencoded means are received in pieces of this size. In pieces of one record, four peers had 0.83 to 0.91 of this
throughput, in four pairs of runs (``benchmarks/allreduce.py --peers 4 --mb 64 --codec none``)."""

Condition = Callable[[], bool]


class Wanted(enum.Enum):
    """The kind of data that a partner sends next."""

    VALUES = "values"
    MEANS = "means"


class InvalidContribution(RoundAborted):
    """A member sent, or was about to send, values or records that break the rules."""


class Pausing(Iterator[memoryview]):
    """Iterates over the buffers of a source. The source also yields conditions that must hold before its next buffer.

    The iteration stops at a condition that does not hold soon, and can go on when :meth:`wait` has returned. So no
    thread waits for long, and the event loop not at all. The waker wakes when a condition may have begun to hold.
    """

    def __init__(self, source: Iterator[memoryview | Condition], waker: Waker) -> None:
        self.is_over = False
        self._source = source
        self._waker = waker
        self._condition: Condition = lambda: True
        self._of_loop = threading.get_ident()

    async def wait(self) -> None:
        """Wait until the iteration can go on. It has no limit of its own: use a timeout."""
        await self._waker.wait_until(self._condition)

    def __next__(self) -> memoryview:
        for piece in self._source:
            if isinstance(piece, memoryview):
                return piece
            # a thread waits a little for the next piece, as it costs more to start another thread later
            is_in_loop = threading.get_ident() == self._of_loop
            if not self._waker.block_until(piece, 0.0 if is_in_loop else SOON_S):
                self._condition = piece
                raise StopIteration
        self.is_over = True
        raise StopIteration


class Butterfly:
    """One member's part in one all-reduce.

    Args:
        group: with at least one member that is not in client mode, and at least one positive weight.
        rank: rank of this member.
        flat_N: this member's values, of the plan's dtype, on the CPU.
        members: ranks that take part.
        averaged_N: receives the means. If it is ``flat_N``, the means of a chunk overwrite the values once its reducer
            has these.
        unsent: with a sparse codec, what this member has not sent so far.
        is_measured: whether the reducers report how large each member's values are; the same on all members.
        is_robust: whether the members' values become one by :func:`.centered_clip.centered_clip`.

    Attributes:
        faults: what each lost member did wrong, by rank.
        partners: ranks with which values are exchanged.
        wanted: for each partner that this member waits for, by rank: what the partner sends next.
        done_with: ranks with which all was exchanged; nothing more travels on their streams.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        flat_N: torch.Tensor,
        plan: Plan,
        *,
        members: Collection[int],
        averaged_N: torch.Tensor,
        memory: Memory,
        unsent: Unsent | None,
        is_measured: bool,
        is_robust: bool = False,
    ) -> None:
        self.averaged_N = averaged_N
        self.faults: dict[int, Complaint] = {}
        self.wanted: dict[int, Wanted] = {}
        self.done_with: set[int] = set()
        num_members = len(group.members)
        self._group = group
        self._members = group.members
        self._rank = rank
        self._flat_N = flat_N
        self._plan = plan
        self._codec = group.codec
        self._encode = unsent.encode if unsent is not None else plan.encode
        self.partition = Partition(group, members, plan)
        reducers = self.partition.reducers
        self.partners = [other for other in sorted(members) if other != rank and reducers & {other, rank}]
        self._weights = self.partition.weights
        self._own_encoded: dict[int, torch.Tensor] = {}  # by start of the chunk; only where contributions are passed on
        self._passed_on: dict[int, list[list[int]]] = defaultdict(list)  # by reducer: contributors to each chunk
        contributors = [number for number, weight in enumerate(self._weights) if weight > 0]
        self._records = MeansRecords(
            num_members, contributors, is_measured=is_measured, has_products=not plan.passes_on
        )
        self._encoded = self._memory_of_means(memory)
        self._norms = Norms(plan, num_members) if is_measured else None
        self._is_checked = is_measured and not (plan.passes_on or is_robust)
        self._told_norms: dict[int, list[float]] = {}  # by reducer
        self._reducer = SpanReducer(
            self.partition, rank, flat_N, self.averaged_N, self._encoded[rank], memory, unsent, self._norms,
            is_robust=is_robust,
        )  # fmt: skip
        self._hashers = [blake3(max_threads=1) for _ in group.members]
        self._hashers[rank] = self._reducer.hasher
        self._told: dict[int, list[list[int]]] = {}  # by reducer: the contributors to each of its chunks
        self._conversations: dict[int, asyncio.Task[None]] = {}

    def digests(self) -> list[bytes]:
        """BLAKE3 of the means of each span as sent, by rank; empty for an empty span. Requires :attr:`is_whole`."""
        hashers = enumerate(self._hashers)
        return [hasher.digest() if rank in self.partition.reducers else b"" for rank, hasher in hashers]

    def means(self) -> Means:
        """The means as sent, by reducer, as far as they have come; call it once the butterfly has ended."""
        chunks = () if self._plan.passes_on else self.partition.chunks
        return Means(self.averaged_N, self._encoded, self._codec, chunks)

    @property
    def is_whole(self) -> bool:
        """Whether all means are there."""
        return self.partition.reducers <= self._presents().keys()

    def parts(self) -> list[SpanResult]:
        """The contributors to each part of the vector, as in a manifest. Requires :attr:`is_whole`."""
        held = [
            (chunk, rank, present)
            for rank, presents in self._presents().items()
            for chunk, present in zip(self.partition.chunks[rank], presents, strict=True)
        ]
        return parts_of(held, self._group)

    def _presents(self) -> dict[int, list[list[int]]]:
        """The contributors to each chunk, by reducer; only for reducers all of whose means are here."""
        return self._told | ({self._rank: self._reducer.presents} if self.has_reduced else {})

    def norms(self) -> list[list[float]]:
        """Each member's norm by span, from this member and each reducer that has reported in full."""
        told = dict(self._told_norms)
        if self._norms is not None and self._reducer.chunks:
            told[self._rank] = self._norms.told().norms
        return [told[rank] for rank in sorted(told)]

    @property
    def has_reduced(self) -> bool:
        """Whether all means of this member's span are there."""
        return len(self._reducer.presents) == len(self._reducer.chunks)

    def num_bytes_with(self, rank: int) -> int:
        """Approximate bytes in each direction of the stream to a partner."""
        return self.partition.mean_bytes[rank] + self.partition.mean_bytes[self._rank]

    async def run(self, streams: Mapping[int, Awaitable[Stream]]) -> torch.Tensor:
        """Exchange values with all partners over these streams, by rank; returns the weighted mean.

        If awaiting a stream raises ``RoundAborted`` or ``PeerLost``, the exchange goes on without that partner.

        Raises:
            InvalidContribution: this member's own values are not finite.
            RoundAborted: all contributors to this member's span were lost.
        """
        loop = asyncio.get_running_loop()
        reducing = loop.create_task(self._reduce())
        self._conversations = {rank: loop.create_task(self._converse(rank, streams[rank])) for rank in self.partners}
        try:
            await _all_or_none([reducing, *self._conversations.values()])
        except NotFinite as error:
            raise self._invalid(self._rank, f"are not finite: {error}") from error
        finally:
            self._conversations.clear()  # a cancelled task keeps its frames, and so this object, alive
        return self.averaged_N

    def lose(self, rank: int, reason: str, *, is_violation: bool = False, is_stalled: bool = False) -> None:
        """Continue without a member; chunks that it has delivered count, unless they were the fault."""
        if rank in self.faults or rank not in self._conversations:
            return
        self.faults[rank] = Complaint(rank, reason[:MAX_REASON_LENGTH], is_violation, is_stalled)
        self._reducer.lose(rank, is_violation=is_violation)
        self._conversations[rank].cancel()

    async def _reduce(self) -> None:
        """Average this member's span."""
        async for rank, how in self._reducer.run():
            self._spoil(rank, how)

    def _spoil(self, rank: int, how: str) -> None:
        """Continue without a member whose values cannot be averaged."""
        self.lose(rank, self._invalid(rank, how).reason, is_violation=True)

    def _invalid(self, rank: int, how: str, what: str = "the values of ") -> InvalidContribution:
        peer_id = self._members[rank].peer_id
        return InvalidContribution(f"{what}peer {peer_id} {how}", [peer_id])

    async def _converse(self, rank: int, opening: Awaitable[Stream]) -> None:
        """Exchange all values and means with a partner; continue without it if that fails."""
        loop = asyncio.get_running_loop()
        try:
            stream = await opening
            try:
                sending = loop.create_task(self._send_to(rank, stream))
                await _all_or_none([sending, loop.create_task(self._receive_from(rank, stream))])
            except BaseException:
                stream.abort()  # the other end must not wait for this one
                raise
            self.done_with.add(rank)
        except PeerLost as error:
            self.lose(rank, f"a member was lost in mid-round: {error.reason}")
        except BadEncoding as error:
            self._spoil(rank, f"cannot be decoded: {error}")
        except RoundAborted as error:
            # else no stream came up, and both ends complain of each other
            is_violation = isinstance(error, InvalidContribution)
            self.lose(rank, error.reason, is_violation=is_violation, is_stalled=not is_violation)
        finally:
            self.wanted.pop(rank, None)

    def _is_small(self, rank: int) -> bool:
        """Whether the exchange with a partner is small enough to work on in the event loop."""
        return max(self.partition.numel[rank], self.partition.numel[self._rank]) < INLINE_NUMEL

    # sending

    async def _send_to(self, rank: int, stream: Stream) -> None:
        """Send this member's values of a partner's span, then the means of its own as they become ready."""
        if not (self._owes_values_to(rank) or self._reducer.chunks):
            return
        pieces = Pausing(self._outgoing(rank), self._reducer.progress)
        while not pieces.is_over:
            await pieces.wait()
            if self._is_small(rank):
                await stream.send(*pieces)
            else:
                await stream.send_each(pieces)

    def _owes_values_to(self, rank: int) -> bool:
        return self._weights[self._rank] > 0 and rank in self.partition.reducers

    def _outgoing(self, rank: int) -> Iterator[memoryview | Condition]:
        if self._owes_values_to(rank):
            yield from self._values(rank)
        if self._reducer.chunks:
            yield from self._means(rank)

    def _values(self, reducer: int) -> Iterator[memoryview]:
        yield memoryview(self._label_of(reducer))
        if self.partition.is_exact:
            yield from self._own_values(reducer)
        else:
            yield from self._encoded_values(reducer)

    def _own_values(self, reducer: int) -> Iterator[memoryview]:
        """Unencoded values; each piece is checked just before it is sent, which brings it into the cache."""
        for chunk in self.partition.chunks[reducer]:  # a record in two chunks would cost the reducer a copy
            for piece in chunks_of(chunk, PIECE_NUMEL):
                if not is_finite(self._flat_N[piece]):
                    raise NotFinite("NaN or infinite values cannot be averaged")
                yield bytes_of(self._flat_N[piece])

    def _encoded_values(self, reducer: int) -> Iterator[memoryview]:
        """Encoded chunks. Those of a large span share a buffer, so each is valid until the next is requested."""
        buffer = torch.empty(0, dtype=torch.uint8)
        for chunk, place in zip(self.partition.chunks[reducer], self.partition.places[reducer], strict=True):
            num_bytes = place.stop - place.start
            if buffer.numel() < num_bytes or self._is_small(reducer):
                buffer = torch.empty(num_bytes, dtype=torch.uint8)
            encoded = buffer[:num_bytes]
            self._encode(self._flat_N[chunk], chunk.start, encoded)
            if self._plan.passes_on:
                self._own_encoded[chunk.start] = encoded.clone()
            yield bytes_of(encoded)

    def _means(self, rank: int) -> Iterator[memoryview | Condition]:
        """The means of this member's span as they become ready, then their contributors, norms and products."""
        yield memoryview(self._label_of(self._rank))
        num_sent = 0
        while num_sent < len(self._reducer.chunks):
            num_done, means = self._reducer.done(num_sent)
            if num_done > num_sent:
                yield means
            else:
                yield self._reducer.has_more_than(num_sent)
            num_sent = num_done
        if rank in self.faults:
            return  # its stream ends; a record that lacks the member's values would be a lie to it
        told = self._norms.told() if self._norms is not None else Told([], [])
        yield memoryview(self._records.encode(self._reducer.presents, told))

    def _label_of(self, reducer: int) -> bytes:
        """The header of a span's values, or of a member's own means."""
        return _LABEL.pack(self._flat_N.numel(), self._num_bytes_of(reducer, is_of_means=reducer == self._rank))

    def _num_bytes_of(self, reducer: int, *, is_of_means: bool) -> int:
        return (self.partition.mean_bytes if is_of_means else self.partition.num_bytes)[reducer]

    # receiving

    async def _receive_from(self, rank: int, stream: Stream) -> None:
        """Receive a partner's values of this member's span, then the means of its own."""
        if rank not in self._reducer.inboxes and rank not in self.partition.reducers:
            return
        rooms = Pausing(self._rooms(rank), self._reducer.progress)
        wanted = Wanted.VALUES
        while not rooms.is_over:
            await rooms.wait()
            self.wanted[rank] = wanted
            if self._is_small(rank):
                for room in rooms:
                    await stream.receive_into(room)
            else:
                await stream.receive_each(rooms)
            wanted = self.wanted.pop(rank)

    def _rooms(self, rank: int) -> Iterator[memoryview | Condition]:
        """Buffers for all that a partner sends."""
        inbox = self._reducer.inboxes.get(rank)
        if inbox is not None:
            yield from self._rooms_for_values(rank, inbox)
        if rank in self.partition.reducers:
            self.wanted[rank] = Wanted.MEANS
            yield from self._rooms_for_means(rank)

    def _rooms_for_values(self, rank: int, inbox: Inbox) -> Iterator[memoryview | Condition]:
        """One buffer for each chunk of a member's values; averages a chunk as soon as all values are there."""
        label = bytearray(_LABEL.size)
        yield memoryview(label)
        self._check_label(label, rank, self._rank, Wanted.VALUES)
        for place in self.partition.places[self._rank]:
            if not inbox.has_room:
                yield lambda: inbox.has_room
            encoded = inbox.room(place.stop - place.start)
            yield bytes_of(encoded)
            self._reducer.put(rank, encoded)

    def _rooms_for_means(self, rank: int) -> Iterator[memoryview]:
        """One buffer for each averaged chunk; checks and decodes a chunk as soon as it has come."""
        label = bytearray(_LABEL.size)
        yield memoryview(label)
        self._check_label(label, rank, rank, Wanted.MEANS)
        check = self._new_check(rank) if self._is_checked else None
        if self.partition.is_exact:
            yield from self._rooms_for_exact(rank, check)
        else:
            yield from self._rooms_for_encoded(rank, check)
        record = bytearray(self._records.num_bytes(len(self.partition.chunks[rank])))
        yield memoryview(record)
        presents, told = self._read_record(bytes(record), rank)
        if check is not None and (fault := check.fault(presents, told)):
            raise self._invalid(rank, fault, "the means of ")
        if self._norms is not None:
            self._told_norms[rank] = told.norms
        self._told[rank] = presents

    def _rooms_for_exact(self, rank: int, check: SpanCheck | None) -> Iterator[memoryview]:
        if check is None:
            for piece in chunks_of(self.partition.spans[rank], MEANS_NUMEL):
                averaged = self.averaged_N[piece]
                yield bytes_of(averaged)
                if not is_finite(averaged):
                    raise self._invalid(rank, "are not finite")
                self._hashers[rank].update(bytes_of(averaged))
            return
        # the values that these means overwrite are still to be compared with them
        scratch = torch.empty(min(MEANS_NUMEL, self.partition.numel[rank]), dtype=self._plan.dtype).view(torch.uint8)
        for number, chunk in enumerate(self.partition.chunks[rank]):
            for piece in chunks_of(chunk, MEANS_NUMEL):
                encoded = scratch[: self._plan.num_bytes(piece.start, piece.stop)]
                yield bytes_of(encoded)
                self._decode_and_check(rank, number, piece, check, encoded)
                self._hashers[rank].update(bytes_of(encoded))

    def _rooms_for_encoded(self, rank: int, check: SpanCheck | None) -> Iterator[memoryview]:
        means = self.partition.means
        for number, (chunk, encoded) in enumerate(self._encoded_chunks(rank)):
            yield bytes_of(encoded)
            if check is not None:
                self._decode_and_check(rank, number, chunk, check, encoded)
            else:
                means.decode(encoded, chunk.start, self.averaged_N[chunk])
            if isinstance(means, Gathered):
                self._check_passed_on(rank, chunk, means.slots(encoded))
            self._hashers[rank].update(bytes_of(encoded))

    def _decode_and_check(self, rank: int, number: int, part: slice, check: SpanCheck, encoded: torch.Tensor) -> None:
        """Decode means, and count them for the check, before they overwrite this member's values.

        Args:
            number: of the chunk in which they lie.
            part: of the vector.
        """
        plan, averaged = self._plan, self.averaged_N[part]
        own = self._as_sent(part) if self._owes_values_to(rank) else None
        runs = plan.compared(part.start, part.stop)
        if own is not None and len(runs) == 1 and runs[0][0] == slice(0, len(averaged)):
            segment = runs[0][1]
            product, square, own_square = segment.codec.decode_beside(encoded, averaged, own)
            check.count(number, segment, len(averaged), product, square, own_square)
            return
        if own is not None and self._is_in_place:
            own = own.clone()
        plan.decode(encoded, part.start, averaged)
        check.add(number, part.start, averaged, own)

    @property
    def _is_in_place(self) -> bool:
        return self._flat_N.data_ptr() == self.averaged_N.data_ptr()

    def _new_check(self, reducer: int) -> SpanCheck:
        error = self._plan.error if self._plan.error <= CLOSE else 0.0
        num_chunks = len(self.partition.chunks[reducer])
        return SpanCheck(self._plan, self._rank, self._weights, self.partition.scales, num_chunks, error)

    def _as_sent(self, chunk: slice) -> torch.Tensor:
        """This member's values of a chunk as its reducer has decoded them; nearly so with a codec of small errors.

        Of values that are not encoded it may be a part of a chunk.
        """
        values, plan = self._flat_N[chunk], self._plan
        if self.partition.is_exact:
            return values
        if plan.error <= CLOSE:
            return values
        encoded = torch.empty(plan.num_bytes(chunk.start, chunk.stop), dtype=torch.uint8)
        sent = torch.empty_like(values)
        plan.encode(values, chunk.start, encoded)
        plan.decode(encoded, chunk.start, sent)
        return sent

    def _check_passed_on(self, reducer: int, chunk: slice, slots: dict[int, torch.Tensor]) -> None:
        """Check that a reducer has passed this member's values on unchanged, or left them out; note which it has."""
        present = [rank for rank, slot in slots.items() if slot[0] != ABSENT]
        self._passed_on[reducer].append(present)
        own = self._own_encoded.get(chunk.start)  # None: the reducer cannot have them yet
        if self._rank in present and (own is None or not torch.equal(slots[self._rank][1:], own)):
            raise self._invalid(reducer, "are not those that this peer sent")

    def _check_label(self, label: bytes | bytearray, rank: int, reducer: int, wanted: Wanted) -> None:
        numel, num_bytes = _LABEL.unpack(label)
        if numel != self._flat_N.numel():
            raise self._invalid(rank, f"has {numel} values, not {self._flat_N.numel()}", "the vector of ")
        due = self._num_bytes_of(reducer, is_of_means=wanted is Wanted.MEANS)
        if num_bytes != due:
            raise self._invalid(rank, f"sends {num_bytes} bytes of {wanted.value}, and {due} are due", "")

    def _read_record(self, record: bytes, rank: int) -> tuple[list[list[int]], Told]:
        """The contributors to each chunk of a reducer's span, and what it tells of the members' values."""
        try:
            presents, told = self._records.read(record)
        except BadRecord as error:
            raise self._invalid(rank, f"is invalid: {error}", "the record of ") from error
        if self._plan.passes_on and presents != self._passed_on[rank]:
            raise self._invalid(rank, "are not of the members in its record")
        # a reducer that has lost a member sends it no record
        if self._owes_values_to(rank) and not all(self._rank in present for present in presents):
            raise self._invalid(rank, LEAVES_OUT, "the means of ")
        return presents, told

    # memory

    def _memory_of_means(self, memory: Memory) -> list[torch.Tensor]:
        """Memory for the means as sent, by reducer, uint8; the means' own memory if they are not encoded."""
        if self.partition.is_exact:
            return [self.averaged_N[span].view(torch.uint8) for span in self.partition.spans]
        sizes = self.partition.mean_bytes
        starts = [0, *itertools.accumulate(map(whole_lines, sizes))]
        means = memory.vector(starts[-1], torch.uint8)
        return [means[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def _encoded_chunks(self, rank: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """The chunks of a reducer's span, each with memory for its means as sent."""
        for chunk, place in zip(self.partition.chunks[rank], self.partition.mean_places[rank], strict=True):
            yield chunk, self._encoded[rank][place]


async def _all_or_none(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all tasks; if one fails, cancel the others and raise its error. A cancelled task has not failed."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [error for task in tasks if task.done() and not task.cancelled() and (error := task.exception())]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failed:
        raise failed[0]
