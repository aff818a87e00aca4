"""Measures a model on the held-out samples, in small parts that need little memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

from manyhands.recipes.albert.batches import IGNORED, Batch
from manyhands.recipes.albert.compute import Compute
from manyhands.recipes.albert.model import compute, heldout_loss
from manyhands.recipes.albert.packages import torch, transformers
from manyhands.recipes.albert.summary import HeldoutLosses

PART_SIZE = 8
"""Most samples computed at once. Long samples are computed in smaller parts; see ``PART_TOKENS``."""
PART_TOKENS = 1024
"""Most tokens computed at once: two samples of 512 take 200 MB beside ALBERT large, in float32 on a CPU."""


class Scores(NamedTuple):
    """Means over the held-out samples.

    Attributes:
        mlm_accuracy: share of the masked tokens that the model guesses correctly.
        sop_accuracy: share of the samples whose sentence order it predicts correctly.
    """

    loss: float
    mlm_accuracy: float
    sop_accuracy: float
    num_samples: int


def scores_of(model: transformers.AlbertForPreTraining, batch: Batch) -> Scores:
    """Measure a model in evaluation mode; its mode is restored."""
    was_training = model.training
    model.train(False)
    loss = torch.zeros((), dtype=torch.float64)
    num_guessed = num_masked = num_in_order = 0
    try:
        with torch.inference_mode():
            for part in parts_of(batch, PART_SIZE):
                labels_BS = part["labels"]  # noqa: N806
                labels_M = labels_BS[labels_BS != IGNORED]  # noqa: N806
                computed = compute(model, part)
                loss += computed.loss.cpu() * len(labels_BS)
                num_guessed += int((computed.token_scores_MV.argmax(-1).cpu() == labels_M).sum())
                num_masked += len(labels_M)
                num_in_order += int((computed.order_scores_B2.argmax(-1).cpu() == part["sentence_order_label"]).sum())
    finally:
        model.train(was_training)
    num_samples = len(batch["labels"])
    return Scores(loss.item() / num_samples, num_guessed / num_masked, num_in_order / num_samples, num_samples)


def parts_of(batch: Batch, max_size: int) -> Iterator[Batch]:
    """Split a batch into parts of at most ``max_size`` samples, fewer if the samples are long."""
    num_samples, seq_length = batch["input_ids"].shape
    size = min(max_size, PART_SIZE, max(1, PART_TOKENS // seq_length))
    for start in range(0, num_samples, size):
        yield {name: values[start : start + size] for name, values in batch.items()}


class _PartialLoss(NamedTuple):
    loss: float
    num_samples: int


class HeldoutComparison:
    """Measures the held-out loss of a model in parts, so that it can stop early when time is short.

    Args:
        batch: all held-out samples.
        max_size: most samples computed at once: those of a training batch are known to fit into memory.
        compute: the device and precision of the training.
    """

    def __init__(self, model: transformers.AlbertForPreTraining, batch: Batch, max_size: int, compute: Compute) -> None:
        self._model = model
        self._batch = batch
        self._max_size = max_size
        self._compute = compute
        self._first: list[_PartialLoss] = []
        self._last: list[_PartialLoss] = []

    def begin(self) -> float:
        """Measure for the first time; returns the loss over all samples."""
        self._first = self._measure(math.inf)
        return _mean(self._first)

    def loss(self) -> float:
        """Measure for the last time; returns the loss over all samples. :meth:`compare` then uses this result."""
        self._last = self._measure(math.inf)
        return _mean(self._last)

    def compare(self, limit_s: float) -> HeldoutLosses | None:
        """The first and the current loss, on as many samples as ``limit_s`` allows; None before :meth:`begin`."""
        if not self._first:
            return None
        now = self._last or self._measure(limit_s)
        return HeldoutLosses(
            before=_mean(self._first[: len(now)]), after=_mean(now), num_samples=sum(part.num_samples for part in now)
        )

    def _measure(self, limit_s: float) -> list[_PartialLoss]:
        """Measure as many parts as ``limit_s`` allows, and at least one."""
        deadline = time.monotonic() + limit_s
        parts: list[_PartialLoss] = []
        for part in parts_of(self._batch, self._max_size):
            if parts and time.monotonic() > deadline:
                break
            with self._compute.autocast():
                loss = heldout_loss(self._model, part)
            parts.append(_PartialLoss(loss, len(part["input_ids"])))
        return parts


def _mean(parts: list[_PartialLoss]) -> float:
    return sum(part.loss * part.num_samples for part in parts) / sum(part.num_samples for part in parts)
