from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch.optim import lr_scheduler

from manyhands.averaging.messages import Position
from manyhands.averaging.state.content import State, StateHeader, empty_content, sealed
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.optim import Lamb
from manyhands.optim.serializable import merged
from manyhands.optim.state.state import Capture, checked_scalars, hyper_parameters_of, restore, specs_of

AT = Position(5, b"lineage")
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def new_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(dtype)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None, num_steps: int = 3) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(num_steps):
        model(torch.full((2, 3), 0.1 * step + 0.3, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def captured(optimizer: torch.optim.Optimizer, scheduler: Any = None) -> State:
    schedule = scheduler.state_dict() if scheduler is not None else {}
    state = Capture(optimizer, schedule, AT, 99).copy()
    assert state is not None
    return sealed(state)


def received(state: State) -> State:
    """The same state as it arrives at another peer."""
    header = msgspec.msgpack.decode(msgspec.msgpack.encode(state.header), type=StateHeader)
    content = empty_content(header.tensors)
    content.copy_(state.content)
    arrived = State(header, content)
    assert sealed(arrived).header == header
    return arrived


def two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return torch.optim.AdamW([{"params": weights, "lr": 0.02}, {"params": biases, "weight_decay": 0.0}], amsgrad=True)


def with_a_frozen_parameter(model: torch.nn.Module) -> torch.optim.Optimizer:
    next(model.parameters()).requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=0.1)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.01),
    "numbers beside tensors": lambda model: Lamb(model.parameters(), lr=0.01),
    "tensor_lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "two_groups": two_groups,
    "frozen": with_a_frozen_parameter,
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_newcomer_goes_on_exactly_as_the_others(name: str, dtype: torch.dtype) -> None:
    old_model, new = new_model(0, dtype), new_model(1, dtype)
    old_optimizer, optimizer = OPTIMIZERS[name](old_model), OPTIMIZERS[name](new)
    train(old_model, old_optimizer)
    state = captured(old_optimizer)
    assert state.header.position == AT
    assert state.header.lineage_samples == 99
    restore(received(state), optimizer)
    assert captured(optimizer).header.digest == state.header.digest
    train(old_model, old_optimizer)
    train(new, optimizer)
    assert captured(optimizer).header.digest == captured(old_optimizer).header.digest
    assert captured(optimizer).header.digest != state.header.digest
    for ours, theirs in zip(new.parameters(), old_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def sequential(inner: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(inner, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(inner, 9)]
    return lr_scheduler.SequentialLR(inner, parts, [2])


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda inner: lr_scheduler.LambdaLR(inner, lambda step: 1 / (step + 1)),
        lambda inner: lr_scheduler.OneCycleLR(inner, 0.5, 20),
        lambda inner: lr_scheduler.CosineAnnealingWarmRestarts(inner, 3),
        lambda inner: lr_scheduler.MultiStepLR(inner, [2, 4]),
        lambda inner: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(inner, 0.5, 2), lr_scheduler.ExponentialLR(inner, 0.9)]
        ),
        sequential,
    ],
    ids=["LambdaLR", "OneCycleLR", "WarmRestarts", "MultiStepLR", "ChainedScheduler", "SequentialLR"],
)
def test_the_schedule_goes_on_where_it_was(make_scheduler: Any) -> None:
    old_model, new = new_model(0), new_model(1)
    old_optimizer, optimizer = OPTIMIZERS["momentum"](old_model), OPTIMIZERS["momentum"](new)
    old_scheduler, scheduler = make_scheduler(old_optimizer), make_scheduler(optimizer)
    train(old_model, old_optimizer, old_scheduler)
    state = captured(old_optimizer, old_scheduler)
    scheduler.load_state_dict(merged(scheduler.state_dict(), restore(received(state), optimizer)))
    assert captured(optimizer, scheduler).header.digest == state.header.digest
    for _ in range(4):
        train(old_model, old_optimizer, old_scheduler, 1)
        train(new, optimizer, scheduler, 1)
        assert optimizer.param_groups[0]["lr"] == old_optimizer.param_groups[0]["lr"]
    assert captured(optimizer, scheduler).header.digest == captured(old_optimizer, old_scheduler).header.digest


def test_a_captured_state_is_a_copy() -> None:
    model = new_model()
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer)
    state = captured(optimizer)
    train(model, optimizer)
    assert sealed(state).header == state.header
    other_model = new_model(1)
    other = OPTIMIZERS["AdamW"](other_model)
    restore(state, other)
    train(other_model, other)
    assert sealed(state).header == state.header


def change_parameter(model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-6


def change_statistic(model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    optimizer.state[next(model.parameters())]["exp_avg"].view(-1)[-1] += 1e-6


def change_counter(model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    optimizer.state[next(model.parameters())]["step"] += 1


def change_rate(model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 1.0001


def change_schedule(model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    state = copy.deepcopy(scheduler.state_dict())
    state["_schedulers"][1]["last_epoch"] += 1
    scheduler.load_state_dict(state)


@pytest.mark.parametrize("change", [change_parameter, change_statistic, change_counter, change_rate, change_schedule])
def test_any_change_of_the_state_changes_its_digest(change: Any) -> None:
    model = new_model()
    optimizer = OPTIMIZERS["AdamW"](model)
    scheduler = sequential(optimizer)
    train(model, optimizer, scheduler)
    before = captured(optimizer, scheduler).header.digest
    assert captured(optimizer, scheduler).header.digest == before
    change(model, optimizer, scheduler)
    assert captured(optimizer, scheduler).header.digest != before


def test_foreach_and_fused_are_not_part_of_the_state() -> None:
    model, other = new_model(0), new_model(0)
    here = torch.optim.AdamW(model.parameters(), foreach=True)
    there = torch.optim.AdamW(other.parameters(), fused=False)
    assert hyper_parameters_of(here.param_groups) == hyper_parameters_of(there.param_groups)
    assert captured(here).header.digest == captured(there).header.digest
    restore(received(captured(there)), here)
    assert here.param_groups[0]["foreach"] is True
    assert here.param_groups[0]["fused"] is None


def test_a_learning_rate_that_is_a_tensor_stays_one() -> None:
    model, other = new_model(0), new_model(1)
    old = OPTIMIZERS["tensor_lr"](model)
    old.param_groups[0]["lr"].fill_(0.5)
    new = OPTIMIZERS["tensor_lr"](other)
    restore(received(captured(old)), new)
    assert isinstance(new.param_groups[0]["lr"], torch.Tensor)
    assert new.param_groups[0]["lr"].item() == 0.5


def test_a_parameter_without_elements_is_no_problem() -> None:
    optimizer = torch.optim.SGD([torch.zeros(0, 3, requires_grad=True), torch.ones(2, requires_grad=True)], lr=0.1)
    restore(received(captured(optimizer)), optimizer)


# what does not fit

MODEL = new_model()
SPECS = specs_of(OPTIMIZERS["AdamW"](MODEL))


def header_of(**changes: Any) -> StateHeader:
    model = new_model()
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer)
    return msgspec.structs.replace(captured(optimizer).header, **changes)


def with_statistic(name: str = "0.more", shape: tuple[int, ...] = (4, 3), dtype: str = "float32") -> StateHeader:
    return header_of(tensors=[*header_of().tensors, ParameterSpec(name, shape, dtype)])


def with_scalars(**changes: Any) -> StateHeader:
    scalars = msgspec.msgpack.decode(header_of().scalars, strict=False)
    return header_of(scalars=msgspec.msgpack.encode(scalars | changes))


def test_statistics_of_any_usual_shape_fit_the_model() -> None:
    assert len(checked_scalars(header_of(), SPECS, 1).groups) == 1
    assert checked_scalars(with_statistic(), SPECS, 1)
    assert checked_scalars(with_statistic(shape=(2,)), SPECS, 1), "some optimizers keep factors"
    assert checked_scalars(with_statistic(shape=(99,)), SPECS, 1), "or a square matrix of a long side"
    assert checked_scalars(with_statistic(name="shared.more"), SPECS, 1), "or something for all parameters"


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(header_of(tensors=[]), id="no tensors"),
        pytest.param(header_of(tensors=header_of().tensors[:3]), id="parameters left out"),
        pytest.param(header_of(tensors=header_of().tensors[::-1]), id="another order"),
        pytest.param(with_statistic(shape=(-1, -12)), id="negative sizes"),
        pytest.param(with_statistic(shape=(2**62, 2**62)), id="more bytes than there are"),
        pytest.param(with_statistic(shape=(2**23,)), id="far larger than the model"),
        pytest.param(with_statistic(shape=(2**62, 0, 8)), id="huge without elements"),
        pytest.param(with_statistic(shape=(1,) * 33), id="too many dimensions"),
        pytest.param(with_statistic(shape=(2**40, 0, 2**40), name="4.more"), id="a parameter that is not there"),
        pytest.param(with_statistic(name="-1.more"), id="a negative parameter"),
        pytest.param(with_statistic(name="more"), id="no parameter"),
        pytest.param(with_statistic(name="9" * 5000 + ".more"), id="a long number"),
        pytest.param(with_statistic(dtype="complex128"), id="an unknown dtype"),
        pytest.param(
            header_of(tensors=header_of().tensors + [ParameterSpec("0.x", (1,), "float32")] * 1300), id="too many"
        ),
        pytest.param(header_of(scalars=b""), id="no scalars"),
        pytest.param(header_of(scalars=b"\x91" * 100_000 + b"\xc0"), id="nested scalars"),
        pytest.param(header_of(scalars=msgspec.msgpack.encode({"groups": []})), id="half of the scalars"),
        pytest.param(with_scalars(groups=[]), id="no groups"),
        pytest.param(with_scalars(groups=[{}, {}]), id="another number of groups"),
        pytest.param(with_scalars(groups=[7]), id="groups of another type"),
        pytest.param(with_scalars(statistics={"4": {"step": 1}}), id="numbers of a parameter that is not there"),
        pytest.param(with_scalars(statistics={"x": {"step": 1}}), id="numbers of no parameter"),
        pytest.param(with_scalars(scheduler=[]), id="a schedule of another type"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_changed(header: StateHeader) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each has its own words)
        checked_scalars(header, SPECS, 1)
    model = new_model(1)
    optimizer = OPTIMIZERS["AdamW"](model)
    before = captured(optimizer).header.digest
    with pytest.raises(ValueError):  # noqa: PT011
        restore(State(header, torch.empty(0, dtype=torch.uint8)), optimizer)
    assert captured(optimizer).header.digest == before


@pytest.mark.parametrize("statistics", [{"0": {"other": 1.0}}, {"0": {"step": "soon"}}, {"1": {"step": [1]}}])
def test_statistics_of_another_optimizer_change_nothing(statistics: dict[str, dict[str, Any]]) -> None:
    state = captured(OPTIMIZERS["AdamW"](new_model(0)))
    scalars = msgspec.msgpack.decode(state.header.scalars, strict=False) | {"statistics": statistics}
    evil = State(msgspec.structs.replace(state.header, scalars=msgspec.msgpack.encode(scalars)), state.content)
    model = new_model(1)
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer)
    before = captured(optimizer).header.digest
    with pytest.raises(ValueError, match="its statistics do not fit AdamW"):
        restore(evil, optimizer)
    assert captured(optimizer).header.digest == before
    train(model, optimizer)


@pytest.mark.parametrize(
    "whole",
    [
        {"$tensor": 12},
        {"$tensor": -1},
        {"$tensor": True},
        {"$tensor": "0"},
        {"$items": 5},
        {"$items": [[["a list"], 2]]},
        {"$items": [[1, 2, 3]]},
        {"$tuple": None},
        {"$numpy": ["object", 1]},
        {"$numpy": ["float64", "1"]},
        {"$numpy": ["int8", 1000]},
        {"$numpy": 3},
        {"$integer": 5},
        {"$integer": "many"},
        {"$what": 1},
        [[]] * 40,
        5,
    ],
)
def test_statistics_in_a_form_that_nobody_sends_change_nothing(whole: Any) -> None:
    if whole == [[]] * 40:
        for _ in range(40):
            whole = [whole]
    state = captured(OPTIMIZERS["AdamW"](new_model(0)))
    scalars = msgspec.msgpack.decode(state.header.scalars, strict=False) | {"statistics": {"1": {"$state": whole}}}
    evil = State(msgspec.structs.replace(state.header, scalars=msgspec.msgpack.encode(scalars)), state.content)
    optimizer = OPTIMIZERS["AdamW"](new_model(1))
    before = captured(optimizer).header.digest
    with pytest.raises(ValueError, match=r"cannot be read: |its statistics do not fit AdamW"):
        restore(evil, optimizer)
    assert captured(optimizer).header.digest == before


def test_hyper_parameters_of_another_kind_are_not_taken_over() -> None:
    model, other = new_model(0), new_model(1)
    state = captured(OPTIMIZERS["AdamW"](model))
    scalars = msgspec.msgpack.decode(state.header.scalars, strict=False)
    scalars["groups"][0] |= {"lr": "high", "betas": 7, "maximize": 1, "eps": 1e-3, "params": [9], "new": 1}
    evil = State(msgspec.structs.replace(state.header, scalars=msgspec.msgpack.encode(scalars)), state.content)
    optimizer = OPTIMIZERS["AdamW"](other)
    before = dict(optimizer.param_groups[0])
    restore(evil, optimizer)
    assert optimizer.param_groups[0] == before | {"eps": 1e-3}
    train(other, optimizer)
