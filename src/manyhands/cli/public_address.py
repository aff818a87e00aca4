"""Announces a public address of a first peer, and says how it was found; checks one that the user gave."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from manyhands.base.address import Address, parse_addresses
from manyhands.base.errors import ConfigError, DialFailed, DialReason, ManyhandsError
from manyhands.peer import Peer, Presence
from manyhands.reach import public_address
from manyhands.reach.port_mapping import speaks_upnp
from manyhands.reach.public_address import PublicAddress
from manyhands.reach.seen_host import SeenHost
from manyhands.transport import TlsTransport

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 5.0
DIAL_TIMEOUT_S = 4.0
ANOTHER_PEER = "another peer answers there"
ELSEWHERE = {
    DialReason.NOT_MANYHANDS: "something else answers there, which is not a manyhands peer",
    DialReason.PROTOCOL_VERSION: "a peer of another version of manyhands answers there",
}
"""Texts for another program that answers at an announced address, by the reason for which the dial failed."""


def announce_public(peer: Peer, *, maps_port: bool) -> PublicAddress | None:
    """Find and announce a public address, if this peer has none and other machines can dial it.

    Args:
        maps_port: ask the router to map the port.
    Returns:
        The address; call its ``release`` when the peer ends. None if there was none to find.
    """
    local = [Address.parse(text) for text in peer.addresses]
    ip4 = [address for address in local if address.protocol == "ip4"] or local  # many peers have no IPv6
    if not local or any(address.is_public or address.is_loopback for address in ip4):
        return None
    logger.info("No address specified. Attempting to infer address ...")
    found = public_address.infer(ip4[0].port, maps_port=maps_port, on_moved=partial(_moved, peer))
    where = ", ".join(address.host_port for address in ip4)
    if found is None:
        upnp = "; with pip install 'manyhands[upnp]' this peer asks the router to open one by UPnP"
        logger.warning(
            "No public address was found: machines outside of this network cannot join at %s. If the router forwards a "
            "port to this machine, announce it: --announce PUBLIC-HOST:PORT%s", where,
            upnp if maps_port and not speaks_upnp() else "",
        )  # fmt: skip
        peer.run(_ask_peers(peer), START_TIMEOUT_S, "beginning to ask peers for this one's address")
        return None
    place = Address.of(found.host, found.port).host_port
    logger.info("Public address: %s, says %s. In the local network: %s", place, found.how, where)
    if not found.is_open:
        logger.warning(
            "It is not known whether port %d of %s leads to this machine: forward it in the router, and check it with "
            "manyhands doctor --initial-peers %s on a machine elsewhere", found.port, found.host, place,
        )  # fmt: skip
    peer.run(_announce_beside_local(peer, Address.of(found.host, found.port)), START_TIMEOUT_S, "announcing an address")
    return found


def map_port(peer: Peer, at_exit: Callable[[Callable[[], None]], None]) -> None:
    """Ask the router, in the background, to map this peer's port, and announce the public address.

    Args:
        at_exit: registers the function that deletes the mapping.
    """
    local = [Address.parse(text) for text in peer.addresses]
    private = [one for one in local if one.protocol == "ip4" and not one.is_public and not one.is_loopback]
    if not private:
        return

    def run() -> None:
        found = public_address.mapped_by_router(private[0].port, on_moved=partial(_moved, peer))
        if found is None:
            return
        at_exit(found.release)
        announcing = _announce_beside_local(peer, Address.of(found.host, found.port))
        peer.run(announcing, START_TIMEOUT_S, "announcing an address")
        logger.info("Others can dial this peer at %s: %s", Address.of(found.host, found.port).host_port, found.how)

    def run_quietly() -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001 (routers answer in many ways, and this peer may be closed by now)
            logger.debug("no port was mapped: %s", error)

    threading.Thread(target=run_quietly, daemon=True, name="mapping a port").start()


def _moved(peer: Peer, host: str, port: int) -> None:
    """Announce that the router has another public address; others find this peer there within a minute."""
    address = Address.of(host, port)
    with suppress(ManyhandsError):  # this peer is closing
        peer.run(_announce_beside_local(peer, address), START_TIMEOUT_S, "announcing an address")
        logger.info(
            "The router has another public address now: others join with: --initial-peers %s. Tickets with the old one "
            "are void",
            address.with_peer(peer.peer_id),
        )


async def _announce_beside_local(peer: Peer, address: Address) -> None:
    peer.endpoint.announce([address], with_local=True)
    peer.presence.own_mode.ask_now()


async def _ask_peers(peer: Peer) -> None:
    peer.presence.on_close.append(SeenHost(peer.endpoint).close)


class AnnouncedCheck:
    """Dials the addresses that the user announces, once, before this peer joins.

    Some routers forward no connections from their own network back into it, so an address without an answer may still
    be right.

    Raises:
        ConfigError: an address cannot be read.
    """

    def __init__(self, announced: Sequence[str]) -> None:
        self._addresses = [Address(one.protocol, one.host, one.port) for one in parse_addresses(announced)]

    async def __call__(self, presence: Presence) -> None:
        """Dial them all at once, as a peer that listens already.

        Raises:
            ConfigError: another peer or another program answers; or it is a loopback address without an answer.
        """
        if not presence.endpoint.bound_addresses:
            return
        transport = TlsTransport(presence.endpoint.identity)
        reasons = await asyncio.gather(*(_dial(transport, address) for address in self._addresses))
        for address, reason in zip(self._addresses, reasons, strict=True):
            if reason is None or reason in ELSEWHERE:
                found = ANOTHER_PEER if reason is None else ELSEWHERE[reason]
                raise ConfigError(
                    f"--announce {address.host_port}: {found}. Others would dial it in place of this "
                    "peer; announce the address and port from which connections are led to this one"
                )
            if address.is_loopback and reason is not DialReason.ITSELF:
                raise ConfigError(
                    f"--announce {address.host_port}: it leads only to this machine, and this peer does not listen "
                    "there; announce the address that leads here from outside, or leave --announce out"
                )
            if reason is not DialReason.ITSELF:
                logger.warning(
                    "The announced address %s was not reached from this machine (%s). It may still be right, as some "
                    "routers forward nothing from their own network back into it. To check it, run this on a machine "
                    "elsewhere: manyhands doctor --initial-peers %s",
                    address.host_port, reason.value, address.host_port,
                )  # fmt: skip


async def _dial(transport: TlsTransport, address: Address) -> DialReason | None:
    """Dial an address; returns the reason why this failed, or None if another peer answered."""
    try:
        stream = await transport.dial(address, DIAL_TIMEOUT_S)
    except DialFailed as failure:
        return failure.reason
    stream.abort()
    return None
