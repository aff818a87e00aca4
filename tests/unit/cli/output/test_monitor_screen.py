"""What the screen of a monitor says, at any size and whatever peers say of themselves."""

from __future__ import annotations

import io
import logging
import math
import re
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from manyhands.cli.output.monitor_screen import card_of, chart_of, columns_of, screen_of, shown
from manyhands.monitor.picture import PeerRow, Point, RunEvent, RunPicture

NOW = 1.8e9
FOOTER = [
    "To join: manyhands join 203.0.113.7:31337",
    "Ticket and QR code, in another terminal: manyhands ticket 203.0.113.7:31337",
]
DOCUMENTATION = Path(__file__).parents[4] / "docs/how-to/monitor.md"


def a_peer(number: int, **changes: object) -> PeerRow:
    facts: dict[str, object] = {
        "peer_id": f"12D3KooW{number:06}", "name": f"name {number}", "step": 1234,
        "samples": 10_000_000 // (number + 1), "share": 0.5 / (number + 1), "samples_per_second": 12.34,
        "since": NOW - 7200, "version": "1.2.3",
        "device": "NVIDIA H100", "rounds_committed": 55, "rounds_missed": 3,
    }  # fmt: skip
    return PeerRow(**(facts | changes))  # type: ignore[arg-type]


def a_picture(*peers: PeerRow, **changes: object) -> RunPicture:
    facts: dict[str, object] = {
        "run_id": "albert", "time": NOW - 3, "step": 1234, "samples": 2900, "target_batch_size": 4096,
        "num_peers": len(peers), "samples_per_second": 41.3, "eta_s": 29.0, "committed_samples": 5_123_456,
        "last": Point(time=NOW - 30, step=1234, loss=4.2, bytes_sent=12_300_000, learning_rate=0.00012),
        "peers": list(peers),
        "events": [
            RunEvent(time=NOW - 12, kind="joined", text="bob has joined"),
            RunEvent(
                time=NOW - 700,
                kind="died",
                text="peer ...000007 has published nothing for a while, and is considered gone",
            ),
        ],
    }  # fmt: skip
    return RunPicture(**(facts | changes))  # type: ignore[arg-type]


POINTS = [Point(time=NOW - 5000 + step, step=step, loss=4 + 5 * math.exp(-step / 200)) for step in range(1, 1235)]
POINTS[1199] = Point(time=NOW, step=1200, loss=4.1, heldout_loss=4.5)


def rows_of(
    picture: RunPicture,
    points: list[Point] | None = None,
    size: tuple[int, int] = (80, 24),
    log: list[logging.LogRecord] | None = None,
    footer: list[str] = FOOTER,
    **options: object,
) -> list[str]:
    """The rows that a console prints, without the blanks at their ends."""
    width, height = size
    file = io.StringIO()
    console = Console(file=file, width=width, height=height + 50, **options)  # type: ignore[arg-type]
    console.print(
        screen_of(picture, POINTS if points is None else points, width, height, NOW, log=log or [], footer=footer)
    )
    rows = file.getvalue().split("\n")
    assert rows.pop() == ""
    return [row.rstrip() for row in rows]


def logged(time: float, level: int, text: str) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"created": time, "levelno": level, "levelname": logging.getLevelName(level), "msg": text}
    )


NAMES = ["alice", "", "lab-3", "Jos\u00e9", "carol", "old laptop", "dan"]


def test_the_monitor_screen_names_the_unit_of_credit() -> None:
    text = "\n".join(rows_of(a_picture(a_peer(1), unit="tokens")))
    assert "5,123,456 tokens committed" in text
    assert re.search(r"peer +tokens +share +samples/s", text)


def test_the_documentation_shows_what_is_drawn() -> None:
    peers = [
        a_peer(
            number,
            name=name,
            reach="client" if number % 3 == 1 else "direct",
            state={4: "averaging", 5: "gone"}.get(number, "training"),
            step=1234 if number != 5 else 1226,
            samples_per_second=12.34 / (1 + number / 2),
            samples=2_561_728 // (number + 1),
            share=0.5 / (number + 1),
        )
        for number, name in enumerate([*NAMES, *map(str, range(5))])
    ]
    log = [logged(NOW - 70, logging.WARNING, "Cannot read the records of the run; trying again")]
    drawn = "\n".join(rows_of(a_picture(*peers), log=log))
    assert drawn in DOCUMENTATION.read_text(encoding="utf-8"), drawn


SIZES = [(200, 60), (120, 40), (80, 24), (60, 20), (40, 12), (30, 8), (20, 4), (10, 2), (3, 1), (1, 1)]
HOSTILE = [
    "\x1b[2J\x1b[31mred\x07\r\n\tnext", "[red]markup[/red] [/] [link=x]", "王小明" * 30,
    "\u05e9\u05dc\u05d5\u05dd 123",
    "\u202eevil\u202d", "\U0001f1eb\U0001f1f7\U0001f469\u200d\U0001f469\u200d\U0001f466\U0001f3f3\ufe0f",
    "z" + "\u0335" * 300, "\ud800 lone", "\x9b31m c1", " " * 40, "a\u2028b\u3000c", "\x00", "x" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("num_peers", [0, 1, 3, 2000])
def test_the_screen_fills_the_terminal_and_no_more(size: tuple[int, int], num_peers: int) -> None:
    log = [logged(NOW - 70, logging.WARNING, "a long warning " * 20)] * 5
    for peers in (map(a_peer, range(num_peers)), (a_peer(n, name=HOSTILE[n % len(HOSTILE)]) for n in range(num_peers))):
        rows = rows_of(a_picture(*peers), size=size, log=log)
        assert len(rows) <= size[1]
        assert max(map(cell_len, rows), default=0) <= size[0]
        if size[1] >= 20:
            assert len(rows) == size[1]
            assert "Ticket and QR code, in another terminal: " in rows[-1]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("size", [(200, 60), (60, 20)], ids=str)
def test_text_of_strangers_is_shown_as_plain_text(text: str, size: tuple[int, int]) -> None:
    peer = a_peer(0, name=text, version=text, device=text, reason=text, peer_id=text)
    event = RunEvent(time=NOW, kind="joined", text=text)
    log = [logged(NOW, logging.WARNING, text)]
    rows = rows_of(a_picture(peer, events=[event]), size=size, log=log, force_terminal=True, color_system="truecolor")
    said = [re.sub(r"\x1b\[[0-9;]*m", "", row) for row in rows]
    assert len(said) <= size[1]
    for row in said:
        assert all(char.isprintable() or char == "\N{LEFT-TO-RIGHT MARK}" for char in row), row
        assert not re.search("[\u0300-\u036f]{3}", row), "marks do not pile up"
    assert any("training" in row and " 12.3 " in row for row in said), "the row of the peer is whole"


def test_markup_and_right_to_left_names_are_shown_as_they_are() -> None:
    assert shown("[red]x[/red]") == "[red]x[/red]"
    assert shown("\u05e9\u05dc") == "\u05e9\u05dc\N{LEFT-TO-RIGHT MARK}", "numbers after it stay where they are"
    assert shown("a\tb\r\n c") == "a b c"
    assert any(" [bold]x  " in row for row in rows_of(a_picture(a_peer(0, name="[bold]x"))))


def test_the_screen_of_a_run_without_peers_says_so() -> None:
    rows = rows_of(RunPicture(run_id="albert", time=NOW), [], footer=[])
    assert [row.rstrip(" ─") for row in rows] == [
        " manyhands monitor  run albert                                      Ctrl-C ends",
        " Step 0  next at an unknown time  0 samples",
        " 0 peers · 0.0 samples/s",
        " Loss none yet: it comes with the next global step",
        " Peers nobody trains",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eta_s": None}, "next unknown: no peer computes"),
        ({"eta_s": math.nan}, "next unknown: no peer computes"),
        ({"eta_s": 1e300}, "next in 11,574 days"),
        ({"eta_s": 3.5}, "next is due ━"),
        ({"eta_s": 0.0, "time": NOW - 75}, "next is due since 75 s ━"),
        ({"target_batch_size": 0, "eta_s": 0.0}, "next at an unknown time  2,900 samples"),
        ({"samples_per_second": math.inf}, "━           2,900/4,096 samples"),
        ({"samples": 2**60}, "━━ 1,152,921,504,606,846,976/4,096"),
    ],
)
def test_the_countdown_says_due_unknown_and_extreme_times_in_words(changes: dict[str, object], words: str) -> None:
    assert words in rows_of(a_picture(a_peer(0), **changes))[1] + "  "


def test_the_countdown_and_the_bar_move_between_two_pictures() -> None:
    picture = a_picture(a_peer(0), time=NOW)
    assert "next in 29 s ━" in rows_of(picture)[1]
    assert "2,900/4,096" in rows_of(picture)[1]
    later = a_picture(a_peer(0), time=NOW - 10)
    assert "next in 19 s ━" in rows_of(later)[1]
    assert "3,313/4,096" in rows_of(later)[1]


def test_numbers_that_nobody_has_said_are_left_out() -> None:
    points = [Point(time=NOW, step=step) for step in range(3)]
    rows = rows_of(a_picture(a_peer(0, reason=""), last=points[-1]), points, size=(200, 60))
    assert "None" not in "".join(rows)
    assert any(row.startswith(" Loss none yet: it comes with the next global step ──") for row in rows)
    points[1] = Point(time=NOW, step=1, loss=math.inf, heldout_loss=7.5)
    assert any(row.startswith(" Loss held-out 7.5000 at step 1 ──") for row in rows_of(a_picture(), points))


def test_extreme_numbers_of_peers_stay_in_their_columns() -> None:
    huge = a_peer(0, samples=10**40, step=10**30, samples_per_second=1e300, share=math.nan, since=-1e300)
    for size in SIZES:
        rows_of(a_picture(huge, huge), size=size)
    assert " 1.00e+40   nan% 1.00e+300  1.00e+30 training  direct" in "\n".join(rows_of(a_picture(huge)))


def test_losses_of_liars_do_not_end_the_screen() -> None:
    points = [Point(time=NOW, step=number, loss=loss) for number, loss in enumerate((4.5, 1.7e308, -1.7e308, 3.5, 1e9))]
    rows = rows_of(a_picture(a_peer(1)), points)
    assert any("lowest 3.5000 · first 4.5000" in row for row in rows)


def test_the_table_says_how_many_peers_are_left_out() -> None:
    rows = rows_of(a_picture(*map(a_peer, range(2000))))
    (title,) = [row for row in rows if " Peers " in row]
    match = re.match(r" Peers (\d+) shown and ([\d,]+) more ──", title)
    assert match is not None
    num_shown = sum("training" in row for row in rows)
    assert num_shown >= 3
    assert (int(match[1]), int(match[2].replace(",", ""))) == (num_shown, 2000 - num_shown)


def test_warnings_stay_when_other_lines_follow() -> None:
    log = [logged(NOW - 4000, logging.WARNING, "all trainers are behind firewalls")]
    log += [logged(NOW - number, logging.INFO, f"line {number}") for number in range(200, 0, -1)]
    rows = rows_of(a_picture(*map(a_peer, range(20))), log=log)
    assert any("  67 min  WARNING all trainers are behind firewalls" in row for row in rows)
    assert any("    1 s  line 1" in row for row in rows_of(a_picture(*map(a_peer, range(20))), log=log, size=(80, 30)))


def test_the_screen_has_the_same_words_without_color() -> None:
    colored = rows_of(a_picture(a_peer(0)), force_terminal=True, color_system="truecolor")
    plain = rows_of(a_picture(a_peer(0)), force_terminal=True, no_color=True, color_system="truecolor")
    assert any("\x1b[32m" in row for row in colored)
    assert not any(re.search(r"\x1b\[[0-9;]*3[0-7]m", row) for row in plain)
    assert [words_of(row) for row in plain] == [words_of(row) for row in colored]


def words_of(row: str) -> str:
    """A row without colors, and without the part of a bar that is still to come."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", row)
    return " ".join(re.sub("╺━+", "", text).split())


def test_a_chart_goes_from_the_lowest_to_the_highest_value() -> None:
    assert chart_of([1.0, 2.0, 3.0], 1) == ["▁▅█"]
    assert chart_of([1.0, 2.0, 3.0], 2) == [" ▁█", "▁██"]
    assert chart_of([5.0, 5.0], 2) == ["  ", "▁▁"]
    assert columns_of([1.0, 2.0, 3.0], 5) == [1.0, 2.0, 3.0]
    assert columns_of([1.0, 2.0], 5) == [1.0, 1.0, 2.0, 2.0]
    assert columns_of([1.0, 2.0], 100) == [1.0] * 4 + [2.0] * 4
    assert columns_of([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]


def test_two_thousand_peers_and_a_month_of_points_are_drawn_quickly() -> None:
    """Twice a second a screen is drawn."""
    picture = a_picture(*map(a_peer, range(2000)))
    points = POINTS * 20
    rows_of(picture, points, size=(200, 60))
    begin = time.thread_time()
    rows_of(picture, points, size=(200, 60))
    assert time.thread_time() - begin < 0.5


def test_the_summary_of_a_monitor_has_steps_losses_samples_and_peers() -> None:
    heading, lines = card_of(a_picture(a_peer(1), a_peer(2)), POINTS)
    assert heading == "Run 'albert'"
    assert lines == [
        ("step", "1234 global steps of the run"),
        ("loss", "8.9751 at first, 4.0105 at last, over all peers"),
        ("held-out loss", "4.5000 at first, 4.5000 at last"),
        ("samples", "5,123,456 in the steps that this monitor knows"),
        ("peers", "2 in the run; it goes on without this monitor"),
    ]
    _, lines = card_of(a_picture(unit="tokens"), [])
    assert lines[1:] == [
        ("tokens", "5,123,456 in the steps that this monitor knows"),
        ("peers", "0 in the run; it goes on when a trainer joins"),
    ]  # fmt: skip
