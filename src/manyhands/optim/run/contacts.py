"""Direct contacts between the peers of a run; everything else goes through the DHT.

* Near the target of a step, each peer sends the others its number of samples: the DHT is too slow for that.
* Before a step alone, a peer asks the peers of the roster for their positions: the nodes of the DHT that hold the run's
  records may be gone or malicious.
* A peer without others that come to its rounds dials these. If a process has died, its machine refuses the connection,
  so the others need not wait until the record expires.
* If only peers in client mode have the state, these connect to the peers that need it, which can then ask for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence

import msgspec

from manyhands.averaging.messages import Position, readable_addresses
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.roster import Roster
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import ANSWER_S, DIAL_S, TWO_DIALS_S
from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason, ManyhandsError, Refused
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import StrandedNotice
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.peer import Presence
from manyhands.rpc.method import Method
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

MAX_ASKED = 8
"""The largest number of peers that are asked at once whether they are still there."""
PROOFS_OF_DEATH = (DialReason.REFUSED, DialReason.WRONG_IDENTITY)
"""A peer is gone if dials of all its addresses fail for one of these reasons."""


class HereIAm(msgspec.Struct):
    """The present record of the sender."""

    record: PeerRecord


TELL = Method("optim.tell", HereIAm, HereIAm)


class Contacts:
    """One peer's direct contacts with the others of its run.

    Args:
        tasks: owns the calls in the background. Once it is closed, this peer has left the run, and calls no peer.
    """

    def __init__(self, presence: Presence, run_id: str, tracker: ProgressTracker, tasks: TaskOwner) -> None:
        self._presence = presence
        self._endpoint = RunEndpoint(presence.endpoint, run_id)
        self._tracker = tracker
        self._tasks = tasks
        self._told: tuple[Position, int] | None = None  # what the others were last told: position and samples
        self._silent_at = -math.inf  # loop time when none of the asked peers answered
        self._looking: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._stranded = StrandedNotice(run_id)
        self._endpoint.handle(TELL, self._on_told)

    def close(self) -> None:
        self._endpoint.unhandle(TELL)

    def tell(self, others: Mapping[PeerId, bool]) -> None:
        """Send other peers this peer's record, in the background, unless its number of samples was sent before.

        Args:
            others: each with whether it is in client mode. Those are told only if they are connected: to reach them
                through a relay for this would cost more than it is worth. So are peers that are no members, except in a
                grid: they come by themselves, and may be many that nobody can reach.
        """
        record = self._tracker.own
        if self._tasks.is_closed or self._told == (record.position, record.samples):
            return
        self._told = record.position, record.samples
        members = frozenset() if self._tracker.own.seat.layout.sides else self._tracker.roster().members
        for peer_id, is_client in others.items():
            is_dialled = not is_client and (peer_id in members or not members)
            if not is_dialled and not self._endpoint.is_connected(peer_id):
                continue
            self._tasks.spawn(self._tell(peer_id), name="telling a peer where this one is")

    async def _tell(self, peer_id: PeerId) -> HereIAm | None:
        try:
            return await self._endpoint.call(peer_id, TELL, HereIAm(self._tracker.own), ANSWER_S)
        except ManyhandsError as error:
            logger.debug("peer %s does not answer: %s", peer_id, error)
            return None

    def _on_told(self, remote: PeerId, news: HereIAm) -> HereIAm:
        if remote in self._tracker.observed():  # the DHT bounds the number of records; others are ignored here
            self._tracker.heard(remote, news.record)
        if self._tracker.is_idle:
            raise Refused(self._presence.peer_id, "idle", "this peer has not trained for a while")
        return HereIAm(self._tracker.own)

    async def ask_others(self, *, checks_link: bool) -> bool:
        """Find out which peers are there, as none can come to a step that is due.

        Records that show no other trainer here may be old, so they are read again. Peers of the roster that have none
        are asked, and the missing ones are dialled in the background.

        Args:
            checks_link: whether to ping nodes of the DHT, of any run, too, if this peer was given initial peers or
                knows some from an earlier start.
        Returns:
            Whether no node that was pinged has answered: this peer's own link may be down.
        """
        if not self._tracker.view.trainers:
            await self._tracker.look(DIAL_S)
        self.look_for_the_dead()
        await self._ask_hidden()
        return checks_link and self._presence.knew_others and not await self._presence.dht.anyone_answers()

    async def _ask_hidden(self) -> None:
        """Ask peers of the roster whose records are not in the DHT; those in their answers count like records there.

        If none answers, none is asked again for ``TWO_DIALS_S``.
        """
        now = asyncio.get_running_loop().time()
        known = {self._presence.peer_id, *self._tracker.observed()}
        hidden = [peer_id for peer_id in _mates(self._tracker.roster()) if peer_id not in known]
        if not hidden or now < self._silent_at + TWO_DIALS_S:
            return
        if await self.any_answers(hidden):
            logger.warning(
                "The DHT shows no record of some peers of the last rounds that answer: this peer waits for them"
            )
        else:
            self._silent_at = now

    async def any_answers(self, peer_ids: Sequence[PeerId]) -> bool:
        """Ask up to ``MAX_ASKED`` of these peers; returns whether one of them answers."""
        return any(await asyncio.gather(*map(self._ask, peer_ids[:MAX_ASKED])))

    async def _ask(self, peer_id: PeerId) -> bool:
        if answer := await self._tell(peer_id):
            self._tracker.heard(peer_id, answer.record)
        return answer is not None

    # the dead

    def look_for_the_dead(self) -> None:
        """Dial the missing peers, in the background, and forget those that are gone; does nothing while that goes on.

        A peer that does not answer at all may still train behind a broken link: it stays until its record expires.
        """
        is_free = self._looking is None or self._looking.done()
        if is_free and self._tracker.missing() and not self._tasks.is_closed:
            self._looking = self._tasks.spawn(self._look_for_the_dead(), name="looking for those who do not come")

    async def _look_for_the_dead(self) -> None:
        tracker, is_connected = self._tracker, self._presence.endpoint.is_connected
        refused = [
            (peer_id, seen)
            for peer_id, seen in tracker.missing().items()
            if not is_connected(peer_id) and await self._refuses(seen.record.addresses)
        ]
        await asyncio.sleep(DIAL_S)  # by then a peer that restarts, say, has connected or has published a new record
        for peer_id, seen in refused:
            if tracker.observed().get(peer_id) is seen and not is_connected(peer_id):
                logger.info("Peer %s is gone: it does not listen at its addresses any more", peer_id)
                tracker.forget(peer_id)
        tracker.judge()

    async def _refuses(self, addresses: list[str]) -> bool:
        reasons = set(await asyncio.gather(*map(self._failure_at, readable_addresses(addresses))))
        reasons.discard(DialReason.HELD_BACK)
        return bool(reasons) and reasons.issubset(PROOFS_OF_DEATH)

    async def _failure_at(self, address: Address) -> DialReason | None:
        try:
            await self._presence.endpoint.probe(address, ANSWER_S)
        except ManyhandsError as failure:
            return failure.reason if isinstance(failure, DialFailed) else None
        return None

    # peers in client mode

    def connect_to_those_in_need(self) -> None:
        """If this peer is in client mode, and only such peers have the state: connect to peers that are behind."""
        endpoint = self._presence.endpoint
        is_busy = self._connecting is not None and not self._connecting.done()
        if not endpoint.client_mode or self._tasks.is_closed or is_busy:
            return
        in_need = [peer_id for peer_id in self._tracker.in_need() if not endpoint.is_connected(peer_id)]
        if in_need:
            self._connecting = self._tasks.spawn(self._connect(in_need), name="connecting to peers without the state")

    async def _connect(self, peer_ids: list[PeerId]) -> None:
        for peer_id in peer_ids:
            try:
                await self._presence.endpoint.call_on(peer_id, DIAL_S)
            except ManyhandsError as error:
                logger.debug("peer %s needs the state, and cannot be reached: %s", peer_id, error)

    def warn_if_stranded(self) -> None:
        """Warn, every minute, while no trainer of the run accepts connections."""
        trainers, ways_in = list[PeerRecord](), list[str]()
        if self._tracker.is_stranded():
            trainers = [self._tracker.own, *self._tracker.trainers().values()]
            ways_in = [f"{text}/p2p/{one.peer_id}" for one in self._presence.dht.contacts() for text in one.addresses]
        self._stranded.look(trainers, ways_in[:1], asyncio.get_running_loop().time())


def _mates(roster: Roster) -> list[PeerId]:
    """The peers of earlier rounds: voters, then guests that have missed the fewest rounds, then former voters."""
    standings = roster.standings
    here = sorted(standings, key=lambda peer_id: (not standings[peer_id].is_voter, standings[peer_id].missed, peer_id))
    return [*here, *reversed(roster.former)]
