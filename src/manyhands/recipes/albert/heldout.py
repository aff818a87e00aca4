"""How well a model does on the held-out samples, at the beginning and at the end."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from manyhands.recipes.albert.account import HeldoutLosses
from manyhands.recipes.albert.batches import Batch
from manyhands.recipes.albert.model import heldout_loss
from manyhands.recipes.albert.packages import transformers

PART_SIZE = 8


class _Part(NamedTuple):
    loss: float
    num_samples: int


class HeldoutComparison:
    """Measures the held-out loss of a model in parts, so that it can be broken off when time is short.

    Args:
        batch: all held-out samples.
    """

    def __init__(self, model: transformers.AlbertForPreTraining, batch: Batch) -> None:
        self._model = model
        self._batch = batch
        self._first: list[_Part] = []

    def begin(self) -> float:
        """Measure for the first time; returns the loss over all samples."""
        self._first = self._measure(math.inf)
        return _mean(self._first)

    def loss(self) -> float:
        """The loss over all samples now."""
        return _mean(self._measure(math.inf))

    def compare(self, limit_s: float) -> HeldoutLosses | None:
        """Then and now, on as many samples as can be computed in so many seconds; None before :meth:`begin`."""
        if not self._first:
            return None
        now = self._measure(limit_s)
        return HeldoutLosses(
            before=_mean(self._first[: len(now)]), after=_mean(now), num_samples=sum(part.num_samples for part in now)
        )

    def _measure(self, limit_s: float) -> list[_Part]:
        """The losses of the parts, at least of one."""
        deadline, parts = time.monotonic() + limit_s, []
        num_samples = len(self._batch["input_ids"])
        for start in range(0, num_samples, PART_SIZE):
            if start > 0 and time.monotonic() > deadline:
                break
            part = {name: values[start : start + PART_SIZE] for name, values in self._batch.items()}
            parts.append(_Part(heldout_loss(self._model, part), len(part["input_ids"])))
        return parts


def _mean(parts: list[_Part]) -> float:
    return sum(part.loss * part.num_samples for part in parts) / sum(part.num_samples for part in parts)
