"""One step of a peer whose swarm is too large for one group: a round along each axis of the grid.

Each round is a weighted mean, and its result counts with all the weight behind it: the weights in a group of the next
round are what its members bring. In a full grid all then hold the weighted mean of all peers, whatever their weights
and the lengths of the rows. After a round that does not commit a peer goes on with the values it had; it then holds the
mean of fewer peers.

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
from manyhands.averaging.matchmaking.candidates import Roster
from manyhands.averaging.messages import RoundManifest
from manyhands.averaging.rounds import CommittedRound, RoundMeter, RoundRunner
from manyhands.base.deadline import wait_at_most
from manyhands.base.errors import NobodyThere, NothingToAverage, RoundAborted, Unavailable
from manyhands.base.identity import PeerId

logger = logging.getLogger(__name__)

MIN_ATTEMPT_S = 0.5
"""With less time than this no new attempt begins."""
GATHER_SHARE = 0.5
"""The largest share of a round's remaining time to wait for expected peers; the rest is for the values."""
ALONE_S = 1.0
"""The longest wait in a group in which no other peer is expected, or all others have gone on."""
LOOK_S = 0.2
NO_SAMPLES = "no peer whose values have come here has any samples"


class GridPlace(Roster, Protocol):
    """A peer's place among the groups, in its current step.

    Attributes:
        called: set when another peer begins a round here, or wants to join one.
    """

    called: asyncio.Event

    @property
    def num_rounds(self) -> int:
        """Of the step."""

    @property
    def num_rounds_left(self) -> int | None:
        """Of the step, in a grid; None if all are one group."""

    def is_left_behind(self) -> bool:
        """Whether others are done with the next round."""

    def next_round(self) -> None:
        """End a round for this peer, whether or not it committed."""


@dataclass
class StepOutcome:
    """The outcome of one step, in one group or in a grid.

    Attributes:
        committed: the last round that committed, with the mean that this peer now holds; None if none did.
        reason: why a round did not commit; empty if all did.
        num_rounds, num_rounds_committed: of the step; above 1 in a grid.
        weight: behind the mean, in a grid.
        usual_norm: of the values in this peer's first group of a grid; 0 if none committed here, or without limits.
        manifests: of all rounds of a grid that committed here.
        is_left_out: a group of the grid has committed without this peer's values.
        disagreement: in a grid, of the step before; see
            :meth:`manyhands.averaging.presence.PresenceTracker.disagreement`.
    """

    committed: CommittedRound | None = None
    reason: str = ""
    num_rounds: int = 1
    num_rounds_committed: int = 0
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
        part: as for :meth:`manyhands.averaging.rounds.RoundRunner.average`.
    """

    place: GridPlace
    own_id: PeerId
    rounds: RoundRunner
    config: AveragingConfig
    look: Callable[[], Awaitable[None]]
    shapes: Sequence[Sequence[int]]
    part: int = 0

    async def take(self, outcome: StepOutcome, flat_N: torch.Tensor, weight: float, deadline: float) -> None:
        """Run all rounds of the step that has begun, and write the result to ``outcome``.

        Args:
            deadline: loop time, of all rounds together.
        Raises:
            NothingToAverage: no peer whose values have come here gave a weight.
        """
        place, loop = self.place, asyncio.get_running_loop()
        mean_N, num_empty = flat_N, 0
        outcome.num_rounds, outcome.num_rounds_committed = place.num_rounds, 0
        outcome.reason, outcome.weight, outcome.usual_norm = "", weight, 0.0
        try:
            while num_left := place.num_rounds_left:
                round_deadline = loop.time() + (deadline - loop.time()) / num_left
                try:
                    result = await self._round(outcome, mean_N, round_deadline)
                except NothingToAverage as error:
                    outcome.reason = f"a round did not commit here: {error.reason}"
                    result, num_empty = None, num_empty + 1
                place.next_round()
                if result is not None and num_left == outcome.num_rounds:
                    outcome.usual_norm = result.usual_norm
                if result is not None and result.averaged_N is not None:
                    mean_N = result.averaged_N
                    self._count(outcome, result)
        finally:
            while place.num_rounds_left:  # the time was over before the last round
                place.next_round()
        if outcome.committed is None and num_empty == outcome.num_rounds:
            raise NothingToAverage(NO_SAMPLES, [])

    def _count(self, outcome: StepOutcome, result: CommittedRound) -> None:
        manifest = result.manifest
        own_weight = manifest.weights[manifest.members.index(self.own_id)]
        outcome.is_left_out = outcome.is_left_out or (outcome.weight > 0 and not own_weight > 0)
        outcome.committed, outcome.weight = result, sum(manifest.weights)
        outcome.manifests.append(manifest)
        outcome.num_rounds_committed += 1

    async def _round(self, outcome: StepOutcome, mean_N: torch.Tensor, deadline: float) -> CommittedRound | None:
        """Try until a round commits or its time is over.

        Raises:
            NothingToAverage: no member has any samples.
        """
        place, loop = self.place, asyncio.get_running_loop()
        number, is_first = place.position().step, place.num_rounds_left == place.num_rounds
        alone_until = min(loop.time() + ALONE_S, deadline)
        elsewhere: set[PeerId] = set()  # peers that are done with this round, perhaps without this peer
        reason = "nobody else was there"
        while (left_s := deadline - loop.time()) >= MIN_ATTEMPT_S:
            expected = place.expected().keys()
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
                        part=self.part,
                        norm_before=None if is_first else outcome.usual_norm,
                    )
                except NothingToAverage:
                    raise
                except NobodyThere as error:
                    reason = error.reason
                    if not elsewhere:
                        alone_until = min(loop.time() + ALONE_S, deadline)
                    elsewhere |= expected
                except (RoundAborted, Unavailable) as error:
                    logger.info("an attempt at round %d failed: %s", number, error)
                    reason = error.reason if isinstance(error, RoundAborted) else str(error)
            elif loop.time() >= alone_until or place.is_left_behind():
                break
            await wait_at_most(place.called, LOOK_S)
            await self.look()
        outcome.reason = f"round {number} did not commit here: {reason}"
        return None

    def _patience_s(self) -> float:
        """How long to wait for expected peers: longer in each round, as they may have waited in the last."""
        num_left, num_rounds = self.place.num_rounds_left or 1, self.place.num_rounds
        return self.config.matchmaking_time_s * (num_rounds - num_left + 1) / num_rounds
