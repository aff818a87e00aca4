"""Hooks in the user's model, for two mistakes that an optimizer cannot see: held-back batches and BatchNorm."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from manyhands.base.errors import ConfigError

logger = logging.getLogger(__name__)

NUM_WATCHED = 8
"""Parameters with a hook: not all are in every backward pass, and a hook on each costs time."""


class HeldBatches:
    """Detects batches that accelerate keeps from ``step()``, so that they would not count.

    The wrapper of ``accelerator.prepare``, and so ``transformers.Trainer``, calls ``step()`` once for several backward
    passes when it accumulates gradients itself.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._held: set[int] = set()  # watched parameters whose gradient accelerate has kept from step() so far
        self._has_lost = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters[:: -max(1, len(parameters) // NUM_WATCHED)])
        ]

    def _note(self, index: int, _: torch.Tensor) -> None:
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is None:
            return
        if index in self._held:  # and the next backward pass has come without a step() between them
            self._has_lost = True
        if not accelerate.GradientState().sync_gradients:
            self._held.add(index)

    def check(self) -> None:
        """Raises ``ConfigError`` if there were some since the last call; it says what to write."""
        self._held.clear()
        if self._has_lost:
            self._has_lost = False
            raise ConfigError(
                "accelerate accumulates the gradients of several batches before it calls step(), so only the samples "
                "of one of them would count. This optimizer accumulates by itself, until all peers together have "
                "target_batch_size samples. Leave gradient_accumulation_steps at 1; or write, in a loop of your own\n"
                "    for batch in manyhands.training.accelerate.counted(loader, optimizer, accelerator):\n"
                "or with a transformers.Trainer, before trainer.train()\n"
                "    trainer.add_callback(manyhands.training.transformers.CollaborativeCallback(trainer))"
            )

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class RunningStatistics:
    """Warns once if the model has BatchNorm layers whose running mean and variance are not shared.

    An optimizer gets parameters, which do not know their modules. So each module that is called is searched until all
    trained parameters are found: where a whole model is called, at its first call only.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._sought = {id(parameter): parameter for parameter in parameters}
        # torch.compile warns about any such hook; this one is gone before it compiles
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
        has_them = any(
            isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.training
            for layer in module.modules()
        )
        if has_them:
            logger.warning(
                "The model has BatchNorm layers, whose running mean and variance are not shared: each peer has those "
                "of its own batches, and a newcomer begins anew. Write on all peers\n"
                "    manyhands.Optimizer(..., buffers=model.named_buffers())"
            )
        if has_them or not self._sought:
            self.close()

    def close(self) -> None:
        """Remove the hook. May be called twice."""
        self._sought.clear()
        self._handle.remove()
