"""The contributions to a span, passed on by its reducer in place of their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from manyhands.averaging.codecs.codec import BadEncoding
from manyhands.averaging.codecs.plan import Plan

ABSENT, PRESENT = 0, 1


class Gathered:
    """The encoding of such contributions; all members add them up in the order of ranks.

    Has the methods of a :class:`Plan` that means need. The encoding of a slice has a slot for each contributor, in the
    order of ranks: a byte that says whether it came, and its values as it has encoded them.

    Args:
        plan: of one contribution.
        weights: of all members of the group, by rank; 0 for those that contribute nothing.
    """

    def __init__(self, plan: Plan, weights: Sequence[float]) -> None:
        self._plan = plan
        self._weights = weights
        self._contributors = [rank for rank, weight in enumerate(weights) if weight > 0]

    def num_bytes(self, start: int, stop: int) -> int:
        """Size of the encoding of ``flat_N[start:stop]``, in bytes."""
        return len(self._contributors) * (1 + self._plan.num_bytes(start, stop))

    def slots(self, encoded: torch.Tensor) -> dict[int, torch.Tensor]:
        """The slot of each contributor, by rank."""
        size = encoded.numel() // max(1, len(self._contributors))
        return {rank: encoded[at * size : (at + 1) * size] for at, rank in enumerate(self._contributors)}

    def fill(self, encoded: torch.Tensor, received: Mapping[int, torch.Tensor]) -> None:
        """Write the contributions that have come, by rank; the slots of the others stay empty."""
        for rank, slot in self.slots(encoded).items():
            slot[0] = PRESENT if rank in received else ABSENT
            slot[1:].copy_(received[rank]) if rank in received else slot[1:].zero_()

    def decode(self, encoded: torch.Tensor, start: int, out: torch.Tensor) -> None:
        """Write the weighted mean of the contributions that have come.

        Raises:
            BadEncoding: there is none, or one cannot be decoded; ``out`` must then not be used.
        """
        if encoded.numel() != self.num_bytes(start, start + out.numel()):
            raise BadEncoding(f"{out.numel()} contributed values from {start} on are not {encoded.numel()} bytes")
        present = {rank: slot for rank, slot in self.slots(encoded).items() if slot[0] == PRESENT}
        if not present:
            raise BadEncoding("no member's values are there")
        total = sum(self._weights[rank] for rank in present)
        for number, (rank, slot) in enumerate(present.items()):
            self._plan.add(slot[1:], start, self._weights[rank] / total, out, is_first=number == 0)
