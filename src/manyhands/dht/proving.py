"""Whether a peer that came by itself can be dialled: who cannot is not in the table, and is named to nobody.

A peer behind a firewall that does not know it asks others over connections of its own, and declares an address where
nobody gets through. That it answers over these connections proves nothing.

Rules:
    * whom this node has dialled is reached, until a dial to it fails;
    * a stranger, whoever else asks or answers, is dialled once, over a connection that is closed at once; so is who
      says that nobody has reached it since it began;
    * it is entered when it comes, so that those who come at the same time hear of each other, and taken out again
      after :data:`DOUBTED_AFTER_S` if it was not reached by then;
    * who was dialled in vain is entered no more until it is reached, and dialled ever more seldom;
    * at most :data:`AT_ONCE` are dialled at a time, and what is too many is not noted: they will ask again.
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
"""A dial takes four trips."""

FIRST_WAIT_S = 30.0
MOST_WAIT_S = 480.0
"""A port that its user has opened meanwhile is found then."""

MAX_IN_VAIN = 1024
"""Peers that were dialled in vain, and are remembered."""


@dataclass(frozen=True)
class _InVain:
    wait_s: float
    until: float  # loop time


class Prover:
    """Dials strangers, a few at once.

    Args:
        on_reached: called with each that was reached.
        on_failed: called with each that was not reached, or not soon.
        on_doubted: called with each of these that is there nevertheless.
        timeout_s: for one dial.
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
        self._in_vain: OrderedDict[PeerId, _InVain] = OrderedDict()
        self._tasks = TaskOwner("dials to strangers")

    async def close(self) -> None:
        """Dial nobody any more."""
        await self._tasks.close()

    def meet(self, peer_id: PeerId) -> bool:
        """Dial a stranger soon, unless that was in vain of late; whether to trust it meanwhile."""
        in_vain = self._in_vain.get(peer_id)
        if in_vain is not None and asyncio.get_running_loop().time() < in_vain.until:
            return False
        if peer_id in self._strangers or len(self._strangers) >= MAX_STRANGERS or self._tasks.is_closed:
            return False
        self._strangers.add(peer_id)
        self._tasks.spawn(self._prove(peer_id), name=f"doubting {peer_id}")
        return in_vain is None

    async def _prove(self, peer_id: PeerId) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        late = loop.call_later(DOUBTED_AFTER_S, self._doubt, peer_id)
        try:
            if await self._dial(peer_id):
                return
            late.cancel()
            self._on_failed(peer_id)
            await asyncio.sleep(began + DOUBTED_AFTER_S - loop.time())  # it may be leaving, and come back
            if self._is_out_of_reach(peer_id):
                self._on_doubted(peer_id)
                self._leave_alone(peer_id, began)
        finally:
            late.cancel()
            self._strangers.discard(peer_id)

    def _doubt(self, peer_id: PeerId) -> None:
        """Its dial takes long."""
        self._on_failed(peer_id)
        if self._is_out_of_reach(peer_id):
            self._on_doubted(peer_id)

    def _is_out_of_reach(self, peer_id: PeerId) -> bool:
        """Whether a peer is there, and only over connections of its own."""
        return self._endpoint.is_connected(peer_id) and not self._endpoint.has_reached(peer_id)

    async def _dial(self, peer_id: PeerId) -> bool:
        """Whether it was reached."""
        async with self._room:
            try:
                await self._endpoint.reach(peer_id, self._timeout_s)
            except (Unavailable, PeerError) as error:
                logger.debug("peer %s came, but cannot be dialled: %s", peer_id, error)
                return False
        self._in_vain.pop(peer_id, None)
        self._on_reached(peer_id)
        return True

    def _leave_alone(self, peer_id: PeerId, since: float) -> None:
        before = self._in_vain.pop(peer_id, None)
        wait_s = min(2 * before.wait_s, MOST_WAIT_S) if before is not None else FIRST_WAIT_S
        self._in_vain[peer_id] = _InVain(wait_s, since + wait_s)
        if len(self._in_vain) > MAX_IN_VAIN:
            self._in_vain.popitem(last=False)
