"""Joins the swarm, and rejoins it, through the initial peers and through peers seen before.

Rules:
    * all of them are dialled at once, and one answer is enough to join;
    * an initial peer that never answered or was lost is dialled again for ever, at most :data:`MOST_WAIT_S` seconds
      apart, with jitter;
    * whenever an initial peer appears, this node looks up its own neighbours through it: if the two were in separate
      parts of the swarm, the parts then merge. A node that began alone does so when the first peer connects, since that
      peer may have been waiting for it to restart;
    * while all initial peers are missing, each round dials one of the lost peers seen before, or all of them if the
      routing table is empty. So a split swarm merges again even if its coordinators are gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence

from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason, JoinFailed, PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.dht.config import DhtConfig
from manyhands.dht.ids import node_id
from manyhands.dht.known_peers import MAX_PEERS, KnownPeers
from manyhands.dht.messages import PING
from manyhands.dht.neighbours import unknown_neighbours
from manyhands.dht.overlay import Overlay
from manyhands.dht.routing import Contact
from manyhands.rpc.endpoint import Endpoint
from manyhands.runtime.tasks import TaskOwner

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 2.0
"""Seconds until the first new attempt to dial missing peers; each later wait is twice as long."""

NOTE_PERIOD_S = 180.0
"""Seconds between two updates of the peers seen before."""

MOST_WAIT_S = 24.0
"""Longest wait between two dials. Parts of a swarm should merge within a minute: this leaves the rest for lookups."""

ANSWER_COUNTS_S = 300.0
"""Seconds for which an initial peer counts as present after an answer although it is not in the table. In a large swarm
its bucket may be full."""

KNOWN_AT_ONCE = 16
"""Concurrent dials to peers seen before; most of them may be gone for good."""


class InitialPeers:
    """The initial peers, which peer answered at each address, and the peers seen before.

    Args:
        tasks: the owner of the dial tasks.
        rng: jitters the time between two dials.
        wall_clock: seconds since 1970.
        known: the peers seen before; kept up to date.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        overlay: Overlay,
        config: DhtConfig,
        tasks: TaskOwner,
        *,
        rng: random.Random,
        wall_clock: Callable[[], float],
        known: KnownPeers,
    ) -> None:
        self._endpoint = endpoint
        self._overlay = overlay
        self._config = config
        self._tasks = tasks
        self._rng = rng
        self._wall_clock = wall_clock
        self._known = known
        self._peers: dict[Address, PeerId | None] = {}
        self._answered_at: dict[PeerId, float] = {}  # initial peers only; loop time
        self._looked_through: set[PeerId] = set()
        self._has_looked = False
        self._tried_at: dict[PeerId, float] = {}  # peers seen before; loop time
        self._told: dict[Address, DialReason] = {}  # the reason last logged for each
        self._is_joining = False  # meanwhile JoinFailed reports failures, so they are not logged
        self._round: asyncio.Task[None] | None = None
        self._round_began = 0.0

    async def join(self, addresses: Sequence[Address], *, must_join: bool = True) -> None:
        """Reach any peer, and learn the neighbours of this node through the first that answers.

        The other addresses are still dialled in the background. Without addresses and peers seen before, this is the
        first peer.

        Args:
            must_join: False if this peer may begin alone although initial peers were given. A peer whose own address
                is among them, such as a coordinator, always may.
        Raises:
            JoinFailed: none answered within ``join_timeout_s``.
        """
        deadline = asyncio.get_running_loop().time() + self._config.join_timeout_s
        own_id = self._endpoint.peer_id
        addresses = list(dict.fromkeys(addresses))
        self._peers = {address: address.peer_id for address in addresses if address.peer_id != own_id}
        self._round_began = deadline - self._config.join_timeout_s
        own = [str(address) for address in addresses if address.peer_id == own_id]
        failures = {address: DialFailed(address, DialReason.ITSELF) for address in own}
        reached = await self._reach_one(failures) if self._peers or len(self._known) else None
        if reached is not None:
            await self._look_through([reached], deadline)
            known = counted(len(self._overlay.table), "peer")
            logger.info("Joined the DHT; %s in the table", known)
            return
        if addresses and must_join and not any(f.reason is DialReason.ITSELF for f in failures.values()):
            raise JoinFailed([failures[str(address)] for address in addresses])
        if self._peers or len(self._known):
            logger.warning(
                "No peer answers (initial peers: %d, peers seen before: %d); this peer begins alone, and keeps trying",
                len(self._peers),
                len(self._known),
            )

    def known_ids(self) -> frozenset[PeerId]:
        """The ids of the initial peers, as far as their addresses name them or they have answered."""
        return frozenset(peer_id for peer_id in self._peers.values() if peer_id is not None)

    async def keep_trying(self) -> None:
        """Redial missing peers for ever, by the rules at the top of this file."""
        loop = asyncio.get_running_loop()
        wait_s = FIRST_WAIT_S
        noted_at = -math.inf
        pause_s = wait_s * self._rng.uniform(0.5, 1.0)
        while not self._tasks.is_closed:
            left_s = self._round_began + pause_s - loop.time()
            if left_s > 0:  # upkeep may have started a round meanwhile
                await asyncio.sleep(left_s)
                continue
            if loop.time() - noted_at >= NOTE_PERIOD_S:
                self.note_known()
                noted_at = loop.time()
            await self.retry()
            wait_s = min(2 * wait_s, MOST_WAIT_S)
            pause_s = wait_s * self._rng.uniform(0.5, 1.0)

    async def retry(self) -> None:
        """Dial the missing peers now; concurrent callers share one round of dials."""
        if not self._tasks.is_closed and (self._round is None or self._round.done()):
            self._round_began = asyncio.get_running_loop().time()
            lost = [address for address, peer_id in self._peers.items() if not self._is_here(peer_id)]
            lost_known = self._lost_known(are_all_lost=len(lost) == len(self._peers))
            if not lost and not lost_known and not self._unseen():
                return
            self._round = self._tasks.spawn(self._dial_missing(lost, lost_known), name="dialling missing peers")
        if self._round is not None and not self._round.done():
            await asyncio.wait([self._round])  # each dial has a timeout

    def note_known(self) -> None:
        """Add the peers heard of recently to the known peers."""
        self._known.heard_of(self._overlay.table.latest(MAX_PEERS), self._wall_clock())

    async def _reach_one(self, failures: dict[str, DialFailed]) -> PeerId | None:
        """Dial all peers at once and return the first that answers; dials to initial peers then continue.

        Args:
            failures: filled with the failures of the initial peers, by address.
        """
        dials = [self._tasks.spawn(self._dial(address), name=f"dial {address}") for address in self._peers]
        asking_known = self._tasks.spawn(self._ask_known(self._known.latest_first()), name="dial peers seen before")
        self._is_joining = True
        try:
            for dial in asyncio.as_completed([*dials, asking_known]):
                outcome = await dial
                if isinstance(outcome, DialFailed):
                    failures[outcome.address] = outcome
                elif outcome is not None:
                    return outcome
        finally:
            self._is_joining = False
            self._tasks.cancel(asking_known)
        return None

    async def _dial_missing(self, lost: Sequence[Address], lost_known: Sequence[Contact]) -> None:
        self._looked_through.intersection_update(self._here())
        _, known_that_answered = await asyncio.gather(
            asyncio.gather(*(self._dial(address) for address in lost)), self._ask_known(lost_known)
        )
        through = self._unseen()
        if known_that_answered is not None:
            through.add(known_that_answered)
        deadline = asyncio.get_running_loop().time() + self._config.lookup_timeout_s
        await self._look_through(sorted(through), deadline)

    async def _look_through(self, peers: Iterable[PeerId], deadline: float) -> None:
        """Look up neighbours through each peer that names unknown ones: it belongs to another part of the swarm."""
        own_id = self._endpoint.peer_id
        k = self._config.k
        for peer_id in peers:
            contact = self._overlay.contact_of(peer_id)
            if contact is None or asyncio.get_running_loop().time() >= deadline:
                continue
            if await unknown_neighbours(self._overlay, own_id, k, [peer_id]):
                timeout_s = deadline - asyncio.get_running_loop().time()
                await self._overlay.lookup(node_id(own_id), timeout_s, k, seeds=[contact])
            self._looked_through.add(peer_id)
            self._has_looked = True

    def _unseen(self) -> set[PeerId]:
        """Return initial peers not yet looked through; for a node that began alone, the first peer in its table."""
        unseen = self._here() - self._looked_through
        if not unseen and not self._has_looked:
            unseen = {contact.peer_id for contact in self._overlay.table.contacts()[:1]}
        return unseen

    def _here(self) -> set[PeerId]:
        """Return the initial peers that are reachable."""
        return {peer_id for peer_id in self._peers.values() if peer_id is not None and self._is_here(peer_id)}

    def _is_here(self, peer_id: PeerId | None) -> bool:
        if peer_id is None:
            return False
        if self._overlay.table.is_sound(peer_id):
            return True
        answered_at = self._answered_at.get(peer_id, -math.inf)
        is_recent = asyncio.get_running_loop().time() - answered_at < ANSWER_COUNTS_S
        cannot_be_dialled = self._endpoint.is_connected(peer_id) and not self._endpoint.has_reached(peer_id)
        return is_recent and (cannot_be_dialled or self._overlay.table.is_waiting(peer_id))

    def _lost_known(self, *, are_all_lost: bool) -> list[Contact]:
        """Return the peers seen before that should be dialled now."""
        if not are_all_lost:
            return []
        table = self._overlay.table
        lost = [
            contact
            for contact in self._known.latest_first()
            if contact.peer_id not in table and not table.is_waiting(contact.peer_id)
        ]
        if not len(table):
            return lost
        return sorted(lost, key=lambda contact: self._tried_at.get(contact.peer_id, -math.inf))[:1]

    async def _ask_known(self, contacts: Sequence[Contact]) -> PeerId | None:
        """Ping peers seen before, several at a time, until one answers."""
        untried = list(contacts)[::-1]
        deadline = asyncio.get_running_loop().time() + self._config.join_timeout_s
        answered: list[PeerId] = []

        async def ask_next() -> None:
            while untried and not answered and (now := asyncio.get_running_loop().time()) < deadline:
                contact = untried.pop()
                self._tried_at[contact.peer_id] = now
                if contact.peer_id == self._endpoint.peer_id:
                    continue
                if await self._overlay.ask_contact(contact, PING, self._overlay.greeting()) is not None:
                    answered.append(contact.peer_id)

        await asyncio.gather(*(ask_next() for _ in range(min(KNOWN_AT_ONCE, len(untried)))))
        known = {contact.peer_id for contact in self._known.latest_first()}
        self._tried_at = {peer_id: at for peer_id, at in self._tried_at.items() if peer_id in known}
        return answered[0] if answered else None

    async def _dial(self, address: Address) -> PeerId | DialFailed:
        """Connect, and check that a DHT node answers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.join_timeout_s
        try:
            peer_id = await self._endpoint.connect(address, self._config.join_timeout_s)
            timeout_s = min(self._config.request_timeout_s, max(deadline - loop.time(), 0.0))
            await self._endpoint.call(peer_id, PING, self._overlay.greeting(), timeout_s)
        except DialFailed as error:
            return self._failed(address, error)
        except Unavailable as error:
            return self._failed(address, DialFailed(str(address), DialReason.TIMED_OUT, str(error)))
        except PeerError as error:
            return self._failed(address, DialFailed(str(address), DialReason.REJECTED, str(error)))
        if self._told.pop(address, None) is not None:
            logger.info("Initial peer %s answers now", address)
        self._peers[address] = peer_id
        self._answered_at[peer_id] = loop.time()
        self._overlay.seen(peer_id)
        return peer_id

    def _failed(self, address: Address, failure: DialFailed) -> DialFailed:
        if failure.reason is DialReason.ITSELF:  # a list shared by all peers may include this one
            self._peers.pop(address, None)
        elif not self._is_joining and self._told.get(address) is not failure.reason:
            self._told[address] = failure.reason
            logger.info("Initial peer %s; trying again", failure)
        return failure
