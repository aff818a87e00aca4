"""Sums up gradients over micro-batches of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class GradientAccumulator:
    """The gradients of one peer since the last global step, as one flat vector.

    Holds the sum of (gradient of the mean loss x samples), so that batches of different sizes count by their samples.
    Memory: two vectors of the size of the parameters, in float32.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self.numel = sum(parameter.numel() for parameter in self._parameters)
        self._sum_N = torch.zeros(self.numel, dtype=torch.float32)
        self._mean_N = torch.empty_like(self._sum_N)
        self.samples = 0

    @torch.no_grad()
    def add(self, samples: int) -> bool:
        """Add the current ``.grad`` of all parameters, the gradient of a mean over ``samples``.

        Returns False, and adds nothing, when a gradient is not finite.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        if not all(torch.isfinite(gradient.sum()) for gradient in gradients if gradient is not None):
            return False
        for sum_n, gradient in zip(self._views(self._sum_N), gradients, strict=True):
            if gradient is not None:
                sum_n.add_(gradient.to(sum_n), alpha=samples)
        self.samples += samples
        return True

    def mean(self) -> torch.Tensor:
        """The gradient of the mean loss over all samples so far, shape [N]; valid until the next call."""
        return torch.div(self._sum_N, max(self.samples, 1), out=self._mean_N)

    def reset(self) -> None:
        """Forget everything."""
        self._sum_N.zero_()
        self.samples = 0

    @contextmanager
    def gradients_from(self, averaged_N: torch.Tensor) -> Iterator[None]:
        """Within the block, the ``.grad`` of all parameters is that of a flat vector; after it, what it was before.

        A parameter whose averaged gradient is exactly zero gets None, as plain PyTorch gives to a parameter that the
        loss does not use; all peers see the same vector and so do the same.
        """
        before = [parameter.grad for parameter in self._parameters]
        for parameter, values in zip(self._parameters, self._views(averaged_N), strict=True):
            parameter.grad = values.to(parameter) if values.any() else None
        try:
            yield
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient

    def _views(self, flat_N: torch.Tensor) -> list[torch.Tensor]:
        pieces = torch.split(flat_N, [parameter.numel() for parameter in self._parameters])
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self._parameters, strict=True)]
