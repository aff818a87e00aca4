"""The outcome of a demo, from made-up events."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from manyhands.cli.demo.command import fits
from manyhands.cli.demo.tally import Tally, TrainerTally
from manyhands.cli.demo.view import MIN_WIDTH, LiveDemoView
from manyhands.monitor.events import ProgressMade
from manyhands.recipes.albert.events import BatchDone, Counts, Finished, Joined, StepDone


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


def test_a_good_run_adds_up() -> None:
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


def test_what_ended_the_story_early_is_the_first_problem() -> None:
    assert good_run().summary(1.0, "trainer 2 ended with exit code 1: out of memory").problems == [
        "trainer 2 ended with exit code 1: out of memory"
    ]


@pytest.mark.parametrize("planned", [0, 1, 2, 6])
def test_the_bar_never_ends_beyond_its_end(planned: int) -> None:
    tally = good_run()
    tally.planned_steps = planned
    console = Console(width=200, record=True, file=io.StringIO())
    view = LiveDemoView(console)
    with view:
        view.refresh(tally)
    assert f"2 of {max(planned, 2)}" in console.export_text()


@pytest.mark.parametrize("width", [MIN_WIDTH, 80])
def test_nothing_wraps_and_nothing_is_cut_in_a_terminal_of_80_columns(width: int) -> None:
    tally = good_run()
    for trainer in tally.trainers:
        trainer.joined = Joined("12D3KooWHEYkJt6iFbRLnMGfchM1LSf8ydkrFEAihrVsDKVC8fQL", 0, 9.0)
        trainer.counts = counts(12_345, 12_345)
        trainer.finished = None
    tally.planned_steps = 10
    tally.progress = ProgressMade(2, 120, 256, 3, 123.4, 12.3)
    tally.page = "http://127.0.0.1:31337/?" + 80 * "x"
    console = Console(width=width, height=24, record=True, file=io.StringIO())
    view = LiveDemoView(console)
    with view:
        view.say("trainer 1", "a line")
        view.refresh(tally)
    lines = console.export_text().splitlines()
    assert len(lines) <= 24
    for shown in (
        "trainer 1", "trainer 2", "newcomer", "joined late", "training", "killed", "2 of 10",
        "120 of 256, ETA 12.3 s, 3 peers, 123 samples/s",
    ):  # fmt: skip
        assert any(shown in line for line in lines), (shown, lines)
    assert sum("…" in line for line in lines) == 4, "three short peer ids, and the page"


def test_a_run_in_which_nothing_happened_has_problems_and_no_crash() -> None:
    assert len(Tally([TrainerTally("trainer 1")]).summary(0.0).problems) == 3


def test_the_live_view_needs_a_terminal_that_is_wide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert fits(Console(force_terminal=True, width=80))
    assert not fits(Console(force_terminal=True, width=40)), "its columns had one character each"
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert not fits(Console(force_terminal=True, width=80)), "as FORCE_COLOR does in a notebook"
