"""Delays Ctrl-C and other signals until a block of work is done."""

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
"""Signals that are delayed. SIGALRM is not one of them: its purpose is to end code that hangs."""

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
"""Signals that end the program, unless it handles them."""

AGAIN_AFTER_S = 1.0
"""Seconds after which a signal counts as repeated. Terminals and launchers may send one Ctrl-C twice at once; a person
takes longer to repeat it."""

SignalHandler = Callable[[int, FrameType | None], Any]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay the signals that arrive within the block until its end, whether it succeeds or raises.

    This concerns signals with handlers in Python, above all Ctrl-C, as these may raise after any line. Such handlers
    run in the main thread only; in other threads this does nothing. A signal that ends the program is not delayed if it
    is repeated after a second, so that it can end a hanging block. The block must not switch to other such blocks in
    the same thread, as a greenlet can.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    put_off: dict[int, float] = {}  # with the time of the first signal

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


def _handle(numbers: list[int], handlers: Mapping[int, SignalHandler]) -> None:
    """Call all handlers, even if one raises; skip those that were replaced, for example by another handler."""
    if numbers:
        number = numbers.pop(0)
        try:
            if signal.getsignal(number) is handlers[number]:
                handlers[number](number, None)
        finally:
            _handle(numbers, handlers)


def _restore(handlers: list[tuple[int, SignalHandler]], current: SignalHandler) -> None:
    """Restore all handlers, even if one raises at once; skip those that were replaced meanwhile."""
    if handlers:
        number, handler = handlers.pop()
        try:
            if signal.getsignal(number) is current:
                signal.signal(number, handler)
        finally:
            _restore(handlers, current)
