"""The part of the optimizer on the network thread: one peer's membership in one run. It touches no tensor itself.

It joins the run, decides after each micro-batch what to do (go on computing, make a step with the others or alone, or
load their state), records the position of this peer, and downloads the state. The training thread calls it through
:class:`manyhands.optim.blocking_client.BlockingRunClient`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass

import msgspec

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.averaging.round.limits import OPEN_LIMITS, MemberLimits
from manyhands.averaging.rounds import RoundRunner
from manyhands.averaging.state.content import State, StateHeader
from manyhands.averaging.state.server import StateServer
from manyhands.averaging.timing import LATE_ANSWER_S, MINUTE_S, MOMENT_S, STALL_S
from manyhands.base.errors import ConfigError, RunNotFound, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.config import ProgressConfig
from manyhands.optim.health import Health, HealthLog
from manyhands.optim.manifest import ManifestKeeper, RunManifest
from manyhands.optim.run import run_machine
from manyhands.optim.run.contacts import Contacts
from manyhands.optim.run.drift import Drift, Sketch, sketch_of_state
from manyhands.optim.run.grid_assignment import GridAssignment
from manyhands.optim.run.progress import Claim
from manyhands.optim.run.reached_networks import ReachedNetworks
from manyhands.optim.run.run_machine import Decision, RunMachine
from manyhands.optim.run.run_records import declare_run, find_runs, nobody_is_in
from manyhands.optim.run.step_rounds import LEFT, Averaged, LocalState, StepRounds
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.optim.speed import describe_late_states
from manyhands.optim.state.catching_up import MissedStep, StepKeeper, download_state
from manyhands.peer import Presence
from manyhands.reach.clocks import clock_offset_s
from manyhands.runtime import TaskOwner
from manyhands.runtime.executor import run_to_end

logger = logging.getLogger(__name__)

LOADS_UNTIL_ADVICE = 4  # downloads of the state in a row without a step in between
MAX_CONTRADICTED = 3  # states to download in search of one whose sketch is that of the majority


@dataclass(eq=False)
class Collaboration:
    """One peer's part in one run: its manifest, progress, rounds and state server.

    Attributes:
        local: the trained state of this peer, which belongs to the training thread.
        loop: the event loop of the network thread, from :meth:`start` on.
        on_leaving: called once this peer has left the run, and all tasks of it have ended.
    """

    presence: Presence
    manifest: RunManifest
    local: LocalState
    averaging: AveragingConfig
    progress: ProgressConfig
    _: KW_ONLY
    is_auxiliary: bool
    allow_solo: bool
    start_new: bool | None
    on_leaving: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._num_vain_loads = 0  # downloads of the state since this peer last took part in a round
        self._state_donors: Sequence[PeerId] = ()  # of the last of these downloads
        self._alone_since: float | None = None  # loop time since when no other peer of the run is seen
        self._clock_offset_s: float | None = None
        self._has_begun = False  # whether no other peer had signed the settings of the run when this one did
        self._told_waiting_at = -math.inf  # loop time
        self._parts = AsyncExitStack()
        self._machine = RunMachine(self.averaging)
        self.tasks = TaskOwner("collaboration")
        self.run_id = self.manifest.run_id

    async def start(self) -> None:
        """Join the run.

        Raises:
            ConfigError: this peer's ticket is for another run, or it has none and the run is by invitation.
            ManifestMismatch: this peer's settings or model differ from those of the run.
            Unavailable: the DHT does not answer.
        """
        presence, manifest = self.presence, self.manifest
        self.loop = asyncio.get_running_loop()
        async with presence.leaving:
            pass  # wait until an optimizer that was garbage-collected a moment ago has left
        await presence.check_run(manifest.run_id)
        await presence.own_mode.decided()
        declare_run(presence.dht, manifest.run_id)
        self.tracker = ProgressTracker(
            presence.endpoint, presence.dht, manifest.run_id, manifest.target_batch_size, self.local.position,
            self.progress, is_auxiliary=self.is_auxiliary, began_at=presence.began_at,
            salt=presence.rng.randbytes(16),
        )  # fmt: skip
        belief = self.tracker.branches.belief
        belief.initial_peers = initial_peers = presence.dht.initial_peers
        self._networks = ReachedNetworks(presence.endpoint, initial_peers, self.tracker.judge)
        belief.poll = self._networks.poll
        self._drift = Drift(self.tracker, presence.peer_id, self.local.drift_bound, self.tracker.judges_of_parameters)
        self.tracker.roster = belief.roster = lambda: self.local.roster
        assignment = GridAssignment(self.tracker, presence.endpoint, self.averaging.max_group_size, presence.rng)
        async with AsyncExitStack() as parts:
            parts.push_async_callback(self._networks.close)
            members = presence.members.get(manifest.run_id)
            bounds = members.charter.charter.limits if members is not None else OPEN_LIMITS
            limits = MemberLimits(**{**msgspec.structs.asdict(bounds), "norm_grows": self.local.norm_grows})
            self._rounds = RoundRunner(
                presence.endpoint, manifest.run_id, manifest.fingerprint(), assignment, self.averaging, presence.rng,
                limits=limits,
            )  # fmt: skip
            parts.push_async_callback(self._rounds.close)
            parts.push_async_callback(self.tasks.close)
            try:
                self._server = StateServer(
                    presence.endpoint, manifest.run_id, self.local.capture, lambda: self.local.position
                )
            except ConfigError as error:
                raise ConfigError(
                    "this peer has an Optimizer already; close() that one first, or give this one a Peer of its own"
                ) from error
            parts.push_async_callback(self._server.close)
            keeper = StepKeeper(presence.endpoint, manifest.run_id, self._server, self.local.can_replay)
            parts.callback(keeper.close)
            self.step_rounds = StepRounds(
                presence.peer_id, self._rounds, assignment, self.tracker, self._drift, self.local,
                self.averaging, keeper,
            )  # fmt: skip
            parts.callback(self.step_rounds.close)
            self._contacts = Contacts(presence, manifest.run_id, self.tracker, self.tasks)
            parts.callback(self._contacts.close)
            self.tracker.on_outlook = self._on_news
            signed = presence.signed_manifests().get(manifest.run_id, b"")
            agreed = ManifestKeeper(presence.dht, presence.peer_id, manifest, self._check_new_run, signed)
            self._has_begun = await agreed.agree()
            branches = self.tracker.branches
            branches.has_begun_run = not self.is_auxiliary and bool(self.start_new or self._has_begun)
            branches.run_step = 0 if self.start_new else presence.run_steps.get(manifest.run_id, 0)
            if self.start_new:
                self._claim(Claim.TOLD)
            parts.push_async_callback(agreed.close)
            parts.push_async_callback(self.tracker.close)
            await self.tracker.find_place()
            self.tasks.spawn(self._watch_health(), name="watching this peer's health")
            self._parts = parts.pop_all()
        presence.on_close.append(self.close)

    async def _check_new_run(self) -> None:
        """Warn that this peer begins the run; raise ``RunNotFound`` if ``start_new=False`` forbids that."""
        dht = self.presence.dht
        if self.start_new or not dht.num_known_peers:
            return
        runs = await find_runs(dht, self.run_id)
        if any(run.run_id == self.run_id for run in runs):  # it is known, although no trainer is there, say its monitor
            return
        message = nobody_is_in(self.run_id, dht.num_known_peers, runs)
        if self.start_new is False:
            raise RunNotFound(f"{message}. Check the run id; start_new=True begins a run")
        if runs:  # else the user cannot have meant another run
            logger.warning("%s. This peer begins it; if that is meant, start_new=True says so", message)

    def health(self) -> Health:
        """This peer's health report."""
        now, since = asyncio.get_running_loop().time(), self._alone_since
        return Health(
            step=self.local.position.step,
            publish_failures=self.tracker.num_failures,
            alone_s=now - since if since is not None else None,
            last_said_goodbye=self.tracker.last_said_goodbye,
            clock_offset_s=self._clock_offset_s,
        )

    async def _watch_health(self) -> None:
        log = HealthLog()
        await asyncio.sleep(STALL_S)  # by then the others' records have been read
        while True:
            presence = self.presence
            others = list(filter(presence.endpoint.is_connected, self.tracker.observed()))
            if not others:  # if this peer's clock is wrong, it reads no records, so it knows no peers of the run
                others = [contact.peer_id for contact in presence.dht.contacts()]
            self._clock_offset_s = await clock_offset_s(presence.endpoint, presence.wall_clock, others)
            log.tell(self.health())
            await asyncio.sleep(MINUTE_S)

    def _on_news(self) -> None:
        if self.tracker.observed():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = asyncio.get_running_loop().time()
        self._machine.lull_until = -math.inf
        self._contacts.connect_to_those_in_need()
        self._rounds.matchmaker.meet_members()
        self.step_rounds.plan()

    async def close(self) -> None:
        """Leave the run. A second call only waits for the first one to end.

        The parts are closed in the reverse of their order in :meth:`start`:

        =================  =============================================  =============================================
        part               what it does                                   what the others do
        =================  =============================================  =============================================
        ``tracker``        replaces this peer's record by ``GOODBYE``     do not expect this peer any more, and do not
                                                                          count its samples towards the step
        ``step_rounds``    cancels the attempt at a step, if there is     of a leader: abort, unless it has decided
                           one (``RoundDriver.run``)                      before. Of another member: they lose this peer
                                                                          as if it had died (``round_machine.py``)
        ``_server``        accepts no more downloads                      load the state from another peer
        ``_rounds``        refuses the peers that have asked here for a   ask the next leader
                           place (``Matchmaker.close``)
        ``_rounds``        as the leader: waits until the members know    commit or abort, as it has decided
                           the verdict (``Answers.close``)
        =================  =============================================  =============================================

        In the roster, this peer then misses rounds. :meth:`manyhands.Peer.close` closes this first, and then all
        connections.
        """
        async with self.presence.leaving:
            if self.close not in self.presence.on_close:
                return
            self._machine.lull_until = -math.inf
            # a later attempt to join must know what this peer has seen of the run while it was at step 0 itself
            is_new = self.tracker.own.position.step == 0
            self.presence.run_steps[self.run_id] = self.tracker.branches.run_step if is_new else 0
            try:
                await self._parts.aclose()
            finally:
                self.presence.on_close.remove(self.close)
                if self.on_leaving is not None:
                    self.on_leaving()

    async def close_lost(self) -> None:
        """Leave the run after the optimizer was garbage-collected without ``close()``.

        So the others do not wait for this peer.
        """
        if self.close in self.presence.on_close:
            logger.info("The Optimizer of run %r is gone without close(): this peer leaves the run", self.run_id)
            await self.close()

    # at step 0

    def _claim(self, claim: Claim) -> None:
        if not self.tracker.own.is_auxiliary:
            self.tracker.claim(claim)

    def has_joined(self) -> None:
        """Take part in the run from now on, from this peer's position: publish, and read the others' records."""
        self._claim(Claim.JOINED)
        self.tracker.branches.is_joining = False
        self.tracker.start()

    def may_go_on_from_here(self) -> bool:
        """Whether this peer, while it joins, can go on from its own parameters.

        It can if it knows of no better branch, lacks no state of the run, and may begin the run if that does not exist
        yet.
        """
        tracker = self.tracker
        may_begin = self.start_new is not False or self._has_begun or bool(tracker.trainers())
        return tracker.is_on_best_branch() and not tracker.branches.lacks_state() and may_begin

    def no_state(self) -> str:
        """The message that this peer, at step 0, finds no state of the run to begin from, and what to do."""
        branches, here = self.tracker.branches, f"run {self.run_id!r}"
        step = branches.run_step
        if step and (refusal := branches.refusal()):
            return f"{here} was at global step {step}, and {refusal}"
        found = (
            f"{here} was at global step {step}, and no peer with its state" if step else f"no peer that trains {here}"
        )
        return (
            f"{found} can be reached now. This peer does not begin it anew from its initial parameters. If a peer has "
            "a checkpoint of the run, start that one: it goes on from there"
        )

    def _tell_why(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if reason and now >= self._told_waiting_at + MINUTE_S:
            self._told_waiting_at = now
            logger.warning("This peer waits, and makes no step: %s. If there is no peer with a state that it can use, "
                           "end all peers of the run, and begin it again", reason)  # fmt: skip

    # after a micro-batch

    async def decide(
        self, samples: int, samples_per_second: float, batch_s: float = 0.0, *, may_wait: bool = False
    ) -> run_machine.Decide:
        """Report what this peer has accumulated; returns what to do next.

        :mod:`.run_machine` decides. This method carries out its actions, such as reading records or asking peers.

        Args:
            batch_s: seconds that the last batch took; 0 if unknown.
            may_wait: whether this may wait for the others' batches, if these reach the target before another batch of
                this peer would end.
        Raises:
            ConfigError: another process with this peer's identity began earlier, or this peer is banned or has left.
        """
        if self.tasks.is_closed:
            raise ConfigError(LEFT)
        self.tracker.twin.check(asyncio.get_running_loop().time())
        self.presence.check_own(self.run_id)
        self.tracker.report(samples, samples_per_second, batch_s)
        self._contacts.warn_if_stranded()
        actions = self._on(run_machine.Batch(samples, batch_s, may_wait))
        while True:
            is_cut_off = False
            for action in actions:
                match action:
                    case run_machine.Decide():
                        if action.decision is Decision.RELOAD:
                            # something on this machine changes parameters between steps: replayed steps would differ
                            self.local.can_replay = False
                            self._drift.tries_reload()
                        self._tell_why(action.reason)
                        return action
                    case run_machine.Look(timeout_s):
                        await self.tracker.look(timeout_s)
                    case run_machine.WaitUntilDue(timeout_s):
                        await self.tracker.wait_until_due(timeout_s)
                    case run_machine.AskOthers(checks_link):
                        is_cut_off = await self._contacts.ask_others(checks_link=checks_link)
                    case run_machine.Tell():
                        self._contacts.tell(self.tracker.view.expected)
            actions = self._on(run_machine.Done(is_cut_off))

    def _on(self, event: run_machine.Event) -> list[run_machine.Action]:
        return self._machine.on(event, asyncio.get_running_loop().time(), self._situation())

    def _situation(self) -> run_machine.Situation:
        # a newcomer counts as one for LATE_ANSWER_S after its download, so that it can appear in a round
        return self.tracker.situation(
            lacks_state=self.no_state() if self.tracker.branches.lacks_state() else "",
            differs=self._drift.compare(),
            has_newcomers=bool(self._server.followers(LATE_ANSWER_S)),
            allow_solo=self.allow_solo,
        )

    async def becomes_due(self, within_s: float) -> bool:
        """Wait until a step is due; returns whether it is, within so many seconds."""
        await self.tracker.wait_until_due(within_s)
        return self.tracker.is_due()

    async def rest(self, seconds: float) -> None:
        """Sleep for so many seconds, or until a step becomes due."""
        if self.tracker.is_due():
            await asyncio.sleep(seconds)  # the step could not be made: without a pause the caller would try at once
        else:
            await self.tracker.wait_until_due(seconds)

    def is_lull(self, now: float) -> bool:
        """Whether batches need not be reported for now, as no step can be due; safe to call from any thread."""
        return now < self._machine.lull_until and not (self.tracker.is_called or self.tracker.twin.is_older)

    # from position to position

    def move(self, position: Position, lineage_samples: int, outcome: Averaged, sketch: Sketch, waiting: int) -> None:
        """Record that this peer has made a global step, which led to ``position``.

        Args:
            outcome: of the averaging.
            waiting: samples of this peer that wait for the next step already.
            sketch: of the new parameters; see :mod:`.drift`.
        """
        self.presence.own_mode.change_if_due()
        self._on(run_machine.Stepped(outcome.members))
        if outcome.members:
            self._num_vain_loads, self._state_donors = 0, ()
        self.tracker.move(position, lineage_samples, outcome.members, sketch.sums, outcome.blamed, waiting)
        self._drift.moved(position, sketch, is_in_grid=outcome.is_in_grid)

    def move_elsewhere(self, position: Position, lineage_samples: int, state: State | None = None) -> None:
        """Record that this peer is at another position, without a step.

        Args:
            state: the state that it has downloaded; None if it begins there, or has loaded a checkpoint.
        """
        self.presence.own_mode.change_if_due()
        if state is None:
            self._rounds.forget_unsent()
        donor = state.donors[0] if state is not None else None
        if donor is not None and position.step == 0:
            logger.log(
                logging.WARNING if self.tracker.branches.has_begun_run else logging.INFO,
                "The run begins from other initial parameters than those of this peer, which are replaced by those of "
                "peer %s%s", donor, ", which begins the run, too" if self.start_new else "",
            )  # fmt: skip
        self.tracker.load(position, lineage_samples, donor)
        self._drift.loaded()

    def replayed(self, position: Position, lineage_samples: int, sketch: Sketch) -> None:
        """Record that this peer has replayed a step that the others had made, which led to ``position``.

        Its parameters are compared with theirs, as after a step of its own.
        """
        self.presence.own_mode.change_if_due()
        self.tracker.load(position, lineage_samples, next(iter(self._state_donors), None))
        self._drift.moved(position, sketch, is_in_grid=False)

    def must_be_called_on(self) -> bool:
        """Whether only peers in client mode have the run's state.

        Then this peer must publish its addresses, so that they can connect to it.
        """
        return self.tracker.branches.waits_for_clients()

    def followers(self) -> set[PeerId]:
        """The newcomers that download the state from this peer at this moment."""
        return self._server.followers(0.0)

    async def is_waited_for(self) -> bool:
        """Whether another peer downloads the state from this one, or is behind its global step and still answers."""
        if self.followers():
            return True
        await self.tracker.look()
        return await self._contacts.any_answers(self.tracker.behind())

    async def choose_branch(self) -> None:
        """Wait until this peer can tell on which branch the run is.

        Raises:
            Unavailable: there is no state to load, or none of the peers that claim to have one could be reached.
        """
        tracker = self.tracker
        if tracker.is_on_best_branch():  # the caller has found that this peer may not go on from its own parameters
            raise Unavailable(self.no_state())
        while not tracker.should_load_state() and not tracker.is_on_best_branch() and not self.must_be_called_on():
            if not await self._networks.brings_news():
                raise Unavailable(
                    "neither this peer nor its initial peers have reached any of the peers that claim to have the "
                    "state of the run"
                )

    def _donors(self) -> list[PeerId]:
        """Peers that can hand out the state of the leading branch, the best ones first."""
        branch, records = self.tracker.leading_branch(), self.tracker.records()
        can_hand_out = self.tracker.branches.can_hand_out
        donors = [peer_id for peer_id in branch.holders if peer_id in records and can_hand_out(peer_id)]
        self.presence.rng.shuffle(donors)  # so that newcomers do not all ask the same one
        donors.sort(key=lambda peer_id: records[peer_id].is_client)  # clients last: they need their links for training
        return self._drift.ordered(donors, branch.position)

    async def download(self) -> State:
        """Download the state of the leading branch; raises ``Unavailable`` if none of its holders could send it."""
        donors = self._donors()
        loop = asyncio.get_running_loop()
        tracker = self.tracker
        if not donors and tracker.branches.waits_for_clients():
            where = ", ".join(map(str, self.presence.endpoint.addresses))
            raise Unavailable(
                "only peers in client mode have the state of the run, and none of them has connected to this one yet. "
                f"They dial this peer at {where}, so these addresses must accept connections"
            )
        started = loop.time()
        try:
            state = await self._download_believable(donors, tracker.leading_branch().position)
        except Unavailable:
            for donor in donors:
                tracker.report_without_state(donor)
            raise
        self._num_vain_loads += 1
        self._state_donors = state.donors
        if self._num_vain_loads == LOADS_UNTIL_ADVICE:
            took_s, target = loop.time() - started, self.manifest.target_batch_size
            speed = sum(record.samples_per_second for record in tracker.records().values())
            computing_s = target / speed if speed > 0 else 0.0
            logger.warning("%s", describe_late_states(self._num_vain_loads, took_s, computing_s, target))
        return state

    async def _download_believable(self, donors: Sequence[PeerId], position: Position) -> State:
        """Download a state whose sketch is that of the majority, in up to ``MAX_CONTRADICTED`` attempts.

        Without one, return the first state: users' own code may change the parameters of all peers after they have
        published their sketches.
        """
        contradicted: list[State] = []
        while not contradicted or (donors and len(contradicted) < MAX_CONTRADICTED):
            try:
                state = await download_state(
                    self.presence.endpoint, self.manifest, donors, position,
                    on_violation=self.tracker.shun, on_header=self._note_state,
                )  # fmt: skip
            except Unavailable:
                if contradicted:
                    break
                raise
            sketch = await run_to_end(sketch_of_state, state, self.manifest)
            if not self._drift.contradicts(state.header.position, sketch):
                for liar in {donor for other in contradicted for donor in other.donors}:
                    logger.warning("Peer %s sent a state of step %d that is not the majority's: it is not used, and "
                                   "that peer's claims are ignored for a while", liar, position.step)  # fmt: skip
                    self.tracker.shun(liar, f"peer {liar} sent a state that is not the majority's")
                return state
            contradicted.append(state)
            donors = [donor for donor in donors if donor not in state.donors]
        logger.warning("The state of peer %s is not what the majority published. It is used: code that changes the "
                       "parameters beside the optimizer may explain it", ", ".join(contradicted[0].donors))  # fmt: skip
        return contradicted[0]

    def _note_state(self, donor: PeerId, header: StateHeader) -> None:
        branches = self.tracker.branches
        if self.tracker.own.position.step == 0:
            branches.run_step = max(branches.run_step, header.position.step)

    async def missed_step(self) -> MissedStep | None:
        """The step that the run has made from this peer's position, if a peer has kept it.

        None if this peer must load the state instead, or is where the run is.
        """
        if self._state_donors:  # the others may have made steps since the download began
            await self.tracker.look(MOMENT_S, for_place=True)
        if not (self.local.can_replay and self.tracker.should_load_state()):
            return None
        members = self.local.roster.members  # they are asked before others: a stranger may be slow on purpose
        others = sorted(self._donors(), key=lambda donor: donor not in members)
        donors = dict.fromkeys([*self._state_donors, *others])  # the donors of the state have kept the steps since
        return await self.step_rounds.step_towards(self.tracker.leading_branch().position, list(donors))
