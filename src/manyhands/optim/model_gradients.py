"""The ``.grad`` of the model's parameters around a global step that the training loop waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from manyhands.optim.flat import GradientLayout


class ModelGradients:
    """Gives the memory of all ``.grad`` back while a step is made, and has them show its gradient afterwards.

    What was in them is in the accumulator by then, and a round needs memory. Meanwhile the parameters have none.
    Afterwards they have the same tensors again, in the same memory where it is shared, with other values: a loop may
    rely on these tensors, such as on views of a buffer of its own, or on those that a CUDA graph writes to.

    Args:
        parameters: the model's own.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._layout = GradientLayout(self._parameters)

    @contextmanager
    def set_aside(self, shown_N: Callable[[], torch.Tensor]) -> Iterator[None]:
        """Within the block there are none, and after it those that were there have the values of a flat vector.

        Args:
            shown_N: gives that vector, which lies as :class:`GradientLayout` says, when the block is over.
        """
        held = [(number, one.grad) for number, one in enumerate(self._parameters) if one.grad is not None]
        places = [_place_of(gradient) for _, gradient in held]
        num_at = Counter(places)
        freed: list[tuple[torch.UntypedStorage, int]] = []
        try:
            for number, gradient in held:
                self._parameters[number].grad = None
                if num_bytes := _own_bytes(gradient):
                    freed.append((gradient.untyped_storage(), num_bytes))
                    freed[-1][0].resize_(0)
            yield
        finally:
            for storage, num_bytes in freed:
                storage.resize_(num_bytes)
            values, _ = self._layout.views(shown_N())
            for (number, gradient), place in zip(held, places, strict=True):
                is_alone = place is not None and num_at[place] == 1
                _give_back(self._parameters[number], gradient, values[number], is_alone=is_alone)


@torch.no_grad()
def _give_back(parameter: torch.Tensor, gradient: torch.Tensor, value: torch.Tensor, *, is_alone: bool) -> None:
    """Let a parameter have its gradient with a new value; in another tensor, if that one cannot hold it by itself."""
    if is_alone:
        try:
            gradient.copy_(value)
        except RuntimeError:  # several of its values lie at one place, as after expand()
            is_alone = False
    parameter.grad = gradient if is_alone else value.to(parameter, copy=True)


def _place_of(gradient: torch.Tensor) -> int | None:
    """Where a gradient lies; None if it is not in one piece. Autograd gives two parameters one memory now and then."""
    return gradient.data_ptr() if gradient.layout is torch.strided and gradient.numel() else None


def _own_bytes(gradient: torch.Tensor) -> int:
    """The memory of a gradient, if it is on the host and all of that tensor alone; else 0."""
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided or not gradient.is_cpu:
        return 0
    storage, num_bytes = gradient.untyped_storage(), gradient.numel() * gradient.element_size()
    is_own = storage.nbytes() == num_bytes and storage.resizable() and not gradient.is_shared()  # type: ignore[no-untyped-call]
    return num_bytes if is_own else 0
