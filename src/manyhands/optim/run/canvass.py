"""Dials the peers that vote on the position of a run, as the electorate *networks* of :mod:`.belief`.

The addresses that a peer publishes prove nothing. So a peer has a vote only once it was reached, and that is the vote
of the network in which it was reached: the identities of one machine have one vote together, wherever they claim to be.
:func:`sample` selects the peers whose votes are needed, and :class:`Canvass` dials them.

A peer in client mode may reach only its initial peers, and all others through these as relays. So it asks the initial
peers, and no others, where they have reached a peer that does not answer
(docs/adr/0047-initial-peers-say-where-they-reached-others.md).
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from manyhands.averaging.messages import readable_addresses
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.timing import ANSWER_S, DIAL_S, SHUN_S, TWO_DIALS_S
from manyhands.base.deadline import wait_at_most
from manyhands.base.errors import PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht.networks import network_of
from manyhands.optim.run.belief import Poll, Records, voter_of
from manyhands.reach import REACHED
from manyhands.reach.messages import MAX_ASKED_ABOUT, ReachedRequest
from manyhands.rpc import Endpoint
from manyhands.rpc.backoff import TooEarly
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

ENOUGH_VOTES = 32
"""The largest number of networks that vote. Of more, random ones are chosen, so that in a large run no peer dials all
others."""
AT_ONCE = MAX_ASKED_ABOUT
"""Number of dials at a time: so many that dials of a thousand false identities end within two minutes."""


def sample(
    records: Records, vote_of: Callable[[PeerId, PeerRecord], str | None], rank: Callable[[PeerId], float]
) -> tuple[dict[PeerId, str], list[PeerId]]:
    """Select the peers that vote on the position of the run.

    Peers that publish an address vote if they were reached. If there are none of these, peers without an address vote.
    ``ENOUGH_VOTES`` networks are enough.

    Returns the voters, each with the name of its vote, and the peers that must be dialled first.

    Args:
        vote_of: returns the name of a peer's vote if it was reached, "" if it cannot be reached, and None if it was not
            dialled yet.
        rank: returns a random number for each peer, always the same, that no other peer knows.
    """
    learnt = {peer_id: record for peer_id, record in records.items() if record.position.step}
    in_order = [peer_id for peer_id, record in learnt.items() if record.addresses]
    if len(in_order) > ENOUGH_VOTES:  # one peer of each network that they claim, then a second one of each, and so on
        turns: dict[str, itertools.count[int]] = defaultdict(itertools.count)
        in_order.sort(key=rank)
        in_order.sort(key=lambda peer_id: next(turns[voter_of(peer_id, learnt[peer_id].addresses)]))
    voters: dict[PeerId, str] = {}
    votes: set[str] = set()
    undialled: list[PeerId] = []
    for peer_id in in_order:
        if (vote := vote_of(peer_id, learnt[peer_id])) is None:
            undialled.append(peer_id)
        elif vote:
            voters[peer_id] = vote
            votes.add(vote)
            if len(votes) == ENOUGH_VOTES:
                break
    if not voters and not undialled:
        found = {peer_id: vote_of(peer_id, record) for peer_id, record in learnt.items() if not record.addresses}
        voters = {peer_id: vote for peer_id, vote in found.items() if vote}
    return voters, undialled


def vote_from(host: str, name: str) -> str:
    """The name of the vote of a peer that was reached at ``host``.

    It is the network of a public address, as the peers of one owner are often in one network. In a local network it is
    the address, so each machine has a vote. On this machine it is ``name``.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return name
    return network_of(host) if address.is_global else host


def told_votes(answers: Sequence[Sequence[str]]) -> list[str]:
    """The vote of each peer by where the initial peers have reached it; empty without one.

    At least half of the initial peers must name the same network.

    Args:
        answers: of each initial peer, the IP addresses of the peers in order; empty for those that it has not reached,
            and all of them if it does not answer.
    """
    votes = []
    for hosts in zip(*answers, strict=True):
        named = Counter(map(_vote_at, filter(None, hosts)))
        vote = min(named, key=lambda one: (-named[one], one), default="")
        votes.append(vote if 2 * named[vote] >= len(answers) else "")
    return votes


def _vote_at(host: str) -> str:
    """The vote of a peer that another one has reached; all peers on the machine of that one have one vote together."""
    try:
        return vote_from(host, host)
    except ValueError:  # no IP address
        return ""


class _Failure(NamedTuple):
    """A failed dial: it counts for ``lasts_s`` seconds, unless the peer connects to this one meanwhile."""

    at: float  # loop time
    lasts_s: float
    was_connected: bool
    vote: str  # by where the initial peers have reached it; empty if they have not


class Canvass:
    """Knows which peers were reached, and dials others when their votes are needed. Lives on the network thread.

    Args:
        initial_peers: returns the peers that this one was given to join by.
        on_news: called after each dial, successful or not.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        rng: random.Random,
        initial_peers: Callable[[], frozenset[PeerId]],
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self._endpoint = endpoint
        self._rng = rng
        self._initial_peers = initial_peers
        self._on_news = on_news
        self._records: Records = {}  # of the last poll
        self._is_in_vain = False  # whether all peers of the last poll were dialled, and none could be reached
        self._undialled: list[PeerId] = []
        self._failed: dict[PeerId, _Failure] = {}
        self._ranks: dict[PeerId, float] = {}
        self._dialling: asyncio.Task[None] | None = None
        self._has_news = asyncio.Event()
        self._tasks = TaskOwner("canvass")

    async def close(self) -> None:
        """Stop dialling."""
        await self._tasks.close()

    def poll(self, records: Records) -> Poll:
        """Return the peers that vote, and begin to dial those that must be reached before they can."""
        self._records = records
        self._failed = {peer_id: failure for peer_id, failure in self._failed.items() if peer_id in records}
        self._ranks = {peer_id: rank for peer_id, rank in self._ranks.items() if peer_id in records}
        voters, self._undialled = sample(records, self._vote_of, self._rank_of)
        self._is_in_vain = not voters and not self._undialled
        if self._undialled and self._dialling is None and not self._tasks.is_closed:
            self._dialling = self._tasks.spawn(self._dial(), name="dialling peers to see where they are")
        return Poll(voters, num_open=len(self._undialled) or int(not voters))

    async def brings_news(self) -> bool:
        """Wait until a dial ends, ``DIAL_S`` at most, and return True; False at once if no peer is being dialled."""
        if self._dialling is None or self._dialling.done():
            return False
        self._has_news.clear()
        await wait_at_most(self._has_news, DIAL_S)
        return True

    def _vote_of(self, peer_id: PeerId, record: PeerRecord) -> str | None:
        if not record.addresses:  # it has dialled this peer, and several such peers may share the address of a router
            host = self._endpoint.host_of(peer_id)
            return vote_from(host, host) if host else ""
        if host := self._endpoint.reached_host(peer_id):
            return vote_from(host, peer_id)
        if (failure := self._failed.get(peer_id)) is None:
            return None
        # if no peer at all could be reached, this machine may have been offline: dial again sooner
        lasts_s = TWO_DIALS_S if self._is_in_vain else failure.lasts_s
        is_over = asyncio.get_running_loop().time() - failure.at >= lasts_s
        has_come = self._endpoint.is_connected(peer_id) and not failure.was_connected
        return None if is_over or has_come else failure.vote

    def _rank_of(self, peer_id: PeerId) -> float:
        return self._ranks.setdefault(peer_id, self._rng.random())

    async def _dial(self) -> None:
        try:
            while batch := self._undialled[:AT_ONCE]:
                told = self._tasks.spawn(self._ask_initial_peers(batch), name="asking where others were reached")
                await asyncio.gather(*(self._reach(peer_id, told) for peer_id in batch))
                self.poll(self._records)
        finally:
            self._dialling = None
            self._has_news.set()

    async def _reach(self, peer_id: PeerId, told: asyncio.Task[dict[PeerId, str]]) -> None:
        if record := self._records.get(peer_id):
            self._endpoint.learn(peer_id, readable_addresses(record.addresses))
        lasts_s = SHUN_S
        try:
            await self._endpoint.reach(peer_id, DIAL_S)
        except (Unavailable, PeerError) as error:
            lasts_s = TWO_DIALS_S if isinstance(error, TooEarly) else SHUN_S
            logger.debug("peer %s has no vote on the position of the run: %s", peer_id, error)
        if not self._endpoint.reached_host(peer_id):
            vote = (await told).get(peer_id, "")
            now = asyncio.get_running_loop().time()
            was_connected = self._endpoint.is_connected(peer_id)
            self._failed[peer_id] = _Failure(now, lasts_s, was_connected, vote)
        self._on_news()
        self._has_news.set()

    async def _ask_initial_peers(self, peer_ids: list[PeerId]) -> dict[PeerId, str]:
        """The votes of peers by where the initial peers have reached them."""
        if not self._endpoint.client_mode:
            return {}
        asked = await asyncio.gather(*(self._ask(one, peer_ids) for one in self._initial_peers()))
        answers = [hosts if len(hosts) == len(peer_ids) else [""] * len(peer_ids) for hosts in asked]
        return dict(zip(peer_ids, told_votes(answers), strict=False))

    async def _ask(self, initial_peer: PeerId, peer_ids: list[PeerId]) -> list[str]:
        try:
            return (await self._endpoint.call(initial_peer, REACHED, ReachedRequest(peer_ids), ANSWER_S)).hosts
        except (Unavailable, PeerError) as error:
            logger.debug("initial peer %s does not say where it has reached others: %s", initial_peer, error)
            return []
