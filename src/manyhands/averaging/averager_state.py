"""Hands the tensors of an averager out to its newcomers, and loads those of another peer."""

from __future__ import annotations

import asyncio
import random

from manyhands.averaging.codecs import is_finite
from manyhands.averaging.messages import Position
from manyhands.averaging.presence import PresenceTracker
from manyhands.averaging.state.content import LoadedState, State, StateHeader, offsets_of, state_of
from manyhands.averaging.state.download import Download
from manyhands.averaging.state.server import STREAM_KIND, StateRequest, StateServer
from manyhands.averaging.tensor_list import TensorList
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError, Unavailable
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.rpc import Endpoint
from manyhands.runtime.executor import run_to_end

LOOK_TIMEOUT_S = 5.0


class AveragerState:
    """The tensors of one averager as a state. Lives on the network thread.

    Attributes:
        position: at which the tensors got their values, by a round or from another peer. A peer that only knows of a
            higher one goes there for the next round, with values that nobody should load.
    """

    def __init__(
        self, endpoint: Endpoint, run_id: str, tensors: TensorList, tracker: PresenceTracker, rng: random.Random
    ) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._tensors = tensors
        self._tracker = tracker
        self._rng = rng
        self._specs = [
            ParameterSpec(f"tensor {number}", spec.shape, spec.dtype) for number, spec in enumerate(tensors.specs)
        ]
        self.position = Position(0, b"")
        self._kind = f"{run_id}.{STREAM_KIND}"  # this peer may serve an optimizer and other averagers as well
        self._server = StateServer(endpoint, run_id, self._capture, lambda: self.position, kind=self._kind)

    async def close(self) -> None:
        await self._server.close()

    def _capture(self) -> State:
        header = StateHeader(self.position, 0, self._specs, b"", b"")
        return self._tensors.between_writes(lambda tensors: state_of(header, tensors))

    def _check(self, header: StateHeader) -> None:
        sent = [(spec.shape, spec.dtype) for spec in header.tensors]
        if sent != [(spec.shape, spec.dtype) for spec in self._specs]:
            raise ValueError("it has tensors of other shapes or dtypes")

    async def load(self) -> LoadedState:
        """Load the tensors of the peers at the leading position.

        Raises:
            Unavailable: there is none, or none could send them; no tensor was written.
        """
        loop, tracker = asyncio.get_running_loop(), self._tracker
        begun = loop.time()
        try:
            async with time_limit(LOOK_TIMEOUT_S, "reading who averages"):
                await tracker.refresh()
        except ManyhandsError as error:
            raise Unavailable(str(error)) from error
        position, donors = tracker.holders()
        if not donors:
            raise Unavailable(f"no other peer that averages under run id {self._run_id!r} can be asked for its tensors")
        self._rng.shuffle(donors)  # so that newcomers do not all ask the same one
        state = await Download(
            self._endpoint, StateRequest(self._run_id, is_onlooker=True), donors, position, self._check,
            least_bytes=offsets_of(self._specs)[1], kind=self._kind,
        ).run()  # fmt: skip
        if not await run_to_end(lambda: all(is_finite(tensor) for tensor in state.tensors)):
            raise Unavailable(f"the tensors of peer {', '.join(state.donors)} have values that are not finite")
        await run_to_end(self._tensors.assign_each, state.tensors)
        self.position = state.header.position
        return LoadedState(state.header.position.step, 0, state.donors, state.num_bytes, loop.time() - begun)
