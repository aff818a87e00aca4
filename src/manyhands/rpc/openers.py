"""Chooses how a new connection leads to another peer: dialled, dialled back, punched or through a relay.

A control connection:

===========================  ===========================================================================================
this peer                    how
===========================  ===========================================================================================
can be dialled               it dials
cannot be dialled            it dials, and asks relays if that fails; a relayed connection is replaced by a punched one
                             or a dialled one as soon as there is one
                             (:meth:`manyhands.rpc.endpoint.Endpoint._run_relayed`)
===========================  ===========================================================================================

A bulk connection, by the control connection to that peer; the first row that applies:

===========================  ===========================================================================================
the control connection       how
===========================  ===========================================================================================
is of a peer that cannot     the other peer is asked to dial back
be dialled, unlike this one
is relayed                   through its relay or another volunteer; if that fails, dialled: the other peer may be one
                             that can be dialled by now
is punched                   punched; if that fails, through a volunteer
was dialled by the other     dialled; if that fails, the other peer is asked to dial back: it may have announced
peer, and this one can be    addresses that do not work
dialled
all others, and without one  dialled
===========================  ===========================================================================================

A peer that is asked to dial back does so as in the rows *relayed* and *punched*, or at an address at which it has
reached the other one, and at no other: nobody can have it dial strangers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from manyhands.base.errors import PeerError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.address_book import AddressBook
from manyhands.rpc.connection import ControlConnection
from manyhands.rpc.dialled_back_streams import DialBackStreams
from manyhands.rpc.dialling import Dialler, Opened, OpenOne
from manyhands.rpc.frames import Hello
from manyhands.rpc.pool import ConnectionPool
from manyhands.rpc.punched_streams import PunchedStreams
from manyhands.rpc.relayed_streams import RelayedStreams
from manyhands.rpc.ways import PUNCHED

logger = logging.getLogger(__name__)


class Openers:
    """Opens the connections of one endpoint in the ways of the tables above.

    Args:
        is_client: returns whether this peer is in client mode: nobody can dial it.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        book: AddressBook,
        dialler: Dialler,
        dial_back: DialBackStreams,
        relayed: RelayedStreams,
        punched: PunchedStreams,
        is_client: Callable[[], bool],
    ) -> None:
        self._pool = pool
        self._book = book
        self._dialler = dialler
        self._dial_back = dial_back
        self._relayed = relayed
        self._punched = punched
        self._is_client = is_client

    async def open_control(self, peer_id: PeerId, hello: Hello, timeout_s: float) -> Opened:
        """Open a control connection.

        Raises:
            Unavailable: with the reasons of the dial and of the relays.
            Refused: the peer refuses it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        relays = [relay for relay in self._pool.relays() if relay != peer_id] if self._is_client() else []
        try:
            return await self.dial(peer_id, hello, timeout_s / 2 if relays else timeout_s)
        except Unavailable as error:
            if not relays:
                raise
            try:
                opened = await self._relayed.open(relays, peer_id, hello, deadline - loop.time())
            except Unavailable as failure:
                raise Unavailable(f"{error}; {failure}") from error
        relay = opened.way.relay
        limit = "" if relay is None or self._pool.relays_bulk(relay) else ", which forwards no averages without --relay"
        logger.info("Peer %s cannot be dialled from here: it is %s%s", peer_id, opened.way, limit)
        return opened

    def bulk(self, peer_id: PeerId, timeout_s: float) -> OpenOne:
        """Return the function that opens a bulk connection to a peer.

        Raises:
            Unavailable: no address of the peer is known.
        """
        connection = self._pool.of(peer_id)
        if connection is not None and not self._is_client() and self._pool.is_client(peer_id):
            return lambda hello: self._dial_back.open(connection, hello, timeout_s)
        if connection is not None and (opener := self._indirect(connection, timeout_s)) is not None:
            return opener
        self._book.check_known(peer_id)
        if connection is None or self._is_client() or connection.is_dialled:
            return lambda hello: self.dial(peer_id, hello, timeout_s)
        return lambda hello: self._dial_or_ask(connection, hello, timeout_s)

    def back(self, peer_id: PeerId, timeout_s: float) -> OpenOne | None:
        """Return the function that opens a bulk connection to a peer that asked for it; None if it was not reached."""
        connection = self._pool.of(peer_id)
        if connection is not None and (opener := self._indirect(connection, timeout_s)) is not None:
            return opener
        addresses = self._book.reached_at(peer_id)
        return (lambda hello: self._dialler.open(addresses, hello, timeout_s)) if addresses else None

    def _indirect(self, connection: ControlConnection, timeout_s: float) -> OpenOne | None:
        """Return the function for a relayed or punched control connection; None for others."""
        if connection.way.relay is not None:
            return lambda hello: self._relay_or_dial(connection, hello, timeout_s)
        if connection.way == PUNCHED:
            return lambda hello: self._punch_or_relay(connection, hello, timeout_s)
        return None

    # the ways

    async def dial(self, peer_id: PeerId, hello: Hello, timeout_s: float) -> Opened:
        """Open a connection at one of the addresses of a peer."""
        self._book.check_known(peer_id)
        return await self._dialler.open(self._book.addresses_of(peer_id), hello, timeout_s, self._book.heard(peer_id))

    async def _dial_or_ask(self, connection: ControlConnection, hello: Hello, timeout_s: float) -> Opened:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            return await self.dial(connection.remote, hello, timeout_s / 2)
        except Unavailable as error:
            logger.debug("peer %s is asked to dial this one: %s", connection.remote, error)
            try:
                return await self._dial_back.open(connection, hello, deadline - loop.time())
            except (Unavailable, PeerError):
                raise error from None

    async def _relay_or_dial(self, connection: ControlConnection, hello: Hello, timeout_s: float) -> Opened:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        peer_id, relay = connection.remote, connection.way.relay
        relays = list(dict.fromkeys([*([relay] if relay is not None else []), *self._pool.relays(for_bulk=True)]))
        has_addresses = bool(self._book.addresses_of(peer_id))
        try:
            return await self._relayed.open(relays, peer_id, hello, timeout_s / 2 if has_addresses else timeout_s)
        except Unavailable as error:
            if not has_addresses:
                raise
            try:
                return await self.dial(peer_id, hello, deadline - loop.time())
            except Unavailable as failure:
                raise Unavailable(f"{error}; {failure}") from error

    async def _punch_or_relay(self, connection: ControlConnection, hello: Hello, timeout_s: float) -> Opened:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            return await self._punched.open(connection, hello, timeout_s / 2)
        except (Unavailable, Refused) as error:  # refused, say, as the other peer makes many attempts already
            logger.debug("%s; a relay is asked", error)
            relays = self._pool.relays(for_bulk=True)
            try:
                return await self._relayed.open(relays, connection.remote, hello, deadline - loop.time())
            except Unavailable as failure:
                if isinstance(error, Refused):  # perhaps of this stream, and not of the attempt
                    raise error from failure
                raise Unavailable(f"{error}; {failure}") from error
