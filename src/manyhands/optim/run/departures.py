"""Finds out who has died, sooner than its record expires."""

from __future__ import annotations

import asyncio
import logging
import math

from manyhands.averaging.messages import readable_addresses
from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason, ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

GONE_AFTER_S = 5.0
"""Who is alive is connected again by then, or has said something new."""
PERIOD_S = 1.0
PROOFS = (DialReason.REFUSED, DialReason.WRONG_IDENTITY)
PROBE_TIMEOUT_S = 2.0


class Departures:
    """Counts peers as gone whom no round meets, and whose machine says that it does not listen there any more.

    A machine that does not answer proves nothing: it may be cut off, and train on behind the cut. Then its record must
    expire. So must that of a peer that nobody can dial.
    """

    def __init__(self, endpoint: Endpoint, tracker: ProgressTracker, tasks: TaskOwner) -> None:
        self._endpoint = endpoint
        self._tracker = tracker
        self._tasks = tasks
        self._refused: dict[PeerId, tuple[int, float]] = {}  # the record that it said last, and since when (loop time)
        self._looked_at = -math.inf  # loop time
        self._looking: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Look for those whom no round meets, in the background; at most once in a while."""
        now = asyncio.get_running_loop().time()
        is_looking = self._looking is not None and not self._looking.done()
        if now - self._looked_at >= PERIOD_S and not is_looking:
            self._looked_at = now
            self._looking = self._tasks.spawn(self._look_for_all(), name="looking for those who do not come")

    async def _look_for_all(self) -> None:
        unmet = self._tracker.unmet()
        self._refused = {peer_id: said for peer_id, said in self._refused.items() if peer_id in unmet}
        for peer_id, seen in unmet.items():
            if self._endpoint.is_connected(peer_id) or not await self._refuses(seen.record.addresses):
                self._refused.pop(peer_id, None)
                continue
            now = asyncio.get_running_loop().time()
            sequence, since = self._refused.get(peer_id, (seen.sequence, now))
            if sequence != seen.sequence:
                since = now
            self._refused[peer_id] = (seen.sequence, since)
            if now - since >= GONE_AFTER_S:
                logger.info("Peer %s is gone: it does not listen at its addresses any more", peer_id)
                self._tracker.report_gone(peer_id, seen.sequence)

    async def _refuses(self, addresses: list[str]) -> bool:
        known = readable_addresses(addresses)
        reasons = set(await asyncio.gather(*(self._failure_at(address) for address in known)))
        reasons.discard(DialReason.HELD_BACK)
        return bool(reasons) and reasons.issubset(PROOFS)

    async def _failure_at(self, address: Address) -> DialReason | None:
        try:
            await self._endpoint.probe(address, PROBE_TIMEOUT_S)
        except DialFailed as failure:
            return failure.reason
        except ManyhandsError:
            return None
        return None
