"""Measures a run on held-out text, without taking part in it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from manyhands.base.errors import Timeout
from manyhands.base.text import counted
from manyhands.optim.metrics import HeldoutRecord, publish_metrics
from manyhands.peer import Peer
from manyhands.recipes.albert.adoption import RunRecipe
from manyhands.recipes.albert.batches import heldout_batch
from manyhands.recipes.albert.compute import SMALLER, Compute
from manyhands.recipes.albert.heldout import scores_of
from manyhands.recipes.albert.packages import torch
from manyhands.recipes.albert.source import heldout_samples, place_of
from manyhands.recipes.albert.state_follower import StateFollower
from manyhands.recipes.albert.trainer_events import Evaluated

logger = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 10.0


class AlbertEvaluator:
    """Loads the state of a run every few global steps, and measures it on the samples that trainers hold out.

    An evaluator with the text or data of the trainers measures on the same samples as they do.

    Args:
        run: its recipe, with this evaluator's text or data.
        on_event: called with each measurement.
    Raises:
        ConfigError: the text, the data or the device cannot be used.
    """

    def __init__(
        self,
        peer: Peer,
        run_id: str,
        run: RunRecipe,
        on_event: Callable[[Evaluated], None] = lambda event: None,
        *,
        device: str = "auto",
        threads: int | None = None,
    ) -> None:
        self._peer = peer
        self._run_id = run_id
        self._on_event = on_event
        if threads is not None:
            torch.set_num_threads(threads)
        self._compute = Compute(device, "float32")
        logger.info("Computing on %s", self._compute)
        self._follower = StateFollower(peer, run_id, run, self._compute)
        samples = heldout_samples(run_id, run.recipe, self._follower.tokenizer)
        logger.info("Measuring on %s %s", counted(len(samples.heldout), "held-out sample"), place_of(run.recipe))
        self._batch = heldout_batch(samples, run.recipe)

    def run(self, every: int, max_evaluations: int | None = None, until_step: int | None = None) -> None:
        """Measure every ``every`` global steps, until ``max_evaluations`` or ``until_step`` is reached, if given."""
        num_done = 0
        step = -1
        while num_done != max_evaluations and (until_step is None or step < until_step):
            step = self._follower.next_state(every)
            self._measure(step)
            num_done += 1

    def _measure(self, step: int) -> None:
        with self._compute.fitting("a part of the held-out samples", SMALLER):
            scores = scores_of(self._follower.model, self._batch)
        logger.info(
            "Held-out loss %.4f, MLM accuracy %.1f%%, SOP accuracy %.1f%% at global step %d",
            scores.loss, 100 * scores.mlm_accuracy, 100 * scores.sop_accuracy, step,
        )  # fmt: skip
        self._on_event(Evaluated(step, scores.loss, scores.mlm_accuracy, scores.sop_accuracy, scores.num_samples))
        if not math.isfinite(scores.loss):
            logger.warning("The model has diverged: its loss is not finite, and is left out of the curves")
            return
        record = HeldoutRecord(step, scores.loss, scores.mlm_accuracy, scores.sop_accuracy, scores.num_samples)
        publication = publish_metrics(self._peer.dht, self._peer.peer_id, self._run_id, record)
        try:
            self._peer.run(publication, PUBLISH_TIMEOUT_S, "publishing the held-out loss")
        except Timeout as error:  # the record is optional
            logger.warning("%s", error)
