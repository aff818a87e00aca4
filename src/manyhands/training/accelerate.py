"""Counts samples exactly in a loop with ``accelerate``, however batches are split."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from manyhands.base.errors import MissingExtra

try:
    from accelerate.utils import find_batch_size
except ModuleNotFoundError as error:
    if str(error.name).split(".")[0] not in ("torch", "accelerate"):
        raise
    raise MissingExtra("manyhands.training.accelerate", "albert") from error

from manyhands.optim.wrapper import OptimizerWrapper, check_accumulation

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

T = TypeVar("T")


def counted(loader: Iterable[T], optimizer: Any, accelerator: Accelerator) -> Iterator[T]:
    """Yield the batches of a loader, and tell the optimizer how many samples each of them has.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in counted(loader, optimizer, accelerator):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))  # a mean over the samples of the batch
                optimizer.step()
                optimizer.zero_grad()

    ``gradient_accumulation_steps`` of the accelerator is set to 1: the optimizer accumulates by itself, until all peers
    together have ``target_batch_size`` samples.

    Args:
        loader: returned by ``accelerator.prepare``.
        optimizer: a :class:`manyhands.Optimizer` or :class:`manyhands.ProcessGroupOptimizer`, prepared or not.
    Raises:
        ConfigError: the accelerator accumulates, and the optimizer makes local steps.
    """
    inner: OptimizerWrapper = optimizer if isinstance(optimizer, OptimizerWrapper) else optimizer.optimizer
    check_accumulation(accelerator.gradient_accumulation_steps, makes_local_steps=inner.makes_local_steps)
    if accelerator.gradient_accumulation_steps != 1:
        logger.info(
            "gradient_accumulation_steps=%d is set to 1: the optimizer accumulates by itself, until all peers together "
            "have target_batch_size samples", accelerator.gradient_accumulation_steps,
        )  # fmt: skip
        accelerator.gradient_accumulation_steps = 1
    for batch in loader:
        inner.next_batch(find_batch_size(batch))
        yield batch
