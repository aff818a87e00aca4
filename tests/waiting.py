"""How long tests wait for what must come, and how."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 240.0
"""For processes and threads: a busy machine takes long, and a test that passes does not wait for it."""


def wait_until(is_so: Callable[[], object], what: str = "a condition of the test") -> None:
    """Look again and again until something has come about."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"it did not come about: {what}"
        time.sleep(0.02)
