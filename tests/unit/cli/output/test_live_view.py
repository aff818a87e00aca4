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

from manyhands.cli.output.live_view import LiveLine, LiveScreen, LogLine
from manyhands.optim.run.progress import SHOWN_LIVE

ERASE_LINE = "\r\x1b[2K"


@pytest.fixture(autouse=True)
def root_handlers() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers, root.level
    root.handlers = [logging.StreamHandler(io.StringIO())]
    root.handlers[0].setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root.setLevel(logging.INFO)
    yield
    root.handlers = before
    root.setLevel(level)


def test_log_lines_go_above_the_line_and_the_line_goes_at_the_end() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, force_interactive=True, width=40, legacy_windows=False)
    handlers, is_drawn = logging.getLogger().handlers, threading.Event()

    def text(width: int) -> str:
        if "the line" in screen.getvalue():
            is_drawn.set()
        return f"the line, {width} wide"

    address = "/ip4/203.0.113.7/tcp/31337/p2p/" + "Q" * 46
    with LiveLine(console, text):
        assert is_drawn.wait(10.0)
        logging.getLogger("manyhands").info("join through [this] %s", address)
        logging.getLogger("manyhands").info("shown in the line", extra=SHOWN_LIVE)
        print("a library prints")
    said = screen.getvalue()
    assert f"{ERASE_LINE}INFO: join through [this] {address}\n" in said, "it can be copied, and the old line is gone"
    assert "a library prints" in said
    assert "shown in the line" not in said
    assert said.endswith("\r\x1b[1A\x1b[2K"), "the line is gone at the end"
    assert logging.getLogger().handlers is handlers


def test_a_program_that_is_ended_by_force_leaves_the_cursor_there() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, force_interactive=True, width=40, legacy_windows=False)
    with LiveLine(console, lambda width: ""):
        assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


def a_terminal(screen: io.StringIO) -> Console:
    return Console(file=screen, force_terminal=True, force_interactive=True, width=40, height=6, legacy_windows=False)


class Drawer:
    """Draws the kept lines, and tells when it has."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_ready = True
        self.fails = False
        self._drawn = threading.Semaphore(0)

    def __call__(self, width: int, height: int, log: Sequence[LogLine]) -> Text | None:
        self._drawn.release()
        if self.fails:
            raise ZeroDivisionError("no\nspan")
        self.seen = [line.text for line in log]
        return Text(f"{width} x {height}") if self.is_ready else None

    def wait(self) -> None:
        """Until a whole drawing was made that was begun after the call."""
        while self._drawn.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self._drawn.acquire(timeout=10.0)


def test_a_screen_keeps_what_is_logged_and_printed_and_prints_it_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen, draw, root = io.StringIO(), Drawer(), logging.getLogger()
    file = logging.FileHandler(tmp_path / "log")
    root.handlers = [*root.handlers, file]
    handlers, streams = root.handlers, (sys.stdout, sys.stderr)
    draw.is_ready = False
    with LiveScreen(draw, console=a_terminal(screen)):
        draw.wait()
        logging.getLogger("manyhands").info("before the screen")
        logging.getLogger("manyhands").info("no screen shows it", extra=SHOWN_LIVE)
        assert capsys.readouterr().out == "INFO: before the screen\nINFO: no screen shows it\n"
        assert screen.getvalue() == ""
        draw.is_ready = True
        draw.wait()
        logging.getLogger("manyhands").warning("a [warning]")
        logging.getLogger("manyhands").info("shown on the screen", extra=SHOWN_LIVE)
        print("a library prints")
        print("1%\r2%\r3%", end="", file=sys.stderr)
        print(", done", file=sys.stderr)
        draw.wait()
        assert draw.seen == ["a [warning]", "a library prints", "3%, done"]
        assert capsys.readouterr().out == ""
    assert capsys.readouterr().out == "WARNING: a [warning]\na library prints\n3%, done\n"
    assert screen.getvalue().startswith("\x1b[?1049h")
    assert "40 x 6" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[?25h\x1b[?1049l")
    assert logging.getLogger().handlers is handlers
    assert (sys.stdout, sys.stderr) == streams
    file.close()
    assert "a [warning]" in (tmp_path / "log").read_text(), "a log file goes on meanwhile"


def test_a_screen_that_cannot_be_drawn_ends_with_a_warning_and_log_lines_follow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen, draw, handlers = io.StringIO(), Drawer(), logging.getLogger().handlers
    assert isinstance(handlers[0], logging.StreamHandler)
    log = handlers[0].stream
    with LiveScreen(draw, console=a_terminal(screen)) as _:
        draw.wait()
        draw.fails = True
        for thread in threading.enumerate():
            if thread.name == "live view":
                thread.join(10.0)
        logging.getLogger("manyhands").info("afterwards")
    assert screen.getvalue().endswith("\x1b[?25h\x1b[?1049l")
    assert log.getvalue() == (
        "WARNING: The live view has ended (no span); log lines are printed instead\nINFO: afterwards\n"
    )
    assert capsys.readouterr().out == ""


def test_a_terminal_without_block_characters_has_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", Ascii())
    assert LiveLine(Console(), lambda width: "").is_possible
    assert not LiveScreen(Drawer()).is_possible


def test_a_pipe_has_no_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not LiveLine(Console(), lambda width: "").is_possible
