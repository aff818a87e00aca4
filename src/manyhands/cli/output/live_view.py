"""Live views of a terminal, redrawn by a thread of their own: a status line below the log, or a whole screen.

Log lines marked as :data:`manyhands.optim.run.progress.SHOWN_LIVE` are hidden while something is drawn.
"""

from __future__ import annotations

import io
import logging
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import NamedTuple, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from manyhands.base.text import reason_of

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
STOP = getattr(signal, "SIGTSTP", None)
"""What Ctrl-Z sends; None on Windows."""
STOP_TIMEOUT_S = 2.0
"""A terminal that takes no output (Ctrl-S) holds up the end of a program no longer, and is left as it is."""
MAX_KEPT_LINES = 1000
MAX_LINE_LENGTH = 4000


class LogLine(NamedTuple):
    """A line that was logged or printed while a screen was drawn.

    Attributes:
        time: seconds since 1970.
        level: of :mod:`logging`.
        text: the message alone.
        whole: as it would have been printed.
    """

    time: float
    level: int
    text: str
    whole: str


class LiveView(ABC):
    """Context manager that draws every :data:`PERIOD_S` until it ends. A closed terminal ends the drawing.

    Ctrl-Z leaves the terminal as it was while the process is stopped; ``fg`` draws again. For the main thread.

    If drawing fails in another way, the view ends with a warning, and log lines are printed as without it.

    Attributes:
        has_begun: whether something is drawn.

    Args:
        console: of standard output.
        live: what draws on it.
    """

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live
        self.has_begun = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._draw_forever, name="live view", daemon=True)
        self._handlers: list[logging.Handler] = []
        self._is_to_stop = False  # the process, for Ctrl-Z

    @property
    def is_possible(self) -> bool:
        """Whether standard output is a terminal that can be redrawn, whatever FORCE_COLOR says."""
        return sys.stdout.isatty() and self._console.is_interactive

    def __enter__(self) -> None:
        self._begin()
        if STOP is not None and signal.getsignal(STOP) is signal.SIG_DFL:  # else the shell has no job control
            signal.signal(STOP, self._stop_soon)
        root = logging.getLogger()
        self._handlers, own = root.handlers, _Handler(self)
        replaced = [handler for handler in self._handlers if _is_of_terminal(handler)]
        own.setFormatter(replaced[0].formatter if replaced else None)
        root.handlers = [own, *(handler for handler in self._handlers if handler not in replaced)]
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        if STOP is not None and signal.getsignal(STOP) == self._stop_soon:
            signal.signal(STOP, signal.SIG_DFL)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._end()

    def _draw_forever(self) -> None:
        try:
            while not self._is_over.wait(PERIOD_S):
                if self._is_to_stop:
                    self._stop()
                self._draw()
        except OSError:  # the terminal was closed
            return
        except Exception as error:
            self._end()
            logger.warning("The live view has ended (%s); log lines are printed instead", reason_of(error))
            logger.debug("The live view failed", exc_info=True)

    def _stop_soon(self, number: int, frame: FrameType | None) -> None:
        self._is_to_stop = True  # by the thread that draws: this one may hold a lock of the console
        if not self._thread.is_alive():  # nothing is drawn any more
            signal.raise_signal(signal.SIGSTOP)

    def _stop(self) -> None:
        """Give the terminal back, stop the process, and take the terminal again when the process goes on."""
        self._is_to_stop = False
        if self.has_begun:
            self._live.stop()
        signal.raise_signal(signal.SIGSTOP)
        if self.has_begun:
            self._start()

    def _start(self) -> None:
        self._live.start()

    def _end(self) -> None:
        logging.getLogger().handlers = self._handlers
        with suppress(OSError):  # the terminal was closed
            self._live.stop()

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _draw(self) -> None: ...

    @abstractmethod
    def take(self, line: LogLine) -> None:
        """Show a log line."""


class LiveLine(LiveView):
    """A status line at the bottom of the terminal. Log lines scroll above it.

    Args:
        console: of standard output.
        text: returns the line for a terminal width in characters; called in a separate thread.
    """

    def __init__(self, console: Console, text: Callable[[int], str]) -> None:
        super().__init__(console, Live(console=console, auto_refresh=False, transient=True))
        self._text = text

    def _begin(self) -> None:
        self.has_begun = True
        self._start()

    def _start(self) -> None:
        super()._start()
        self._console.show_cursor(True)  # a killed process could not show the cursor again

    def _draw(self) -> None:
        text = self._text(self._console.width)
        self._live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)

    def take(self, line: LogLine) -> None:
        self._console.print(line.whole, markup=False, highlight=False, emoji=False, soft_wrap=True)


class LiveScreen(LiveView):
    """A view that fills the terminal, on its alternate screen: what was there before is there again at the end.

    Until the first drawing, log lines are printed as usual. Then the newest :data:`MAX_KEPT_LINES` of them, and what
    other code prints, are kept for the drawing, and printed when the screen has ended.

    Args:
        draw: returns the screen for a width and a height in characters and the kept lines, oldest first; None as long
            as there is nothing to draw yet. Called in a separate thread.
        console: by default, one of the present standard output.
    """

    def __init__(
        self,
        draw: Callable[[int, int, Sequence[LogLine]], RenderableType | None],
        *,
        console: Console | None = None,
    ) -> None:
        console = console or Console(file=sys.stdout, highlight=False)
        live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        super().__init__(console, live)
        self._make = draw
        self._kept: deque[LogLine] = deque(maxlen=MAX_KEPT_LINES)
        self._streams = sys.stdout, sys.stderr

    @property
    def is_possible(self) -> bool:
        """Whether standard output is a terminal that can be redrawn and has the characters for it."""
        return super().is_possible and self._console.encoding.startswith("utf")

    def _begin(self) -> None:
        """The screen begins with the first drawing."""

    def _draw(self) -> None:
        width, height = self._console.size
        drawn = self._make(width, height, list(self._kept))
        if drawn is None:
            return
        if not self.has_begun:
            self.has_begun = True
            sys.stdout, sys.stderr = (_Printed(self.take, stream) for stream in self._streams)
            self._start()
        self._live.update(drawn, refresh=True)

    def take(self, line: LogLine) -> None:
        if self.has_begun:
            self._kept.append(line)
        else:
            print(line.whole, file=self._streams[0], flush=True)

    def _end(self) -> None:
        super()._end()
        if self.has_begun:
            self.has_begun = False
            sys.stdout, sys.stderr = self._streams
        with suppress(OSError):
            while self._kept:
                print(self._kept.popleft().whole, file=self._streams[0], flush=True)


def _is_of_terminal(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)


class _Handler(logging.Handler):
    """Gives log lines to a view."""

    def __init__(self, view: LiveView) -> None:
        super().__init__()
        self._view = view
        self.addFilter(lambda record: not (view.has_begun and getattr(record, "is_shown_live", False)))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._view.take(LogLine(record.created, record.levelno, record.getMessage(), self.format(record)))
        except Exception:  # noqa: BLE001 (as in logging.Handler: a log call never raises)
            self.handleError(record)


class _Printed(io.TextIOBase):
    """Replaces standard output or error; what is printed becomes lines. Of a line that is overwritten, the last."""

    encoding = "utf-8"

    def __init__(self, take: Callable[[LogLine], None], stream: TextIO) -> None:
        self._take = take
        self._stream = stream
        self._begun = ""  # a line without its end

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Of the replaced stream, for child processes: the next drawing overwrites what they print."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        *lines, begun = (self._begun + text).split("\n")
        self._begun = begun.rpartition("\r")[2][:MAX_LINE_LENGTH]
        for line in lines:
            if shown := line.rstrip("\r").rpartition("\r")[2][:MAX_LINE_LENGTH]:
                self._take(LogLine(time.time(), logging.INFO, shown, shown))
        return len(text)
