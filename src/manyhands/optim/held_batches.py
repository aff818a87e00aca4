"""Notices batches that accelerate keeps from ``step()``, so that they would not count."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from manyhands.base.errors import ConfigError


class HeldBatches:
    """Looks at each backward pass whether accelerate lets the optimizer step after it.

    The wrapper of ``accelerator.prepare``, and so ``transformers.Trainer``, calls ``step()`` once for several backward
    passes when it accumulates gradients itself.

    Args:
        parameters: of the model; the last one is in most backward passes.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._has_held = False
        self._handle = parameters[-1].register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, _: torch.Tensor) -> None:
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is not None and not accelerate.GradientState().sync_gradients:
            self._has_held = True

    def check(self) -> None:
        """Make sure that there were none since the last call.

        Raises:
            ConfigError: there were; it says what to write.
        """
        if self._has_held:
            self._has_held = False
            raise ConfigError(
                "accelerate accumulates the gradients of several batches before it calls step(), so only the samples "
                "of one of them would count. Leave gradient_accumulation_steps at 1, in Accelerator(...) or in "
                "TrainingArguments(...): this optimizer accumulates by itself, until all peers together have "
                "target_batch_size samples"
            )

    def close(self) -> None:
        """Look no more."""
        self._handle.remove()
