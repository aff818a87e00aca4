"""Lets a ``transformers.Trainer`` train in a run, whose peers share each optimizer step.

A global step of the run may take many batches, but the Trainer makes an optimizer step for each. So each batch is a
step to the Trainer, and the callback replaces the Trainer's step count by that of the run. Whatever the Trainer does
once for each optimizer step, it then does once for each global step.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
import zlib
from typing import Any

from manyhands.base.errors import ConfigError, MissingExtra

try:
    import torch
    import transformers
    from accelerate.utils import broadcast_object_list, find_batch_size

    _ = transformers.Trainer  # transformers imports its parts lazily
except ModuleNotFoundError as error:
    if str(error.name).split(".")[0] not in ("torch", "transformers", "accelerate"):
        raise
    raise MissingExtra("manyhands.training.transformers", "albert") from error

from manyhands.optim.metrics import checked_name
from manyhands.optim.optimizer import Optimizer
from manyhands.optim.process_group import ProcessGroupOptimizer
from manyhands.optim.wrapper import OptimizerWrapper, check_accumulation
from manyhands.training.report import AccountPublisher, report_step

logger = logging.getLogger(__name__)

IGNORED_LABEL = -100
"""Label of positions that a loss leaves out, by the convention of ``transformers``."""


class CollaborativeCallback(transformers.TrainerCallback):
    """Makes a ``transformers.Trainer``, or a subclass, train together with the other peers of a run.

    Example::

        trainer = transformers.Trainer(model, arguments, train_dataset=dataset)
        trainer.add_callback(CollaborativeCallback(trainer, peer=peer, run_id="my-run", target_batch_size=4096))
        trainer.train()

    The ``TrainingArguments`` apply to the whole run: learning rate, schedule, weight decay and clipping are those of
    its global steps, and so are ``max_steps``, ``logging_steps``, ``save_steps`` and ``eval_steps``. All peers need the
    same ones, except for those about their own batches and files.

    If the Trainer has a :class:`manyhands.Optimizer` already, as in ``Trainer(..., optimizers=(optimizer, None))``,
    leave the options out: the optimizer's own learning rate, schedule and clipping apply, not those of the arguments.

    The weight of a batch is its number of labels other than -100, since the loss is their mean. That is the number of
    samples if each has one label; see :meth:`weight_of`.

    Args:
        trainer: add the callback to this one, before ``trainer.train()``.
        name: under which monitors show this peer: 1 to 32 characters; by default none.
        options: of the :class:`manyhands.Optimizer` that wraps the Trainer's own optimizer: at least ``peer``,
            ``run_id`` and ``target_batch_size``. Under ``torchrun`` it is a :class:`manyhands.ProcessGroupOptimizer`.

    Attributes:
        optimizer: of the run.
    Raises:
        ConfigError: an argument does not fit a run of many peers; nothing was joined.
        ManifestMismatch, RunNotFound, Unavailable: as for :class:`manyhands.Optimizer`.
    """

    def __init__(self, trainer: Any, *, name: str | None = None, **options: Any) -> None:
        shown_name = checked_name(name) if name is not None else ""
        check_arguments(trainer)
        is_local = getattr(trainer.optimizer, "makes_local_steps", options.get("local_steps") is not None)
        check_accumulation(trainer.args.gradient_accumulation_steps, makes_local_steps=is_local)
        self.optimizer = self._optimizer_of(trainer, options)
        self._account: AccountPublisher | None = None
        leader = self._leader
        if leader is not None:
            device = str(trainer.args.device)
            self._account = AccountPublisher(leader, shown_name, device, weight_unit="tokens")
        self._trainer = trainer
        self._has_begun = False
        self._step = 0  # last global step reported to the Trainer
        self._loss_of_steps = 0.0  # sum of losses not yet reported to the Trainer
        self._losses: list[tuple[torch.Tensor, float]] = []  # losses and weights of the batches since then
        self._samples_before = 0
        self._shown_schedule = ShownSchedule(self.optimizer)
        self._loss_shifts_labels = getattr(trainer, "_loss_shifts_labels", False)
        self._switch_off_what_the_optimizer_does()
        self._shuffle_unlike_others()
        self._original_training_step = trainer.training_step
        self._original_get_batch_samples = trainer.get_batch_samples
        self._original_log = trainer.log
        self._original_report = getattr(trainer, "_maybe_log_save_evaluate")  # noqa: B009 (private to transformers)
        self._original_values = trainer.set_initial_training_values
        overrides = {
            "set_initial_training_values": self._endless_epochs,
            "create_scheduler": self._create_scheduler,
            "get_batch_samples": self._get_batch_samples,
            "training_step": self._train_batch,
            "_get_grad_norm": lambda *args, **kwargs: None,  # the norm of one batch says nothing about a step
            "_maybe_log_save_evaluate": self._log_save_evaluate,
            "log": self._log,
        }
        for name, override in overrides.items():
            setattr(trainer, name, override)

    # setup

    @staticmethod
    def _optimizer_of(trainer: Any, options: dict[str, Any]) -> Any:
        args = trainer.args
        given = trainer.optimizer
        if not isinstance(given, OptimizerWrapper):
            if not options:
                raise ConfigError(
                    "the Trainer has no optimizer of a run: give CollaborativeCallback(trainer, peer=peer, "
                    'run_id="my-run", target_batch_size=4096), or Trainer(optimizers=(manyhands.Optimizer(...), None))'
                )
            facts = facts_of(trainer) | dict(options.pop("must_match", None) or {})
            trainer.create_optimizer()  # by the arguments, unless the Trainer was given one
            inner = trainer.optimizer
            trainer.create_scheduler(num_training_steps=args.max_steps, optimizer=inner)
            kind = ProcessGroupOptimizer if args.world_size > 1 else Optimizer
            from_arguments = {
                "scheduler": trainer.lr_scheduler,
                "max_grad_norm": args.max_grad_norm or None,
                "model": trainer.model,
            }
            trainer.optimizer = kind(inner, must_match=facts, **(from_arguments | options))
            return trainer.optimizer
        if options:
            raise ConfigError(
                f"the Trainer has a manyhands optimizer already; give {', '.join(options)} to that one instead of to "
                "CollaborativeCallback"
            )
        if trainer.lr_scheduler is not None:
            raise ConfigError(
                "the schedule belongs to the optimizer, which steps it once for each global step on all peers: "
                "manyhands.Optimizer(..., scheduler=lambda inner: CosineAnnealingLR(inner, T_max=1000)), and "
                "Trainer(..., optimizers=(optimizer, None))"
            )
        if args.world_size > 1 and not isinstance(given, ProcessGroupOptimizer):
            raise ConfigError(
                f"{args.world_size} processes of torchrun are one peer, and need manyhands.ProcessGroupOptimizer "
                "instead of manyhands.Optimizer"
            )
        return given

    def _switch_off_what_the_optimizer_does(self) -> None:
        trainer = self._trainer
        trainer.args = args = copy.copy(trainer.args)  # leave the user's arguments unchanged
        if args.gradient_accumulation_steps != 1:
            logger.info(
                "gradient_accumulation_steps=%d is set to 1: the optimizer accumulates by itself, until all peers "
                "together have target_batch_size samples", args.gradient_accumulation_steps,
            )  # fmt: skip
        if args.max_grad_norm:
            logger.info(
                "max_grad_norm=%g of the Trainer is set to 0: the optimizer clips the averaged gradient, not that of "
                "each batch", args.max_grad_norm,
            )  # fmt: skip
        args.gradient_accumulation_steps = 1
        args.max_grad_norm = 0.0
        args.ignore_data_skip = True  # peers share the steps, so the batches before a checkpoint are unknown
        trainer.model_accepts_loss_kwargs = False  # each loss is a mean over its own batch
        trainer.lr_scheduler = self._shown_schedule

    def _shuffle_unlike_others(self) -> None:
        """Change the seed of this peer: with the same ``seed``, all peers would train on the same batches."""
        trainer = self._trainer
        leader = self._leader
        if trainer.args.data_seed is not None:
            return
        seeds = [None if leader is None else f"{leader.peer.peer_id} from step {leader.global_step}"]
        seed = zlib.crc32(str(broadcast_object_list(seeds)[0]).encode())
        trainer.accelerator.dataloader_config.data_seed = seed
        transformers.set_seed(seed)  # other samplers, and dropout

    @property
    def _leader(self) -> Optimizer | None:
        optimizer = self.optimizer
        leader: Optimizer | None = optimizer.leader if isinstance(optimizer, ProcessGroupOptimizer) else optimizer
        return leader

    # replacements of the Trainer's methods

    def _endless_epochs(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Let epochs go on without end: the Trainer computes their number for one batch per step, which is too few."""
        endless = copy.copy(args)
        endless.max_steps = sys.maxsize
        return (*self._original_values(endless, dataloader)[:-1], args.max_steps)

    def _create_scheduler(self, *args: Any, **kwargs: Any) -> ShownSchedule:
        trainer = self._trainer
        trainer.lr_scheduler = self._shown_schedule
        # the step from which the Trainer goes on counting
        trainer.state.global_step = max(trainer.state.global_step, self.optimizer.global_step)
        return self._shown_schedule

    def _get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, num_items = self._original_get_batch_samples(*args, **kwargs)
        if not batches:  # with unknown length, an epoch ends with its data
            self._trainer.control.should_epoch_stop = True
        return batches, num_items

    def _train_batch(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._has_begun:
            raise ConfigError("the Trainer has no CollaborativeCallback: call trainer.add_callback(callback) first")
        if self._trainer.control.should_training_stop:  # the run was complete from the start
            self._trainer.optimizer.train()  # an evaluation may have changed its mode
            self.optimizer.next_batch(0)
            return torch.zeros((), device=self._trainer.args.device)
        samples = find_batch_size(inputs)
        weight = self.weight_of(inputs)
        self._shown_schedule.note()
        loss: torch.Tensor = self._original_training_step(model, inputs, *args, **kwargs)
        self.optimizer.next_batch(samples, weight)
        self._losses.append((loss.detach(), samples if weight is None else weight))
        return torch.zeros_like(loss)  # the Trainer would sum the batches of a step; see _log_save_evaluate

    def weight_of(self, inputs: Any) -> float | None:
        """The number of labels over which the loss of a batch is a mean; None for samples.

        Override it, on all peers alike, if the loss is a mean over something else.
        """
        labels = inputs.get("shift_labels")
        is_shifted = labels is not None
        if not is_shifted:
            labels = inputs.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.dim() == 0:
            return None
        if self._loss_shifts_labels and not is_shifted:
            labels = labels[..., 1:]
        return float(labels.ne(IGNORED_LABEL).sum())

    def _log_save_evaluate(self, loss_sum: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss_sum += self._loss_of_steps
        self._loss_of_steps = 0.0
        self._original_report(loss_sum, *args, **kwargs)

    def _log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs["num_peers"] = self.optimizer.num_peers
        if "train_runtime" in logs:  # computed by the Trainer for one batch per step
            samples = self.optimizer.statistics.samples_computed - self._samples_before
            logs["train_samples_per_second"] = round(samples / logs["train_runtime"], 3)
        self._original_log(logs, *args, **kwargs)

    # events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start at the global step of the run."""
        self._has_begun = True
        self._step = state.global_step = self.optimizer.global_step
        self._samples_before = self.optimizer.statistics.samples_computed
        if self._step >= state.max_steps:
            logger.info("The run has made %d global steps already, and max_steps is %d", self._step, state.max_steps)
            control.should_training_stop = True

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the global steps of the run."""
        state.global_step = self.optimizer.global_step - 1  # the Trainer adds one

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log, save and evaluate once for each global step."""
        num_steps = state.global_step - self._step
        if num_steps == 0:
            control.should_log = control.should_evaluate = control.should_save = False
            if self._account is not None:
                self._account.look()
            return
        self._step = state.global_step
        losses, mean = self._take_mean_loss()
        self._loss_of_steps = mean * num_steps  # the Trainer divides by the number of steps
        if self._leader is not None:
            report_step(self._leader, losses, mean, account=self._account)
        if control.should_save:
            self.optimizer.settle()  # so that model and optimizer are saved at one step

    def _take_mean_loss(self) -> tuple[list[float], float]:
        """The finite losses of the batches since the last step, and their mean by weight."""
        pairs = [(loss.item(), weight) for loss, weight in self._losses]
        self._losses = []
        pairs = [(loss, weight) for loss, weight in pairs if math.isfinite(loss) and weight > 0]
        total = sum(weight for _, weight in pairs)
        mean = sum(loss * weight for loss, weight in pairs) / total if total else 0.0
        return [loss for loss, _ in pairs], mean

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stay until peers that are behind have loaded the state."""
        logger.info("Stopping at global step %d; waiting for peers that are behind", self.optimizer.global_step)
        self.optimizer.settle()  # so that the model is that of the last step
        self.optimizer.wait_for_others()


class ShownSchedule:
    """Shows the learning rate of each global step to the Trainer; the optimizer steps the real schedule."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.note()

    def note(self) -> None:
        """Save the rates before a step, which uses them."""
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """The rates of the last step."""
        return self._rates

    def step(self, *args: Any) -> None:
        """Do nothing: the optimizer steps the real schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: the schedule is in the optimizer's state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the schedule is in the optimizer's state."""


def facts_of(trainer: Any) -> dict[str, str]:
    """The parameters of a Trainer's schedule, for comparison between peers: its function cannot be compared."""
    args = trainer.args
    facts = {"max_steps": str(args.max_steps)}
    if trainer.lr_scheduler is None:
        facts["learning_rate"] = str(args.learning_rate)
        facts["lr_scheduler_type"] = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        facts["lr_scheduler_kwargs"] = str(args.lr_scheduler_kwargs)
        facts["warmup_steps"] = str(args.get_warmup_steps(args.max_steps))
    return facts


def check_arguments(trainer: Any) -> None:
    """Check that a Trainer can take part in a run.

    Raises:
        ConfigError: it cannot; the message shows arguments that work.
    """
    args = trainer.args
    if args.max_steps <= 0:
        raise ConfigError(
            f"max_steps={args.max_steps}: epochs end at another step on each peer; give TrainingArguments("
            "max_steps=1000), the global steps of the run, the same on all peers"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"the Trainer would split each batch among {args.n_gpu} GPUs of one process. Start a process for each, "
            f"which are one peer together: torchrun --nproc-per-node {args.n_gpu} {sys.argv[0]}; or use one GPU: "
            "CUDA_VISIBLE_DEVICES=0"
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ConfigError(
            "a Trainer whose model FSDP or DeepSpeed splits cannot take part: leave fsdp= and deepspeed= out of the "
            "TrainingArguments; a loop of your own may use FSDP2, with manyhands.ProcessGroupOptimizer"
        )
    if trainer.model_init is not None:
        raise ConfigError(
            "with model_init= the Trainer makes another model and optimizer in train(): give Trainer(model_init(), ...)"
        )
    if args.load_best_model_at_end:
        raise ConfigError(
            "load_best_model_at_end=True would change the parameters while other peers may still load them from here; "
            "leave it out, and load the checkpoint named by trainer.state.best_model_checkpoint afterwards"
        )
