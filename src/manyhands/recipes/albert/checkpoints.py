"""Saves the checkpoints of a trainer, and resumes from them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.base.errors import ConfigError
from manyhands.base.text import reason_of
from manyhands.optim.optimizer import Optimizer
from manyhands.recipes.albert.checkpoint_dir import CheckpointDir
from manyhands.recipes.albert.packages import torch, transformers
from manyhands.runtime.exit_delay import delay_exit
from manyhands.runtime.interrupts import uninterrupted

logger = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 120.0
"""Time that a program has for saving after it was told to leave."""
_OPTIMIZER = "optimizer.pt"


class Checkpoints:
    """Checkpoints of one trainer: model and tokenizer in the format of transformers, and the optimizer beside them.

    Args:
        facts: settings that must be the same when a checkpoint is loaded.
        every: global steps from one to the next.
    """

    def __init__(
        self,
        folder: CheckpointDir,
        facts: Mapping[str, str],
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerFast,
        optimizer: Optimizer,
        every: int,
    ) -> None:
        self._folder = folder
        self._facts = facts
        self._model = model
        self._tokenizer = tokenizer
        self._optimizer = optimizer
        self._every = every
        self._saved_step = self._tried_step = optimizer.global_step
        # transformers would log a line for each file
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    def resume(self) -> None:
        """Load the newest readable checkpoint, unless the run is at its step or further.

        Raises:
            ConfigError: the checkpoint was made with other settings, or none can be loaded.
        """
        here = self._optimizer.global_step
        for checkpoint in self._folder.newest(self._facts):
            if checkpoint.global_step <= here:
                logger.info("The run is at global step %d; %s is not needed", here, checkpoint.path)
                return
            try:
                self._load(checkpoint.path)
            except Exception as error:
                reason = reason_of(error)
                raise ConfigError(f"checkpoint {checkpoint.path} cannot be loaded: {reason}") from error
            self._saved_step = self._tried_step = checkpoint.global_step
            logger.info("Going on from %s", checkpoint.path)
            return
        if self._folder.has_any():
            raise ConfigError("no checkpoint in checkpoint_dir can be read; remove them to begin anew")

    def save_if_due(self) -> None:
        """Save if enough steps were made since the last attempt."""
        if self._optimizer.global_step >= self._tried_step + self._every:
            self._save()

    def close(self) -> None:
        """Save if there are changes since the last checkpoint, and unlock the folder."""
        try:
            self._save()
        finally:
            self._folder.close()

    def _save(self) -> None:
        """Save; if the disk fails, log it and go on training."""
        with delay_exit(SAVE_TIMEOUT_S), uninterrupted():
            state = self._optimizer.state_dict()  # first, as it waits for a step in progress
            step = self._tried_step = self._optimizer.global_step
            if step <= self._saved_step:
                return
            if save_checkpoint(self._folder, step, self._facts, self._model, self._tokenizer, state) is not None:
                self._saved_step = step

    def _load(self, path: Path) -> None:
        saved = type(self._model).from_pretrained(path)
        state = torch.load(path / _OPTIMIZER, map_location="cpu", weights_only=True)
        with uninterrupted():
            self._model.load_state_dict(saved.state_dict())
            self._optimizer.load_state_dict(state)


def save_checkpoint(
    folder: CheckpointDir,
    global_step: int,
    facts: Mapping[str, str],
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerFast,
    state: Mapping[str, Any],
) -> Path | None:
    """Save a checkpoint; returns its path, or None after logging a disk error.

    Args:
        state: of the optimizer.
    """
    logger.info("Saving a checkpoint at global step %d", global_step)
    try:
        with folder.adding(global_step, facts) as draft:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
            torch.save(dict(state), draft / _OPTIMIZER)
    except Exception as error:  # noqa: BLE001 (a full disk is a different error for each of the writers)
        logger.warning("the checkpoint of step %d was not saved: %s", global_step, error)
        return None
    return folder.newest_path()
