"""What the training thread lends to the network thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from manyhands.averaging.messages import Position
from manyhands.optim.accumulator import Contribution
from manyhands.optim.state.state import State

if TYPE_CHECKING:
    from manyhands.optim.run.collaboration import Collaboration


class LocalState(Protocol):
    """A :class:`manyhands.optim.step.replica.Replica`."""

    position: Position
    lineage_samples: int
    options: list[dict[str, Any]]

    @property
    def drift_bound(self) -> float:
        """See :func:`manyhands.optim.run.drift.bound_of`."""

    def capture(self) -> State:
        """Copy the state; safe to call from any thread."""

    def flat_parameters(self) -> torch.Tensor:
        """The trained parameters end to end, copied; safe to call from any thread."""


class BackgroundStep(Protocol):
    """A global step that is made in the background: :class:`manyhands.optim.step.global_step.GlobalStep`."""

    contribution: Contribution
    has_moved: bool
    is_begun: bool

    def end(self) -> None:
        """Nothing more is done for it."""

    async def run(self, collaboration: Collaboration) -> None:
        """Make the step."""
