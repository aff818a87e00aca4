"""Says that BatchNorm's running mean and variance do not travel, when a model has them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

logger = logging.getLogger(__name__)


class RunningStatistics:
    """Looks for BatchNorm layers in the model that is trained, once, when it computes its first batch.

    An optimizer is given parameters, which do not know of their modules. So each module that is called is looked at,
    until all parameters are found or the first batch is over: where a whole model is called, at its first call only.

    Args:
        parameters: that are trained.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._sought = {id(parameter): parameter for parameter in parameters}
        # torch.compile says so of any such hook; this one is gone before it compiles
        warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
        self._handle = register_module_forward_pre_hook(self._look)

    def _look(self, module: torch.nn.Module, _: object) -> None:
        if torch.compiler.is_compiling() or not module.training:
            return
        found = self._sought.keys() & set(map(id, module.parameters()))
        if not found:
            return
        for key in found:
            del self._sought[key]
        is_said = any(map(_has_running_statistics, module.modules()))
        if is_said:
            logger.warning(
                "The model has BatchNorm layers, whose running mean and variance do not travel yet: each peer has "
                "those of its own batches, and a newcomer begins anew. Evaluate and save the model of a peer that has "
                "trained for long, or use GroupNorm or LayerNorm"
            )
        if is_said or not self._sought:
            self.close()

    def close(self) -> None:
        """Look no more. May be called twice."""
        self._sought.clear()
        self._handle.remove()


def _has_running_statistics(module: torch.nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is not None and module.training
