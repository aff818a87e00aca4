"""Checks that a state from another peer fits the run and can be trained on, before anything is loaded. Pure.

A state from a peer with faulty memory or bad intent must not crash this process, stop the steps of the run, or make
them increase the loss.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.optim.lr_scheduler import LRScheduler

from manyhands.averaging.roster import Roster, check_roster, lineage_of
from manyhands.averaging.state.content import State, StateHeader
from manyhands.base.errors import ConfigError
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.optim.flat import are_finite
from manyhands.optim.lamb import Lamb
from manyhands.optim.manifest import LOOKED_AT, RunManifest
from manyhands.optim.serializable import is_number, serializable_part
from manyhands.optim.state.state import (
    LOCAL_OPTIONS,
    SHARED,
    Scalars,
    checked_scalars,
    hyper_parameters_of,
    parameters_of,
    restore,
    specs_of,
    statistics_in,
)

MAX_STEP = 10**9
"""The largest number of global steps that is believed, and of steps in an optimizer's statistics."""
MAX_LINEAGE_SAMPLES = 2**50
"""The largest number of samples in a lineage that is believed."""

_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_STATISTICS: dict[type[torch.optim.Optimizer], set[str]] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    Lamb: _ADAM,
    torch.optim.Adagrad: {"step", "sum"},
    torch.optim.SGD: {"momentum_buffer"},
}
_OPTIONAL = {"max_exp_avg_sq", "momentum_buffer"}
_SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "sum"}
_COUNTERS = {"step"}
_CHANGED_BY_NONE = frozenset({"lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "maximize"})
"""Options of many optimizers that no optimizer changes by itself."""
TRIED_GRADIENT = 1e-3
"""The bound of the values in the gradients of a tried step. They are not zero, as some optimizers divide by their norm.
"""


def check_of(manifest: RunManifest) -> Callable[[StateHeader], None]:
    """Make the check whether the header of a state fits a run, before its tensors are received.

    The check raises ``ValueError`` if it does not.
    """

    def check(header: StateHeader) -> None:
        _check_place(header)
        checked_scalars(header, manifest.tensors, len(manifest.hyper_parameters), manifest.extra_tensors)

    return check


def _check_place(header: StateHeader) -> None:
    """Check that the roster is the one that the position's lineage covers; raise ``ValueError`` if not."""
    check_roster(header.roster)
    if header.position.step == 0:
        if header.roster != Roster() or header.seal:
            raise ValueError("it has a roster before the first step")
    elif lineage_of(header.seal, header.roster) != header.position.lineage:
        raise ValueError("its roster is not that of its lineage")


def fault_of(
    state: State,
    optimizer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
    extra: Sequence[ParameterSpec] = (),
) -> str:
    """Why a state must not be loaded, in words; empty if it may be.

    For an unknown kind of optimizer, a step from the state is tried on a copy. An optimizer that is not one of torch
    may keep numbers that it changes among its options, as Prodigy does. Of its options, only those in
    ``_CHANGED_BY_NONE``, and those that are not numbers, must be equal.

    Args:
        optimizer: of this peer; not changed.
        options: the options that each parameter group of the state must have.
        extra: the tensors beside the parameters.
    Raises:
        ValueError: the state does not have the shapes of this optimizer.
    """
    header = state.header
    if header.position.step > MAX_STEP or header.lineage_samples > MAX_LINEAGE_SAMPLES:
        return f"global step {header.position.step} with {header.lineage_samples} samples is impossible"
    scalars = checked_scalars(header, specs_of(optimizer), len(optimizer.param_groups), extra)
    has_own = type(optimizer) not in _STATISTICS and not type(optimizer).__module__.startswith("torch.optim")
    if fault := _fault_of_options(scalars.groups, options, has_own=has_own):
        return fault
    if not are_finite([tensor for tensor in state.tensors if tensor.is_floating_point()]):
        return "it has values that are not finite"
    if type(optimizer) in _STATISTICS:
        return _fault_of_statistics(state, scalars, optimizer, len(extra))
    return _fault_of_a_step(state, optimizer, extra)


def _fault_of_options(sent: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]], *, has_own: bool) -> str:
    for theirs, due in zip(sent, options, strict=True):
        for name in sorted(theirs.keys() | due.keys()):
            value, own = theirs.get(name), due.get(name)
            is_local = name in LOCAL_OPTIONS or (name == "initial_lr" and own is None)
            # an option that this peer lacks may be one that the optimizer makes in a step
            is_number = name not in due or _is_finite_number(own)
            if has_own and name not in _CHANGED_BY_NONE and is_number and _is_finite_number(value):
                continue
            if not is_local and not is_close(value, own):
                return f"its option {name!r} is {value!r}, and {own!r} in the run"
    return ""


def _is_finite_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


def _fault_of_statistics(state: State, scalars: Scalars, optimizer: torch.optim.Optimizer, num_extra: int) -> str:
    """Check names, shapes, dtypes and signs of the statistics, for known kinds of optimizers."""
    parameters, due = parameters_of(optimizer), _STATISTICS[type(optimizer)]
    found: dict[int, dict[str, Any]] = {}
    for owner, values in statistics_in(state, scalars, len(parameters) + num_extra).items():
        if owner == SHARED or not isinstance(values, dict):
            return f"its statistics under {owner!r} are unknown here"
        found[int(owner)] = values
    # before the first step of the run no parameter has statistics
    for index, parameter in enumerate(parameters if found else ()):
        if optimizer.state.get(parameter):
            found.setdefault(index, {})
    for index, values in sorted(found.items()):
        if missing := due - values.keys() - _OPTIONAL:
            return f"statistic {min(missing)!r} of parameter {index} is missing"
        if strange := values.keys() - due - _OPTIONAL:
            return f"statistic {min(strange)!r} of parameter {index} is unknown here"
        for name in sorted(values):
            if fault := _fault_of_statistic(name, values[name], parameters[index]):
                return f"statistic {name!r} of parameter {index} {fault}"
    return ""


def _fault_of_statistic(name: str, value: Any, parameter: torch.Tensor) -> str:
    if value is None and name in _OPTIONAL:
        return ""
    if name in _COUNTERS:
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        is_count = isinstance(number, (int, float)) and 0 <= number <= MAX_STEP
        return "" if is_count else f"is {number!r}, which is not a count"
    if not isinstance(value, torch.Tensor):
        return f"is {value!r}, not a tensor"
    if value.shape != parameter.shape or not value.is_floating_point():
        return f"is {value.dtype} of shape {list(value.shape)}, and must be floating-point with the parameter's shape"
    if name in _SQUARES and value.numel() and not float(value.min()) >= 0:
        return "has a value below 0, although it is a mean or sum of squares"
    return ""


def _fault_of_a_step(state: State, optimizer: torch.optim.Optimizer, extra: Sequence[ParameterSpec]) -> str:
    """Why a step of an unknown optimizer from the state fails, as tried on a copy; empty if it does not.

    Also empty if the optimizer makes no step without the state either, for example because it needs more than
    gradients: that is no fault of the state.
    """
    if (rehearsed := _without_state(optimizer)) is None:
        return ""
    restore(state, rehearsed, extra)
    fault = _fault_in_step(rehearsed)
    if fault and ((fresh := _without_state(optimizer)) is None or _fault_in_step(fresh)):
        return ""
    return fault


def _without_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """A copy of an optimizer with parameters of its own, and neither state nor hooks; None if it cannot be copied.

    ``copy.deepcopy`` alone would lose the attributes of a user's own class. A schedule may have replaced ``step`` on
    the instance by a function that steps the original; that is not copied.
    """
    copied = type(optimizer).__new__(type(optimizer))
    own = {
        name: value for name, value in vars(optimizer).items() if name != "step" and not name.startswith("_optimizer_")
    }
    try:
        own = copy.deepcopy(own, {id(optimizer): copied, id(optimizer.state): defaultdict(dict)})
    except Exception:  # noqa: BLE001 (a user's own optimizer may hold anything)
        return None
    vars(copied).update(own)
    torch.optim.Optimizer.__setstate__(copied, {})
    return copied


def _fault_in_step(optimizer: torch.optim.Optimizer) -> str:
    parameters = parameters_of(optimizer)
    for parameter in parameters:
        parameter.grad = _tried_gradient(parameter) if parameter.requires_grad else None
    try:
        optimizer.step()
    except torch.cuda.OutOfMemoryError:
        return ""
    except Exception as error:  # noqa: BLE001 (an optimizer may raise anything on values that it has not made)
        return f"a step from it fails ({type(error).__name__}: {error})"
    return "" if are_finite(parameters) else "a step from it leads to values that are not finite"


def _tried_gradient(parameter: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(parameter.device).manual_seed(0)
    return torch.empty_like(parameter).uniform_(-TRIED_GRADIENT, TRIED_GRADIENT, generator=generator)


class ScheduleAtBegin:
    """A copy of a schedule from before the first step.

    The state of a schedule follows from how often it has moved. So a peer takes only that number from another peer's
    schedule, and computes the rest.

    Raises:
        ConfigError: the schedule cannot be copied.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in scheduler.optimizer.param_groups
        ]
        try:
            self._begin = copy.deepcopy(scheduler, {id(scheduler.optimizer): _OnlyOptions(groups)})
        except Exception as error:  # whatever a user's own class raises
            raise ConfigError(
                f"the schedule {type(scheduler).__name__} cannot be copied ({error}), but peers check the schedule of "
                "others with a copy; give one of torch.optim.lr_scheduler, LambdaLR say"
            ) from error

    def rates(self) -> str:
        """The learning rates after 0 and each of ``LOOKED_AT`` moves, as text that is the same on all machines.

        Where parameter groups have different ones, all of these; none after a move that the schedule refuses.
        """
        moved, found = _rewound(self._begin), []
        for number in range(LOOKED_AT[-1] + 1):
            if number in LOOKED_AT:
                rates = (float(group["lr"]) for group in moved.optimizer.param_groups)
                found.append(" and ".join(dict.fromkeys(f"{rate:.6g}" for rate in rates)))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of torch, about its own schedules
                    moved.step()
            except Exception:  # noqa: BLE001 (OneCycleLR ends; a user's own function may fail anywhere)
                break
        return ", ".join(found)

    def options_in(self, state: State) -> list[dict[str, Any]]:
        """The options of the parameter groups that a state must have.

        Raises:
            ValueError: the state's schedule is not what this one becomes after as many moves, or has moved more often
                than the run has made steps.
        """
        sent = msgspec.msgpack.decode(state.header.scalars, type=Scalars).scheduler
        num_moves, num_steps = _num_moves(sent), state.header.position.step
        if num_moves is None:
            raise ValueError("its schedule does not say how often it has moved")
        num_moves -= _num_moves(self._begin.state_dict()) or 0
        if not 0 <= num_moves <= num_steps:
            raise ValueError(f"its schedule has moved {num_moves} times in {num_steps} global steps")
        moved = copy.deepcopy(self._begin)
        for _ in range(num_moves):
            moved.step()
        if not is_close(sent, serializable_part(moved.state_dict())):
            raise ValueError(
                f"its schedule after {num_moves} steps is not that of this peer after as many: one of the two has "
                "another schedule than the run"
            )
        return hyper_parameters_of(moved.optimizer.param_groups)


def _rewound(scheduler: Any) -> Any:
    """A copy of a schedule from before its first move, or from now if it does not get here again from there.

    A loop may give a schedule that has moved already, as it goes on from a checkpoint of its own.
    """
    num_moves = _num_moves(scheduler.state_dict())
    if not num_moves:
        return copy.deepcopy(scheduler)
    rewound = copy.deepcopy(scheduler)
    parts = getattr(rewound, "_schedulers", [])
    rewound.last_epoch = 0 if parts else -1
    for part in parts:
        part.last_epoch = -1
    try:
        for group in rewound.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (parts[0] if parts else rewound)._initial_step()  # noqa: SLF001 (what a schedule does when it is made)
            again = copy.deepcopy(rewound)
            for _ in range(num_moves):
                again.step()
    except Exception:  # noqa: BLE001 (of a user's own class)
        return copy.deepcopy(scheduler)
    is_here = is_close(*(hyper_parameters_of(one.optimizer.param_groups) for one in (again, scheduler)))
    return rewound if is_here else copy.deepcopy(scheduler)


class _OnlyOptions:
    """Takes the place of the optimizer in a copy of its schedule; it has only options."""

    _opt_called = True

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups

    def step(self) -> None: ...

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001 (torch warns without it)


def _num_moves(state: Any) -> int | None:
    """How often a schedule with this state has moved; None if the state does not say so.

    A schedule that is made of others has moved as often as the first of these.
    """
    if not isinstance(state, Mapping):
        return None
    if "last_epoch" in state:
        number = state["last_epoch"]
        return number if type(number) is int else None
    nested = state.get("_schedulers")
    return _num_moves(nested[0]) if isinstance(nested, (list, tuple)) and nested else None


def is_close(one: Any, other: Any) -> bool:
    """Whether two serializable values are equal, apart from rounding on different machines."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_close(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_close, one, other))
    if is_number(one) and is_number(other):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    return type(one) is type(other) and bool(one == other)
