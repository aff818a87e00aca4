"""Has a reducer forget a member's values."""

from __future__ import annotations

import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.allreduce.reducer import SpanReducer
from manyhands.testing.lies import replace_reducer


class ForgetfulReducer(SpanReducer):
    """Takes the place of an honest one; see :func:`forget_values`."""

    def __init__(self, honest: SpanReducer, rank: int) -> None:
        vars(self).update(vars(honest))
        self._forgotten = rank

    def _reduce(self, number: int, received: dict[int, torch.Tensor]) -> tuple[list[int], dict[int, str]]:
        received.pop(self._forgotten)
        return super()._reduce(number, received)


def forget_values(butterfly: Butterfly, rank: int) -> None:
    """Have a reducer call a member absent although it has its values."""
    replace_reducer(butterfly, lambda honest: ForgetfulReducer(honest, rank))
