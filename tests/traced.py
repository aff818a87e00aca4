"""How much memory something keeps."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """Trace what is allocated in the block; the function it gives returns the bytes of that which are still held."""
    gc.collect()
    tracemalloc.start()

    def num_held() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    try:
        yield num_held
    finally:
        tracemalloc.stop()
