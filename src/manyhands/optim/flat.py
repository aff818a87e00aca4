"""The gradients of all parameters as one flat vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from manyhands.averaging.codecs import Uncompared

CHECKED_NUMEL = 1 << 20
"""The number of values that are checked together, where the check needs memory."""


class GradientLayout:
    """The layout of a vector with the gradients of all parameters in order, a *share* for each, and extra tensors.

    The share of a parameter is the part of the total weight whose loss used the parameter. From it all peers learn
    which parameters have a gradient at all, as opposed to a gradient of zero.

    Attributes:
        num_values: number of gradient values; after them come the shares.
        numel: number of all values.
        shapes: of the tensors in the vector, in order.
        shapes_of_rest: of the shares and the extra tensors.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], shapes_of_extra: Sequence[Sequence[int]] = ()) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        self.num_values = sum(self._sizes)
        self.shapes_of_rest: list[Sequence[int]] = [Uncompared([len(self._shapes)]), *shapes_of_extra]
        self.shapes: list[Sequence[int]] = [*self._shapes, *self.shapes_of_rest]
        self._num_extra = sum(math.prod(shape) for shape in shapes_of_extra)
        self.numel = self.num_values + len(self._sizes) + self._num_extra

    def extra(self, flat_N: torch.Tensor) -> torch.Tensor:
        """A view of the extra tensors' values."""
        return flat_N[self.numel - self._num_extra :]

    def views(self, flat_N: torch.Tensor) -> FlatGradients:
        """Make views of the parts of a vector."""
        *pieces, shares, _ = torch.split(flat_N, [*self._sizes, len(self._sizes), self._num_extra])
        values = [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
        return FlatGradients(flat_N, values, shares)

    def empty(self, device: torch.device) -> FlatGradients:
        """A new uninitialised vector."""
        return self.views(torch.empty(self.numel, dtype=torch.float32, device=device))

    @contextmanager
    def installed(
        self, parameters: Sequence[torch.Tensor], flat_N: torch.Tensor, others: Sequence[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Within the block, use a flat vector as the ``.grad`` of the parameters; restore their own ``.grad`` after it.

        A parameter that no sample used gets None, as in plain PyTorch. So do the ``others``, which are not in the
        vector.
        """
        before = [(parameter, parameter.grad) for parameter in (*parameters, *others)]
        _, values, shares = self.views(flat_N)
        try:
            for parameter, value, used in zip(parameters, values, shares.tolist(), strict=True):
                parameter.grad = value.to(parameter) if used > 0 else None
            for parameter in others:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient


class FlatGradients(NamedTuple):
    """A flat vector with views of its parts."""

    flat_N: torch.Tensor
    values: list[torch.Tensor]  # for each parameter, in its shape
    shares: torch.Tensor


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all values in order, in float32 on the host."""
    return torch.cat([tensor.detach().reshape(-1).to("cpu", torch.float32) for tensor in tensors])


@torch.no_grad()
def assign_flat(tensors: Sequence[torch.Tensor], flat_N: torch.Tensor) -> None:
    """Write a vector in the layout of :func:`flattened`."""
    for tensor, values in zip(tensors, torch.split(flat_N, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


@torch.no_grad()
def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all values are finite as float32.

    First it adds values up: a finite sum proves that all of them are finite. On the host these are all values, which
    needs no memory. On other devices they are the largest values of the tensors, which takes one kernel and one
    synchronization for all tensors of one device and dtype. If the sum is not finite, each tensor is checked.
    """
    total = 0.0
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_cpu:
            total += tensor.sum(dtype=torch.float32).item()
        elif tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for alike in by_kind.values():
        total += torch.stack(torch._foreach_norm(alike, math.inf)).float().sum().item()  # noqa: SLF001 (one kernel)
    if math.isfinite(total):
        return True
    pieces = (piece for tensor in tensors for piece in torch.split(tensor.reshape(-1), CHECKED_NUMEL))
    return all(bool(piece.float().isfinite().all()) for piece in pieces)


def num_writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place, as torch counts that: without writes through ``.data``."""
    return tensor._version  # noqa: SLF001 (torch has no public name for it)
