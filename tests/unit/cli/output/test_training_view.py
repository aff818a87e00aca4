"""What a volunteer sees of a trainer, from made-up numbers."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from manyhands.base.errors import ManyhandsError
from manyhands.cli.output.card import print_card
from manyhands.cli.output.training_view import card_of, line_of, run_in_view
from manyhands.recipes.albert.summary import HeldoutLosses, Standing, TrainingSummary

STANDING = Standing(
    step=3, samples=128, target_batch_size=256, eta_s=12.3, num_peers=3, is_averaging=False, share=0.333,
    loss=7.1234, samples_per_second=41.27,
)  # fmt: skip
ACCOUNT = TrainingSummary(
    run_id="demo", seconds=723.0, step=318, num_steps=118, samples_used=4096, samples_counted=4096,
    samples_of_all=16384, first_loss=8.321, last_loss=6.51, samples_lost=0, is_alone=False, saved_step=318,
    heldout=HeldoutLosses(before=8.31, after=6.49, num_samples=64),
    folder=Path("my model"), checkpoint=Path("my model/checkpoint-318"),
)  # fmt: skip


def shown(standing: Standing, width: int) -> str:
    """The line as it stands in a terminal without colors."""
    file = io.StringIO()
    console = Console(file=file, width=width, soft_wrap=True)
    console.print(line_of(standing, width))
    (line,) = file.getvalue().splitlines()
    return line


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (
            120,
            "Step 4: 128/256 samples ━━━━━━━━━━━━━━━━━                  "
            "ETA 12 s, 3 peers, your share 33%, loss 7.123, 41.3 samples/s",
        ),
        (80, "Step 4: 128/256 samples ━━━━━      ETA 12 s, 3 peers, your share 33%, loss 7.123"),
        (60, "Step 4: 128/256 samples ━━━━━━━━━          ETA 12 s, 3 peers"),
        (40, "Step 4: 128/256 samples ━━━╸    ETA 12 s"),
    ],
)
def test_the_line_says_how_far_the_next_step_is_in_whole_words(width: int, line: str) -> None:
    assert shown(STANDING, width) == line


@pytest.mark.parametrize("width", [10, 20, 30, 60, 80, 90, 100, 200])
def test_the_line_never_wraps(width: int) -> None:
    assert len(shown(STANDING, width)) <= width


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eta_s": math.inf, "loss": None}, "ETA unknown, 3 peers, your share 33%, 41.3 samples/s"),
        ({"num_peers": 1}, "1 peer, "),
        ({"eta_s": 0.0, "samples": 256}, "━━━━ step is due, 3 peers, "),
        ({"eta_s": 0.0, "samples": 300, "is_averaging": True}, "━━━━ averaging, "),
    ],
)
def test_the_line_says_unknown_due_and_averaging_in_words(changes: dict[str, object], words: str) -> None:
    assert words in shown(replace(STANDING, **changes), 120)  # type: ignore[arg-type]


def test_before_the_first_batch_no_speed_is_shown() -> None:
    assert shown(replace(STANDING, loss=None, samples_per_second=0.0), 120).endswith("your share 33%")


def test_the_card_has_the_part_of_the_trainer_and_where_its_model_is() -> None:
    heading, lines = card_of(ACCOUNT)
    assert heading == "Your part in run 'demo', 12 min"
    assert dict(lines) == {
        "steps": "118 global steps with you; the run is at step 318",
        "samples": "4096 of yours, 25.0% of all 16384 in these steps",
        "loss": "8.3210 at first, 6.5100 at last, on your samples",
        "held-out loss": "8.3100 before, 6.4900 after, on 64 samples that nobody trains on",
        "model": "my model/checkpoint-318",
        "try it": "manyhands fill 'my model' \"The capital of [MASK] is ...\"",
    }


def test_the_card_says_where_there_is_no_model() -> None:
    _, lines = card_of(replace(ACCOUNT, folder=None, checkpoint=None))
    assert dict(lines)["model"] == "not saved, as --no-checkpoints says"
    assert "try it" not in dict(lines)
    _, lines = card_of(replace(ACCOUNT, checkpoint=None, is_alone=True))
    assert dict(lines)["model"] == "not saved yet; the next start with my model begins anew"


def test_the_card_of_a_trainer_without_the_state_says_that_nothing_is_saved() -> None:
    _, lines = card_of(
        replace(ACCOUNT, step=0, num_steps=0, samples_used=0, samples_counted=0, samples_of_all=0, checkpoint=None)
    )
    assert dict(lines)["steps"] == "0 global steps with you; the model here is at step 0"
    assert dict(lines)["model"] == "not saved yet; the next start with my model loads the state of the others"


def test_a_trainer_that_made_no_step_has_a_card() -> None:
    nothing = replace(
        ACCOUNT,
        num_steps=0,
        samples_used=0,
        samples_counted=0,
        samples_of_all=0,
        first_loss=None,
        last_loss=None,
        heldout=None,
    )
    _, lines = card_of(nothing)
    assert dict(lines)["samples"] == "0 of yours"
    assert not {"loss", "held-out loss"} & dict(lines).keys()


def test_the_card_of_a_trainer_that_was_ended_before_its_first_step_tells_no_progress() -> None:
    unchanged = HeldoutLosses(before=9.0459, after=9.0459, num_samples=64)
    _, lines = card_of(replace(ACCOUNT, step=0, num_steps=0, first_loss=9.0421, last_loss=9.0421, heldout=unchanged))
    assert dict(lines)["loss"] == "9.0421 on your samples, before a step with them"
    assert "held-out loss" not in dict(lines)


def test_samples_of_an_unfinished_step_are_told_apart() -> None:
    _, lines = card_of(
        replace(ACCOUNT, num_steps=0, samples_used=0, samples_counted=0, samples_of_all=0, samples_lost=257)
    )
    assert dict(lines)["samples"] == "0 of yours; 257 of a step that was not finished are lost"
    _, lines = card_of(replace(ACCOUNT, samples_lost=1))
    assert dict(lines)["samples"] == (
        "4096 of yours, 25.0% of all 16384 in these steps; 1 of a step that was not finished is lost"
    )


def test_the_share_of_a_peer_over_the_limits_is_that_of_what_counted() -> None:
    _, lines = card_of(replace(ACCOUNT, samples_used=41472, samples_counted=4932, samples_of_all=13152))
    assert dict(lines)["samples"] == "41472 of yours, which counted for 4932, 37.5% of all 13152 in these steps"


def test_the_command_of_the_card_is_one_line_that_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    print_card(card_of(ACCOUNT))
    assert "  try it         manyhands fill 'my model' \"The capital of [MASK] is ...\"\n" in capsys.readouterr().out


class ATrainer:
    def __init__(self, end: type[BaseException] | None, summary: TrainingSummary = ACCOUNT) -> None:
        self._end = end
        self._summary = summary

    def run(self) -> None:
        if self._end is not None:
            raise self._end

    def standing(self) -> Standing:
        return STANDING

    def summary(self) -> TrainingSummary:
        return self._summary


@pytest.mark.parametrize(("end", "has_card"), [(None, True), (KeyboardInterrupt, True), (ValueError, False)])
def test_the_card_comes_at_the_end_and_at_ctrl_c(
    end: type[BaseException] | None, has_card: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if end is None:
        run_in_view(ATrainer(end))
    else:
        with pytest.raises(end):
            run_in_view(ATrainer(end))
    assert ("Your part in run 'demo'" in capsys.readouterr().out) is has_card


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"saved_step": 300, "checkpoint": Path("my model/checkpoint-300")}, "checkpoint-300; step 318 was not saved"),
        ({"saved_step": 0, "checkpoint": None}, "not saved yet"),
    ],
)
def test_a_trainer_that_could_not_save_its_model_fails_after_its_card(
    saved: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = replace(ACCOUNT, **saved)  # type: ignore[arg-type]
    with pytest.raises(ManyhandsError, match="the model of step 318 was not saved in my model; the log says why"):
        run_in_view(ATrainer(None, summary))
    assert words in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        run_in_view(ATrainer(KeyboardInterrupt, summary))
    run_in_view(ATrainer(None, replace(summary, folder=None)))
