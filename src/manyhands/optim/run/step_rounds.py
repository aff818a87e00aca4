"""The averaging of one peer's global steps: a round of all, or in a large run the rounds of a grid."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.grid.step import GridOutcome, GridSteps
from manyhands.averaging.messages import Position
from manyhands.averaging.round_outcome import RoundMeter
from manyhands.averaging.rounds import RoundRunner
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError, RoundAborted
from manyhands.base.identity import PeerId
from manyhands.optim.run.averaged import Averaged, averaged_in_grid, averaged_in_one_group
from manyhands.optim.run.drift import Drift
from manyhands.optim.run.grid_assignment import GridAssignment
from manyhands.optim.run.round_scheduler import RoundScheduler
from manyhands.optim.run.tracker import ProgressTracker

logger = logging.getLogger(__name__)

PARAMETERS_EVERY = 8
"""Global steps: in a grid the parameters are averaged so often, before the step is made from them."""
LOOK_TIMEOUT_S = 1.0


class Parameters(Protocol):
    """Where this peer is, and what it holds there."""

    position: Position

    def flat_parameters(self) -> torch.Tensor:
        """The trained parameters end to end, copied; safe to call from any thread."""


class StepRounds:
    """Averages the gradients of one peer with those of the others. Lives on the network thread.

    Args:
        drift: knows what the peers hold.
        scheduler: has looked for the group.
        local: of this peer.
        shapes: of the gradients, end to end in the vector.
    """

    def __init__(
        self,
        own_id: PeerId,
        rounds: RoundRunner,
        assignment: GridAssignment,
        tracker: ProgressTracker,
        drift: Drift,
        scheduler: RoundScheduler[Averaged],
        local: Parameters,
        config: AveragingConfig,
        shapes: Sequence[Sequence[int]],
    ) -> None:
        self._own_id = own_id
        self._rounds = rounds
        self._shapes = shapes
        self._assignment = assignment
        self._tracker = tracker
        self._drift = drift
        self._scheduler = scheduler
        self._local = local
        self._config = config

    def look_ahead(self) -> None:
        """There is news of the others: take a seat among them, so that they can read of it before the next step."""
        self._assignment.position()

    async def average(self, mean_N: torch.Tensor, weight: float) -> Averaged:
        """One attempt at a step.

        Args:
            mean_N: this peer's gradient; not changed.
            weight: behind it.
        Raises:
            RoundAborted: nothing was changed, and the gradient counts in the next attempt.
        """
        return await self._scheduler.begin(lambda: self._attempt(mean_N, weight))

    async def _attempt(self, mean_N: torch.Tensor, weight: float) -> Averaged:
        position = self._local.position
        self._assignment.position()
        if not self._assignment.is_settled:
            await self._look()
        if not self._assignment.begin_step():
            with self._tracker.in_round():
                result = await self._rounds.average(mean_N, weight, shapes=self._shapes)
            return averaged_in_one_group(result, position, self._own_id, weight, self._drift.disagreement())
        try:
            return await self._in_grid(position, mean_N, weight)
        except BaseException:
            self._assignment.end_step()
            raise

    async def _in_grid(self, position: Position, mean_N: torch.Tensor, weight: float) -> Averaged:
        loop, config, outcome, meter = asyncio.get_running_loop(), self._config, GridOutcome(), RoundMeter()
        vector_N, shapes = mean_N, self._shapes
        if position.step % PARAMETERS_EVERY == 0:
            parameters_N = await loop.run_in_executor(None, self._local.flat_parameters)
            vector_N = torch.cat([mean_N, parameters_N])
            shapes = [*shapes, (parameters_N.numel(),)]  # of one dimension: never with a loss
        steps = GridSteps(self._assignment, self._own_id, self._rounds, config, self._look, shapes)
        await steps.take(outcome, vector_N, weight, loop.time() + config.averaging_timeout_s, meter)
        if outcome.committed is None:
            raise RoundAborted(outcome.reason)
        if outcome.reason:
            logger.warning("%d of the %d rounds of this step committed here: %s", outcome.num_committed,
                           outcome.num_rounds, outcome.reason)  # fmt: skip
        self._tracker.met(manifest.fingerprint() for manifest in outcome.manifests)
        members = [self._own_id, *self._tracker.expected()]
        return averaged_in_grid(
            outcome,
            position,
            mean_N.numel(),
            self._tracker.target_batch_size,
            members,
            meter.averaging_s + meter.vote_s,
            self._drift.disagreement(),
        )

    async def _look(self) -> None:
        try:
            async with time_limit(LOOK_TIMEOUT_S, "reading who is there"):
                await self._assignment.refresh()
        except ManyhandsError as error:
            logger.debug("who is there cannot be read: %s", error)
