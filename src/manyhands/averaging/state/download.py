"""Downloads a state from several donors at once, chunk by chunk.

Each donor announces the digests of its chunks first. The newcomer takes the state that has the most in common with
those of the other donors, and asks each donor for the chunks that it holds of that state: a fast donor sends more of
them. A chunk counts once its bytes match its digest, so a donor may leave and its chunks stay. If none of them sends
anything for ``ANSWER_S``, one more is asked; one that is too slow is given up after ``STALL_S``. If no donor is left
that holds a missing chunk, the download fails, and its caller tries again.
"""

from __future__ import annotations

import asyncio
import itertools
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
    STREAM_KIND,
    StateAnswer,
    StateRequest,
    longest_s,
    receive_framed,
)
from manyhands.averaging.timing import ANSWER_S, BRIEF_S, DIAL_S, LOG_S, LOOK_S, RECORD_S, STALL_S
from manyhands.base.deadline import time_limit, wait_at_most, while_moving
from manyhands.base.errors import PeerError, PeerLost, ProtocolViolation, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import readable
from manyhands.runtime.executor import run_to_end
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 1 << 24
MAX_STEPS_AHEAD = 64
"""How many steps a state may be ahead of the requested position: a run goes on while records and requests travel."""

MAX_SOURCES = 4
"""Donors that are asked at a time; up to twice as many while nothing comes."""
CHUNKS_OF_ONE = 4
"""A state of at most this many chunks is downloaded from one donor, as long as that one sends."""
WANTED_AHEAD = 3
"""Chunks that a donor is asked for at a time, before the first of them has come."""
FULL = "full"


@dataclass(eq=False)
class _Source:
    """A donor that has announced its state.

    Attributes:
        digests: the digests of all its chunks.
        asked: chunks that the donor was asked for and has not sent, in order.
    """

    stream: Stream
    header: StateHeader
    digests: list[bytes]
    asked: list[int] = field(default_factory=list)

    def holds(self, index: int, state: State) -> bool:
        """Whether the donor holds one chunk of a state."""
        return index < len(self.digests) and self.digests[index] == state.digests[index]

    def num_equal(self, other: _Source) -> int:
        """The number of chunks that two donors have in common; 0 if their headers describe different states."""
        if _content_of(self.header) != _content_of(other.header):
            return 0
        return sum(one == another for one, another in zip(self.digests, other.digests, strict=True))


@dataclass(eq=False)
class Download:
    """Downloads one state. Lives on the network thread.

    Args:
        donors: peers to ask, the best ones first.
        wanted: states of earlier steps are refused.
        check: raises ValueError if a state does not fit; called before a byte of its tensors is received.
        least_bytes: about its size, or less; a large state is downloaded from several donors from the beginning.
        held: an earlier state, or its beginning; chunks that have not changed since are taken from it.
        num_tensors: download no more than the first tensors; the others, and the digest, are left out.
        on_violation: called with each donor that sent what the protocol does not allow, such as a wrong chunk, and what
            it was.
        on_header: called with each donor that sent a description that fits, and that description.
        kind: kind of the streams, the same as that of the donors' servers.
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
    on_violation: Callable[[PeerId, str], None] = lambda donor, what: None
    on_header: Callable[[PeerId, StateHeader], None] = lambda donor, header: None
    kind: str = STREAM_KIND

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting = list(dict.fromkeys(self.donors))
        self._drawing: dict[PeerId, asyncio.Task[None]] = {}
        self._sources: list[_Source] = []
        self._failures: dict[PeerId, str] = {}
        self._news = asyncio.Event()  # replaced when it is set
        self._moved = (0, -math.inf)  # bytes that the sources have received, and the loop time when that changed
        self._ballot_until = math.inf  # loop time
        self._state: State | None = None  # the chosen one
        self._missing: set[int] = set()
        self._free: list[int] = []  # chunks to ask for; some may have come meanwhile
        self._num_sent: Counter[PeerId] = Counter()  # chunks of each donor
        self._headers: dict[PeerId, StateHeader] = {}  # of donors that hold exactly this state and sent some of it
        self._num_bytes = 0

    async def run(self) -> State:
        """Download the state.

        Raises:
            Unavailable: no donor could send it, or none of those that are left holds all of the chosen one; names each
                with its reason.
        """
        tell_at = self._loop.time() + LOG_S
        try:
            while self._state is None or self._missing:
                self._ask_more()
                if not self._drawing:
                    reasons = "; ".join(f"{donor}: {reason}" for donor, reason in self._failures.items())
                    raise Unavailable(f"no peer could hand out the state of the run: {reasons or 'none is known'}")
                left_s = self._ballot_until - self._loop.time()
                await wait_at_most(self._news, max(0.0, min(BRIEF_S, left_s)))
                for donor in [donor for donor, task in self._drawing.items() if task.done()]:
                    self._ended(donor, self._drawing.pop(donor).exception())
                await self._choose()
                if self._loop.time() >= tell_at and self._state is not None:
                    tell_at = self._loop.time() + LOG_S
                    logger.info(
                        "Received %.1f of %.1f MB of the state from %s", self._num_bytes / 1e6,
                        self._state.content.numel() / 1e6, counted(len(self._sources), "peer"),
                    )  # fmt: skip
        finally:
            for task in self._drawing.values():
                task.cancel()
            await asyncio.gather(*self._drawing.values(), return_exceptions=True)
        header = next(iter(self._headers.values()), self._state.header)
        state = replace(self._state, header=header, donors=tuple(self._headers), num_bytes=self._num_bytes)
        if self.num_tensors is not None:
            return first_of(state, self.num_tensors)
        return with_digests(state, state.digests)

    def _ask_more(self) -> None:
        """Ask further donors, if fewer than needed are asked, or none of them sends anything."""
        now = self._loop.time()
        received = sum(source.stream.bytes_received for source in self._sources)
        if received != self._moved[0]:
            self._moved = (received, now)
        num_needed = MAX_SOURCES if num_chunks_of(self.least_bytes) > CHUNKS_OF_ONE else 1
        if now >= self._moved[1] + ANSWER_S:
            self._moved = (received, now)
            num_needed = max(num_needed, min(len(self._drawing) + 1, 2 * MAX_SOURCES))
        while self._waiting and len(self._drawing) < num_needed:
            donor = self._waiting.pop(0)
            self._drawing[donor] = self._loop.create_task(self._draw_from(donor))
            self._drawing[donor].add_done_callback(lambda _: self._tell())

    def _tell(self) -> None:
        """Wake all that wait: a donor has announced its state or ended, or the state was chosen."""
        self._news.set()
        self._news = asyncio.Event()

    def _ended(self, donor: PeerId, error: BaseException | None) -> None:
        if isinstance(error, (PeerError, Unavailable)):
            level = logging.INFO if isinstance(error, Refused) else logging.WARNING
            logger.log(level, "The state cannot be loaded from peer %s: %s", donor, error)
            self._failures[donor] = str(error)
            if isinstance(error, ProtocolViolation):
                self.on_violation(donor, str(error))
        elif error is not None:
            raise error

    async def _choose(self) -> None:
        """Choose the state that shares the most chunks with those of the other donors; of several, the first one."""
        is_early = len(self._sources) < len(self._drawing) and self._loop.time() < self._ballot_until
        if self._state is not None or not self._sources or is_early:
            return
        shared = [sum(one.num_equal(other) for other in self._sources if other is not one) for one in self._sources]
        best = self._sources[shared.index(max(shared))]
        specs = best.header.tensors
        num_chunks = num_chunks_of(offsets_of(specs[: self.num_tensors])[1])
        content = empty_vector(min(offsets_of(specs)[1], num_chunks * CHUNK_BYTES), torch.uint8)
        self._state = state = State(best.header, content, best.digests)
        self._ballot_until = math.inf
        self._missing = set(range(num_chunks))
        if self.held is not None:
            await self._copy_held(state, self.held)
        self._free = sorted(self._missing)
        self._tell()

    async def _copy_held(self, state: State, held: State) -> None:
        pairs = enumerate(zip(state.digests, held.digests, strict=False))
        same = [index for index, (one, other) in pairs if one == other and index in self._missing]
        await run_to_end(lambda: [_place(held.chunk(index), state.chunk(index)) for index in same])
        self._missing -= set(same)

    # one donor

    async def _draw_from(self, donor: PeerId) -> None:
        """Download from one donor; again while it serves too many others, or if its connection broke after a chunk."""
        full_until = self._loop.time() + RECORD_S
        while True:
            before = self._num_sent[donor]
            try:
                return await self._take_state(donor)
            except PeerLost:
                if self._num_sent[donor] == before:
                    raise
            except Refused as error:
                if error.code != FULL or self._loop.time() > full_until:
                    raise
                await asyncio.sleep(BRIEF_S)

    async def _take_state(self, donor: PeerId) -> None:
        request = msgspec.msgpack.encode(self.request)
        stream = await RunGate(self.endpoint, self.request.run_id, for_observers=True).through(
            donor,
            DIAL_S,
            lambda left_s: self.endpoint.open_bulk(donor, self.kind, request, left_s, size_bytes=self.least_bytes),
        )
        try:
            # the donor copies and hashes its state before it answers
            async with time_limit(RECORD_S, f"waiting for the header of the state of peer {donor}"):
                header = await receive_header(stream)
                check_header(donor, header, self.wanted, self.check)
                self.on_header(donor, header)
                source = _Source(stream, header, await _receive_digests(stream, header))
            async with time_limit(longest_s(header), f"the state of peer {donor}"):
                await self._take_chunks(source)
        except Unavailable:
            self.endpoint.fell_short(stream)
            raise
        finally:
            self.endpoint.release(stream)

    async def _take_chunks(self, source: _Source) -> None:
        donor = source.stream.remote
        self._sources.append(source)
        if self._state is None:  # wait a little for the announcements of others, to choose among their states
            self._ballot_until = min(self._ballot_until, self._loop.time() + LOOK_S)
        self._tell()
        try:
            while (state := self._state) is None:
                await self._news.wait()
            room = memoryview(bytearray(len(state.chunk(0))))
            while self._missing:
                wanted = self._next_chunks(source, state)
                source.asked += wanted
                if wanted:
                    await source.stream.send(b"".join(map(INDEX.pack, wanted)))
                if source.asked:
                    await while_moving(
                        self._take_chunk(source, state, room),
                        lambda: source.stream.bytes_received,
                        at_least=MIN_STALL_BYTES,
                        within_s=STALL_S,
                        phase=f"for the next {MIN_STALL_BYTES} bytes of the state of peer {donor}",
                    )
                elif any(source.holds(index, state) for index in self._missing):
                    await self._news.wait()  # two others were asked for each of these
                else:
                    raise Refused(donor, "differs", "its state differs from the one that is being downloaded")
        finally:
            self._sources.remove(source)
            self._free = [*source.asked, *self._free]
            self._tell()

    def _next_chunks(self, source: _Source, state: State) -> list[int]:
        """Choose the chunks to ask a donor for: some that no other donor was asked for.

        If there are none, it is one that another donor was asked for, and has not sent yet.
        """
        fitting = (index for index in self._free if index in self._missing and source.holds(index, state))
        wanted = list(itertools.islice(fitting, WANTED_AHEAD - len(source.asked)))
        for index in wanted:
            self._free.remove(index)
        if not wanted and not source.asked:
            counts = Counter(itertools.chain(*(other.asked for other in self._sources)))
            once = (index for index, count in counts.items() if count == 1 and index in self._missing)
            wanted = [index for index in once if source.holds(index, state)][:1]
        return wanted

    async def _take_chunk(self, source: _Source, state: State, room: memoryview) -> None:
        """Receive a chunk aside, as another donor may send it as well, and copy it to its place if it is right."""
        donor, index = source.stream.remote, source.asked[0]
        frame = bytearray(FRAME.size)
        await source.stream.receive_into(memoryview(frame))
        if (found := FRAME.unpack(frame)) != (CHUNK, index):
            raise ProtocolViolation(donor, f"sent frame {found[0]} with number {found[1]} in place of a chunk")
        place = state.chunk(index)
        chunk = room[: len(place)]
        await source.stream.receive_into(chunk)
        if not await run_to_end(_place, chunk, place, state.digests[index]):
            raise ProtocolViolation(donor, f"chunk {index} of its state does not match the digest of it")
        source.asked.remove(index)
        self._num_sent[donor] += 1
        if index in self._missing:
            self._missing.discard(index)
            self._num_bytes += len(place)
            if source.digests == state.digests and _content_of(source.header) == _content_of(state.header):
                self._headers[donor] = source.header


def _place(chunk: memoryview, place: memoryview, digest: bytes | None = None) -> bool:
    """Copy a chunk to its place, unless its digest is wrong; returns whether it was copied."""
    if digest is not None and digest_of_chunk(chunk) != digest:
        return False
    place[:] = chunk
    return True


def _content_of(header: StateHeader) -> StateHeader:
    """The part of a header that is equal on all donors of the same state."""
    return msgspec.structs.replace(header, digest=b"", origin=None)


async def receive_header(stream: Stream) -> StateHeader:
    """Receive the header, which a donor sends first; raises ``Refused`` if it sends none."""
    answer = await receive_framed(stream.receive_into, stream.remote, StateAnswer, MAX_HEADER_BYTES, "its state")
    if answer.header is None:
        raise Refused(stream.remote, FULL if answer.is_full else "no_state", readable(answer.reason))
    return answer.header


async def _receive_digests(stream: Stream, header: StateHeader) -> list[bytes]:
    num_chunks = num_chunks_of(offsets_of(header.tensors)[1])
    frame = bytearray(FRAME.size)
    announced = bytearray(num_chunks * DIGEST_BYTES)
    await stream.receive_into(memoryview(frame))
    if (found := FRAME.unpack(frame)) != (DIGESTS, num_chunks):
        raise ProtocolViolation(stream.remote, f"sent frame {found[0]} with number {found[1]} in place of digests")
    await stream.receive_into(memoryview(announced))
    return [bytes(announced[start : start + DIGEST_BYTES]) for start in range(0, len(announced), DIGEST_BYTES)]


def check_header(donor: PeerId, header: StateHeader, wanted: Position, check: Callable[[StateHeader], None]) -> None:
    """Check a header before the tensors are received; raises ``PeerError`` if the state does not fit."""
    if header.position.step < wanted.step:
        raise Refused(donor, "behind", f"its state is of step {header.position.step}, the run is at {wanted.step}")
    if header.position.step > wanted.step + MAX_STEPS_AHEAD:
        raise ProtocolViolation(donor, f"its state is of step {header.position.step}, and the run at {wanted.step}")
    try:
        check(header)
    except ValueError as error:
        raise ProtocolViolation(donor, f"its state does not fit: {readable(str(error))}") from error
