"""A peer of an ALBERT run that lends its bandwidth, and computes nothing: it needs no text, no GPU and no batches."""

from __future__ import annotations

import logging
import time

from manyhands.base.errors import ConfigError, ManyhandsError
from manyhands.base.run_id import checked_run_id
from manyhands.optim.optimizer import Optimizer
from manyhands.optim.run_manifest import RunManifest, read_manifests, run_manifest_of
from manyhands.peer import Peer
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.model import build_model, warmup_linear
from manyhands.recipes.albert.optimizer import MAX_GRAD_NORM, build_optimizer
from manyhands.recipes.albert.packages import torch
from manyhands.recipes.albert.settings import TrainingSettings
from manyhands.recipes.albert.training import _facts

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 2.0
LOOK_TIMEOUT_S = 15.0
TELL_PERIOD_S = 60.0
WORD_EMBEDDINGS = "albert.embeddings.word_embeddings.weight"


class AlbertAuxiliary:
    """One peer that averages with those who train the recipe's model, and makes their steps with them.

    What only the text tells, the tokenizer, it takes from the run: so it waits until somebody trains.

    Raises:
        ConfigError: the recipe is not that of the run.
        Unavailable: the run's state could not be loaded.
    """

    def __init__(self, peer: Peer, run_id: str, recipe: AlbertRecipe, settings: TrainingSettings) -> None:
        self._peer = peer
        self._run_id = checked_run_id(run_id)
        self._settings = settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        manifest = self._manifest()
        model = build_model(recipe, range(_vocabulary_of(manifest, recipe)))
        schedule = warmup_linear(recipe.total_steps, recipe.warmup_steps)
        self._optimizer = Optimizer(
            build_optimizer(model, recipe),
            peer=peer,
            run_id=run_id,
            target_batch_size=settings.target_batch_size,
            max_grad_norm=MAX_GRAD_NORM,
            scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, schedule),
            auxiliary=True,
            must_match=_facts(recipe, manifest.extra.get("tokenizer", "")),
        )

    def run(self) -> None:
        """Help until the settings say stop."""
        optimizer = self._optimizer
        logger.info("Helping run %s to average, from global step %d on", self._run_id, optimizer.global_step)
        step = optimizer.global_step
        while (stop_step := self._settings.stop_step()) is None or optimizer.global_step < stop_step:
            optimizer.step()
            if optimizer.global_step != step:
                step = optimizer.global_step
                logger.info("Step %d", step)
        logger.info("Stopping at global step %d; waiting for peers that are behind", optimizer.global_step)
        optimizer.wait_for_others(self._settings.linger_s)

    def _manifest(self) -> RunManifest:
        """What the peers of the run have agreed on; waits until there are some."""
        tell_at = time.monotonic()
        while (manifest := self._read_manifest()) is None:
            if time.monotonic() >= tell_at:
                logger.info("Waiting for somebody who trains in run %s: an auxiliary peer has no data", self._run_id)
                tell_at += TELL_PERIOD_S
            time.sleep(LOOK_PERIOD_S)
        return manifest

    def _read_manifest(self) -> RunManifest | None:
        reading = read_manifests(self._peer.dht, self._run_id)
        try:
            return run_manifest_of(self._peer.run(reading, LOOK_TIMEOUT_S, "looking for the run"))
        except ManyhandsError as error:
            logger.warning("the run cannot be seen: %s", error)
            return None


def _vocabulary_of(manifest: RunManifest, recipe: AlbertRecipe) -> int:
    """The tokens that the run's tokenizer has.

    Raises:
        ConfigError: the recipe has no room for them.
    """
    shapes = [tensor.shape for tensor in manifest.tensors if tensor.name == WORD_EMBEDDINGS]
    size = shapes[0][0] if shapes and shapes[0] else 0
    if not 0 < size <= recipe.vocab_size:
        raise ConfigError(
            f"vocab_size is {recipe.vocab_size}; the run's model knows {size} tokens, so give --vocab-size as the "
            "trainers do"
            if size
            else "the run trains another model than ALBERT; an auxiliary peer has to make its steps too"
        )
    return size
