"""Kernels of the codecs, compiled by Numba; without Numba torch does the same work, more slowly.

:func:`prepare` compiles or loads the kernels before they are needed. Compiling takes some seconds, once for an
installation. Loading takes 0.9 s of CPU in each process, nearly all of it for Numba itself: 0.3 s to import it, 0.5 s
in which it registers its NumPy functions.

Kernels give the same bits as torch, so peers with and without them can average together.
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

MIN_NUMEL = 1 << 22
"""With fewer values the kernels save at most 7 to 15 ms of CPU in a round, and Numba would cost each process a second
at its start and 90 MB for good (docs/adr/0050)."""

CODECS = ("int8", "fp16", "none")

loaded: dict[str, ModuleType | None] = {}
"""The kernels of this process, by codec; None for a codec whose kernels cannot be compiled here. Empty until
some are needed."""


def prepare(numel: int, codec: str) -> None:
    """Compile or load the kernels for vectors of ``numel`` values, if they will be used. Any thread may call it.

    Args:
        codec: the setting. For a codec without kernels Numba is not imported, which saves about 40 MB.
    """
    if loaded or numel < MIN_NUMEL or codec not in (*CODECS, AUTO):
        return
    began = time.monotonic()
    loaded.update({codec: load(codec) for codec in CODECS})
    seconds = time.monotonic() - began
    level = logging.INFO if seconds > LOG_S else logging.DEBUG  # a user has wondered what takes so long
    logger.log(level, "Compiled or loaded the kernels of the codecs in %.1f s; they are compiled only once", seconds)


def load(codec: str) -> ModuleType | None:
    """Compile or load the kernels of one codec; None if torch has to do their work."""
    try:
        return importlib.import_module(f"{__name__}.{codec}")
    except ImportError as error:
        logger.debug("no compiled kernels, so torch does their work: %s", error)
    except Exception as error:  # noqa: BLE001 (whatever fails in the compiler, torch can do the work)
        logger.warning("The kernels of %s cannot be compiled here, so torch does their work: %s", codec, error)
    return None


def kernel(codec: str, name: str, values_N: torch.Tensor, encoded: torch.Tensor) -> Callable[..., Any] | None:
    """A codec's kernel for these values. None if there is none, or they are not aligned float32 on the CPU."""
    module = loaded.get(codec)
    if module is None or values_N.dtype != torch.float32:
        return None
    tensors = (values_N, encoded)
    if not all(one.device.type == "cpu" and one.is_contiguous() and one.data_ptr() % 4 == 0 for one in tensors):
        return None
    found: Callable[..., Any] | None = getattr(module, name, None)
    return found
