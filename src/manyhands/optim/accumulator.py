"""Averages gradients over micro-batches of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from manyhands.optim.flat import FlatGradients, GradientLayout, are_finite

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Contribution:
    """A peer's contribution to one global step.

    Attributes:
        mean_N: the gradient of the mean loss, as :class:`manyhands.optim.flat.GradientLayout` says; float32, on the
            host.
        samples: behind it.
        weight: of the vector, in the unit over which the loss is a mean: samples, unless the caller says otherwise.
        since_step: the global step of the parameters behind its oldest samples.
    """

    mean_N: torch.Tensor
    samples: int
    weight: float
    since_step: int = 0


@dataclass
class GradientSum:
    """Gradients that wait for a step.

    Attributes:
        samples, weight: behind them.
        since_step: the global step of the parameters behind the oldest samples.
        was_out: some of it was handed out before, for a step that failed.
        mean: of the loss; undefined while the weight is 0.
    """

    samples: int = 0
    weight: float = 0.0
    since_step: int = 0
    was_out: bool = False
    mean: FlatGradients | None = field(default=None, repr=False)

    def count(self, samples: int, weight: float, since_step: int) -> None:
        """Add to the counts."""
        is_first = not self.samples or (self.weight == 0 and weight > 0)  # samples without weight brought no gradient
        self.since_step = since_step if is_first else min(self.since_step, since_step)
        self.samples += samples
        self.weight += weight


class GradientAccumulator:
    """The gradients of one peer since the last global step.

    Holds the gradient of the mean loss over all samples so far, so batches of different sizes count by their weight.

    Memory: one float32 vector of the size of the parameters, on their device. A second one, on the host, is needed when
    more is added while a contribution is out, so with a delay there are two. Otherwise a second vector on the host
    keeps gradients of later parameters apart from earlier ones, which may become too old first.

    Args:
        is_delayed: more is added while a contribution is out.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, is_delayed: bool = False) -> None:
        self._parameters = list(parameters)
        self.layout = GradientLayout(self._parameters)
        self._is_delayed = is_delayed
        self._device = HOST  # of the latest part
        self._earlier: GradientSum | None = None
        self._latest = GradientSum()
        self._spare_N: torch.Tensor | None = None  # its values are undefined
        self._last_used: tuple[list[bool], torch.Tensor] | None = None
        self._follow_model()

    @property
    def parts(self) -> list[GradientSum]:
        """The waiting parts, the oldest first."""
        return [part for part in (self._earlier, self._latest) if part is not None and part.samples]

    @property
    def samples(self) -> int:
        """Number of samples added so far."""
        return sum(part.samples for part in self.parts)

    @torch.no_grad()
    def add(self, samples: int, weight: float | None = None, grad_scale: float = 1.0, at_step: int = 0) -> bool:
        """Add the current ``.grad`` of all parameters, the gradient of a mean over ``weight``, by default the samples.

        Returns False, and adds nothing, when a gradient is not finite.

        Args:
            grad_scale: factor of the loss.
            at_step: global step of the parameters that it was computed on.
        """
        weight = float(samples) if weight is None else weight
        if weight == 0:
            self._latest.count(samples, 0.0, at_step)
            return True
        gradients = [parameter.grad for parameter in self._parameters]
        used = [gradient for gradient in gradients if gradient is not None]
        if any([gradient.layout is not torch.strided for gradient in used]):  # noqa: C419 (a list is faster)
            gradients = [_dense(gradient) for gradient in gradients]
            used = [gradient for gradient in gradients if gradient is not None]
        if not are_finite(used):
            return False
        self._begin_part(at_step)
        part = self._latest
        mean, is_first, share = self._buffer(), part.weight == 0, weight / (part.weight + weight)
        self._add_in(mean, gradients, grad_scale, None if is_first else share)
        part.count(samples, weight, at_step)
        return True

    def _begin_part(self, at_step: int) -> None:
        """Keep the waiting gradients apart from a batch on later parameters."""
        if self._has_two and self._earlier is None and self._latest.weight > 0 and at_step > self._latest.since_step:
            self._earlier, self._latest = self._latest, GradientSum()

    def _add_in(
        self, mean: FlatGradients, gradients: list[torch.Tensor | None], grad_scale: float, share: float | None
    ) -> None:
        """Move the mean by a share towards the gradients; all the way if the share is None."""
        plain, means = [self._used([gradient is not None for gradient in gradients])], [mean.shares]
        for gradient, value in zip(gradients, mean.values, strict=True):
            if gradient is None:
                value.zero_() if share is None else value.mul_(1 - share)
            elif grad_scale == 1.0 and gradient.dtype is value.dtype and gradient.device == value.device:
                plain.append(gradient)
                means.append(value)
            else:
                gradient = gradient.to(value)  # in float32 before it is divided
                if grad_scale != 1.0:
                    gradient = gradient / grad_scale
                value.copy_(gradient) if share is None else value.lerp_(gradient, share)
        # one call for all that are alike: on a GPU one kernel
        torch._foreach_copy_(means, plain) if share is None else torch._foreach_lerp_(means, plain, share)

    def _used(self, are_used: list[bool]) -> torch.Tensor:
        """One for each parameter that has a gradient, and zero for the others."""
        if self._last_used is None or self._last_used[0] != are_used:
            self._last_used = are_used, torch.tensor(are_used).to(self._device, torch.float32)
        return self._last_used[1]

    def freeze(self) -> Contribution:
        """Return the gradients added so far as a contribution, and begin anew."""
        self._merge()
        part, mean_N = self._latest, self._buffer().flat_N
        if part.weight == 0:
            mean_N.zero_()
        if self._device == HOST:
            part.mean = None
        else:
            mean_N = self._copied_to_host(mean_N)
        contribution = Contribution(mean_N, part.samples, part.weight, part.since_step)
        self._latest = GradientSum(mean=part.mean)
        return contribution

    def take_back(self, contribution: Contribution) -> None:
        """Add back a contribution whose step was not made; it counts in the next attempt."""
        self._merge()
        part = GradientSum(was_out=contribution.samples > 0, mean=FlatGradients(self.layout, contribution.mean_N))
        part.count(contribution.samples, contribution.weight, contribution.since_step)
        self._earlier = part
        if not self._latest.samples or not part.weight > 0:
            self._merge()

    def _merge(self) -> None:
        """Merge all waiting parts into one."""
        earlier, self._earlier = self._earlier, None
        if earlier is None:
            return
        latest = self._latest
        assert earlier.mean is not None
        if earlier.weight > 0 and latest.weight == 0 and self._device == HOST:
            earlier.mean, latest.mean = latest.mean, earlier.mean
        elif earlier.weight > 0:
            given_N, mean_N = earlier.mean.flat_N.to(self._device), self._buffer().flat_N
            share = earlier.weight / (earlier.weight + latest.weight)
            mean_N.copy_(given_N) if latest.weight == 0 else mean_N.lerp_(given_N, share)
        if earlier.samples:
            latest.count(earlier.samples, earlier.weight, earlier.since_step)
        latest.was_out = latest.was_out or earlier.was_out
        if earlier.mean is not None:
            self._spare_N = earlier.mean.flat_N

    def recycle(self, contribution: Contribution) -> None:
        """Reuse the memory of a contribution whose step was made."""
        self._spare_N = contribution.mean_N

    def drop(self, part: GradientSum) -> None:
        """Drop one of the parts."""
        if part is self._latest:
            self._latest = GradientSum(mean=part.mean)
        elif part is self._earlier and part.mean is not None:
            self._earlier, self._spare_N = None, part.mean.flat_N

    def _follow_model(self) -> None:
        """Move to the parameters' device: a model may move to a GPU after its optimizer was made."""
        devices = {parameter.device for parameter in self._parameters}
        device = devices.pop() if len(devices) == 1 else HOST
        if device != self._device:
            self._device, self._latest.mean, self._last_used = device, None, None
        self._has_two = self._is_delayed and device == HOST

    def _buffer(self) -> FlatGradients:
        part = self._latest
        if part.weight == 0:  # there is nothing in it yet
            self._follow_model()
        if part.mean is None:
            if self._device == HOST and self._spare_N is not None:
                part.mean, self._spare_N = FlatGradients(self.layout, self._spare_N), None
            else:
                part.mean = self.layout.empty(self._device)
        return part.mean

    def _copied_to_host(self, mean_N: torch.Tensor) -> torch.Tensor:
        host_N, self._spare_N = self._spare_N, None
        return mean_N.to(HOST) if host_N is None else host_N.copy_(mean_N)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.layout is not torch.strided else gradient
