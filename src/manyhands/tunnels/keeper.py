"""Keeps a tunnel to a peer open, and announces the address at which it can be dialled.

Rules:
    * the tunnel is opened after the peer listens and before it joins, so that no peer hears of another address;
    * if it cannot be opened, the peer does not start;
    * a tunnel that drops is reopened, for ever, at growing intervals, even if the service refuses it meanwhile;
    * the address of the new one is announced at once; until then the old one stays announced.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, ManyhandsError, Timeout
from manyhands.peer import Presence
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.5
FIRST_WAIT_S = 1.0
"""Seconds until the second attempt to reopen a tunnel; each later wait is twice as long."""

MOST_WAIT_S = 30.0
"""Longest wait between two attempts: half of the minute within which others should find the peer again."""


class Tunnel(Protocol):
    """A way from a public address to a peer. Its methods are called on the network thread, one at a time.

    Attributes:
        name: the name of the service, for messages.
    """

    name: str

    async def open(self, target: Address) -> Address:
        """Open the tunnel.

        Args:
            target: where the peer listens on this machine.
        Returns:
            The public address, which leads to the target.
        Raises:
            ConfigError: the service refuses; says why, and what to do.
            Unavailable: the service cannot be reached.
        """

    async def wait_dropped(self) -> str:
        """Wait until the open tunnel has dropped; return the reason."""

    async def close(self) -> None:
        """Close the tunnel, whatever its state. May be called twice."""


class TunnelKeeper:
    """Keeps one tunnel open as long as its peer runs::

        manyhands.Peer(before_joining=TunnelKeeper(NgrokTunnel()).start)

    Args:
        tunnel: not yet open.
    """

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._tasks = TaskOwner("tunnel")

    async def start(self, presence: Presence) -> None:
        """Open the tunnel, announce its address, and keep it open until the peer stops.

        Raises:
            ConfigError: the service refuses, or the peer does not listen.
            Unavailable: the service cannot be reached.
        """
        self._presence = presence
        bound = presence.endpoint.bound_addresses
        if not bound:
            raise ConfigError(
                f"{self._tunnel.name} needs a port to lead to, and this peer listens on none; leave "
                f"{self._tunnel.name} out, or let the peer listen"
            )
        self._target = _here(bound[0])
        presence.on_close.append(self.close)
        await self._open()
        self._tasks.spawn(self._keep_open(), name=f"{self._tunnel.name} tunnel")

    async def close(self) -> None:
        """Close the tunnel."""
        await self._tasks.close()
        await self._close_tunnel()

    async def _open(self) -> None:
        async with time_limit(OPEN_TIMEOUT_S, f"opening a tunnel with {self._tunnel.name}"):
            address = await self._tunnel.open(self._target)
        logger.info("%s tunnel created: tcp://%s:%d", self._tunnel.name.capitalize(), address.host, address.port)
        self._presence.endpoint.announce([address])

    async def _close_tunnel(self) -> None:
        try:
            async with time_limit(CLOSE_TIMEOUT_S, f"closing the {self._tunnel.name} tunnel"):
                await self._tunnel.close()
        except Timeout as error:  # the service cannot be reached, and closes it by itself
            logger.debug("%s", error)

    async def _keep_open(self) -> None:
        while True:
            before = self._presence.endpoint.addresses
            reason = await self._tunnel.wait_dropped()
            logger.warning("The %s tunnel has dropped (%s); opening it again", self._tunnel.name, reason)
            await self._close_tunnel()
            await self._reopen()
            if self._presence.endpoint.addresses != before:
                self._log_new_address()

    def _log_new_address(self) -> None:
        now = " ".join(str(address) for address in self._presence.endpoint.addresses)
        if self._presence.endpoint.num_connected_peers:
            logger.info("Connected peers learn the new address at once. Others join with: --initial-peers %s", now)
        else:
            logger.warning(
                "No peer is connected now, so none learns the new address. Unless one returns, start the others again "
                "with: --initial-peers %s",
                now,
            )

    async def _reopen(self) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            try:
                await self._open()
            except ManyhandsError as error:
                logger.warning("%s; trying again in %.0f s", error, wait_s)
                await self._close_tunnel()
            else:
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MOST_WAIT_S)


def _here(bound: Address) -> Address:
    """Return the address at which this machine dials a listener of its own."""
    if not bound.is_unspecified:
        return bound
    return Address.of("127.0.0.1" if bound.protocol == "ip4" else "::1", bound.port)
