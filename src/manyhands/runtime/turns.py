"""How long one thread of Python keeps the others waiting while peers of this process are there.

A training thread hands Python's lock over with each kernel that it calls, and asks for it back a moment later. If the
network thread has it then, and goes on in Python, the training thread waits for a whole switch interval, 5 ms as Python
has it: with kernels of 0.1 ms a few messages cost more than a batch. With shorter turns it waits for as long as they
take (docs/dev/log.md).
"""

from __future__ import annotations

import sys
import threading

TURN_S = 0.0005


class Turns:
    """Shortens the switch interval of the process while it is wanted, and then sets it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_wanted = 0
        self._before_s = 0.0
        self._set_s = 0.0

    def shorten(self) -> None:
        """From now on; each call needs one of :meth:`restore`."""
        with self._lock:
            if self._num_wanted == 0:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, TURN_S))
                self._set_s = sys.getswitchinterval()
            self._num_wanted += 1

    def restore(self) -> None:
        """It is not wanted any more; what somebody else has set meanwhile stays."""
        with self._lock:
            self._num_wanted -= 1
            if self._num_wanted == 0 and sys.getswitchinterval() == self._set_s:
                sys.setswitchinterval(self._before_s)


TURNS = Turns()
"""Of this process."""
