"""The drawings of a command in a terminal while it runs: a spinner, a line below the log, or a whole screen.

rich draws them, and nothing is drawn in a pipe. Log lines marked as
:data:`manyhands.optim.run.progress.SHOWN_LIVE` are hidden while a line or a screen shows the same.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.status import Status
from rich.text import Text

from manyhands.base.text import reason_of
from manyhands.cli.output.logs import keeping_log_lines, logging_to

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
STOP = getattr(signal, "SIGTSTP", None)
"""The signal of Ctrl-Z; None on Windows."""
STOP_TIMEOUT_S = 2.0
"""Longest wait in seconds at the end of a program for a terminal that takes no output (Ctrl-S)."""

Draw = Callable[[int, int, Sequence[logging.LogRecord]], RenderableType | None]
"""Returns a screen for a width and a height in characters and the kept log records, oldest first; None as long as there
is nothing to draw yet."""


def console_of(stream: TextIO) -> Console:
    """A console that wraps no lines, and draws only in a terminal that has the characters for it.

    A notebook sets FORCE_COLOR, but shows the codes that redraw a line as they are.
    """
    console = Console(file=stream, highlight=False, soft_wrap=True, force_terminal=None if stream.isatty() else False)
    if not console.encoding.startswith("utf"):
        console.is_interactive = False
    return console


def waiting(doing: str) -> Status:
    """While the block runs, show ``doing`` with a spinner on standard error, but only in a terminal."""
    return console_of(sys.stderr).status(Text(doing), spinner="line")


@contextmanager
def live_line(console: Console, draw: Callable[[int], RenderableType]) -> Iterator[None]:
    """While the block runs, keep a line at the bottom of the terminal, below all printed and logged lines.

    Args:
        console: of standard output.
        draw: returns the line for a width in characters; called in another thread.
    """
    if not console.is_interactive:
        yield
        return
    live = Live(
        console=console,
        get_renderable=lambda: draw(console.width),
        refresh_per_second=1 / PERIOD_S,
        transient=True,
    )
    live.start()
    console.show_cursor(True)  # if the process is killed, the terminal keeps its cursor
    try:
        with logging_to(sys.stdout):  # rich's, which prints above the line
            yield
    finally:
        with suppress(OSError):  # the terminal was closed
            live.stop()


class LiveScreen:
    """Context manager that draws on the whole terminal, and restores its earlier content at the end.

    Until the first drawing, log lines are printed as usual. Then the newest ones are kept for the drawing, and printed
    when the screen has ended. Ctrl-Z leaves the terminal as it was while the process is stopped; ``fg`` draws again. A
    closed terminal ends the drawing. If drawing fails in another way, the screen ends with a warning. For use on the
    main thread only.

    Args:
        console: of standard output.
        draw: called in another thread, every :data:`PERIOD_S`.
    """

    def __init__(self, console: Console, draw: Draw) -> None:
        self._console = console
        self._draw = draw
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live screen", daemon=True)

    def __enter__(self) -> None:
        if STOP is not None and signal.getsignal(STOP) is signal.SIG_DFL:  # else the shell has no job control
            signal.signal(STOP, self._stop)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        if STOP is not None and signal.getsignal(STOP) == self._stop:
            signal.signal(STOP, signal.SIG_DFL)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while self._drawn([]) is None:
                if self._is_over.wait(PERIOD_S):
                    return
            with keeping_log_lines() as kept, self._live:
                while not self._is_over.is_set():
                    self._live.update(self._drawn(kept) or "", refresh=True)
                    self._is_over.wait(PERIOD_S)
        except OSError:  # the terminal was closed
            return
        except Exception as error:
            logger.warning("The live screen has ended (%s); log lines are printed instead", reason_of(error))
            logger.debug("The live screen failed", exc_info=True)

    def _drawn(self, kept: Collection[logging.LogRecord]) -> RenderableType | None:
        width, height = self._console.size
        return self._draw(width, height, list(kept))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Give the terminal back, stop the process, and take the terminal again when the process goes on."""
        is_drawn = self._live.is_started
        if is_drawn:
            self._live.stop()
        signal.raise_signal(signal.SIGSTOP)
        if is_drawn:
            self._live.start()
