"""Device and precision in which a peer of the ALBERT recipe computes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from manyhands.base.errors import ConfigError
from manyhands.base.text import counted
from manyhands.recipes.albert.packages import torch, transformers
from manyhands.recipes.albert.settings import Precision, check_device
from manyhands.recipes.albert.trial import OutOfMemory

logger = logging.getLogger(__name__)

_BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability from which NVIDIA's GPUs have units for bfloat16 (Ampere). Older ones emulate it slowly."""
_FLOAT16_CAPABILITY = (7, 0)
"""Compute capability from which NVIDIA's GPUs have units for float16 (Volta)."""

SMALLER_BATCH = (
    "give a smaller --batch-size, with --gradient-accumulation-steps if it gets very small, or --precision float16"
)
SMALLER = "free some of it, or compute elsewhere, for example with --device cpu"


class Compute:
    """A device and a precision that it can compute in.

    Parameters, gradients and everything that peers exchange are float32 in any case, so peers with different devices
    and precisions train together.

    Args:
        device: in torch's notation, or ``auto`` for an NVIDIA GPU if there is one, else the CPU.
        precision: of the products; ``auto`` for the half precision that the GPU has units for, else float32.
    Attributes:
        scaler: scales the loss in float16, so that small gradients are not lost. It does nothing in other precisions.
    Raises:
        ConfigError: the device cannot be used here.
    """

    def __init__(self, device: str, precision: Precision) -> None:
        self.device = _device_named(device)
        self._dtype = dtype_for(self.device, precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self._dtype == torch.float16)

    def log_choice(self) -> None:
        """Log the device and the precision, with a warning if they do not suit each other."""
        logger.info("Computing on %s", self)
        if self.device.type == "cpu" and self._dtype == torch.float16:
            logger.warning("On a CPU float16 is many times slower than float32: leave out --precision (--fp16)")

    def on_device(self, model: transformers.AlbertForPreTraining) -> transformers.AlbertForPreTraining:
        """Move the model to the device.

        Raises:
            OutOfMemory: it does not fit.
        """
        with self.fitting("the model", SMALLER):
            model.to(self.device)  # type: ignore[arg-type]
        return model

    @contextmanager
    def fitting(self, what: str, advice: str) -> Iterator[None]:
        """Within the block, turn torch's out-of-memory error into one with advice.

        Raises:
            OutOfMemory: the device ran out of memory.
        """
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            raise OutOfMemory(f"{what} does not fit into the memory of {self}; {advice}") from error

    def num_idle_gpus(self) -> int:
        """Number of GPUs that this process does not use; 0 if it computes on the CPU."""
        return torch.cuda.device_count() - 1 if self.device.type == "cuda" else 0

    def autocast(self) -> AbstractContextManager[None]:
        """Context in which products are computed in the precision."""
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype)

    def hardware(self) -> str:
        """The name of the device, as people read it: ``NVIDIA L4``, ``CPU, 8 threads``."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"CPU, {counted(torch.get_num_threads(), 'thread')}" if self.device.type == "cpu" else str(self.device)

    def __str__(self) -> str:
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        return f"{self.device}{name} in {str(self._dtype).removeprefix('torch.')}"


def _device_named(name: str) -> torch.device:
    own_gpu = f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"  # one per torchrun rank
    if name != "auto":
        return _checked(own_gpu if name == "cuda" else name)
    if torch.cuda.is_available():
        try:
            return _checked(own_gpu)
        except ConfigError as error:  # for example full, or too old for this torch
            logger.warning("Computing on the CPU, since the GPU cannot be used: %s", error)
    return torch.device("cpu")


def _checked(name: str) -> torch.device:
    check_device(name)
    try:
        device = torch.device(name)
        torch.ones(1, device=device).add_(1).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # depends on how torch was built
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"device {name!r} cannot be used here: {reason}; for example cpu") from error
    return device


def dtype_for(device: torch.device, precision: Precision) -> torch.dtype:
    """Return the dtype in which a device computes; ``auto`` takes half precision where a GPU has units for it."""
    if precision != "auto":
        dtype: torch.dtype = getattr(torch, precision)
        return dtype
    if device.type != "cuda" or torch.version.hip is not None:
        return torch.float32
    capability = torch.cuda.get_device_capability(device)
    if capability >= _BFLOAT16_CAPABILITY:
        return torch.bfloat16
    return torch.float16 if capability >= _FLOAT16_CAPABILITY else torch.float32
