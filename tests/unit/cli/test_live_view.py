"""Log lines scroll above the live line, and what it shows is not logged."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from manyhands.cli.live_view import LiveLine
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


def test_a_pipe_has_no_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not LiveLine(Console(), lambda width: "").is_possible
