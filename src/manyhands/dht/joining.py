"""Reaching the initial peers: any one is enough to join, and those that failed are tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import DialFailed, DialReason, JoinFailed, PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.messages import PING, PingRequest
from manyhands.dht.overlay import Overlay
from manyhands.rpc.endpoint import Endpoint
from manyhands.runtime.tasks import TaskOwner

logger = logging.getLogger(__name__)


class InitialPeers:
    """The addresses that a user gave, and which peer answered at each."""

    def __init__(self, endpoint: Endpoint, overlay: Overlay, config: DhtConfig, tasks: TaskOwner) -> None:
        self._endpoint = endpoint
        self._overlay = overlay
        self._config = config
        self._tasks = tasks
        self._peers: dict[Address, PeerId | None] = {}

    async def reach_one(self, addresses: Sequence[Address]) -> None:
        """Dial all at once and return when the first answers; the others go on in the background.

        Raises:
            JoinFailed: none answered within ``join_timeout_s``.
        """
        self._peers = dict.fromkeys(addresses)
        dials = [self._tasks.spawn(self._dial(address), name=f"dial {address}") for address in self._peers]
        failures: dict[str, DialFailed] = {}
        for dial in asyncio.as_completed(dials):
            failure = await dial
            if failure is None:
                return
            failures[failure.address] = failure
        raise JoinFailed([failures[str(address)] for address in dict.fromkeys(addresses)])

    async def retry(self) -> None:
        """Dial those that are not in the table: they never answered, or were lost since.

        So a swarm that was split comes together again, as long as its parts have an initial peer in common.
        """
        known = {contact.peer_id for contact in self._overlay.table.contacts()}
        lost = [address for address, peer_id in self._peers.items() if peer_id not in known]
        await asyncio.gather(*(self._dial(address) for address in lost))

    async def _dial(self, address: Address) -> DialFailed | None:
        """Connect, and make sure that a DHT node is there."""
        try:
            async with time_limit(self._config.join_timeout_s, f"dialling {address}"):
                peer_id = await self._endpoint.connect(address, self._config.join_timeout_s)
                await self._endpoint.call(peer_id, PING, PingRequest(), self._config.request_timeout_s)
        except DialFailed as error:
            return self._failed(address, error)
        except Unavailable as error:
            return self._failed(address, DialFailed(str(address), DialReason.TIMED_OUT, str(error)))
        except PeerError as error:
            return self._failed(address, DialFailed(str(address), DialReason.REJECTED, str(error)))
        self._peers[address] = peer_id
        self._overlay.seen(peer_id)
        return None

    def _failed(self, address: Address, failure: DialFailed) -> DialFailed:
        if failure.reason is DialReason.ITSELF:  # a list that all peers share may name this one too
            self._peers.pop(address, None)
        else:
            logger.info("initial peer %s", failure)
        return failure
