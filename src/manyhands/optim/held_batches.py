"""Notices batches that accelerate keeps from ``step()``, so that they would not count."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

from manyhands.base.errors import ConfigError

NUM_WATCHED = 8


class HeldBatches:
    """Looks at each backward pass whether accelerate lets the optimizer step after it.

    The wrapper of ``accelerator.prepare``, and so ``transformers.Trainer``, calls ``step()`` once for several backward
    passes when it accumulates gradients itself.

    Args:
        parameters: of the model; some of them are watched, as not each is in every backward pass.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._held: set[int] = set()  # the watched ones with a gradient that accelerate has kept from step() so far
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
        """Make sure that there were none since the last call.

        Raises:
            ConfigError: there were; it says what to write.
        """
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
        """Look no more."""
        for handle in self._handles:
            handle.remove()
