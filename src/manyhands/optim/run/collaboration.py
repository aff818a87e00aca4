"""The networked half of the optimizer: one peer's part in one run. Lives on the network thread, touches no tensor."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch

from manyhands.averaging.commit.limits import OPEN_LIMITS, MemberLimits
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.averaging.round_outcome import Phase
from manyhands.averaging.rounds import RoundRunner
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError, RoundAborted, RunNotFound, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.advice import describe_late_states
from manyhands.optim.config import ProgressConfig
from manyhands.optim.health import FIRST_LOOK_S, LOOK_PERIOD_S, Health, HealthLog, clock_offset_s
from manyhands.optim.manifest import ManifestKeeper, RunManifest
from manyhands.optim.run.acquaintances import Acquaintances
from manyhands.optim.run.averaged import Averaged
from manyhands.optim.run.departures import Departures
from manyhands.optim.run.download_courtesy import Courtesy
from manyhands.optim.run.drift import Drift
from manyhands.optim.run.firewalled import Firewalled
from manyhands.optim.run.grid_assignment import GridAssignment
from manyhands.optim.run.listing import find_runs, nobody_is_in
from manyhands.optim.run.option_check import UnlikeOptions
from manyhands.optim.run.progress import Progress
from manyhands.optim.run.progress_log import ProgressLog
from manyhands.optim.run.protocols import BackgroundStep, LocalState
from manyhands.optim.run.records import declare_run
from manyhands.optim.run.round_scheduler import RoundScheduler
from manyhands.optim.run.signed_sums import Sketch
from manyhands.optim.run.step_rounds import StepRounds
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.optim.state.state import State, without_origin
from manyhands.optim.state.transfer import StateServer, download_state
from manyhands.peer import Presence
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 5.0
NEAR_TIMEOUT_S = 1.0
"""A training loop waits no longer to learn whether the target is reached."""
NEWS_PERIOD_S = 1.0
NEWCOMER_S = 3.0
"""Who has downloaded the state is given so long to show itself, before a lone peer moves on from it."""
LOADS_UNTIL_ADVICE = 4
LULL_S = 0.25
"""Far from the target, and beside a step in the background, batches are reported so often at most.

Each report wakes two threads.
"""
FAR_S = 10.0
"""The target is further away, at the predicted speed; nobody looks for a group yet."""
BATCH_MARGIN = 1.25
"""Another batch is begun before a round when it would end before the others' even if it took so much longer."""


class Decision(enum.Enum):
    """What to do after a micro-batch."""

    ACCUMULATE = "the target is not reached"
    AVERAGE = "the target is reached: average with the others"
    GO_ALONE = "the target is reached, and nobody else is there"
    LOAD_STATE = "the run is on another branch: load its state"
    RELOAD = "most peers at this position hold other parameters: load their state"


@dataclass(frozen=True)
class Lull:
    """Nothing is due before this time, nor before this peer has so many samples."""

    until: float  # loop time
    samples: int


class Collaboration:
    """One peer's part in one run: its manifest, progress, rounds and state server."""

    def __init__(
        self,
        presence: Presence,
        manifest: RunManifest,
        local: LocalState,
        averaging: AveragingConfig,
        progress: ProgressConfig,
        *,
        batch_size_lead: int | None = None,
        is_auxiliary: bool = False,
        allow_solo: bool = False,
        start_new: bool | None = True,
    ) -> None:
        self._start_new = start_new
        self._presence = presence
        self._manifest = manifest
        self._local = local
        self._averaging = averaging
        self._progress_config = progress
        self._batch_size_lead = batch_size_lead
        self._is_auxiliary = is_auxiliary
        self._allow_solo = allow_solo
        self._due_at: tuple[Position, float] | None = None  # since when (loop time)
        self._waited_in_vain_at: Position | None = None
        self._num_vain_loads = 0  # since this peer took part in a round
        self.in_group_from: Position | None = None
        """From where the last round led on whose group has formed with this peer in it."""
        self._courtesy = Courtesy()
        self._lull: Lull | None = None
        self._told_until = -math.inf  # loop time
        self._progress_log = ProgressLog()
        self._alone_since: float | None = None  # loop time
        self._clock_offset_s: float | None = None
        self._rng = presence.rng
        self._parts = AsyncExitStack()
        self._tasks = TaskOwner("collaboration")
        self.run_id = manifest.run_id

    async def start(self) -> None:
        """Join the run.

        Raises:
            ManifestMismatch: this peer does not fit it.
            Unavailable: the DHT does not answer.
        """
        presence, manifest = self._presence, self._manifest
        declare_run(presence.dht, manifest.run_id)
        self.tracker = ProgressTracker(
            presence.endpoint,
            presence.dht,
            manifest.run_id,
            manifest.target_batch_size,
            self._local.position,
            self._progress_config,
            on_update=self._log_progress,
            is_auxiliary=self._is_auxiliary,
            began_at=presence.began_at,
        )
        self._drift = Drift(self.tracker.reader, presence.peer_id, self._local.drift_bound)
        self._unlike_options = UnlikeOptions(self.tracker.reader, manifest.hyper_parameters)
        self._departures = Departures(presence.endpoint, self.tracker, self._tasks)
        self._firewalled = Firewalled(presence, self.tracker, manifest.run_id, self._tasks)
        assignment = GridAssignment(self.tracker, presence.peer_id, self._averaging.max_group_size, self._rng)
        async with AsyncExitStack() as parts:
            self._rounds = RoundRunner(
                presence.endpoint,
                manifest.run_id,
                manifest.fingerprint(),
                assignment,
                self._averaging,
                self._rng,
                shapes=_shapes_of(manifest),
                limits=_limits_of(presence, manifest.run_id),
            )
            self._rounds.on_phase.append(self._note_phase)
            parts.push_async_callback(self._rounds.close)
            parts.push_async_callback(self._tasks.close)
            self._scheduler = RoundScheduler[Averaged](
                self._rounds, self.tracker, self._tasks, self._averaging, self._batch_size_lead
            )
            parts.callback(self._scheduler.close)
            self.tracker.on_outlook = self._look_ahead
            self._step_rounds = StepRounds(
                presence.peer_id, self._rounds, assignment, self.tracker, self._drift, self._scheduler, self._local,
                self._averaging,
            )  # fmt: skip
            self._server = server = StateServer(
                presence.endpoint,
                manifest.run_id,
                self._local.capture,
                lambda: self._local.position,
                lambda: self.tracker.reader.recent_rounds,
            )
            parts.callback(server.close)
            members = presence.members.get(manifest.run_id)
            signed = members.charter.charter.manifest if members is not None else b""
            run_endpoint = RunEndpoint(presence.endpoint, manifest.run_id)
            self._acquaintances = Acquaintances(run_endpoint, self.tracker, self._tasks)
            parts.callback(self._acquaintances.close)
            keeper = ManifestKeeper(presence.dht, presence.peer_id, manifest, self._check_new_run, signed)
            await keeper.agree()
            parts.push_async_callback(keeper.close)
            parts.push_async_callback(self.tracker.close)
            await self.tracker.refresh()
            self._tasks.spawn(self._watch_health(), name="watching this peer's health")
            self._parts = parts.pop_all()
        presence.on_close.append(self.close)
        presence.endpoint.on_connected.append(self.tracker.reader.can_be_asked)

    def _log_progress(self, progress: Progress, refresh_s: float) -> None:
        self._progress_log.tell(self._local.position.step, progress, refresh_s, asyncio.get_running_loop().time())

    async def _check_new_run(self) -> None:
        """Nobody trains in this run yet: make sure that this is meant, or warn.

        Raises:
            RunNotFound: other peers are there, none of them knows the run, and it shall not be begun.
        """
        dht = self._presence.dht
        if self._start_new or not dht.num_known_peers:
            return
        runs = await find_runs(dht, self.run_id)
        if any(run.run_id == self.run_id for run in runs):  # its monitor is there, say
            return
        message = nobody_is_in(self.run_id, dht.num_known_peers, runs)
        if self._start_new is False:
            raise RunNotFound(f"{message}. Check the run id; start_new=True begins a run")
        if runs:  # else there is none that could be meant
            logger.warning("%s. This peer begins it; if that is meant, start_new=True says so", message)

    def health(self) -> Health:
        """How this peer does."""
        now = asyncio.get_running_loop().time()
        if self.tracker.reader.observed():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        return Health(
            step=self._local.position.step,
            publish_failures=self.tracker.num_publish_failures,
            alone_s=now - self._alone_since if self._alone_since is not None else None,
            clock_offset_s=self._clock_offset_s,
        )

    async def _watch_health(self) -> None:
        log = HealthLog()
        await asyncio.sleep(FIRST_LOOK_S)
        while True:
            others = filter(self._presence.endpoint.is_connected, self.tracker.reader.observed())
            self._clock_offset_s = await clock_offset_s(self._presence, list(others))
            log.tell(self.health())
            await asyncio.sleep(LOOK_PERIOD_S)

    def _note_phase(self, phase: Phase) -> None:
        if phase is Phase.FORMED:
            self.in_group_from = self._local.position

    def _look_ahead(self) -> None:
        """There is news of the others."""
        self._lull = None
        self._step_rounds.look_ahead()
        self._scheduler.look_ahead()
        self._firewalled.call_on_those_in_need()

    async def close(self) -> None:
        """Leave the run. May be called twice."""
        self._lull = None
        if self.close in self._presence.on_close:
            self._presence.on_close.remove(self.close)
            self._presence.endpoint.on_connected.remove(self.tracker.reader.can_be_asked)
            await self._parts.aclose()

    async def decide(
        self, samples: int, samples_per_second: float, batch_s: float = 0.0, *, may_wait: bool = False
    ) -> Decision:
        """Report what this peer has accumulated, and how long a batch takes it; returns what to do next.

        Args:
            may_wait: for the batches of the others with which the target is reached, rather than compute one more.

        Raises:
            ConfigError: another process has the identity of this peer, and began earlier.
        """
        self.tracker.twin.check(asyncio.get_running_loop().time())
        if self.tracker.position() != self._local.position:  # this thread was held up when it was to be told
            self._move(self._local.position, self._local.lineage_samples)
        self.tracker.report(samples, samples_per_second, batch_s)
        self._firewalled.tell()
        if self.tracker.is_worth_a_look():
            await self._look_again(NEAR_TIMEOUT_S)
        self._unlike_options.look(self._local.position)
        if self.tracker.should_load_state():
            return Decision.LOAD_STATE
        if self._drift.should_load():
            return Decision.RELOAD
        if may_wait and samples and self.tracker.is_arriving():
            self._acquaintances.tell(self.tracker.others_here())
        if not self.tracker.is_due() and not (may_wait and await self._reaches_target(batch_s)):
            self._lull = self._lull_after(samples)
            return Decision.ACCUMULATE
        if self.tracker.can_meet_somebody():
            is_time = self._has_time_for(batch_s) or self._holds_for_latecomers()
            return Decision.ACCUMULATE if is_time else Decision.AVERAGE
        if not self._is_alone():  # but those who are there cannot be reached now
            self._departures.look()
            return Decision.ACCUMULATE
        await self._look_again()  # before a step that nobody else makes
        if not self._is_alone() or self.tracker.can_meet_somebody():
            return Decision.ACCUMULATE
        if not samples or self._is_followed() or await self._acquaintances.answer():
            return Decision.ACCUMULATE
        return Decision.GO_ALONE

    async def rest(self, seconds: float) -> None:
        """Do nothing for so long; a step that becomes due ends it."""
        if self.tracker.is_due():
            await asyncio.sleep(seconds)  # what stands in its way is still there
        else:
            await self.tracker.wait_until_due(seconds)

    def is_lull(self, samples: int, now: float) -> bool:
        """Whether a batch need not be reported, and nothing is due; safe to call from any thread."""
        lull = self._lull
        is_wanted = self.tracker.is_called or self.tracker.twin.is_older
        return lull is not None and now < lull.until and samples < lull.samples and not is_wanted

    def is_told(self, now: float) -> bool:
        """Whether a batch beside a step in the background need not be reported yet; safe to call from any thread."""
        return now < self._told_until

    def _lull_after(self, samples: int) -> Lull | None:
        progress, outlook = self.tracker.progress, self.tracker.outlook
        if not FAR_S < min(progress.eta_s, outlook.eta_s) < math.inf:
            return None
        missing = self.tracker.target_batch_size - max(progress.samples, outlook.samples)
        return Lull(asyncio.get_running_loop().time() + LULL_S, samples + missing // 2)

    async def _reaches_target(self, batch_s: float) -> bool:
        """Wait for the batches that the others compute, if the target is reached with them; whether it was.

        Otherwise each peer would compute one more, and a step have so many samples too many. Others that do not bring
        what was expected are waited for once between two steps.
        """
        now, tracker, position = asyncio.get_running_loop().time(), self.tracker, self._local.position
        busy_until = tracker.others_busy_until(now)
        if not tracker.is_arriving() or self._waited_in_vain_at == position or batch_s <= 0:
            return False
        if busy_until - now > min(BATCH_MARGIN * batch_s, self._averaging.matchmaking_time_s / 2):
            return False  # another batch of this peer will be done before theirs, or theirs take too long
        await tracker.wait_until_due(busy_until + min(batch_s, NEAR_TIMEOUT_S) - now)
        if not tracker.is_due():
            await self._look_again(NEAR_TIMEOUT_S)
        self._unlike_options.look(position)  # at what others have told meanwhile
        if not tracker.is_due():
            self._waited_in_vain_at = position
        return tracker.is_due()

    def _has_time_for(self, batch_s: float) -> bool:
        """Whether this peer can compute another batch before the others, who still compute, come to the round.

        Or before a search that is held up has found out who does not come.
        """
        now, due_at = asyncio.get_running_loop().time(), self._due_since()
        until = max(self.tracker.others_busy_until(due_at), self._scheduler.search_lasts_until())
        until = min(until, due_at + self._averaging.matchmaking_time_s / 2)
        return batch_s > 0 and now + BATCH_MARGIN * batch_s <= until

    def _is_followed(self) -> bool:
        """Whether somebody is about to join a lone peer, which would be gone from where the newcomer comes to."""
        waited_s = asyncio.get_running_loop().time() - self._due_since()
        is_time = waited_s < self._averaging.averaging_timeout_s
        return is_time and self._courtesy.is_due(self._followers(), self._due_since() + waited_s)

    def _holds_for_latecomers(self) -> bool:
        """Whether to let somebody catch up whose last download took longer than a step; the others wait for this peer.

        Else it would load one state after the other, and never take part. Bounded as any wait for a peer that computes.
        """
        waited_s = asyncio.get_running_loop().time() - self._due_since()
        limit_s = self._averaging.matchmaking_time_s / 2
        followers = self._followers(by_latecomers=True)
        return waited_s < limit_s and self._courtesy.is_due(followers, self._due_since() + waited_s)

    def _followers(self, *, by_latecomers: bool = False) -> set[PeerId]:
        """The peers that load the state, without those that would get no place in a round."""
        followers = self._server.followers(NEWCOMER_S, by_latecomers=by_latecomers)
        return {peer_id for peer_id in followers if not self._rounds.is_refused(peer_id)}

    def _due_since(self) -> float:
        """When a step from here was due at first, as far as anybody has asked (loop time)."""
        position = self._local.position
        if self._due_at is None or self._due_at[0] != position:
            self._due_at = (position, asyncio.get_running_loop().time())
        return self._due_at[1]

    def _is_alone(self) -> bool:
        """Whether a step would be made with others if it waited; one in client mode begins no branch beside theirs."""
        if self._presence.endpoint.client_mode and self.tracker.sees_trainers():
            return self._allow_solo and self.tracker.is_stranded
        return self.tracker.num_peers_here() == 1 and self.tracker.is_on_best_branch()

    async def _look_again(self, timeout_s: float = LOOK_TIMEOUT_S) -> None:
        try:
            async with time_limit(timeout_s, "reading the progress of the others"):
                await self.tracker.refresh()
        except ManyhandsError as error:
            logger.debug("the progress of the others cannot be read: %s", error)

    async def report(self, samples: int, samples_per_second: float, batch_s: float, step: BackgroundStep) -> None:
        """Report what this peer has accumulated while a step is made in the background."""
        self._told_until = asyncio.get_running_loop().time() + LULL_S
        waiting = 0 if step.has_moved else step.contribution.samples
        self.tracker.report(samples + waiting, samples_per_second, batch_s)

    async def begin_step(self, step: BackgroundStep) -> None:
        """Make a global step in the background; once, however often this is called."""
        if not step.is_begun:
            step.is_begun = True
            self._told_until = asyncio.get_running_loop().time() + LULL_S
            task = self._tasks.spawn(step.run(self), name="a global step")
            task.add_done_callback(lambda _: step.end())

    async def average(self, mean_N: torch.Tensor, weight: float) -> Averaged:
        """One attempt at averaging a gradient; see :meth:`manyhands.optim.run.step_rounds.StepRounds.average`."""
        self.tracker.answer_call()
        try:
            result = await self._step_rounds.average(mean_N, weight)
        except RoundAborted:
            self.tracker.refresh_soon()  # the run may have gone on without this peer
            raise
        finally:
            self._rounds.free_buffers()  # the update needs memory now
        if result.mean_N is not None:
            self._num_vain_loads = 0
            self.tracker.expect_move()
        return result

    async def move(
        self,
        position: Position,
        lineage_samples: int,
        together_with: list[PeerId],
        sketch: Sketch,
        *,
        is_in_grid: bool = False,
    ) -> None:
        """This peer's parameters are at ``position`` now, after a step; the sketch is of them."""
        self.tracker.stepped()
        self._courtesy.note_step(together_with, asyncio.get_running_loop().time())
        self._move(position, lineage_samples, together_with)
        self.tracker.tell(sketch.sums)
        self._drift.moved(position, sketch, is_in_grid=is_in_grid)

    async def move_elsewhere(self, position: Position, lineage_samples: int) -> None:
        """This peer has loaded a state; what its gradients were before is of no use there."""
        self._rounds.forget_errors()
        self._move(position, lineage_samples)
        self.tracker.tell(b"")  # the others' are of before their own code has changed what they hold: a clamp, say
        self._drift.loaded(position)

    def _move(self, position: Position, lineage_samples: int, together_with: Sequence[PeerId] = ()) -> None:
        self.tracker.tell_options(self._unlike_options.moved(self._local.options))
        self.tracker.move(position, lineage_samples, list(together_with))

    async def fall_behind(self, position: Position, lineage_samples: int, members: list[PeerId]) -> None:
        """The other members of a round are at ``position`` now, and this peer is not."""
        self.tracker.others_moved(position, lineage_samples, members)

    async def begin(self, position: Position, lineage_samples: int) -> None:
        """Publish progress from ``position`` on."""
        self._move(position, lineage_samples)
        self.tracker.start()

    async def is_on_best_branch(self) -> bool:
        """Whether nobody is known to be on a better branch of the run."""
        return self.tracker.is_on_best_branch()

    async def must_be_called_on(self) -> bool:
        """Whether only peers in client mode have the state of the run; then this one shows them where to dial it."""
        is_wanted = self.tracker.waits_for_clients()
        if is_wanted:
            self.tracker.start()
        return is_wanted

    async def wait_for_news(self) -> None:
        """Give the others a moment to publish something new, and read it."""
        await asyncio.sleep(NEWS_PERIOD_S)
        await self._look_again()

    async def download(self) -> State:
        """The state of the leading branch, from one of its holders.

        Raises:
            Unavailable: nobody could hand it out.
        """
        branch = self.tracker.leading_branch()
        donors = [peer_id for peer_id in branch.holders if self.tracker.can_hand_out(peer_id)]
        if not donors and self.tracker.waits_for_clients():
            where = ", ".join(map(str, self._presence.endpoint.addresses))
            raise Unavailable(
                "only peers in client mode have the state of the run, and none of them has connected to this one yet; "
                f"they dial it at {where}, so that must accept connections"
            )
        self._rng.shuffle(donors)  # so that newcomers do not all ask the same one
        records = self.tracker.reader.records()
        donors.sort(key=lambda peer_id: records[peer_id].is_client)  # their links are for what they compute
        donors = self._drift.ordered(donors, branch.position)
        loop, is_late = asyncio.get_running_loop(), self._num_vain_loads > 0
        started = loop.time()
        try:
            state = await download_state(
                self._presence.endpoint, self._manifest, donors, branch.position, is_late=is_late
            )
        except Unavailable:
            for donor in donors:
                self.tracker.report_without_state(donor)
            raise
        self.tracker.loaded(state.header.position, state.recent_rounds, state.donor)
        if branch.is_foreign:
            state = without_origin(state)  # whatever its position was called, this peer was never there
        self._num_vain_loads += 1
        if self._num_vain_loads == LOADS_UNTIL_ADVICE:
            took_s, target = loop.time() - started, self._manifest.target_batch_size
            speed = sum(record.samples_per_second for record in self.tracker.reader.records().values())
            computing_s = target / speed if speed > 0 else 0.0
            logger.warning("%s", describe_late_states(self._num_vain_loads, took_s, computing_s, target))
        return state

    async def shun(self, donor: PeerId) -> None:
        """A peer has handed out a state that cannot be used."""
        self.tracker.shun(donor)

    async def is_ahead_of_somebody(self) -> bool:
        """Whether a peer of the run has yet to reach this position."""
        await self._look_again()
        return self.tracker.is_ahead_of_somebody()


def _limits_of(presence: Presence, run_id: str) -> MemberLimits:
    """What the owner of the run has decided; a run without one bounds norms, and hardly any weight."""
    members = presence.members.get(run_id)
    if members is None:
        return OPEN_LIMITS
    limits = members.charter.charter.limits
    return MemberLimits(
        max_weight_ratio=limits.max_weight_ratio,
        max_weight_share=limits.max_weight_share,
        max_norm_ratio=limits.max_norm_ratio,
    )


def _shapes_of(manifest: RunManifest) -> list[Sequence[int]]:
    """What lies in a vector of gradients: see :class:`manyhands.optim.accumulator.GradientAccumulator`."""
    frozen = set(manifest.frozen)
    shapes: list[Sequence[int]] = [tensor.shape for tensor in manifest.tensors if tensor.name not in frozen]
    return [*shapes, (len(shapes),)]
