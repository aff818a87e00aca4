"""Averages gradients over micro-batches of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manyhands.optim.flat import GradientLayout, are_finite

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Contribution:
    """What a peer brings to one global step.

    Attributes:
        mean_N: the gradient of the mean loss, as :class:`manyhands.optim.flat.GradientLayout` says; float32, on the
            host.
        samples: behind it.
        weight: of the vector, in the unit over which the loss is a mean: samples, unless the caller says otherwise.
        since_step: the global step of the parameters that the oldest of it was computed on.
    """

    mean_N: torch.Tensor
    samples: int
    weight: float
    since_step: int = 0


class GradientAccumulator:
    """The gradients of one peer since the last global step.

    Holds the gradient of the mean loss over all samples so far, so batches of different sizes count by their weight.

    Memory: one vector of the size of the parameters, in float32, on their device; and while a contribution is out and
    more is added, another one on the host.

    Attributes:
        samples, weight: added so far.
        since_step: the global step of the parameters that the oldest of it was computed on.
        was_out: something of it was handed out before, for a step that failed.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self.layout = GradientLayout(self._parameters)
        devices = {parameter.device for parameter in self._parameters}
        self._device = devices.pop() if len(devices) == 1 else HOST
        self._buffer_N: torch.Tensor | None = None
        self._spare_N: torch.Tensor | None = None  # its values mean nothing
        self.samples = 0
        self.weight = 0.0
        self.since_step = 0
        self.was_out = False

    @torch.no_grad()
    def add(self, samples: int, weight: float | None = None, grad_scale: float = 1.0, at_step: int = 0) -> bool:
        """Add the current ``.grad`` of all parameters, the gradient of a mean over ``weight``, by default the samples.

        Returns False, and adds nothing, when a gradient is not finite.

        Args:
            grad_scale: by which the loss was multiplied.
            at_step: global step of the parameters that it was computed on.
        """
        weight = float(samples) if weight is None else weight
        if weight == 0:
            self._count(samples, 0.0, at_step)
            return True
        gradients = [None if parameter.grad is None else parameter.grad.to_dense() for parameter in self._parameters]
        if not are_finite([gradient for gradient in gradients if gradient is not None]):
            return False
        mean_N = self._buffer()
        is_first, share = self.weight == 0, weight / (self.weight + weight)
        means, shares = self.layout.views(mean_N)
        for mean, gradient in zip(means, gradients, strict=True):
            if gradient is None:
                mean.zero_() if is_first else mean.mul_(1 - share)
                continue
            gradient = gradient.to(mean)  # in float32 before it is divided
            if grad_scale != 1.0:
                gradient = gradient / grad_scale
            mean.copy_(gradient) if is_first else mean.lerp_(gradient, share)
        used = torch.tensor([0.0 if gradient is None else 1.0 for gradient in gradients]).to(shares)
        shares.copy_(used) if is_first else shares.lerp_(used, share)
        self._count(samples, weight, at_step)
        return True

    def _count(self, samples: int, weight: float, since_step: int) -> None:
        self.since_step = min(self.since_step, since_step) if self.samples else since_step
        self.samples += samples
        self.weight += weight

    def freeze(self) -> Contribution:
        """Hand out what was added so far, and begin anew."""
        mean_N = self._buffer()
        if self.weight == 0:
            mean_N.zero_()
        if self._device == HOST:
            self._buffer_N = None
        else:
            mean_N = self._copied_to_host(mean_N)
        contribution = Contribution(mean_N, self.samples, self.weight, self.since_step)
        self.reset()
        return contribution

    def take_back(self, contribution: Contribution) -> None:
        """The step was not made: what was handed out counts in the next attempt."""
        if contribution.weight > 0:
            if self.weight > 0:
                share = contribution.weight / (self.weight + contribution.weight)
                self._buffer().lerp_(contribution.mean_N.to(self._device), share)
                self._spare_N = contribution.mean_N
            elif self._device == HOST:
                self._buffer_N = contribution.mean_N
            else:
                self._buffer().copy_(contribution.mean_N)
                self._spare_N = contribution.mean_N
        else:
            self._spare_N = contribution.mean_N
        if contribution.samples:
            self._count(contribution.samples, contribution.weight, contribution.since_step)
            self.was_out = True

    def recycle(self, contribution: Contribution) -> None:
        """The step was made: the memory is free."""
        self._spare_N = contribution.mean_N

    def reset(self) -> None:
        """Forget everything."""
        self.samples, self.weight, self.since_step, self.was_out = 0, 0.0, 0, False

    def _buffer(self) -> torch.Tensor:
        if self._buffer_N is None:
            if self._device == HOST and self._spare_N is not None:
                self._buffer_N, self._spare_N = self._spare_N, None
            else:
                self._buffer_N = torch.empty(self.layout.numel, dtype=torch.float32, device=self._device)
        return self._buffer_N

    def _copied_to_host(self, mean_N: torch.Tensor) -> torch.Tensor:
        host_N, self._spare_N = self._spare_N, None
        return mean_N.to(HOST) if host_N is None else host_N.copy_(mean_N)
