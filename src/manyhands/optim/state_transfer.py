"""How a newcomer gets the state of the run: one call for the header, one bulk stream for the tensors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from manyhands.averaging.messages import Position
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerError, ProtocolViolation, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.run_manifest import TensorSpec
from manyhands.optim.state import State, StateHeader, as_bytes, digest_of, empty_tensors, num_bytes_of
from manyhands.rpc import Endpoint, Method
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

STREAM_KIND = "state"
HEADER_TIMEOUT_S = 30.0
DOWNLOAD_TIMEOUT_S = 600.0
STALL_TIMEOUT_S = 20.0
MAX_STATISTICS_PER_PARAMETER = 8


class StateRequest(msgspec.Struct):
    """Asks for the header of a run's current state."""

    run_id: str


class StateStreamHeader(msgspec.Struct):
    """Opens the stream of a state whose header was read before."""

    run_id: str
    digest: bytes


DESCRIBE = Method("state.describe", StateRequest, StateHeader)


class StateServer:
    """Hands out the state of this peer.

    Args:
        capture: copies the current state; called on an executor thread, at most once for each position.
        position: where this peer stands.
    """

    def __init__(
        self, endpoint: Endpoint, run_id: str, capture: Callable[[], State], position: Callable[[], Position]
    ) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._capture = capture
        self._position = position
        self._captured: State | None = None
        self._capturing = asyncio.Lock()
        endpoint.handle(DESCRIBE, self._on_describe)
        endpoint.accept_bulk(STREAM_KIND, self._on_stream)

    def close(self) -> None:
        self._endpoint.unhandle(DESCRIBE)
        self._endpoint.refuse_bulk(STREAM_KIND)

    async def _on_describe(self, remote: PeerId, request: StateRequest) -> StateHeader:
        if request.run_id != self._run_id:
            raise Refused(self._endpoint.peer_id, "other_run", f"this peer trains {self._run_id!r}")
        async with self._capturing:  # newcomers at the same step share one copy
            if self._captured is None or self._captured.header.position != self._position():
                self._captured = await asyncio.get_running_loop().run_in_executor(None, self._capture)
        logger.info("peer %s downloads the state of step %d", remote, self._captured.header.position.step)
        return self._captured.header

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        try:
            request = msgspec.msgpack.decode(header, type=StateStreamHeader)
        except msgspec.DecodeError as error:
            raise ProtocolViolation(remote, "a stream header that cannot be read") from error
        state = self._captured
        if state is None or request.run_id != self._run_id or request.digest != state.header.digest:
            return  # it has changed since; the closed stream tells
        async with time_limit(DOWNLOAD_TIMEOUT_S, f"sending the state to peer {remote}"):
            for tensor in state.tensors:
                await stream.send(as_bytes(tensor))
        await stream.close(STALL_TIMEOUT_S)


async def download_state(
    endpoint: Endpoint, run_id: str, donors: Sequence[PeerId], parameters: Sequence[TensorSpec]
) -> State:
    """Get the state of a run from the first donor that hands it out whole.

    Args:
        donors: peers to ask, in this order.
        parameters: what the state must fit: shapes and dtypes, in order.
    Raises:
        Unavailable: no donor could; it names each with its reason.
    """
    failures = []
    for donor in donors:
        try:
            async with time_limit(DOWNLOAD_TIMEOUT_S, f"downloading the state from peer {donor}"):
                return await _download_from(endpoint, run_id, donor, parameters)
        except (Unavailable, PeerError) as error:
            logger.warning("the state cannot be loaded from peer %s: %s", donor, error)
            failures.append(f"{donor}: {error}")
    raise Unavailable("no peer could hand out the state of the run: " + ("; ".join(failures) or "none is known"))


async def _download_from(endpoint: Endpoint, run_id: str, donor: PeerId, parameters: Sequence[TensorSpec]) -> State:
    header = await endpoint.call(donor, DESCRIBE, StateRequest(run_id), HEADER_TIMEOUT_S)
    _check_header(donor, header, parameters)
    request = msgspec.msgpack.encode(StateStreamHeader(run_id, header.digest))
    stream = await endpoint.open_bulk(donor, STREAM_KIND, request)
    try:
        tensors = empty_tensors(header.tensors)
        for tensor in tensors:
            view = as_bytes(tensor)
            for start in range(0, len(view), 1 << 20):  # so that a deadline can see progress
                async with time_limit(STALL_TIMEOUT_S, f"for the next bytes of the state from peer {donor}"):
                    await stream.receive_into(view[start : start + (1 << 20)])
    finally:
        endpoint.release(stream)
    loop = asyncio.get_running_loop()
    digest = await loop.run_in_executor(None, digest_of, header.tensors, header.scalars, tensors)
    if digest != header.digest:
        raise ProtocolViolation(donor, "the state that it sent does not match its digest")
    return State(header, tensors)


def _check_header(donor: PeerId, header: StateHeader, parameters: Sequence[TensorSpec]) -> None:
    """Refuse what does not fit before a byte of it is received."""
    for own, sent in zip(parameters, header.tensors, strict=False):
        if own.shape != sent.shape or own.dtype != sent.dtype:
            raise ProtocolViolation(donor, f"its tensor {own.name} has shape {sent.shape}, here it is {own.shape}")
    try:
        num_bytes = num_bytes_of(header.tensors)
    except KeyError as error:
        raise ProtocolViolation(donor, f"its state has tensors of unknown type {error}") from error
    limit = (1 + MAX_STATISTICS_PER_PARAMETER) * (num_bytes_of(parameters) + 1024 * len(parameters))
    if len(header.tensors) < len(parameters) or num_bytes > limit:
        raise ProtocolViolation(donor, f"its state has {len(header.tensors)} tensors of {num_bytes} bytes")
