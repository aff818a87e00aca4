"""Has a reducer lie about its means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.allreduce.checks import Told

Change = Callable[[torch.Tensor], torch.Tensor]
"""Returns what takes the place of the mean of a chunk."""


def lie_about_means(
    butterfly: Butterfly, change: Change, tell: Callable[[Told], Told] | None = None, *, without: int | None = None
) -> None:
    """Have a reducer send other means than it has computed, with the right numbers for these means.

    Args:
        tell: changes these numbers.
        without: the rank of a member whose values are not in the means.
    """
    reducer = butterfly._reducer
    average, plan = reducer._average, butterfly._plan

    def lying(
        present: Sequence[int], own: Any, kept: Any, received: Mapping[int, Any], chunk: slice, encoded: torch.Tensor
    ) -> None:
        in_it = [rank for rank in present if rank != without]
        average(in_it, own, kept, received, chunk, encoded)
        reducer._squares.update(dict.fromkeys(set(present).difference(in_it), 0.0))
        reducer._products, reducer._num_multiplied = {}, 0  # they are of the true mean
        mean = reducer._averaged_N[chunk]
        mean.copy_(change(mean))
        if not butterfly.partition.is_exact:
            plan.encode(mean, chunk.start, encoded)
            plan.decode(encoded, chunk.start, mean)

    reducer._average = lying  # type: ignore[method-assign]
    if tell is not None:
        norms = butterfly._norms
        assert norms is not None
        told = norms.told
        norms.told = lambda: tell(told())  # type: ignore[method-assign]
