"""Finds the networks that vote on the position of a run, as the electorate *networks* of :mod:`.belief`.

The addresses that a peer publishes prove nothing. So a peer votes for the network in which it was reached: the
identities of one machine have one vote together, wherever they claim to be. The first row that names anybody counts:

===============================  =======================================================================================
a peer beyond step 0 that        votes for the network
===============================  =======================================================================================
an initial peer has reached      that at least half of the initial peers name that answer (``reach.reached``)
this peer itself has reached     in which it has: it connects to some for other reasons, such as to read the records
publishes no address             from which it is connected to this peer
===============================  =======================================================================================

The initial peers are asked about each peer in the background, for ``DIAL_S`` at a time, and about those without a vote
again a minute later; after ``TWO_DIALS_S`` while nobody has one. Nobody is dialled for this
(docs/adr/0056-the-initial-peers-decide-for-newcomers.md).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

from manyhands.averaging.timing import ANSWER_S, DIAL_S, MINUTE_S, MOMENT_S, TWO_DIALS_S
from manyhands.base.address import ip_of
from manyhands.base.deadline import wait_at_most
from manyhands.base.errors import PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht.networks import network_of
from manyhands.optim.run.belief import Records
from manyhands.reach import REACHED
from manyhands.reach.messages import MAX_ASKED_ABOUT, ReachedRequest
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)


def vote_from(host: str, name: str) -> str:
    """The name of the vote of a peer that was reached at ``host``.

    It is the network of a public address, as the peers of one owner are often in one network. In a local network it is
    the address, so each machine has a vote. On the machine of the peer that has reached it, it is ``name``. Empty if
    ``host`` is no IP address.
    """
    try:
        address = ip_of(host)
    except ValueError:
        return ""
    if address.is_loopback:
        return name
    return network_of(host) if address.is_global else host


def told_votes(peer_ids: Sequence[PeerId], answers: Sequence[Sequence[str]]) -> dict[PeerId, str]:
    """The vote of each peer by where the initial peers have reached it; empty for one without a vote.

    At least half of the initial peers that answer must name the same network.

    Args:
        answers: of each initial peer that answers, the IP addresses of the peers in order; empty for those that it has
            not reached.
    """
    votes = dict.fromkeys(peer_ids, "")
    for peer_id, *hosts in zip(peer_ids, *answers, strict=True):
        named = Counter(vote for host in hosts if (vote := vote_from(host, peer_id)))
        vote = min(named, key=lambda one: (-named[one], one), default="")
        votes[peer_id] = vote if 2 * named[vote] >= len(answers) else ""
    return votes


class ReachedNetworks:
    """The networks in which one peer's initial peers have reached the others. Lives on the network thread.

    Args:
        initial_peers: returns the peers that this one was given to join by.
        on_news: called after the initial peers were asked.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        initial_peers: Callable[[], frozenset[PeerId]],
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self._endpoint = endpoint
        self._initial_peers = initial_peers
        self._on_news = on_news
        self._told: dict[PeerId, str] = {}  # the votes of the peers that the initial peers were asked about
        self._asked_at = -math.inf  # loop time at the end of the last question
        self._asking: asyncio.Task[None] | None = None
        self._has_news = asyncio.Event()
        self._tasks = TaskOwner("asking where others were reached")

    async def close(self) -> None:
        """Stop asking."""
        await self._tasks.close()

    def poll(self, records: Records) -> dict[PeerId, str]:
        """The peers that vote, each with the name of its vote; empty until the initial peers were asked."""
        learnt = [peer_id for peer_id, record in records.items() if record.position.step]
        named = [peer_id for peer_id in learnt if records[peer_id].addresses]
        self._ask_about(named)
        if self._asking is not None and not self._told:
            return {}
        if told := {peer_id: vote for peer_id in named if (vote := self._told.get(peer_id))}:
            return told
        reached_host = self._endpoint.reached_host
        if reached := {peer_id: vote for peer_id in named if (vote := vote_from(reached_host(peer_id), peer_id))}:
            return reached
        # peers without an address have dialled this one, and several of them may share the address of a router
        hosts = {peer_id: self._endpoint.host_of(peer_id) for peer_id in learnt if not records[peer_id].addresses}
        return {peer_id: vote for peer_id, host in hosts.items() if (vote := vote_from(host, host))}

    async def brings_news(self) -> bool:
        """Wait until the initial peers were asked, ``DIAL_S`` at most, and return True; False if they are not now."""
        if self._asking is None:
            return False
        self._has_news.clear()
        await wait_at_most(self._has_news, DIAL_S)
        return True

    def _ask_about(self, peer_ids: Sequence[PeerId]) -> None:
        """Ask the initial peers about those that they were not asked about, and now and then those without a vote."""
        if self._asking is not None or self._tasks.is_closed:
            return
        there = set(peer_ids)
        self._told = {peer_id: vote for peer_id, vote in self._told.items() if peer_id in there}
        paused_s = asyncio.get_running_loop().time() - self._asked_at
        again_s = MINUTE_S if any(self._told.values()) else TWO_DIALS_S
        known = self._told if paused_s < again_s else {peer_id: vote for peer_id, vote in self._told.items() if vote}
        unknown = [peer_id for peer_id in peer_ids if peer_id not in known]
        initial_peers = self._initial_peers()
        if unknown and initial_peers and paused_s >= MOMENT_S:
            host_of = self._endpoint.host_of  # those that are connected come first, strangers' many identities last
            unknown.sort(key=lambda peer_id: not (peer_id in initial_peers or host_of(peer_id)))
            self._asking = self._tasks.spawn(self._ask(unknown), name="asking where others were reached")

    async def _ask(self, peer_ids: list[PeerId]) -> None:
        try:
            asked = await asyncio.gather(*(self._hosts_told_by(one, peer_ids) for one in self._initial_peers()))
            self._told.update(told_votes(peer_ids, [hosts for hosts in asked if hosts]))
        finally:
            self._asking = None
            self._asked_at = asyncio.get_running_loop().time()
            self._has_news.set()
        self._on_news()

    async def _hosts_told_by(self, initial_peer: PeerId, peer_ids: list[PeerId]) -> list[str]:
        """Where an initial peer has reached these peers; those are left out for which ``DIAL_S`` does not suffice.

        Empty if it does not answer at all.
        """
        hosts = list[str]()
        loop = asyncio.get_running_loop()
        until = loop.time() + DIAL_S
        try:
            for start in range(0, len(peer_ids), MAX_ASKED_ABOUT):
                some = peer_ids[start : start + MAX_ASKED_ABOUT]
                answer = await self._endpoint.call(initial_peer, REACHED, ReachedRequest(some), ANSWER_S)
                if len(answer.hosts) != len(some):
                    return []
                hosts += answer.hosts
                if loop.time() >= until:
                    break
        except (Unavailable, PeerError) as error:
            logger.debug("initial peer %s does not say where it has reached others: %s", initial_peer, error)
        return hosts + [""] * (len(peer_ids) - len(hosts)) if hosts else []
