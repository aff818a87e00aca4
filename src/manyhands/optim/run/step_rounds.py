"""Averages one peer's gradients for global steps: in one round of all peers, or in the rounds of a grid in a large run.

All members of the run know from the roster who leads the next round, so matchmaking begins only at the target.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from manyhands.averaging.codecs import Plan, Unscaled, codec_of_code, plan_of
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.grid.step import GridSteps, StepOutcome
from manyhands.averaging.messages import Position, RoundManifest
from manyhands.averaging.roster import QUALIFYING, Roster, lineage_of, next_place
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.averaging.state.content import Origin, State
from manyhands.averaging.timing import ANSWER_S, LATE_ANSWER_S, LOOK_S, MOMENT_S, TWO_DIALS_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import NobodyThere, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.optim.accumulator import Contribution
from manyhands.optim.config import PARAMETERS_EVERY
from manyhands.optim.run.drift import Drift
from manyhands.optim.run.grid_assignment import GridAssignment
from manyhands.optim.run.progress import sum_of_samples
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.optim.state.catching_up import MissedStep, StepKeeper, step_towards

logger = logging.getLogger(__name__)

PIECE_NUMEL = 1 << 20
"""Values of two vectors that are compared at a time."""

LEAVING = "this peer leaves the run"
LEFT = "this peer left the run, as its optimizer or the peer itself was closed; make another optimizer to train on"


def longest_attempt_s(config: AveragingConfig) -> float:
    """The time limit of one attempt at averaging, in seconds: the search, the round, and a step from the others."""
    return 3 * config.averaging_timeout_s + LATE_ANSWER_S + TWO_DIALS_S


class LacksMeans(RoundAborted):
    """The round committed, but this peer lacks its means: another peer, or the state, must give it the step.

    Attributes:
        weight: of this peer's contribution in the committed step; 0 if that is not in it.
        is_outsized: that is not in it as its values were not finite, or too large.
    """

    def __init__(self, committed: CommittedRound, own_id: PeerId) -> None:
        why = f": {committed.reason}" if own_id in committed.blamed else ""
        super().__init__(f"the group averaged its tensors, but this peer does not have the result{why}")
        self.weight = committed.manifest.contributors().get(own_id, 0.0)
        self.is_outsized = committed.is_outsized


class LocalState(Protocol):
    """What the network thread needs of the training thread's :class:`manyhands.optim.step.replica.Replica`.

    The attributes are defined there.
    """

    position: Position
    origin: Origin | None
    roster: Roster
    can_replay: bool
    norm_grows: bool

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
    """The averaged gradient that a global step is made with, and the position to which the step leads.

    Attributes:
        mean_N: the mean, in the layout of ``GradientLayout``; float32, on the host. ``GlobalStep.advance`` sets it to
            None, and the update may change its values.
        lineage: of the new position; it follows from ``seal`` and ``roster``.
        samples: of all peers together. All peers that make the step have the same number, as it is in the state.
        manifest: of the round; in a grid of the last round that committed here. None for a step alone.
        members: the peers that make the same step; none for a step alone.
        blamed: those of them that were lost in the round, or at fault: they are missing until they publish again.
        is_in_grid: the step was made in several groups.
        shares: the samples of each contributor that this peer knows of; in a grid those of its first group, or none.
        averaging_s: seconds that the round took, without the search for the group.
        parameters_N: averaged parameters from which the step starts; only in a grid, each ``PARAMETERS_EVERY`` steps.
        is_left_out: this peer had a contribution, and it is not in the mean.
        is_outsized: it is left out because its values were not finite, or too large.
        disagreement: before the step; see :meth:`manyhands.optim.run.drift.Drift.disagreement`.
        roster: at the new position.
        seal: digest of what was committed; see :mod:`manyhands.averaging.roster`.
    """

    mean_N: torch.Tensor | None
    lineage: bytes
    samples: int
    manifest: RoundManifest | None = None
    members: Sequence[PeerId] = ()
    blamed: Collection[PeerId] = ()
    is_in_grid: bool = False
    shares: Mapping[PeerId, float] = field(default_factory=dict)
    averaging_s: float = 0.0
    parameters_N: torch.Tensor | None = None
    is_left_out: bool = False
    is_outsized: bool = False
    disagreement: float | None = None
    roster: Roster = field(default_factory=Roster)
    seal: bytes = b""


@dataclass(eq=False)
class StepRounds:
    """Makes one peer's attempts at averaging, and fetches committed steps that it lacks.

    Args:
        assignment: decides the group of each round.
        keeper: keeps committed steps, and sends them to peers that lack them.
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
        """Abort the current attempt; all later ones fail at once."""
        self._is_closed = True
        if self._attempt is not None:
            self._attempt.cancel()

    def plan(self) -> None:
        """Take a seat in the grid, if there is one, early enough for the others to read it.

        Call this whenever records of the others have changed.
        """
        self.assignment.plan()

    async def average(self, contribution: Contribution) -> Averaged:
        """Make one attempt to average the gradient of a global step with the other peers.

        In one group the mean overwrites the contribution's vector if that has a ``refill``; otherwise the vector stays
        unchanged.

        Raises:
            LacksMeans: the others make the step, and this peer must get it from them.
            RoundAborted, Unavailable: the attempt failed, or :meth:`close` ended it. The gradient counts in the next
                attempt.
        """
        if self._is_closed:
            raise RoundAborted(LEAVING)
        mean_N, weight = contribution.mean_N, contribution.weight
        position = self.local.position
        tracker = self.tracker
        self._attempt = asyncio.current_task()
        roster = self.local.roster
        tracker.is_called = tracker.is_moving = False  # this attempt answers the call; another round has another call
        tracker.is_busy = True
        try:
            async with time_limit(longest_attempt_s(self.config), "averaging with the others"):
                self.assignment.plan()
                if not (self.assignment.is_settled and roster.members):  # without members, records say who is there
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
                        mean_N = await self._mean_of_others(committed, place[0])
                    averaged = self._averaged_in_one_group(committed, mean_N, place, weight)
                    tell_of_faults(committed.reason, roster, place[1])
        except BaseException as error:
            self.assignment.end_step()
            if isinstance(error, NobodyThere):
                await tracker.look(MOMENT_S)  # the expected peers may have said goodbye
            elif isinstance(error, (RoundAborted, Unavailable)):
                tracker.refresh_soon()  # the others may have made the step without this peer
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

    async def _mean_of_others(self, committed: CommittedRound, end: Position) -> torch.Tensor:
        """The mean of a committed round that this peer lacks, from the members that have kept it.

        The leader is not asked: a result needs the word of another member, too.

        Args:
            end: the position to which the step leads.
        Raises:
            LacksMeans: none of them has sent it.
        """
        members = committed.manifest.members
        lost = {self.own_id, members[committed.manifest.leader], *committed.blamed}
        number = members.index(self.own_id)
        others = [*members[number:], *members[:number]]  # each member begins with another one
        of_roster = self.local.roster.members
        holders = sorted((one for one in others if one not in lost), key=lambda one: one not in of_roster)
        until = asyncio.get_running_loop().time() + ANSWER_S
        while self.local.can_replay and holders and asyncio.get_running_loop().time() < until:
            if step := await self.step_towards(end, holders):
                return step.mean_N
            await asyncio.sleep(LOOK_S)  # they may learn a moment later that the round has committed
        raise LacksMeans(committed, self.own_id)

    async def step_towards(self, goal: Position, holders: Sequence[PeerId]) -> MissedStep | None:
        """The committed step from this peer's position, from one of these peers; see :func:`.step_towards`."""
        return await step_towards(
            self.keeper.endpoint, self.keeper.run_id, self.local.position, self.local.roster, goal, holders,
            self._plan_of_code, timeout_s=self.config.averaging_timeout_s, on_violation=self.tracker.shun,
        )  # fmt: skip

    def _plan_of_code(self, code: int) -> Plan:
        """The encoding of the next step's vector, with the codec that has this code on the wire."""
        return plan_of(self.local.shapes, codec_of_code(code, self.config.codec))

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
        """Average along each axis of the grid.

        Each ``PARAMETERS_EVERY`` steps the vector has the parameters, too, behind the gradient. No peer knows what all
        groups have committed. So all peers that step from one position get the same lineage, and keep their roster.
        """
        loop, config, outcome = asyncio.get_running_loop(), self.config, StepOutcome()
        numel = mean_N.numel()
        vector_N = mean_N
        shapes = self.local.shapes
        if self.config.is_sparse:
            # tensors of one dimension are sent exactly: the mean along an axis of the grid is not sparse any more
            shapes = [(math.prod(shapes[0]),), *shapes[1:]]
        if position.step % PARAMETERS_EVERY == 0:
            vector_N = await loop.run_in_executor(None, self._with_parameters, mean_N)
            shapes = [*shapes, Unscaled((vector_N.numel() - numel,))]  # of one dimension, so that they are sent exactly
        look = functools.partial(self.tracker.look, MOMENT_S)
        steps = GridSteps(self.assignment, self.own_id, self.rounds, config, look, shapes)
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
        has_parameters = averaged_N.numel() > numel
        parameters_N = await self._taken(vector_N[numel:], averaged_N[numel:], look) if has_parameters else None
        first_round = position.step * outcome.num_rounds  # in later rounds a weight is that of a whole group
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
            parameters_N=parameters_N,
            is_left_out=outcome.is_left_out,
            disagreement=self.drift.disagreement(),
            roster=roster,
            seal=seal,
        )

    async def _taken(
        self, own_N: torch.Tensor, mean_N: torch.Tensor, look: Callable[[], Awaitable[None]]
    ) -> torch.Tensor | None:
        """The mean of the parameters in this peer's groups; None if it is too far from its own (docs/adr/0063)."""
        loop = asyncio.get_running_loop()
        apart, size = await loop.run_in_executor(None, lambda: (distance_of(own_N, mean_N), float(own_N.norm())))
        if self.drift.is_too_far(apart, size):
            await look()  # perhaps not all records of this position have been read
            if self.drift.is_too_far(apart, size):
                logger.warning(
                    "This peer keeps its own parameters: their mean in its groups is %.3g%% away from them, more than "
                    "other peers' are. A member has sent wrong ones or missed steps, or this peer has just loaded a "
                    "state", 100 * apart / size if size else math.inf,
                )  # fmt: skip
                return None
        return mean_N

    def _with_parameters(self, mean_N: torch.Tensor) -> torch.Tensor:
        return torch.cat([mean_N, self.local.flat_parameters()])


def distance_of(one_N: torch.Tensor, other_N: torch.Tensor) -> float:
    """The Euclidean distance of two vectors, without memory for a third."""
    pieces = zip(torch.split(one_N, PIECE_NUMEL), torch.split(other_N, PIECE_NUMEL), strict=True)
    return math.hypot(*(float((one - other).norm()) for one, other in pieces))


def tell_of_faults(reason: str, before: Roster, after: Roster) -> None:
    """Log what went wrong in a round that committed, and which members are guests now for what they did."""
    if reason:
        logger.info("The round committed, but not all members did their part: %s", reason)
    for peer_id in sorted(before.members.intersection(after.standings) - after.members):
        logger.info(
            "Peer %s was at fault and is a guest now, not a member: it does not lead, and has little time in a round, "
            "until it has done its part in at least %d rounds",
            peer_id, QUALIFYING,
        )  # fmt: skip
