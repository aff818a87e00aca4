"""Tracks the positions of a run's peers: publishes this peer's progress when needed, and reads that of the others."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec

from manyhands.averaging.grid.seats import Seat
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord, SeenRecord
from manyhands.averaging.roster import Roster
from manyhands.averaging.timing import DAY_S, DIAL_S, IDLE_S, MOMENT_S
from manyhands.base.deadline import time_limit, wait_at_most
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.base.twin import Twin
from manyhands.dht import DhtNode
from manyhands.dht.config import MAX_NAMED
from manyhands.optim.config import ProgressConfig
from manyhands.optim.run.branches import Branch, BranchChoice
from manyhands.optim.run.progress import (
    LARGE,
    NUM_LEADERS,
    SAMPLE,
    Claim,
    ProgressLog,
    ProgressReader,
    View,
    branch_order,
    crowd_factor,
    gone_to,
    is_news,
    next_refresh_s,
)
from manyhands.optim.run.run_machine import Situation
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

IDLE_BATCHES = 5
"""A trainer without a new sample for this many batch times (at least ``IDLE_S``) is idle, and no longer
published."""
MIN_STRANGERS = 64
"""Once this peer has made a step in one group, at most this many peers outside of the roster count, or as many as there
are in the roster: a run may double with each step (docs/adr/0062-a-run-may-double.md)."""
MAX_IN_NEED = 2
"""The number of peers behind it to which a client connects at once, so that they can ask it for its state."""
OVERDUE_SHARE = 0.2
"""Share of the time of a step after which a member of a large run no longer relies on its prediction, which is off by
about 5% (docs/adr/0048-a-sample-of-the-records.md)."""
OTHERS_PATIENCE = 3
"""Members that are not among the next leaders wait this many times as long for a call before they read all
records. A leader's call by then saves them that."""
CALLED_SHARE = 0.5
"""Share of the target that this peer itself must predict before another peer's call makes a step due. Less than all, as
this peer may have read the others' records too early. More than none, so that no peer can force steps without samples.
"""


class ProgressTracker(ProgressReader):
    """The progress of all peers of a run. Any thread may read :attr:`progress` and :attr:`outlook`.

    "Here" means at this peer's position. *Published* samples are those in the peers' records; *predicted* ones are
    extrapolated from the records to now.

    Attributes:
        on_outlook: called whenever the outlook may have changed.
        progress: the published progress of the peers here; it decides whether a global step is due.
        outlook: the predicted progress of the peers here; it decides when to publish and to read.
        is_called: another peer has begun a round here, and this one has not come to it yet.
        is_moving: a round has committed, and its update is not made yet. Meanwhile nothing is published, as the
            position is about to change.
        is_busy: this peer averages, or waits for others, so it is not idle although it computes no samples.
        roster: returns the roster of the run at this peer's position.
        num_together: number of members of the round that led to this position, if one round of one group did; else 0.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dht: DhtNode,
        run_id: str,
        target_batch_size: int,
        position: Position,
        config: ProgressConfig,
        *,
        is_auxiliary: bool,
        began_at: float,
        salt: bytes,
    ) -> None:
        super().__init__(endpoint, dht, run_id, config.min_refresh_s)
        self._salt = salt
        self.target_batch_size = target_batch_size
        self.on_outlook: Callable[[], None] | None = None
        self.is_called = self.is_moving = self.is_busy = False
        self.num_together = 0
        self.roster: Callable[[], Roster] = Roster
        self.twin = Twin(endpoint.peer_id, began_at, asyncio.get_running_loop().time())
        self._config = config
        self._log = ProgressLog()
        self.own = PeerRecord(
            position, endpoint.client_mode, self._addresses(), config.ttl_s, is_auxiliary=is_auxiliary,
            began_at=began_at,
        )  # fmt: skip
        self._counted_at = 0.0  # loop time when this peer's samples were counted
        self._moved_at = asyncio.get_running_loop().time()  # of the last change of this peer's position
        self._left: tuple[Position, frozenset[PeerId]] = position, frozenset()  # the last one, and who went on with it
        self._reached_at = math.inf  # loop time when the predicted samples reached the target
        self._brought = 0  # samples with which this peer came there
        self._read_at = -math.inf  # loop time of the last read
        self._wholly_read_at = -math.inf  # loop time of the last read from more than one holder
        self.branches = BranchChoice(endpoint.peer_id, self.own, endpoint.carries_bulk)
        self._donor: PeerId | None = None
        self._view: View | None = None
        self._is_started = False
        self._read_wanted = asyncio.Event()
        self._due = asyncio.Event()  # a step may be due now
        self._tasks = TaskOwner("progress")
        self.progress = self.outlook = View({}, position).progress(self.own, target_batch_size)

    def start(self) -> None:
        """Begin to publish and to read; does nothing if that has begun."""
        if self._is_started:
            return
        self._is_started = True
        self._dht.met[self._run_id] = lambda: self.roster().members
        self._counted_at = asyncio.get_running_loop().time()
        self.publish_soon(urgently=True)
        self._tasks.spawn(self.publish_forever(), name="publishing")
        self._tasks.spawn(self._read_forever(), name="reading")

    async def close(self) -> None:
        """Stop, and tell the others that this peer left the run."""
        await self._tasks.close()
        self._dht.met.pop(self._run_id, None)
        if self._is_started and not self.twin.is_older:
            await self.say_goodbye()

    # this peer's position

    def claim(self, claim: Claim) -> None:
        """Claim that the run should begin from this peer's parameters, if it is at step 0."""
        if claim > self.own.claim:
            self._set_own(claim=claim)
            self.publish_soon()

    def report(self, samples: int, samples_per_second: float, batch_s: float = 0.0) -> None:
        """Take in how many samples this peer has accumulated for the next global step, and how fast it computes.

        Args:
            batch_s: seconds that the last batch took; 0 if unknown.
        """
        self._set_own(samples=samples, samples_per_second=samples_per_second, batch_s=batch_s)
        self._update_progress()
        self._publish_news()

    @property
    def is_idle(self) -> bool:
        """Whether this peer's program seems to have stopped training, as a notebook does whose cell was interrupted."""
        idle_s = max(IDLE_S, IDLE_BATCHES * self.own.batch_s)
        is_trainer = not self.own.is_auxiliary and not self.is_busy
        return is_trainer and asyncio.get_running_loop().time() - self._counted_at > idle_s

    def sit(self, seat: Seat) -> None:
        """Take a seat in the grid of a large run, and publish it soon."""
        if seat != self.own.seat:
            self._set_own(seat=seat)
            self._publish_news()

    def has_learnt_from(self, peer_id: PeerId) -> bool:
        """Whether a peer is a member of the roster, or sent the last state loaded here."""
        return peer_id == self._donor or peer_id in self.roster().members

    def move(
        self,
        position: Position,
        lineage_samples: int,
        together_with: Sequence[PeerId],
        sketch: bytes = b"",
        blamed: Collection[PeerId] = (),
        samples: int = 0,
    ) -> None:
        """Take in that this peer has made a global step, which led to ``position``.

        Args:
            together_with: the members of the round, this peer included; empty for a step alone.
            blamed: members that were lost in the round, or at fault: they are missing until they publish again.
            samples: of this peer, that wait for the next step already: it computed them beside this one.
        """
        self.num_together = 0 if self.own.seat.layout.sides else len(together_with)
        self._left = self.own.position, frozenset(together_with) - frozenset(blamed)
        self._note_round(position, lineage_samples, together_with, blamed)
        self._go_to(position, lineage_samples, sketch, samples)

    def load(
        self,
        position: Position,
        lineage_samples: int,
        donor: PeerId | None = None,
    ) -> None:
        """Take in that this peer has loaded the state of ``position`` from a donor, or begins there without one."""
        self.num_together, self._donor = 0, donor
        self._left = self.own.position, frozenset()
        if donor is not None and position.step == 0:
            seen = self.observed().get(donor)
            self._set_own(claim=seen.record.claim if seen is not None else Claim.JOINED)
        # no sketch: the donor's code may have changed its parameters, by a clamp say, after it published its sketch
        self._go_to(position, lineage_samples, b"")

    def _go_to(self, position: Position, lineage_samples: int, sketch: bytes, samples: int = 0) -> None:
        # a call stays open if this peer only reloads its state
        self.is_called = self.is_called and position == self.own.position
        self.is_moving = False
        self._moved_at = asyncio.get_running_loop().time()
        self._brought = samples
        self._note_change()
        self._set_own(
            position=position, samples=samples, lineage_samples=lineage_samples, sketch=sketch,
            sketch_step=position.step,
        )  # fmt: skip
        self.judge()
        self._publish_news(urgently=True)
        if self.is_partial and not set(self.roster().leaders()[:1]) <= self.observed().keys():
            self.refresh_soon()  # the next leader is this peer, which must read all, or one whose call it would ignore

    def _note_round(
        self, position: Position, lineage_samples: int, members: Sequence[PeerId], blamed: Collection[PeerId]
    ) -> None:
        """Assume that the members of a round are at ``position`` until they publish newer records.

        Those that are blamed count as missing.
        """
        now = asyncio.get_running_loop().time()
        for peer_id in members:
            self._missing.pop(peer_id, None)
            seen = self._seen.get(peer_id)
            if seen is not None and seen.record.position.step < position.step:
                self._keep(peer_id, gone_to(seen, position, lineage_samples, now))
            if peer_id in blamed:
                super().report_missing(peer_id)
        self.branches.belief.has_stepped = True

    def _brought_up_to_date(self, peer_id: PeerId, seen: SeenRecord) -> SeenRecord:
        position, members = self._left
        was_published_before = seen.record.position == position and seen.since <= self._moved_at + MOMENT_S
        if peer_id in members and was_published_before:
            return gone_to(seen, self.own.position, self.own.lineage_samples, self._moved_at)
        return seen

    def _set_own(self, **changes: object) -> None:
        before = self.own
        super()._set_own(**changes)
        if (self.own.samples, self.own.position) != (before.samples, before.position):
            self._counted_at = asyncio.get_running_loop().time()

    # publishing

    def _publish_news(self, *, urgently: bool = False) -> None:
        """Publish this peer's record soon, if the others could not have predicted it."""
        if self.published is not None:
            published, published_at = self.published
            age_s = asyncio.get_running_loop().time() - published_at
            margin_s = max(self.own.batch_s, 2 * self._config.min_refresh_s)
            is_near = not margin_s < self.outlook.eta_s < math.inf
            target, num_peers = self.target_batch_size, self.outlook.num_peers
            if not is_news(published, age_s, self.own, target, num_peers, is_near):
                return
        self.publish_soon(urgently=urgently)

    def _record_to_publish(self) -> PeerRecord | None:
        # a peer without the run's state must not publish step 0: newcomers would begin the run anew with it
        if self.is_moving or self.is_idle or self.branches.lacks_state():
            return None
        counted_s_ago = max(asyncio.get_running_loop().time() - self._counted_at, 0.0)
        return msgspec.structs.replace(
            self.own, counted_s_ago=counted_s_ago, ttl_s=self._ttl_s(), addresses=self._addresses(), **self._ways()
        )

    def _ttl_s(self) -> float:
        return self._config.ttl_s * self._crowd_factor

    # records of the others

    async def look(self, timeout_s: float = DIAL_S, *, for_place: bool = False) -> None:
        """Read the others' records now; if that fails, the records read before stay.

        A slow holder of the records holds nothing up if those of the first one make a step due.

        Args:
            for_place: only to see where the run is; see :meth:`find_place`.
        """
        try:
            async with time_limit(timeout_s, "reading the progress of the others"):
                if for_place:
                    await self.find_place()
                elif self.is_due():
                    await self.refresh()
                else:
                    await self._read_until_due()
        except ManyhandsError as error:
            logger.debug("the progress of the others cannot be read: %s", error)

    async def _read_until_due(self) -> None:
        """Read from one holder and from most of them at the same time; stop when a step is due."""
        quick = asyncio.ensure_future(self.refresh(quickly=True))
        whole = asyncio.ensure_future(self.refresh())
        try:
            await asyncio.wait([quick, whole], return_when=asyncio.FIRST_COMPLETED)
            if not (self.is_due() or whole.done()):
                await asyncio.wait([whole])
            if whole.done():
                whole.result()
        finally:
            for read in (quick, whole):
                read.cancel()
            await asyncio.gather(quick, whole, return_exceptions=True)

    async def refresh(self, *, quickly: bool = False) -> None:
        """Read the others' records now; with ``quickly`` from only one of the DHT nodes that hold them.

        If there are more than can count, those of peers that count are read, and of some random others.
        """
        if names := self._names_among_many():
            read = super().refresh_named(names, MIN_STRANGERS, quickly=quickly)
        else:
            read = super().refresh(quickly=quickly)
        await self._judged_after(read)
        if not quickly:
            self._wholly_read_at = self._read_at

    def _names_among_many(self) -> set[PeerId]:
        """The peers to read by name where more records are held than can count; none where all are read."""
        known = self._known_peers()
        if known is None or self.num_held <= len(known) + _most_strangers(known):
            return set()
        names = known | self._seen.keys()
        return names if len(names) <= MAX_NAMED else set()  # of more, a holder would be asked for random ones

    async def refresh_part(self, most: int, names: Collection[PeerId]) -> None:
        await self._judged_after(super().refresh_part(most, names))

    async def _judged_after(self, read: Coroutine[Any, Any, None]) -> None:
        try:
            await read
        finally:
            self.judge()  # also after a failure: some records may have expired
        self._read_at = asyncio.get_running_loop().time()
        if self.twin.is_to_be_told(self._read_at):
            self.publish_soon()

    async def find_place(self) -> None:
        """Read the records to see where the run is: in a large run in one group a sample is enough.

        Raises:
            Unavailable: the DHT does not answer.
        """
        is_small = not self.is_partial and 0 < self._num_known() <= LARGE
        if not is_small:
            await self._read_sample()
            records = self.records().values()
            # at step 0 a single claim decides where the run begins; in a grid this peer needs the seats of all
            is_enough = any(record.position.step for record in records) and not any(map(_has_seat, records))
            if self.is_partial and is_enough and self._num_known() > LARGE:
                return
        await self.refresh()

    def _num_known(self) -> float:
        """Number of the other peers, at any position; in a large run by estimate."""
        return len(self.observed()) * self.weight

    async def _read_sample(self) -> None:
        leaders = self.roster().leaders()[:NUM_LEADERS]
        await self.refresh_part(SAMPLE, self.branches.belief.initial_peers().union(leaders))

    def _surplus(self) -> Collection[PeerId]:
        """The peers outside of the roster beyond those that may count, drawn by lot; see ``MIN_STRANGERS``."""
        known = self._known_peers()
        if known is None or len(strangers := self._seen.keys() - known) <= (most := _most_strangers(known)):
            return ()
        return sorted(strangers, key=self._lot)[most:]

    def _known_peers(self) -> set[PeerId] | None:
        """The peers that are no strangers, and always count; None if all count.

        A grid needs the seats of all, and a peer that has made no step cannot tell strangers from others.
        """
        roster = self.roster()
        if not (self.branches.belief.has_stepped and roster.members) or self.own.seat.layout.sides:
            return None
        # of the last round, auxiliary peers too: the roster has none of them
        return {*roster.standings, *roster.former, *self._left[1], *self.branches.belief.initial_peers()}

    def _lot(self, peer_id: PeerId) -> bytes:
        """A number that is the same each time, and that nobody else can know: nor does it say who came first."""
        return hashlib.blake2b(peer_id.encode(), key=self._salt, digest_size=8).digest()

    def _look_at_own(self, seen: SeenRecord, now: float) -> None:
        self.twin.seen(seen.record.began_at, seen.since, now)

    def heard(self, peer_id: PeerId, record: PeerRecord) -> None:
        """Take in a record that a peer has sent directly, not through the DHT."""
        record = msgspec.structs.replace(record, ttl_s=min(record.ttl_s, DAY_S))
        self._keep(peer_id, SeenRecord(record, asyncio.get_running_loop().time() + record.ttl_s, is_direct=True))
        self.judge()

    def report_missing(self, peer_id: PeerId) -> None:
        """Count a peer that did not come to a round as missing, unless it is ahead: its state can still be loaded."""
        seen = self.observed().get(peer_id)
        if seen is not None and seen.record.position.step <= self.own.position.step:
            super().report_missing(peer_id)

    def report_without_state(self, peer_id: PeerId) -> None:
        """Count a peer that could not send the state as missing: it is asked again only after a fresh record."""
        super().report_missing(peer_id)

    def shun(self, peer_id: PeerId, reason: str) -> None:
        """Ignore a peer's claims of a better branch for a while, as it sent a state that could not be used."""
        self.branches.shun(peer_id, asyncio.get_running_loop().time(), reason)
        self.judge()

    def refresh_soon(self) -> None:
        """Read the others' records soon, without waiting for the next regular read."""
        self._read_wanted.set()

    def judge(self) -> None:
        """Judge the branches anew, and update the progress, after a change of any record or of this peer's position."""
        now = asyncio.get_running_loop().time()
        self.branches.look(self.own, self.records(), now)
        self._update_progress()

    def _update_progress(self) -> None:
        view, enough = self.view, self.target_batch_size
        self.progress = view.progress(self.own, enough)
        self.outlook = view.progress(self.own, enough, asyncio.get_running_loop().time())
        if self.is_partial and self._endpoint.peer_id not in self.roster().members:
            self.progress = self.outlook  # nobody may call a guest, and what a sample has published is old
        if self.outlook.samples < enough:
            self._reached_at = math.inf
        elif self._reached_at == math.inf:
            self._reached_at = asyncio.get_running_loop().time()
        if self.progress.samples >= enough:
            self._due.set()
        if self.on_outlook is not None:
            self.on_outlook()

    @property
    def view(self) -> View:
        """The other peers here, as last read; a new object only after a record has changed or expired."""
        observed = self.observed()
        if self._view is None or self._view.observed is not observed:
            roster = self.roster()
            barred = [peer_id for peer_id in roster.standings if roster.barred_rounds(peer_id)]
            weight = self.weight if self.is_partial else None
            self._view = View(observed, self.own.position, self.missing(), barred, weight)
        return self._view

    # peers at this position, and whether a step is due

    def situation(
        self,
        *,
        lacks_state: str,
        differs: bool,
        has_newcomers: bool,
        allow_solo: bool,
    ) -> Situation:
        """What this peer knows now, for its next decision. Each attribute is defined at :class:`Situation`.

        The caller passes on what the tracker does not know; the arguments but ``allow_solo`` become attributes.

        Args:
            allow_solo: as for :class:`manyhands.Optimizer`.
        """
        own_samples = 0 if self.own.is_auxiliary else self.own.samples
        return Situation(
            position=self.own.position,
            others=self.view,
            missing_samples=self.target_batch_size - own_samples,
            voters=self.roster().voters,
            is_worth_a_look=self.is_worth_a_look(),
            has_better_branch=self.should_load_state(),
            lacks_state=lacks_state,
            differs=differs,
            is_near=self.is_near(),
            is_due=self.is_due(),
            eta_s=min(self.progress.eta_s, self.outlook.eta_s),
            can_meet=self.can_meet_somebody(),
            is_alone=self._is_alone(allow_solo),
            has_newcomers=has_newcomers,
        )

    def _is_alone(self, allow_solo: bool) -> bool:
        """See :class:`Situation`. A client must not begin a branch of its own while others train."""
        if self._endpoint.client_mode and self.trainers():
            return allow_solo and self.is_stranded()
        return self.num_peers_here() == 1 and self.is_on_best_branch()

    def num_peers(self) -> int:
        """Number of peers that train, at any position of the run, this one included."""
        return len(self.trainers()) + (not self.own.is_auxiliary)

    def num_peers_here(self) -> int:
        """Number of peers that train here, this one included, whether or not they can be reached."""
        return len(self.view.trainers) + (not self.own.is_auxiliary)

    def is_due(self) -> bool:
        """Whether the published samples reach the target, or another peer calls and the predicted ones are enough."""
        if self.progress.samples >= self.target_batch_size:
            return True
        return self.is_called and self.outlook.samples >= CALLED_SHARE * self.target_batch_size

    async def wait_until_due(self, timeout_s: float) -> None:
        """Wait until :meth:`is_due`, or for the timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self.is_due() and (left_s := deadline - loop.time()) > 0:
            self._due.clear()
            await wait_at_most(self._due, left_s)

    def is_near(self) -> bool:
        """Whether the target is predicted to be at most two batches, of the slowest other trainer here, away.

        Never in a grid or in a crowd: there each peer would have to send its progress to too many others.
        """
        if self._crowd_factor > 1.0 or self.own.seat.layout.sides:
            return False
        longest_s = max([seen.record.batch_s for seen in self.view.trainers.values()], default=0.0)
        return self.outlook.eta_s <= 2 * longest_s

    def call_to_round(self) -> None:
        """Take in that another peer has begun a round here."""
        is_new, self.is_called = not self.is_called, True
        self._due.set()
        if is_new and not self.is_due():
            self.refresh_soon()  # the others may have published samples that this peer has not read

    def can_meet_somebody(self) -> bool:
        """Whether a round here could have another member: one calls, or is expected and a leader can be dialled."""
        return self.is_called or (bool(self.view.expected) and not self.lacks_leader())

    def lacks_leader(self) -> bool:
        """Whether no peer here could lead a round: neither this one nor any expected one accepts connections."""
        return self._endpoint.client_mode and not self.is_called and all(self.view.expected.values())

    def is_stranded(self) -> bool:
        return self._endpoint.client_mode and super().is_stranded()

    def in_need(self) -> list[PeerId]:
        """Up to ``MAX_IN_NEED`` peers that accept connections, if all that do are on worse branches; else none."""
        believed = self.branches.believed.items()
        hosts = {peer_id: branch_order(record) for peer_id, record in believed if not record.is_client}
        own = branch_order(self.own)
        return sorted(hosts)[:MAX_IN_NEED] if all(rank < own for rank in hosts.values()) else []

    def behind(self) -> list[PeerId]:
        """The trainers, except missing ones, that have yet to reach this peer's global step."""
        missing = self.missing()
        here = self.own.position.step
        return [
            peer_id
            for peer_id, record in self.trainers().items()
            if peer_id not in missing and record.position.step < here
        ]

    def judges_of_parameters(self) -> frozenset[PeerId]:
        """The other peers whose parameters this peer's are compared with; see :meth:`.Belief.judges`."""
        return self.branches.belief.judges(self.own, self.records())

    # choice of the branch

    def leading_branch(self) -> Branch:
        """The branch of the run that this peer should be on, among those whose state is available."""
        return self.branches.leading(self.missing())

    def should_load_state(self) -> bool:
        """Whether there is a better branch than this peer's whose state is available."""
        return self.leading_branch().position != self.own.position

    def is_on_best_branch(self) -> bool:
        """Whether no better branch than this peer's is known, with or without an available state."""
        return self.branches.best().position == self.own.position

    # when to read

    async def _read_forever(self) -> None:
        last_samples, delay_s = -1, 0.0
        while True:
            self._read_wanted.clear()
            # mostly from one holder of the records; each DIAL_S, unless in a crowd, from most of them
            is_recent = asyncio.get_running_loop().time() - self._wholly_read_at < DIAL_S
            try:
                if self._reads_sample():
                    await self._read_sample()
                else:
                    await self.refresh(quickly=is_recent or self._crowd_factor > 1.0)
            except ManyhandsError as error:
                logger.warning("The progress of the others cannot be read: %s", error)
            delay_s = self._next_read_s(delay_s)
            if self.outlook.samples != last_samples:
                now = asyncio.get_running_loop().time()
                self._log.tell(self.own.position.step, self.outlook, delay_s, now)
                last_samples = self.outlook.samples
            await wait_at_most(self._read_wanted, delay_s)

    @property
    def _crowd_factor(self) -> float:
        return crowd_factor(self.outlook.num_peers)

    def _next_read_s(self, last_s: float) -> float:
        """Seconds until the next read.

        At the target they double from read to read: then nothing is left to predict, and batches trigger reads.
        """
        config = self._config
        longest_s = config.max_refresh_s * self._crowd_factor
        if self._reads_sample():
            now = asyncio.get_running_loop().time()
            return min(max(self._overdue_at(now) - now, config.max_refresh_s), longest_s)
        if self.is_due() or self.outlook.samples >= self.target_batch_size:
            first_s = config.max_refresh_s if self._is_led else config.min_refresh_s
            return min(max(2 * last_s, first_s), longest_s)
        return next_refresh_s(self.outlook, config)

    def _reads_sample(self) -> bool:
        """Whether this peer reads the records of a sample: in a large run in one group, unless it is to lead.

        A member that nobody has called long after the predicted target reads all, as the leader would; those that would
        lead next do so first.
        """
        members = self.roster().members
        if not members or self.own.seat.layout.sides or self._num_known() <= LARGE:
            return False
        if self._endpoint.peer_id not in members:
            return True
        now = asyncio.get_running_loop().time()
        return now < self._overdue_at(now) and self._next_leader() != self._endpoint.peer_id

    def _overdue_at(self, now: float) -> float:
        """When the leader should have called at the latest, by a prediction from a sample; infinite if it has."""
        if self.is_called or self.is_busy or self.is_moving:
            return math.inf
        reached_at = min(self._reached_at, now + self.outlook.eta_s)
        patience_s = max(self._config.max_refresh_s, OVERDUE_SHARE * (reached_at - self._moved_at))
        is_deputy = self._endpoint.peer_id in self.roster().leaders()[:NUM_LEADERS]
        return reached_at + patience_s * (1 if is_deputy else OTHERS_PATIENCE)

    def is_worth_a_look(self) -> bool:
        """Whether to read now, as the target should be reached although the records read so far do not say so."""
        since_s = asyncio.get_running_loop().time() - self._read_at
        if self.is_due() or since_s < self._config.min_refresh_s:
            return False
        is_expected = self.outlook.samples >= self.target_batch_size or self._has_brought_many()
        return self.is_called or (is_expected and not self._is_led)

    def _has_brought_many(self) -> bool:
        """Whether the step in the background took so long that the next one may be due.

        This peer had half of its part of the target when that step ended. The others should have as many, but count as
        without samples until their records are read.
        """
        return self._read_at < self._moved_at and 2 * self._brought * self.outlook.num_peers >= self.target_batch_size

    @property
    def _is_led(self) -> bool:
        """Whether another peer reads at the target in place of this one, and calls it: in a crowd the leader does."""
        if self._crowd_factor == 1.0 or self.own.seat.layout.sides:
            return False
        members = self.roster().members
        if members and self._endpoint.peer_id not in members:
            return False  # the leader may not know this peer
        return self._next_leader() not in (None, self._endpoint.peer_id)

    def _next_leader(self) -> PeerId | None:
        """The peer that leads the next round, as far as this peer knows; None if nobody here can."""
        hosts = {peer_id for peer_id, seen in self.view.awaited.items() if not seen.record.is_client}
        if not self.own.is_client:
            hosts.add(self._endpoint.peer_id)
        return next((peer_id for peer_id in self.roster().leaders(hosts) if peer_id in hosts), None)


def _most_strangers(known: Collection[PeerId]) -> int:
    return max(MIN_STRANGERS, len(known))


def _has_seat(record: PeerRecord) -> bool:
    return bool(record.seat.layout.sides)
