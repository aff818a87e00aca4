"""Access check of a protocol before it serves or calls a peer; in a run without a charter all peers pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from manyhands.access.messages import NO_LEASE
from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint

T = TypeVar("T")


class RunGate:
    """The gate of one run on one endpoint.

    Args:
        for_observers: observers may pass too, as for downloads of the state.
    """

    def __init__(self, endpoint: Endpoint, run_id: str, *, for_observers: bool = False) -> None:
        self._gates = endpoint.gates
        self._run_id = run_id
        self._for_observers = for_observers

    def check(self, peer_id: PeerId) -> None:
        """Check a peer that calls this one.

        Raises:
            Refused: the run has a charter, and the peer is not allowed to do this.
        """
        if (gate := self._gates.get(self._run_id)) is not None:
            gate.check(peer_id, for_observers=self._for_observers)

    async def through(self, peer_id: PeerId, timeout_s: float, attempt: Callable[[float], Awaitable[T]]) -> T:
        """Call a peer after both have shown their leases.

        Args:
            attempt: the call; takes the seconds that are left for it.
        Raises:
            Refused: one of the two is not allowed to do this.
        """
        gate = self._gates.get(self._run_id)
        if gate is None:
            return await attempt(timeout_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await gate.meet(peer_id, timeout_s)
        gate.check(peer_id, for_observers=self._for_observers)
        try:
            return await attempt(max(deadline - loop.time(), 0.01))
        except Refused as refusal:
            if refusal.code != NO_LEASE or not gate.forget_meeting(peer_id):
                raise
        await gate.meet(peer_id, max(deadline - loop.time(), 0.01))
        return await attempt(max(deadline - loop.time(), 0.01))
