"""Asks the peers of earlier rounds where they are, before this peer makes a step alone.

The DHT may show nobody although they are there: its nodes near the run's key may have gone, or mean harm.
"""

from __future__ import annotations

import asyncio
import logging
import math

import msgspec

from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import ProgressRecord
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.rpc.method import Method

logger = logging.getLogger(__name__)

MAX_ASKED = 8
TIMEOUT_S = 2.0
PERIOD_S = 10.0


class WhereAreYou(msgspec.Struct):
    """Asks a peer of the run for what it says of its progress."""


class HereIAm(msgspec.Struct):
    """The answer: what it would publish now."""

    record: ProgressRecord


WHERE = Method("optim.where", WhereAreYou, HereIAm)


class Acquaintances:
    """Those whom this peer has met in rounds; answers them, and asks them."""

    def __init__(self, endpoint: RunEndpoint, tracker: ProgressTracker) -> None:
        self._endpoint = endpoint
        self._tracker = tracker
        self._asked_at = -math.inf  # loop time
        endpoint.handle(WHERE, self._on_ask)

    def close(self) -> None:
        self._endpoint.unhandle(WHERE)

    async def answer(self) -> bool:
        """Whether one of them is still in the run; what it says counts as if the DHT had shown it."""
        now = asyncio.get_running_loop().time()
        if now < self._asked_at + PERIOD_S:
            return False
        self._asked_at = now
        answers = await asyncio.gather(*map(self._ask, self._tracker.recently_met(MAX_ASKED)))
        if any(answers):
            logger.warning("The DHT shows no other peer of the run, but %d of its last rounds answer", sum(answers))
        return any(answers)

    async def _ask(self, peer_id: PeerId) -> bool:
        try:
            answer = await self._endpoint.call(peer_id, WHERE, WhereAreYou(), TIMEOUT_S)
        except ManyhandsError as error:
            logger.debug("peer %s of an earlier round does not answer: %s", peer_id, error)
            return False
        self._tracker.heard(peer_id, answer.record)
        return True

    def _on_ask(self, remote: PeerId, _: WhereAreYou) -> HereIAm:
        return HereIAm(self._tracker.own_record)
