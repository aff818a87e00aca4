"""Keeps the state of the run that a monitor watches, in checkpoints and at the Hugging Face Hub."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from manyhands.base.errors import ConfigError, ManyhandsError
from manyhands.checkpoints.checkpoint_dir import CheckpointDir
from manyhands.cli.options import Count
from manyhands.cli.run_to_follow import wait_for_run
from manyhands.cli.taking_part import require_albert
from manyhands.monitor.hub import HubUploads, checked_repo
from manyhands.monitor.monitor_events import MonitorEvent, StepMade
from manyhands.peer import Peer

logger = logging.getLogger(__name__)

RETRY_PERIOD_S = 60.0


@Parameter(name="*", group="Checkpoints")
@dataclass(frozen=True, kw_only=True)
class KeepingOptions:
    """Keeps the state of the run, so that it outlives the trainers."""

    checkpoint_dir: Path | None = None
    """Folder in which to save the state of the run regularly; needs torch: manyhands[albert]."""

    checkpoint_every: Count = 5
    """Global steps from one checkpoint to the next."""

    repo_url: str | None = None
    """Send the newest checkpoint to this repository of the Hugging Face Hub: OWNER/NAME, or the address of its page."""

    upload_interval: float = 3600.0
    """Seconds from one upload of a checkpoint to the next."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.upload_interval <= 1e7:
            raise ConfigError(
                f"upload_interval is {self.upload_interval}; it must be at least 1 second, for example 3600"
            )
        if self.repo_url is not None and self.checkpoint_dir is None:
            raise ConfigError(
                f"--repo-url sends checkpoints, and none are kept; add for example: --checkpoint-dir checkpoints "
                f"--repo-url {self.repo_url}"
            )

    def check(self) -> str | None:
        """Check packages and tokens before anything is started; returns the id of the repository, if one was named.

        Raises:
            ConfigError: a package is not installed, or there is no token.
        """
        if self.checkpoint_dir is not None:
            require_albert()
        return checked_repo(self.repo_url) if self.repo_url is not None else None


class Keeping:
    """Keeps checkpoints, on the thread that calls :meth:`run`.

    Attributes:
        last_step: last step that the monitor saw, for the message of an upload.
    """

    def __init__(self, options: KeepingOptions, run_id: str, repo: str | None) -> None:
        self.last_step: StepMade | None = None
        self._options = options
        self._run_id = run_id
        assert options.checkpoint_dir is not None
        self._folder = CheckpointDir(options.checkpoint_dir, run_id)
        self._uploads = HubUploads(repo, options.upload_interval) if repo is not None else None

    def note(self, event: MonitorEvent) -> None:
        """Note the last step among the events of the monitor."""
        if isinstance(event, StepMade):
            self.last_step = event

    def run(self, peer: Peer) -> None:
        """Keep checkpoints until interrupted, or until an error that shows that this machine cannot keep them."""
        while True:
            try:
                self._keep(peer)
            except ConfigError as error:
                logger.warning("The monitor goes on, but keeps no checkpoints until it is started again: %s", error)
                return
            except ManyhandsError as error:
                logger.warning("No checkpoint is kept for now: %s; trying again in %.3g s", error, RETRY_PERIOD_S)
                peer.sleep(RETRY_PERIOD_S)

    def _keep(self, peer: Peer) -> None:
        run = wait_for_run(peer, self._run_id, {})
        logger.info("Keeping checkpoints in %s; loading PyTorch and transformers", self._folder.path)
        from manyhands.recipes.albert.state_keeper import StateKeeper

        StateKeeper(peer, run.run_id, run.recipe, self._folder, self._saved).run(self._options.checkpoint_every)

    def close(self) -> None:
        """Stop uploading and release the folder."""
        if self._uploads is not None:
            self._uploads.close()
        self._folder.close()

    def _saved(self, path: Path, step: int) -> None:
        if self._uploads is not None:
            made = self.last_step  # the metrics of a step may arrive after its state
            loss = "" if made is None else f", loss {made.loss:.5f}"
            loss += f" at step #{made.step}" if made is not None and made.step != step else ""
            self._uploads.offer(path, f"Step #{step}{loss}")
