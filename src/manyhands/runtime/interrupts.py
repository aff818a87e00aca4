"""Work that Ctrl-C does not break off half-way."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
"""Not SIGALRM: an alarm is there to end what hangs."""
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
AGAIN_AFTER_S = 1.0
"""Terminals and launchers may send one and the same Ctrl-C twice, at once; a person needs longer."""
Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that come within the block are handled when it is over, whether it ends well or not.

    Those are meant whose handlers are written in Python, Ctrl-C above all: they may raise an error after any line. They
    do so in the main thread only, and in others this does nothing. One that is to end the program is not put off when
    it comes again after a second: it ends a block that hangs. The block must not hand the thread on to other blocks
    like it, as a greenlet can.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    put_off: dict[int, float] = {}  # since when

    def note(number: int, frame: FrameType | None) -> None:
        since = put_off.setdefault(number, time.monotonic())
        if number in ENDING and time.monotonic() - since > AGAIN_AFTER_S:
            del put_off[number]
            handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        _restore(list(handlers.items()), note)
        _handle(list(put_off), handlers)


def _handle(numbers: list[int], handlers: Mapping[int, Handler]) -> None:
    """Call the handlers of all, also when one raises; but of none that was replaced, by another handler say."""
    if numbers:
        number = numbers.pop(0)
        try:
            if signal.getsignal(number) is handlers[number]:
                handlers[number](number, None)
        finally:
            _handle(numbers, handlers)


def _restore(handlers: list[tuple[int, Handler]], current: Handler) -> None:
    """Put back all, also when the first of them raises at once; but none that was replaced meanwhile."""
    if handlers:
        number, handler = handlers.pop()
        try:
            if signal.getsignal(number) is current:
                signal.signal(number, handler)
        finally:
            _restore(handlers, current)
