"""What becomes of log lines while a line or a screen is drawn, and how the terminal is left."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from manyhands.cli.output.live_view import LiveScreen, console_of, live_line, waiting
from manyhands.cli.output.logs import StdoutHandler
from manyhands.optim.run.progress import SHOWN_LIVE

ERASE_LINE = "\r\x1b[2K"


@pytest.fixture(autouse=True)
def log() -> Iterator[io.StringIO]:
    """What is logged to standard output while nothing is drawn."""
    root = logging.getLogger()
    before, level = root.handlers, root.level
    printed = io.StringIO()
    root.handlers = [StdoutHandler(printed)]
    root.handlers[0].setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root.setLevel(logging.INFO)
    yield printed
    root.handlers = before
    root.setLevel(level)


def a_terminal(screen: io.StringIO) -> Console:
    return Console(
        file=screen, force_terminal=True, force_interactive=True, width=40, height=6, legacy_windows=False,
        soft_wrap=True,
    )  # fmt: skip


def test_log_lines_go_above_the_line_and_the_line_goes_at_the_end(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, is_drawn = io.StringIO(), threading.Event()
    monkeypatch.setattr("sys.stdout", screen)

    def draw(width: int) -> Text:
        if "the line" in screen.getvalue():
            is_drawn.set()
        return Text(f"the line, {width} wide")

    address = "/ip4/203.0.113.7/tcp/31337/p2p/" + "Q" * 46
    with live_line(a_terminal(screen), draw):
        assert is_drawn.wait(10.0)
        logging.getLogger("manyhands").info("join through [this] %s", address)
        logging.getLogger("manyhands").info("shown in the line", extra=SHOWN_LIVE)
        print("a library prints")
    said = screen.getvalue()
    assert f"{ERASE_LINE}INFO: join through [this] {address}\n" in said, "it can be copied, and the old line is gone"
    assert "a library prints" in said
    assert "shown in the line" not in said
    assert said.endswith("\r\x1b[1A\x1b[2K"), "the line is gone at the end"
    assert sys.stdout is screen
    assert log.getvalue() == ""
    logging.getLogger("manyhands").info("afterwards", extra=SHOWN_LIVE)
    assert log.getvalue() == "INFO: afterwards\n"


def test_a_program_that_is_ended_by_force_leaves_the_cursor_there() -> None:
    screen = io.StringIO()
    with live_line(a_terminal(screen), lambda width: Text("")):
        assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


class Drawer:
    """Draws the kept lines, and tells when it has."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_ready = True
        self.fails = False
        self._drawn = threading.Semaphore(0)

    def __call__(self, width: int, height: int, log: Sequence[logging.LogRecord]) -> Text | None:
        self._drawn.release()
        if self.fails:
            raise ZeroDivisionError("no\nspan")
        self.seen = [record.getMessage() for record in log]
        return Text(f"{width} x {height}") if self.is_ready else None

    def wait(self) -> None:
        """Until a whole drawing was made that was begun after the call."""
        while self._drawn.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self._drawn.acquire(timeout=10.0)


def test_a_screen_keeps_what_is_logged_and_prints_it_at_the_end(tmp_path: Path, log: io.StringIO) -> None:
    screen, draw, root = io.StringIO(), Drawer(), logging.getLogger()
    file = logging.FileHandler(tmp_path / "log")
    root.handlers = [*root.handlers, file]
    handlers = root.handlers
    draw.is_ready = False
    with LiveScreen(a_terminal(screen), draw):
        draw.wait()
        logging.getLogger("manyhands").info("before the screen")
        logging.getLogger("manyhands").info("no screen shows it", extra=SHOWN_LIVE)
        assert log.getvalue() == "INFO: before the screen\nINFO: no screen shows it\n"
        assert screen.getvalue() == ""
        draw.is_ready = True
        draw.wait()
        logging.getLogger("manyhands").warning("a [warning]")
        logging.getLogger("manyhands").info("shown on the screen", extra=SHOWN_LIVE)
        for number in range(1000):
            logging.getLogger("manyhands").info("line %d", number)
        draw.wait()
        assert draw.seen == [f"line {number}" for number in range(1000)], "the newest ones"
        assert "WARNING" not in log.getvalue()
    assert log.getvalue().endswith("INFO: line 998\nINFO: line 999\n")
    assert "shown on the screen" not in log.getvalue()
    assert screen.getvalue().startswith("\x1b[?1049h")
    assert "40 x 6" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[?25h\x1b[?1049l")
    assert logging.getLogger().handlers is handlers
    file.close()
    assert "a [warning]" in (tmp_path / "log").read_text(), "a log file goes on meanwhile"


def test_a_screen_that_cannot_be_drawn_ends_with_a_warning_and_log_lines_follow(log: io.StringIO) -> None:
    screen, draw = io.StringIO(), Drawer()
    with LiveScreen(a_terminal(screen), draw):
        draw.wait()
        logging.getLogger("manyhands").info("meanwhile")
        draw.fails = True
        for thread in threading.enumerate():
            if thread.name == "live screen":
                thread.join(10.0)
        logging.getLogger("manyhands").info("afterwards")
    assert screen.getvalue().endswith("\x1b[?25h\x1b[?1049l")
    assert log.getvalue() == (
        "INFO: meanwhile\n"
        "WARNING: The live screen has ended (no span); log lines are printed instead\n"
        "INFO: afterwards\n"
    )


@pytest.mark.parametrize(("encoding", "draws"), [("ascii", False), ("utf-8", True)])
def test_a_terminal_without_block_characters_is_not_drawn_on(
    encoding: str, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    assert console_of(terminal).is_interactive is draws


def test_a_pipe_has_no_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    pipe = io.StringIO()
    with live_line(console_of(pipe), lambda width: Text("the line")):
        pass
    assert pipe.getvalue() == ""


@pytest.mark.parametrize("text", ["looking for run [/x]", "dialling [::1]:31337"])
def test_the_wait_message_is_shown_verbatim_and_in_a_terminal_only(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook; rich takes it for a terminal
    with waiting(text):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with waiting(text):
        pass
    said = capsys.readouterr()
    assert text in said.err
    assert not said.out
