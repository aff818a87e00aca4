"""The documented classes with what tests look at inside them, which users have no name for."""

from __future__ import annotations

from manyhands.averaging.averager import Averager
from manyhands.averaging.averager_loop import AveragerLoop
from manyhands.optim.optimizer import Optimizer
from manyhands.optim.run.collaboration import Collaboration
from manyhands.optim.step.replica import Replica


class OpenOptimizer(Optimizer):
    """An optimizer that shows what it trains, and its part in the run."""

    @property
    def replica(self) -> Replica:
        """The parameters and the position of this peer."""
        return self._replica

    @property
    def collaboration(self) -> Collaboration:
        """This peer in the run."""
        return self._collaboration


class OpenAverager(Averager):
    """An averager that shows what it does in the network thread."""

    @property
    def averager_loop(self) -> AveragerLoop:
        """Of the network thread."""
        return self._averager_loop
