"""Compares the clock of this machine with those of other peers."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence

from manyhands.base.errors import ConfigError, ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.reach.messages import EXAMINE, ExamineRequest
from manyhands.rpc import Endpoint

CLOCKS_ASKED = 7
"""Peers whose clocks are compared. The median outvotes some that are wrong, also when others have just ended and do not
answer: of two that do, one may be wrong, too. With three asked, 2 of 702 newcomers of ``make soak`` asked a wrong one
and two that had been killed."""

CLOCK_TIMEOUT_S = 4.0


async def clock_offset_s(endpoint: Endpoint, wall_clock: Callable[[], float], others: Sequence[PeerId]) -> float | None:
    """Return the seconds by which this peer's clock is ahead of those of some others; None if no peer answers."""

    async def of(peer_id: PeerId) -> float | None:
        before = wall_clock()
        try:
            answer = await endpoint.call(peer_id, EXAMINE, ExamineRequest(), CLOCK_TIMEOUT_S)
        except ManyhandsError:
            return None
        return (before + wall_clock()) / 2 - answer.wall_time_s

    asking = [asyncio.ensure_future(of(peer_id)) for peer_id in others[:CLOCKS_ASKED]]
    told: list[float] = []
    try:
        for answering in asyncio.as_completed(asking):
            if (offset := await answering) is not None:
                told.append(offset)
            if 2 * len(told) > len(asking):  # those that are silent need not be waited for
                break
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return middle_of(told) if told else None


def middle_of(offsets: Sequence[float]) -> float:
    """The median. Of two middle ones the one nearer to 0: while a peer agrees with half of the others, it is right."""
    return min(statistics.median_low(offsets), statistics.median_high(offsets), key=abs)


async def check_clock(
    endpoint: Endpoint, wall_clock: Callable[[], float], others: Sequence[PeerId], max_skew_s: float
) -> None:
    """Raise ``ConfigError`` if this peer's clock is so far off that it cannot read the others' records."""
    offset_s = await clock_offset_s(endpoint, wall_clock, others)
    if offset_s is not None and abs(offset_s) > max_skew_s:
        way = "ahead of" if offset_s > 0 else "behind"
        raise ConfigError(
            f"the clock of this machine is about {abs(offset_s):.0f} s {way} the clocks of the other "
            f"peers, and {max_skew_s:g} s are allowed: this peer cannot read their records; set the clock by the "
            "network (timedatectl set-ntp true)"
        )
