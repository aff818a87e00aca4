"""Averages one peer's gradients for global steps: in one round of all peers, or in rounds of a grid in a large run.

All members of the run know who leads the next step, so nothing has to be looked for ahead of its target.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from manyhands.averaging.codecs import Plan, codec_of_code, plan_of
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.grid.step import GridSteps, StepOutcome
from manyhands.averaging.messages import Position, RoundManifest
from manyhands.averaging.roster import Roster, lineage_of, next_place
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.averaging.state.content import Origin, State
from manyhands.averaging.timing import LOOK_S, MOMENT_S, TWO_ANSWERS_S, TWO_DIALS_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import NobodyThere, PeerError, ProtocolViolation, RoundAborted, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.optim.accumulator import Contribution
from manyhands.optim.run.drift import Drift
from manyhands.optim.run.grid_assignment import GridAssignment
from manyhands.optim.run.progress import sum_of_samples
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.optim.state.catching_up import MissedStep, StepKeeper, fetch_step

logger = logging.getLogger(__name__)

PARAMETERS_EVERY = 8
"""In a grid the parameters are averaged once in this many global steps, before the step from them."""
MAX_HOLDERS = 4
"""Peers that are asked for a step that this one lacks."""
LEAVING = "this peer leaves the run"
LEFT = "this peer left the run, as its optimizer or the peer itself was closed; make another optimizer to train on"


def longest_attempt_s(config: AveragingConfig) -> float:
    """The time limit of one attempt at averaging, where the leader may have begun its round later."""
    return 2 * config.averaging_timeout_s + config.in_doubt_timeout_s + TWO_DIALS_S


class LocalState(Protocol):
    """The training thread's state as the network thread sees it: a :class:`manyhands.optim.step.replica.Replica`."""

    position: Position
    origin: Origin | None
    roster: Roster  # of the run at the position
    can_replay: bool  # an averaged vector is all that a step takes
    norm_grows: bool  # the more samples are behind a contribution, the larger its values are

    @property
    def drift_bound(self) -> float: ...

    def capture(self) -> State: ...

    def flat_parameters(self) -> torch.Tensor: ...

    @property
    def part(self) -> int: ...

    @property
    def shapes(self) -> Sequence[Sequence[int]]: ...


@dataclass
class Averaged:
    """The gradient that a global step is made from, and where the step leads."""

    mean_N: torch.Tensor | None  # the update takes it out, and may change its values
    lineage: bytes  # of the position that the step leads to; it follows from the seal and the roster
    samples: int  # of the step, by all peers together: equal on all that make it, as it counts for the lineage
    manifest: RoundManifest | None = None  # in a grid of the last round that committed here; None for a step alone
    members: Sequence[PeerId] = ()  # the peers that make the same step
    blamed: Collection[PeerId] = ()  # those of them that were lost or at fault: they are expected after a new record
    is_in_grid: bool = False  # the step was made in several groups
    shares: Mapping[PeerId, float] = field(default_factory=dict)
    """Samples of each contributor that this peer knows of; in a grid those of its first group, or none."""
    averaging_s: float = 0.0  # of the round, without the search for the group
    parameters_N: torch.Tensor | None = None  # averaged, to make the step from; in a grid each ``PARAMETERS_EVERY``
    is_left_out: bool = False  # the contribution of this peer is not in the mean, ...
    is_outsized: bool = False  # ... because it was too large beside those of the others
    disagreement: float | None = None  # before the step; see :meth:`manyhands.optim.run.drift.Drift.disagreement`
    roster: Roster = field(default_factory=Roster)  # at the position that the step leads to
    seal: bytes = b""


@dataclass(eq=False)
class StepRounds:
    """One peer's attempts at averaging.

    Args:
        assignment: where, and with whom, the rounds are.
        keeper: hands steps to peers that lack them.
    """

    own_id: PeerId
    rounds: RoundRunner
    assignment: GridAssignment
    tracker: ProgressTracker
    drift: Drift
    local: LocalState
    config: AveragingConfig
    keeper: StepKeeper
    _attempt: asyncio.Task[object] | None = None
    _is_closed: bool = False

    def close(self) -> None:
        """End the current attempt, and all later ones at once."""
        self._is_closed = True
        if self._attempt is not None:
            self._attempt.cancel()

    def plan(self) -> None:
        """Take a seat in the grid early enough for the others to read it; call this on any news of the others."""
        self.assignment.plan()

    async def average(self, contribution: Contribution) -> Averaged:
        """Make one attempt to average the gradient of a global step.

        The vector is not changed, unless it can be computed again; in one group the mean then overwrites it.

        Raises:
            RoundAborted, Unavailable: nothing was changed, and the gradient counts in the next attempt. Also when this
                is closed meanwhile.
        """
        if self._is_closed:
            raise RoundAborted(LEAVING)
        mean_N, weight = contribution.mean_N, contribution.weight
        position, tracker, self._attempt = self.local.position, self.tracker, asyncio.current_task()
        roster = self.local.roster
        tracker.is_called = tracker.is_moving = False  # a peer that begins another round calls again
        tracker.is_busy = True
        try:
            async with time_limit(longest_attempt_s(self.config), "averaging with the others"):
                self.assignment.plan()
                if not (self.assignment.is_settled and roster.members):  # at the beginning, see who is there
                    await self.tracker.look(MOMENT_S)
                if self.assignment.begin_step():
                    averaged = await self._average_in_grid(position, roster, mean_N, weight)
                else:
                    local = self.local
                    committed = await self.rounds.average(
                        mean_N, weight, shapes=local.shapes, part=local.part, refill=contribution.refill
                    )
                    place = next_place(position, roster, committed.manifest)
                    if committed.means is not None:
                        await self.keeper.add(committed.manifest, committed.means, committed.may_be_lacking)
                        mean_N = committed.means.averaged_N
                    else:
                        mean_N = await self._lacking_means(committed, place[0])
                    averaged = self._averaged_in_one_group(committed, mean_N, place, weight)
        except BaseException as error:
            self.assignment.end_step()
            if isinstance(error, NobodyThere):
                await tracker.look(MOMENT_S)  # they may have said goodbye
            elif isinstance(error, (RoundAborted, Unavailable)):
                tracker.refresh_soon()  # the run may have gone on without this peer
            if isinstance(error, asyncio.CancelledError) and self._is_closed:
                raise RoundAborted(LEAVING) from None
            raise
        finally:
            tracker.is_busy = False
            self._attempt = None
            self.rounds.memory.free_idle()  # the update needs memory now
        tracker.is_moving = True
        logger.info("Averaged tensors successfully with %s", counted(len(averaged.members), "peer"))
        return averaged

    def _plan_of_code(self, code: int) -> Plan:
        """The encoding of the vector of the next step with the codec of a code."""
        return plan_of(self.local.shapes, codec_of_code(code, self.config.codec))

    async def step_towards(self, goal: Position, holders: Sequence[PeerId]) -> MissedStep | None:
        """The committed step from this peer's position, from a peer that has kept it; None if none of these has.

        Args:
            goal: where the run is. A step that leads to the same number, and elsewhere, is not one of the run.
            holders: those to ask, the best ones first, at most ``MAX_HOLDERS``; all together for a round's time.
        """
        try:
            async with time_limit(self.config.averaging_timeout_s, "taking a step that this peer lacks"):
                return await self._first_step_towards(goal, holders[:MAX_HOLDERS])
        except Timeout as error:
            logger.info("%s", error)
            return None

    async def _first_step_towards(self, goal: Position, holders: Sequence[PeerId]) -> MissedStep | None:
        here, roster, keeper = self.local.position, self.local.roster, self.keeper
        for holder in holders:
            try:
                step = await fetch_step(keeper.endpoint, keeper.run_id, holder, here, self._plan_of_code)
            except (PeerError, Unavailable) as error:
                logger.info("peer %s does not send the step from %d that this peer lacks: %s", holder, here.step, error)
                if isinstance(error, ProtocolViolation):
                    self.tracker.shun(holder, str(error))
                continue
            if step is not None:
                end, _, _ = next_place(here, roster, step.manifest)
                if end == goal or end.step < goal.step:
                    return step
        return None

    async def _lacking_means(self, committed: CommittedRound, end: Position) -> torch.Tensor:
        """The means of a committed round, which this peer lacks, from another member that has kept them.

        Args:
            end: where the step leads.
        """
        members = committed.manifest.members
        leader = members[committed.manifest.leader]  # whose word alone does not make a result
        lost, number = {self.own_id, leader, *committed.blamed}, members.index(self.own_id)
        others = [*members[number:], *members[:number]]  # not all members ask the same one first
        holders = [peer_id for peer_id in others if peer_id not in lost]
        loop = asyncio.get_running_loop()
        until = loop.time() + TWO_ANSWERS_S  # one holder may not answer
        while loop.time() < until:
            if (step := await self.step_towards(end, holders)) is not None:
                return step.mean_N
            await asyncio.sleep(LOOK_S)  # they are about to keep them
        self.rounds.matchmaker.pass_over(leader)
        why = f": {committed.reason}" if self.own_id in committed.blamed else ""
        raise RoundAborted(f"the group averaged its tensors, but this peer does not have the result{why}")

    def _averaged_in_one_group(
        self, committed: CommittedRound, mean_N: torch.Tensor, place: tuple[Position, Roster, bytes], weight: float
    ) -> Averaged:
        position, roster, seal = place
        manifest, shares = committed.manifest, committed.manifest.contributors()
        return Averaged(
            mean_N,
            position.lineage,
            sum_of_samples(manifest.weights),
            manifest,
            manifest.members,
            committed.blamed,
            shares=shares,
            averaging_s=committed.averaging_s,
            is_left_out=weight > 0 and self.own_id not in shares,
            is_outsized=committed.is_outsized,
            disagreement=self.drift.disagreement(),
            roster=roster,
            seal=seal,
        )

    async def _average_in_grid(
        self, position: Position, roster: Roster, mean_N: torch.Tensor, weight: float
    ) -> Averaged:
        """Average along each axis of the grid; every few steps the parameters too, which follow the gradient.

        No peer knows all groups, so all that step from one position get one lineage, whatever their groups committed,
        and the roster stays as it is.
        """
        loop, config, outcome = asyncio.get_running_loop(), self.config, StepOutcome()
        numel, vector_N, shapes, part = mean_N.numel(), mean_N, self.local.shapes, self.local.part
        if self.config.is_sparse:
            shapes = [(math.prod(shapes[0]),), *shapes[1:]]  # exact: a mean of one axis of the grid is sparse no more
        if position.step % PARAMETERS_EVERY == 0:
            vector_N = await loop.run_in_executor(None, self._with_parameters, mean_N)
            shapes = [*shapes, (vector_N.numel() - numel,)]  # of one dimension, so they are never encoded with a loss
            part = -1 - part  # another vector
        look = functools.partial(self.tracker.look, MOMENT_S)
        steps = GridSteps(self.assignment, self.own_id, self.rounds, config, look, shapes, part)
        await steps.take(outcome, vector_N, weight, loop.time() + config.averaging_timeout_s)
        if outcome.committed is None or outcome.committed.averaged_N is None:
            raise RoundAborted(outcome.reason)
        if outcome.reason:
            has_failed = outcome.num_rounds_committed + outcome.num_rounds_alone < outcome.num_rounds
            logger.log(
                logging.WARNING if has_failed else logging.INFO, "%d of the %d rounds of this step committed here: %s",
                outcome.num_rounds_committed, outcome.num_rounds, outcome.reason,
            )  # fmt: skip
        averaged_N = outcome.committed.averaged_N
        first_round = position.step * outcome.num_rounds  # only there the weights are those of one peer each
        first = [manifest for manifest in outcome.manifests if manifest.position.step == first_round]
        seal = hashlib.sha256(position.lineage + b"grid").digest()
        return Averaged(
            averaged_N[:numel],
            lineage_of(seal, roster),
            self.tracker.target_batch_size,
            outcome.committed.manifest,
            [self.own_id, *self.tracker.view.awaited],
            is_in_grid=True,
            shares=first[0].contributors() if first else {},
            averaging_s=outcome.meter.averaging_s + outcome.meter.vote_s,
            parameters_N=averaged_N[numel:] if averaged_N.numel() > numel else None,
            is_left_out=outcome.is_left_out,
            disagreement=self.drift.disagreement(),
            roster=roster,
            seal=seal,
        )

    def _with_parameters(self, mean_N: torch.Tensor) -> torch.Tensor:
        return torch.cat([mean_N, self.local.flat_parameters()])
