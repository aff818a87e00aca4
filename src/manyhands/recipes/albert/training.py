"""The training loop of the ALBERT recipe: plain PyTorch, except for the optimizer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from manyhands.base.errors import ManyhandsError
from manyhands.base.run_id import checked_run_id
from manyhands.base.text import counted
from manyhands.checkpoints.checkpoint_dir import CheckpointDir
from manyhands.checkpoints.checkpoints import Checkpoints
from manyhands.optim.manifest import RunManifest
from manyhands.optim.optimizer import Optimizer
from manyhands.optim.process_group import ProcessGroupOptimizer
from manyhands.peer import Peer
from manyhands.recipes.albert import ranks
from manyhands.recipes.albert.adoption import RunRecipe, RunToJoin
from manyhands.recipes.albert.batches import Batches, heldout_batch
from manyhands.recipes.albert.compute import SMALLER, SMALLER_BATCH, Compute
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.run_data import RunData, data_of
from manyhands.recipes.albert.data.samples import Samples
from manyhands.recipes.albert.data.tokenizer import tokenizer_digest, tokenizer_json
from manyhands.recipes.albert.heldout import HeldoutComparison
from manyhands.recipes.albert.model import build_model, loss_of
from manyhands.recipes.albert.optimizer import join_run, join_run_as_rank
from manyhands.recipes.albert.packages import torch
from manyhands.recipes.albert.settings import TrainingSettings, num_ranks
from manyhands.recipes.albert.source import open_source
from manyhands.recipes.albert.summary import HeldoutLosses, Standing, TrainingSummary
from manyhands.recipes.albert.trainer_events import BatchDone, Counts, Finished, Joined, StepDone, TrainerEvent
from manyhands.recipes.albert.trial import FittingBatchSize, timed
from manyhands.training.report import AccountPublisher, report_step

logger = logging.getLogger(__name__)

LAST_LOOK_S = 1.0
"""Longest time in seconds for the held-out loss of the final summary: after SIGTERM all must end in a few seconds."""
TRIAL_SHARE = 4
"""The trial chooses batches of at most one part in four of the target, since peers wait for each other's last batch."""
LOCAL_TRIAL_SHARE = 64
"""With local steps, the trial chooses batches of at most one part in 64 of the target: each peer must make at
least one batch before the target, and should make many."""


class AlbertTrainer:
    """One peer that trains the recipe's model in a run.

    Args:
        on_event: called with each :data:`manyhands.recipes.albert.trainer_events.TrainerEvent`.
        run: the run to join, if it has trainers already; ``recipe`` is then its recipe.
        data: of the run that is begun; by default that of ``recipe``.
        start_new: as for :class:`manyhands.Optimizer`.
        is_batch_size_chosen: False to replace ``recipe.batch_size`` by that of a short trial.
        checkpoint_dir: where to save checkpoints; it is closed at the end of :meth:`run`.
    Raises:
        ConfigError: the text or the data cannot be used, or this peer does not fit the run.
        Unavailable: the tokenizer or the state of the run could not be loaded.
    """

    def __init__(
        self,
        peer: Peer,
        run_id: str,
        recipe: AlbertRecipe,
        settings: TrainingSettings,
        on_event: Callable[[TrainerEvent], None] = lambda event: None,
        *,
        run: RunToJoin | None = None,
        data: RunData | None = None,
        start_new: bool | None = None,
        is_batch_size_chosen: bool = True,
        checkpoint_dir: CheckpointDir | None = None,
    ) -> None:
        self._peer = peer
        self._run_id = checked_run_id(run_id)
        self._settings = settings
        self._on_event = on_event
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._compute = Compute(settings.device, settings.precision)
        self._compute.log_choice()
        if settings.device == "auto" and (num_gpus := self._compute.num_idle_gpus()) and num_ranks() == 1:
            logger.info(
                "%s of this machine will be idle. To use all of them as one peer: torchrun --standalone "
                "--nproc-per-node %d -m manyhands train ...", counted(num_gpus, "GPU"), num_gpus + 1,
            )  # fmt: skip
        tokenizer, samples = open_source(peer, run_id, recipe, run, checkpoint_dir)
        self._model = self._compute.on_device(build_model(recipe, len(tokenizer), samples.vocabulary))
        self._fitting: FittingBatchSize | None = None
        if not is_batch_size_chosen:
            self._fitting = self._try_batch_sizes(samples, recipe)
            recipe = replace(recipe, batch_size=self._fitting.size)
        self._heldout = HeldoutComparison(self._model, heldout_batch(samples, recipe), recipe.batch_size, self._compute)
        if data is None:
            data = run.recipe.data if run is not None else data_of(vars(recipe))
        chosen = RunRecipe(recipe=recipe, tokenizer=tokenizer_digest(tokenizer), vocab_size=len(tokenizer), data=data)
        options = {
            "batch_size_per_step": recipe.batch_size * settings.gradient_accumulation_steps,
            "delay": settings.delay,
            "allow_solo": settings.allow_solo,
            "start_new": start_new,
        }
        self._stepping: Optimizer | ProcessGroupOptimizer
        """The optimizer for steps and the final wait: calls that all ranks make together under ``torchrun``."""
        if num_ranks() > 1:
            ranks.begin(ranks.Task(run_id, chosen, tokenizer_json(tokenizer), peer.peer_id, peer.state_path))
            self._stepping = join_run_as_rank(self._model, chosen, peer, run_id, settings.tuning, **options)
            assert self._stepping.leader is not None
            self._optimizer = self._stepping.leader
        else:
            self._stepping = self._optimizer = join_run(self._model, chosen, peer, run_id, settings.tuning, **options)
        ttl_s = settings.tuning.metrics_ttl_s
        self._account = AccountPublisher(self._optimizer, settings.name or "", self._compute.hardware(), ttl_s)
        self._target_batch_size = recipe.target_batch_size
        self._losses: list[float] = []
        self._num_batches = 0
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._began = time.monotonic()
        self._checkpoint_dir = checkpoint_dir
        self._checkpoints: Checkpoints | None = None
        if checkpoint_dir is not None:
            self._checkpoints = Checkpoints(
                checkpoint_dir, self._optimizer, self._model, settings.checkpoint_every, tokenizer=tokenizer
            )
            self._checkpoints.resume()
        self._loss_of: torch.nn.Module = ranks.LossModule(self._model)
        if num_ranks() > 1:
            self._loss_of = ranks.together(self._loss_of, self._compute.device)
        order = f"{peer.peer_id} from step {self._optimizer.global_step}"  # other batches than before a restart
        self._samples = samples
        self._batches = Batches(samples, recipe, order)

    def _try_batch_sizes(self, samples: Samples, recipe: AlbertRecipe) -> FittingBatchSize:
        """Measure the batch size that suits this machine."""

        def seconds_for(size: int) -> float:
            batch = next(Batches(samples, replace(recipe, batch_size=size), "trial", is_padded=True))

            def compute() -> None:
                with self._compute.autocast():
                    loss = loss_of(self._model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                next(self._model.parameters()).sum().item()  # waits for a GPU

            try:
                with self._compute.fitting(f"a batch of {counted(size, 'sample')}", SMALLER):
                    return timed(compute)
            finally:
                self._model.zero_grad(set_to_none=True)

        num_batches = LOCAL_TRIAL_SHARE if recipe.local_steps else TRIAL_SHARE
        share = recipe.target_batch_size // (num_batches * self._settings.gradient_accumulation_steps)
        limit = min(max(1, share), len(samples.training))
        fitting = FittingBatchSize(seconds_for, limit)
        logger.info(
            "A short trial chose %s for each batch (--batch-size overrides it)", counted(fitting.size, "sample")
        )
        return fitting

    @property
    def manifest(self) -> RunManifest:
        """The settings of the run."""
        return self._optimizer.manifest

    def run(self) -> None:
        """Train until the settings say to stop, then stay up to ``linger_s`` for peers that are behind."""
        optimizer = self._optimizer
        self._began = time.monotonic()
        self._on_event(Joined(self._peer.peer_id, optimizer.global_step, self._heldout.begin()))
        try:
            self._train()
            logger.info("Stopping at global step %d; waiting for peers that are behind", optimizer.global_step)
            self._stepping.wait_for_others(self._settings.linger_s)
            with self._optimizer.agreed_parameters():
                loss = self._heldout.loss()
        except KeyboardInterrupt:
            self._optimizer.wait_for_downloads(self._settings.linger_s)
            raise
        logger.info("Held-out loss %.4f at global step %d", loss, optimizer.global_step)
        self._on_event(Finished(optimizer.global_step, loss, self._stepping.state_digest(), self._counts()))

    def _train(self) -> None:
        """Train until the settings say to stop, and save the last checkpoint."""
        optimizer = self._optimizer
        try:
            while not self._should_stop():
                step_before = optimizer.global_step
                self._train_one_batch()
                if optimizer.global_step == step_before:
                    self._account.look()
                else:
                    self._report_step()
                    if self._checkpoints is not None:
                        self._checkpoints.save_if_due()
        finally:  # also after Ctrl-C
            self._samples.close()
            if self._checkpoints is not None:
                self._checkpoints.close()

    def standing(self) -> Standing:
        """The current status of this peer and the run; safe to call from any thread."""
        optimizer = self._optimizer
        losses = self._losses  # the same list until the next step
        counts = optimizer.statistics
        progress = optimizer.progress
        waiting = optimizer.samples_accumulated
        samples_of_all = counts.samples_of_all + max(progress.samples, waiting)
        return Standing(
            step=optimizer.global_step,
            samples=progress.samples,
            target_batch_size=self._target_batch_size,
            eta_s=progress.eta_s,
            num_peers=progress.num_peers,
            is_averaging=optimizer.is_stepping,
            share=(counts.samples_counted + waiting) / samples_of_all if samples_of_all else 0.0,
            loss=_mean(losses) if losses else self._last_loss,
            samples_per_second=optimizer.samples_per_second,
        )

    def summary(self) -> TrainingSummary:
        """The work of this peer; call it after :meth:`run`. Takes :data:`LAST_LOOK_S` or a little longer."""
        counts = self._optimizer.statistics
        folder = self._checkpoint_dir
        losses = self._losses if self._last_loss is None else []  # an unfinished step counts only without complete ones
        return TrainingSummary(
            run_id=self._run_id,
            seconds=time.monotonic() - self._began,
            step=self._optimizer.global_step,
            num_steps=counts.rounds_committed + counts.steps_alone,
            samples_used=counts.samples_used,
            samples_counted=counts.samples_counted,
            samples_of_all=counts.samples_of_all,
            samples_lost=self._optimizer.samples_accumulated,
            is_alone=self._is_alone(),
            first_loss=_mean(losses) if losses else self._first_loss,
            last_loss=_mean(losses) if losses else self._last_loss,
            heldout=self._compare_heldout(),
            folder=folder.path if folder is not None else None,
            checkpoint=folder.newest_path() if folder is not None else None,
            saved_step=folder.newest_step() if folder is not None else 0,
        )

    def _is_alone(self) -> bool:
        try:
            return self._optimizer.health.alone_s is not None
        except ManyhandsError:  # the summary is shown in any case
            return False

    def _compare_heldout(self) -> HeldoutLosses | None:
        try:
            with self._optimizer.agreed_parameters():
                return self._heldout.compare(LAST_LOOK_S)
        except RuntimeError as error:  # an interrupted batch may still hold the memory of the GPU
            logger.warning("The held-out loss cannot be computed now: %s", error)
            return None

    def _should_stop(self) -> bool:
        stop_step = self._settings.stop_step()
        return stop_step is not None and self._optimizer.global_step >= stop_step

    def _train_one_batch(self) -> None:
        started = time.monotonic()
        scaler = self._compute.scaler
        num_batches = self._settings.gradient_accumulation_steps
        for _ in range(num_batches):
            self._compute_gradients()
        time.sleep((time.monotonic() - started) * (self._settings.slow_down - 1))
        batch_s = (time.monotonic() - started) / num_batches
        scaler.step(self._stepping, batch_size=self._batches.batch_size * num_batches)
        scaler.update()
        self._optimizer.zero_grad()
        if self._fitting is not None and num_ranks() == 1:  # several ranks must keep one size
            self._batches.batch_size = self._fitting.note(batch_s)
        self._on_event(
            BatchDone(self._optimizer.global_step, self._losses[-1], self._optimizer.samples_per_second, self._counts())
        )

    def _compute_gradients(self) -> None:
        batch = next(self._batches)
        num_batches = self._settings.gradient_accumulation_steps
        with self._compute.fitting(f"a batch of {counted(self._batches.batch_size, 'sample')}", SMALLER_BATCH):
            with self._compute.autocast():
                loss = self._loss_of(batch)
            self._compute.scaler.scale(loss / num_batches).backward()
            self._losses.append(loss.item())
        self._num_batches += 1
        is_first = self._num_batches == 1 and self._settings.log_first_batch
        if is_first or (self._settings.log_every and self._num_batches % self._settings.log_every == 0):
            logger.info("Loss of batch %d: %.5f", self._num_batches, self._losses[-1])

    def _report_step(self) -> None:
        optimizer = self._optimizer
        losses = self._losses
        self._losses = []
        mean = _mean(losses) if losses else None
        manifest = optimizer.last_round
        round_id = manifest.group_id.hex() if manifest is not None else ""
        num_peers = len(manifest.members) if manifest is not None else 1
        left_out: list[str] = (
            [manifest.members[rank] for rank in sorted(manifest.left_out)] if manifest is not None else []
        )
        made = StepDone(optimizer.global_step, mean, round_id, num_peers, self._counts(), left_out, optimizer.is_member)
        self._on_event(made)
        report_step(optimizer, losses, mean or 0.0, self._settings.tuning.metrics_ttl_s, self._account)
        if mean is not None:
            self._first_loss = mean if self._first_loss is None else self._first_loss
            self._last_loss = mean

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


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)
