"""Wraps each optimizer at most once in this process, and makes it one of plain torch again afterwards."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from manyhands.base.errors import ConfigError

RATES = ("lr", "initial_lr")
"""The options from which a schedule computes its learning rates."""

_lock = threading.Lock()
_trained: dict[int, tuple[torch.Tensor, str]] = {}
"""By id: the trained parameters of all open wrappers, each with the id of its run."""
_left: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Any, dict[str, Any]]]] = weakref.WeakKeyDictionary()
"""The optimizers whose wrapper had made a schedule and was closed. For each group it has the learning rate at that
time, and the ``RATES`` from before the schedule."""


Init = TypeVar("Init", bound=Callable[..., None])


def undone_if_it_raises(init: Init) -> Init:
    """Decorate a wrapper's constructor so that it leaves the wrapped optimizer as it was, if it raises.

    The constructor must set ``self._wrapping``, a :class:`Wrapping`, before it changes the wrapped optimizer.
    """

    @functools.wraps(init)
    def made(wrapper: Any, *args: Any, **named: Any) -> None:
        try:
            init(wrapper, *args, **named)
        except BaseException:
            if (wrapping := vars(wrapper).get("_wrapping")) is not None:
                wrapping.undo()
            raise

    return cast(Init, made)


class Wrapping:
    """Reserves an optimizer's parameters while it is wrapped, and can put the optimizer back as it was before.

    Args:
        named: the parameters of the optimizer with their names.
        scheduler: as the user gives it. A schedule goes on from where it is. A function makes a new schedule; if an
            earlier wrapper had made one, too, the learning rates are first set to those from before that one.
    Raises:
        ConfigError: another wrapper trains one of the parameters; names it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, torch.Tensor]],
        run_id: str,
        scheduler: object,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = [parameter for _, parameter in named if parameter.requires_grad]
        with _lock:
            for name, parameter in named:
                if parameter.requires_grad and (other := _trained.get(id(parameter))) is not None:
                    raise ConfigError(
                        f"{name} is trained in run {other[1]!r} by another Optimizer already, which would overwrite "
                        "what this one learns: close() that one first, or its peer; or give each one parameters of "
                        "its own"
                    )
            _trained.update({id(parameter): (parameter, run_id) for parameter in self._parameters})
        self._makes_schedule = scheduler is not None and not isinstance(scheduler, LRScheduler)
        self._schedule = scheduler if isinstance(scheduler, LRScheduler) else None
        if self._schedule is None:
            self._forget_schedule()
        self._groups = [_copied(group) for group in optimizer.param_groups]
        self._state = dict(optimizer.state)
        self._of_schedule = self._schedule.state_dict() if self._schedule is not None else {}

    def _forget_schedule(self) -> None:
        """Set the learning rates to those from before the schedule that the last wrapper made, if it made one."""
        for group, (last, before) in zip(self._optimizer.param_groups, _left.pop(self._optimizer, ()), strict=False):
            for name in RATES:
                if name == "initial_lr" or group["lr"] == last:  # otherwise the user has set another rate since
                    group.pop(name, None)
                    group.update({name: before[name]} if name in before else {})

    def begin(self) -> None:
        """Drop what :meth:`undo` would restore, once the wrapper is complete."""
        self._state, self._of_schedule = {}, {}

    def undo(self) -> None:
        """Put the optimizer and its schedule back as they were: the wrapper could not be made."""
        self._free()
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        if self._schedule is not None:
            self._schedule.load_state_dict(self._of_schedule)

    def end(self) -> None:
        """End the reservation when the wrapper is closed: the parameters can be wrapped again."""
        self._free()
        if self._makes_schedule:
            groups = zip(self._optimizer.param_groups, self._groups, strict=True)
            _left[self._optimizer] = [(_copied(group)["lr"], _rates_of(before)) for group, before in groups]

    def _free(self) -> None:
        with _lock:
            for parameter in self._parameters:
                _trained.pop(id(parameter), None)
        self._parameters = []


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group and its tensors: a learning rate may be a tensor, to which a schedule writes."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}


def _rates_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in RATES if name in group}
