"""Detects a copy of this peer's identity, as after a state folder was copied to a second machine.

Each process puts the time when it began into the records that it publishes under its peer id. A later record with
another time shows that a second process has the same identity.
"""

from __future__ import annotations

import logging
import math
import time

from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId

logger = logging.getLogger(__name__)

EARLIER_LIFE_S = 5.0
"""Seconds after the start of this process in which a record may still be from before a restart: its travel time makes
it seem younger."""

STAY_S = 10.0
"""Seconds for which the process that has to end goes on publishing, so that the other one detects it too."""


class Twin:
    """Finds another process with this peer's identity by its records. The process that began earlier goes on.

    Args:
        began_at: when this process began, by the wall clock; it identifies the process in its records.
        now: the same instant in loop time.
        consequence: what becomes of the process that began later, in words for its user.

    Attributes:
        is_older: whether another process with this identity began earlier.
    """

    def __init__(self, own_id: PeerId, began_at: float, now: float, consequence: str = "ends") -> None:
        self._own_id = own_id
        self._began_at = began_at
        self._began = now
        self._consequence = consequence
        self._other_began_at: float | None = None
        self._noticed = -math.inf
        self.is_older = False

    def is_to_be_told(self, now: float) -> bool:
        """Whether the other process was detected so recently that it may not have detected this one."""
        return now < self._noticed + STAY_S

    def seen(self, began_at: float, issued: float, now: float) -> None:
        """Take in a record under this peer's own id that was read from the DHT.

        Args:
            began_at: when the process that signed it began, by its wall clock; 0.0 if unknown.
            issued: when it was signed, in loop time.
            now: loop time.
        """
        is_own = began_at in (0.0, self._began_at)
        if is_own or issued < self._began + EARLIER_LIFE_S or began_at == self._other_began_at:
            return
        self._other_began_at = began_at
        self._noticed = now
        self.is_older = began_at < self._began_at
        logger.error("%s", self._described())

    def check(self, now: float) -> None:
        """Raise ``ConfigError`` if this process has to end."""
        if self.is_older and not self.is_to_be_told(now):
            raise ConfigError(self._described())

    def _described(self) -> str:
        assert self._other_began_at is not None
        since = time.strftime("%b %d %H:%M:%S", time.localtime(self._other_began_at))
        consequence = (
            f"so this process {self._consequence}; give it a folder of its own (state_dir=, --state-dir, "
            "--checkpoint-dir)"
            if self.is_older
            else f"so that process {self._consequence}, and this one goes on"
        )
        which = "earlier" if self.is_older else "later"
        return (
            f"another process has the identity of this peer, {self._own_id}: a folder with it was copied. "
            f"It began {which}, at {since}, {consequence}"
        )
