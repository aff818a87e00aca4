"""Averages gradients over micro-batches of any size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class GradientAccumulator:
    """The gradients of one peer since the last global step, as one flat vector.

    Holds the gradient of the mean loss over all samples so far, so batches of different sizes count by their samples.
    The vector ends with one more number for each parameter: the share of the samples whose loss used it. So all peers
    agree on which parameters have a gradient at all, which is not the same as a gradient of zero.

    Memory: one vector of the size of the parameters, in float32.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._mean_N = torch.zeros(sum(self._sizes) + len(self._sizes), dtype=torch.float32)
        self._mean_views = self._views(self._mean_N)
        self.samples = 0

    @torch.no_grad()
    def add(self, samples: int) -> bool:
        """Add the current ``.grad`` of all parameters, the gradient of a mean over ``samples``.

        Returns False, and adds nothing, when a gradient is not finite.
        """
        gradients = [None if parameter.grad is None else parameter.grad.to_dense() for parameter in self._parameters]
        sums = (gradient.sum(dtype=torch.float32).item() for gradient in gradients if gradient is not None)
        if not all(math.isfinite(total) for total in sums):
            return False
        share = samples / (self.samples + samples)
        means, shares = self._mean_views
        for mean, gradient in zip(means, gradients, strict=True):
            if gradient is None:
                mean.mul_(1 - share)
            else:
                mean.lerp_(gradient.to(mean), share)
        shares.lerp_(torch.tensor([0.0 if gradient is None else 1.0 for gradient in gradients]), share)
        self.samples += samples
        return True

    def mean(self) -> torch.Tensor:
        """The gradient of the mean loss over all samples so far, as described above; changes with the next call."""
        return self._mean_N

    def reset(self) -> None:
        """Forget everything."""
        self._mean_N.zero_()
        self.samples = 0

    @contextmanager
    def gradients_from(self, averaged_N: torch.Tensor) -> Iterator[None]:
        """Within the block, the ``.grad`` of all parameters is that of a flat vector; after it, what it was before.

        A parameter that no sample used gets None, as plain PyTorch does.
        """
        before = [parameter.grad for parameter in self._parameters]
        averages, shares = self._views(averaged_N)
        for parameter, values, used in zip(self._parameters, averages, shares.tolist(), strict=True):
            parameter.grad = values.to(parameter) if used > 0 else None
        try:
            yield
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient

    def _views(self, flat_N: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The values of each parameter in its shape, and for each the share of the samples that used it."""
        *pieces, shares = torch.split(flat_N, [*self._sizes, len(self._sizes)])
        views = [piece.view(parameter.shape) for piece, parameter in zip(pieces, self._parameters, strict=True)]
        return views, shares
