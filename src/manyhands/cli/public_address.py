"""Announces a public address of a first peer, and says how it was found."""

from __future__ import annotations

import logging

from manyhands.base.address import Address
from manyhands.peer import Peer
from manyhands.reach import public_address
from manyhands.reach.public_address import PublicAddress
from manyhands.reach.seen_host import SeenHost

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 5.0


def announce_public(peer: Peer, *, maps_port: bool, asks_service: bool) -> PublicAddress | None:
    """Find and announce a public address, if this peer has none and other machines can dial it.

    Args:
        maps_port: ask the router to map the port.
        asks_service: ask a service on the internet.
    Returns:
        What was found; call its ``release`` when the peer ends.
    """
    local = [Address.parse(text) for text in peer.addresses]
    ip4 = [address for address in local if address.protocol == "ip4"] or local  # many peers have no IPv6
    if not local or any(address.is_public or address.is_loopback for address in ip4):
        return None
    logger.info("No address specified. Attempting to infer address ...")
    found = public_address.infer(ip4[0].port, maps_port=maps_port, asks_service=asks_service)
    where = ", ".join(f"{address.host}:{address.port}" for address in local)
    if found is None:
        logger.warning(
            "No public address was found: machines outside of this network cannot join at %s. If a port of the router "
            "leads here, say so: --announce PUBLIC-HOST:PORT", where,
        )  # fmt: skip
        peer.run(_ask_peers(peer), START_TIMEOUT_S, "beginning to ask peers for this one's address")
        return None
    logger.info("This peer is at %s:%d, says %s; on the local network at %s", found.host, found.port, found.how, where)
    if not found.is_open:
        logger.warning(
            "Whether port %d of %s leads to this machine is not known: forward it in the router, and check it with "
            "manyhands doctor --initial-peers %s:%d on a machine elsewhere", found.port, found.host, found.host,
            found.port,
        )  # fmt: skip
    peer.announce([Address.of(found.host, found.port), *local])
    return found


async def _ask_peers(peer: Peer) -> None:
    peer.presence.on_close.append(SeenHost(peer.endpoint).close)
