"""What becomes of the samples of a peer: the table at the head of ``optim/step/global_step.py``, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.averaging.messages import Position, RoundManifest
from manyhands.averaging.rounds import CommittedRound
from manyhands.averaging.state.content import Origin
from manyhands.base.errors import RoundAborted
from manyhands.base.identity import PeerId
from manyhands.optim.accumulator import GradientAccumulator
from manyhands.optim.extra_tensors import ExtraTensors
from manyhands.optim.run.step_rounds import Averaged, LacksMeans
from manyhands.optim.step.global_step import GlobalStep, SampleCounter, Statistics
from manyhands.optim.step.replica import Replica

ME, OTHER = PeerId("me"), PeerId("other")
BEFORE, AFTER = Position(5, b"before"), Position(6, b"after")
IN_DOUBT, TOO_LATE, ELSEWHERE = "may have made the step with them", "2 steps late", "other parameters"
SAMPLES = 8


class Trainer:
    """A peer at step 5 without a network."""

    def __init__(self, optimizer_type: type[torch.optim.SGD] = torch.optim.SGD) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.replica = Replica(optimizer_type([self.parameter], lr=0.5), None)
        self.replica.position = BEFORE
        self.accumulator = GradientAccumulator([self.parameter], ExtraTensors())
        self.samples = SampleCounter(ME, self.replica, self.accumulator)

    def batch(self, gradient: float = 1.0, *, at_step: int = BEFORE.step, is_overflow: bool = False) -> None:
        self.parameter.grad = torch.full((2,), gradient)
        self.samples.add(SAMPLES, None, 1.0, at_step, is_overflow=is_overflow)

    def begin(self) -> GlobalStep:
        return GlobalStep(self.replica, self.samples.freeze())

    def make(self, step: GlobalStep, mean: float = 0.5, *, counts_for: float = SAMPLES, **outcome: Any) -> None:
        """The group makes the step, in which this peer counts for so many samples."""
        contributors = [OTHER] if outcome.get("is_left_out") else [ME, OTHER]
        weights = [float(peer_id in contributors) for peer_id in (ME, OTHER)]
        manifest = RoundManifest(bytes(32), step.left_from, 1, [ME, OTHER], weights, [0, 0], bytes(32))
        shares = {peer_id: counts_for if peer_id == ME else float(SAMPLES) for peer_id in contributors}
        mean_N = torch.tensor([mean, mean, 1.0])
        samples = round(sum(shares.values()))
        step.outcome = Averaged(mean_N, AFTER.lineage, samples, manifest, shares=shares, **outcome)
        step.advance()

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The samples that wait, were used, carried and dropped."""
        told = self.samples.statistics
        assert told.samples_computed == told.samples_used + told.samples_dropped + self.samples.waiting
        return self.samples.waiting, told.samples_used, told.samples_carried, told.samples_dropped


class Refusing(torch.optim.SGD):
    """Raises in a step."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("not today")


WAIT, USED, CARRIED, DROPPED = (8, 0, 0, 0), (0, 8, 0, 0), (8, 0, 8, 0), (0, 0, 0, 8)


@pytest.mark.parametrize("gradient", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("is_overflow", [False, True])
def test_a_batch_waits_unless_its_gradients_are_not_finite(gradient: float, is_overflow: bool) -> None:
    trainer = Trainer()
    trainer.batch(gradient, is_overflow=is_overflow)
    assert trainer.counts == (WAIT if gradient == 1.0 and not is_overflow else DROPPED)


def test_a_batch_that_is_dropped_leaves_those_that_wait() -> None:
    trainer = Trainer()
    trainer.batch()
    trainer.batch(float("nan"))
    assert trainer.counts == (8, 0, 0, 8)


@pytest.mark.parametrize("error", [None, RoundAborted("the leader has left")])
def test_samples_of_an_attempt_without_an_average_wait_for_the_next_one(error: RoundAborted | None) -> None:
    trainer = Trainer()
    trainer.batch()
    step = trainer.begin()
    assert trainer.samples.waiting == 0
    step.error = error  # None after an interrupt
    trainer.samples.end(step)
    assert trainer.counts == WAIT
    assert trainer.accumulator.was_out


@pytest.mark.parametrize(
    ("weight", "is_outsized", "counts", "origin"),
    [
        (8.0, False, (8, 8, 8, 0), [ME, OTHER]),
        (0.0, False, (16, 0, 16, 0), [OTHER]),
        (0.0, True, (8, 0, 8, 8), [OTHER]),
    ],
    ids=["they are in the step", "they are not", "they were too large"],
)
def test_samples_of_a_committed_round_are_told_by_its_manifest_though_this_peer_lacks_the_means(
    weight: float, is_outsized: bool, counts: tuple[int, ...], origin: list[PeerId]
) -> None:
    """And the batch after it, before this peer has got the step, counts in the next one."""
    trainer = Trainer()
    trainer.batch()
    step = trainer.begin()
    manifest = RoundManifest(bytes(32), BEFORE, 1, [ME, OTHER], [weight, 8.0], [0, 0], bytes(32))
    step.error = LacksMeans(CommittedRound(None, manifest, 1.0, is_outsized=is_outsized), ME)
    trainer.samples.end(step)
    trainer.batch()
    trainer.replica.position, trainer.replica.origin = AFTER, Origin(BEFORE, origin)
    trainer.samples.load(BEFORE)
    assert trainer.counts == counts
    assert trainer.samples.statistics.samples_counted == weight


def test_samples_wait_where_the_update_was_not_begun() -> None:
    """An interrupt came after the round. The others may have counted them: then a state is loaded that says so."""
    trainer = Trainer()
    trainer.batch()
    step = trainer.begin()
    step.use_own_gradient(ME, can_lead=True)
    trainer.samples.end(step)
    assert trainer.counts == WAIT


@pytest.mark.parametrize("is_left_out", [False, True])
def test_an_update_that_raises_drops_only_samples_that_are_in_it(
    is_left_out: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(Refusing)
    trainer.batch()
    step = trainer.begin()
    with pytest.raises(RuntimeError, match="not today"):
        trainer.make(step, is_left_out=is_left_out)
    trainer.samples.end(step)
    assert trainer.counts == (WAIT if is_left_out else DROPPED)
    assert ("the update of global step 6 broke off" in caplog.text) != is_left_out


@pytest.mark.parametrize(
    ("outcome", "mean", "counts", "reason"),
    [
        ({}, 0.5, USED, ""),
        ({}, float("inf"), DROPPED, "global step 6 changes nothing: the averaged gradient is not finite"),
        ({"is_left_out": True}, 0.5, CARRIED, ""),
        ({"is_left_out": True}, float("inf"), CARRIED, ""),
        ({"is_left_out": True, "is_outsized": True}, 0.5, DROPPED, "far too large, or not finite"),
        ({"is_left_out": True, "is_in_grid": True}, 0.5, DROPPED, IN_DOUBT),  # nobody knows all contributors
    ],
)
def test_each_kind_of_samples_has_its_fate_when_the_step_is_made(
    outcome: dict[str, bool], mean: float, counts: tuple[int, ...], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    trainer.batch()
    step = trainer.begin()
    trainer.make(step, mean, **outcome)
    trainer.samples.end(step)
    assert trainer.counts == counts
    assert reason in caplog.text


def test_a_step_alone_uses_what_waits() -> None:
    trainer = Trainer()
    trainer.batch()
    step = trainer.begin()
    step.use_own_gradient(ME, can_lead=True)
    step.advance()
    trainer.samples.end(step)
    assert trainer.counts == USED


def test_samples_left_out_of_two_steps_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    trainer.batch()
    for _ in range(2):
        step = trainer.begin()
        trainer.make(step, is_left_out=True)
        trainer.samples.end(step)
    assert trainer.counts == (0, 0, 8, 8)
    assert TOO_LATE in caplog.text


@pytest.mark.parametrize(
    ("since_step", "was_out", "origin", "reason"),
    [
        (5, False, Origin(BEFORE), ""),
        (5, False, Origin(BEFORE, [ME]), ""),  # it has brought nothing of these: the step has others of its samples
        (5, True, Origin(BEFORE, [OTHER]), ""),
        (5, True, Origin(BEFORE, [OTHER, ME]), IN_DOUBT),
        (5, True, Origin(BEFORE, None), IN_DOUBT),
        (4, False, Origin(BEFORE, [OTHER]), TOO_LATE),
        (5, False, None, ELSEWHERE),
        (5, False, Origin(Position(5, b"another branch"), [OTHER]), ELSEWHERE),
        (5, False, Origin(AFTER, [OTHER]), ELSEWHERE),
    ],
)
def test_which_samples_wait_after_a_state_was_loaded_and_why_others_do_not(
    since_step: int, was_out: bool, origin: Origin | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    trainer.batch(at_step=since_step)
    if was_out:
        trainer.samples.end(trainer.begin())
    trainer.replica.position, trainer.replica.origin = AFTER, origin
    trainer.samples.load(BEFORE)
    assert trainer.counts == (DROPPED if reason else CARRIED)
    assert reason in caplog.text


def test_no_samples_are_neither_carried_nor_dropped(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    for origin in (Origin(BEFORE, [OTHER]), None):
        trainer.replica.position, trainer.replica.origin = AFTER, origin
        trainer.samples.load(BEFORE)
    assert trainer.counts == (0, 0, 0, 0)
    assert not caplog.text


def test_samples_are_dropped_for_a_checkpoint_or_drifted_parameters(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    trainer.batch()
    trainer.samples.drop_waiting("a checkpoint was loaded")
    assert trainer.counts == DROPPED
    assert "Dropped 8 samples: a checkpoint was loaded" in caplog.text


@pytest.mark.parametrize("counts_for", [3.0, SAMPLES])
def test_a_peer_over_the_limits_counts_for_less_and_its_share_is_that_of_what_counted(counts_for: float) -> None:
    trainer = Trainer()
    trainer.batch()
    step = trainer.begin()
    trainer.make(step, counts_for=counts_for)
    trainer.samples.end(step)
    assert trainer.counts == USED, "all of them are in the step"
    assert trainer.samples.statistics.samples_counted == counts_for


def test_samples_count_in_full_in_a_step_alone() -> None:
    trainer = Trainer()
    trainer.batch()
    step = trainer.begin()
    step.use_own_gradient(ME, can_lead=True)
    step.advance()
    trainer.samples.end(step)
    assert trainer.samples.statistics.samples_counted == SAMPLES


def test_the_summary_of_one_sample_is_in_the_singular() -> None:
    assert Statistics(samples_computed=1, samples_used=1).summary() == (
        "1 sample computed here so far, 1 of them used (100.0%)"
    )
