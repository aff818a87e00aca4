"""Copies of an optimizer's parameters: copies on the host on which it steps, and a copy of those of train mode.

Also detects that something else has written to parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from manyhands.averaging.tensor_list import overlapping
from manyhands.base.errors import ConfigError
from manyhands.optim.flat import num_writes
from manyhands.optim.options import options_of
from manyhands.optim.state.state import names_of, parameters_of
from manyhands.optim.state.tree import with_tensors

HOST = torch.device("cpu")


class HostCopy:
    """Makes an optimizer work on copies of its parameters, on the host and in float32 or wider.

    The model's own parameters may have less precision and be on any device; :meth:`copy_to_model` updates them.

    Attributes:
        shown_groups: the optimizer's parameter groups as users see them: with the model's parameters instead of the
            copies.
        shown_options: the options in ``shown_groups``, as last copied from the optimizer.
    Raises:
        ConfigError: two parameters share memory, so :meth:`copy_to_model` would overwrite one with the other.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._model_parameters = parameters_of(optimizer)
        self._copies = self._copied()
        self.shown_groups: list[dict[str, Any]] = [dict(group) for group in optimizer.param_groups]
        self.show_options()
        copies = dict(zip(self._model_parameters, self._copies, strict=True))
        for owner, statistics in list(optimizer.state.items()):
            del optimizer.state[owner]
            move = functools.partial(_statistic_on_host, owner)
            optimizer.state[copies.get(owner, owner)] = with_tensors(statistics, move)
        for group in optimizer.param_groups:
            group["params"] = [copies[parameter] for parameter in group["params"]]

    def _copied(self) -> list[torch.Tensor]:
        """New copies of the parameters."""
        if pair := overlapping(self._model_parameters):
            one, other = (names_of(self._optimizer)[number] for number in pair)
            raise ConfigError(
                f"{one} and {other} share memory, or are interleaved in it, and cannot both have a copy on the "
                "host; tie them by giving the modules one and the same Parameter, or use neither offload nor delay"
            )
        return [copy_on_host(parameter) for parameter in self._model_parameters]

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the optimizer's parameters to the model, and its options to the shown groups."""
        for parameter, copy in zip(self._model_parameters, self._copies, strict=True):
            parameter.copy_(copy)
        self.show_options()

    def differs_from_model(self) -> bool:
        """Whether :meth:`copy_to_model` would change the model's parameters."""
        pairs = zip(self._model_parameters, self._copies, strict=True)
        return any(not torch.equal(parameter, copy.to(parameter)) for parameter, copy in pairs)

    def finer(self) -> dict[str, torch.Tensor]:
        """The copies of another dtype than the model's parameter, and so more precise; by index, as decimal text."""
        pairs = zip(self._model_parameters, self._copies, strict=True)
        return {f"{index}": copy for index, (parameter, copy) in enumerate(pairs) if copy.dtype != parameter.dtype}

    @torch.no_grad()
    def take_over(self, finer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Copy the model's parameters to the optimizer's copies, after something has written to them.

        Args:
            finer: the copies that :meth:`finer` returned when a checkpoint was taken. Each is used where the model's
                parameter is its rounded value.
        """
        for index, (parameter, copy) in enumerate(zip(self._model_parameters, self._copies, strict=True)):
            if finer is not None and f"{index}" in finer:
                copy.copy_(finer[f"{index}"])
            take_over(parameter, copy)

    def remove(self) -> None:
        """Have the optimizer work on the model's parameters again, with its statistics beside them."""
        originals = dict(zip(self._copies, self._model_parameters, strict=True))
        state = self._optimizer.state
        device = self._model_parameters[0].device
        on_device = set[torch.Tensor]()  # copies whose number of steps must be on the device
        for group in self._optimizer.param_groups:
            if group.get("capturable") or group.get("fused"):
                on_device.update(group["params"])
            group["params"] = [originals[copy] for copy in group["params"]]
        for owner, statistics in list(state.items()):
            del state[owner]
            if owner in originals:
                moved = _beside(originals[owner], owner, statistics, has_steps_there=owner in on_device)
                state[originals[owner]] = moved
            else:  # statistics of all parameters together, under a text as key
                state[owner] = with_tensors(statistics, lambda value: value.to(device) if value.dim() else value)

    def show_options(self) -> None:
        """Copy the optimizer's options to the shown groups."""
        for group, shown in zip(self._optimizer.param_groups, self.shown_groups, strict=True):
            options = {name: value for name, value in group.items() if name != "params"}
            shown.update(  # cloned, as a learning rate may be a tensor to which a background update writes
                {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
            )
        self.shown_options = options_of(self.shown_groups)


@torch.no_grad()
def take_over(parameter: torch.Tensor, copy: torch.Tensor) -> None:
    """Copy the values of a parameter to its copy, except those that the copy has already, perhaps more precisely."""
    has_them = copy.to(parameter) == parameter
    if not bool(has_them.all()):
        copy.copy_(torch.where(has_them.to(copy.device), copy, parameter.to(copy)))


def copy_on_host(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter on the host, at least in float32."""
    return torch.nn.Parameter(_on_host(parameter.detach()).clone(), requires_grad=parameter.requires_grad)


def _statistic_on_host(owner: Any, value: torch.Tensor) -> torch.Tensor:
    """A statistic on the host. If it has the dtype of its parameter, it gets that of the copy of the parameter."""
    is_alike = isinstance(owner, torch.Tensor) and value.dtype == owner.dtype
    return _on_host(value) if is_alike else value.to(HOST)


def _beside(parameter: torch.Tensor, copy: torch.Tensor, statistics: Any, *, has_steps_there: bool) -> Any:
    """The statistics of a copy, on the device of its parameter; those with the dtype of the copy get the parameter's.

    Args:
        has_steps_there: whether the optimizer needs the number of steps on that device, too. It keeps its dtype.
    """

    def moved(value: torch.Tensor) -> torch.Tensor:
        return value.to(parameter.device, parameter.dtype if value.dtype == copy.dtype else value.dtype)

    beside = with_tensors(statistics, moved)
    if isinstance(statistics, dict) and isinstance(step := statistics.get("step"), torch.Tensor):
        beside["step"] = step.to(parameter.device) if has_steps_there else step
    return beside


def _on_host(value: torch.Tensor) -> torch.Tensor:
    is_float = value.is_floating_point()  # float32 cannot hold large integers
    return value.to(HOST, torch.promote_types(value.dtype, torch.float32) if is_float else value.dtype)


class Writes:
    """Detects writes to parameters since the last :meth:`note`, except those through ``.data``."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.note()

    def note(self) -> None:
        """Accept all writes so far: only later ones are foreign."""
        self._counts = [num_writes(parameter) for parameter in self._parameters]

    @property
    def are_foreign(self) -> bool:
        """Whether something has written to a parameter since the last :meth:`note`."""
        return any(num_writes(one) != count for one, count in zip(self._parameters, self._counts, strict=True))


class InTrainMode:
    """A copy of an optimizer's parameters and options in train mode.

    While the optimizer is in eval mode, it takes the place of the optimizer where a state is captured.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.param_groups = [
            {**group, "params": [parameter.detach().to(HOST, copy=True) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]

    @property
    def state(self) -> dict[Any, Any]:
        """The optimizer's statistics, which are the same in both modes."""
        return self._optimizer.state

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state."""
        return self._optimizer.state_dict()

    def differs(self) -> bool:
        """Whether the optimizer's parameters or options are other ones now."""
        pairs = zip(self._kept(), parameters_of(self._optimizer), strict=True)
        is_same = all(torch.equal(kept, now.detach().to(HOST)) for kept, now in pairs)
        return not is_same or options_of(self.param_groups) != options_of(self._optimizer.param_groups)

    @torch.no_grad()
    def put_back(self) -> None:
        """Write the copied parameters back to the optimizer's."""
        for kept, parameter in zip(self._kept(), parameters_of(self._optimizer), strict=True):
            parameter.copy_(kept)

    def _kept(self) -> list[torch.Tensor]:
        return [kept for group in self.param_groups for kept in group["params"]]
