"""What a machine that is slow or busy allows itself, for tests that measure times."""

from __future__ import annotations

import threading
import time
from types import TracebackType

TICK_S = 0.01


class Machine:
    """Measures within its block how long the machine keeps processors from this process.

    A thread wakes up every 10 ms. What it comes too late, less the time that this process has computed meanwhile, it
    was kept waiting by the machine, and not by the code under test.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._waited_s = self._longest_s = self._seconds = 0.0

    def __enter__(self) -> Machine:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        before, computed_before = time.monotonic(), time.process_time()
        while not self._is_over.wait(TICK_S):
            now, computed = time.monotonic(), time.process_time()
            waited_s = max(now - before - TICK_S - (computed - computed_before), 0.0)
            self._seconds += now - before
            self._waited_s += waited_s
            self._longest_s = max(self._longest_s, waited_s)
            before, computed_before = now, computed

    def allows(self, limit_s: float) -> float:
        """What takes less than ``limit_s`` on an idle machine takes less than this here, once the block is over."""
        share = 1 - self._waited_s / self._seconds if self._seconds else 1.0
        return limit_s / max(share, 0.01) + self._longest_s
