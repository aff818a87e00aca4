"""Keeps parameters and optimizer state on the host while the model computes on its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from manyhands.averaging.tensor_list import overlapping
from manyhands.base.errors import ConfigError
from manyhands.optim.run.group_options import options_of
from manyhands.optim.state.state import names_of, parameters_of

HOST = torch.device("cpu")


class HostCopy:
    """Makes an optimizer work on copies of its parameters, on the host and in float32 or wider.

    The model's own parameters may have less precision and be on any device; :meth:`show` updates them.

    Args:
        optimizer: holds the copies from now on, with its statistics.

    Attributes:
        shown_groups: its parameter groups, with the model's parameters instead of the copies.
        shown_options: the options in these; see :mod:`manyhands.optim.run.group_options`.
    Raises:
        ConfigError: two parameters share memory, so one copy would overwrite updates of the other.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._model_parameters = parameters_of(optimizer)
        if pair := overlapping(self._model_parameters):
            one, other = (names_of(optimizer)[number] for number in pair)
            raise ConfigError(
                f"{one} and {other} share memory, or lie across each other in it, and cannot both have a copy on the "
                "host; tie them by giving the modules one and the same Parameter, or use neither offload nor delay"
            )
        self.shown_groups: list[dict[str, Any]] = [dict(group) for group in optimizer.param_groups]
        self._show_options()
        copies = {parameter: _copy_of(parameter) for parameter in self._model_parameters}
        for parameter, copy in copies.items():
            if parameter in optimizer.state:
                statistics = optimizer.state.pop(parameter)
                optimizer.state[copy] = {name: _on_host(value) for name, value in statistics.items()}
        for group in optimizer.param_groups:
            group["params"] = [copies[parameter] for parameter in group["params"]]
        self._copies = [copies[parameter] for parameter in self._model_parameters]

    @torch.no_grad()
    def show(self) -> None:
        """Copy the optimizer's parameters to the model, and its options to the shown groups."""
        for parameter, copy in zip(self._model_parameters, self._copies, strict=True):
            parameter.copy_(copy)
        self._show_options()

    def finer(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters that have more precision than those of the model, by position."""
        pairs = zip(self._model_parameters, self._copies, strict=True)
        return {f"{index}": copy for index, (parameter, copy) in enumerate(pairs) if copy.dtype != parameter.dtype}

    @torch.no_grad()
    def take_over(self, finer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Copy the model's parameters to the optimizer, as after a checkpoint was loaded into the model.

        Args:
            finer: from :meth:`finer`, of the same checkpoint; used for each parameter that it agrees with.
        """
        for index, (parameter, copy) in enumerate(zip(self._model_parameters, self._copies, strict=True)):
            if finer is not None and f"{index}" in finer:
                copy.copy_(finer[f"{index}"])
            if not torch.equal(copy.to(parameter), parameter):  # else the copy has them with more precision
                copy.copy_(parameter)
        self._show_options()

    def _show_options(self) -> None:
        for group, shown in zip(self._optimizer.param_groups, self.shown_groups, strict=True):
            options = {name: value for name, value in group.items() if name != "params"}
            shown.update(  # a rate may be a tensor that a background update writes
                {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
            )
        self.shown_options = options_of(self.shown_groups)


def _copy_of(parameter: torch.Tensor) -> torch.Tensor:
    copy = parameter.detach().to(HOST, _dtype_on_host(parameter), copy=True)
    return torch.nn.Parameter(copy, requires_grad=parameter.requires_grad)


def _on_host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(HOST, _dtype_on_host(value))


def _dtype_on_host(value: torch.Tensor) -> torch.dtype:
    """At least float32; large integers keep their dtype, as float32 cannot hold them."""
    return torch.promote_types(value.dtype, torch.float32) if value.is_floating_point() else value.dtype
