"""Who is waited for, and how long: a slow member that gets on, until the end of the round; a silent one, seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from manyhands.averaging.butterfly import Butterfly, Wanted
from manyhands.averaging.probing import Moved, answer_time_s
from manyhands.base.errors import PeerError, Unavailable
from manyhands.runtime import TaskOwner
from manyhands.transport.api import Stream

LOOK_PERIOD_S = 0.5
SILENT_S = 1.5
"""A member from which nothing came for so long is asked how far it is."""
STILL_S = {Wanted.VALUES: 5.0, Wanted.MEANS: 10.0}
"""One that answers, but moves nothing in this round for so long, is not waited for. One that owes means may itself wait
for somebody's values: it must have had the time to find out that these do not come."""
STUCK_S = 15.0
"""One that sends none of its own values for so long is not waited for, whatever it says."""

Probe = Callable[[int, float], Awaitable[Moved]]
"""How far a member is, by rank, asked with a timeout in seconds.

Raises ``Unavailable`` or ``PeerError`` if it does not answer."""


@dataclass
class Progress:
    """What a silent member owes, and how far it was when it was asked.

    Attributes:
        wanted, since: what it owes, and since when (loop time).
        amount, moved_at: how far it was, and when it last was not further than before.
    """

    wanted: Wanted
    since: float
    amount: int = -1
    moved_at: float = 0.0


class Patience:
    """Watches the streams of one exchange, and gives up those whose other end is silent.

    What counts is the time since the last bytes, not how many there were: a member on a line twenty times slower than
    the others' is never silent.

    Args:
        streams: of the exchange, by rank; more may come.
        bytes_per_s: what the link to each member carries, by what it and this one know of themselves; 0 if unknown.
        probe: asks how far a member is.
    """

    def __init__(
        self,
        butterfly: Butterfly,
        streams: Mapping[int, Stream],
        bytes_per_s: Sequence[float],
        probe: Probe,
    ) -> None:
        self._butterfly = butterfly
        self._streams = streams
        self._bytes_per_s = bytes_per_s
        self._probe = probe
        self._progress: dict[int, Progress] = {}
        self._began: dict[int, float] = {}  # when each stream was first seen here, loop time
        self._probing: dict[int, asyncio.Task[None]] = {}
        self._tasks = TaskOwner("patience")

    async def watch(self) -> None:
        """Look again and again, until it is cancelled."""
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
        if wanted is None:
            self._progress.pop(rank, None)
            return
        if rank not in self._progress or self._progress[rank].wanted is not wanted:
            self._progress[rank] = Progress(wanted, now)
        silent_s = now - max(stream.last_received, self._progress[rank].since)
        if silent_s >= STUCK_S and wanted is Wanted.VALUES:
            self._lose(rank, f"peer {stream.remote} answers, but sent no values for {silent_s:.0f} s")
        elif silent_s >= SILENT_S and (rank not in self._probing or self._probing[rank].done()):
            asking = self._ask(rank, stream, self._progress[rank])
            self._probing[rank] = self._tasks.spawn(asking, name=f"asking {stream.remote}")

    async def _ask(self, rank: int, stream: Stream, progress: Progress) -> None:
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
        """What has come from a member, in bytes per second; 0 if nothing has."""
        moving_s = stream.last_received - self._began[rank]
        return stream.bytes_received / moving_s if stream.bytes_received and moving_s > 0 else 0.0
