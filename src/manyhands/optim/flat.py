"""The gradients of all parameters as one flat vector, and the way back."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class GradientLayout:
    """How gradients lie in a flat vector: the parameters end to end, then one number for each of them.

    That number is the share of the weight whose loss used the parameter. So all peers agree on which parameters have a
    gradient at all, which is not the same as a gradient of zero.

    Args:
        parameters: those that are trained.

    Attributes:
        numel: N, the length of the vector.
        num_values: of these, gradients; the rest are the shares.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        self.num_values = sum(self._sizes)
        self.numel = self.num_values + len(self._sizes)

    def views(self, flat_N: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The values of each parameter in its shape, and for each the share of the weight that used it."""
        *pieces, shares = torch.split(flat_N, [*self._sizes, len(self._sizes)])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)], shares

    @contextmanager
    def installed(self, parameters: Sequence[torch.Tensor], flat_N: torch.Tensor) -> Iterator[None]:
        """Within the block, the ``.grad`` of all parameters is that of a flat vector; after it, what it was before.

        A parameter that no sample used gets None, as plain PyTorch does.
        """
        before = [parameter.grad for parameter in parameters]
        values, shares = self.views(flat_N)
        for parameter, value, used in zip(parameters, values, shares.tolist(), strict=True):
            parameter.grad = value.to(parameter) if used > 0 else None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All values end to end, in float32 on the host, copied."""
    return torch.cat([tensor.detach().reshape(-1).to("cpu", torch.float32) for tensor in tensors])


@torch.no_grad()
def assign_flat(tensors: Sequence[torch.Tensor], flat_N: torch.Tensor) -> None:
    """Write what :func:`flattened` has read, or the like."""
    for tensor, values in zip(tensors, torch.split(flat_N, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def values_at(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> list[float]:
    """Single values, by their place in :func:`flattened`."""
    stops = list(itertools.accumulate(tensor.numel() for tensor in tensors))
    values = []
    for index in indices:
        number = bisect.bisect_right(stops, index)
        values.append(float(tensors[number].detach().reshape(-1)[index - stops[number]]))
    return values


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all values are; asks each device once.

    Adds them up in float32, which reads them once and keeps nothing; so values whose sum overflows are not finite.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach().sum(dtype=torch.float32))
    return all(bool(torch.stack(sums).isfinite().all()) for sums in by_device.values())
