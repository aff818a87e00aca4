"""Lies that a peer can tell in a round: for tests, and for ``manyhands demo --liar``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from manyhands.averaging.allreduce.bandwidth import RoundBandwidth
from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.allreduce.checks import Told
from manyhands.averaging.roster import QUALIFYING
from manyhands.averaging.round.exchange import Contribution
from manyhands.optim.optimizer import Optimizer

Change = Callable[[torch.Tensor], torch.Tensor]
"""Returns what takes the place of the mean of a chunk."""


def flip_gradients() -> None:
    """Have the optimizers of this process add minus the gradients that they are given."""
    honest_step = Optimizer.step

    def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.neg_()
        return honest_step(optimizer, *arguments, **options)

    Optimizer.step = step  # type: ignore[method-assign, assignment]


def flip_means() -> None:
    """Have the reducers of this process send minus the means, after as many honest rounds as make a guest a member.

    They go on to reduce although the others blame them.
    """
    honest = Contribution.butterfly
    steps: set[int] = set()

    async def butterfly(contribution: Contribution, members: Collection[int], *, is_again: bool) -> Butterfly:
        made = await honest(contribution, members, is_again=is_again)
        steps.add(contribution.group.position.step)
        if len(steps) > QUALIFYING:
            lie_about_means(made, torch.neg)
        return made

    Contribution.butterfly = butterfly  # type: ignore[method-assign, assignment]
    RoundBandwidth.lose_round = lambda self: None  # type: ignore[method-assign]


LIES: Mapping[str, Callable[[], None]] = {"sign-flip": flip_gradients, "mean-flip": flip_means}
"""What ``manyhands demo --liar`` has one of its trainers do."""


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
