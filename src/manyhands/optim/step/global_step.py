"""One attempt at a global step: averaging, and then the same update on every peer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING

import torch

from manyhands.averaging.messages import Position, RoundManifest
from manyhands.base.errors import ManyhandsError, RoundAborted, Unavailable
from manyhands.base.forgetting import without_frames
from manyhands.base.identity import PeerId
from manyhands.base.words import counted
from manyhands.optim.accumulator import Contribution
from manyhands.optim.run.averaged import Averaged
from manyhands.optim.run.drift import Sketch
from manyhands.optim.run.progress import sum_of_samples
from manyhands.optim.step.replica import Replica

if TYPE_CHECKING:
    from manyhands.optim.run.collaboration import Collaboration

logger = logging.getLogger(__name__)


class GlobalStep:
    """What becomes of one contribution.

    The training thread makes a step by itself, or leaves it to :meth:`run` and looks at :attr:`is_done`.

    Attributes:
        contribution: this peer's part; once the update is made its vector has no values that count, unless it is left
            out.
        applied_N: the averaged gradient, clipped, since the update has begun; None if that is made by :meth:`run`.
        left_from: where the step was begun.
        samples: of the step, by all peers together, as it is averaged: by weight where that is not samples.
        manifest: of the round, in a grid of the last one; None for a step made alone, or while there is none.
        is_left_out: the group left out what this peer has contributed.
        is_outsized: as it was too large beside what the others brought.
        is_in_grid: it had several rounds.
        disagreement: see :class:`manyhands.optim.run.averaged.Averaged`.
        averaging_s: seconds of the round, without the search for the group.
        error: why there is no step; the contribution counts in the next attempt.
        refusal: why the step left the parameters as they were; empty if it did not.
        is_spoiled: the update failed, and the memory of the contribution was used for it.
        has_moved: the replica is at the position after the step.
        is_begun: it was left to the network thread.
        is_done: nothing here changes any more.
    """

    def __init__(self, replica: Replica, contribution: Contribution) -> None:
        self.contribution = contribution
        self.applied_N: torch.Tensor | None = None
        self.left_from = replica.position
        self.samples = 0
        self.manifest: RoundManifest | None = None
        self.is_left_out = self.is_outsized = False
        self.is_in_grid = False
        self.disagreement: float | None = None
        self.averaging_s = 0.0
        self.error: BaseException | None = None
        self.refusal = ""
        self.is_spoiled = False
        self.has_moved = False
        self.is_begun = False
        self.is_done = False
        self._replica = replica
        self._averaged_N: torch.Tensor | None = None
        self._parameters_N: torch.Tensor | None = None
        self._members: list[PeerId] = []
        self._contributors: list[PeerId] | None = None
        self._lineage = b""
        self._sketch = Sketch()

    @property
    def is_lost(self) -> bool:
        """The others made the step, and this peer does not have its result."""
        return self.manifest is not None and self._averaged_N is None and not self.has_moved

    def is_alone(self, own_id: PeerId) -> None:
        """Nobody else is there: this peer's own gradient is the average."""
        self._averaged_N = self.contribution.mean_N
        self._lineage = hashlib.sha256(self._replica.position.lineage + b"alone" + own_id.encode()).digest()
        self.samples = round(self.contribution.weight)
        self._contributors = [own_id]

    def committed(self, averaged: Averaged) -> None:
        """The averaging is over, and its result counts."""
        self.manifest = averaged.manifest
        self.is_left_out, self.is_outsized = averaged.is_left_out, averaged.is_outsized
        self.disagreement = averaged.disagreement
        self.averaging_s = averaged.averaging_s
        self._averaged_N, self._parameters_N = averaged.mean_N, averaged.parameters_N
        self._lineage, self.samples, self._members = averaged.lineage, averaged.samples, averaged.members
        self._contributors = averaged.contributors
        self.is_in_grid = averaged.num_rounds > 1
        logger.info("Averaged tensors successfully with %s", counted(averaged.num_peers, "peer"))

    def advance(self) -> None:
        """Make the update, on any thread; what the optimizer or the schedule raises passes through."""
        averaged_N, self._averaged_N = self._averaged_N, None
        assert averaged_N is not None, "a step follows a round that committed"
        is_free = averaged_N is not self.contribution.mean_N and not self.is_left_out
        spare_N = self.contribution.mean_N if is_free else None
        self.applied_N, self.is_spoiled = averaged_N, not self.is_left_out
        parameters_N, self._parameters_N = self._parameters_N, None
        try:
            self.refusal = self._replica.advance(
                averaged_N, self._lineage, self.samples, spare_N, parameters_N, self._contributors
            )
        finally:
            self.has_moved = self._replica.position != self.left_from
            self.is_spoiled = self.is_spoiled and not self.has_moved
        self._sketch = self._replica.sketch() if self.manifest is not None else Sketch()  # alone, it is not asked for

    async def announce(self, collaboration: Collaboration) -> None:
        """Have the network thread know where this peer, and the others of its round, are now."""
        replica = self._replica
        if self.is_lost:
            position = Position(replica.position.step + 1, self._lineage)
            samples = sum_of_samples([replica.lineage_samples, self.samples])
            await collaboration.fall_behind(position, samples, self._members)
        else:
            await collaboration.move(
                replica.position, replica.lineage_samples, self._members, self._sketch, is_in_grid=self.is_in_grid
            )

    async def run(self, collaboration: Collaboration) -> None:
        """Do what is left of the step on the network thread; the update on a thread of its executor."""
        try:
            if self._averaged_N is None:
                self.committed(await collaboration.average(self.contribution.mean_N, self.contribution.weight))
            if self._averaged_N is not None:
                await asyncio.get_running_loop().run_in_executor(None, self.advance)
                self.applied_N = None
            await self.announce(collaboration)
        except (RoundAborted, Unavailable) as error:
            self.error = without_frames(error)
        except Exception as error:  # noqa: BLE001 (it is the training thread's, which raises it)
            self.error = error
        else:
            self.is_done = True

    def end(self) -> None:
        """The network thread does nothing more for the step."""
        if not self.is_done and self.error is None:
            self.error = ManyhandsError("this peer left the run")
        self.is_done = True
