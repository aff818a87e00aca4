"""Hands the state of a run out to newcomers, in the chunks that they ask for.

A newcomer opens a bulk stream with a :class:`StateRequest`. The donor answers with a :class:`StateAnswer`, and then
with frames, each behind a :data:`FRAME` header: the first has the digests of all chunks, each later one has one chunk.
The newcomer sends the index of each chunk that it wants, as :data:`INDEX`, and closes the stream when it has enough.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import msgspec

from manyhands.access.gate import RunGate
from manyhands.averaging.messages import Position, read_header
from manyhands.averaging.state.content import State, StateHeader, offsets_of, sealed
from manyhands.averaging.timing import MINUTE_S, STALL_S
from manyhands.base.deadline import time_limit, while_moving
from manyhands.base.errors import ConfigError, PeerLost, ProtocolViolation, Timeout
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import UNREADABLE, readable
from manyhands.runtime.executor import run_to_end
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

STREAM_KIND = "state/2"
MIN_STALL_BYTES = 1 << 18
"""A transfer that moves fewer bytes in ``STALL_S`` is given up, so the size bounds its time."""
MAX_DOWNLOADS = 16
"""Limit of simultaneous downloads from this peer, one by each newcomer. Others must ask another donor, or ask again."""
MIN_BYTES_PER_S = 32_000
"""Both ends give up a transfer whose mean rate is lower."""

INDEX = struct.Struct(">I")
FRAME = struct.Struct(">BI")
"""The kind of a frame, and a number: of digests that follow, or the index of the chunk that follows."""
DIGESTS, CHUNK = 1, 2


class StateRequest(msgspec.Struct):
    """Opens the stream: asks for a run's current state.

    Attributes:
        is_onlooker: whether the peer will not train from the state, such as an evaluator.
    """

    run_id: str
    is_onlooker: bool = False


class StateAnswer(msgspec.Struct):
    """Sent first, prefixed by its length. Without a header nothing follows, and ``reason`` says why.

    Attributes:
        is_full: whether there is no header because too many peers are served now; asking again later may help.
    """

    header: StateHeader | None = None
    reason: str = ""
    is_full: bool = False


make_ready(StateRequest, StateAnswer)


class StateServer:
    """Serves this peer's state to others.

    Args:
        capture: copies the current state, on an executor thread; newcomers are told if it raises ``ConfigError``.
        kind: kind of the streams; a peer has one server for each kind.

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
        self._copy: weakref.ref[State] | None = None  # is freed when no peer downloads it
        self._capturing = asyncio.Lock()
        self._serving: set[PeerId] = set()
        self._following: list[PeerId] = []  # peers that download
        self._ended_at: dict[PeerId, float] = {}  # loop times
        self._kind = kind
        endpoint.accept_bulk(kind, self._on_stream, RunGate(endpoint, run_id, for_observers=True).check)

    async def close(self) -> None:
        """Accept no more downloads."""
        self._endpoint.refuse_bulk(self._kind)

    def followers(self, patience_s: float) -> set[PeerId]:
        """Future trainers that download the state now, or finished within the last ``patience_s`` seconds."""
        since = asyncio.get_running_loop().time() - patience_s
        return {*self._following, *(peer_id for peer_id, ended_at in self._ended_at.items() if ended_at >= since)}

    @contextmanager
    def following(self, remote: PeerId) -> Iterator[None]:
        """Within the block, a peer counts as one that downloads the state."""
        self._following.append(remote)
        try:
            yield
        finally:
            self._following.remove(remote)
            now = asyncio.get_running_loop().time()
            self._ended_at = {one: ended_at for one, ended_at in self._ended_at.items() if ended_at > now - MINUTE_S}
            self._ended_at[remote] = now

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        request, answer = read_header(remote, header, StateRequest), None
        if request.run_id != self._run_id:
            answer = StateAnswer(reason=f"this peer trains {self._run_id!r}")
        elif remote in self._serving or len(self._serving) >= MAX_DOWNLOADS:
            answer = StateAnswer(reason="it already hands the state out to as many peers as it can", is_full=True)
        else:
            self._serving.add(remote)
            try:
                with nullcontext() if request.is_onlooker else self.following(remote):
                    state = await self._current()
                    async with time_limit(longest_s(state.header), f"handing the state out to peer {remote}"):
                        await _serve(stream, state)
            except ConfigError as error:  # such as: the user has resized a tensor
                logger.warning("This peer cannot hand its state out: %s", error)
                answer = StateAnswer(reason=str(error))
            finally:
                self._serving.discard(remote)
        if answer is not None:
            await send_moving(stream, framed(answer))
        await stream.close(STALL_S)

    async def _current(self) -> State:
        async with self._capturing:  # newcomers at the same step share one copy
            state = self._copy() if self._copy is not None else None
            if state is None or state.header.position != self._position():
                state = await run_to_end(self._sealed_copy)
                self._copy = weakref.ref(state)
            return state

    def _sealed_copy(self) -> State:
        state = self._capture()
        self.state_bytes = state.content.numel()
        return sealed(state)


async def _serve(stream: Stream, state: State) -> None:
    """Send the chunks that a newcomer asks for until it closes the stream, or asks for nothing for long."""
    remote, request = stream.remote, bytearray(INDEX.size)
    logger.info("Peer %s downloads the state of step %d", remote, state.header.position.step)
    await send_moving(
        stream, framed(StateAnswer(state.header)), FRAME.pack(DIGESTS, len(state.digests)), *state.digests
    )
    while True:
        try:
            async with time_limit(STALL_S, f"peer {remote} to ask for a chunk of the state"):
                await stream.receive_into(memoryview(request))
        except (PeerLost, Timeout):
            return
        (index,) = INDEX.unpack(request)
        if index >= len(state.digests):
            raise ProtocolViolation(remote, f"it asks for chunk {index} of {len(state.digests)}")
        await send_moving(stream, FRAME.pack(CHUNK, index), state.chunk(index))


def longest_s(header: StateHeader) -> float:
    """Time limit of a transfer in seconds, at both ends."""
    return STALL_S + offsets_of(header.tensors)[1] / MIN_BYTES_PER_S


def framed(answer: msgspec.Struct) -> bytes:
    """An answer on the wire, behind its length."""
    encoded = msgspec.msgpack.encode(answer)
    return len(encoded).to_bytes(4, "big") + encoded


async def receive_framed(
    receive_into: Callable[[memoryview], Awaitable[None]], remote: PeerId, kind: type[T], max_bytes: int, what: str
) -> T:
    """Receive what :func:`framed` made.

    Args:
        what: names what was asked for, in errors.
    Raises:
        ProtocolViolation: the answer is longer than ``max_bytes``, or cannot be read.
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
    """Send for as long as the other end takes enough of it; see :data:`MIN_STALL_BYTES`."""
    phase = f"for peer {stream.remote} to take the next {MIN_STALL_BYTES} bytes of the state"
    await while_moving(
        stream.send(*buffers),
        lambda: stream.bytes_sent,
        at_least=MIN_STALL_BYTES,
        within_s=STALL_S,
        phase=phase,
    )
