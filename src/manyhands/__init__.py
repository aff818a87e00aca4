"""manyhands trains one neural network together, over the internet, on whatever machines people bring.

::

    with manyhands.Peer(initial_peers=[...]) as peer:
        optimizer = manyhands.Optimizer(torch.optim.AdamW(model.parameters()), peer=peer, run_id="my-run",
                                        target_batch_size=4096, batch_size_per_step=32)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyhands.version import __version__

if TYPE_CHECKING:
    from manyhands.averaging.tensor_averager import Averager, RoundResult
    from manyhands.base.errors import ManyhandsError
    from manyhands.optim.optimizer import Optimizer
    from manyhands.optim.process_group_optimizer import ProcessGroupOptimizer
    from manyhands.peer import Peer

__all__ = ["Averager", "ManyhandsError", "Optimizer", "Peer", "ProcessGroupOptimizer", "RoundResult", "__version__"]

_HOMES = {
    "Averager": "manyhands.averaging.tensor_averager",
    "ManyhandsError": "manyhands.base.errors",
    "Optimizer": "manyhands.optim.optimizer",
    "Peer": "manyhands.peer",
    "ProcessGroupOptimizer": "manyhands.optim.process_group_optimizer",
    "RoundResult": "manyhands.averaging.tensor_averager",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # on first use only: the optimizer imports torch, which a coordinator never needs
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
