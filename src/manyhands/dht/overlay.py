"""Calls and lookups of one node, and the routing table that they keep up to date."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from manyhands.base.address import MAX_ADDRESSES, Address
from manyhands.base.errors import ConfigError, PeerError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.ids import ID_BITS, distance, id_to_bytes, node_id
from manyhands.dht.lookup import Lookup
from manyhands.dht.messages import FIND, PING, TOO_MANY_REQUESTS, FindRequest, FindResponse, PingRequest
from manyhands.dht.networks import network_of
from manyhands.dht.reachability_check import DialBack
from manyhands.dht.routing import Contact, RoutingTable
from manyhands.rpc.endpoint import Endpoint
from manyhands.rpc.method import Method

Req = TypeVar("Req", bound=msgspec.Struct)
Res = TypeVar("Res", bound=msgspec.Struct)
OnAnswer = Callable[[PeerId, FindResponse], object]

logger = logging.getLogger(__name__)

HEARD_PERIOD_S = 10.0
"""The entry of a peer in the table is updated at most once within this time."""

SAME_ADDRESSES_S = 60.0
"""The addresses of a peer count as unchanged for this time after it was heard of, unless its connection was lost."""

TOO_MANY_PAUSE_S = 0.1
"""Pause after ``too_many_requests``: bulk calls and handovers may need more requests than a peer takes at once."""

FILL_PERIOD_S = 300.0
"""Time between two attempts to find more contacts for one bucket."""

REACHED_WITHIN_S = 15.0
"""Seconds from the first answer to one of this peer's requests until it counts as unreachable. Other peers dial a peer
sooner than that if they can."""

FAR_CONTACTS = 3
"""Contacts to look up in each sparse region; peers that answer on the way are entered as well."""


class Overlay:
    """Calls and lookups of one node.

    Attributes:
        table: the known peers. A peer that answers or calls is entered; one that fails or cannot be dialled is dropped.
    """

    def __init__(self, endpoint: Endpoint, config: DhtConfig) -> None:
        self.table = RoutingTable(endpoint.peer_id, config.k, config.max_failures)
        self._endpoint = endpoint
        self._config = config
        self._own_point = node_id(endpoint.peer_id)
        self._filled_at: dict[int, float] = {}  # loop time, by bucket
        table = self.table
        self._dial_back = DialBack(endpoint, self.seen, table.failed, table.drop, config.request_timeout_s)
        self._timer: asyncio.TimerHandle | None = None  # runs from the first answer
        self._is_overdue = False

    async def close(self) -> None:
        """Stop dialling peers in the background."""
        if self._timer is not None:
            self._timer.cancel()
        await self._dial_back.close()

    def is_client(self) -> bool:
        """Whether other peers omit this node from their tables: it is in client mode, or none of them could dial it."""
        return self._endpoint.client_mode or (self._is_overdue and not self._endpoint.was_reached)

    def seen(self, peer_id: PeerId) -> None:
        """Enter a peer that called or answered, unless it is in client mode or not dialable."""
        now = asyncio.get_running_loop().time()
        network = self.network_of(peer_id)
        if self.table.is_heard_again(peer_id, now - HEARD_PERIOD_S, now - SAME_ADDRESSES_S, now, network):
            return
        is_reached = self._endpoint.has_reached(peer_id)
        if not is_reached and not self.table.has_room(peer_id):
            return
        contact = self.contact_of(peer_id)
        if contact is not None and (is_reached or self._dial_back.meet(peer_id)):
            self.table.seen(contact, now, network)

    def moved(self, peer_id: PeerId) -> None:
        """Replace the addresses of a peer that announced others; it stays in the table only if it is reached there."""
        self._dial_back.moved(peer_id)
        if self._endpoint.is_client(peer_id):
            self.table.drop(peer_id)
        else:
            self.table.lost(peer_id)  # without this, seen() would keep the old addresses
            self.seen(peer_id)

    def doubt(self, peer_id: PeerId) -> None:
        """Dial a peer that reports that no peer has reached it since it began, even if this node reached it before."""
        if self.contact_of(peer_id) is not None:
            self._dial_back.meet(peer_id)

    def contact_of(self, peer_id: PeerId) -> Contact | None:
        """Return a peer as it is named to others; None if it cannot be dialled, as far as is known."""
        addresses = self._endpoint.addresses_to_tell(peer_id)
        if not addresses or self._endpoint.is_client(peer_id):
            return None
        return Contact(peer_id, [_text_of(address) for address in addresses[:MAX_ADDRESSES]])

    def network_of(self, peer_id: PeerId, told: Sequence[str] = ()) -> str:
        """Return the network of a peer: of the address where this node has reached it, or else of those it announces.

        Args:
            told: the addresses that others gave, in case the peer has announced none to this node.
        Returns:
            The peer's own id if nothing is known.
        """
        endpoint = self._endpoint
        if peer_id == endpoint.peer_id:
            addresses = [address for address in endpoint.addresses if not address.is_loopback] or endpoint.addresses
        else:
            addresses = endpoint.reached_at(peer_id)
            if not addresses:
                told = [*map(str, endpoint.addresses_to_tell(peer_id)), *told]
        hosts = [address.host for address in addresses if address.protocol.startswith("ip")]
        if not hosts:  # it was reached by a host name: its owner may have many names
            hosts = [endpoint.host_of(peer_id)] if addresses else [_host_of(text) for text in told]
        return next((network_of(host) for host in hosts if host), peer_id)

    def _network_of_contact(self, contact: Contact) -> str:
        return self.network_of(contact.peer_id, contact.addresses)

    def doubtful(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Return those of these peers that may be gone: no connection, and no recent call or a loss since.

        Returns:
            The least recently heard of first.
        """
        recently = asyncio.get_running_loop().time() - self._config.refresh_period_s
        heard_at = {peer_id: self.table.heard_at(peer_id) for peer_id in peers}
        silent = [
            peer
            for peer, at in heard_at.items()
            if (at < recently or not self.table.is_sound(peer)) and not self._endpoint.is_connected(peer)
        ]
        return sorted(silent, key=heard_at.__getitem__)

    async def ask(self, peer_id: PeerId, method: Method[Req, Res], request: Req) -> Res | None:
        """Call a peer, and note in the table whether it answered; on ``too_many_requests``, retry until the timeout.

        Returns:
            Its answer, or None.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.request_timeout_s
        while True:
            try:
                response = await self._endpoint.call(peer_id, method, request, deadline - loop.time())
                break
            except (Unavailable, PeerError) as error:
                if not isinstance(error, Refused) or error.code != TOO_MANY_REQUESTS:
                    logger.debug("%s to peer %s failed: %s", method.name, peer_id, error)
                    self.table.failed(peer_id)
                    return None
            if loop.time() + TOO_MANY_PAUSE_S >= deadline:
                logger.debug("%s to peer %s: too many requests", method.name, peer_id)
                return None
            await asyncio.sleep(TOO_MANY_PAUSE_S)
        if self._timer is None:
            self._timer = loop.call_later(REACHED_WITHIN_S, self._on_reach_deadline)
        self.seen(peer_id)
        return response

    def _on_reach_deadline(self) -> None:
        self._is_overdue = True
        if self.is_client() and not self._endpoint.client_mode:
            where = ", ".join(str(address) for address in self._endpoint.addresses)
            logger.warning(
                "No other peer could dial this peer at %s. It reads and writes records, but others cannot find it, and "
                "it holds no records for them. Open the port, announce the address that leads to it, or use client "
                "mode.",
                where or "any address",
            )

    async def ping(self, peer_id: PeerId) -> bool:
        """Return whether a peer answers. It is also asked to dial back if no peer has reached this one yet."""
        return await self.ask(peer_id, PING, self.greeting()) is not None

    def greeting(self) -> PingRequest:
        """Return the ping of this node."""
        return PingRequest(was_reached=self._endpoint.was_reached or self._endpoint.client_mode)

    async def ask_contact(self, contact: Contact, method: Method[Req, Res], request: Req) -> Res | None:
        """Like :meth:`ask`, for a peer that the endpoint may not know yet."""
        return await self.ask(contact.peer_id, method, request) if self._learn(contact) else None

    async def lookup(
        self,
        target: int,
        timeout_s: float,
        num: int,
        key: str | None = None,
        on_answer: OnAnswer | None = None,
        *,
        seeds: Sequence[Contact] = (),
        owners: Callable[[PeerId], Sequence[str] | None] = lambda _: None,
        after: str | None = None,
        most: int | None = None,
    ) -> list[Contact]:
        """Find the peers nearest to a point; for this node's own point, also some of each farther region.

        Args:
            target: the point.
            timeout_s: the lookup ends then and returns what it has found.
            num: how many are wanted; no more than needed are asked.
            key: also ask for the records of this key.
            on_answer: called with each peer that answers, and its answer.
            seeds: contacts to ask first; the nearest known peers by default.
            owners: returns whose records a peer is asked for; None for all.
            after, most: as in the :class:`.messages.FindRequest`.
        Returns:
            Up to ``num`` contacts that have answered, nearest first.
        """
        config = self._config
        is_for_holders = num <= config.replicas
        if not seeds:
            seeds = self.table.nearest_spread(target, config.k)
            if len(seeds) < num:  # then also those that failed, but are still in the table
                seeds = self.table.nearest(target, config.k, with_failed=True)
        own_id = self._endpoint.peer_id
        lookup = Lookup(
            target,
            seeds,
            own_id=own_id,
            k=config.k,
            alpha=max(config.alpha, num) if is_for_holders else config.alpha,  # fewer turns
            num=num,
            is_client=self.is_client(),
            network_of=self._network_of_contact if is_for_holders else None,
        )
        request = FindRequest(id_to_bytes(target), key, after=after, most=most)
        deadline = asyncio.get_running_loop().time() + timeout_s
        asking = _Asking(config.slow_after_s, deadline)
        try:
            while not lookup.is_finished:
                for contact in lookup.take_next():
                    peer_id = contact.peer_id
                    named = owners(peer_id)
                    asked = request if named is None else msgspec.structs.replace(request, owners=list(named))
                    asking.begin(peer_id, self._ask_on_the_way(lookup, contact, asked, on_answer))
                if not await asking.wait():
                    logger.debug("lookup timed out after %.3g s; going on with what it found", timeout_s)
                    break
                for peer_id in asking.take_slow():
                    lookup.slow(peer_id)
        finally:
            for peer_id in await asking.give_up():
                if lookup.is_slow(peer_id):
                    self.table.failed(peer_id)
        nearest = lookup.nearest()
        if target == self._own_point and len(nearest) >= num:  # else it knows all peers
            await self._fill_far_buckets(distance(node_id(nearest[-1].peer_id), target), deadline)
        return nearest

    async def _fill_far_buckets(self, distance_known: int, deadline: float) -> None:
        """Look up a point in each bucket that has few contacts although its region may have more.

        All peers up to ``distance_known`` are known. Without this, half of the swarm may know no peer in some part of
        the other half, and lookups end far from their target (section 2.3, the end of joining).
        """
        now = asyncio.get_running_loop().time()
        thin = [
            index
            for index in range(distance_known.bit_length(), ID_BITS + 1)
            if self.table.num_in_bucket(index) < self._config.k // 2
            and now - self._filled_at.get(index, -math.inf) > FILL_PERIOD_S
        ]
        self._filled_at |= dict.fromkeys(thin, now)
        points = [self._own_point ^ 1 << (index - 1) for index in thin]
        await asyncio.gather(*(self.lookup(point, deadline - now, FAR_CONTACTS) for point in points))

    async def _ask_on_the_way(
        self, lookup: Lookup, contact: Contact, request: FindRequest, on_answer: OnAnswer | None
    ) -> None:
        response = await self.ask_contact(contact, FIND, request)
        if response is None:
            lookup.failed(contact.peer_id)
            return
        lookup.answered(contact.peer_id, response.contacts)
        if on_answer is not None:
            on_answer(contact.peer_id, response)

    def _learn(self, contact: Contact) -> bool:
        """Give the addresses of a contact to the endpoint; return whether they are valid."""
        try:
            addresses = [_address_of(text, contact.peer_id) for text in contact.addresses]
        except ConfigError as error:
            logger.debug("dropped contact %s: %s", contact.peer_id, error)
            return False
        self._endpoint.learn(contact.peer_id, addresses)
        return True


class _Asking:
    """The running requests of a lookup.

    Args:
        slow_after_s: a peer without an answer after this time is slow.
        deadline: end of the wait, in loop time.
    """

    def __init__(self, slow_after_s: float, deadline: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._slow_after_s = slow_after_s
        self._deadline = deadline
        self._peers: dict[asyncio.Task[None], PeerId] = {}
        self._not_slow: deque[tuple[float, asyncio.Task[None]]] = deque()  # with the time at which each becomes slow
        self._timer: asyncio.TimerHandle | None = None
        self._wake = self._loop.create_future()
        self._error: BaseException | None = None

    def begin(self, peer_id: PeerId, ask: Coroutine[Any, Any, None]) -> None:
        """Start one more request."""
        task = self._loop.create_task(ask)
        self._peers[task] = peer_id
        self._not_slow.append((self._loop.time() + self._slow_after_s, task))
        task.add_done_callback(self._ended)

    async def wait(self) -> bool:
        """Wait until a request has ended or become slow; return whether that was before the deadline.

        Raises the exception of a request that raised one.
        """
        while self._not_slow and self._not_slow[0][1] not in self._peers:
            self._not_slow.popleft()
        if self._timer is None:
            due = self._not_slow[0][0] if self._not_slow else self._deadline
            self._timer = self._loop.call_at(min(due, self._deadline), self._time_is_up)
        await self._wake
        self._wake = self._loop.create_future()
        if self._error is not None:
            raise self._error
        return self._loop.time() < self._deadline

    def take_slow(self) -> list[PeerId]:
        """Return the peers that became slow since the last call."""
        now = self._loop.time()
        slow: list[PeerId] = []
        while self._not_slow and self._not_slow[0][0] <= now:
            _, task = self._not_slow.popleft()
            if task in self._peers:
                slow.append(self._peers[task])
        return slow

    async def give_up(self) -> list[PeerId]:
        """Cancel all requests; return the peers that had not answered."""
        if self._timer is not None:
            self._timer.cancel()
        peers = dict(self._peers)
        for task in peers:
            task.cancel()
        if peers:
            await asyncio.gather(*peers, return_exceptions=True)
        return list(peers.values())

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._peers[task]
        if not task.cancelled():
            self._error = self._error or task.exception()
        self._wake_up()

    def _time_is_up(self) -> None:
        self._timer = None
        self._wake_up()

    def _wake_up(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)


@functools.lru_cache(maxsize=16384)  # answers repeat the same contacts
def _address_of(text: str, peer_id: PeerId) -> Address:
    return Address.parse(text).with_peer(peer_id)


@functools.lru_cache(maxsize=16384)
def _host_of(text: str) -> str:
    """Return the host of an address that another peer sent; empty if it is invalid."""
    try:
        return Address.parse(text).host
    except ConfigError:
        return ""


@functools.lru_cache(maxsize=16384)
def _text_of(address: Address) -> str:
    """Format an address without the peer id, which is sent separately."""
    return str(dataclasses.replace(address, peer_id=None))
