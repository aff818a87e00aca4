"""The ``.grad`` of the model's parameters around a global step that the training loop waits for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from manyhands.optim.flat import GradientLayout
from manyhands.optim.own_memory import has_own_memory


def _count_of_one_name() -> int:
    """What :func:`sys.getrefcount` says of an object that one local name refers to, and nothing else."""
    one = object()
    return sys.getrefcount(one)


_ONE_NAME = _count_of_one_name()


class _Place(NamedTuple):
    """What a gradient was like that nobody else could see."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class ModelGradients:
    """Gives the memory of all ``.grad`` back while a step is made, and has them show its gradient afterwards.

    What was in them is in the accumulator by then, and a round needs memory. Meanwhile the parameters have none. Those
    tensors that somebody else may see stay what they are and come back: another thread may read them, and a loop
    may rely on them, on views of a buffer of its own say, or on what a CUDA graph writes to. Others are made anew.

    Args:
        parameters: the model's own.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._layout = GradientLayout(self._parameters)

    @contextmanager
    def set_aside(self, shown: Callable[[], tuple[torch.Tensor, bool]]) -> Iterator[None]:
        """Within the block there are none, and after it those that were there have the values of a flat vector.

        Args:
            shown: gives that vector, which lies as :class:`GradientLayout` says, when the block is over; and whether
                tensors that somebody else may see are to have its values as well.
        """
        taken: dict[int, torch.Tensor | _Place] = {}
        try:
            for number in range(len(self._parameters)):
                self._take(number, taken)
            yield
        finally:
            self._give_back(taken, *shown())

    def _take(self, number: int, taken: dict[int, torch.Tensor | _Place]) -> None:
        gradient = self._parameters[number].grad
        if gradient is None:
            return
        is_plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
        place = _Place(gradient.size(), gradient.stride(), gradient.dtype) if is_plain else None
        self._parameters[number].grad = None  # from here on nobody new can see it
        try:
            is_seen = place is None or sys.getrefcount(gradient) > _ONE_NAME or not _is_free(gradient)
            taken[number] = gradient if is_seen or place is None else place
        except BaseException:  # an interrupt
            self._parameters[number].grad = gradient
            raise

    def _give_back(self, taken: dict[int, torch.Tensor | _Place], shown_N: torch.Tensor, is_for_all: bool) -> None:
        """Have all of them back, whatever goes wrong with one; the first of that is raised in the end."""
        values, _ = self._layout.views(shown_N)
        addresses = Counter(map(_address_of, taken.values()))
        first_error: BaseException | None = None
        for number, gradient in taken.items():
            try:
                address = _address_of(gradient)  # autograd gives two parameters one memory now and then
                is_alone = address is None or addresses[address] == 1
                parameter = self._parameters[number]
                parameter.grad = _shown(parameter, gradient, values[number], is_for_all, is_alone=is_alone)
            except BaseException as error:  # noqa: BLE001 (an interrupt must not leave half of a gradient)
                first_error = first_error or error
        if first_error is not None:
            raise first_error


@torch.no_grad()
def _shown(
    parameter: torch.Tensor, gradient: torch.Tensor | _Place, value: torch.Tensor, is_for_all: bool, *, is_alone: bool
) -> torch.Tensor:
    """A gradient with a new value; in another tensor, if the one that was there cannot hold it by itself."""
    if isinstance(gradient, _Place):
        if gradient.dtype != parameter.dtype:
            return value.to(parameter, copy=True)
        return torch.empty_strided(gradient.size, gradient.stride, dtype=gradient.dtype).copy_(value)
    if gradient.dtype != parameter.dtype or gradient.device != parameter.device:
        return value.to(parameter, copy=True)
    if not is_for_all:
        return gradient
    if is_alone and not _overlaps_itself(gradient):
        return gradient.copy_(value)
    return value.to(parameter, copy=True)


def _overlaps_itself(gradient: torch.Tensor) -> bool:
    """Whether several of its values lie at one place, as after ``expand()``, or it has no places."""
    return gradient.layout is not torch.strided or any(
        stride == 0 and size > 1 for size, stride in zip(gradient.size(), gradient.stride(), strict=True)
    )


def _address_of(gradient: torch.Tensor | _Place) -> int | None:
    """Where a gradient lies; None if nowhere, or not in one piece."""
    if isinstance(gradient, _Place) or gradient.layout is not torch.strided or not gradient.numel():
        return None
    return gradient.data_ptr()


def _is_free(gradient: torch.Tensor) -> bool:
    """Whether the memory of a plain gradient is on the host, and all of that tensor alone."""
    storage, num_bytes = gradient.untyped_storage(), gradient.numel() * gradient.element_size()
    if not gradient.is_cpu or gradient.is_shared() or storage.nbytes() != num_bytes or not storage.resizable():  # type: ignore[no-untyped-call]
        return False
    return has_own_memory(gradient)
