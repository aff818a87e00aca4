"""Sends the state of a run to a newcomer: one bulk stream with a header, then the tensors."""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import msgspec

from manyhands.access.gate import RunGate
from manyhands.averaging.messages import Position, RecentRounds
from manyhands.base.deadline import time_limit, while_moving
from manyhands.base.errors import PeerError, ProtocolViolation, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready
from manyhands.optim.manifest import RunManifest
from manyhands.optim.state.state import (
    State,
    StateHeader,
    as_bytes,
    checked_scalars,
    digest_of,
    empty_tensors,
    itemsize_of,
)
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import UNREADABLE, readable
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

STREAM_KIND = "state"
OPENING_S = 5.0
HEADER_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 20.0
MIN_STALL_BYTES = 1 << 18
"""A transfer that moves fewer bytes in the time above is given up, so the size bounds its time."""
MAX_DOWNLOAD_S = 86400.0
"""Limit for all donors together; only states too large for a link's daily volume reach it."""

MAX_HEADER_BYTES = 1 << 24
MAX_STEPS_AHEAD = 64
"""How many steps a state may be ahead of the requested position: a run goes on while records and requests travel."""
MAX_DOWNLOADS = 8
"""Simultaneous downloads from this peer, one for each peer. Further peers must ask another donor, or again."""
MIN_BYTES_PER_S = 32_000
"""Both ends give up a transfer that is slower than this on the whole."""


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
    """Sent before the tensors, prefixed by its length. Without a header no tensors follow, and ``reason`` says why.

    Attributes:
        recent_rounds: in a grid, of the steps that led to the state; see :mod:`manyhands.optim.run.partition_detector`.
    """

    header: StateHeader | None = None
    reason: str = ""
    recent_rounds: RecentRounds = []


make_ready(StateRequest, StateAnswer)


class StateServer:
    """Serves this peer's state to others.

    Args:
        capture: copies the current state; called on an executor thread.
        position: of this peer.
        recent_rounds: of its last steps in a grid.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: str,
        capture: Callable[[], State],
        position: Callable[[], Position],
        recent_rounds: Callable[[], list[bytes]] = list,
    ) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._capture = capture
        self._position = position
        self._recent_rounds = recent_rounds
        self._captured: weakref.ref[State] | None = None  # lives as long as a peer downloads it
        self._capturing = asyncio.Lock()
        self._serving: set[PeerId] = set()
        self._downloads = _Downloads()
        self._late_downloads = _Downloads()
        endpoint.accept_bulk(STREAM_KIND, self._on_stream, RunGate(endpoint, run_id, for_observers=True).check)

    def close(self) -> None:
        self._endpoint.refuse_bulk(STREAM_KIND)

    def followers(self, patience_s: float, *, by_latecomers: bool = False) -> set[PeerId]:
        """Future trainers that download the state now, or finished within the last ``patience_s`` seconds.

        Args:
            by_latecomers: only peers whose last download took longer than a step of the run.
        """
        return (self._late_downloads if by_latecomers else self._downloads).recent(patience_s)

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        try:
            request = msgspec.msgpack.decode(header, type=StateRequest)
        except UNREADABLE as error:
            raise ProtocolViolation(remote, "a stream header that cannot be read") from error
        if request.run_id != self._run_id:
            await _send(stream, _encoded(StateAnswer(reason=f"this peer trains {self._run_id!r}")))
        elif remote in self._serving or len(self._serving) >= MAX_DOWNLOADS:
            await _send(stream, _encoded(StateAnswer(reason="it hands the state out as often as it can already")))
        else:
            with ExitStack() as counting:
                self._serving.add(remote)
                counting.callback(self._serving.discard, remote)
                if not request.is_onlooker:
                    counting.enter_context(self._downloads.one_more(remote))
                if request.is_late:
                    counting.enter_context(self._late_downloads.one_more(remote))
                state = await self._current_state()
                async with time_limit(_longest_s(state.header), f"handing the state out to peer {remote}"):
                    await self._send_state(stream, state)
                    await _wait_until_taken(stream)
        await stream.close(STALL_TIMEOUT_S)

    async def _send_state(self, stream: Stream, state: State) -> None:
        logger.info("peer %s downloads the state of step %d", stream.remote, state.header.position.step)
        await _send(stream, _encoded(StateAnswer(state.header, recent_rounds=state.recent_rounds)))
        for tensor in state.tensors:
            await _send(stream, as_bytes(tensor))

    async def _current_state(self) -> State:
        async with self._capturing:  # newcomers at the same step share one copy
            state = self._captured() if self._captured is not None else None
            rounds = self._recent_rounds()
            if state is None or (state.header.position, state.recent_rounds) != (self._position(), rounds):
                state = replace(await asyncio.get_running_loop().run_in_executor(None, self._capture),
                                recent_rounds=rounds)  # fmt: skip
                self._captured = weakref.ref(state)
            return state


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


async def download_state(
    endpoint: Endpoint,
    manifest: RunManifest,
    donors: Sequence[PeerId],
    wanted: Position,
    *,
    is_late: bool = False,
    is_onlooker: bool = False,
) -> State:
    """Download the state of a run from the first donor that sends all of it.

    Args:
        manifest: of the run; the state must fit it.
        donors: peers to ask, in this order.
        wanted: states of earlier global steps are refused.
        is_late: this peer's last downloaded state was out of date on arrival.
        is_onlooker: this peer will not train from the state, so no donor need wait for it.
    Raises:
        Unavailable: no donor could; names each with its reason.
    """
    request = StateRequest(manifest.run_id, is_late, is_onlooker)
    failures = []
    for donor in donors:
        try:
            return await _download_from(endpoint, manifest, donor, wanted, request)
        except (Unavailable, PeerError) as error:
            logger.warning("the state cannot be loaded from peer %s: %s", donor, error)
            failures.append(f"{donor}: {error}")
    raise Unavailable("no peer could hand out the state of the run: " + ("; ".join(failures) or "none is known"))


async def _download_from(
    endpoint: Endpoint, manifest: RunManifest, donor: PeerId, wanted: Position, request: StateRequest
) -> State:
    size_bytes = sum(4 * math.prod(spec.shape) for spec in manifest.tensors)  # about; more with the optimizer's state
    stream = await RunGate(endpoint, manifest.run_id, for_observers=True).through(
        donor,
        OPENING_S,
        lambda left_s: endpoint.open_bulk(
            donor, STREAM_KIND, msgspec.msgpack.encode(request), left_s, size_bytes=size_bytes
        ),
    )
    try:
        async with time_limit(HEADER_TIMEOUT_S, f"waiting for the header of the state of peer {donor}"):
            header, recent_rounds = await _receive_header(stream)
        _check_header(donor, header, manifest, wanted)
        tensors = empty_tensors(header.tensors)
        async with time_limit(_longest_s(header), f"the state of peer {donor}"):
            for tensor in tensors:
                await _receive(stream, as_bytes(tensor))
    finally:
        endpoint.release(stream)
    loop = asyncio.get_running_loop()
    digest = await loop.run_in_executor(None, digest_of, header.tensors, header.scalars, tensors)
    if digest != header.digest:
        raise ProtocolViolation(donor, "the state that it sent does not match its digest")
    return State(header, tensors, recent_rounds, donor)


async def _receive_header(stream: Stream) -> tuple[StateHeader, list[bytes]]:
    prefix = bytearray(4)
    await stream.receive_into(memoryview(prefix))
    num_bytes = int.from_bytes(prefix, "big")
    if num_bytes > MAX_HEADER_BYTES:
        raise ProtocolViolation(stream.remote, f"the header of its state has {num_bytes} bytes")
    encoded = bytearray(num_bytes)
    await stream.receive_into(memoryview(encoded))
    try:
        answer = msgspec.msgpack.decode(encoded, type=StateAnswer)
    except UNREADABLE as error:
        raise ProtocolViolation(
            stream.remote, f"the header of its state cannot be read: {readable(str(error))}"
        ) from error
    if answer.header is None:
        raise Refused(stream.remote, "no_state", readable(answer.reason))
    return answer.header, answer.recent_rounds


def _check_header(donor: PeerId, header: StateHeader, manifest: RunManifest, wanted: Position) -> None:
    """Refuse a state that does not fit before receiving its tensors."""
    if header.position.step < wanted.step:
        raise Refused(donor, "behind", f"its state is of step {header.position.step}, the run is at {wanted.step}")
    if header.position.step > wanted.step + MAX_STEPS_AHEAD:
        raise ProtocolViolation(donor, f"its state is of step {header.position.step}, and the run at {wanted.step}")
    try:
        checked_scalars(header, manifest.tensors, len(manifest.hyper_parameters))
    except ValueError as error:
        raise ProtocolViolation(donor, f"its state does not fit: {readable(str(error))}") from error


def _longest_s(header: StateHeader) -> float:
    """Time limit of a transfer, at both ends."""
    num_bytes = sum(math.prod(spec.shape) * itemsize_of(spec) for spec in header.tensors)
    return STALL_TIMEOUT_S + num_bytes / MIN_BYTES_PER_S


def _encoded(answer: StateAnswer) -> bytes:
    encoded = msgspec.msgpack.encode(answer)
    return len(encoded).to_bytes(4, "big") + encoded


async def _wait_until_taken(stream: Stream) -> None:
    """Wait until the other end closes the stream: much of what was sent may still be on its way."""
    with suppress(PeerError, Unavailable):
        async with time_limit(STALL_TIMEOUT_S, f"for peer {stream.remote} to have the rest of the state"):
            await stream.receive_into(memoryview(bytearray(1)))


async def _send(stream: Stream, data: bytes | memoryview) -> None:
    phase = f"for peer {stream.remote} to take the next {MIN_STALL_BYTES} bytes of the state"
    await while_moving(
        stream.send(data), lambda: stream.bytes_sent, at_least=MIN_STALL_BYTES, within_s=STALL_TIMEOUT_S, phase=phase
    )


async def _receive(stream: Stream, view: memoryview) -> None:
    phase = f"for the next {MIN_STALL_BYTES} bytes of the state of peer {stream.remote}"
    await while_moving(
        stream.receive_into(view),
        lambda: stream.bytes_received,
        at_least=MIN_STALL_BYTES,
        within_s=STALL_TIMEOUT_S,
        phase=phase,
    )
