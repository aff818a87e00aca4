"""The control connections of one endpoint: selection, heartbeats and the closing of idle ones."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from manyhands.base.errors import PeerLost
from manyhands.base.identity import PeerId
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.connection import ControlConnection
from manyhands.runtime.tasks import TaskOwner

logger = logging.getLogger(__name__)

MAX_OF_ONE_PEER = 4
"""Connections of one peer; two exist briefly when both ends dial, and one may be dead and unnoticed."""

LOOKS_IN_A_PERIOD = 4
"""How often the connections are checked in a heartbeat period."""

SPARE_AFTER_S = 5.0
"""When there are too many connections, one that was unused for this time may be closed."""


class ConnectionPool:
    """Open control connections by peer.

    An idle connection is retired by the end that dialled it, unless no peer has ever reached that end: it may be behind
    a firewall, and could not be dialled again.

    Two peers that dial each other at the same time briefly have two connections. They keep the one that the lower peer
    id dialled, and among several of those the newest. The end that dialled another one retires it, once its calls are
    answered.

    Attributes:
        on_connected, on_lost: called with a peer when its first connection opens, and when its last one is lost. An
            idle connection that both ends retired is not a loss.
    """

    def __init__(self, own_id: PeerId, config: RpcConfig) -> None:
        self.on_connected: list[Callable[[PeerId], None]] = []
        self.on_lost: list[Callable[[PeerId], None]] = []
        self._own_id = own_id
        self._config = config
        self._connections: dict[PeerId, list[ControlConnection]] = {}
        self._num_connections = 0
        self._looks: list[tuple[float, int, ControlConnection]] = []  # a heap, by the time of the next check
        self._numbers = itertools.count()
        self._held: Counter[PeerId] = Counter()
        self.reached_at = -math.inf
        self._tasks = TaskOwner("connections")
        self._upkeep: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return self._num_connections

    async def close(self) -> None:
        """Stop the heartbeats; the endpoint closes the connections themselves."""
        await self._tasks.close()

    def all(self) -> list[ControlConnection]:
        """Return all connections that were not removed."""
        return [connection for group in self._connections.values() for connection in group]

    def peers(self) -> list[PeerId]:
        """Return the peers with connections that were not removed."""
        return list(self._connections)

    def of(self, peer_id: PeerId) -> ControlConnection | None:
        """Return the connection for the next call to a peer: the newest, since the peer may have restarted.

        One without a relay is preferred.
        """
        relayed = None
        for connection in reversed(self._connections.get(peer_id, [])):
            if connection.is_open:
                if connection.way.relay is None:
                    return connection
                relayed = relayed or connection
        return relayed

    def relays(self, *, for_bulk: bool = False) -> list[PeerId]:
        """Return the connected peers that could relay for this one: volunteers first, then the nearest.

        Args:
            for_bulk: volunteers only.
        """
        able = [c for c in self.all() if c.is_open and not c.is_client and c.way.kind == "direct"]
        if for_bulk:
            able = [connection for connection in able if connection.relays]
        able.sort(key=lambda connection: (not connection.relays, connection.shortest_rtt_s))
        return list(dict.fromkeys(connection.remote for connection in able))

    def relays_bulk(self, peer_id: PeerId) -> bool:
        """Whether the peer is connected, and a volunteer that relays bulk streams."""
        connection = self.of(peer_id)
        return connection is not None and connection.relays

    def is_connected(self, peer_id: PeerId) -> bool:
        """Whether a connection to the peer is open, so that its heartbeats are checked."""
        return self.of(peer_id) is not None

    def is_client(self, peer_id: PeerId) -> bool:
        """Whether the peer is connected and cannot be dialled."""
        connections = self._connections.get(peer_id)
        return connections is not None and all(connection.is_client for connection in connections)

    def moved(self, peer_id: PeerId, *, is_client: bool) -> None:
        """Note whether a connected peer that announced other addresses can be dialled."""
        for connection in self._connections.get(peer_id, []):
            connection.is_client = is_client

    def host_of(self, peer_id: PeerId) -> str:
        """Return the IP address of a connected peer, or of the peer that relays for it; empty if not connected."""
        connection = self.of(peer_id)
        return connection.remote_host if connection is not None else ""

    def rtt_s(self, peer_id: PeerId) -> float:
        """Return the shortest round trip to a connected peer, in seconds; infinite if unknown."""
        return min(
            (connection.shortest_rtt_s for connection in self._connections.get(peer_id, [])), default=float("inf")
        )

    def is_held(self, peer_id: PeerId) -> bool:
        """Whether a caller has asked to keep the connection, for its heartbeats."""
        return peer_id in self._held

    @contextmanager
    def held(self, peer_id: PeerId) -> Iterator[None]:
        """Do not retire the connections to a peer inside the block; if the other end does, dial again."""
        self._held[peer_id] += 1
        try:
            yield
        finally:
            self._held[peer_id] -= 1
            if not self._held[peer_id]:
                del self._held[peer_id]

    def has_room(self) -> bool:
        """Whether one more connection may be accepted; if there are too many, an unused one is retired.

        Of those, one that is relayed goes first; else the host with the most connections loses one, so that one machine
        cannot take all.
        """
        if len(self) < self._config.max_connections:
            return True
        now = asyncio.get_running_loop().time()
        idle = [c for c in self.all() if c.is_open and now - c.last_used >= SPARE_AFTER_S]
        unused = [connection for connection in idle if not self._is_wanted(connection)]
        if not unused:
            return False
        num_of_host = Counter(connection.remote_host for connection in self.all())
        spare = min(unused, key=lambda c: (c.way.relay is None, -num_of_host[c.remote_host], c.last_used))
        spare.retire()
        return True

    def reached(self) -> None:
        """Note that a peer has dialled this end."""
        self.reached_at = asyncio.get_running_loop().time()

    def enter(self, connection: ControlConnection) -> None:
        """Add a new connection."""
        group = self._connections.setdefault(connection.remote, [])
        group.append(connection)
        self._num_connections += 1
        heapq.heappush(self._looks, (0.0, next(self._numbers), connection))
        for oldest in group[:-MAX_OF_ONE_PEER]:
            oldest.end(PeerLost(oldest.remote, f"it has {MAX_OF_ONE_PEER} newer connections"))
        if len(group) == 1:
            _tell(self.on_connected, connection.remote)
        else:
            self._settle(group)
        if self._upkeep is None:
            self._upkeep = self._tasks.spawn(self._keep_up(), name="heartbeats")

    def remove(self, connection: ControlConnection) -> None:
        """Remove a connection that has ended."""
        remote = connection.remote
        group = self._connections[remote]
        group.remove(connection)
        self._num_connections -= 1
        if group:
            return
        del self._connections[remote]
        if not connection.is_retired:
            _tell(self.on_lost, remote)

    def _settle(self, group: list[ControlConnection]) -> None:
        """Retire the connections that this end dialled and that the two ends will not keep."""
        open_ones = [connection for connection in group if connection.is_open]
        best = [c for c in open_ones if c.way.relay is None] or open_ones
        lower_dialled = [c for c in best if c.is_dialled == (self._own_id < c.remote)]
        kept = (lower_dialled or best)[-1:]
        for connection in open_ones:
            if connection.is_dialled and connection not in kept:
                connection.retire()

    def _is_spare(self, connection: ControlConnection) -> bool:
        """Whether a connection is unused and, as far as this end can know, either end could dial the other again."""
        is_reachable = connection.is_dialled and not connection.is_client
        return connection.is_open and is_reachable and self.reached_at > -math.inf and not self._is_wanted(connection)

    def _is_wanted(self, connection: ControlConnection) -> bool:
        return connection.is_busy or connection.remote in self._held

    async def _keep_up(self) -> None:
        """Check heartbeats and retire idle connections; ends with the last connection."""
        try:
            await self._look_after_all()
        finally:
            self._upkeep = None

    async def _look_after_all(self) -> None:
        loop = asyncio.get_running_loop()
        period_s = self._config.heartbeat_period_s
        heard_until = loop.time()
        while self._connections:
            due = self._next_look(loop.time())
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            if now > due + period_s:  # this loop was blocked, so data that arrived meanwhile is still unread
                heard_until = now
            for connection in self._due(now):
                connection.check_alive(now, heard_until)
                idle_at = connection.last_used + self._config.idle_timeout_s
                if idle_at <= now and self._is_spare(connection):
                    connection.retire()
                look_at = min(connection.look_at, idle_at) if idle_at > now else connection.look_at
                heapq.heappush(self._looks, (look_at, next(self._numbers), connection))

    def _next_look(self, now: float) -> float:
        """Return the time of the next check, in one or two steps; new connections may be added meanwhile."""
        pause_s = self._config.heartbeat_period_s / LOOKS_IN_A_PERIOD
        is_due_soon = bool(self._looks) and self._looks[0][0] <= now + pause_s
        return now + (pause_s if is_due_soon else 2 * pause_s)

    def _due(self, now: float) -> list[ControlConnection]:
        """Return the connections to check now; those that have ended are dropped."""
        due: list[ControlConnection] = []
        while self._looks and self._looks[0][0] <= now:
            _, _, connection = heapq.heappop(self._looks)
            if connection.lost is None:
                due.append(connection)
        return due


def _tell(callbacks: Sequence[Callable[[PeerId], None]], peer_id: PeerId) -> None:
    """Call all callbacks, even if one raises."""
    for callback in list(callbacks):
        try:
            callback(peer_id)
        except Exception:
            logger.exception("A callback about peer %s failed", peer_id)
