"""Decides how long a round waits for each member: for a slow one to the end, for a silent one seconds.

A member that is silent is asked whether it is in the round, and how far it is (:class:`Probing`). The time since the
last bytes counts, not their number: a member on a line twenty times slower than the others' is never silent. Only a
member that needs more time than the round has is given up earlier (:class:`StragglerMonitor`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from manyhands.averaging.allreduce.butterfly import Butterfly, Wanted
from manyhands.averaging.messages import Count, Digest, Group, PeerIdText
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.errors import PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Method
from manyhands.runtime import TaskOwner
from manyhands.transport.api import Stream

PROBE_S = 2.0
"""A member that does not answer for this long is considered gone."""
MAX_PROBE_S = 8.0
"""The same on a slow link. Soon after this time missing heartbeats end the connection anyway."""
QUEUED_BYTES = 16 * 1024
"""Bytes of a round that may be queued before an answer."""

LOOK_PERIOD_S = 0.5
SILENT_S = 1.5
"""A member that sent nothing for this long is asked for its progress."""
STILL_S = {Wanted.VALUES: 5.0, Wanted.MEANS: 10.0}
"""A member that answers but makes no progress in this round for this long is given up. A member that owes means may be
waiting for another's values, so it gets time to find out that those do not come."""

PACE_KNOWN_SHARE = 0.5
PACE_KNOWN_S = 5.0
"""After this share of a round's time, and at least so many seconds, the pace of a member that owes values is known. One
that would miss the end is given up, so that time is left to go on without it."""

LAST_SHARE = 0.65
"""After this share of a round's time a reducer that sends no means is given up, whatever it reports, if it should have
had all values by then: another reducer has had them for some time (``MARGIN``)."""
MARGIN = 1.5
"""How much longer than another reducer one may take, in proportion to the size of its span, as a factor."""


class MovedQuery(msgspec.Struct):
    """Asks a member for the progress of its exchange."""

    group_id: Digest
    leader: PeerIdText


class Moved(msgspec.Struct):
    """A member's progress.

    Attributes:
        amount: bytes sent and received in this exchange, and chunks averaged.
        is_gone: it is not in this round, and waits for no group of that leader.
    """

    amount: Count = 0
    is_gone: bool = False


ASK_MOVED = Method("averaging.ask_moved", MovedQuery, Moved)


class Probing:
    """Asks others for their progress, and reports this peer's.

    Args:
        is_here: whether this peer is in the round of a leader's group, or may still come to it.
    """

    def __init__(self, endpoint: RunEndpoint, is_here: Callable[[bytes, PeerId], bool]) -> None:
        self._endpoint = endpoint
        self._is_here = is_here
        self._amounts: dict[bytes, Callable[[], int]] = {}
        endpoint.handle(ASK_MOVED, self._on_ask)

    def close(self) -> None:
        self._endpoint.unhandle(ASK_MOVED)

    @contextmanager
    def of(self, group: Group, amount: Callable[[], int]) -> Iterator[None]:
        """Report ``amount`` to the members of a group within the block."""
        self._amounts[group.group_id] = amount
        try:
            yield
        finally:
            del self._amounts[group.group_id]

    async def ask(self, group: Group, rank: int, timeout_s: float) -> Moved:
        """Ask a member for its progress.

        Raises:
            Unavailable, PeerError: it does not answer.
        """
        query = MovedQuery(group.group_id, group.leader)
        return await self._endpoint.call(group.members[rank].peer_id, ASK_MOVED, query, timeout_s)

    def _on_ask(self, remote: PeerId, query: MovedQuery) -> Moved:
        amount = self._amounts.get(query.group_id)
        return Moved(amount() if amount is not None else 0, is_gone=not self._is_here(query.group_id, query.leader))


def answer_time_s(*bytes_per_s: float) -> float:
    """Timeout of an answer during a round, over a link that carries at least this much; 0 if unknown."""
    slowest = min((rate for rate in bytes_per_s if rate > 0), default=float("inf"))
    return min(max(PROBE_S, QUEUED_BYTES / slowest), MAX_PROBE_S)


@dataclass
class Watched:
    """What one member owes, and how it gets on; all times are those of the loop.

    Attributes:
        began: when its stream was first seen.
        wanted, since: what it owes now, and since when.
        owed_s: how long it has owed values without being held up by others.
        amount, moved_at: its progress when it was last asked, and when that last changed.
    """

    began: float
    wanted: Wanted | None = None
    since: float = 0.0
    owed_s: float = 0.0
    amount: int = -1
    moved_at: float = 0.0
    asking: asyncio.Task[None] | None = None


class StragglerMonitor:
    """Watches the streams of one exchange, and gives up those with a silent other end.

    Args:
        streams: of the exchange, by rank; more may be added.
        ends_at: when the round is over (loop time).
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        butterfly: Butterfly,
        streams: Mapping[int, Stream],
        probing: Probing,
        ends_at: float,
    ) -> None:
        self._group = group
        self._rank = rank
        self._butterfly = butterfly
        self._streams = streams
        self._probing = probing
        self._since = asyncio.get_running_loop().time()
        self._round_s = ends_at - self._since
        self._watched: dict[int, Watched] = {}
        self._come_at = {rank: self._since}  # upper bound of when this member, or another one, had all values
        self._tasks = TaskOwner("straggler monitor")

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
        now, wanted = asyncio.get_running_loop().time(), self._butterfly.wanted.get(rank)
        member = self._watched.setdefault(rank, Watched(now - LOOK_PERIOD_S))
        if stream.bytes_received >= self._butterfly.num_bytes_with(rank):
            self._come_at.setdefault(rank, now)  # all its means are here
        if member.wanted is not wanted:
            member.wanted, member.since, member.amount = wanted, now, -1
        if wanted is None:
            return
        silent_s = now - max(stream.last_received, member.since)
        if wanted is Wanted.VALUES:
            self._come_at[self._rank] = now
            member.owed_s += LOOK_PERIOD_S
            if (needed_s := self._too_slow(rank, stream, member)) is not None:
                reason = f"peer {stream.remote} is too slow for the time that this round has"
                how = f"at its pace it would need {needed_s:.0f} s" if needed_s < math.inf else "it has sent nothing"
                self._lose(rank, f"{reason}: {how}")
                return
        elif self._is_overdue(rank, silent_s):
            self._lose(rank, f"peer {stream.remote} answers, but sent no means for {silent_s:.0f} s")
            return
        if silent_s >= SILENT_S and (member.asking is None or member.asking.done()):
            asking = self._ask(rank, stream, member, wanted)
            member.asking = self._tasks.spawn(asking, name=f"asking {stream.remote}")

    def _too_slow(self, rank: int, stream: Stream, member: Watched) -> float | None:
        """Seconds that a member needs for its values at its pace, if that is more than the round has."""
        passed_s = asyncio.get_running_loop().time() - self._since
        if passed_s < max(PACE_KNOWN_S, PACE_KNOWN_SHARE * self._round_s) or member.owed_s < passed_s / 2:
            return None
        num_left = self._butterfly.num_bytes_with(rank) - stream.bytes_received
        left_s = num_left * member.owed_s / stream.bytes_received if stream.bytes_received else math.inf
        return passed_s + left_s if passed_s + left_s > self._round_s else None

    def _is_overdue(self, rank: int, silent_s: float) -> bool:
        """Whether a member that owes means and reports progress should have sent them, by what has come here."""
        passed_s = asyncio.get_running_loop().time() - self._since
        if passed_s < LAST_SHARE * self._round_s or silent_s < STILL_S[Wanted.MEANS]:
            return False
        num_bytes, come_at = self._butterfly.partition.num_bytes, dict(self._come_at)
        has_values = self._group.members[self._rank].weight > 0
        if has_values and any(num_bytes[other] for other in self._streams if other != rank):
            del come_at[self._rank]  # it may wait for this member's values; if so, the third reducer does, too
        return any(
            passed_s > MARGIN * (at - self._since) * max(1.0, num_bytes[rank] / num_bytes[other])
            for other, at in come_at.items()
            if num_bytes[other]
        )

    async def _ask(self, rank: int, stream: Stream, member: Watched, wanted: Wanted) -> None:
        before, loop = stream.bytes_received, asyncio.get_running_loop()
        moving_s = stream.last_received - member.began
        received_rate = before / moving_s if moving_s > 0 else 0.0
        timeout_s = answer_time_s(self._group.link_rates(self._rank)[rank], received_rate)
        try:
            moved = await self._probing.ask(self._group, rank, timeout_s)
        except (Unavailable, PeerError):
            if stream.bytes_received == before:
                self._lose(rank, f"peer {stream.remote} sends nothing, and does not answer")
            return
        if moved.is_gone and stream.bytes_received == before:
            self._lose(rank, f"peer {stream.remote} has given the round up")
        if moved.amount != member.amount or stream.bytes_received != before:
            member.amount, member.moved_at = moved.amount, loop.time()
        still_s = loop.time() - member.moved_at
        if still_s >= STILL_S[wanted]:
            reason = f"peer {stream.remote} answers, but sends no {wanted.value}, and moved nothing for {still_s:.0f} s"
            self._lose(rank, reason)

    def _lose(self, rank: int, reason: str) -> None:
        self._butterfly.lose(rank, reason, is_stalled=True)
