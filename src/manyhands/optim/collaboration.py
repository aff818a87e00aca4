"""The networked half of the optimizer: one peer's part in one run. Lives on the network thread, touches no tensor."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from manyhands.averaging.averager import Averager, RoundResult
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.optim.config import ProgressConfig
from manyhands.optim.progress import Branch, Progress
from manyhands.optim.run_manifest import ManifestKeeper, RunManifest
from manyhands.optim.state import State
from manyhands.optim.state_transfer import StateServer, download_state
from manyhands.optim.tracker import ProgressTracker
from manyhands.peer import Peer

logger = logging.getLogger(__name__)


class Decision(enum.Enum):
    """What to do after a micro-batch."""

    ACCUMULATE = "the target is not reached"
    AVERAGE = "the target is reached: average with the others"
    GO_ALONE = "the target is reached, and nobody else is there"
    LOAD_STATE = "the run is on another branch: load its state"


@dataclass
class LocalState:
    """What the training thread lends to the network thread.

    Attributes:
        position: of the parameters as they are now.
        capture: copies the state; safe to call from any thread.
    """

    position: Position
    capture: Callable[[], State]


class Collaboration:
    """One peer's part in one run: its manifest, progress, rounds and state server."""

    def __init__(
        self,
        peer: Peer,
        manifest: RunManifest,
        local: LocalState,
        averaging: AveragingConfig,
        progress: ProgressConfig,
    ) -> None:
        self._peer = peer
        self._manifest = manifest
        self._local = local
        self._averaging = averaging
        self._progress_config = progress
        self._rng = peer.rng
        self.run_id = manifest.run_id

    async def start(self) -> None:
        """Join the run.

        Raises:
            ManifestMismatch: this peer does not fit it.
            Unavailable: the DHT does not answer.
        """
        peer, manifest = self._peer, self._manifest
        self._keeper = ManifestKeeper(peer.dht, peer.peer_id, manifest)
        await self._keeper.agree()
        self.tracker = ProgressTracker(
            peer.endpoint,
            peer.dht,
            manifest.run_id,
            manifest.target_batch_size,
            self._local.position,
            self._progress_config,
            on_update=log_progress,
        )
        fingerprint = manifest.fingerprint()
        self._averager = Averager(peer.endpoint, manifest.run_id, fingerprint, self.tracker, self._averaging, self._rng)
        self._server = StateServer(peer.endpoint, manifest.run_id, self._local.capture, lambda: self._local.position)
        await self.tracker.refresh()
        self._peer.on_close.append(self.close)

    async def close(self) -> None:
        """Leave the run."""
        if self.close in self._peer.on_close:
            self._peer.on_close.remove(self.close)
            self._server.close()
            await self._averager.close()
            await self.tracker.close()
            await self._keeper.close()

    async def decide(self, samples: int, samples_per_second: float) -> Decision:
        """Report what this peer has accumulated; returns what to do next."""
        self.tracker.report(samples, samples_per_second)
        if self.tracker.leading_branch().position != self._local.position:
            return Decision.LOAD_STATE
        if not self.tracker.is_due():
            return Decision.ACCUMULATE
        if self.tracker.can_meet_somebody():
            return Decision.AVERAGE
        if self.tracker.num_peers_here() > 1:  # they did not come to the last round, and have not been heard of since
            return Decision.ACCUMULATE
        await self._look_again()  # before a step that nobody else makes
        if self.tracker.num_peers_here() > 1 or self.tracker.leading_branch().position != self._local.position:
            return Decision.ACCUMULATE
        return Decision.GO_ALONE if samples else Decision.ACCUMULATE

    async def _look_again(self) -> None:
        try:
            await self.tracker.refresh()
        except ManyhandsError as error:
            logger.debug("the progress of the others cannot be read: %s", error)

    async def average(self, flat_N: torch.Tensor, weight: float) -> RoundResult:
        """One attempt at a round; see :meth:`manyhands.averaging.averager.Averager.average`."""
        self.tracker.answer_call()
        return await self._averager.average(flat_N, weight)

    async def move(self, position: Position, lineage_samples: int, together_with: list[PeerId]) -> None:
        """This peer's parameters are at ``position`` now."""
        self.tracker.move(position, lineage_samples, together_with)

    async def begin(self, position: Position, lineage_samples: int) -> None:
        """Publish progress from ``position`` on."""
        self.tracker.move(position, lineage_samples, [])
        self.tracker.start()

    async def leading_branch(self) -> Branch:
        """Where the run is."""
        return self.tracker.leading_branch()

    async def download(self) -> State:
        """The state of the leading branch, from one of its holders.

        Raises:
            Unavailable: nobody could hand it out.
        """
        donors = [peer_id for peer_id in self.tracker.leading_branch().holders if peer_id != self._peer.peer_id]
        self._rng.shuffle(donors)  # so that newcomers do not all ask the same one
        return await download_state(self._peer.endpoint, self._manifest.run_id, donors, self._manifest.tensors)

    async def is_ahead_of_somebody(self) -> bool:
        """Whether a peer of the run has yet to reach this position."""
        await self._look_again()
        return self.tracker.is_ahead_of_somebody()


def log_progress(progress: Progress, refresh_s: float) -> None:
    """The line by which a person sees that a run is alive."""
    logger.info(
        "Collaboration accumulated %d samples from %d peers; ETA %.2f seconds (refresh in %.2fs.)",
        progress.samples,
        progress.num_peers,
        progress.eta_s,
        refresh_s,
    )
