"""Saves what a trainer has reached, and begins again from there."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

from manyhands.base.errors import ConfigError
from manyhands.optim.optimizer import Optimizer
from manyhands.recipes.albert.checkpoint_dir import CheckpointDir
from manyhands.recipes.albert.packages import torch, transformers

logger = logging.getLogger(__name__)

MAX_REASON_LENGTH = 300
_OPTIMIZER = "optimizer.pt"


class Checkpoints:
    """Of one trainer: model and tokenizer as transformers loads them, and the optimizer beside them.

    Args:
        every: global steps from one to the next.
    """

    def __init__(
        self,
        folder: CheckpointDir,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerFast,
        optimizer: Optimizer,
        every: int,
    ) -> None:
        self._folder = folder
        self._model = model
        self._tokenizer = tokenizer
        self._optimizer = optimizer
        self._every = every
        self._saved_step = optimizer.global_step
        # each file would be a line in the log
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    def resume(self) -> None:
        """Go to the newest one, unless the run is at its step, or further.

        Raises:
            ConfigError: it does not fit the model, or is damaged.
        """
        newest, here = self._folder.newest(), self._optimizer.global_step
        if newest is None:
            return
        if newest.about.global_step <= here:
            logger.info("The run is at global step %d; %s is not needed", here, newest.path)
            return
        try:
            self._load(newest.path)
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:MAX_REASON_LENGTH]
            raise ConfigError(f"checkpoint {newest.path} cannot be loaded: {reason}; remove it to go on") from error
        if self._optimizer.state_digest() != newest.about.state_digest:
            raise ConfigError(f"checkpoint {newest.path} is damaged: its digest is another one; remove it to go on")
        self._saved_step = newest.about.global_step
        logger.info("Going on from %s", newest.path)

    def save_if_due(self) -> None:
        """Save if enough steps were made since the last one."""
        if self._optimizer.global_step >= self._saved_step + self._every:
            self.save()

    def save(self) -> None:
        """Save what has changed since the last one. Training goes on if the disk does not take it: that is said."""
        optimizer = self._optimizer
        state = optimizer.state_dict()  # first: it waits for a step that is being made
        step = optimizer.global_step
        if step <= self._saved_step:
            return
        try:
            with self._folder.adding(step, optimizer.state_digest()) as draft:
                self._model.save_pretrained(draft)
                self._tokenizer.save_pretrained(draft)
                torch.save(state, draft / _OPTIMIZER)
        except OSError as error:
            logger.warning("the checkpoint of step %d was not saved: %s", step, error)
        else:
            logger.info("Saved a checkpoint at global step %d", step)
        self._saved_step = step  # the next attempt is with the next one

    def close(self) -> None:
        """Save what has changed since the last one, and let others use the folder."""
        try:
            self.save()
        finally:
            self._folder.close()

    def _load(self, path: Path) -> None:
        saved = type(self._model).from_pretrained(path)
        state = torch.load(path / _OPTIMIZER, map_location="cpu", weights_only=True)
        self._model.load_state_dict(saved.state_dict())
        self._optimizer.load_state_dict(state)
