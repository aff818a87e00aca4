"""Lies that only tests tell: a reducer that forgets a member's values, and a norm that is not that of the values."""

from __future__ import annotations

from typing import Any

import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.allreduce.reducer import SpanReducer
from manyhands.averaging.matchmaking.matchmaker import Matchmaker
from manyhands.averaging.messages import Group
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


def say_norm(matchmaker: Matchmaker, said: float) -> None:
    """Have a peer say that its values have this norm."""
    find_group = matchmaker.find_group

    async def find_and_say(*arguments: Any, norm: float, **options: Any) -> Group:
        return await find_group(*arguments, norm=said, **options)

    matchmaker.find_group = find_and_say  # type: ignore[assignment, method-assign]
