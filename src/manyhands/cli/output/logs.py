"""Where the commands log: standard output, and a file that may be JSON lines."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

import msgspec

from manyhands.cli.output.line_file import LineFile

FORMAT = "%(asctime)s.%(msecs)03d [%(levelname)s] %(message)s"
ORIGIN = "[%(name)s:%(lineno)d]"

STDERR = 2
MAX_KEPT_LINES = 1000

STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "is_shown_live"}
"""Attributes of every log record; others were given with ``extra=``."""


def log_to_stdout(*, verbose: bool) -> None:
    """Print manyhands' log lines to standard output; ``verbose`` adds debug lines and their origin."""
    log_to(None, is_json=False, verbose=verbose)


def log_to(path: Path | None, *, is_json: bool, verbose: bool) -> None:
    """Print manyhands' log lines to standard output, and append them to a file as well.

    May be called again: the file of the call before is closed.

    Args:
        path: of the file; None for none.
        is_json: append JSON objects in place of text.
        verbose: adds debug lines and their origin.
    Raises:
        ConfigError: the file cannot be written.
    """
    fmt = FORMAT.replace("] ", f"] {ORIGIN} ") if verbose else FORMAT
    handlers: list[logging.Handler] = [StdoutHandler(sys.stdout)]
    handlers[0].setFormatter(logging.Formatter(fmt, datefmt="%b %d %H:%M:%S"))
    if path is not None:
        handlers.insert(0, LogFile(path))  # first: what the terminal shows is in the file
        handlers[0].setFormatter(JsonFormatter() if is_json else logging.Formatter(fmt, datefmt="%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    for former in root.handlers:
        if isinstance(former, LogFile):
            former.close()
    root.handlers = handlers
    root.setLevel(logging.WARNING)
    logging.getLogger("manyhands").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.captureWarnings(True)


def name_in_logs(**fields: str) -> None:
    """Add fields, such as ``run`` and ``peer``, to all further JSON lines of this process."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.common |= fields


@contextmanager
def only_warnings() -> Iterator[None]:
    """Within the block, leave out INFO lines of a peer that only looks: the peer that joins later logs them again."""
    ours = logging.getLogger("manyhands")
    level = ours.level
    if level == logging.INFO:
        ours.setLevel(logging.WARNING)
    try:
        yield
    finally:
        ours.setLevel(level)


@contextmanager
def logging_to(stream: TextIO) -> Iterator[None]:
    """Within the block, print log lines to another stream, except those that a live view shows."""
    handler = _stdout_handler()
    if handler is None:
        yield
        return
    before = handler.stream
    handler.setStream(stream)
    handler.addFilter(_is_not_drawn)
    try:
        yield
    finally:
        handler.removeFilter(_is_not_drawn)
        handler.setStream(before)


@contextmanager
def keeping_log_lines() -> Iterator[Collection[logging.LogRecord]]:
    """Within the block, keep log lines, except those that a live view shows; at its end, print the newest ones."""
    printing = _stdout_handler()
    keeping = MemoryHandler(MAX_KEPT_LINES + 1, flushLevel=logging.CRITICAL + 1, target=printing)
    kept = deque[logging.LogRecord](maxlen=MAX_KEPT_LINES)
    keeping.buffer = kept  # type: ignore[assignment] # typeshed knows only lists
    keeping.addFilter(_is_not_drawn)
    root = logging.getLogger()
    before = root.handlers
    root.handlers = [keeping, *(handler for handler in before if handler is not printing)]
    try:
        yield kept
    finally:
        root.handlers = before
        keeping.close()


def _stdout_handler() -> StdoutHandler | None:
    return next((one for one in logging.getLogger().handlers if isinstance(one, StdoutHandler)), None)


def _is_not_drawn(record: logging.LogRecord) -> bool:
    return not getattr(record, "is_shown_live", False)


class StdoutHandler(logging.StreamHandler[TextIO]):
    """Prints log lines to standard output.

    If the program that reads them has ended, such as ``head``, or ``tee`` at Ctrl-C, the command ends as on SIGTERM,
    and its further lines go to standard error. If lines cannot be written for another reason, such as a full disk, they
    are dropped, and one line on standard error says so.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (a name of logging)
        """Called where :meth:`emit` catches an exception."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif isinstance(error, BrokenPipeError):
            redirect_stdout_to(STDERR if not self._has_failed else None)
            if not self._has_failed:
                os.kill(os.getpid(), signal.SIGTERM)
        elif not self._has_failed:
            text = f"manyhands: standard output: {error.strerror}; log lines are dropped meanwhile"
            with suppress(OSError):
                print(text, file=sys.stderr)  # noqa: T201
        self._has_failed = True


def redirect_stdout_to(descriptor: int | None) -> None:
    """Write the further standard output to another open file, or discard it if ``descriptor`` is None."""
    with suppress(OSError):  # that file is closed too
        if descriptor is not None:
            os.dup2(descriptor, sys.stdout.fileno())
            return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class LogFile(logging.Handler):
    """Appends log lines to a :class:`LineFile`.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = LineFile(path, "--log-file", "log lines")

    def emit(self, record: logging.LogRecord) -> None:
        """Append the line of a record; called with the lock of this handler."""
        try:
            self._file.append(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:  # noqa: BLE001 (as in logging.Handler: a log call never raises)
            self.handleError(record)

    def close(self) -> None:
        """Close the file."""
        self.acquire()
        try:
            self._file.close()
        finally:
            self.release()
        super().close()


class JsonFormatter(logging.Formatter):
    """Makes one JSON object of each log record.

    Its fields are ``time`` (seconds since 1970), ``level``, ``logger``, ``message``; ``traceback`` if the record has an
    exception; and what the record was given as ``extra``.

    Attributes:
        common: fields of all objects.
    """

    def __init__(self) -> None:
        super().__init__()
        self.common: dict[str, str] = {}

    def format(self, record: logging.LogRecord) -> str:
        """The object, in one line."""
        extra = {name: value for name, value in vars(record).items() if name not in STANDARD_FIELDS}
        fields: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": _valid(record.getMessage()),
        }
        if record.exc_info:
            fields["traceback"] = _valid(self.formatException(record.exc_info))
        return msgspec.json.encode(extra | self.common | fields, enc_hook=str).decode()


def _valid(text: str) -> str:
    """The text with escapes for characters that UTF-8 cannot encode, which a file name may have."""
    return text.encode("utf-8", "backslashreplace").decode()
