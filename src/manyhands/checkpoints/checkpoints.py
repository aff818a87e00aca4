"""Saves the checkpoints of a training loop, and resumes from them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors.torch import load_model, save_model

from manyhands.base.arguments import whole
from manyhands.base.errors import ConfigError, Timeout
from manyhands.base.text import counted, reason_of
from manyhands.checkpoints.checkpoint_dir import SAVED_EVERY, CheckpointDir, Place, parted
from manyhands.checkpoints.optimizer_state import load_state, save_state
from manyhands.optim.manifest import RunManifest
from manyhands.optim.optimizer import Optimizer
from manyhands.optim.options import is_sharded
from manyhands.optim.wrapper import PLACE
from manyhands.runtime.exit_delay import delay_exit
from manyhands.runtime.interrupts import uninterrupted

logger = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 120.0
"""Longest time in seconds for which a save delays the end of a program that was told to leave."""
MODEL = "model.safetensors"
SPLIT = (
    "the model is split over the ranks (FSDP2), and Checkpoints saves on rank 0 alone. Write on all ranks\n"
    "    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
    "    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
    "    state = {'model': get_model_state_dict(model, options=whole), 'optimizer': optimizer.state_dict()}\n"
    "    if torch.distributed.get_rank() == 0:\n"
    "        torch.save(state, 'checkpoint')"
)


class Pretrained(Protocol):
    """A model or tokenizer that writes its own files, as those of transformers do."""

    def save_pretrained(self, folder: Path, /) -> Any: ...


class Checkpoints:
    """Saves model, optimizer and position in the run every few global steps, and resumes from the newest checkpoint.

    ::

        with manyhands.Checkpoints("my-checkpoints", optimizer, model) as checkpoints:
            checkpoints.resume()
            while optimizer.global_step < 10_000:
                ...  # optimizer.step() as always
                checkpoints.save_if_due()

    A model of ``transformers`` is saved in its own format, any other one as ``model.safetensors``. A checkpoint is
    complete or absent, also after a power failure. If it cannot be saved, for example because the disk is full, a
    warning is logged and the training goes on.

    Args:
        folder: is created if missing, and locked by this process until :meth:`close`; the ``state_dir`` of the peer
            may be the same. Each peer needs one of its own. An open :class:`CheckpointDir` has its own ``keep``.
        optimizer: of a :class:`manyhands.ProcessGroupOptimizer` give its ``leader``, on rank 0.
        model: the module that the optimizer trains; of any kind, with tensors only in its ``state_dict()``.
        every: global steps from one checkpoint to the next; one more is saved by :meth:`close`.
        keep: number of checkpoints to keep; the older ones are used if the newest is damaged.
        tokenizer: is saved with the model, by its ``save_pretrained``.
    Raises:
        FolderInUse: another process uses the folder.
        ConfigError: the folder cannot be used, or its checkpoints are another run's or of another format; or the
            optimizer trains another model, or the model cannot be saved.
    """

    def __init__(
        self,
        folder: str | Path | CheckpointDir,
        optimizer: Optimizer,
        model: torch.nn.Module,
        every: int = SAVED_EVERY,
        keep: int = 2,
        *,
        tokenizer: Pretrained | None = None,
    ) -> None:
        self._every = whole("every", every, least=1, example=100)
        if not isinstance(folder, CheckpointDir):
            keep = whole("keep", keep, least=1, example=2)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__}; it must be a manyhands.Optimizer, which for a "
                "ProcessGroupOptimizer is its leader, on rank 0 alone"
            )
        if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
            raise ConfigError(f"tokenizer={tokenizer!r} has no save_pretrained(); give the tokenizer itself, or None")
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model is of type {type(model).__name__}; give the module that the optimizer trains")
        if any(map(is_sharded, model.parameters())):
            raise ConfigError(SPLIT)
        trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if num_missing := len(trained - set(model.parameters())):
            raise ConfigError(
                f"the model lacks {counted(num_missing, 'parameter')} of the optimizer's {len(trained)}; give the "
                "module whose parameters the optimizer has"
            )
        self._optimizer = optimizer
        self._model: Any = _unwrapped(model)
        if not _is_of_transformers(self._model):
            for name, value in self._model.state_dict().items():
                if not isinstance(value, torch.Tensor):
                    raise ConfigError(
                        f"{name} in the model's state_dict() is a {type(value).__name__}, and a checkpoint of a module "
                        "holds tensors only; keep it in a buffer"
                    )
        self._tokenizer = tokenizer
        if not isinstance(folder, CheckpointDir):
            folder = CheckpointDir(Path(folder), optimizer.manifest.run_id, keep)
        self._folder = folder
        self._saved_step = self._tried_step = optimizer.global_step
        self._must_check = True

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def resume(self) -> bool:
        """Load the newest intact checkpoint, unless the run is at its step or further; returns whether it did.

        Raises:
            ConfigError: the checkpoint was made with another model or other settings, or none can be loaded.
        """
        here = self._optimizer.global_step
        self._saved_step = 0
        self._must_check = False
        for checkpoint in self._folder.newest(self._optimizer.manifest):
            if checkpoint.global_step <= here:
                place = Place.of(self._optimizer.state_dict()[PLACE])
                if there := dict(self._folder.of_other_branches(place)).get(checkpoint.path):
                    logger.warning(
                        "The run is at global step %d, and does not continue from %s: %s. The checkpoint is kept. To "
                        "continue from it instead, end all trainers, and start this one first",
                        here, checkpoint.path, parted(place, there),
                    )  # fmt: skip
                else:
                    logger.info("The run is at global step %d; %s is not needed", here, checkpoint.path)
                self._saved_step = checkpoint.global_step
                return False
            try:
                self._load(checkpoint.path)
            except Exception as error:
                reason = reason_of(error)
                raise ConfigError(f"checkpoint {checkpoint.path} cannot be loaded: {reason}") from error
            self._saved_step = self._tried_step = checkpoint.global_step
            logger.info("Going on from %s", checkpoint.path)
            return True
        if self._folder.newest_path() is not None:
            raise ConfigError(f"no checkpoint in {self._folder.path} can be read; remove them to begin anew")
        return False

    def save_if_due(self) -> None:
        """Save if enough global steps were made since the last attempt. Call it after each ``optimizer.step()``.

        Raises:
            ConfigError: :meth:`resume` was not called, and a checkpoint in the folder is of a later step.
        """
        if self._must_check:
            newest = self._folder.newest_step()
            if newest > self._optimizer.global_step:
                raise ConfigError(
                    f"{self._folder.of_step(newest)} is of a later step than this peer, so the folder would hold two "
                    "runs: call checkpoints.resume() once, before the loop, or give another checkpoint folder"
                )
            self._must_check = False
        if self._optimizer.global_step >= self._tried_step + self._every:
            self._save()

    def close(self) -> None:
        """Save if the run is further than the last checkpoint, and unlock the folder. Close the peer after it."""
        try:
            if not self._must_check or self._folder.newest_step() <= self._optimizer.global_step:
                self._save()
        finally:
            self._folder.close()

    def _save(self) -> None:
        with delay_exit(SAVE_TIMEOUT_S), uninterrupted():
            try:
                self._optimizer.settle()
            except Timeout as error:
                self._tried_step = self._optimizer.global_step
                logger.warning("No checkpoint of step %d is saved: %s", self._tried_step, error)
                return
            step = self._tried_step = self._optimizer.global_step
            if step <= self._saved_step:
                return
            with self._optimizer.agreed_parameters():
                state = self._optimizer.state_dict()
                run = self._optimizer.manifest
                if save_checkpoint(self._folder, step, run, self._model, self._tokenizer, state):
                    self._saved_step = step

    def _load(self, path: Path) -> None:
        state = load_state(path)
        with uninterrupted():
            try:
                load_model(self._model, path / MODEL)
            except (FileNotFoundError, RuntimeError):
                if not _is_of_transformers(self._model):
                    raise
                # it was saved in several files, or under other names
                saved = type(self._model).from_pretrained(path, local_files_only=True)
                self._model.load_state_dict(saved.state_dict())
            self._optimizer.load_state_dict(state)


def save_checkpoint(
    folder: CheckpointDir,
    global_step: int,
    run: RunManifest,
    model: Any,
    tokenizer: Pretrained | None,
    state: Mapping[str, Any],
) -> Path | None:
    """Save a checkpoint; returns its path, or None after a warning that says why it was not saved.

    Args:
        run: the settings of the run.
        model: a module.
        state: of the optimizer.
    """
    logger.info("Saving a checkpoint at global step %d", global_step)
    try:
        with folder.adding(global_step, run, Place.of(state[PLACE])) as draft:
            if _is_of_transformers(model):
                model.save_pretrained(draft)
            else:
                save_model(model, str(draft / MODEL))
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
            save_state(state, draft)
    except Exception as error:  # noqa: BLE001 (a full disk is a different error for each of the writers)
        path = folder.of_step(global_step)
        logger.warning("The checkpoint of step %d was not saved as %s: %s", global_step, path, reason_of(error))
        return None
    return folder.of_step(global_step)


def _is_of_transformers(model: torch.nn.Module) -> bool:
    """Whether it is a model of transformers, which is not imported for this."""
    names = [(kind.__module__, kind.__name__) for kind in type(model).__mro__]
    return ("transformers.modeling_utils", "PreTrainedModel") in names


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module, without the wrappers of ``torch.compile`` and DDP."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner
