"""The control connections of one endpoint: which to use, which to keep, and which peers are still there."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from manyhands.base.errors import PeerLost
from manyhands.base.identity import PeerId
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.connection import ControlConnection
from manyhands.runtime.tasks import TaskOwner

logger = logging.getLogger(__name__)

MAX_OF_ONE_PEER = 4
"""Connections that a peer may have; two are there for a moment when both dial, and one may be dead and unnoticed."""

LOOKS_IN_A_PERIOD = 4
"""How often a period of the heartbeat the connections are looked at."""

SPARE_AFTER_S = 5.0
"""When there are too many connections, one that was unused for so long makes room."""


class ConnectionPool:
    """Open control connections by peer.

    Two peers that dial each other at the same time have two connections for a moment. They settle on the one that the
    lower peer id dialled, and among several of those on the newest: whoever dialled another one retires it, once its
    calls are answered.

    Args:
        is_client: this peer cannot be dialled.

    Attributes:
        on_connected, on_lost: called with a peer when its first connection opens, and when its last one is lost. A
            connection that both ends retired since nobody used it is not a loss.
    """

    def __init__(self, own_id: PeerId, config: RpcConfig, *, is_client: bool) -> None:
        self.on_connected: list[Callable[[PeerId], None]] = []
        self.on_lost: list[Callable[[PeerId], None]] = []
        self._own_id = own_id
        self._is_client = is_client
        self._config = config
        self._connections: dict[PeerId, list[ControlConnection]] = {}
        self._held: Counter[PeerId] = Counter()
        self._tasks = TaskOwner("connections")
        self._upkeep: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return sum(len(group) for group in self._connections.values())

    async def close(self) -> None:
        """End the upkeep; the connections themselves belong to the endpoint."""
        await self._tasks.close()

    def all(self) -> list[ControlConnection]:
        """Every connection that has not been removed."""
        return [connection for group in self._connections.values() for connection in group]

    def of(self, peer_id: PeerId) -> ControlConnection | None:
        """The connection for the next call to a peer: the newest, since a peer that crashed may be back."""
        for connection in reversed(self._connections.get(peer_id, [])):
            if connection.is_open:
                return connection
        return None

    def is_connected(self, peer_id: PeerId) -> bool:
        """Whether a connection to the peer is open, so that its heartbeats show whether it lives."""
        return any(connection.lost is None for connection in self._connections.get(peer_id, []))

    def is_client(self, peer_id: PeerId) -> bool:
        """Whether the peer is connected and cannot be dialled."""
        connections = self._connections.get(peer_id)
        return connections is not None and not any(connection.addresses for connection in connections)

    def rtt_s(self, peer_id: PeerId) -> float:
        """The shortest round trip to a connected peer, in seconds; infinite if none was seen."""
        return min((connection.rtt_s for connection in self._connections.get(peer_id, [])), default=float("inf"))

    @contextmanager
    def held(self, peer_id: PeerId) -> Iterator[None]:
        """Do not retire the connections to a peer inside the block, though nobody calls."""
        self._held[peer_id] += 1
        try:
            yield
        finally:
            self._held[peer_id] -= 1
            if not self._held[peer_id]:
                del self._held[peer_id]

    def has_room(self) -> bool:
        """Whether one more connection may be accepted; if not, the one that was unused for longest is retired."""
        if len(self) < self._config.max_connections:
            return True
        now = asyncio.get_running_loop().time()
        spare = min((c for c in self.all() if self._is_spare(c)), key=lambda c: c.last_used, default=None)
        if spare is None or now - spare.last_used < SPARE_AFTER_S:
            return False
        spare.retire()
        return True

    def enter(self, connection: ControlConnection) -> None:
        """A connection was made."""
        group = self._connections.setdefault(connection.remote, [])
        group.append(connection)
        for oldest in group[:-MAX_OF_ONE_PEER]:
            oldest.end(PeerLost(oldest.remote, f"it has {MAX_OF_ONE_PEER} newer connections"))
        if len(group) == 1:
            for callback in list(self.on_connected):
                callback(connection.remote)
        else:
            self._settle(group)
        if self._upkeep is None:
            self._upkeep = self._tasks.spawn(self._keep_up(), name="heartbeats")

    def remove(self, connection: ControlConnection) -> None:
        """A connection has ended."""
        remote = connection.remote
        group = self._connections[remote]
        group.remove(connection)
        if group:
            return
        del self._connections[remote]
        if not connection.is_retired:
            for callback in list(self.on_lost):
                callback(remote)

    def _settle(self, group: list[ControlConnection]) -> None:
        """Retire the connections that this end dialled and that the two ends will not keep."""
        open_ones = [connection for connection in group if connection.is_open]
        lower_dialled = [c for c in open_ones if c.is_dialled == (self._own_id < c.remote)]
        kept = (lower_dialled or open_ones)[-1:]
        for connection in open_ones:
            if connection.is_dialled and connection not in kept:
                connection.retire()

    def _is_spare(self, connection: ControlConnection) -> bool:
        is_wanted = connection.is_busy or connection.remote in self._held
        can_be_dialled_again = bool(connection.addresses) and not self._is_client
        return connection.is_open and can_be_dialled_again and not is_wanted

    async def _keep_up(self) -> None:
        """Heartbeats of all connections, and the end of those that nobody uses; ends with the last connection."""
        loop = asyncio.get_running_loop()
        period_s = self._config.heartbeat_period_s
        heard_until = loop.time()
        while self._connections:
            due = loop.time() + period_s / LOOKS_IN_A_PERIOD
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            if now > due + period_s:  # this loop was held up, so what came meanwhile is not read yet
                heard_until = now
            for connection in self.all():
                connection.check_alive(now, heard_until)
                if now - connection.last_used > self._config.idle_timeout_s and self._is_spare(connection):
                    connection.retire()
        self._upkeep = None
