"""Tensors beside the parameters that all peers share, such as the running statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from manyhands.averaging.state.content import DTYPES_OF_STATES
from manyhands.base.errors import ConfigError
from manyhands.optim.flat import flattened

MAX_INTEGER = 1 << 24
"""Integers up to this are exact in float32, in which they are averaged."""


class ExtraTensors:
    """Averages tensors with each global step, weighted by samples.

    Between two steps each peer changes its own: BatchNorm does so with each batch. With a step all peers get the mean,
    which for integers is rounded. The values that were agreed on last are kept apart: they belong to the state of the
    run, until the next step.

    Args:
        named: the tensors, which are written to.

    Attributes:
        agreed: the values at the last step, on the host.
        names: of each.
        numel: of all together.
    Raises:
        ConfigError: a tensor cannot be averaged, or two have one name; names it.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]] = ()) -> None:
        self._tensors = [tensor for _, tensor in named]
        self.names = [name for name, _ in named]
        for name, tensor in named:
            if self.names.count(name) > 1:
                raise ConfigError(f"there are two tensors named {name!r}; give each a name of its own")
            if tensor.dtype not in DTYPES_OF_STATES or tensor.layout != torch.strided or tensor.is_meta:
                kind = f"{tensor.dtype}, {tensor.layout} on {tensor.device}"
                raise ConfigError(f"{name} is {kind}, which cannot be averaged; leave it out")
            if not tensor.is_floating_point() and tensor.numel() and int(tensor.long().abs().max()) > MAX_INTEGER:
                raise ConfigError(f"{name} has integers above {MAX_INTEGER}, which a mean would change; leave it out")
        self.agreed = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]
        self.numel = sum(tensor.numel() for tensor in self._tensors)

    @property
    def agreed_floats(self) -> list[torch.Tensor]:
        """Those that rounding alone may change, for the comparison with other peers."""
        return [tensor for tensor in self.agreed if tensor.is_floating_point()]

    def contribution(self) -> torch.Tensor:
        """This peer's values as a float32 vector of shape [numel], with the agreed ones where they are not finite."""
        if not self._tensors:
            return torch.empty(0)
        own_N, agreed_N = flattened(self._tensors), flattened(self.agreed)
        return torch.where(own_N.isfinite(), own_N, agreed_N)

    def agree(self, mean_N: torch.Tensor) -> None:
        """Take over the mean of all peers; :meth:`show` has the tensors follow."""
        for agreed, values in zip(self.agreed, torch.split(mean_N, [one.numel() for one in self.agreed]), strict=True):
            agreed.copy_((values if agreed.is_floating_point() else values.round()).view(agreed.shape))

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Take over the values of a state."""
        for agreed, value in zip(self.agreed, values, strict=True):
            agreed.copy_(value)
        self.show()

    @torch.no_grad()
    def show(self) -> None:
        """Write the agreed values to the tensors."""
        for tensor, agreed in zip(self._tensors, self.agreed, strict=True):
            tensor.copy_(agreed)

    def take_over(self) -> None:
        """Agree on the tensors' own values, as after a checkpoint was loaded."""
        for tensor, agreed in zip(self._tensors, self.agreed, strict=True):
            agreed.copy_(tensor)


def extra_tensors_of(
    buffers: Iterable[tuple[str, torch.Tensor]] | None, extra: Mapping[str, torch.Tensor] | None
) -> ExtraTensors:
    """The tensors that a user gives to an optimizer."""
    return ExtraTensors([*(buffers or ()), *(extra or {}).items()])
