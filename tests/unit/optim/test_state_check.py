"""States that another peer sends and that must not be trained on."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.optim.lr_scheduler as schedules
from transformers import get_linear_schedule_with_warmup

from manyhands.averaging.messages import Position
from manyhands.averaging.state.content import State, StateHeader, sealed, state_of
from manyhands.base.errors import ConfigError
from manyhands.optim.lamb import Lamb
from manyhands.optim.options import SchedulerMaker, made_scheduler
from manyhands.optim.state.state import Scalars
from manyhands.optim.step.replica import Replica

Spoil = Callable[[Scalars, list[torch.Tensor]], None]


class Counting(torch.optim.AdamW):
    """Keeps numbers among its options, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update(k=0, d=1e-6)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.update(k=group["k"] + 1, d=group["d"] * 2)
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "AMSGrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "LAMB": lambda params: Lamb(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "one that counts": lambda params: Counting(params, lr=0.1),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], schedules.LRScheduler]] = {
    "linear": lambda inner: schedules.LinearLR(inner, 0.5, total_iters=10),
    "lambda": lambda inner: schedules.LambdaLR(inner, lambda step: 1 / (1 + step)),
    "multiplicative": lambda inner: schedules.MultiplicativeLR(inner, lambda step: 0.9),
    "steps": lambda inner: schedules.MultiStepLR(inner, [2, 4]),
    "exponential": lambda inner: schedules.ExponentialLR(inner, 0.9),
    "cosine": lambda inner: schedules.CosineAnnealingLR(inner, T_max=5),
    "warm restarts": lambda inner: schedules.CosineAnnealingWarmRestarts(inner, T_0=3, T_mult=2),
    "polynomial": lambda inner: schedules.PolynomialLR(inner, 10),
    "one cycle": lambda inner: schedules.OneCycleLR(inner, 0.2, total_steps=20),
    "cyclic": lambda inner: schedules.CyclicLR(inner, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "one after the other": lambda inner: schedules.SequentialLR(
        inner, [schedules.LinearLR(inner, 0.1, total_iters=3), schedules.CosineAnnealingLR(inner, 5)], [3]
    ),
    "chained": lambda inner: schedules.ChainedScheduler(
        [schedules.ConstantLR(inner, 0.1, total_iters=3), schedules.ExponentialLR(inner, 0.9)]
    ),
    "of transformers": lambda inner: get_linear_schedule_with_warmup(inner, 3, 10),
}


def replica_of(
    kind: str, *, num_steps: int = 1, is_scheduled: bool = False, schedule: SchedulerMaker | None = None
) -> Replica:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if is_scheduled:
        schedule = SCHEDULES["linear"]
    replica = Replica(optimizer, made_scheduler(schedule, optimizer))
    for _ in range(num_steps):
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        if replica.scheduler is not None:
            replica.scheduler.step()
    replica.position = Position(num_steps, b"there")
    return replica


def spoilt(replica: Replica, spoil: Spoil, **header: Any) -> State:
    state = replica.capture()
    scalars = msgspec.msgpack.decode(state.header.scalars, type=Scalars)
    tensors = [tensor.clone() for tensor in state.tensors]
    spoil(scalars, tensors)
    specs = [
        msgspec.structs.replace(spec, shape=tuple(tensor.shape))
        for spec, tensor in zip(state.header.tensors, tensors, strict=True)
    ]
    fields = {"position": Position(1, b"there"), "lineage_samples": 8, **header}
    encoded = msgspec.msgpack.encode(scalars, order="sorted")
    return sealed(state_of(StateHeader(tensors=specs, scalars=encoded, digest=b"", **fields), tensors))


def with_option(name: str, value: Any) -> Spoil:
    def spoil(scalars: Scalars, tensors: list[torch.Tensor]) -> None:
        scalars.groups[0][name] = value

    return spoil


def with_tensor(number: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(scalars: Scalars, tensors: list[torch.Tensor]) -> None:
        tensors[number] = change(tensors[number])

    return spoil


def as_it_is(scalars: Scalars, tensors: list[torch.Tensor]) -> None:
    pass


def in_schedule(name: str, value: Any) -> Spoil:
    def spoil(scalars: Scalars, tensors: list[torch.Tensor]) -> None:
        scalars.scheduler[name] = value

    return spoil


def no_schedule(scalars: Scalars, tensors: list[torch.Tensor]) -> None:
    scalars.scheduler.clear()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_good_state_is_taken_over(kind: str, is_scheduled: bool, num_steps: int) -> None:
    there = replica_of(kind, num_steps=num_steps, is_scheduled=is_scheduled)
    here = replica_of(kind, num_steps=0, is_scheduled=is_scheduled)
    here.restore(there.capture())
    assert here.capture().header.digest == there.capture().header.digest


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_steps", [0, 1, 9])
def test_a_state_whose_scheduled_options_do_not_fit_its_schedule_is_refused(name: str, num_steps: int) -> None:
    there = replica_of("Adam", num_steps=num_steps, schedule=SCHEDULES[name])
    here = replica_of("Adam", num_steps=3, schedule=SCHEDULES[name])
    here.restore(there.capture())
    assert here.capture().header.digest == there.capture().header.digest
    lr = there.optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match="its option 'lr' is"):
        here.restore(spoilt(there, with_option("lr", lr + 0.01), position=there.position))


FAULTS: dict[str, tuple[Spoil, str]] = {
    "parameters of NaN": (with_tensor(0, lambda tensor: tensor * math.nan), "not finite"),
    "an infinite statistic": (with_tensor(2, lambda tensor: tensor + math.inf), "not finite"),
    "maximize": (with_option("maximize", value=True), "its option 'maximize' is True, and False in the run"),
    "a learning rate of NaN": (with_option("lr", math.nan), "its option 'lr' is nan, and 0.1 in the run"),
    "another learning rate": (with_option("lr", 50.0), "its option 'lr' is 50.0, and 0.1 in the run"),
    "exp_avg of no values": (with_tensor(2, lambda tensor: torch.empty(0)), "of shape [0], and must be floating-point"),
    "squares below 0": (with_tensor(3, lambda tensor: -tensor - 1), "has a value below 0"),
    "steps below 0": (with_tensor(4, lambda tensor: tensor - 9), "'step' of parameter 0 is -8.0, which is not a count"),
}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (with_option("d", math.inf), "its option 'd' is inf"),
        (with_option("d", "1"), "its option 'd' is '1'"),
        (with_option("lr", 50.0), "its option 'lr' is 50.0, and 0.1 in the run"),
        (with_option("other", "1"), "its option 'other' is '1', and None in the run"),
    ],
)
def test_an_optimizer_of_an_unknown_kind_may_have_numbers_of_its_own_and_no_more(option: Spoil, words: str) -> None:
    there, here = replica_of("one that counts", num_steps=3), replica_of("one that counts", num_steps=0)
    with pytest.raises(ValueError, match=re.escape(words)):
        here.restore(spoilt(there, option))
    assert here.optimizer.param_groups[0]["k"] == 0


def test_a_number_that_appears_in_a_step_is_no_reason_to_refuse_and_not_taken_over() -> None:
    """As Prodigy's ``d_denom``, which it computes anew in each step."""
    there, here = replica_of("one that counts", num_steps=3), replica_of("one that counts", num_steps=0)
    here.restore(spoilt(there, with_option("d_denom", 0.5), position=there.position))
    assert here.optimizer.param_groups[0]["k"] == 3
    assert "d_denom" not in here.optimizer.param_groups[0]


def test_an_optimizer_of_torch_has_no_numbers_of_its_own() -> None:
    there, here = replica_of("Adam", num_steps=1), replica_of("Adam", num_steps=0)
    with pytest.raises(ValueError, match="its option 'd' is"):
        here.restore(spoilt(there, with_option("d", 0.5)))
    there, here = replica_of("RMSprop", num_steps=3), replica_of("RMSprop", num_steps=0)
    with pytest.raises(ValueError, match="its option 'alpha' is"):
        here.restore(spoilt(there, with_option("alpha", 0.5)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_state_changes_nothing_and_is_refused_with_the_reason(fault: str) -> None:
    spoil, words = FAULTS[fault]
    there, here = replica_of("Adam", num_steps=1), replica_of("Adam", num_steps=2)
    before = here.capture().header
    with pytest.raises(ValueError, match="." if words is None else None) as caught:
        here.restore(spoilt(there, spoil))
    assert words in str(caught.value)
    assert here.capture().header == before


def test_a_state_without_a_statistic_is_refused() -> None:
    there, here = replica_of("Adam"), replica_of("Adam")
    state = there.capture()
    header = msgspec.structs.replace(state.header, tensors=state.header.tensors[:-1])
    with pytest.raises(ValueError, match="statistic 'step' of parameter 1 is missing"):
        here.restore(state_of(header, state.tensors[:-1]))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (with_option("lr", math.nan), "its option 'lr' is nan, and 0.055"),
        (with_option("weight_decay", 1e4), "its option 'weight_decay' is 10000.0, and 0 in the run"),
        (with_option("betas", [0.0, 0.0]), "its option 'betas' is"),
        (with_option("eps", 1.0), "its option 'eps' is 1.0"),
        (no_schedule, "its schedule does not say how often it has moved"),
        (in_schedule("last_epoch", math.nan), "its schedule does not say how often it has moved"),
        (in_schedule("last_epoch", 10**8), "its schedule has moved 100000000 times in 1 global steps"),
        (in_schedule("base_lrs", [100.0]), "its schedule after 1 steps is not that of this peer after as many"),
        (in_schedule("end_factor", 1e6), "its schedule after 1 steps is not that of this peer after as many"),
        (in_schedule("more", 1), "its schedule after 1 steps is not that of this peer after as many"),
    ],
)
def test_a_state_whose_schedule_is_not_that_of_the_run_is_refused(spoil: Spoil, words: str) -> None:
    there, here = replica_of("Adam", is_scheduled=True), replica_of("Adam", is_scheduled=True)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its words are looked at)
        here.restore(spoilt(there, spoil))
    assert words in str(caught.value)


def test_a_state_without_statistics_of_a_parameter_is_refused_where_this_peer_has_some() -> None:
    there, here = replica_of("Adam"), replica_of("Adam", num_steps=2)
    state = there.capture()
    header = msgspec.structs.replace(state.header, tensors=state.header.tensors[:5])
    with pytest.raises(ValueError, match="statistic 'exp_avg' of parameter 1 is missing"):
        here.restore(state_of(header, state.tensors[:5]))


class Held(schedules.LambdaLR):
    """A schedule of a user's own, which cannot be copied."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.lock = threading.Lock()
        super().__init__(optimizer, lambda step: 1.0)


def test_a_schedule_that_cannot_be_copied_is_refused_at_the_begin() -> None:
    with pytest.raises(ConfigError, match="the schedule Held cannot be copied"):
        replica_of("Adam", schedule=Held)


@pytest.mark.parametrize("fields", [{"position": Position(2**53, b"there")}, {"lineage_samples": 2**53}])
def test_a_state_with_impossible_numbers_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is impossible"):
        replica_of("SGD").restore(spoilt(replica_of("SGD"), as_it_is, **fields))


@pytest.mark.parametrize(
    "spoil", [with_tensor(2, lambda tensor: torch.empty(0)), with_tensor(2, lambda tensor: -tensor - 1)]
)
def test_an_optimizer_of_an_unknown_kind_rehearses_a_step(spoil: Spoil) -> None:
    there, here = replica_of("RMSprop"), replica_of("RMSprop", num_steps=2)
    before = here.capture().header
    with pytest.raises(ValueError, match="a step from it"):
        here.restore(spoilt(there, spoil))
    assert here.capture().header == before
