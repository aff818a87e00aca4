"""Who is waited for, and how long: a slow member that gets on, until the end of the round; a silent one, seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from manyhands.averaging.butterfly import Butterfly, Wanted
from manyhands.base.errors import PeerError, Unavailable
from manyhands.transport.api import Stream

LOOK_PERIOD_S = 0.5
SILENT_S = 1.5
"""A member from which nothing came for so long is asked whether it is there."""
STUCK_S = 15.0
"""One that answers, but sends none of its own values for so long, is not waited for. (One that owes means may itself
wait for somebody.)"""

Probe = Callable[[int], Awaitable[object]]
"""Raises ``Unavailable`` or ``PeerError`` if a member, by rank, does not answer soon."""


class Patience:
    """Watches the streams of one exchange, and gives up those whose other end is silent.

    What counts is the time since the last bytes, not how many there were: a member on a line twenty times slower than
    the others' is never silent.

    Args:
        streams: of the exchange, by rank; more may come.
        probe: asks whether a member is there.
    """

    def __init__(self, butterfly: Butterfly, streams: Mapping[int, Stream], probe: Probe) -> None:
        self._butterfly = butterfly
        self._streams = streams
        self._probe = probe
        self._since: dict[int, tuple[Wanted, float]] = {}
        self._probing: dict[int, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Look again and again, until it is cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_PERIOD_S)
                for rank, stream in list(self._streams.items()):
                    self._look_at(rank, stream)
        finally:
            for task in self._probing.values():
                task.cancel()
            await asyncio.gather(*self._probing.values(), return_exceptions=True)

    def _look_at(self, rank: int, stream: Stream) -> None:
        now = asyncio.get_running_loop().time()
        wanted = self._butterfly.wanted.get(rank)
        if wanted is None:
            self._since.pop(rank, None)
            return
        if self._since.get(rank, (None, now))[0] is not wanted:
            self._since[rank] = (wanted, now)
        silent_s = now - max(stream.last_received, self._since[rank][1])
        if silent_s >= STUCK_S and wanted is Wanted.VALUES:
            self._butterfly.lose(rank, f"peer {stream.remote} answers, but sent no values for {silent_s:.0f} s")
        elif silent_s >= SILENT_S and (rank not in self._probing or self._probing[rank].done()):
            self._probing[rank] = asyncio.get_running_loop().create_task(self._ask(rank, stream))

    async def _ask(self, rank: int, stream: Stream) -> None:
        before = stream.bytes_received
        try:
            await self._probe(rank)
        except (Unavailable, PeerError):
            if stream.bytes_received == before:
                self._butterfly.lose(rank, f"peer {stream.remote} sends nothing, and does not answer")
