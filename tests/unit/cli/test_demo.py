"""The outcome of a demo and what it shows, from made-up events."""

from __future__ import annotations

import io
import re
from typing import get_args

import pytest
from rich.cells import cell_len
from rich.console import Console

from manyhands.base.errors import ConfigError
from manyhands.cli.demo.story import DemoOptions, Lie
from manyhands.cli.demo.tally import Tally, TrainerTally
from manyhands.cli.demo.view import NOBODY, SAID, TABLE_WIDTH, DemoView, card_of
from manyhands.cli.output.live_view import console_of
from manyhands.monitor.monitor_events import ProgressMade
from manyhands.recipes.albert.trainer_events import BatchDone, Counts, Finished, Joined, StepDone
from manyhands.testing.lies import LIES


def counts(computed: int, used: int, aborted: int = 0) -> Counts:
    return Counts(computed, used, 0, 1, aborted, 1000)


def good_run() -> Tally:
    killed, steady = TrainerTally("trainer 1", is_killed=True), TrainerTally("trainer 2")
    newcomer = TrainerTally("newcomer", is_newcomer=True)
    tally = Tally([killed, steady, newcomer])
    tally.apply_trainer(killed, Joined("A", 0, 9.0))
    tally.apply_trainer(killed, BatchDone(0, 8.9, 10.0, counts(24, 16, aborted=2)))
    tally.apply_trainer(steady, Joined("B", 0, 9.0))
    tally.apply_trainer(steady, StepDone(1, 8.8, "round-1", 2, counts(40, 40)))
    tally.apply_trainer(newcomer, Joined("C", 1, 8.7))
    tally.apply_trainer(newcomer, StepDone(2, 8.6, "round-2", 2, counts(8, 8)))
    tally.apply_trainer(steady, StepDone(2, 8.6, "round-2", 2, counts(48, 48)))
    for trainer in (steady, newcomer):
        tally.apply_trainer(trainer, Finished(2, 8.5, "digest", trainer.counts))
    return tally


def test_the_summary_of_a_good_run_adds_up() -> None:
    summary = good_run().summary(12.34)
    assert summary.problems == []
    assert (summary.steps, summary.peers_seen, summary.rounds_committed, summary.rounds_aborted) == (2, 3, 2, 2)
    assert (summary.heldout_loss_first, summary.heldout_loss_last) == (9.0, 8.5)
    assert (summary.samples_computed, summary.samples_used) == (80, 72)
    assert summary.samples_per_peer == {"A": 24, "B": 48, "C": 8}
    assert summary.state_digest_per_peer == {"B": "digest", "C": "digest"}
    assert summary.joined_late_samples == 8
    assert summary.wall_s == 12.3


def test_each_broken_promise_is_a_problem() -> None:
    tally = good_run()
    tally.trainers[1].finished = Finished(2, 8.5, "another", counts(1, 1))
    assert tally.summary(1.0).problems == ["the peers ended with different states"]

    tally = good_run()
    tally.trainers[1].finished = Finished(2, 9.5, "digest", counts(1, 1))
    assert "the held-out loss did not fall: 9.0 at first, 9.5 at last" in tally.summary(1.0).problems

    tally = good_run()
    tally.trainers[2].counts = counts(8, 0)
    assert tally.summary(1.0).problems == ["the newcomer contributed nothing"]

    tally = good_run()
    tally.trainers[2].finished = None
    assert tally.summary(1.0).problems == ["newcomer did not finish"]


def test_the_failure_that_ended_the_demo_early_is_the_first_problem() -> None:
    assert good_run().summary(1.0, "trainer 2 ended with exit code 1: out of memory").problems == [
        "trainer 2 ended with exit code 1: out of memory"
    ]


def run_with_liar(lie: Lie, *left_out_of: int, guest_from: int, last_loss: float = 8.5) -> Tally:
    """Six steps from a loss of 9; the others leave the liar out of some of them, and it is a guest from a step on."""
    honest, liar = [TrainerTally("trainer 1"), TrainerTally("trainer 2")], TrainerTally("liar", lie=lie)
    tally = Tally([*honest, liar])
    for trainer, peer_id in zip(tally.trainers, ("A", "B", "L"), strict=True):
        tally.apply_trainer(trainer, Joined(peer_id, 0, 9.0))
        for step in range(1, 7):
            left_out = ["L"] if step in left_out_of else []
            is_member = trainer is not liar or step < guest_from
            made = StepDone(step, 8.8, f"round-{step}", 3, counts(8 * step, 8 * step), left_out, is_member)
            tally.apply_trainer(trainer, made)
    for trainer in honest:
        tally.apply_trainer(trainer, Finished(6, last_loss, "digest", trainer.counts))
    return tally


def test_a_liar_that_was_found_out_is_shown_with_those_who_noticed_and_what_became_of_it() -> None:
    summary = run_with_liar("mean-flip", 4, 5, guest_from=5).summary(12.34)
    assert summary.problems == []
    _, lines = card_of(summary)
    assert lines[3:9] == [
        ("liar", "…L sent minus the means that it computed for the others, from its fourth step on"),
        ("noticed by", "trainer 1, trainer 2; they left it out of step 4, 5"),
        ("standing", "member after step 1, guest after step 5"),
        ("peer …A", "48 samples, 0.0 MB sent, state digest"),
        ("peer …B", "48 samples, 0.0 MB sent, state digest"),
        ("peer …L", "48 samples, 0.0 MB sent, the liar"),
    ]
    assert lines[-1] == ("outcome", "the loss fell, all states are equal, in spite of the liar")


def test_a_flipped_gradient_is_noticed_by_nobody_and_the_summary_says_why() -> None:
    summary = run_with_liar("sign-flip", guest_from=7).summary(1.0)
    assert summary.problems == []
    _, lines = card_of(summary)
    assert lines[4][1].startswith("nobody: a gradient of the usual size")
    assert lines[5] == ("standing", "member after step 1")


def test_a_flipped_gradient_may_undo_what_the_others_learn_but_a_reducer_that_is_left_out_may_not() -> None:
    flipped = run_with_liar("sign-flip", guest_from=7, last_loss=9.1).summary(1.0)
    assert flipped.problems == []
    assert card_of(flipped)[1][-1] == ("outcome", "the liar undid what the others learnt; their states are equal")
    left_out = run_with_liar("mean-flip", 4, 5, guest_from=5, last_loss=9.1).summary(1.0)
    assert left_out.problems == ["the held-out loss did not fall: 9.0 at first, 9.1 at last"]


def test_a_liar_that_keeps_its_standing_although_it_can_be_found_out_is_a_problem() -> None:
    assert run_with_liar("mean-flip", 4, guest_from=7).summary(1.0).problems == [
        "the liar kept its standing; give the others more --steps"
    ]


def test_the_table_shows_the_standing_of_the_liar() -> None:
    console = a_terminal()
    with DemoView(console, run_with_liar("mean-flip", 4, 5, guest_from=5)) as view:
        view.refresh()
        assert next(row for row in drawn(console) if row.startswith("liar")).endswith("guest")


def test_a_liar_needs_a_majority_of_honest_trainers() -> None:
    with pytest.raises(ConfigError, match=r"--peers is 2 with --liar; .* must be at least 3"):
        DemoOptions(peers=2, liar="sign-flip")


def test_each_lie_that_the_demo_offers_can_be_told() -> None:
    assert set(get_args(Lie)) == LIES.keys() == SAID.keys() == NOBODY.keys()


def a_terminal(width: int = 80, height: int = 24) -> Console:
    return Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, force_interactive=True, soft_wrap=True,
        color_system=None, legacy_windows=False,
    )  # fmt: skip


def drawn(console: Console) -> list[str]:
    """The last drawing, row by row."""
    assert isinstance(console.file, io.StringIO)
    drawing = re.split(r"\x1b\[2K|\x1b\[\?25l", console.file.getvalue())[-1]
    return [row.rstrip() for row in re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]", "", drawing).split("\n")]


@pytest.mark.parametrize("planned", [0, 1, 2, 6])
def test_the_bar_has_room_for_more_steps_than_planned(planned: int) -> None:
    tally, console = good_run(), a_terminal()
    tally.planned_steps = planned
    with DemoView(console, tally) as view:
        view.refresh()
        assert f"2 of {max(planned, 2)}" in drawn(console)[0]


def a_run_with_long_numbers() -> Tally:
    tally = good_run()
    for trainer in tally.trainers:
        trainer.joined = Joined("12D3KooWHEYkJt6iFbRLnMGfchM1LSf8ydkrFEAihrVsDKVC8fQL", 0, 9.0)
        trainer.counts = counts(12_345, 12_345)
        trainer.finished = None
    tally.planned_steps = 10
    tally.progress = ProgressMade(2, 120, 256, 3, 123.4, 12.3)
    tally.page = "http://127.0.0.1:31337/?" + 80 * "x"
    return tally


LINE = "[INFO] " + "a line that is longer than the terminal is wide " * 3


@pytest.mark.parametrize("width", [TABLE_WIDTH, 80])
def test_the_demo_fits_a_terminal_of_80_columns_without_wrapping(width: int) -> None:
    console = a_terminal(width)
    with DemoView(console, a_run_with_long_numbers()) as view:
        view.say("trainer 1", LINE)
        view.refresh()
        rows = drawn(console)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert re.search(rf"trainer 1 \| \[INFO\] [^\n]{{{width - 20}}}…\n", said), "a line that is too long is cut"
    assert len(rows) == 7
    for shown in (
        "trainer 1", "trainer 2", "newcomer", "joined late", "training", "killed", "2 of 10",
        "120 of 256, ETA 12.3 s, 3 peers, 123 samples/s",
    ):  # fmt: skip
        assert any(shown in row for row in rows), (shown, rows)
    assert max(map(cell_len, rows)) <= width
    assert sum("…" in row for row in rows) == 4, "three short peer ids, and the page"
    assert said.endswith("\x1b[2K"), "the drawing is gone at the end"


def test_a_narrow_terminal_shows_the_left_part_of_the_table() -> None:
    console = a_terminal(40)
    with DemoView(console, a_run_with_long_numbers()) as view:
        view.refresh()
        rows = drawn(console)
    assert max(map(cell_len, rows)) <= 40
    assert any(row.startswith("trainer 2") and "…VC8fQL" in row for row in rows), rows


def test_a_pipe_has_whole_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook
    pipe = io.StringIO()
    with DemoView(console_of(pipe), a_run_with_long_numbers()) as view:
        view.say("trainer 1", LINE)
        view.refresh()
        view.say("demo", "[half-way]")
    assert pipe.getvalue() == f"trainer 1 | {LINE}\n     demo | [half-way]\n"


def test_the_summary_says_how_it_went() -> None:
    heading, lines = card_of(good_run().summary(12.34))
    assert heading == "The run"
    assert lines == [
        ("held-out loss", "9.0000 before, 8.5000 after 2 global steps"),
        ("samples", "80 computed, 72 used"),
        ("rounds", "2 committed, 2 aborted attempts"),
        ("newcomer", "8 of its samples were used"),
        ("peer …A", "24 samples, 0.0 MB sent, killed on the way"),
        ("peer …B", "48 samples, 0.0 MB sent, state digest"),
        ("peer …C", "8 samples, 0.0 MB sent, state digest"),
        ("wall time", "12.3 s"),
        ("outcome", "the loss fell, all states are equal, the newcomer contributed"),
    ]
    _, lines = card_of(Tally([TrainerTally("trainer 1")]).summary(0.0, "out of memory"))
    assert ("problem", "out of memory") in lines
    assert not any(name == "outcome" for name, _ in lines)


def test_a_run_in_which_nothing_happened_has_problems_and_no_crash() -> None:
    assert len(Tally([TrainerTally("trainer 1")]).summary(0.0).problems) == 3
