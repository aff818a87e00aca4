"""The screen of a monitor in a terminal, from beginning to end; the trainer is a peer that only publishes records."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from manyhands import Peer
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PROGRESS_KIND, PeerRecord, peer_key
from manyhands.optim.metrics import HeldoutRecord, MetricsRecord, publish_metrics
from tests.process.commands import LOOPBACK
from tests.process.terminals import CTRL_C, CTRL_Z, Terminal, in_terminal
from tests.sweeps import few_of
from tests.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="it has no pseudo-terminals"),
]

INTERRUPTED = 130
MONITOR = ("monitor", "--run-id", "seen", "--listen", LOOPBACK, "--refresh-period", "0.5")
ON, OFF = "\x1b[?1049h", "\x1b[?1049l"  # the alternate screen
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # the cursor
HOME = "\x1b[H"
ESCAPE = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


@contextmanager
def a_trainer_of(terminal: Terminal) -> Iterator[Peer]:
    terminal.wait_until(r"--initial_peers /ip4/\S+\r\n")
    (address,) = re.findall(r"--initial_peers (/ip4/\S+)", terminal.screen)
    with Peer([address], listen=[LOOPBACK]) as peer:
        progress = PeerRecord(
            Position(3, b"x"), False, peer.addresses, 60.0, samples=8, samples_per_second=2.5, lineage_samples=64
        )
        plain = msgspec.to_builtins(progress, builtin_types=(bytes,))
        peer.store(peer_key("seen", PROGRESS_KIND), plain, ttl_s=60, subkey=peer.peer_id)
        for record in (MetricsRecord(3, 1.5, 64, 18.0, 4), HeldoutRecord(3, 5.5, 0.25, 0.5, 64)):
            peer.run(publish_metrics(peer.dht, peer.peer_id, "seen", record), PATIENCE_S, "publishing")
        yield peer


def drawing_of(terminal: Terminal) -> list[str]:
    """The rows of the last whole drawing; none before the second one has begun."""
    drawings = terminal.screen.split(HOME)[1:-1]
    return [ESCAPE.sub("", row) for row in drawings[-1].split("\r\n")] if drawings else []


def size_of(rows: list[str]) -> tuple[int, int]:
    """Columns and rows; 0 columns if the rows differ."""
    widths = {len(row) for row in rows}
    return (widths.pop() if len(widths) == 1 else 0), len(rows)


def test_the_screen_begins_with_the_first_trainer_and_leaves_the_terminal_as_it_was() -> None:
    with in_terminal(*MONITOR) as terminal:
        terminal.wait_until("A live screen begins here as soon as somebody trains")
        terminal.wait_until("Found no active peers")
        assert ON not in terminal.screen, "the ticket can be read meanwhile"
        with a_trainer_of(terminal):
            terminal.wait_until(r"held-out 5\.5000 at step 3")
            for width, height in ((80, 24), (200, 60)):
                terminal.resize(width, height)
                terminal.wait_for(lambda size=(width, height): size_of(drawing_of(terminal)) == size)
                rows = drawing_of(terminal)
                assert rows[0].startswith(" manyhands monitor  run seen")
                assert rows[1].startswith(" Step 3  next ")
                assert "1 peer · 2.5 samples/s" in rows[2]
                assert any("To join: manyhands join 127.0.0.1:" in row for row in rows[-2:]), "\n".join(rows)
            terminal.type(CTRL_C)
            assert terminal.wait() == INTERRUPTED, terminal.screen
    before, _, drawn = terminal.screen.partition(ON)
    drawn, _, after = drawn.partition(OFF)
    assert "manyhands join mh1" in before
    assert "[INFO] Step #" not in drawn + after, "the screen shows it"
    assert re.search(r"Run 'seen'\s+step +3 global steps of the run\s+loss +4\.5000 at first, 4\.5000 at last", after)
    assert ON not in after
    assert terminal.screen.rindex(SHOWN) > terminal.screen.rindex(HIDDEN)
    assert "Traceback" not in terminal.screen
    assert "live screen has ended" not in terminal.screen


@pytest.mark.long
def test_ctrl_z_gives_the_terminal_back_until_the_process_goes_on() -> None:
    with in_terminal(*MONITOR) as terminal, a_trainer_of(terminal):
        terminal.wait_until(re.escape(HOME), times=2)
        terminal.type(CTRL_Z)
        terminal.wait_for(lambda: terminal.is_stopped)
        terminal.wait_for(lambda: terminal.screen.rfind(OFF) > terminal.screen.rfind(ON))
        assert terminal.screen.rindex(SHOWN) > terminal.screen.rindex(HIDDEN)
        terminal.send(signal.SIGCONT)
        terminal.wait_until(re.escape(ON), times=2)
        drawn = terminal.screen.count(HOME)
        terminal.wait_until(re.escape(HOME), times=drawn + 2)
        terminal.type(CTRL_C)
        assert terminal.wait() == INTERRUPTED, terminal.screen


@pytest.mark.parametrize(("more", "env"), few_of([([], {"TERM": "dumb"}), (["--plain"], {})], 1, pytest.mark.long))
def test_log_lines_are_printed_where_no_screen_is_wanted_or_possible(more: list[str], env: dict[str, str]) -> None:
    with in_terminal(*MONITOR, *more, env=env) as terminal, a_trainer_of(terminal):
        terminal.wait_until(r"\[INFO\] Step #3  loss = 4\.5")
        terminal.wait_until(r"\[INFO\] Held-out loss 5\.5")
        terminal.type(CTRL_C)
        assert terminal.wait() == INTERRUPTED, terminal.screen
    assert "\x1b" not in terminal.screen
    assert "live screen" not in terminal.screen


def test_a_closed_terminal_ends_the_monitor_as_ctrl_c_does() -> None:
    with in_terminal(*MONITOR, env={"NO_COLOR": "1"}) as terminal, a_trainer_of(terminal):
        terminal.wait_until(re.escape(HOME), times=2)
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.screen), "no colors"
        terminal.hang_up()
        assert terminal.wait() == INTERRUPTED, terminal.screen


@pytest.mark.long
def test_a_terminal_that_takes_no_output_holds_nothing_up() -> None:
    with in_terminal(*MONITOR) as terminal, a_trainer_of(terminal):
        terminal.wait_until(re.escape(HOME), times=2)
        terminal.type(b"\x13")  # Ctrl-S
        terminal.send(signal.SIGTERM)
        assert terminal.wait() == INTERRUPTED, terminal.screen
