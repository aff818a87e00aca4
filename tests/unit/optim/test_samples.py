"""Which samples count in the step after the one that was made without them."""

from __future__ import annotations

import pytest
import torch

from manyhands.averaging.messages import Position
from manyhands.averaging.state.content import Origin
from manyhands.base.identity import PeerId
from manyhands.optim.accumulator import GradientAccumulator
from manyhands.optim.extra_tensors import ExtraTensors
from manyhands.optim.health import Statistics
from manyhands.optim.step.global_step import SampleCounter
from manyhands.optim.step.replica import Replica

ME, OTHER = PeerId("me"), PeerId("other")
BEFORE, AFTER = Position(5, b"before"), Position(6, b"after")
IN_DOUBT, TOO_LATE, ELSEWHERE = "may have made the step with them", "2 steps late", "other parameters"


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
def test_what_is_dropped_and_why(
    since_step: int, was_out: bool, origin: Origin | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    replica = Replica(torch.optim.SGD([parameter], lr=0.5), None)
    samples = SampleCounter(ME, replica, GradientAccumulator([parameter], ExtraTensors()))
    parameter.grad = torch.ones(2)
    samples.add(8, None, 1.0, since_step, is_overflow=False)
    if was_out:
        samples._accumulator.take_back(samples.freeze())
    replica.position, replica.origin = AFTER, origin
    samples.load(BEFORE)
    counts = samples.statistics
    assert (samples.waiting, counts.samples_carried, counts.samples_dropped) == ((0, 0, 8) if reason else (8, 8, 0))
    assert reason in caplog.text


def test_one_sample_is_no_samples() -> None:
    assert Statistics(samples_computed=1, samples_used=1).summary() == (
        "1 sample computed here so far, 1 of them used (100.0%)"
    )
