"""Learns the public address of a first peer from the peers that dial it."""

from __future__ import annotations

import logging

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.reach.messages import ASK_TIMEOUT_S, DIAL_BACK, EXAMINE, DialBackRequest, ExamineRequest
from manyhands.rpc.announce import has_public
from manyhands.rpc.endpoint import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)


class SeenHost:
    """Asks each peer that connects at which host it sees this one, until one names a public host.

    Runs on the network thread.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tasks = TaskOwner("public address")
        endpoint.on_connected.append(self._on_connected)

    async def close(self) -> None:
        """Stop asking."""
        self._stop_asking()
        await self._tasks.close()

    def _stop_asking(self) -> None:
        if self._on_connected in self._endpoint.on_connected:
            self._endpoint.on_connected.remove(self._on_connected)

    def _on_connected(self, peer_id: PeerId) -> None:
        self._tasks.spawn(self._ask(peer_id), name=f"asking peer {peer_id} for this one's address")

    async def _ask_to_dial_back(self, peer_id: PeerId, address: Address) -> bool:
        """Ask a peer to dial this one at an address; return whether it succeeded.

        If this peer opened the connection, the host that the other one sees may be that of a router.
        """
        try:
            response = await self._endpoint.call(peer_id, DIAL_BACK, DialBackRequest([str(address)]), ASK_TIMEOUT_S)
        except (Unavailable, PeerError) as error:
            logger.debug("peer %s does not dial this one back: %s", peer_id, error)
            return False
        return [outcome.code for outcome in response.outcomes] == [""]

    async def _ask(self, peer_id: PeerId) -> None:
        endpoint = self._endpoint
        try:
            seen = await endpoint.call(peer_id, EXAMINE, ExamineRequest(), ASK_TIMEOUT_S)
            addresses = [Address.of(seen.host, address.port) for address in endpoint.addresses[:1] if seen.host]
        except (Unavailable, PeerError, ConfigError) as error:
            logger.debug("peer %s does not say where it has dialled this one: %s", peer_id, error)
            return
        if not addresses or not addresses[0].is_public or has_public(endpoint.addresses, like=addresses[0]):
            return
        if await self._ask_to_dial_back(peer_id, addresses[0]):
            self._stop_asking()
            endpoint.announce(addresses, with_local=True)
            logger.info(
                "Peer %s has dialled this one at %s; others join with: --initial-peers %s",
                peer_id, seen.host, addresses[0].with_peer(endpoint.peer_id),
            )  # fmt: skip
