"""What a run's schedule makes of the options of an optimizer, from its own steps alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from torch.optim.lr_scheduler import LRScheduler

from manyhands.averaging.state.content import State
from manyhands.base.errors import ConfigError
from manyhands.optim.serializable import is_number, serializable_part
from manyhands.optim.state.state import Scalars, hyper_parameters_of


class ScheduleAtBegin:
    """A copy of a schedule as it is before the first step.

    A schedule moves once with a global step, and its state is a function of how often it has moved. So a peer computes
    which options and which state another peer must have, and believes only the number.

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

    def options_in(self, state: State) -> list[dict[str, Any]]:
        """The options of the parameter groups that a state must have.

        Raises:
            ValueError: its schedule is not what this one becomes, or has moved more often than the run.
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
            raise ValueError(f"its schedule is not what that of the run is after {num_moves} steps")
        return hyper_parameters_of(moved.optimizer.param_groups)


class _OnlyOptions:
    """Stands for an optimizer in the copy of its schedule."""

    _opt_called = True

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups

    def step(self) -> None: ...

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001 (torch warns without it)


def _num_moves(state: Any) -> int | None:
    """How often a schedule with this state has moved; None if it does not say so. Some are made of others."""
    if not isinstance(state, Mapping):
        return None
    if "last_epoch" in state:
        number = state["last_epoch"]
        return number if type(number) is int else None
    nested = state.get("_schedulers")
    return _num_moves(nested[0]) if isinstance(nested, (list, tuple)) and nested else None


def is_close(one: Any, other: Any) -> bool:
    """Whether two serializable values are equal but for the rounding of other machines."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_close(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_close, one, other))
    if is_number(one) and is_number(other):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    return type(one) is type(other) and bool(one == other)
