"""manyhands trains one neural network together, over the internet, on whatever machines people bring.

::

    with manyhands.Peer(initial_peers=[...]) as peer:
        optimizer = manyhands.Optimizer(torch.optim.AdamW(model.parameters()), peer=peer, run_id="my-run",
                                        target_batch_size=4096, batch_size_per_step=32)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyhands.base.errors import (
    BadSignature,
    ConfigError,
    DialFailed,
    JoinFailed,
    ManifestMismatch,
    ManyhandsError,
    MissingExtra,
    NobodyThere,
    NothingToAverage,
    PeerError,
    PeerLost,
    ProtocolViolation,
    RankLost,
    Refused,
    RoundAborted,
    RunNotFound,
    Timeout,
    TooSlow,
    Unavailable,
)
from manyhands.base.from_hivemind import OF_PACKAGE, advice_for
from manyhands.version import __version__

if TYPE_CHECKING:
    from manyhands import optim
    from manyhands.averaging.averager import Averager, RoundResult
    from manyhands.averaging.codecs.sparse import Sparse
    from manyhands.averaging.config import AveragingConfig
    from manyhands.averaging.state.content import LoadedState
    from manyhands.checkpoints.checkpoints import Checkpoints
    from manyhands.optim.config import ProgressConfig
    from manyhands.optim.loading import load_state_from_peers
    from manyhands.optim.local_steps import LocalSteps
    from manyhands.optim.optimizer import Optimizer
    from manyhands.optim.process_group import ProcessGroupOptimizer
    from manyhands.peer import Peer

__all__ = [
    "Averager",
    "AveragingConfig",
    "BadSignature",
    "Checkpoints",
    "ConfigError",
    "DialFailed",
    "JoinFailed",
    "LoadedState",
    "LocalSteps",
    "ManifestMismatch",
    "ManyhandsError",
    "MissingExtra",
    "NobodyThere",
    "NothingToAverage",
    "Optimizer",
    "Peer",
    "PeerError",
    "PeerLost",
    "ProcessGroupOptimizer",
    "ProgressConfig",
    "ProtocolViolation",
    "RankLost",
    "Refused",
    "RoundAborted",
    "RoundResult",
    "RunNotFound",
    "Sparse",
    "Timeout",
    "TooSlow",
    "Unavailable",
    "__version__",
    "load_state_from_peers",
    "optim",
]

_HOMES = {
    "Averager": "manyhands.averaging.averager",
    "AveragingConfig": "manyhands.averaging.config",
    "Checkpoints": "manyhands.checkpoints.checkpoints",
    "LoadedState": "manyhands.averaging.state.content",
    "LocalSteps": "manyhands.optim.local_steps",
    "Optimizer": "manyhands.optim.optimizer",
    "Peer": "manyhands.peer",
    "ProcessGroupOptimizer": "manyhands.optim.process_group",
    "ProgressConfig": "manyhands.optim.config",
    "RoundResult": "manyhands.averaging.averager",
    "Sparse": "manyhands.averaging.codecs.sparse",
    "load_state_from_peers": "manyhands.optim.loading",
}
_OF_TORCH = ("torch", "numpy", "blake3", "safetensors")
"""The packages of the extra ``torch``."""


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module("manyhands.optim")
    if name not in _HOMES:
        advice = f"; {advice_for(name, OF_PACKAGE)}" if name in OF_PACKAGE else ""
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}{advice}")
    try:  # on first use: the optimizer imports torch, which coordinators never need
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_TORCH:
            raise
        raise MissingExtra(f"manyhands.{name}", "torch") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
