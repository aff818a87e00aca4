"""What this peer says of its progress, told whenever the others could not have reckoned it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec

from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode
from manyhands.optim.config import ProgressConfig
from manyhands.optim.run.progress import KEEP_ALIVES, Progress, ProgressRecord, is_news, stretch
from manyhands.optim.run.progress_reader import GOODBYE
from manyhands.optim.run.timed_event import TimedEvent

logger = logging.getLogger(__name__)

GOODBYE_TIMEOUT_S = 1.0


class Publisher:
    """This peer's own progress record, and when it is published. Lives on the network thread.

    Args:
        own: the record to begin with.
        outlook: of the collaboration, as it must be by now.

    Attributes:
        own: what it would say now.
        num_failures: times in a row that the record could not be published.
        is_moving: this peer is about to go elsewhere; where it was is not published any more.
    """

    def __init__(
        self,
        dht: DhtNode,
        key: str,
        own_id: PeerId,
        own: ProgressRecord,
        config: ProgressConfig,
        target_batch_size: int,
        outlook: Callable[[], Progress],
    ) -> None:
        self.own = own
        self.num_failures = 0
        self.is_moving = False
        self._dht = dht
        self._key = key
        self._own_id = own_id
        self._config = config
        self._target_batch_size = target_batch_size
        self._outlook = outlook
        self._counted_at = 0.0  # loop time
        self._batch_s = 0.0
        self._published: tuple[ProgressRecord, float] | None = None  # and when
        self._changed = TimedEvent()
        self._has_moved = TimedEvent()

    def start(self) -> None:
        """Samples are counted from now on."""
        self._counted_at = asyncio.get_running_loop().time()

    def update(self, own: ProgressRecord) -> None:
        """This peer has something else to say; :meth:`tell_news` follows."""
        now = asyncio.get_running_loop().time()
        if own.samples != self.own.samples or own.position != self.own.position:
            self._batch_s, self._counted_at = now - self._counted_at, now
        self.own = own

    def tell_news(self) -> None:
        """Publish the record soon, if the others could not have reckoned it."""
        if self._published is None or self._is_news(*self._published):
            self._changed.ring()

    def publish_soon(self) -> None:
        """Publish the record though it is no news."""
        self._changed.ring()

    def hurry(self) -> None:
        """This peer has gone to another position, which is not kept waiting."""
        self.is_moving = False
        self._has_moved.ring()

    def _is_news(self, published: ProgressRecord, published_at: float) -> bool:
        outlook, age_s = self._outlook(), asyncio.get_running_loop().time() - published_at
        margin_s = max(self._batch_s, 2 * self._config.min_refresh_s)
        is_near = not margin_s < outlook.eta_s < math.inf
        return is_news(published, age_s, self.own, self._target_batch_size, outlook.num_peers, is_near)

    async def publish_forever(self) -> None:
        """Publish at once, then news and signs of life."""
        while True:
            self._changed.silence()
            self._has_moved.silence()
            if not self.is_moving:
                await self._publish()
            await self._has_moved.wait(self._config.min_refresh_s)
            await self._changed.wait(self._ttl_s() / KEEP_ALIVES)

    def _ttl_s(self) -> float:
        return self._config.ttl_s * stretch(self._outlook().num_peers)

    async def _publish(self) -> None:
        now, ttl_s = asyncio.get_running_loop().time(), self._ttl_s()
        own = msgspec.structs.replace(self.own, counted_s_ago=max(now - self._counted_at, 0.0), ttl_s=ttl_s)
        self._published = (own, now)
        try:
            value = msgspec.to_builtins(own, builtin_types=(bytes,))
            num_holders = await self._dht.store(self._key, value, ttl_s, subkey=self._own_id)
            self.num_failures = 0 if num_holders else self.num_failures + 1
            if not num_holders:
                self._published = None
        except ManyhandsError as error:
            self._published = None
            self.num_failures += 1
            logger.warning("this peer's progress was not published: %s", error)

    async def say_goodbye(self) -> None:
        """Tell the others that this peer left the run."""
        try:
            async with time_limit(GOODBYE_TIMEOUT_S, "saying goodbye to the run"):
                await self._dht.store(self._key, GOODBYE, self._config.ttl_s, subkey=self._own_id)
        except ManyhandsError as error:
            logger.debug("the others are not told that this peer left: %s", error)
