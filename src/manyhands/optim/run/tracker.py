"""Publishes this peer's progress, and reads that of the others."""

from __future__ import annotations

import asyncio
import bisect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from manyhands.averaging.grid.seats import Seat
from manyhands.averaging.messages import Position
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode
from manyhands.optim.config import ProgressConfig
from manyhands.optim.run.belief import Belief, is_ahead
from manyhands.optim.run.progress import (
    RANK_DELAY_S,
    Branch,
    Numbers,
    Progress,
    ProgressRecord,
    busy_until,
    leading_branch,
    next_refresh_s,
    rank_of,
    stretch,
    sum_up,
)
from manyhands.optim.run.progress_reader import Observed, ProgressReader, progress_key
from manyhands.optim.run.publisher import Publisher
from manyhands.optim.run.timed_event import TimedEvent
from manyhands.optim.run.twin import Twin
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

CLIENT_PATIENCE_S = 60.0
"""Peers in client mode that are ahead, and do not connect to this one for so long, are not waited for any more."""

WHOLE_READ_PERIOD_S = 5.0
"""So often the records are read from most of their holders."""

MAX_IN_NEED = 2
"""Peers that are behind, and that one in client mode calls on so that they can ask it for its state."""

CALLED_SHARE = 0.5
"""Of the target: what this peer must reckon with itself for a call to make a step due. Records are late, and it may not
have read of those who have come; but nobody can have steps made of next to nothing."""
DOUBT_S = 5.0
"""A peer that is not believed for so long is named."""
SHUN_S = 600.0
"""For so long a peer that handed out a state that cannot be used is not followed."""


class ProgressTracker:
    """This peer's place in the run. Lives on the network thread; :attr:`progress` may be read from any.

    It is the :class:`manyhands.averaging.matchmaking.follower.Roster` of the run's rounds.

    Args:
        began_at: when this process began, by the wall clock.
        is_auxiliary: this peer has no data; it is not expected in a round, unless nobody else can be dialled.

    Attributes:
        on_outlook: called whenever the outlook may have changed, also by a step.
        progress: of the collaboration, as the peers have said; this decides whether a global step is due.
        outlook: as it must be by now, reckoned from what they have said; this decides when to publish and to read.
        num_together: members of the one group whose round led to this position; 0 if this peer came here otherwise.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dht: DhtNode,
        run_id: str,
        target_batch_size: int,
        position: Position,
        config: ProgressConfig,
        on_update: Callable[[Progress, float], None] | None = None,
        *,
        is_auxiliary: bool = False,
        began_at: float = 0.0,
    ) -> None:
        self.target_batch_size = target_batch_size
        self.on_outlook: Callable[[], None] | None = None
        self.reader = ProgressReader(endpoint, dht, run_id)
        self._endpoint = endpoint
        self._config = config
        self._on_update = on_update
        addresses = [str(address) for address in endpoint.addresses]
        own = ProgressRecord(
            position, 0, 0.0, 0, endpoint.client_mode, addresses, config.ttl_s, is_auxiliary=is_auxiliary,
            began_at=began_at,
        )  # fmt: skip
        self.twin = self.reader.twin = Twin(endpoint.peer_id, began_at, asyncio.get_running_loop().time())
        self._publisher = Publisher(
            dht, progress_key(run_id), endpoint.peer_id, own, config, target_batch_size, lambda: self.outlook
        )
        self._read_at = self._wholly_read_at = -math.inf  # loop time
        self._missing: dict[PeerId, int] = {}
        self.num_together = 0
        self._donor: PeerId | None = None
        self._without_state: dict[PeerId, int] = {}
        self._shunned: dict[PeerId, float] = {}  # until when (loop time)
        self._belief = Belief()
        self._belief.been_at(position)
        self._doubted: tuple[tuple[object, ...], frozenset[PeerId]] | None = None  # and from what it follows
        self._doubted_since: dict[PeerId, float] = {}  # loop time; infinitely late once it was said
        self._waits_since: float | None = None  # loop time; for a peer in client mode that has the state
        self._is_called = False
        self._is_in_round = False
        self._is_started = False
        self._is_read_wanted = False
        self._due = TimedEvent()  # a step may be due now
        self._stirred = TimedEvent()  # there is something to read, or reading has to be planned anew
        self._tasks = TaskOwner("progress")
        self.progress = self.outlook = sum_up(self._trainer, 0, 0, 0.0, target_batch_size)
        self._branch: tuple[tuple[object, ...], Branch] | None = None  # and from what it follows
        self._expected: tuple[tuple[int, Position], Mapping[PeerId, bool]] | None = None  # likewise

    def start(self) -> None:
        """Begin to publish and to read, if that has not begun."""
        if self._is_started:
            return
        self._is_started = True
        self._publisher.start()
        self._tasks.spawn(self._publisher.publish_forever(), name="publishing")
        self._tasks.spawn(self._read_forever(), name="reading")

    async def close(self) -> None:
        """Stop, and tell the others that this peer left the run."""
        await self._tasks.close()
        if self._is_started and not self.twin.is_older:
            await self._publisher.say_goodbye()

    # where this peer stands

    @property
    def _own(self) -> ProgressRecord:
        return self._publisher.own

    @property
    def _trainer(self) -> ProgressRecord | None:
        """The same, if it counts among those who train."""
        return None if self._own.is_auxiliary else self._own

    @property
    def num_publish_failures(self) -> int:
        """Times in a row that this peer's record could not be published."""
        return self._publisher.num_failures

    def position(self) -> Position:
        return self._own.position

    @property
    def lineage_samples(self) -> int:
        return self._own.lineage_samples

    @property
    def own_record(self) -> ProgressRecord:
        """What this peer would publish now."""
        return self._own

    def recently_met(self, num: int) -> list[PeerId]:
        """The last ones that were in a committed round with this peer."""
        return self._belief.recently_met(num)

    def has_learnt_from(self, peer_id: PeerId) -> bool:
        """Whether a peer was in a committed round with this one, or has handed out the last state loaded here."""
        return peer_id == self._donor or self._belief.has_met(peer_id)

    def heard(self, peer_id: PeerId, record: ProgressRecord) -> None:
        """A peer has told directly where it is."""
        self.reader.heard(peer_id, record)
        self._update_progress()

    def report(self, samples: int, samples_per_second: float, batch_s: float = 0.0) -> None:
        """This peer has accumulated ``samples`` since the last global step; a batch takes it so many seconds."""
        own = msgspec.structs.replace(
            self._own, samples=samples, samples_per_second=samples_per_second, batch_s=batch_s
        )
        self._update(own)

    def seat(self) -> tuple[int, Seat]:
        """This peer's place among the groups of a large run, and as of which round."""
        return self._own.seat_round, self._own.seat

    def sit(self, round_number: int, seat: Seat) -> None:
        """Take a place among the groups of a large run."""
        if (round_number, seat) != self.seat():
            self._update(msgspec.structs.replace(self._own, seat=seat, seat_round=round_number))

    def tell_options(self, options: Numbers) -> None:
        """This peer steps with these options from the position on to which :meth:`move` takes it, which follows."""
        self._publisher.own = msgspec.structs.replace(self._own, options=options)

    def tell(self, sketch: bytes) -> None:
        """These are sums of the parameters that this peer holds at its position."""
        own = self._own
        self._publisher.own = msgspec.structs.replace(own, sketch=sketch, sketch_step=own.position.step)
        self._publisher.tell_news()

    def expect_move(self) -> None:
        """A round committed, and its result is being applied: where this peer was is not published any more."""
        self._publisher.is_moving = True

    def met(self, fingerprints: Iterable[bytes]) -> None:
        """The rounds of a step in a grid; :meth:`move` follows when it is made."""
        self.reader.met(self._own.position, fingerprints)

    def loaded(self, position: Position, recent_rounds: list[bytes], donor: PeerId | None = None) -> None:
        """A state has come from another peer, and what that one says of its rounds; :meth:`move` follows."""
        self._donor = donor
        self.reader.loaded(position, recent_rounds)

    def move(self, position: Position, lineage_samples: int, together_with: list[PeerId]) -> None:
        """This peer, and the others of its round, have gone to ``position``."""
        self.num_together = 0 if self._own.seat.layout.sides else len(together_with)
        self.reader.moves(self._own.position, position)
        self._belief.been_at(position)
        self.others_moved(position, lineage_samples, together_with)
        self._is_called = self._is_called and position == self._own.position  # a reload answers no call
        self._publisher.hurry()
        self._stirred.ring()
        own = msgspec.structs.replace(self._own, position=position, samples=0, lineage_samples=lineage_samples)
        self._update(msgspec.structs.replace(own, recent_rounds=self.reader.recent_rounds))

    def stepped(self) -> None:
        """This peer goes where :meth:`move` takes it by a step of its own, alone or with others."""
        self._belief.met([])

    def others_moved(self, position: Position, lineage_samples: int, members: list[PeerId]) -> None:
        """The members of a round have gone to ``position``."""
        self.reader.moved(members, position, lineage_samples)
        if members:
            self._belief.met(peer_id for peer_id in members if peer_id != self._endpoint.peer_id)
        for peer_id in members:
            self._missing.pop(peer_id, None)
        self._expected = None

    def _update(self, own: ProgressRecord) -> None:
        self._publisher.update(own)
        self._update_progress()
        self._publisher.tell_news()

    # what the others do

    async def refresh(self, *, quickly: bool = False) -> None:
        """Read the records of the others now; quickly for who reads again soon."""
        await self.reader.refresh(quickly=quickly)
        self._read_at = now = asyncio.get_running_loop().time()
        self._update_progress()
        if not quickly:
            self._wholly_read_at = now
        if self.twin.is_to_be_told(now):
            self._publisher.publish_soon()

    def refresh_soon(self) -> None:
        """Something has happened that the others' records will explain."""
        self._is_read_wanted = True
        self._stirred.ring()

    def _update_progress(self) -> None:
        crowd, own, enough = self.reader.at(self._own.position), self._trainer, self.target_batch_size
        reckoned = crowd.reckoned_samples(asyncio.get_running_loop().time())
        num_others, speed = crowd.num_peers, crowd.samples_per_second
        self.progress = sum_up(own, num_others, crowd.samples, speed, enough)
        self.outlook = sum_up(own, num_others, reckoned, speed, enough)
        if self.progress.samples >= enough:
            self._due.ring()
        if self.on_outlook is not None:
            self.on_outlook()

    def seconds_until(self, samples: int) -> float:
        """Until the peers together must have so many samples; infinite when nobody computes."""
        missing, speed = samples - self.outlook.samples, self.outlook.samples_per_second
        return 0.0 if missing <= 0 else missing / speed if speed > 0 else math.inf

    @property
    def is_called(self) -> bool:
        """Whether another peer has begun a round here."""
        return self._is_called

    def is_due(self) -> bool:
        """Whether the collaboration has reached its target.

        Another peer that says so is believed where that can be: what this peer reckons may be wrong by a little.
        """
        if self.progress.samples >= self.target_batch_size:
            return True
        return self._is_called and self.outlook.samples >= CALLED_SHARE * self.target_batch_size

    def is_arriving(self) -> bool:
        """Whether the target is reached once each of the others has finished the batch that it is computing.

        Never in a crowd, where each peer counts for little and would have to tell many, nor in a grid.
        """
        is_small = stretch(self.outlook.num_peers) == 1.0 and not self._own.seat.layout.sides
        return is_small and self._arriving_samples() >= self.target_batch_size

    async def wait_until_due(self, timeout_s: float) -> None:
        """Wait until :meth:`is_due`, or for so many seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self.is_due() and (left_s := deadline - loop.time()) > 0:
            self._due.silence()
            await self._due.wait(left_s)

    def others_here(self) -> list[PeerId]:
        """The others at this position, auxiliary peers too, as far as they can be reached."""
        position = self._own.position
        here = {**self.reader.here(position), **self.reader.helpers(position)}
        return [peer_id for peer_id, seen in here.items() if not self._is_missing(peer_id, seen)]

    def _arriving_samples(self) -> int:
        """What all peers here bring if each finishes its batch and begins no other one; 0 if the target is far."""
        if self.outlook.eta_s > 2 * self.reader.at(self._own.position).longest_batch_s:
            return 0
        now, own = asyncio.get_running_loop().time(), self._trainer
        arriving = own.samples if own is not None else 0
        for peer_id, seen in self.reader.here(self._own.position).items():
            if not self._is_missing(peer_id, seen):
                arriving += seen.reckoning.with_batch_at(now, seen.record.batch_s)
        return arriving

    def others_busy_until(self, instant: float) -> float:
        """When the last of the others here must have finished the batch that it computes at an instant (loop time)."""
        return max(
            (
                busy_until(seen.record, seen.reckoning, instant)
                for peer_id, seen in self.reader.here(self._own.position).items()
                if not self._is_missing(peer_id, seen)
            ),
            default=instant,
        )

    def is_worth_a_look(self) -> bool:
        """Whether the target must be reached, though the others have not said so when they were read last.

        Whoever leads looks first; the others are called.
        """
        surplus = self.outlook.samples - self.target_batch_size
        since_s = asyncio.get_running_loop().time() - self._read_at
        if self._is_called and not self.is_due():
            return since_s >= self._config.min_refresh_s
        if self.is_due() or surplus < 0:
            return False
        patience_s = self._patience_s()
        is_overdue = surplus >= self.outlook.samples_per_second * patience_s
        return is_overdue and since_s >= max(self._config.min_refresh_s, patience_s)

    def _patience_s(self) -> float:
        """How long to wait for a call before looking oneself."""
        hosts = self.reader.at(self._own.position).hosts
        return RANK_DELAY_S * bisect.bisect_left(hosts, self._endpoint.peer_id)

    def num_peers_here(self) -> int:
        """Peers that train at this position, with this one, whether or not they can be reached."""
        self._update_progress()
        return self.progress.num_peers

    def can_meet_somebody(self) -> bool:
        """Whether a round could find another peer: one has called, or is expected and one of them can be dialled."""
        return self._is_called or (bool(self.expected()) and not self.lacks_leader())

    def lacks_leader(self) -> bool:
        """Whether nobody who is expected can be dialled, nor this peer."""
        return self._endpoint.client_mode and not self._is_called and all(self.expected().values())

    @property
    def is_stranded(self) -> bool:
        """Whether others train, and nobody in the run can be dialled: they can make no step together."""
        return self._endpoint.client_mode and self.reader.is_stranded()

    def sees_trainers(self) -> bool:
        """Whether another peer trains, wherever in the run it is."""
        return any(not seen.record.is_auxiliary for seen in self.reader.observed().values())

    def in_need(self) -> list[PeerId]:
        """Those who can be dialled and are behind this peer, if nobody who can be dialled is not: some of them."""
        own, behind = rank_of(self._own), []
        for peer_id, record in self.believed().items():
            if not record.is_client:
                if rank_of(record) >= own:
                    return []
                behind.append(peer_id)
        return sorted(behind)[:MAX_IN_NEED]

    def is_ahead_of_somebody(self) -> bool:
        """Whether a peer that is not missing has yet to reach this peer's global step."""
        return any(
            seen.record.position.step < self._own.position.step
            and not seen.record.is_auxiliary
            and not self._is_missing(peer_id, seen)
            for peer_id, seen in self.reader.observed().items()
        )

    def believed(self) -> dict[PeerId, ProgressRecord]:
        """What the others say, without those who are ahead on a branch that this peer does not believe in."""
        records, now = self.reader.records(), asyncio.get_running_loop().time()
        basis = (self.reader.version, self._own.position, self._own.lineage_samples)
        if self._doubted is None or self._doubted[0] != basis:
            self._doubted = (basis, self._belief.doubted(self._own, records))
        doubted = self._doubted[1]
        self._name_doubted(doubted, records, now)
        self._shunned = {peer_id: until for peer_id, until in self._shunned.items() if until > now}
        out = doubted | {
            peer_id for peer_id in self._shunned.keys() & records.keys() if is_ahead(records[peer_id], self._own)
        }
        return {peer_id: record for peer_id, record in records.items() if peer_id not in out} if out else records

    def _name_doubted(self, doubted: frozenset[PeerId], records: Mapping[PeerId, ProgressRecord], now: float) -> None:
        """Some are doubted for a moment, until the records of the others have come as well."""
        if not doubted and not self._doubted_since:
            return
        self._doubted_since = {peer_id: self._doubted_since.get(peer_id, now) for peer_id in doubted}
        for peer_id, since in self._doubted_since.items():
            if now >= since + DOUBT_S:
                self._doubted_since[peer_id] = math.inf
                logger.warning("Peer %s says that the run is at step %d, and too few others do: it is not followed",
                               peer_id, records[peer_id].position.step)  # fmt: skip

    def _other_majority(self) -> Branch | None:
        """Where most peers are, if they do not follow the branch that this peer is on."""
        records, now = self.reader.records(), asyncio.get_running_loop().time()
        if (position := self._belief.other_majority(self._own, records, now)) is None:
            return None
        holders = sorted(peer_id for peer_id, record in records.items() if record.position == position)
        holders = [peer_id for peer_id in holders if peer_id not in self._shunned and self.can_hand_out(peer_id)]
        return Branch(position, records[holders[0]].lineage_samples, tuple(holders)) if holders else None

    def shun(self, peer_id: PeerId) -> None:
        """A peer has handed out a state that cannot be used: what it says of a better branch does not count."""
        self._shunned[peer_id] = asyncio.get_running_loop().time() + SHUN_S

    def leading_branch(self) -> Branch:
        """The branch of the run that this peer should be on: of those whose state can be had."""
        if (branch := self._other_majority()) is not None:
            return branch
        observed, own, believed = self.reader.observed(), self._own, self.believed()
        basis = (self.reader.version, own.position, own.lineage_samples, tuple(self._without_state.items()), *believed)
        if self._branch is None or self._branch[0] != basis:
            others = {
                peer_id: seen.record
                for peer_id, seen in observed.items()
                if peer_id in believed
                and seen.sequence > self._without_state.get(peer_id, -1)
                and (seen.record.position == own.position or self.can_hand_out(peer_id))
            }
            self._branch = (basis, leading_branch(others, self._endpoint.peer_id, own, self.reader.strangers()))
        return self._branch[1]

    def can_hand_out(self, peer_id: PeerId) -> bool:
        """Whether this peer could have the state of another one: of a client only if that is connected to it."""
        seen = self.reader.observed().get(peer_id)
        if seen is None or not seen.record.is_client:
            return seen is not None
        return not self._own.is_client and self._endpoint.is_connected(peer_id)

    def should_load_state(self) -> bool:
        """Whether there is a better branch than this peer's whose state can be had."""
        return self._is_elsewhere(self.leading_branch())

    def is_on_best_branch(self) -> bool:
        """Whether nobody is known to be on a better branch, whether or not its state can be had now.

        Peers in client mode can never have it from each other: they follow those who can be dialled.
        """
        return not self._is_elsewhere(self._best_branch())

    def waits_for_clients(self) -> bool:
        """Whether this peer needs the state that only peers in client mode have: one of them has to connect to it."""
        branch, records = self._best_branch(), self.reader.records()
        return self._is_elsewhere(branch) and all(records[peer_id].is_client for peer_id in branch.holders)

    def _best_branch(self) -> Branch:
        if (branch := self._other_majority()) is not None:
            return branch
        records, own, own_id = self.believed(), self._own, self._endpoint.peer_id
        can_be_had = {
            peer_id: record
            for peer_id, record in records.items()
            if record.position == own.position or self.can_hand_out(peer_id)  # of a client it can only be had here
        }
        if own.is_client:
            return leading_branch(can_be_had, own_id, own, self.reader.strangers())
        best = leading_branch(records, own_id, own, self.reader.strangers())
        if not self._is_elsewhere(best) or not can_be_had.keys().isdisjoint(best.holders):
            self._waits_since = None
            return best
        now = asyncio.get_running_loop().time()
        if self._waits_since is None:
            self._waits_since = now
        if now - self._waits_since < CLIENT_PATIENCE_S:
            return best
        return leading_branch(can_be_had, own_id, own, self.reader.strangers())

    def _is_elsewhere(self, branch: Branch) -> bool:
        return branch.is_foreign or branch.position != self._own.position

    def report_without_state(self, peer_id: PeerId) -> None:
        """A peer could not hand out the state; it is not asked again before a fresh record of it."""
        if (seen := self.reader.observed().get(peer_id)) is not None:
            self._without_state[peer_id] = seen.sequence

    def expected(self) -> Mapping[PeerId, bool]:
        own, missing = self._own.position, self._missing
        here = self.reader.here(own)
        basis = (self.reader.version, own)
        if self._expected is None or self._expected[0] != basis:
            are_all_clients = all(seen.record.is_client for seen in here.values())
            if are_all_clients and (self._own.is_client or self._own.is_auxiliary):
                here = {**here, **self.reader.helpers(own)}
            expected = {
                peer_id: seen.record.is_client
                for peer_id, seen in here.items()
                if not missing or not self._is_missing(peer_id, seen)
            }
            self._expected = (basis, expected)
        return self._expected[1]

    def _is_missing(self, peer_id: PeerId, seen: Observed) -> bool:
        return seen.sequence <= self._missing.get(peer_id, -1)

    def report_missing(self, peer_id: PeerId) -> None:
        seen = self.reader.observed().get(peer_id)
        if seen is not None:
            self._missing[peer_id] = seen.sequence
            self._expected = None

    def unmet(self) -> Mapping[PeerId, Observed]:
        """Those who say that they are there, but came to no round, or could not hand out their state."""
        return {
            peer_id: seen
            for peer_id, seen in self.reader.observed().items()
            if self._is_missing(peer_id, seen) or seen.sequence <= self._without_state.get(peer_id, -1)
        }

    def report_gone(self, peer_id: PeerId, sequence: int) -> None:
        """A peer is not there any more, though its last record, of this sequence, has not expired."""
        self.reader.forget(peer_id, sequence)
        self._update_progress()

    def call_to_round(self) -> None:
        is_new, self._is_called = not self._is_called, True
        self._due.ring()
        if is_new and not self.is_due():
            self.refresh_soon()  # others may have said something that this peer has not read

    def answer_call(self) -> None:
        """This peer comes to a round now; who begins another one calls again."""
        self._is_called = self._publisher.is_moving = False

    @contextmanager
    def in_round(self) -> Iterator[None]:
        """Within the block this peer is in a round with all others: it will tell what has become of them."""
        self._is_in_round = True
        try:
            yield
        finally:
            self._is_in_round = False

    # reading in the background

    async def _read_forever(self) -> None:
        last_samples, delay_s = -1, 0.0
        while True:
            self._is_read_wanted = False
            try:
                await self.refresh(quickly=self._may_read_quickly())
            except ManyhandsError as error:
                logger.warning("the progress of the others cannot be read: %s", error)
            delay_s = self._next_read_s(delay_s)
            if self._on_update is not None and self.outlook.samples != last_samples:
                self._on_update(self.outlook, delay_s)
                last_samples = self.outlook.samples
            await self._rest(delay_s)

    def _may_read_quickly(self) -> bool:
        """Whether one holder is enough; in a small run that is mostly this peer, which would never see a twin there."""
        is_recent = asyncio.get_running_loop().time() - self._wholly_read_at < WHOLE_READ_PERIOD_S
        return is_recent or stretch(self.outlook.num_peers) > 1.0

    async def _rest(self, delay_s: float) -> None:
        """Read nothing for so long; in a crowd not during a round, which tells more, and anew from its end on."""
        loop, position = asyncio.get_running_loop(), self._own.position
        since = loop.time()
        while not self._is_read_wanted and (left_s := since + delay_s - loop.time()) > 0:
            self._stirred.silence()
            await self._stirred.wait(left_s)
            if not self._is_led():
                continue
            if (self._is_called and self.is_due()) or self._is_in_round or self._publisher.is_moving:
                delay_s = self._longest_read_s()
            elif position != self._own.position:
                since, position = loop.time(), self._own.position
                delay_s = self._next_read_s(0.0)

    def _next_read_s(self, last_s: float) -> float:
        """When to read again. At the target there is nothing left to predict: the next batch of somebody looks."""
        if self.is_stranded:
            return self._config.default_refresh_s * stretch(self.outlook.num_peers)  # who can be dialled is wanted soon
        if self.is_due() or self.outlook.samples >= self.target_batch_size:
            return min(max(2 * last_s, self._config.min_refresh_s, self._patience_s()), self._longest_read_s())
        predicted_s, patience_s = next_refresh_s(self.outlook, self._config), self._patience_s()
        return predicted_s + patience_s if self._is_led() else max(predicted_s, patience_s)

    def _is_led(self) -> bool:
        """Whether this peer may rely on those who look first: in a crowd whose rounds show where all of it is."""
        return stretch(self.outlook.num_peers) > 1.0 and not self._own.seat.layout.sides

    def _longest_read_s(self) -> float:
        return self._config.max_refresh_s * stretch(self.outlook.num_peers)
