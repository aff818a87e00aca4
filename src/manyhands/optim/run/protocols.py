"""The training thread's state as the network thread sees it."""

from __future__ import annotations

from typing import Protocol

import torch

from manyhands.averaging.messages import Position
from manyhands.optim.state.state import State


class LocalState(Protocol):
    """A :class:`manyhands.optim.step.replica.Replica`."""

    position: Position

    @property
    def drift_bound(self) -> float:
        """See :func:`manyhands.optim.run.drift.bound_of`."""

    def capture(self) -> State:
        """Copy the state; safe to call from any thread."""

    def flat_parameters(self) -> torch.Tensor:
        """A copy of the trained parameters as one vector; safe to call from any thread."""
