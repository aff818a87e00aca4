"""Tensors that all peers share beside the parameters, such as the running statistics of BatchNorm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from manyhands.averaging.codecs import Chosen, Unscaled
from manyhands.averaging.state.content import DTYPES_OF_STATES
from manyhands.base.errors import ConfigError
from manyhands.base.parameter_spec import bare_names
from manyhands.optim.flat import flattened

MAX_INTEGER = 1 << 24
"""The largest integer that is accepted: float32, in which the values are sent, represents all up to it exactly."""


class ExtraTensors:
    """Has all peers agree on the values of further tensors with each global step.

    Between two steps each peer changes its own tensors: BatchNorm does so with each batch. With a step all peers get
    the mean of the floating-point values, weighted by samples, and the integers of the peer with the most samples.
    These *agreed* values are also kept apart from the tensors, as they belong to the state of the run.

    Attributes:
        own: the tensors of the model.
        agreed: the values that were agreed on with the last step, on the host.
        agreed_floats: the agreed floating-point tensors, which are compared with those of other peers.
        shapes: of the two parts in the vector of a step: all floating-point values, then all integers.
    Raises:
        ConfigError: a tensor cannot be averaged, or two have the same name; names it.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]] = ()) -> None:
        self.own = [tensor for _, tensor in named]
        self.names = [name for name, _ in named]
        for name, tensor in named:
            if self.names.count(name) > 1:
                raise ConfigError(f"there are two tensors named {name!r}; give each another name")
            if tensor.dtype not in DTYPES_OF_STATES or tensor.layout != torch.strided or tensor.is_meta:
                kind = f"{tensor.dtype}, {tensor.layout} on {tensor.device}"
                raise ConfigError(f"{name} is {kind}, which cannot be averaged; leave it out")
            if not tensor.is_floating_point() and tensor.numel() and int(tensor.long().abs().max()) > MAX_INTEGER:
                raise ConfigError(f"{name} has integers above {MAX_INTEGER}, which float32 would change; leave it out")
        self.agreed = [tensor.detach().to("cpu", copy=True) for tensor in self.own]
        self.agreed_floats = [tensor for tensor in self.agreed if tensor.is_floating_point()]
        self._in_order = sorted(range(len(named)), key=lambda at: not named[at][1].is_floating_point())
        num_floats = sum(tensor.numel() for tensor in self.agreed_floats)
        num_integers = sum(tensor.numel() for tensor in self.agreed) - num_floats
        shapes = [Unscaled((num_floats,)), Chosen((num_integers,))]
        self.shapes = [shape for shape in shapes if math.prod(shape)]

    def contribution(self) -> torch.Tensor:
        """This peer's values as a float32 vector; the agreed values take the place of those that are not finite."""
        if not self.own:
            return torch.empty(0)
        own_N, agreed_N = (flattened([those[at] for at in self._in_order]) for those in (self.own, self.agreed))
        return torch.where(own_N.isfinite(), own_N, agreed_N)

    def agree(self, mean_N: torch.Tensor) -> None:
        """Agree on the averaged values of a step. :meth:`copy_to_model` writes them to the tensors."""
        those = [self.agreed[at] for at in self._in_order]
        for agreed, values in zip(those, torch.split(mean_N, [one.numel() for one in those]), strict=True):
            agreed.copy_(_fitting(values, agreed.dtype).view(agreed.shape))

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Agree on given values: those of a loaded state, or this peer's own ones after a checkpoint was loaded."""
        for agreed, value in zip(self.agreed, values, strict=True):
            agreed.copy_(value)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Write the agreed values to the tensors."""
        for tensor, agreed in zip(self.own, self.agreed, strict=True):
            tensor.copy_(agreed)


def _fitting(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round and clamp values to what a dtype can hold: out of range, the result would differ between machines."""
    if dtype.is_floating_point:
        return values
    if dtype == torch.bool:
        return values.round()
    limits = torch.iinfo(dtype)
    return values.round().clamp(max(limits.min, -MAX_INTEGER), min(limits.max, MAX_INTEGER))


def extra_tensors_of(
    buffers: Iterable[tuple[str, torch.Tensor]] | None, extra: Mapping[str, torch.Tensor] | None
) -> ExtraTensors:
    """The tensors that a user gives to an optimizer.

    Raises:
        ConfigError: they are given without names, or cannot be averaged.
    """
    if isinstance(buffers, torch.nn.Module):
        raise ConfigError("buffers is a module; write buffers=model.named_buffers()")
    if extra is not None and not isinstance(extra, Mapping):
        raise ConfigError(f"extra_tensors is of type {type(extra).__name__}; give a dict of names and tensors")
    named = [*(buffers or ())]
    if not all(isinstance(one, tuple) and len(one) == 2 for one in named):
        raise ConfigError("buffers are given without names; write buffers=model.named_buffers()")
    named = list(zip(bare_names(name for name, _ in named), (tensor for _, tensor in named), strict=True))
    named += (extra or {}).items()
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name} is of type {type(tensor).__name__}; a torch.Tensor is needed")
    return ExtraTensors(named)
