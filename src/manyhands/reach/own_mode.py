"""Finds out whether other peers can dial this one, and makes it a client, which dials out only, if they cannot.

A peer behind a firewall that announces addresses is worse than a client: others wait for dials to it that fail. So a
peer that no other has dialled asks up to ``NUM_ASKED`` of the peers that it knows to dial it back. If none of them can,
it becomes a client.

=============  ====================================================  ===============================================
this peer      asks others                                           and then
=============  ====================================================  ===============================================
has just       after a second, then each ``ASK_PERIOD_S`` until      listens if one of them can dial it, else is a
joined         ``ENOUGH`` have tried, or for ``DECIDED_WITHIN_S``    client, at once
is a client    each ``ASK_AGAIN_S``, and when the addresses of its   listens from its next global step on, if one of
               machine have changed or a router has mapped its port  them can dial it
listens        when the addresses of its machine have changed, as    is a client from its next global step on, if
               when it had just joined: it may have moved behind a   nobody has dialled it since and none of those
               router                                                that have tried can
=============  ====================================================  ===============================================
"""

from __future__ import annotations

import asyncio
import logging
import math

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit, wait_at_most
from manyhands.base.errors import ConfigError, PeerError, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht.node import DhtNode
from manyhands.reach.messages import (
    ASK_TIMEOUT_S,
    BAD_ADDRESS,
    DIAL_BACK,
    EXAMINE,
    MAX_DIALLED,
    NOT_ALLOWED,
    DialBackRequest,
    ExamineRequest,
)
from manyhands.rpc.endpoint import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

DECIDED_WITHIN_S = 15.0
"""Seconds from the first connection to the decision. Without an answer by then, this peer becomes a client."""

DIALLED_SOON_S = 1.0
"""Seconds from the first connection until others are asked: they dial a new peer back at once if they can."""

LOOK_PERIOD_S = 0.1

ASK_PERIOD_S = 5.0
"""Seconds between two times that others are asked, until the decision."""

ASK_AGAIN_S = 60.0
"""Seconds between two times that a client asks whether its port is open by now."""

NUM_ASKED = 3
"""Peers that are asked at a time."""

ENOUGH = 2
"""Peers that must have tried in vain, or all if fewer are known: one might have a firewall of its own."""

FINDING_OUT = "finding out whether others can dial this peer"
NO_ANSWER = frozenset({NOT_ALLOWED, BAD_ADDRESS})
"""Codes that do not show whether this peer's port is open."""


class OwnMode:
    """Decides whether this peer is a client. Lives on the network thread.

    Attributes:
        changes: whether this peer is a client that another one has reached meanwhile, or listens and nobody can dial
            it any more: its mode changes with its next global step.
    """

    def __init__(self, endpoint: Endpoint, dht: DhtNode) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._is_decided = asyncio.Event()
        self._has_news = asyncio.Event()
        self._tasks = TaskOwner("own mode")
        self.changes = False

    def start(self) -> None:
        """Begin to find out, in the background."""
        self._endpoint.on_other_network.append(self.ask_now)
        self._tasks.spawn(self._watch(), name=FINDING_OUT)

    async def close(self) -> None:
        """Stop."""
        await self._tasks.close()

    def ask_now(self) -> None:
        """Ask others again at once: a router, say, leads an address to this peer now."""
        self._has_news.set()

    async def decided(self) -> None:
        """Wait until this peer knows its mode, at most a few seconds longer than the decision takes.

        If no peer is connected, return at once: this peer can only find out once one is.
        """
        if not self._tasks.is_closed and len(self._tasks) and self._endpoint.num_connected_peers:
            try:
                async with time_limit(DECIDED_WITHIN_S + ASK_TIMEOUT_S, FINDING_OUT):
                    await self._is_decided.wait()
            except Timeout as error:
                logger.warning("%s", error)

    def change_if_due(self) -> None:
        """Enter or leave client mode, if what others can dial has changed since the last global step."""
        if not self.changes:
            return
        self.changes = False
        if self._endpoint.client_mode:
            self._endpoint.set_client_mode(is_on=False)
            logger.info("Other peers can dial this one now: it is no longer a client")
        else:
            self._enter_client_mode("its addresses have changed, and those that tried could not")
        self._has_news.set()

    async def _watch(self) -> None:
        is_client, num_asked = await self._decide(-math.inf)
        if is_client:
            tried = "the peer that tried" if num_asked == 1 else f"the {num_asked} peers that tried"
            self._enter_client_mode(f"{tried} could not" if num_asked else "none answered in time")
        self._is_decided.set()
        while True:
            if self._endpoint.client_mode:
                await self._watch_as_client()
            else:
                await self._watch_as_listener()

    async def _watch_as_client(self) -> None:
        """Ask again and again, until this peer listens."""
        while self._endpoint.client_mode:
            await wait_at_most(self._has_news, ASK_AGAIN_S)
            self._has_news.clear()
            if self._endpoint.client_mode:
                could_dial = await self._ask(self._dialers())
                if could_dial and self._endpoint.client_mode:
                    self.changes = any(could_dial)

    async def _watch_as_listener(self) -> None:
        """Once the addresses of this machine have changed, or its mode has: decide again, if it still listens."""
        await self._has_news.wait()
        moved_at = asyncio.get_running_loop().time()
        while not self._endpoint.client_mode:
            self._has_news.clear()
            self.changes = False
            is_client, num_asked = await self._decide(moved_at)
            if num_asked or not is_client:
                self.changes = is_client
                return
            await wait_at_most(self._has_news, ASK_AGAIN_S)  # nobody has answered: this machine may be offline

    def _enter_client_mode(self, why: str) -> None:
        self._endpoint.set_client_mode(is_on=True)
        logger.warning(
            "No other peer can dial this one (%s): it takes part as a client, which dials out only. An open port "
            "would help the run more; manyhands doctor says what blocks it. --no-client-mode listens in any case", why,
        )  # fmt: skip

    async def _decide(self, since: float) -> tuple[bool, int]:
        """Return whether no peer can dial this one, and how many have tried.

        Args:
            since: loop time; that a peer has dialled this one before shows nothing.
        """
        loop = asyncio.get_running_loop()
        endpoint = self._endpoint
        until = math.inf
        ask_at = math.inf
        num_asked = 0
        while loop.time() < until:
            if endpoint.was_reached_since(since):
                return False, 0
            if until == math.inf and endpoint.num_connected_peers:
                until = loop.time() + DECIDED_WITHIN_S
                ask_at = loop.time() + DIALLED_SOON_S
            if loop.time() >= ask_at:
                dialers = self._dialers()
                outcomes = await self._ask(dialers)
                if any(outcomes):
                    return False, 0
                if self._has_news.is_set():  # they were asked about the old addresses
                    continue
                if len(outcomes) >= min(ENOUGH, len(dialers)) > 0:
                    return True, len(outcomes)
                ask_at = loop.time() + ASK_PERIOD_S
                num_asked = max(num_asked, len(outcomes))
            await asyncio.sleep(LOOK_PERIOD_S)
        return True, num_asked

    def _dialers(self) -> list[PeerId]:
        """Return the peers to ask: those that can be dialled themselves, the connected ones first."""
        known = [contact.peer_id for contact in self._dht.contacts()]
        known.sort(key=lambda peer_id: not self._endpoint.is_connected(peer_id))
        return known[:NUM_ASKED]

    async def _ask(self, dialers: list[PeerId]) -> list[bool]:
        """Ask peers to dial this one; return for each that has tried whether it could."""
        self._has_news.clear()
        answers = await asyncio.gather(*(self._ask_one(peer_id) for peer_id in dialers))
        return [answer for answer in answers if answer is not None]

    async def _ask_one(self, peer_id: PeerId) -> bool | None:
        try:
            seen = await self._endpoint.call(peer_id, EXAMINE, ExamineRequest(), ASK_TIMEOUT_S)
            if not (addresses := self._addresses_seen_at(seen.host)):
                return None
            request = DialBackRequest([str(address) for address in addresses])
            response = await self._endpoint.call(peer_id, DIAL_BACK, request, ASK_TIMEOUT_S)
        except (Unavailable, PeerError, ConfigError) as error:  # ConfigError: the answer names no valid host
            logger.debug("peer %s does not dial this one back: %s", peer_id, error)
            return None
        codes = [outcome.code for outcome in response.outcomes]
        if "" in codes:
            return True
        return None if NO_ANSWER.issuperset(codes) else False

    def _addresses_seen_at(self, host: str) -> list[Address]:
        """Return the addresses that this peer would announce, also at the host that others see, such as a router."""
        candidates = self._endpoint.candidates
        addresses = [address for address in candidates if not address.is_loopback] or candidates
        if host and not Address.of(host, 1).is_loopback:
            addresses = [Address.of(host, address.port) for address in addresses[:1]] + addresses
        return list(dict.fromkeys(addresses))[:MAX_DIALLED]
