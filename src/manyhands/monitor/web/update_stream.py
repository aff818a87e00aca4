"""Sends the updates of a run to all open pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from manyhands.base.deadline import wait_at_most
from manyhands.monitor.web.source import Source
from manyhands.monitor.web.updates import RUN_PERIOD_S, message, parts_of

HEARTBEAT_S = 15.0
RETRY_MS = 3000
PIECE_BYTES = 65536
"""A large message is written in pieces, so that no more than one of them waits in memory for each slow browser."""


class UpdateStream:
    """The updates of one run.

    A page has no queue: it knows which versions it has, and gets the newest ones when it has read what it was sent.

    Attributes:
        num_pages: that are open now.

    Args:
        page: names the version of the page that reads this stream: an open page of another version reloads itself.
    """

    def __init__(self, source: Source, page: str) -> None:
        self.num_pages = 0
        self._page = page
        self._source = source
        self._parts = parts_of()
        self._changed = asyncio.Event()
        self._is_closed = False

    async def watch_forever(self) -> None:
        """Look for changes of the picture; the owner cancels it."""
        while True:
            self.look()
            await asyncio.sleep(RUN_PERIOD_S)

    def look(self) -> None:
        """Look for changes once."""
        picture = self._source.picture()
        now = time.monotonic()
        if sum(part.update(picture, now) for part in self._parts):
            self._wake()

    def close(self) -> None:
        """End the stream of all pages."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages for one page, until the stream is closed."""
        self.num_pages += 1
        try:
            yield b"retry: %d\n\n" % RETRY_MS + message("page", self._page) + message("clock", time.time())
            has = [0] * len(self._parts)
            while not self._is_closed:
                changed = self._changed
                news = [part.since(version) for part, version in zip(self._parts, has, strict=True)]
                has = [part.version for part in self._parts]
                for one in news:  # not joined: all pages share them
                    for begin in range(0, len(one), PIECE_BYTES):
                        yield one[begin : begin + PIECE_BYTES]
                if not changed.is_set():
                    await wait_at_most(changed, HEARTBEAT_S)
                if not changed.is_set():
                    yield b":\n\n"
        finally:
            self.num_pages -= 1
