"""Decides how long a round waits for each member: for a slow one to the end, for a silent one seconds."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from manyhands.averaging.allreduce.butterfly import Butterfly, Wanted
from manyhands.averaging.allreduce.probing import Moved, answer_time_s
from manyhands.base.errors import PeerError, Unavailable
from manyhands.runtime import TaskOwner
from manyhands.transport.api import Stream

LOOK_PERIOD_S = 0.5
SILENT_S = 1.5
"""A member that sent nothing for this long is asked for its progress."""
STILL_S = {Wanted.VALUES: 5.0, Wanted.MEANS: 10.0}
"""A member that answers but makes no progress in this round for this long is given up. A member that owes means may be
waiting for another's values, so it gets time to find out that those do not come."""
STUCK_S = 15.0
"""A member that sends none of its own values for this long is given up, whatever it reports."""

JUDGED_SHARE = 0.5
JUDGED_S = 5.0
"""After this share of a round's time, and at least ``JUDGED_S``, the pace of a member that owes values is known. One
that would miss the end is given up, so that time is left to go on without it."""

LAST_SHARE = 0.65
"""After this share of a round's time a reducer that sends no means is given up, whatever it reports, if another reducer
has all values, so that this one must have them as well:"""
MARGIN = 1.5
"""it may take this factor longer, in proportion to its span."""

Probe = Callable[[int, float], Awaitable[Moved]]
"""Asks the member of a rank for its progress, with a timeout in seconds; raises ``Unavailable`` or ``PeerError``."""


@dataclass
class MemberProgress:
    """What a silent member owes, and its progress when it was asked.

    Attributes:
        wanted, since: what it owes, and since when (loop time).
        amount, moved_at: its progress, and when that last changed.
    """

    wanted: Wanted
    since: float
    amount: int = -1
    moved_at: float = 0.0


class StragglerMonitor:
    """Watches the streams of one exchange, and gives up those with a silent other end.

    The time since the last bytes counts, not their number: a member on a line twenty times slower than the others' is
    never silent. Only a member that needs more time than the round has is given up earlier.

    Args:
        rank: of this member.
        streams: of the exchange, by rank; more may be added.
        bytes_per_s: rate of the link to each member, as far as it and this one know their own; 0 if unknown.
        probe: asks a member for its progress.
        ends_at: when the round is over (loop time).
        has_values: whether this member has values of its own to send.
    """

    def __init__(
        self,
        butterfly: Butterfly,
        rank: int,
        streams: Mapping[int, Stream],
        bytes_per_s: Sequence[float],
        probe: Probe,
        ends_at: float,
        *,
        has_values: bool,
    ) -> None:
        self._butterfly = butterfly
        self._rank = rank
        self._streams = streams
        self._bytes_per_s = bytes_per_s
        self._probe = probe
        self._ends_at = ends_at
        self._since = asyncio.get_running_loop().time()
        self._come_at = {rank: self._since}  # upper bound of when this member, or another one, had all values
        self._has_values = has_values
        self._owed_s: defaultdict[int, float] = defaultdict(
            float
        )  # how long each has owed values without being held up by others
        self._progress: dict[int, MemberProgress] = {}
        self._began: dict[int, float] = {}  # when each stream was first seen here, loop time
        self._probing: dict[int, asyncio.Task[None]] = {}
        self._tasks = TaskOwner("patience")

    async def watch(self) -> None:
        """Check the streams periodically, until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_PERIOD_S)
                for rank, stream in list(self._streams.items()):
                    self._look_at(rank, stream)
        finally:
            await self._tasks.close()

    def _look_at(self, rank: int, stream: Stream) -> None:
        now = asyncio.get_running_loop().time()
        self._began.setdefault(rank, now - LOOK_PERIOD_S)
        wanted = self._butterfly.wanted.get(rank)
        if stream.bytes_received >= self._butterfly.num_bytes_with(rank):
            self._come_at.setdefault(rank, now)  # all its means are here
        if wanted is None:
            self._progress.pop(rank, None)
            return
        if rank not in self._progress or self._progress[rank].wanted is not wanted:
            self._progress[rank] = MemberProgress(wanted, now)
        if wanted is Wanted.VALUES:
            self._come_at[self._rank] = now
            self._owed_s[rank] += LOOK_PERIOD_S
            if (needed_s := self._too_slow(rank, stream)) is not None:
                reason = f"peer {stream.remote} is too slow for the time that this round has"
                how = f"at its pace it would need {needed_s:.0f} s" if needed_s < math.inf else "it has sent nothing"
                self._lose(rank, f"{reason}: {how}")
                return
        silent_s = now - max(stream.last_received, self._progress[rank].since)
        if silent_s >= STUCK_S and wanted is Wanted.VALUES:
            self._lose(rank, f"peer {stream.remote} answers, but sent no values for {silent_s:.0f} s")
        elif wanted is Wanted.MEANS and self._is_overdue(rank, silent_s):
            self._lose(rank, f"peer {stream.remote} answers, but sent no means for {silent_s:.0f} s")
        elif silent_s >= SILENT_S and (rank not in self._probing or self._probing[rank].done()):
            asking = self._ask(rank, stream, self._progress[rank])
            self._probing[rank] = self._tasks.spawn(asking, name=f"asking {stream.remote}")

    def _too_slow(self, rank: int, stream: Stream) -> float | None:
        """Seconds that a member needs for its values at its pace, if that is more than the round has."""
        now, owed_s = asyncio.get_running_loop().time(), self._owed_s[rank]
        passed_s = now - self._since
        if passed_s < max(JUDGED_S, JUDGED_SHARE * (self._ends_at - self._since)) or owed_s < passed_s / 2:
            return None
        num_left = self._butterfly.num_bytes_with(rank) - stream.bytes_received
        left_s = num_left * owed_s / stream.bytes_received if stream.bytes_received else math.inf
        return passed_s + left_s if left_s > self._ends_at - now else None

    def _is_overdue(self, rank: int, silent_s: float) -> bool:
        """Whether a member that owes means and reports progress should have sent them, by what has come here."""
        passed_s = asyncio.get_running_loop().time() - self._since
        if passed_s < LAST_SHARE * (self._ends_at - self._since) or silent_s < STILL_S[Wanted.MEANS]:
            return False
        num_bytes, come_at = self._butterfly.num_bytes_of, dict(self._come_at)
        if self._has_values and any(num_bytes(other) for other in self._streams if other != rank):
            del come_at[self._rank]  # it may wait for this member's values; if so, the third reducer does, too
        return any(
            passed_s > MARGIN * (at - self._since) * max(1.0, num_bytes(rank) / num_bytes(other))
            for other, at in come_at.items()
            if num_bytes(other)
        )

    async def _ask(self, rank: int, stream: Stream, progress: MemberProgress) -> None:
        before, loop = stream.bytes_received, asyncio.get_running_loop()
        timeout_s = answer_time_s(self._bytes_per_s[rank], self._rate_of(rank, stream))
        try:
            moved = await self._probe(rank, timeout_s)
        except (Unavailable, PeerError):
            if stream.bytes_received == before:
                self._lose(rank, f"peer {stream.remote} sends nothing, and does not answer")
            return
        if moved.is_gone and stream.bytes_received == before:
            self._lose(rank, f"peer {stream.remote} has given the round up")
        if moved.amount != progress.amount or stream.bytes_received != before:
            progress.amount, progress.moved_at = moved.amount, loop.time()
        still_s = loop.time() - progress.moved_at
        if still_s >= STILL_S[progress.wanted]:
            owed = progress.wanted.value
            reason = f"peer {stream.remote} answers, but sends no {owed}, and moved nothing for {still_s:.0f} s"
            self._lose(rank, reason)

    def _lose(self, rank: int, reason: str) -> None:
        self._butterfly.lose(rank, reason, is_stalled=True)

    def _rate_of(self, rank: int, stream: Stream) -> float:
        """Bytes per second received from a member; 0 if nothing has come."""
        moving_s = stream.last_received - self._began[rank]
        return stream.bytes_received / moving_s if stream.bytes_received and moving_s > 0 else 0.0
