"""Hands the state of a run out to newcomers, in the chunks that they ask for.

A newcomer opens a bulk stream with a :class:`StateRequest`. The donor answers with a :class:`StateAnswer`, and then
with frames: a :data:`FRAME` header, and behind it digests of further chunks, in order, as soon as they are known, or a
chunk. The newcomer sends the index of each chunk that it wants, as :data:`INDEX`, and closes the stream when it has
enough.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TypeVar

import msgspec

from manyhands.access.gate import RunGate
from manyhands.averaging.messages import Position, RecentRounds, read_header
from manyhands.averaging.state.content import (
    State,
    StateHeader,
    digest_of_chunk,
    num_chunks_of,
    offsets_of,
    with_digests,
)
from manyhands.base.deadline import time_limit, wait_at_most, while_moving
from manyhands.base.errors import ConfigError, PeerLost, ProtocolViolation
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import UNREADABLE, readable
from manyhands.runtime import TaskOwner
from manyhands.runtime.executor import run_to_end
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

STREAM_KIND = "state/2"
STALL_TIMEOUT_S = 20.0
MIN_STALL_BYTES = 1 << 18
"""A transfer that moves fewer bytes in the time above is given up, so the size bounds its time."""
MAX_DOWNLOADS = 16
"""Simultaneous downloads from this peer, one for each peer. Further peers must ask another donor, or again."""
MIN_BYTES_PER_S = 32_000
"""Both ends give up a transfer that is slower than this on the whole."""
HASHED_AT_ONCE = 4
"""Chunks, between two announcements of their digests."""
MAX_WANTED = 64
"""Chunks that a newcomer may ask for before it gets the first of them."""

INDEX = struct.Struct(">I")
FRAME = struct.Struct(">BI")
"""The kind of a frame, and a number: of digests that follow, or the index of the chunk that follows."""
DIGESTS, CHUNK = 1, 2


class StateRequest(msgspec.Struct):
    """Opens the stream: asks for a run's current state.

    Attributes:
        is_late: the peer's last downloaded state was out of date on arrival.
        is_onlooker: the peer will not train from the state, as an evaluator.
    """

    run_id: str
    is_late: bool = False
    is_onlooker: bool = False


class StateAnswer(msgspec.Struct):
    """Sent first, prefixed by its length. Without a header nothing follows, and ``reason`` says why.

    Attributes:
        is_full: without a header, as this peer serves many others now; asking again later may help.
    """

    header: StateHeader | None = None
    reason: str = ""
    recent_rounds: RecentRounds = []  # reserved
    is_full: bool = False


make_ready(StateRequest, StateAnswer)


class Snapshot:
    """A copy of the state whose chunks are being hashed; it does not change any more.

    Attributes:
        digests: of the first chunks, so far.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.digests: list[bytes] = []
        self.num_chunks = num_chunks_of(state.content.numel())
        self._listeners: dict[asyncio.Event, None] = {}  # in order, so that simulations repeat

    @contextmanager
    def listening(self, news: asyncio.Event) -> Iterator[None]:
        """Set ``news`` whenever more digests are known."""
        self._listeners[news] = None
        try:
            yield
        finally:
            self._listeners.pop(news, None)

    async def hash(self) -> None:
        """Compute the digests of all chunks."""
        while (start := len(self.digests)) < self.num_chunks:
            indices = range(start, min(start + HASHED_AT_ONCE, self.num_chunks))
            self.digests += await run_to_end(lambda part=indices: [digest_of_chunk(self.state.chunk(i)) for i in part])
            for news in self._listeners:
                news.set()
        self.state = with_digests(self.state, self.digests)


class StateServer:
    """Serves this peer's state to others.

    Args:
        capture: copies the current state, on an executor thread; newcomers are told if it raises ``ConfigError``.
        kind: of the streams; a peer has one server for each.

    Attributes:
        state_bytes: size of the tensors of the last state that was copied.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: str,
        capture: Callable[[], State],
        position: Callable[[], Position],
        *,
        kind: str = STREAM_KIND,
    ) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._capture = capture
        self._position = position
        self.state_bytes = 0
        self._snapshot: weakref.ref[Snapshot] | None = None  # lives as long as a peer downloads it
        self._capturing = asyncio.Lock()
        self._serving: set[PeerId] = set()
        self._downloads = _Downloads()
        self._late_downloads = _Downloads()
        self._tasks = TaskOwner("state server")
        self._kind = kind
        endpoint.accept_bulk(kind, self._on_stream, RunGate(endpoint, run_id, for_observers=True).check)

    async def close(self) -> None:
        """Accept no more downloads."""
        self._endpoint.refuse_bulk(self._kind)
        await self._tasks.close()

    def followers(self, patience_s: float, *, by_latecomers: bool = False) -> set[PeerId]:
        """Future trainers that download the state now, or finished within the last ``patience_s`` seconds.

        Args:
            by_latecomers: only peers whose last download took longer than a step of the run.
        """
        return (self._late_downloads if by_latecomers else self._downloads).recent(patience_s)

    @contextmanager
    def following(self, remote: PeerId, *, is_late: bool = False) -> Iterator[None]:
        """Within the block, a peer counts as one that downloads the state."""
        with self._downloads.one_more(remote), self._late_downloads.one_more(remote) if is_late else nullcontext():
            yield

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        request, refusal = read_header(remote, header, StateRequest), None
        if request.run_id != self._run_id:
            refusal = StateAnswer(reason=f"this peer trains {self._run_id!r}")
        elif remote in self._serving or len(self._serving) >= MAX_DOWNLOADS:
            refusal = StateAnswer(reason="it hands the state out as often as it can already", is_full=True)
        else:
            with ExitStack() as counting:
                self._serving.add(remote)
                counting.callback(self._serving.discard, remote)
                if not request.is_onlooker:
                    counting.enter_context(self.following(remote, is_late=request.is_late))
                try:
                    snapshot = await self._current()
                except ConfigError as error:  # a user has resized a tensor, say
                    refusal = StateAnswer(reason=str(error))
                else:
                    async with time_limit(longest_s(snapshot.state.header), f"handing the state out to peer {remote}"):
                        await self._serve(stream, snapshot)
        if refusal is not None:
            await send_moving(stream, framed(refusal))
        await stream.close(STALL_TIMEOUT_S)

    async def _serve(self, stream: Stream, snapshot: Snapshot) -> None:
        """Send what the newcomer asks for until it closes the stream, or asks for nothing for long."""
        state, wanted, news = snapshot.state, deque[int](), asyncio.Event()
        logger.info("peer %s downloads the state of step %d", stream.remote, state.header.position.step)
        await send_moving(stream, framed(StateAnswer(state.header)))
        reading = asyncio.get_running_loop().create_task(_take_requests(stream, snapshot, wanted, news))
        reading.add_done_callback(lambda _: news.set())
        num_announced = 0
        try:
            with snapshot.listening(news):
                while not reading.done():
                    news.clear()
                    if digests := snapshot.digests[num_announced:]:
                        num_announced += len(digests)
                        await send_moving(stream, FRAME.pack(DIGESTS, len(digests)), *digests)
                    elif wanted:
                        index = wanted.popleft()
                        await send_moving(stream, FRAME.pack(CHUNK, index), snapshot.state.chunk(index))
                    else:
                        await wait_at_most(news, STALL_TIMEOUT_S)
                        if not news.is_set():
                            return
            reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _current(self) -> Snapshot:
        async with self._capturing:  # newcomers at the same step share one copy
            snapshot = self._snapshot() if self._snapshot is not None else None
            if snapshot is None or snapshot.state.header.position != self._position():
                snapshot = Snapshot(await run_to_end(self._capture))
                self._snapshot, self.state_bytes = weakref.ref(snapshot), snapshot.state.content.numel()
                self._tasks.spawn(snapshot.hash(), name="hashing the state")
            return snapshot


async def _take_requests(stream: Stream, snapshot: Snapshot, wanted: deque[int], news: asyncio.Event) -> None:
    """Queue the chunks that a newcomer asks for, until it closes the stream."""
    request = bytearray(INDEX.size)
    with suppress(PeerLost):
        while True:
            await stream.receive_into(memoryview(request))
            (index,) = INDEX.unpack(request)
            if index >= snapshot.num_chunks or len(wanted) >= MAX_WANTED:
                raise ProtocolViolation(stream.remote, f"it asks for chunk {index} of {snapshot.num_chunks}")
            wanted.append(index)
            news.set()


class _Downloads:
    """Counts the downloads in progress, and when others ended."""

    def __init__(self) -> None:
        self._open: list[PeerId] = []
        self._ended_at: dict[PeerId, float] = {}  # loop time

    @contextmanager
    def one_more(self, peer_id: PeerId) -> Iterator[None]:
        self._open.append(peer_id)
        try:
            yield
        finally:
            self._open.remove(peer_id)
            self._ended_at[peer_id] = asyncio.get_running_loop().time()

    def recent(self, patience_s: float) -> set[PeerId]:
        since = asyncio.get_running_loop().time() - patience_s
        self._ended_at = {peer_id: at for peer_id, at in self._ended_at.items() if at >= since}
        return {*self._open, *self._ended_at}


def longest_s(header: StateHeader) -> float:
    """Time limit of a transfer, at both ends."""
    return STALL_TIMEOUT_S + offsets_of(header.tensors)[1] / MIN_BYTES_PER_S


def framed(answer: msgspec.Struct) -> bytes:
    """An answer on the wire, behind its length."""
    encoded = msgspec.msgpack.encode(answer)
    return len(encoded).to_bytes(4, "big") + encoded


async def receive_framed(
    receive_into: Callable[[memoryview], Awaitable[None]], remote: PeerId, kind: type[T], max_bytes: int, what: str
) -> T:
    """Receive what :func:`framed` made.

    Args:
        what: was asked for, for the error.
    Raises:
        ProtocolViolation: it is longer than ``max_bytes``, or cannot be read.
    """
    prefix = bytearray(4)
    await receive_into(memoryview(prefix))
    num_bytes = int.from_bytes(prefix, "big")
    if num_bytes > max_bytes:
        raise ProtocolViolation(remote, f"the header of {what} has {num_bytes} bytes")
    encoded = bytearray(num_bytes)
    await receive_into(memoryview(encoded))
    try:
        return msgspec.msgpack.decode(encoded, type=kind)
    except UNREADABLE as error:
        raise ProtocolViolation(remote, f"the header of {what} cannot be read: {readable(str(error))}") from error


async def send_moving(stream: Stream, *buffers: bytes | memoryview) -> None:
    """Send as long as the other end takes something."""
    phase = f"for peer {stream.remote} to take the next {MIN_STALL_BYTES} bytes of the state"
    await while_moving(
        stream.send(*buffers),
        lambda: stream.bytes_sent,
        at_least=MIN_STALL_BYTES,
        within_s=STALL_TIMEOUT_S,
        phase=phase,
    )
