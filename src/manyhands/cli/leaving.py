"""Ends a command in one way on Ctrl-C, SIGTERM, SIGHUP and the end of its parent process."""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from manyhands.cli.entry import EXIT_INTERRUPTED
from manyhands.runtime.exit_delay import exit_delay_s, is_hurried
from manyhands.runtime.interrupts import AGAIN_AFTER_S

LEAVE_TIMEOUT_S = 4.5
"""Seconds that a command has to shut down after a signal, and once more after it has finished saving."""

SAY_AFTER_S = 0.5
"""Seconds after a signal until a command that has not ended prints that it is stopping."""

STDERR = 2

RAISE_AGAIN_AFTER_S = 0.01
"""Seconds for a finalizer to end before KeyboardInterrupt is raised again."""

HANGUP = [getattr(signal, name) for name in ("SIGHUP",) if hasattr(signal, name)]
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


_own_exit: list[Callable[[], object]] = []
_skips_libraries: list[Callable[[], bool]] = []


def at_exit(undo: Callable[[], object]) -> None:
    """Call a function when the program ends, also after :func:`skip_libraries_at_exit`."""
    _own_exit.append(undo)
    atexit.register(undo)


def skip_libraries_at_exit(while_: Callable[[], bool] = lambda: True) -> None:
    """Let the program end without the exit handlers of libraries, which may wait for a server or abort the process.

    Args:
        while_: asked at the end; False runs the handlers after all.
    """
    _skips_libraries.append(while_)


def finish(code: int) -> NoReturn:
    """End the program; a further Ctrl-C ends it at once, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if any(skips() for skips in _skips_libraries):
        for undo in reversed(_own_exit):
            undo()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # it was closed at the other end
                stream.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Within the block, SIGTERM and a closed terminal raise KeyboardInterrupt in the main thread, as Ctrl-C does.

    So does SIGINT where it was ignored, as in background jobs of a shell. A SIGHUP without a terminal or under
    ``nohup`` does not end the command. Daemons get one after log rotation, but log files are reopened without it.

    Python discards an exception that is raised in a finalizer, such as ``__del__`` or the callback of a weak reference.
    If that happens to KeyboardInterrupt, it is raised again soon after.
    """
    has_left = threading.Event()
    is_hurried.clear()
    told_at = -math.inf
    ends_on_hangup = _has_terminal() and not any(signal.getsignal(one) is signal.SIG_IGN for one in HANGUP)
    notice = threading.Thread(target=_say_unless, args=[has_left], name="stopping", daemon=True)
    last_resort = threading.Thread(target=_end_unless, args=[has_left], name="last resort", daemon=True)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal told_at
        if number in HANGUP and not ends_on_hangup:
            return
        for other in SIGNALS:  # shutdown has begun, and further signals do not interrupt it
            signal.signal(other, hurry)
        told_at = time.monotonic()
        last_resort.start()
        notice.start()
        raise KeyboardInterrupt

    def hurry(number: int, frame: FrameType | None) -> None:
        if number not in HANGUP and time.monotonic() - told_at > AGAIN_AFTER_S:
            is_hurried.set()

    def interrupt_again(number: int, frame: FrameType | None) -> None:
        signal.signal(number, hurry)
        raise KeyboardInterrupt

    def unraisable(event: sys.UnraisableHookArgs) -> None:
        if not isinstance(event.exc_value, KeyboardInterrupt):
            report(event)
            return
        signal.signal(signal.SIGINT, interrupt_again)
        threading.Timer(RAISE_AGAIN_AFTER_S, _interrupt_main_thread, [has_left]).start()

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    report = sys.unraisablehook
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        has_left.set()
        sys.unraisablehook = report
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_terminal() -> bool:
    return any(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def _interrupt_main_thread(has_left: threading.Event) -> None:
    if has_left.is_set():
        return
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGINT)
    else:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type] # it has begun


def _say_unless(has_left: threading.Event) -> None:
    """Tell the person at the terminal that the command is stopping, unless it has left by then."""
    if not has_left.wait(SAY_AFTER_S) and os.isatty(STDERR):
        with suppress(OSError):  # the terminal was closed
            os.write(STDERR, b"\nStopping ...\n")  # past Python's locks: the terminal may take no output


def _end_unless(has_left: threading.Event) -> None:
    """End the process if it has not left in time, but let it finish saving first."""
    if has_left.wait(LEAVE_TIMEOUT_S):
        return
    if (left_s := exit_delay_s()) > 0:
        while left_s > 0 and not has_left.wait(min(left_s, 0.1)):
            left_s = exit_delay_s()
        if has_left.wait(LEAVE_TIMEOUT_S):
            return
    os._exit(EXIT_INTERRUPTED)


def leave_on_eof() -> None:
    """Leave, as on SIGTERM, when standard input ends."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LEAVE_TIMEOUT_S)  # the main thread may be in a long import and not run signal handlers
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=wait, name="waiting for the end of stdin", daemon=True).start()
