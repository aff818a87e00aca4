"""The other nodes, as one node sees them: calls that keep the routing table true, and lookups over them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.ids import id_to_bytes
from manyhands.dht.lookup import Lookup
from manyhands.dht.messages import FIND, FindRequest
from manyhands.dht.records import AgedRecord
from manyhands.dht.routing import MAX_ADDRESSES, Contact, RoutingTable
from manyhands.rpc.endpoint import Endpoint
from manyhands.rpc.method import Method

Req = TypeVar("Req", bound=msgspec.Struct)
Res = TypeVar("Res", bound=msgspec.Struct)
OnRecords = Callable[[PeerId, list[AgedRecord]], object]

logger = logging.getLogger(__name__)

REMEMBERED_PEERS = 4096
MAX_LATEST = 64
HEARD_PERIOD_S = 10.0
"""Of a peer that is heard of all the time, not every call has to be entered in the table."""


class Overlay:
    """Calls and lookups of one node.

    Attributes:
        table: the known peers; who answers or asks is entered, who fails is dropped in the end.
    """

    def __init__(self, endpoint: Endpoint, config: DhtConfig) -> None:
        self.table = RoutingTable(endpoint.peer_id, config.k, config.max_failures)
        self._endpoint = endpoint
        self._config = config
        self._heard_at: OrderedDict[PeerId, float] = OrderedDict()  # loop time

    def seen(self, peer_id: PeerId) -> None:
        """Enter a peer that asked or answered; not one in client mode, which nobody could ask."""
        now = asyncio.get_running_loop().time()
        if now - self._heard_at.get(peer_id, -math.inf) < HEARD_PERIOD_S and self.table.is_sound(peer_id):
            return
        addresses = self._endpoint.addresses_of(peer_id)
        if addresses and not self._endpoint.is_client(peer_id):
            self.table.seen(Contact(peer_id, [_text_of(address) for address in addresses[:MAX_ADDRESSES]]))
            self._heard_at[peer_id] = now
            self._heard_at.move_to_end(peer_id)
            if len(self._heard_at) > REMEMBERED_PEERS:
                self._heard_at.popitem(last=False)

    def contact_of(self, peer_id: PeerId) -> Contact | None:
        """A known peer and where it can be dialled."""
        return self.table.contact_of(peer_id)

    def latest_contacts(self) -> list[Contact]:
        """Of the contacts in the table those heard of last, the latest first."""
        latest = itertools.islice((peer for peer in reversed(self._heard_at) if peer in self.table), MAX_LATEST)
        return [contact for peer_id in latest if (contact := self.contact_of(peer_id)) is not None]

    def doubtful(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Of these peers those whom nothing shows to be there: no connection, no recent call.

        Returns:
            The least recently heard of first.
        """
        recently = asyncio.get_running_loop().time() - self._config.refresh_period_s
        heard_at = {peer_id: self._heard_at.get(peer_id, -math.inf) for peer_id in peers}
        silent = [peer for peer, at in heard_at.items() if at < recently and not self._endpoint.is_connected(peer)]
        return sorted(silent, key=heard_at.__getitem__)

    async def ask(self, peer_id: PeerId, method: Method[Req, Res], request: Req) -> Res | None:
        """Call a peer, and note in the table whether it answered.

        Returns:
            Its answer, or None if it gave none.
        """
        try:
            response = await self._endpoint.call(peer_id, method, request, self._config.request_timeout_s)
        except (Unavailable, PeerError) as error:
            logger.debug("%s to peer %s failed: %s", method.name, peer_id, error)
            self.table.failed(peer_id)
            return None
        self.seen(peer_id)
        return response

    async def ask_contact(self, contact: Contact, method: Method[Req, Res], request: Req) -> Res | None:
        """The same, of a peer of which the endpoint may know nothing yet."""
        return await self.ask(contact.peer_id, method, request) if self._learn(contact) else None

    async def lookup(
        self,
        target: int,
        timeout_s: float,
        num: int,
        key: str | None = None,
        on_records: OnRecords | None = None,
        *,
        seeds: Sequence[Contact] = (),
    ) -> list[Contact]:
        """Find the peers nearest to a point.

        Args:
            target: the point.
            timeout_s: the lookup then ends with what it has found.
            num: how many are wanted; no more than needed are asked.
            key: also ask for the records of this key;
            on_records: called with each peer that answers, and its records.
            seeds: whom to ask first; the nearest known peers if nobody is given.
        Returns:
            Up to ``num`` contacts that answered just now, nearest first.
        """
        config, loop = self._config, asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        seeds = seeds or self.table.nearest(target, config.k)
        lookup = Lookup(target, seeds, own_id=self._endpoint.peer_id, k=config.k, alpha=config.alpha, num=num)
        request = FindRequest(id_to_bytes(target), key)
        asking: set[asyncio.Task[None]] = set()
        try:
            while not lookup.is_finished:
                asking |= {
                    loop.create_task(self._ask_on_the_way(lookup, contact, request, on_records))
                    for contact in lookup.to_ask()
                }
                done, asking = await asyncio.wait(
                    asking, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    logger.debug("a lookup took longer than %.3g s; going on with what it found", timeout_s)
                    break
                for task in done:
                    task.result()
        finally:
            for task in asking:  # peers that are no longer among the nearest, or too slow
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return lookup.nearest()

    async def _ask_on_the_way(
        self, lookup: Lookup, contact: Contact, request: FindRequest, on_records: OnRecords | None
    ) -> None:
        response = await self.ask_contact(contact, FIND, request)
        if response is None:
            lookup.failed(contact.peer_id)
            return
        lookup.answered(contact.peer_id, response.contacts)
        if on_records is not None:
            on_records(contact.peer_id, response.records)

    def _learn(self, contact: Contact) -> bool:
        """Tell the endpoint where a contact can be dialled; whether that can be read."""
        try:
            addresses = [_address_of(text, contact.peer_id) for text in contact.addresses]
        except ConfigError as error:
            logger.debug("contact %s is dropped: %s", contact.peer_id, error)
            return False
        self._endpoint.learn(contact.peer_id, addresses)
        return True


@functools.lru_cache(maxsize=4096)  # the same contacts come in every answer
def _address_of(text: str, peer_id: PeerId) -> Address:
    return Address.parse(text).with_peer(peer_id)


@functools.lru_cache(maxsize=4096)
def _text_of(address: Address) -> str:
    return str(address)
