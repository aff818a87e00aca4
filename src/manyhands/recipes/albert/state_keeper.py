"""Keeps checkpoints of a run without training in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from manyhands.checkpoints.checkpoint_dir import CheckpointDir
from manyhands.checkpoints.checkpoints import SAVE_TIMEOUT_S, save_checkpoint
from manyhands.peer import Peer
from manyhands.recipes.albert.adoption import RunRecipe
from manyhands.recipes.albert.compute import Compute
from manyhands.recipes.albert.state_follower import StateFollower
from manyhands.runtime.exit_delay import delay_exit
from manyhands.runtime.interrupts import uninterrupted

logger = logging.getLogger(__name__)


class StateKeeper:
    """Downloads the state of a run every few global steps, and saves it as trainers do.

    Args:
        on_saved: called with each checkpoint and its global step.
    Raises:
        ConfigError: the checkpoints in the folder were made with other settings.
    """

    def __init__(
        self, peer: Peer, run_id: str, run: RunRecipe, folder: CheckpointDir, on_saved: Callable[[Path, int], None]
    ) -> None:
        self._folder = folder
        self._on_saved = on_saved
        self._follower = StateFollower(peer, run_id, run, Compute("cpu", "float32"))
        newest = next(folder.newest(self._follower.manifest), None)
        self._saved_step = newest.global_step if newest is not None else 0

    def run(self, every: int) -> None:
        """Keep checkpoints until interrupted."""
        while True:
            step = self._follower.next_state(every)
            if step > self._saved_step:
                self._save(step)
            elif step < self._saved_step:
                logger.warning(
                    "The run is at global step %d, and the newest checkpoint here is of step %d: nothing is saved "
                    "until the run has reached it. To continue from that checkpoint instead, give a trainer a copy of "
                    "%s as its --checkpoint-dir", step, self._saved_step, self._folder.path,
                )  # fmt: skip

    def _save(self, step: int) -> None:
        follower = self._follower
        with delay_exit(SAVE_TIMEOUT_S), uninterrupted():
            path = save_checkpoint(
                self._folder, step, follower.manifest, follower.model, follower.tokenizer, follower.state_dict()
            )
        if path is not None:
            self._saved_step = step
            self._on_saved(path, step)
