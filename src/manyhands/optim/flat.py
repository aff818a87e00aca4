"""The gradients of all parameters as one flat vector, and the way back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from manyhands.averaging.codecs import Uncompared

CHECKED_NUMEL = 1 << 20
"""Values that are checked together, where that needs memory."""


class GradientLayout:
    """The layout of gradients in a flat vector: the parameters in order, one number for each of them, extra tensors.

    That number is the share of the weight whose loss used the parameter. So all peers agree on which parameters have a
    gradient at all, as opposed to a gradient of zero.

    Attributes:
        num_values: number of gradient values; after them come the shares.
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
        """A vector with views of its parts."""
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
        """Within the block, use a flat vector as the ``.grad`` of all parameters; restore them after it.

        A parameter that no sample used gets None, as in plain PyTorch; so do others that are not in the vector.
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
    """A flat vector with views of its parts: the values of each parameter, in its shape, and the shares."""

    flat_N: torch.Tensor
    values: list[torch.Tensor]
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
    """Whether all values are finite as float32; synchronizes with each device once.

    On the host it adds them up, which reads them once and keeps nothing; elsewhere the largest of each, with one kernel
    for all of a kind. If the sum is not finite, the tensors are checked one by one.
    """
    largest, by_kind = 0.0, dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]()
    for tensor in tensors:
        if tensor.is_cpu:
            largest += tensor.sum(dtype=torch.float32).item()
        elif tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for those in by_kind.values():
        largest += torch.stack(torch._foreach_norm(those, math.inf)).float().sum().item()  # noqa: SLF001 (one kernel)
    if math.isfinite(largest):
        return True
    pieces = (piece for tensor in tensors for piece in torch.split(tensor.reshape(-1), CHECKED_NUMEL))
    return all(bool(piece.float().isfinite().all()) for piece in pieces)


def num_writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place, as torch counts it: not through ``.data``."""
    return tensor._version  # noqa: SLF001 (torch has no public name for it)
