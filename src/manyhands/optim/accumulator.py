"""Averages gradients over micro-batches of any size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from manyhands.optim.extra_tensors import ExtraTensors
from manyhands.optim.flat import FlatGradients, GradientLayout, are_finite

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Contribution:
    """A peer's contribution to one global step.

    Attributes:
        mean_N: the gradient of the mean loss in the layout of ``GradientLayout``; float32, on the host.
        samples: number of samples of which it is the mean.
        weight: their number in the unit over which the loss is a mean: samples, unless the caller says otherwise.
        since_step: the global step of the parameters that the oldest of the samples were computed with.
        refill: computes the vector again, in memory of its own, until the step is made. With it the mean of all peers
            may overwrite ``mean_N``. None if the vector cannot be computed again.
    """

    mean_N: torch.Tensor
    samples: int
    weight: float
    since_step: int = 0
    refill: Callable[[], torch.Tensor] | None = None


class Accumulator(ABC):
    """Accumulates what one peer computes between two global steps. Belongs to the training thread.

    Attributes:
        samples: number of accumulated samples.
        since_step: the global step of the parameters that the oldest of them were computed with.
        was_out: whether some of them were in the contribution to an attempt that failed.
    """

    def __init__(self) -> None:
        self.samples, self.since_step, self.was_out = 0, 0, False

    @abstractmethod
    def add(self, samples: int, weight: float | None = None, grad_scale: float = 1.0, at_step: int = 0) -> bool:
        """Add the current ``.grad`` of all parameters; if one is not finite, add nothing and return False.

        Args:
            weight: see :class:`Contribution`; by default the number of samples.
            grad_scale: the factor by which the loss was multiplied; the gradients are divided by it.
            at_step: the global step of the parameters.
        """

    def fault(self) -> str:
        """Why the accumulated samples cannot be used, in words; empty if they can."""
        return ""

    @abstractmethod
    def freeze(self) -> Contribution:
        """Return the accumulated samples as a contribution, and begin anew without them."""

    @abstractmethod
    def take_back(self, contribution: Contribution) -> None:
        """Add back a contribution whose step was not made: it counts in the next attempt."""

    def carry(self, contribution: Contribution) -> None:
        """Add back a contribution that is not in the step that this peer and the others have made."""
        self.take_back(contribution)

    @abstractmethod
    def release(self, contribution: Contribution, *, is_free: bool) -> None:
        """Forget a contribution that has counted or is dropped.

        Args:
            is_free: whether its memory can be used again, as nothing else holds it.
        """

    def drop(self) -> None:
        """Forget the accumulated samples."""
        self.samples, self.since_step, self.was_out = 0, 0, False

    def _count(self, samples: int, since_step: int) -> None:
        self.since_step = min(self.since_step, since_step) if self.samples else since_step
        self.samples += samples


class GradientAccumulator(Accumulator):
    """The gradient of the mean loss over all samples of one peer since the last global step.

    Memory: one float32 vector of the size of the parameters, on their device. A contribution takes it along if it is on
    the host. So a second one is needed if samples are added while a step is made, as with ``delay``. For parameters on
    another device, a contribution is always a second vector, on the host.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], extra: ExtraTensors) -> None:
        super().__init__()
        self._parameters = list(parameters)
        self._extra = extra
        self.layout = GradientLayout(self._parameters, self._extra.shapes)
        self.weight = 0.0
        self._device = HOST
        self._mean: FlatGradients | None = None  # the gradient of the mean loss; undefined while the weight is 0
        self._spare_N: torch.Tensor | None = None  # memory for another vector; its values are undefined

    @torch.no_grad()
    def add(self, samples: int, weight: float | None = None, grad_scale: float = 1.0, at_step: int = 0) -> bool:
        weight = float(samples) if weight is None else weight
        if weight > 0:
            gradients = [_dense(parameter.grad) for parameter in self._parameters]
            if not are_finite([gradient for gradient in gradients if gradient is not None]):
                return False
            add_gradients(self._buffer(), gradients, grad_scale, weight / (self.weight + weight))
        self._count(samples, at_step)
        self.weight += weight
        return True

    def freeze(self) -> Contribution:
        mean_N = self._buffer().flat_N
        if self.weight == 0:
            mean_N.zero_()
        if self._device == HOST:
            self._mean = None
        else:
            host_N, self._spare_N = self._spare_N, None
            mean_N = mean_N.to(HOST) if host_N is None else host_N.copy_(mean_N)
        self.layout.extra(mean_N).copy_(self._extra.contribution())
        contribution = Contribution(mean_N, self.samples, self.weight, self.since_step)
        self.drop()
        return contribution

    def take_back(self, contribution: Contribution) -> None:
        if contribution.weight > 0:
            self._merge(contribution.mean_N, contribution.weight)
        if contribution.samples:
            self._count(contribution.samples, contribution.since_step)
            self.was_out = True

    def _merge(self, given_N: torch.Tensor, weight: float) -> None:
        """Add a mean gradient of a weight to the accumulated one; its memory is this object's from now on."""
        if self.weight == 0 and self._device == HOST:
            before, self._mean = self._mean, self.layout.views(given_N)
            self._spare_N = self._spare_N if before is None else before.flat_N
        else:
            mean_N = self._buffer().flat_N
            if self.weight == 0:
                mean_N.copy_(given_N)
            else:
                mean_N.lerp_(given_N.to(self._device), weight / (weight + self.weight))
            self._spare_N = given_N
        self.weight += weight

    def release(self, contribution: Contribution, *, is_free: bool) -> None:
        if is_free:
            self._spare_N = contribution.mean_N

    def drop(self) -> None:
        super().drop()
        self.weight = 0.0

    def _buffer(self) -> FlatGradients:
        device = self._home()
        if self.weight == 0 and device != self._device:  # the model was moved, and nothing has been added since
            self._device, self._mean = device, None
        if self._mean is None and self._device == HOST and self._spare_N is not None:
            self._mean, self._spare_N = self.layout.views(self._spare_N), None
        elif self._mean is None:
            self._mean = self.layout.empty(self._device)
        return self._mean

    def _home(self) -> torch.device:
        """Where the mean is accumulated."""
        devices = {parameter.device for parameter in self._parameters}
        return devices.pop() if len(devices) == 1 else HOST


def add_gradients(
    mean: FlatGradients, gradients: Sequence[torch.Tensor | None], grad_scale: float, share: float
) -> None:
    """Move a mean towards these gradients by their share of the weight; with a share of 1 they take its place."""
    is_first = share == 1
    device = mean.flat_N.device
    used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.float32, device=device)
    plain, means = [used], [mean.shares]
    for gradient, value in zip(gradients, mean.values, strict=True):
        if gradient is None:
            if is_first:
                value.zero_()
            else:
                value.mul_(1 - share)
        elif grad_scale == 1.0 and gradient.dtype is value.dtype and gradient.device == value.device:
            plain.append(gradient)
            means.append(value)
        else:
            gradient = gradient.to(value)  # float32 before the division, which may underflow in half precision
            if grad_scale != 1.0:
                gradient = gradient / grad_scale
            if is_first:
                value.copy_(gradient)
            else:
                value.lerp_(gradient, share)
    # one call for all gradients that need no conversion: on a GPU, one kernel
    if is_first:
        torch._foreach_copy_(means, plain)
    else:
        torch._foreach_lerp_(means, plain, share)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.layout is not torch.strided else gradient
