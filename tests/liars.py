"""Has a reducer lie about its means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.allreduce.checks import Told
from manyhands.averaging.allreduce.reducer import SpanReducer

Change = Callable[[torch.Tensor], torch.Tensor]
"""Returns what takes the place of the mean of a chunk."""
Tell = Callable[[Told], Told]


class LyingReducer(SpanReducer):
    """Takes the place of an honest one; see :func:`lie_about_means`."""

    def __init__(self, honest: SpanReducer, change: Change, tell: Tell | None, without: int | None) -> None:
        vars(self).update(vars(honest))
        self._change = change
        self._without = without
        if tell is not None and self._norms is not None:
            told = self._norms.told
            self._norms.told = lambda: tell(told())  # type: ignore[method-assign]

    def _average(
        self,
        present: Sequence[int],
        own: torch.Tensor,
        kept: torch.Tensor,
        received: Mapping[int, torch.Tensor],
        chunk: slice,
        encoded: torch.Tensor,
    ) -> None:
        in_it = [rank for rank in present if rank != self._without]
        super()._average(in_it, own, kept, received, chunk, encoded)
        self._squares.update(dict.fromkeys(set(present).difference(in_it), 0.0))
        self._products, self._num_multiplied = {}, 0  # they are of the true mean
        mean = self._averaged_N[chunk]
        mean.copy_(self._change(mean))
        if not self._is_exact:
            self._plan.encode(mean, chunk.start, encoded)
            self._plan.decode(encoded, chunk.start, mean)


class ForgetfulReducer(SpanReducer):
    """Takes the place of an honest one; see :func:`forget_values`."""

    def __init__(self, honest: SpanReducer, rank: int) -> None:
        vars(self).update(vars(honest))
        self._forgotten = rank

    def _reduce(self, number: int, received: dict[int, torch.Tensor]) -> tuple[list[int], dict[int, str]]:
        received.pop(self._forgotten)
        return super()._reduce(number, received)


def lie_about_means(
    butterfly: Butterfly, change: Change, tell: Tell | None = None, *, without: int | None = None
) -> bool:
    """Have a reducer send other means than it has computed, with the right numbers for these means.

    Args:
        tell: changes these numbers.
        without: the rank of a member whose values are not in the means.
    Returns:
        Whether it reduces anything.
    """
    return replace_reducer(butterfly, lambda honest: LyingReducer(honest, change, tell, without))


def forget_values(butterfly: Butterfly, rank: int) -> None:
    """Have a reducer call a member absent although it has its values."""
    replace_reducer(butterfly, lambda honest: ForgetfulReducer(honest, rank))


def replace_reducer(butterfly: Butterfly, make: Callable[[SpanReducer], SpanReducer]) -> bool:
    """Have another reducer average a member's span; returns whether it has one."""
    reducer = butterfly._reducer = make(butterfly._reducer)  # noqa: SLF001 (a lie is not in its interface)
    return bool(reducer.chunks)
