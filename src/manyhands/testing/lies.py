"""Lies that a peer can tell in a round: for tests, and for ``manyhands demo --liar``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from manyhands.averaging.allreduce.bandwidth import RoundBandwidth
from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.allreduce.checks import Told
from manyhands.averaging.allreduce.reducer import SpanReducer
from manyhands.averaging.messages import MAX_BANDWIDTH
from manyhands.averaging.roster import QUALIFYING
from manyhands.averaging.round.exchange import Contribution
from manyhands.optim.optimizer import Optimizer

Change = Callable[[torch.Tensor], torch.Tensor]
"""Returns what takes the place of the mean of a chunk."""
Tell = Callable[[Told], Told]


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

    They say that they have the fastest line, so that they reduce in each round, also when the others have blamed them.
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
    RoundBandwidth.bandwidth = property(lambda self: MAX_BANDWIDTH)  # type: ignore[method-assign, assignment]
    RoundBandwidth.lose_round = lambda self: None  # type: ignore[method-assign]


LIES: Mapping[str, Callable[[], None]] = {"sign-flip": flip_gradients, "mean-flip": flip_means}
"""What ``manyhands demo --liar`` has one of its trainers do."""


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


def replace_reducer(butterfly: Butterfly, make: Callable[[SpanReducer], SpanReducer]) -> bool:
    """Have another reducer average a member's span; returns whether it has one."""
    reducer = butterfly._reducer = make(butterfly._reducer)
    return bool(reducer.chunks)
