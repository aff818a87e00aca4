"""Shortens the switch interval of Python's threads while peers of this process run.

A training thread releases the GIL with each kernel that it calls, and needs it back a moment later. If the network
thread holds it then, and keeps running Python, the training thread waits for a whole switch interval, 5 ms by default:
with kernels of 0.1 ms a few messages cost more than a batch. With a shorter interval it waits only for as long as the
messages take (docs/dev/log.md).
"""

from __future__ import annotations

import sys
import threading

INTERVAL_S = 0.0005


class SwitchInterval:
    """Shortens the switch interval of the process on request, and restores it at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_wanted = 0
        self._before_s = 0.0
        self._set_s = 0.0

    def shorten(self) -> None:
        """Shorten the interval; each call needs one of :meth:`restore`."""
        with self._lock:
            if self._num_wanted == 0:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, INTERVAL_S))
                self._set_s = sys.getswitchinterval()
            self._num_wanted += 1

    def restore(self) -> None:
        """Undo one :meth:`shorten`; the last call restores the interval, unless other code has changed it meanwhile."""
        with self._lock:
            self._num_wanted -= 1
            if self._num_wanted == 0 and sys.getswitchinterval() == self._set_s:
                sys.setswitchinterval(self._before_s)


SWITCH_INTERVAL = SwitchInterval()
"""The only instance in this process."""
