"""One step of a peer whose swarm is too large for one group: a round along each axis of the grid.

Each round computes a weighted mean. A peer brings that mean to its next round, with the sum of all weights in it as its
weight. In a full grid all peers then hold the weighted mean of all, whatever their weights and the lengths of the rows.
After a round that does not commit, a peer goes on with the values that it had; it then holds the mean of fewer peers.

Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking.matchmaker import Meeting
from manyhands.averaging.messages import RoundManifest
from manyhands.averaging.rounds import CommittedRound, RoundMeter, RoundRunner
from manyhands.averaging.timing import ANSWER_S, BRIEF_S, LOOK_S, MOMENT_S
from manyhands.base.deadline import wait_at_most
from manyhands.base.errors import NobodyThere, NothingToAverage, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.runtime.executor import run_to_end

logger = logging.getLogger(__name__)

GATHER_SHARE = 0.5
"""The largest share of a round's remaining time to wait for expected peers; the rest is for the values."""
LOOK_GROWTH = 1.5
"""The factor by which waits between two looks at the others' records grow, from ``LOOK_S`` to ``ANSWER_S``."""


class GridPlace(Meeting, Protocol):
    """A peer's place among the groups, in its current step.

    Attributes:
        called: set when another peer begins a round here, or wants to join one.
    """

    called: asyncio.Event

    @property
    def num_rounds(self) -> int:
        """Number of rounds of the step."""

    @property
    def num_rounds_left(self) -> int | None:
        """Number of rounds of the step that are left, in a grid; None if all peers are one group."""

    def is_left_behind(self) -> bool:
        """Whether another peer has already finished the round that is this peer's next."""

    def next_round(self) -> None:
        """End a round for this peer, whether or not it committed."""


@dataclass
class StepOutcome:
    """The outcome of one step, in one group or in a grid.

    Attributes:
        committed: the last round that committed, with the mean that this peer now holds; None if none did.
        reason: why a round did not commit; empty if all did.
        num_rounds, num_rounds_committed: rounds of the step (1 outside a grid), and those of them that committed.
        num_rounds_alone: rounds in which no other peer was in this one's group, as in a grid with empty cells.
        weight: sum of the weights in the values that this peer holds; its own weight before the first round commits.
        usual_norm: median norm of the values in this peer's first group of a grid; 0 if its round did not commit, or
            without limits.
        manifests: those of all rounds of a grid that committed here.
        is_left_out: whether a group of the grid has committed without this peer's values.
        disagreement: in a grid, the distance between the peers after the step before; see
            :meth:`manyhands.averaging.averager_presence.PresenceTracker.disagreement`.
    """

    committed: CommittedRound | None = None
    reason: str = ""
    num_rounds: int = 1
    num_rounds_committed: int = 0
    num_rounds_alone: int = 0
    meter: RoundMeter = field(default_factory=RoundMeter)
    weight: float = 0.0
    usual_norm: float = 0.0
    manifests: list[RoundManifest] = field(default_factory=list)
    is_left_out: bool = False
    disagreement: float | None = None


@dataclass(eq=False)
class GridSteps:
    """Makes the steps of one peer.

    Args:
        look: reads the records of the others.
    """

    place: GridPlace
    own_id: PeerId
    rounds: RoundRunner
    config: AveragingConfig
    look: Callable[[], Awaitable[None]]
    shapes: Sequence[Sequence[int]]

    async def take(self, outcome: StepOutcome, flat_N: torch.Tensor, weight: float, deadline: float) -> None:
        """Run all rounds of the step that has begun, and write the result to ``outcome``.

        Args:
            deadline: loop time, of all rounds together.
        Raises:
            NothingToAverage: no peer whose values have come here gave a weight.
        """
        place, loop = self.place, asyncio.get_running_loop()
        mean_N = flat_N
        num_empty = 0
        failed = ""
        outcome.num_rounds = place.num_rounds
        outcome.num_rounds_committed = outcome.num_rounds_alone = 0
        outcome.weight = weight
        outcome.usual_norm = 0.0
        try:
            while num_left := place.num_rounds_left:
                round_deadline = loop.time() + (deadline - loop.time()) / num_left
                result = None
                try:
                    result = await self.round(outcome, mean_N, round_deadline, MOMENT_S)
                except NothingToAverage as error:
                    outcome.reason = error.reason
                    num_empty += 1
                if result is None:
                    if not outcome.reason:
                        outcome.num_rounds_alone += 1
                    reason = outcome.reason or "nobody else was there"
                    failed = f"round {place.position().step} did not commit here: {reason}"
                place.next_round()
                if result is not None and num_left == outcome.num_rounds:
                    outcome.usual_norm = result.usual_norm
                if result is not None and result.averaged_N is not None:
                    mean_N = result.averaged_N
                    self._count(outcome, result)
        finally:
            outcome.reason = failed
            while place.num_rounds_left:  # the time was over before the last round
                place.next_round()
        if outcome.committed is None and num_empty == outcome.num_rounds:
            raise NothingToAverage("no peer whose values have come here has any samples", [])

    def _count(self, outcome: StepOutcome, result: CommittedRound) -> None:
        manifest = result.manifest
        own_weight = manifest.weights[manifest.members.index(self.own_id)]
        outcome.is_left_out = outcome.is_left_out or (outcome.weight > 0 and not own_weight > 0)
        outcome.committed = result
        outcome.weight = sum(manifest.weights)
        outcome.manifests.append(manifest)
        outcome.num_rounds_committed += 1

    async def round(
        self,
        outcome: StepOutcome,
        mean_N: torch.Tensor,
        deadline: float,
        alone_s: float,
        refill: Callable[[], torch.Tensor] | None = None,
    ) -> CommittedRound | None:
        """Try until one round commits, its time is over, or no other peer comes; the last reason is in ``outcome``.

        Args:
            alone_s: the longest wait while no other peer is expected.
            refill: as of :meth:`manyhands.averaging.rounds.RoundRunner.average`.
        Raises:
            NothingToAverage: no member has any samples.
        """
        place, loop = self.place, asyncio.get_running_loop()
        is_first = place.num_rounds_left in (None, place.num_rounds)
        least_s = min(BRIEF_S, (deadline - loop.time()) / 2)  # with less time left no new attempt begins
        alone_until = min(loop.time() + alone_s, deadline)
        look_s = LOOK_S
        elsewhere: set[PeerId] = set()  # peers that are done with this round, perhaps without this peer
        outcome.reason = ""
        while (left_s := deadline - loop.time()) >= least_s:
            position = place.position()
            expected = place.attendees().expected.keys()
            if expected - elsewhere or place.called.is_set():
                place.called.clear()
                try:
                    return await self.rounds.average(
                        mean_N,
                        outcome.weight,
                        shapes=self.shapes,
                        timeout_s=left_s,
                        gather_s=min(self._patience_s(), left_s * GATHER_SHARE),
                        meter=outcome.meter,
                        refill=refill,
                        norm_before=None if is_first else outcome.usual_norm,
                    )
                except NothingToAverage:
                    raise
                except NobodyThere as error:
                    outcome.reason = error.reason
                    if not elsewhere:
                        alone_until = min(loop.time() + MOMENT_S, deadline)
                    elsewhere |= expected
                except (RoundAborted, Unavailable) as error:
                    logger.info("An attempt at round %d failed: %s", place.position().step, error)
                    outcome.reason = error.reason if isinstance(error, RoundAborted) else str(error)
                if refill is not None:  # the last attempt may have overwritten the values
                    mean_N = await run_to_end(refill)
            elif loop.time() >= alone_until or place.is_left_behind():
                break
            await wait_at_most(place.called, min(look_s, max(alone_until - loop.time(), LOOK_S)))
            look_s = min(look_s * LOOK_GROWTH, ANSWER_S)
            await self.look()
            if place.position() != position:
                elsewhere.clear()
        return None

    def _patience_s(self) -> float:
        """How long to wait for expected peers: longer in each later round, as they may have waited in the last."""
        num_left = self.place.num_rounds_left or 1
        num_rounds = self.place.num_rounds
        return self.config.matchmaking_time_s * (num_rounds - num_left + 1) / num_rounds
