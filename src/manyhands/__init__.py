"""manyhands trains one neural network together, over the internet, on whatever machines people bring.

::

    with manyhands.Peer(initial_peers=[...]) as peer:
        optimizer = manyhands.Optimizer(torch.optim.AdamW(model.parameters()), peer=peer, run_id="my-run",
                                        target_batch_size=4096, batch_size_per_step=32)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manyhands.base.errors import ManyhandsError
from manyhands.peer import Peer
from manyhands.version import __version__

if TYPE_CHECKING:
    from manyhands.optim.optimizer import Optimizer

__all__ = ["ManyhandsError", "Optimizer", "Peer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Optimizer":  # on first use only: it imports torch, which a coordinator never needs
        from manyhands.optim.optimizer import Optimizer

        return Optimizer
    raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
