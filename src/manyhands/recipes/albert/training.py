"""The training loop of the ALBERT recipe: plain PyTorch, but for the optimizer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from manyhands.base.errors import Timeout
from manyhands.base.run_id import checked_run_id
from manyhands.optim.metrics import MetricsRecord, publish_metrics
from manyhands.optim.optimizer import Optimizer
from manyhands.peer import Peer
from manyhands.recipes.albert.batches import Batches, heldout_batch
from manyhands.recipes.albert.checkpoint_dir import CheckpointDir
from manyhands.recipes.albert.checkpoints import Checkpoints
from manyhands.recipes.albert.compute import Compute
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.corpus import load_documents
from manyhands.recipes.albert.events import BatchDone, Counts, Event, Finished, Joined, StepDone
from manyhands.recipes.albert.model import build_model, heldout_loss, loss_of, warmup_linear
from manyhands.recipes.albert.optimizer import MAX_GRAD_NORM, build_optimizer
from manyhands.recipes.albert.packages import torch
from manyhands.recipes.albert.samples import make_samples
from manyhands.recipes.albert.settings import TrainingSettings
from manyhands.recipes.albert.tokenizer import tokenizer_digest, train_tokenizer

logger = logging.getLogger(__name__)

METRICS_TIMEOUT_S = 10.0


FACTS = ("seq_length", "num_hidden_layers", "num_attention_heads", "mask_probability", "seed", "num_heldout")
"""Of the recipe; the tensors do not show them. The last two choose the held-out samples."""
OPTIONS = ("learning_rate", "weight_decay")
"""Of the optimizer, which says them by itself to the other peers."""


def _facts(recipe: AlbertRecipe, tokenizer: str) -> dict[str, str]:
    """What all peers must have alike, besides the model: else they learn different things from different text."""
    schedule = f"warmup_linear(total_steps={recipe.total_steps}, warmup_steps={recipe.warmup_steps})"
    return {"tokenizer": tokenizer, "schedule": schedule, **{name: str(getattr(recipe, name)) for name in FACTS}}


class AlbertTrainer:
    """One peer that trains the recipe's model in a run.

    Args:
        on_event: called with each :data:`manyhands.recipes.albert.events.Event`.
    Raises:
        ConfigError: the text cannot be used, or this peer does not fit the run.
        Unavailable: the run's state could not be loaded.
    """

    def __init__(
        self,
        peer: Peer,
        run_id: str,
        recipe: AlbertRecipe,
        settings: TrainingSettings,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._peer = peer
        self._run_id = checked_run_id(run_id)
        self._settings = settings
        self._on_event = on_event
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._compute = Compute(settings.device, settings.precision)
        logger.info("Computing on %s", self._compute)
        documents = load_documents(recipe.text)
        logger.info("Training the tokenizer on %d documents", len(documents))
        tokenizer = train_tokenizer(documents, recipe.vocab_size)
        samples = make_samples(documents, tokenizer, recipe)
        self._model = build_model(recipe, tokenizer).to(self._compute.device)  # type: ignore[arg-type]
        self._heldout = heldout_batch(samples, recipe)
        facts = _facts(recipe, tokenizer_digest(tokenizer))
        schedule = warmup_linear(recipe.total_steps, recipe.warmup_steps)
        self._optimizer = Optimizer(
            build_optimizer(self._model, recipe),
            peer=peer,
            run_id=run_id,
            target_batch_size=settings.target_batch_size,
            batch_size_per_step=recipe.batch_size,
            max_grad_norm=MAX_GRAD_NORM,
            scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, schedule),
            allow_solo=settings.allow_solo,
            must_match=facts,
        )
        self._losses: list[float] = []
        self._checkpoints: Checkpoints | None = None
        if settings.checkpoint_dir is not None:
            folder = CheckpointDir(settings.checkpoint_dir, run_id)
            self._checkpoints = Checkpoints(
                folder,
                facts | {name: str(getattr(recipe, name)) for name in OPTIONS},
                self._model,
                tokenizer,
                self._optimizer,
                settings.checkpoint_every,
            )
            self._checkpoints.resume()
        order = f"{peer.peer_id} from step {self._optimizer.global_step}"  # other batches than before a restart
        self._batches = Batches(samples, recipe, order)

    def run(self) -> None:
        """Train until the settings say stop, then stay a little for peers that are behind."""
        optimizer = self._optimizer
        self._on_event(Joined(self._peer.peer_id, optimizer.global_step, heldout_loss(self._model, self._heldout)))
        try:
            while not self._should_stop():
                step_before = optimizer.global_step
                self._train_one_batch()
                if optimizer.global_step != step_before:
                    self._report_step()
                    if self._checkpoints is not None:
                        self._checkpoints.save_if_due()
        finally:  # also when it is interrupted, by Ctrl-C say
            if self._checkpoints is not None:
                self._checkpoints.close()
        logger.info("Stopping at global step %d; waiting for peers that are behind", optimizer.global_step)
        optimizer.wait_for_others(self._settings.linger_s)
        loss = heldout_loss(self._model, self._heldout)
        logger.info("Held-out loss %.4f at global step %d", loss, optimizer.global_step)
        self._on_event(Finished(optimizer.global_step, loss, optimizer.state_digest(), self._counts()))

    def _should_stop(self) -> bool:
        stop_step = self._settings.stop_step()
        return stop_step is not None and self._optimizer.global_step >= stop_step

    def _train_one_batch(self) -> None:
        started, scaler = time.monotonic(), self._compute.scaler
        with self._compute.autocast():
            loss = loss_of(self._model, next(self._batches))
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._losses.append(loss.item())
        time.sleep((time.monotonic() - started) * (self._settings.slow_down - 1))
        scaler.step(self._optimizer)
        scaler.update()
        self._optimizer.zero_grad()
        self._on_event(
            BatchDone(self._optimizer.global_step, self._losses[-1], self._optimizer.samples_per_second, self._counts())
        )

    def _report_step(self) -> None:
        optimizer, losses = self._optimizer, self._losses
        self._losses = []
        mean = sum(losses) / len(losses) if losses else None
        manifest = optimizer.last_round
        round_id = manifest.group_id.hex() if manifest is not None else ""
        num_peers = len(manifest.members) if manifest is not None else 1
        contribution = optimizer.last_contribution
        self._on_event(StepDone(optimizer.global_step, mean, round_id, num_peers, self._counts()))
        logger.info("Step %d", optimizer.global_step)
        logger.info("Your current contribution: %d samples", contribution)
        if mean is None:
            return
        logger.info("Local loss: %.5f", mean)
        record = MetricsRecord(
            optimizer.global_step, optimizer.samples_per_second, contribution, sum(losses), len(losses)
        )
        publication = publish_metrics(self._peer.dht, self._peer.peer_id, self._run_id, record)
        try:
            self._peer.run(publication, METRICS_TIMEOUT_S, "publishing metrics")
        except Timeout as error:  # nothing depends on them
            logger.warning("%s", error)

    def _counts(self) -> Counts:
        done = self._optimizer.statistics
        return Counts(
            samples_computed=done.samples_computed,
            samples_used=done.samples_used,
            samples_dropped=done.samples_dropped,
            rounds_committed=done.rounds_committed,
            rounds_aborted=done.rounds_aborted,
            bytes_sent=self._peer.endpoint.bytes_sent,
        )
