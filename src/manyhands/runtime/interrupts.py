"""Work that Ctrl-C does not break off half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
"""Not SIGALRM: an alarm is there to end what hangs."""
Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that come within the block are handled when it is over, whether it ends well or not.

    Those are meant whose handlers are written in Python, Ctrl-C above all: they may raise an error after any line. They
    do so in the main thread only, and in others this does nothing. A second signal is not put off: it ends a block
    that hangs. The block must not hand the thread on to other blocks like it, as a greenlet can.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    put_off: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if put_off:
            put_off.clear()
            handlers[number](number, frame)
        else:
            put_off.append(number)

    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        _restore(list(handlers.items()), note)
        if put_off:
            handlers[put_off[0]](put_off[0], None)


def _restore(handlers: list[tuple[int, Handler]], current: Handler) -> None:
    """Put back all, also when the first of them raises at once; but none that was replaced meanwhile."""
    if handlers:
        number, handler = handlers.pop()
        try:
            if signal.getsignal(number) is current:
                signal.signal(number, handler)
        finally:
            _restore(handlers, current)
