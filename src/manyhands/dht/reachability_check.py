"""Dials back peers that have called this node; a peer that cannot be dialled is not named to others.

A peer behind a firewall may announce an address that does not work without knowing it. It still calls others over
connections of its own, so an answer over these proves nothing.

Rules:
    * a peer that this node has dialled counts as reached, until a dial to it fails;
    * any other peer that calls or answers is dialled once, over a connection that is closed at once; so is a peer that
      reports that no other has reached it since it began;
    * such a peer is entered in the table at once, so that peers that join together learn of each other; it is removed
      after :data:`DOUBTED_AFTER_S` if it was not reached by then;
    * after a failed dial a peer is not entered until it is reached, and is dialled at growing intervals;
    * a peer that announces other addresses is dialled at these soon;
    * at most :data:`AT_ONCE` dials run at a time; peers above :data:`MAX_STRANGERS` are ignored until they call again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.base.errors import PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.endpoint import Endpoint
from manyhands.runtime.tasks import TaskOwner

logger = logging.getLogger(__name__)

AT_ONCE = 8
MAX_STRANGERS = 128

DOUBTED_AFTER_S = 1.0
"""Seconds until a peer that was not reached is removed from the table. A dial takes four one-way trips, so each of them
may take 250 ms."""

FIRST_WAIT_S = 30.0
"""Seconds between the first failed dial of a peer and the next dial."""

MOST_WAIT_S = 480.0
"""Longest wait between two dials of a peer: a port that its user has opened meanwhile is found within this time."""

MOVED_WAIT_S = 5.0
"""A peer that announces other addresses is dialled again after at most this time since the last dial began."""

MAX_FAILED = 1024
"""Peers whose failed dials are remembered; the one whose last dial is the oldest is forgotten first."""


@dataclass(frozen=True)
class _FailedDial:
    began: float  # loop time
    wait_s: float

    @property
    def until(self) -> float:
        return self.began + self.wait_s


class DialBack:
    """Dials back peers in the background, a few at a time.

    Args:
        on_reached: called with each peer that was reached.
        on_failed: called with each peer whose dial failed, or takes longer than :data:`DOUBTED_AFTER_S`.
        on_doubted: called with each such peer that is still connected, over a connection that it dialled itself.
        timeout_s: timeout of one dial.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_reached: Callable[[PeerId], None],
        on_failed: Callable[[PeerId], None],
        on_doubted: Callable[[PeerId], None],
        timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._on_reached = on_reached
        self._on_failed = on_failed
        self._on_doubted = on_doubted
        self._timeout_s = timeout_s
        self._strangers: set[PeerId] = set()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._failed: OrderedDict[PeerId, _FailedDial] = OrderedDict()
        self._tasks = TaskOwner("dials to strangers")

    async def close(self) -> None:
        """Stop dialling."""
        await self._tasks.close()

    def meet(self, peer_id: PeerId) -> bool:
        """Dial a peer soon, unless a dial failed recently; return whether to enter it in the table meanwhile."""
        failed = self._failed.get(peer_id)
        if failed is not None and asyncio.get_running_loop().time() < failed.until:
            return False
        if peer_id in self._strangers or len(self._strangers) >= MAX_STRANGERS or self._tasks.is_closed:
            return False
        self._strangers.add(peer_id)
        self._tasks.spawn(self._prove(peer_id), name=f"dialling back {peer_id}")
        return failed is None

    def moved(self, peer_id: PeerId) -> None:
        """Allow a dial to a peer soon, as it announced other addresses."""
        failed = self._failed.get(peer_id)
        if failed is not None:
            self._failed[peer_id] = _FailedDial(failed.began, min(failed.wait_s, MOVED_WAIT_S))

    async def _prove(self, peer_id: PeerId) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        late = loop.call_later(DOUBTED_AFTER_S, self._doubt, peer_id)
        try:
            if await self._dial(peer_id):
                return
            late.cancel()
            self._on_failed(peer_id)
            await asyncio.sleep(
                began + DOUBTED_AFTER_S - loop.time()
            )  # a peer that is leaving is no longer connected then
            if self._is_out_of_reach(peer_id):
                self._on_doubted(peer_id)
                self._leave_alone(peer_id, began)
        finally:
            late.cancel()
            self._strangers.discard(peer_id)

    def _doubt(self, peer_id: PeerId) -> None:
        """Handle a slow dial."""
        self._on_failed(peer_id)
        if self._is_out_of_reach(peer_id):
            self._on_doubted(peer_id)

    def _is_out_of_reach(self, peer_id: PeerId) -> bool:
        """Whether a peer is connected, but only over connections that it dialled itself."""
        return self._endpoint.is_connected(peer_id) and not self._endpoint.has_reached(peer_id)

    async def _dial(self, peer_id: PeerId) -> bool:
        """Dial a peer; return whether it was reached."""
        async with self._room:
            try:
                await self._endpoint.reach(peer_id, self._timeout_s)
            except (Unavailable, PeerError) as error:
                logger.debug("peer %s has called, but cannot be dialled: %s", peer_id, error)
                return False
        self._failed.pop(peer_id, None)
        self._on_reached(peer_id)
        return True

    def _leave_alone(self, peer_id: PeerId, since: float) -> None:
        """Do not dial a peer for a while after a failed dial that began at ``since``."""
        before = self._failed.pop(peer_id, None)
        wait_s = FIRST_WAIT_S
        if before is not None:
            wait_s = max(FIRST_WAIT_S, min(2 * before.wait_s, MOST_WAIT_S))
        self._failed[peer_id] = _FailedDial(since, wait_s)
        if len(self._failed) > MAX_FAILED:
            self._failed.popitem(last=False)
