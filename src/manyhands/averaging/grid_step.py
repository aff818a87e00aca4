"""One step of a peer whose swarm is too large for one group: a round along each axis of the grid.

What is averaged is (weight x value, weight), each group with equal weights: in a full grid the quotient is the weighted
mean of all peers, whatever their weights are. A round that does not commit leaves a peer with what it had, and it goes
on with the next one; it then holds the mean of fewer peers.

Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import torch

from manyhands.averaging.attendance import Attendance
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.rounds import CommittedRound, RoundMeter, RoundRunner
from manyhands.averaging.sketch import packed, sketched_indices
from manyhands.base.errors import NothingToAverage, RoundAborted, Unavailable

logger = logging.getLogger(__name__)

MIN_ATTEMPT_S = 0.5
"""With less time than this nothing new is begun."""
GATHER_SHARE = 0.5
"""Of what is left of a round, the most to wait for those who are expected: the rest is for the values."""
ALONE_S = 1.0
"""The most to wait in a group in which nobody else is expected."""
LOOK_S = 0.2
NO_SAMPLES = "no peer whose values have come here has any samples"
SAME_FOR_ALL = 1.0
"""The weight of each member: what is behind its values is in the vector."""


@dataclass
class GridOutcome:
    """What came of a step.

    Attributes:
        committed: the last round that committed, with the mean that this peer now holds; None if none did.
        num_rounds, num_committed: of the step.
        reason: why one did not commit; empty if all did.
        disagreement: of the step before; see :meth:`manyhands.averaging.attendance.Attendance.disagreement`.
    """

    committed: CommittedRound | None = None
    num_rounds: int = 0
    num_committed: int = 0
    reason: str = ""
    disagreement: float | None = None


def weighted_values(flat_N: torch.Tensor, weight: float) -> torch.Tensor:
    """(weight x value, weight); zeros for a weight of 0, whatever the values are."""
    sums = torch.zeros(flat_N.numel() + 1, dtype=flat_N.dtype)
    if weight > 0:
        torch.mul(flat_N, weight, out=sums[:-1])
        sums[-1] = weight
    return sums


class GridSteps:
    """Takes the steps of one peer.

    Args:
        shapes: of the tensors in the vector.
        look: reads the records of the others.
        wait_for_call: until somebody calls, at most so many seconds.
    """

    def __init__(
        self,
        attendance: Attendance,
        rounds: RoundRunner,
        config: AveragingConfig,
        shapes: Sequence[Sequence[int]],
        look: Callable[[], Awaitable[None]],
        wait_for_call: Callable[[float], Awaitable[None]],
    ) -> None:
        self._attendance = attendance
        self._rounds = rounds
        self._config = config
        self._shapes = shapes
        self._look = look
        self._wait_for_call = wait_for_call

    async def take(
        self, outcome: GridOutcome, flat_N: torch.Tensor, weight: float, deadline: float, meter: RoundMeter
    ) -> None:
        """All rounds of the step that has begun; what it comes to is in ``outcome``.

        Args:
            deadline: loop time, of all rounds together.
        Raises:
            NothingToAverage: all rounds committed, and nobody whose values have come here gave a weight.
        """
        attendance, loop = self._attendance, asyncio.get_running_loop()
        sums = weighted_values(flat_N, weight)
        committed: CommittedRound | None = None
        outcome.num_rounds, outcome.num_committed, outcome.reason = attendance.num_rounds, 0, ""
        self._rounds.shapes = [*self._shapes, (1,)]
        try:
            while num_left := attendance.num_rounds_left:
                round_deadline = loop.time() + (deadline - loop.time()) / num_left
                result = await self._round(outcome, sums, round_deadline, meter)
                attendance.next_round()
                if result is not None and result.averaged_N is not None:
                    committed, sums = result, result.averaged_N
                    outcome.num_committed += 1
        finally:
            self._rounds.shapes = self._shapes
            outcome.disagreement = attendance.disagreement()  # by what was read meanwhile
            while attendance.num_rounds_left:  # the time was over before the last round
                attendance.next_round()
            if committed is not None and sums[-1] > 0:
                self._conclude(outcome, committed, sums)
        if committed is not None and outcome.committed is None:
            if outcome.num_committed == outcome.num_rounds:
                raise NothingToAverage(NO_SAMPLES, [])
            outcome.reason = f"{NO_SAMPLES}; {outcome.reason}"

    def _conclude(self, outcome: GridOutcome, committed: CommittedRound, sums: torch.Tensor) -> None:
        mean_N = sums[:-1] / sums[-1]
        outcome.committed = replace(committed, averaged_N=mean_N)
        indices = sketched_indices(mean_N.numel(), self._attendance.position().step)
        self._attendance.tell(packed(mean_N[indices].tolist()))

    async def _round(
        self, outcome: GridOutcome, sums: torch.Tensor, deadline: float, meter: RoundMeter
    ) -> CommittedRound | None:
        """Try until one commits, or the time for it is over."""
        attendance, loop = self._attendance, asyncio.get_running_loop()
        number = attendance.position().step
        alone_until = min(loop.time() + ALONE_S, deadline)
        reason = "nobody else was there"
        while (left_s := deadline - loop.time()) >= MIN_ATTEMPT_S:
            if attendance.expected() or attendance.called.is_set():
                attendance.called.clear()
                gather_s = min(self._patience_s(), left_s * GATHER_SHARE)
                try:
                    return await self._rounds.average(
                        sums, SAME_FOR_ALL, timeout_s=left_s, gather_s=gather_s, meter=meter
                    )
                except (RoundAborted, Unavailable) as error:
                    logger.info("an attempt at round %d failed: %s", number, error)
                    reason = error.reason if isinstance(error, RoundAborted) else str(error)
            elif loop.time() >= alone_until or attendance.leading().step > number:
                break
            await self._wait_for_call(LOOK_S)
            await self._look()
        outcome.reason = f"round {number} did not commit here: {reason}"
        return None

    def _patience_s(self) -> float:
        """How long to wait for those who are expected: longer in each round, as they may have waited in the last."""
        num_left, num_rounds = self._attendance.num_rounds_left or 1, self._attendance.num_rounds
        return self._config.matchmaking_time_s * (num_rounds - num_left + 1) / num_rounds
