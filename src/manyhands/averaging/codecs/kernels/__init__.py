"""Kernels of the codecs that Numba compiles, where there is a Numba; torch does the same without, more slowly.

:func:`prepare` compiles or loads them before they are needed: some seconds once for an installation, then 0.9 s of
CPU, nearly all of which Numba takes for itself: 0.3 s to be imported, 0.5 s to register what it knows of NumPy.
They write the same bits as torch does, so it does not matter which peers have them, nor from when on.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from manyhands.averaging.config import AUTO
from manyhands.averaging.timing import LOG_S

logger = logging.getLogger(__name__)

MIN_NUMEL = 1 << 14
"""Fewer values are not worth preparing for."""

CODECS = ("int8", "fp16")

_modules: dict[str, ModuleType | None] = {}


def prepare(numel: int, codec: str) -> None:
    """Compile or load the kernels for vectors of ``numel`` values, unless there is nothing to gain; in any thread.

    Args:
        codec: the one that is wanted; one without kernels does without the compiler, which takes about 40 MB.
    """
    if _modules or numel < MIN_NUMEL or codec not in (*CODECS, AUTO):
        return
    began = time.monotonic()
    loaded = {codec: _load(codec) for codec in CODECS}
    seconds = time.monotonic() - began
    level = logging.INFO if seconds > LOG_S else logging.DEBUG  # a person has wondered why
    logger.log(level, "compiled or loaded the kernels of the codecs in %.1f s; they are compiled only once", seconds)
    _modules.update(loaded)


def _load(codec: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"{__name__}.{codec}")
    except ImportError as error:
        logger.debug("torch does without compiled kernels: %s", error)
    except Exception as error:  # noqa: BLE001 (whatever a compiler has against this machine, torch can do the work)
        logger.warning("the kernels of %s cannot be compiled here, so torch does their work: %s", codec, error)
    return None


def kernel(codec: str, name: str, values_N: torch.Tensor, encoded: torch.Tensor) -> Callable[..., Any] | None:
    """A kernel for these values, if there is one: they are float32, on the CPU, and at addresses for it."""
    loaded = _modules.get(codec)
    if loaded is None or values_N.dtype != torch.float32:
        return None
    tensors = (values_N, encoded)
    if not all(one.device.type == "cpu" and one.is_contiguous() and one.data_ptr() % 4 == 0 for one in tensors):
        return None
    found: Callable[..., Any] = getattr(loaded, name)
    return found
