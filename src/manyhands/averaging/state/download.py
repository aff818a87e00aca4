"""Downloads a state from several donors at once, chunk by chunk.

Each donor announces the digests of its chunks. Donors whose announcements agree hold the same state, bit by bit, and
share the work: a fast one is asked for more. A chunk counts once its bytes match its digest, whoever sent it, so
nothing is lost with a donor. Of donors that differ, as machines of unlike kinds do by rounding, the larger group is
asked; if all of these fail, so does the download.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import msgspec
import torch

from manyhands.access.gate import RunGate
from manyhands.averaging.memory import empty_vector
from manyhands.averaging.messages import Position
from manyhands.averaging.state.content import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    State,
    StateHeader,
    digest_of_chunk,
    first_of,
    num_chunks_of,
    offsets_of,
    with_digests,
)
from manyhands.averaging.state.server import (
    CHUNK,
    DIGESTS,
    FRAME,
    INDEX,
    MIN_STALL_BYTES,
    STALL_TIMEOUT_S,
    STREAM_KIND,
    StateAnswer,
    StateRequest,
    longest_s,
    receive_framed,
)
from manyhands.base.deadline import time_limit, wait_at_most, while_moving
from manyhands.base.errors import PeerError, PeerLost, ProtocolViolation, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import readable
from manyhands.runtime.executor import run_to_end
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

OPENING_S = 5.0
HEADER_TIMEOUT_S = 30.0
MAX_DOWNLOAD_S = 86400.0
"""Limit for all donors together; only states too large for a link's daily volume reach it."""
MAX_HEADER_BYTES = 1 << 24
MAX_STEPS_AHEAD = 64
"""How many steps a state may be ahead of the requested position: a run goes on while records and requests travel."""

MAX_SOURCES = 4
"""Donors that send at a time."""
CHUNKS_OF_ONE = 4
"""A state of at most so many chunks is asked of one donor, as long as that one sends."""
WANTED_AHEAD = 3
"""Chunks that a donor is asked for before the first of them is there."""
PATIENCE_S = 2.0
"""A donor that sends nothing for this time is not counted, and one more is asked."""
LOOK_PERIOD_S = 0.5
MAX_LOSSES = 2
"""Connections to one donor that are lost before it is given up."""
MAX_FULL_S = 30.0
"""Donors that are busy with others are asked again for this time."""
TELL_PERIOD_S = 10.0
BALLOT_S = 0.3
"""From the first announcement on, others are waited for as long before one of several states is chosen."""
FULL = "full"


@dataclass(eq=False)
class _Source:
    """A donor that sends.

    Attributes:
        digests: of the first chunks, as announced so far.
        asked: chunks that it was asked for and has not sent, in order.
        num_bytes: received when it was last looked at.
        moved_at: loop time at which that changed.
        is_idle: it has nothing to send, as others were asked for all that is missing.
    """

    donor: PeerId
    stream: Stream
    header: StateHeader
    moved_at: float
    digests: list[bytes] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    num_bytes: int = 0
    is_idle: bool = False

    @property
    def num_announced(self) -> int:
        """Chunks of its whole state."""
        return num_chunks_of(offsets_of(self.header.tensors)[1])

    @property
    def has_voted(self) -> bool:
        """Whether its first digests are there."""
        return bool(self.digests) or self.num_announced == 0


class _Differs(Refused):
    """A donor holds another state than the one that is being downloaded."""

    def __init__(self, donor: PeerId) -> None:
        super().__init__(donor, "differs", "its state differs from the one that is being downloaded")


@dataclass(eq=False)
class Download:
    """Downloads one state: the one that most of the first donors announce. Lives on the network thread.

    Args:
        donors: peers to ask, the best ones first.
        wanted: states of earlier steps are refused.
        check: raises ValueError if a state does not fit; called before a byte of its tensors is received.
        least_bytes: about; a large state is asked of several donors from the begin.
        held: an earlier state, or its beginning; chunks that have not changed since are taken from it.
        num_tensors: download no more than the first tensors; the others, and the digest, are left out.
        on_violation: called with each donor that sent what the protocol does not allow, such as a wrong chunk.
        kind: of the streams, as of the donors' servers.
    """

    endpoint: Endpoint
    request: StateRequest
    donors: Sequence[PeerId]
    wanted: Position
    check: Callable[[StateHeader], None]
    _: KW_ONLY
    least_bytes: int
    held: State | None = None
    num_tensors: int | None = None
    on_violation: Callable[[PeerId], None] = lambda donor: None
    kind: str = STREAM_KIND

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting = list(dict.fromkeys(self.donors))
        self._full: list[PeerId] = []
        self._overtaken: list[PeerId] = []
        self._num_losses: Counter[PeerId] = Counter()
        self._failures: dict[PeerId, str] = {}
        self._drawing: dict[PeerId, asyncio.Task[None]] = {}
        self._opened_at: dict[PeerId, float] = {}  # of those that have not answered yet
        self._sources: list[_Source] = []
        self._chosen = asyncio.Event()
        self._changed = asyncio.Event()  # chunks may be asked for that could not before
        self._news = asyncio.Event()  # a donor has answered or ended, or all is there
        self._ballot_until = math.inf  # loop time; then the state of most is chosen
        self._state: State | None = None
        self._num_chunks = 0  # the first ones of the state, which are downloaded
        self._digests: list[bytes] = []  # of the first chunks; none before a state is chosen
        self._missing: set[int] = set()
        self._arriving: dict[int, PeerId] = {}  # chunks that are received to their places, and from whom
        self._free: list[int] = []  # a heap of the chunks that nobody was asked for, and of some that are here
        self._headers: dict[PeerId, StateHeader] = {}  # of the donors whose chunks are here
        self._num_bytes = 0

    async def run(self) -> State:
        """Returns the state.

        Raises:
            Unavailable: no donor could send it, or all that hold the chosen one failed; names each with its reason.
        """
        full_until, tell_at = self._loop.time() + MAX_FULL_S, self._loop.time() + TELL_PERIOD_S
        try:
            while not self._is_complete:
                self._ask_more()
                await self._choose()
                now = self._loop.time()
                if self._drawing:
                    await wait_at_most(self._news, max(0.0, min(LOOK_PERIOD_S, self._ballot_until - now)))
                    self._news.clear()
                elif self._full and self._loop.time() < full_until:
                    await asyncio.sleep(LOOK_PERIOD_S)
                    self._waiting, self._full = self._full, []
                else:
                    reasons = "; ".join(f"{donor}: {reason}" for donor, reason in self._failures.items())
                    raise Unavailable(f"no peer could hand out the state of the run: {reasons or 'none is known'}")
                for donor in [donor for donor, task in self._drawing.items() if task.done()]:
                    self._ended(donor, self._drawing.pop(donor))
                if self._loop.time() >= tell_at:
                    tell_at = self._loop.time() + TELL_PERIOD_S
                    self._tell()
        finally:
            await self._stop(*self._drawing)
        assert self._state is not None
        header = next(iter(self._headers.values()), self._state.header)
        state = replace(self._state, header=header, donors=tuple(self._headers), num_bytes=self._num_bytes)
        if self.num_tensors is not None:
            return first_of(state, self.num_tensors)
        return with_digests(state, self._digests)

    @property
    def _is_complete(self) -> bool:
        return self._state is not None and not self._missing and len(self._digests) >= self._num_chunks

    def _tell(self) -> None:
        if self._state is not None:
            logger.info(
                "Received %.1f of %.1f MB of the state from %s",
                self._num_bytes / 1e6, self._state.content.numel() / 1e6, counted(len(self._sources), "peer"),
            )  # fmt: skip

    # whom to ask

    def _ask_more(self) -> None:
        """Begin with further donors, if fewer than needed are sending."""
        if not self._drawing and not self._waiting:
            self._waiting, self._overtaken = self._overtaken, []
        now = self._loop.time()
        for source in self._sources:
            if source.num_bytes != source.stream.bytes_received or source.is_idle:
                source.num_bytes, source.moved_at = source.stream.bytes_received, now
        num_moving = sum(now < source.moved_at + PATIENCE_S for source in self._sources)
        num_moving += sum(now < opened_at + PATIENCE_S for opened_at in self._opened_at.values())
        is_large = max(self._num_chunks, num_chunks_of(self.least_bytes)) > CHUNKS_OF_ONE
        num_needed = MAX_SOURCES if is_large else 1
        while self._waiting and num_moving < num_needed and len(self._drawing) < 2 * MAX_SOURCES:
            donor = self._waiting.pop(0)
            self._opened_at[donor] = now
            self._drawing[donor] = self._loop.create_task(self._draw_from(donor))
            self._drawing[donor].add_done_callback(lambda _: self._news.set())
            num_moving += 1

    async def _choose(self) -> None:
        """Choose the state that most of the first donors announce; of equally many, that of the first one."""
        voters = [source for source in self._sources if source.has_voted]
        if self._state is not None or not voters:
            return
        self._ballot_until = min(self._ballot_until, self._loop.time() + BALLOT_S)
        if len(voters) < len(self._drawing) and self._loop.time() < self._ballot_until:
            return
        common = min(len(source.digests) for source in voters)
        votes = [(_content_of(source.header), source.digests[:common]) for source in voters]
        most = max(votes, key=votes.count)
        header = voters[votes.index(most)].header
        num_bytes = offsets_of(header.tensors)[1]
        self._num_chunks = num_chunks_of(offsets_of(header.tensors[: self.num_tensors])[1])
        self._state = State(header, empty_vector(min(num_bytes, self._num_chunks * CHUNK_BYTES), torch.uint8))
        self._missing, self._free = set(range(self._num_chunks)), list(range(self._num_chunks))
        self._digests, self._ballot_until = list(most[1]), math.inf
        for source in [source for source, vote in zip(voters, votes, strict=True) if vote != most]:
            await self._stop(source.donor)
            del self._drawing[source.donor]
            self._failures[source.donor] = _Differs(source.donor).message
        await self._copy_held(0)
        self._chosen.set()

    def _ended(self, donor: PeerId, task: asyncio.Task[None]) -> None:
        """Decide what becomes of a donor that sends no more."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self._overtaken.append(donor)
        elif isinstance(error, _Differs):
            self._failures[donor] = error.message
        elif isinstance(error, Refused) and error.code == FULL:
            self._failures[donor] = error.message
            self._full.append(donor)
        elif isinstance(error, (PeerError, Unavailable)):
            logger.warning("the state cannot be loaded from peer %s: %s", donor, error)
            self._failures[donor] = str(error)
            self._num_losses[donor] += 1
            if isinstance(error, ProtocolViolation):
                self.on_violation(donor)
            if isinstance(error, PeerLost) and donor in self._headers and self._num_losses[donor] < MAX_LOSSES:
                self._waiting.append(donor)
        elif error is not None:
            raise error

    async def _stop(self, *donors: PeerId) -> None:
        tasks = [self._drawing[donor] for donor in donors]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # one donor

    async def _draw_from(self, donor: PeerId) -> None:
        """Take chunks from one donor until all are there."""
        try:
            stream = await self._open(donor)
            try:
                async with time_limit(HEADER_TIMEOUT_S, f"waiting for the header of the state of peer {donor}"):
                    header = await receive_header(stream)
                check_header(donor, header, self.wanted, self.check)
                self._compare(donor, header)
                self._opened_at.pop(donor)
                self._news.set()
                async with time_limit(longest_s(header), f"the state of peer {donor}"):
                    await self._take_chunks(_Source(donor, stream, header, self._loop.time()))
            finally:
                self.endpoint.release(stream)
        finally:
            self._opened_at.pop(donor, None)

    async def _open(self, donor: PeerId) -> Stream:
        request = msgspec.msgpack.encode(self.request)
        return await RunGate(self.endpoint, self.request.run_id, for_observers=True).through(
            donor,
            OPENING_S,
            lambda left_s: self.endpoint.open_bulk(donor, self.kind, request, left_s, size_bytes=self.least_bytes),
        )

    def _compare(self, donor: PeerId, header: StateHeader) -> None:
        if self._state is not None and _content_of(header) != _content_of(self._state.header):
            raise _Differs(donor)

    async def _take_chunks(self, source: _Source) -> None:
        self._sources.append(source)
        try:
            while not self._is_complete:
                if self._state is None and source.has_voted:
                    self._news.set()
                    await self._chosen.wait()  # or until it is cancelled
                    self._compare(source.donor, source.header)
                    await self._compare_digests(source)
                await self._ask(source)
                if source.asked or self._state is None or len(source.digests) < self._num_chunks:
                    phase = f"for the next {MIN_STALL_BYTES} bytes of the state of peer {source.donor}"
                    await while_moving(
                        self._take_frame(source),
                        lambda: source.stream.bytes_received,
                        at_least=MIN_STALL_BYTES,
                        within_s=STALL_TIMEOUT_S,
                        phase=phase,
                    )
                else:
                    source.is_idle = True
                    self._changed.clear()
                    await self._changed.wait()  # until it is cancelled, at the latest
                    source.is_idle = False
        finally:
            self._sources.remove(source)
            for index in source.asked:
                if not self._is_asked(index):
                    heapq.heappush(self._free, index)
            self._changed.set()

    async def _ask(self, source: _Source) -> None:
        """Ask for chunks that nobody else was asked for; at the end for one that another donor has not sent yet."""
        first = len(source.asked)
        while len(source.asked) < WANTED_AHEAD and self._free and self._free[0] < len(source.digests):
            index = heapq.heappop(self._free)
            if index in self._missing:
                source.asked.append(index)
        if not source.asked and len(source.digests) >= self._num_chunks:
            others = sorted((other for other in self._sources if other.asked), key=lambda other: other.moved_at)
            twice = Counter(index for other in others for index in other.asked if index in self._missing)
            source.asked += [index for index, count in twice.items() if count == 1][:1]
        if requests := [INDEX.pack(index) for index in source.asked[first:]]:
            await source.stream.send(b"".join(requests))

    def _is_asked(self, index: int) -> bool:
        return any(index in source.asked for source in self._sources)

    async def _take_frame(self, source: _Source) -> None:
        frame = bytearray(FRAME.size)
        await source.stream.receive_into(memoryview(frame))
        kind, number = FRAME.unpack(frame)
        if kind == DIGESTS and 0 < number <= source.num_announced - len(source.digests):
            await self._take_digests(source, number)
        elif kind == CHUNK and source.asked and number == source.asked[0]:
            await self._take_chunk(source, number)
        else:
            raise ProtocolViolation(source.donor, f"sent frame {kind} with number {number} in place of a chunk")

    async def _take_digests(self, source: _Source, number: int) -> None:
        announced = bytearray(number * DIGEST_BYTES)
        await source.stream.receive_into(memoryview(announced))
        source.digests += [
            bytes(announced[start : start + DIGEST_BYTES]) for start in range(0, len(announced), DIGEST_BYTES)
        ]
        if self._state is not None:
            await self._compare_digests(source)

    async def _compare_digests(self, source: _Source) -> None:
        """Check that a donor holds the state that was chosen, and take over what it has announced first."""
        if any(one != other for one, other in zip(source.digests, self._digests, strict=False)):
            raise _Differs(source.donor)
        first = len(self._digests)
        self._digests += source.digests[first:]
        await self._copy_held(first)
        self._changed.set()

    async def _copy_held(self, first: int) -> None:
        """Take chunks that have not changed from the earlier state."""
        state, held = self._state, self.held
        assert state is not None
        for index in range(first, min(len(self._digests), len(held.digests) if held is not None else 0)):
            assert held is not None
            if index in self._missing and not self._is_asked(index) and held.digests[index] == self._digests[index]:
                self._missing.discard(index)
                await run_to_end(_copy, state.chunk(index), held.chunk(index))

    async def _take_chunk(self, source: _Source, index: int) -> None:
        """Receive a chunk to its place, or aside if it is there or another donor's bytes are arriving there."""
        state = self._state
        assert state is not None
        place = state.chunk(index)
        if index in self._missing and index not in self._arriving:
            self._arriving[index] = source.donor
            try:
                await self._receive_checked(source, index, place)
            finally:
                del self._arriving[index]
        else:
            aside = memoryview(bytearray(len(place)))
            await self._receive_checked(source, index, aside)
            if index in self._missing and index in self._arriving:
                await self._stop(self._arriving[index])  # one that only receives, so no two wait for each other
            if index in self._missing:
                self._arriving[index] = source.donor
                try:
                    await run_to_end(_copy, place, aside)
                finally:
                    del self._arriving[index]
        source.asked.remove(index)
        if index in self._missing:
            self._missing.discard(index)
            self._headers[source.donor] = source.header
            self._num_bytes += len(place)
            self._changed.set()

    async def _receive_checked(self, source: _Source, index: int, view: memoryview) -> None:
        await source.stream.receive_into(view)
        if await run_to_end(digest_of_chunk, view) != source.digests[index]:
            raise ProtocolViolation(source.donor, f"chunk {index} of its state does not match the digest of it")


def _copy(to: memoryview, from_: memoryview) -> None:
    to[:] = from_


def _content_of(header: StateHeader) -> StateHeader:
    """What must be equal on donors that hold the same state."""
    return msgspec.structs.replace(header, digest=b"", origin=None)


async def receive_header(stream: Stream) -> StateHeader:
    """Receive what a donor sends first."""
    answer = await receive_framed(stream.receive_into, stream.remote, StateAnswer, MAX_HEADER_BYTES, "its state")
    if answer.header is None:
        raise Refused(stream.remote, FULL if answer.is_full else "no_state", readable(answer.reason))
    return answer.header


def check_header(donor: PeerId, header: StateHeader, wanted: Position, check: Callable[[StateHeader], None]) -> None:
    """Refuse a state that does not fit before receiving its tensors."""
    if header.position.step < wanted.step:
        raise Refused(donor, "behind", f"its state is of step {header.position.step}, the run is at {wanted.step}")
    if header.position.step > wanted.step + MAX_STEPS_AHEAD:
        raise ProtocolViolation(donor, f"its state is of step {header.position.step}, and the run at {wanted.step}")
    try:
        check(header)
    except ValueError as error:
        raise ProtocolViolation(donor, f"its state does not fit: {readable(str(error))}") from error
