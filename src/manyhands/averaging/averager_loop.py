"""One averager's part in its run, on the network thread.

It finds other peers, tries rounds until one commits, hands its tensors out to newcomers, and loads those of others.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence

import torch

from manyhands.averaging.averager_presence import PresenceTracker
from manyhands.averaging.codecs import is_finite
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.grid.step import GridSteps, StepOutcome
from manyhands.averaging.messages import Position
from manyhands.averaging.rounds import RoundRunner
from manyhands.averaging.sketch import packed, sketched_indices
from manyhands.averaging.state.content import LoadedState, State, StateHeader, offsets_of, state_of
from manyhands.averaging.state.download import Download
from manyhands.averaging.state.server import STREAM_KIND, StateRequest, StateServer
from manyhands.averaging.tensor_list import TensorList
from manyhands.averaging.timing import BRIEF_S, LATE_ANSWER_S, LOOK_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.peer import Presence
from manyhands.runtime.executor import run_to_end

logger = logging.getLogger(__name__)

LOOK_SHARE = 0.25
"""A step waits at most this share of its time to read the others' records; then it uses those read before."""
ALONE_SHARE = 0.8
"""A step waits at most this share of its time for any other peer to come."""
CLOSED = "this averager is closed"


class AveragerLoop:
    """The rounds and the presence of one averager. May be closed twice.

    Attributes:
        reached: the position after the last step that committed.
        loop: the event loop on which this object lives; set by :meth:`start`.
        is_closed: whether it was closed, by its user or with the peer; may be read from any thread.
        position: where the tensors got their values, in a round or from another peer. The position of the tracker may
            be higher: a peer that missed rounds goes there for the next round, with values that nobody should load.
    """

    def __init__(self, presence: Presence, run_id: str, tensors: TensorList, config: AveragingConfig) -> None:
        self._presence = presence
        self._run_id = run_id
        self._tensors = tensors
        self._config = config
        self._running: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()  # a step that Ctrl-C ended may still be ending here
        self.is_closed = False
        self.reached = self.position = Position(0, b"")
        self._specs = [
            ParameterSpec(f"tensor {number}", spec.shape, spec.dtype) for number, spec in enumerate(tensors.specs)
        ]
        self._kind = f"{run_id}.{STREAM_KIND}"  # the peer may serve an optimizer and other averagers as well
        self._last_group: Sequence[PeerId] = ()  # members of the last round that committed

    async def start(self) -> None:
        """Join the averagers under the run id; raises as :class:`manyhands.Averager`."""
        self.loop = asyncio.get_running_loop()
        async with self._presence.leaving:
            pass  # wait for an averager to leave that was garbage-collected a moment ago
        await self._presence.check_run(self._run_id)
        presence = self._presence
        codec = self._config.codec
        max_group_size = self._config.max_group_size
        settings = f"codec {codec}; groups of up to {max_group_size}"
        fingerprint = hashlib.sha256(self._tensors.fingerprint() + settings.encode()).digest()
        self.tracker = PresenceTracker(
            presence.endpoint,
            presence.dht,
            self._run_id,
            fingerprint,
            f"{self._tensors.summary()}; {settings}",
            max_group_size=max_group_size,
            rng=presence.rng,
        )
        self.rounds = RoundRunner(
            presence.endpoint, self._run_id, fingerprint, self.tracker, self._config, presence.rng
        )
        try:
            await self.tracker.start()
        except BaseException:
            await self.rounds.close()
            raise
        if elsewhere := await self.tracker.elsewhere():
            logger.warning(
                "None of the peers that this one knows averages under run id %r; they average under %s. This peer "
                "begins it; if that is not meant, check the run id",
                self._run_id, ", ".join(map(repr, elsewhere)),
            )  # fmt: skip
        self._server = StateServer(
            presence.endpoint, self._run_id, self._capture, lambda: self.position, kind=self._kind
        )
        presence.on_close.append(self.close)

    async def close(self) -> None:
        """Leave the run; a running step ends, and says so. A second call waits for the first."""
        async with self._presence.leaving:
            if self.close not in self._presence.on_close:
                return
            self.is_closed = True
            try:
                for task in self._running:
                    task.cancel()
                await self._server.close()
                await self.rounds.close()
                await self.tracker.close()
            finally:
                self._presence.on_close.remove(self.close)

    async def close_lost(self) -> None:
        """Leave the run after the averager was garbage-collected without close(): so the others do not wait for it."""
        if not self.is_closed:
            logger.info("The Averager of run %r is gone without close(): this peer leaves the run", self._run_id)
            await self.close()

    async def step(self, flat_N: torch.Tensor, weight: float, timeout_s: float) -> StepOutcome:
        """Try rounds until one commits or the time is over; raises as :meth:`manyhands.Averager.step`.

        Args:
            flat_N: the values of the tensors; the means overwrite them where one group is enough.
        """
        if self.is_closed:
            return StepOutcome(reason=CLOSED)
        self._presence.check_own(self._run_id)
        outcome = StepOutcome()
        loop = asyncio.get_running_loop()
        running = loop.create_task(self._try(outcome, flat_N, weight, loop.time() + timeout_s))
        self._running.add(running)
        try:
            await asyncio.wait([running], timeout=timeout_s)
            is_late = not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self._running.discard(running)
        if not running.cancelled():
            running.result()
        if outcome.committed is not None:
            self._last_group = outcome.committed.manifest.members
            self.reached = self.tracker.position()
        elif is_late:
            outcome.reason = f"no round committed within {timeout_s:g} s; {outcome.reason or 'the last one went on'}"
        elif running.cancelled():
            outcome.reason = CLOSED
        return outcome

    async def wait_for_others(self, timeout_s: float) -> bool:
        """Wait until the others of the last round have its result or have left; returns whether they have in time.

        A peer publishes its new position once it holds the result.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self.is_closed and (left_s := deadline - loop.time()) > 0:
            await self._look(min(left_s, LATE_ANSWER_S))
            if not self.tracker.is_ahead_of(self._last_group):
                return True
            await asyncio.sleep(LOOK_S)
        return False

    async def load(self) -> LoadedState:
        """Load the tensors of the peers at the leading position.

        Raises:
            Unavailable: no other peer can be asked, or none could send its tensors; no tensor was written.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await self._look(LATE_ANSWER_S)
        position, donors = self.tracker.holders()
        if not donors:
            raise Unavailable(f"no other peer that averages under run id {self._run_id!r} can be asked for its tensors")
        self._presence.rng.shuffle(donors)  # so that newcomers do not all ask the same one
        state = await Download(
            self._presence.endpoint, StateRequest(self._run_id, is_onlooker=True), donors, position, self._check,
            least_bytes=offsets_of(self._specs)[1], kind=self._kind,
        ).run()  # fmt: skip
        if not await run_to_end(lambda: all(is_finite(tensor) for tensor in state.tensors)):
            raise Unavailable(f"the tensors of peer {', '.join(state.donors)} have values that are not finite")
        await run_to_end(self._tensors.assign_each, state.tensors)
        self.position = state.header.position
        return LoadedState(state.header.position.step, 0, state.donors, state.num_bytes, loop.time() - begun)

    def _capture(self) -> State:
        header = StateHeader(self.position, 0, self._specs, b"", b"")
        return self._tensors.between_writes(lambda tensors: state_of(header, tensors))

    def _check(self, header: StateHeader) -> None:
        sent = [(spec.shape, spec.dtype) for spec in header.tensors]
        if sent != [(spec.shape, spec.dtype) for spec in self._specs]:
            raise ValueError("it has tensors of other shapes or dtypes")

    async def _try(self, outcome: StepOutcome, flat_N: torch.Tensor, weight: float, deadline: float) -> None:
        async with self._one_at_a_time:
            loop, tracker = asyncio.get_running_loop(), self.tracker
            time_s = deadline - loop.time()

            async def look() -> None:
                await self._look(min(LATE_ANSWER_S, LOOK_SHARE * time_s))
                tracker.catch_up()

            own_id, shapes = self._presence.peer_id, self._tensors.shapes
            steps = GridSteps(tracker, own_id, self.rounds, self._config, look, shapes)
            while True:
                await look()
                tracker.begin_step()
                if tracker.num_rounds_left is None:
                    await self._try_in_one_group(steps, outcome, flat_N, weight, deadline)
                    return
                try:
                    await steps.take(outcome, flat_N, weight, deadline)
                finally:
                    outcome.disagreement = tracker.disagreement()  # from the records that were read during the step
                    if outcome.committed is not None and outcome.committed.averaged_N is not None:
                        mean_N = outcome.committed.averaged_N
                        indices = sketched_indices(mean_N.numel(), tracker.position().step)
                        tracker.tell(packed(mean_N[indices].tolist()))
                if outcome.committed is not None or deadline - loop.time() < BRIEF_S:
                    return

    async def _try_in_one_group(
        self, steps: GridSteps, outcome: StepOutcome, flat_N: torch.Tensor, weight: float, deadline: float
    ) -> None:
        outcome.num_rounds, outcome.weight = 1, weight
        time_s = deadline - asyncio.get_running_loop().time()
        alone_s = min(self._config.matchmaking_time_s, ALONE_SHARE * time_s)
        outcome.committed = await steps.round(outcome, flat_N, deadline, alone_s, self._tensors.values)
        if outcome.committed is not None:
            outcome.num_rounds_committed = 1
            self.tracker.move(outcome.committed.manifest)
        elif not outcome.reason:
            nobody = f"no other peer averages under run id {self._run_id!r}"
            outcome.reason = next(iter(self.tracker.misfits()), nobody)

    async def _look(self, timeout_s: float) -> None:
        try:
            async with time_limit(timeout_s, "reading who averages"):
                await self.tracker.refresh()
        except ManyhandsError as error:
            logger.info("The records of the others cannot be read: %s", error)
