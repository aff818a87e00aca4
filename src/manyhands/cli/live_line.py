"""A status line at the bottom of the terminal, redrawn in place while log lines scroll above it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from manyhands.cli.logs import LogFile

PERIOD_S = 0.5


class LiveLine:
    """Context manager that shows the status line.

    Log lines marked as :data:`manyhands.optim.run.progress.SHOWN_LIVE` are hidden meanwhile.

    Args:
        console: of standard output.
        text: returns the line for a terminal width in characters; called in a separate thread.
    """

    def __init__(self, console: Console, text: Callable[[int], str]) -> None:
        self._console = console
        self._text = text
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._redraw_forever, name="live line", daemon=True)
        self._handlers: list[logging.Handler] = []

    @property
    def is_possible(self) -> bool:
        """Whether standard output is a terminal that can redraw a line, whatever FORCE_COLOR says."""
        return sys.stdout.isatty() and self._console.is_interactive

    def __enter__(self) -> LiveLine:
        self._live.start()
        self._console.show_cursor(True)  # a killed process could not show the cursor again
        root = logging.getLogger()
        self._handlers, above = root.handlers, _AboveTheLine(self._console)
        above.setFormatter(self._handlers[0].formatter if self._handlers else None)
        root.handlers = [above, *(handler for handler in self._handlers if isinstance(handler, LogFile))]
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        logging.getLogger().handlers = self._handlers
        with suppress(OSError):  # the terminal was closed
            self._live.stop()

    def _redraw_forever(self) -> None:
        with suppress(OSError):
            while not self._is_over.wait(PERIOD_S):
                text = self._text(self._console.width)
                self._live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)


class _AboveTheLine(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.addFilter(lambda record: not getattr(record, "is_shown_live", False))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
        except Exception:  # noqa: BLE001 (as in logging.Handler: a log call never raises)
            self.handleError(record)
