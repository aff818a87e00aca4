"""Detects common mistakes in a training loop and its model.

These are batches of another model, batches held back by accelerate, a forgotten ``zero_grad()``, and BatchNorm layers
whose statistics are not shared.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections.abc import Iterable, Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.base.errors import ConfigError
from manyhands.optim.flat import num_writes
from manyhands.optim.options import is_sharded

logger = logging.getLogger(__name__)

NUM_WATCHED = 8
"""Number of parameters with a hook: not all parameters are in every backward pass, but a hook on each costs time."""


class LoopChecks:
    """Detects batches that would not count, and batches that would count again, mostly by hooks on the parameters.

    *Batches of another model* have no gradient for the optimizer's parameters, and would count as zeros.

    *Held batches:* when it accumulates gradients itself, the wrapper of ``accelerator.prepare``, and so
    ``transformers.Trainer``, calls ``step()`` only once for several backward passes. The samples of the earlier ones
    would not count.

    *A forgotten* ``zero_grad()``: a backward pass adds to gradients that have counted, so they would count again. torch
    counts the writes to a tensor. So for the gradient of the smallest parameter, this class knows whether only backward
    passes have written to it. torch does not count ``grad.data.zero_()``, so the values are checked for zeros, too.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._held: set[int] = set()  # watched parameters whose gradient accelerate has kept from step() so far
        self._has_lost = False
        self._smallest = min(parameters, key=torch.Tensor.numel)
        # the smallest parameter's gradient that has counted; None once more than backward passes have written to it
        self._counted: torch.Tensor | None = None
        self._num_writes = 0  # to that gradient, as far as they are known
        self._was_added_to = self._was_zero = self._is_told = False
        self._handles = [
            self._smallest.register_hook(self._before),  # type: ignore[no-untyped-call]
            self._smallest.register_post_accumulate_grad_hook(self._after),  # type: ignore[no-untyped-call]
        ]
        for index, parameter in enumerate(parameters[:: -max(1, len(parameters) // NUM_WATCHED)]):
            note = functools.partial(self._note_held, index)
            self._handles.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]

    def _note_held(self, index: int, _: torch.Tensor) -> None:
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is not None:
            self._has_lost |= index in self._held  # there was no step() since an earlier backward pass was held
            if not accelerate.GradientState().sync_gradients:
                self._held.add(index)

    def check_held(self) -> None:
        """Raise ``ConfigError``, with what to write instead, if accelerate has held batches since the last call."""
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

    def check_has_gradient(self) -> None:
        """Raise ``ConfigError``, which says how that may happen, if no parameter has a gradient."""
        if all(parameter.grad is None for parameter in self._parameters):
            raise ConfigError(
                "none of the optimizer's parameters has a gradient, so this batch would count as zeros and shrink the "
                "gradients of the others; it was not counted. Call loss.backward(), then step(), then zero_grad(): a "
                "zero_grad() between backward() and step() removes the gradient. If the loop has this order, the model "
                "has other parameters than the optimizer was given: load_state_dict(assign=True), or a layer that was "
                "replaced, puts new ones into it. Make the optimizer after that"
            )

    def _is_unwritten(self, num_more: int) -> bool:
        """Whether the counted gradient is still there, with exactly ``num_more`` writes since the known ones."""
        grad = self._counted
        return grad is not None and self._smallest.grad is grad and num_writes(grad) == self._num_writes + num_more

    def _before(self, _: torch.Tensor) -> None:
        if self._counted is not None and self._is_unwritten(0):
            self._was_zero |= not self._counted.any()

    def _after(self, _: torch.Tensor) -> None:
        # FSDP2 adds to the shard, which is not a write to the DTensor
        num_more = 0 if is_sharded(self._smallest) else 1
        if self._is_unwritten(num_more):
            self._num_writes, self._was_added_to = self._num_writes + num_more, True
        else:
            self._counted = None

    def check_kept(self) -> None:
        """Warn once if a backward pass has added to gradients that had counted."""
        if self._was_added_to and self._counted is not None and self._smallest.grad is self._counted:
            if not self._was_zero:
                logger.warning(
                    "The gradients of earlier batches are still in .grad, so they count again with each batch, and the "
                    "model gets worse. Write after each optimizer.step()\n    optimizer.zero_grad()"
                )
            self._is_told = True

    def note_counted(self) -> None:
        """Take in that the present gradients have counted, so that the next batch must not be added to them."""
        grad = self._smallest.grad
        is_watched = grad is not None and grad.layout is torch.strided and not grad.is_inference()
        self._counted = grad if is_watched and not self._is_told else None
        self._num_writes = num_writes(self._counted) if self._counted is not None else 0
        self._was_added_to = self._was_zero = False

    def close(self) -> None:
        """Remove the hooks."""
        self._counted, self._is_told = None, True
        for handle in self._handles:
            handle.remove()


def models_of(parameters: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """The models in this process that have some of these parameters.

    A parameter does not know its module. So this function goes through all objects of the process, which takes a
    fraction of a second.
    """
    trained = set(map(id, parameters))
    modules = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.nn.Module) and "_modules" in vars(one)  # a constructor may have failed
    ]
    inner = {id(child) for module in modules for child in module.children()}
    outer = [module for module in modules if id(module) not in inner]
    return [model for model in outer if any(id(parameter) in trained for parameter in model.parameters())]


def warn_of_running_statistics(models: Iterable[torch.nn.Module]) -> None:
    """Warn if one of these models has BatchNorm layers, as their running mean and variance are not shared.

    There is no warning for layers that are frozen, which means in eval mode while the model is in train mode.
    """
    for model in models:
        layers = [one for one in model.modules() if isinstance(one, _BatchNorm) and one.running_mean is not None]
        are_frozen = model.training and not any(layer.training for layer in layers)
        if layers and not are_frozen:
            logger.warning(
                "The model has BatchNorm layers, whose running mean and variance are not shared: each peer has those "
                "of its own batches, and a newcomer begins with new ones. Write on all peers\n"
                "    manyhands.Optimizer(..., buffers=model.named_buffers())"
            )
            return
