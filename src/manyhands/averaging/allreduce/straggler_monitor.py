"""Decides how long a round waits for each member: for a slow one to the end, for a silent one seconds.

A member that is silent is asked whether it is in the round, and how far it is (:data:`ASK_MOVED`). The time since the
last bytes counts, not their number: a member on a line twenty times slower than the others' is never silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from manyhands.averaging.allreduce.bandwidth import answer_time_s
from manyhands.averaging.allreduce.butterfly import Butterfly, Wanted
from manyhands.averaging.allreduce.streams import dials
from manyhands.averaging.messages import ASK_MOVED, Group, Moved, MovedQuery
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import ANSWER_S, FOUR_ANSWERS_S, LOOK_S, TWO_ANSWERS_S
from manyhands.base.errors import PeerError, Unavailable
from manyhands.transport.api import Stream

PACE_KNOWN_SHARE = 0.5
"""After this share of a round's time the pace of a member that owes values is known. One that would miss the end is
given up, so that time is left to go on without it."""
LAST_SHARE = 0.65
"""After this share of a round's time a reducer that sends no means is given up, whatever it reports, if another one has
had all values for some time."""
MARGIN = 1.5
"""How much longer than another reducer one may take, in proportion to the size of its span, as a factor."""


def stuck_s(wanted: Wanted) -> float:
    """After how long without progress a member that answers is stuck: with values it had time for a second answer.

    With means it may itself wait for the values of a member that is stuck, and must find that out first.
    """
    return TWO_ANSWERS_S if wanted is Wanted.VALUES else FOUR_ANSWERS_S


class StragglerMonitor:
    """Gives up the members of one exchange, which ends at a loop time, that are gone, silent, stuck or too slow.

    Args:
        streams: by rank, as far as they are open.
        hurried: ranks of members that get less time, see
            :meth:`~manyhands.averaging.matchmaking.matchmaker.Matchmaker.hurried`.
    """

    def __init__(
        self,
        endpoint: RunEndpoint,
        group: Group,
        rank: int,
        butterfly: Butterfly,
        streams: Mapping[int, Stream],
        ends_at: float,
        hurried: Collection[int],
    ) -> None:
        self._endpoint = endpoint
        self._group = group
        self._rank = rank
        self._butterfly = butterfly
        self._streams = streams
        self._hurried = hurried
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._round_s = ends_at - self._since

    async def watch(self, rank: int) -> None:
        """Watch a partner until it is lost, or this is cancelled."""
        if (stream := await self._stream_of(rank)) is None:
            return None
        began = before = since = moved_at = self._loop.time()
        amount, owed_s = -1, 0.0  # how far it is, and how long it owes values without being held up by others
        last: Wanted | None = None
        was_last = False
        while True:
            await asyncio.sleep(LOOK_S)
            now, wanted = self._loop.time(), self._butterfly.wanted.get(rank)
            passed_s, before = now - before, now
            if wanted is not last:
                last, since, amount = wanted, now, -1
            if wanted is None:
                continue
            silent_s, received = now - max(stream.last_received, since), stream.bytes_received
            is_last, was_last = was_last, self._is_last(rank, wanted, received)
            if is_last and was_last:
                return self._lose(rank, "holds up the others, after there was trouble")
            if wanted is Wanted.VALUES:
                owed_s += passed_s
                if how := self._too_slow(rank, received, owed_s):
                    return self._lose(rank, f"is too slow for the time that this round has: {how}")
            elif silent_s >= stuck_s(wanted) and self._is_overdue(rank):
                return self._lose(rank, f"answers, but sent no means for {silent_s:.0f} s")
            if silent_s < ANSWER_S:
                continue
            try:
                moving_s = stream.last_received - began
                rate = received / moving_s if moving_s > 0 else 0.0
                moved = await self._ask(rank, rate)  # bounded by the time for an answer
            except (Unavailable, PeerError):
                if stream.bytes_received == received:
                    return self._lose(rank, "sends nothing, and does not answer")
                continue
            if moved.is_gone and stream.bytes_received == received:
                return self._lose(rank, "has given the round up")
            if moved.amount != amount or stream.bytes_received != received:
                amount, moved_at = moved.amount, self._loop.time()
            if (still_s := self._loop.time() - moved_at) >= stuck_s(wanted):
                how = f"answers, but sends no {wanted.value}, and moved nothing for {still_s:.0f} s"
                return self._lose(rank, how)

    async def _stream_of(self, rank: int) -> Stream | None:
        """Wait for a partner's stream, and ask it whether it comes; None once it is lost."""
        member = self._group.members[rank]
        while rank not in self._streams:
            await asyncio.sleep(LOOK_S)
            if rank in self._butterfly.faults:
                return None
            is_mute = member.is_client and not self._endpoint.is_connected(member.peer_id)  # it may still dial
            if rank in self._streams or is_mute or dials(self._group, self._rank, rank):
                continue
            try:
                is_gone, how = (await self._ask(rank)).is_gone, "it is in another round, or in none"
            except (Unavailable, PeerError) as error:
                is_gone, how = True, str(error)
            if is_gone and rank not in self._streams:
                reason = f"no stream to a member: peer {member.peer_id}: {how}"
                self._butterfly.lose(rank, reason, is_stalled=True)
                return None
            await asyncio.sleep(ANSWER_S)
        return self._streams[rank]

    async def _ask(self, rank: int, bytes_per_s: float = 0.0) -> Moved:
        """Ask a member for its progress; raises Unavailable or PeerError if it does not answer."""
        timeout_s = answer_time_s(self._group, self._rank, rank, bytes_per_s)
        query = MovedQuery(self._group.group_id, self._group.leader)
        return await self._endpoint.call(self._group.members[rank].peer_id, ASK_MOVED, query, timeout_s)

    def _is_last(self, rank: int, wanted: Wanted, received: int) -> bool:
        """Whether a hurried member holds up the others, and would do so for long."""
        if rank not in self._hurried:
            return False
        butterfly = self._butterfly
        others = set(butterfly.partners) - butterfly.done_with - butterfly.faults.keys() - set(self._hurried)
        if any(other not in self._streams or butterfly.wanted.get(other) is wanted for other in others):
            return False
        left, passed_s = butterfly.num_bytes_with(rank) - received, self._loop.time() - self._since
        return left * passed_s > TWO_ANSWERS_S * received

    def _too_slow(self, rank: int, received: int, owed_s: float) -> str:
        """How a member misses the end of the round at its pace; empty if it does not, or the pace is not known yet."""
        passed_s = self._loop.time() - self._since
        if passed_s < max(TWO_ANSWERS_S, PACE_KNOWN_SHARE * self._round_s) or owed_s < passed_s / 2:
            return ""
        if received == 0:
            return "it has sent nothing"
        needed_s = passed_s + (self._butterfly.num_bytes_with(rank) - received) * owed_s / received
        return f"at its pace it would need {needed_s:.0f} s" if needed_s > self._round_s else ""

    def _is_overdue(self, rank: int) -> bool:
        """Whether a reducer must have had all values for some time: another one has sent all its means.

        This peer's own span shows that only if nobody else has one: the others may wait for the values of this peer.
        """
        passed_s, butterfly = self._loop.time() - self._since, self._butterfly
        if passed_s < LAST_SHARE * self._round_s:
            return False
        num_bytes, reducers = butterfly.partition.num_bytes, butterfly.partition.reducers - {rank}
        others = {other: stream for other, stream in self._streams.items() if other != rank}
        if reducers == {self._rank}:
            done_at = max([self._since, *(stream.last_received for stream in others.values())])
            return butterfly.has_reduced and passed_s > MARGIN * (done_at - self._since)
        return any(
            passed_s > MARGIN * (stream.last_received - self._since) * max(1.0, num_bytes[rank] / num_bytes[other])
            for other, stream in others.items()
            if other in reducers and stream.bytes_received >= butterfly.num_bytes_with(other)
        )

    def _lose(self, rank: int, how: str) -> None:
        self._butterfly.lose(rank, f"peer {self._group.members[rank].peer_id} {how}", is_stalled=True)
