"""How one peer of a run does, as far as it can tell itself."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Sequence

import msgspec

from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.peer import Presence
from manyhands.reach.messages import EXAMINE, ExamineRequest

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 20.0
LOOK_PERIOD_S = 60.0
CLOCKS_ASKED = 3
ASK_TIMEOUT_S = 5.0
MAX_FAILURES = 3
ALONE_S = 120.0
CLOCK_S = 30.0
"""Records of a peer whose clock is a minute off are refused."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How a peer does.

    Attributes:
        step: the last global step that it has made or loaded.
        publish_failures: times in a row that its progress could not be published.
        alone_s: for so long no other peer of the run has been seen; None if some are there.
        clock_offset_s: how far its clock is ahead of those of other peers, their median; None if nobody has told.
    """

    step: int
    publish_failures: int = 0
    alone_s: float | None = None
    clock_offset_s: float | None = None

    def faults(self) -> dict[str, str]:
        """What is wrong and what to do, in words for people, by the field that shows it."""
        faults = {}
        if self.publish_failures >= MAX_FAILURES:
            faults["publish_failures"] = (
                f"this peer's progress could not be published {self.publish_failures} times in a row: the others do "
                "not count it; is its link down? manyhands doctor says more"
            )
        if self.alone_s is not None and self.alone_s >= ALONE_S:
            faults["alone_s"] = (
                f"no other peer of the run has been seen for {self.alone_s:.0f} s: this one trains alone; if others do "
                "train, manyhands doctor says more"
            )
        if self.clock_offset_s is not None and abs(self.clock_offset_s) >= CLOCK_S:
            way = "ahead of" if self.clock_offset_s > 0 else "behind"
            faults["clock_offset_s"] = (
                f"the clock of this machine is {abs(self.clock_offset_s):.0f} s {way} those of other peers, which "
                "refuse what it publishes from a minute on; set it, or switch on its synchronization (NTP)"
            )
        return faults


class HealthLog:
    """Says once what has turned bad, and when it is well again."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, health: Health) -> None:
        faults = health.faults()
        for field in faults.keys() - self._told:
            logger.warning("%s", faults[field])
        for field in sorted(self._told - faults.keys()):
            logger.info("%s of this peer is well again", field)
        self._told = set(faults)


async def clock_offset_s(presence: Presence, others: Sequence[PeerId]) -> float | None:
    """How far this peer's clock is ahead of that of some others, the median; None if nobody answers."""

    async def of(peer_id: PeerId) -> float | None:
        before = presence.wall_clock()
        try:
            answer = await presence.endpoint.call(peer_id, EXAMINE, ExamineRequest(), ASK_TIMEOUT_S)
        except ManyhandsError:
            return None
        return (before + presence.wall_clock()) / 2 - answer.wall_time_s

    offsets = await asyncio.gather(*map(of, others[:CLOCKS_ASKED]))
    told = [offset for offset in offsets if offset is not None]
    return statistics.median(told) if told else None
