from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.averaging.messages import RoundManifest
from manyhands.base.identity import PeerId
from manyhands.optim.accumulator import Contribution, GradientAccumulator
from manyhands.optim.extra_tensors import ExtraTensors
from manyhands.optim.run.drift import Sketch
from manyhands.optim.run.step_rounds import Averaged
from manyhands.optim.step.global_step import GlobalStep, SampleCounter
from manyhands.optim.step.replica import Replica

OWN_N = torch.tensor([4.0, 4.0, 1.0])
AVERAGE_N = torch.tensor([2.0, 2.0, 1.0])


class Refusing(torch.optim.SGD):
    """Raises in a step."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("not today")


class Remembering(torch.optim.SGD):
    """Keeps the gradient of its last step, as some optimizers do."""

    last: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        type(self).last = self.param_groups[0]["params"][0].grad
        return super().step(closure)


def new_step(optimizer_type: type[torch.optim.SGD] = torch.optim.SGD) -> tuple[torch.nn.Parameter, GlobalStep]:
    parameter = torch.nn.Parameter(torch.ones(2))
    replica = Replica(optimizer_type([parameter], lr=0.5), None)
    return parameter, GlobalStep(replica, Contribution(OWN_N.clone(), 8, 8.0))


def commit(step: GlobalStep, *, is_left_out: bool = False) -> None:
    weights = [0.0 if is_left_out else 8.0, 8.0]
    manifest = RoundManifest(bytes(32), step.left_from, 1, [PeerId("me"), PeerId("other")], weights, [0, 0], bytes(32))
    step.outcome = Averaged(AVERAGE_N.clone(), b"there", 16, manifest, is_left_out=is_left_out)


def told_by(step: GlobalStep) -> Sketch:
    """The sketch that the others are told."""
    told: list[Any] = []
    collaboration: Any = SimpleNamespace(move=lambda *arguments: told.extend(arguments))
    step.announce(collaboration)
    return next(one for one in told if isinstance(one, Sketch))


def test_a_contribution_that_the_group_left_out_counts_in_the_next_step() -> None:
    """It counts in the next one."""
    parameter, step = new_step()
    commit(step, is_left_out=True)
    step.advance()
    assert parameter.tolist() == [0.0, 0.0]
    assert torch.equal(step.contribution.mean_N, OWN_N)


def test_an_optimizer_may_remember_the_gradient_that_it_was_given() -> None:
    parameter, step = new_step(Remembering)
    commit(step)
    step.advance()
    step.contribution.mean_N.fill_(9.0)  # as the next batches do
    assert Remembering.last is not None
    assert Remembering.last.tolist() == [2.0, 2.0]
    assert parameter.tolist() == [0.0, 0.0]


def test_a_step_alone_has_this_peers_gradient() -> None:
    parameter, step = new_step()
    step.use_own_gradient(PeerId("me"), can_lead=True)
    step.advance()
    assert parameter.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("is_left_out", [False, True])
def test_an_optimizer_that_raises_spoils_only_what_was_in_the_average(is_left_out: bool) -> None:
    parameter, step = new_step(Refusing)
    commit(step, is_left_out=is_left_out)
    with pytest.raises(RuntimeError, match="not today"):
        step.advance()
    assert step.is_spoiled != is_left_out
    assert parameter.tolist() == [1.0, 1.0]
    if is_left_out:
        assert torch.equal(step.contribution.mean_N, OWN_N)


def test_moving_a_schedule_does_not_repeat_warnings_of_the_user() -> None:
    """Whoever changes the filters of warnings, if only for a moment, has Python forget which ones it has shown."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    replica = Replica(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("of a user", UserWarning, stacklevel=1)
            replica.advance(AVERAGE_N.clone(), Averaged(None, b"there", 16))
    assert [str(warning.message) for warning in shown] == ["of a user"]


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_refused_update_drops_only_samples_that_were_in_it(is_left_out: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    replica = Replica(torch.optim.SGD([parameter], lr=0.5), None)
    samples = SampleCounter(PeerId("me"), replica, GradientAccumulator([parameter], ExtraTensors()))
    parameter.grad = torch.full((2,), 4.0)
    samples.add(8, None, 1.0, 0, is_overflow=False)
    step = GlobalStep(replica, samples.freeze())
    weights = [0.0 if is_left_out else 8.0, 8.0]
    manifest = RoundManifest(bytes(32), step.left_from, 1, [PeerId("me"), PeerId("other")], weights, [0, 0], bytes(32))
    not_finite_N = torch.tensor([float("inf"), 2.0, 1.0])
    shares = manifest.contributors()
    step.outcome = Averaged(not_finite_N, b"there", 16, manifest, shares=shares, is_left_out=is_left_out)
    step.advance()
    assert step.refusal
    assert told_by(step) == replica.sketch(), "it is told all the same"
    samples.end(step)
    assert (samples.waiting, samples.statistics.samples_dropped) == ((8, 0) if is_left_out else (0, 8))
    assert parameter.tolist() == [1.0, 1.0]


def test_a_step_publishes_a_sketch_unless_the_peer_is_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    replica = Replica(torch.optim.SGD([parameter], lr=0.5), None)
    step = GlobalStep(replica, Contribution(OWN_N.clone(), 8, 8.0))
    commit(step)
    step.advance()
    assert told_by(step) == replica.sketch()
    with torch.no_grad():
        parameter.add_(1.0)
    assert told_by(step) != replica.sketch(), "it is of the parameters as the step has left them"
    _, alone = new_step()
    alone.use_own_gradient(PeerId("me"), can_lead=True)
    alone.advance()
    assert told_by(alone).sums == b""
