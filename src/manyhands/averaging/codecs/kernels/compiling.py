"""How the kernels are compiled.

Source: Lam et al., Numba: a LLVM-based Python JIT compiler, LLVM-HPC 2015.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Function = TypeVar("Function", bound=Callable[..., Any])
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def compiled(signature: str) -> Callable[[Function], Function]:
    """Compile at once, or take what an earlier process compiled. It runs without Python's lock."""
    jit = numba.njit(signature, cache=True, nogil=True, error_model="numpy", boundscheck=False)
    return cast("Callable[[Function], Function]", jit)


def part() -> Callable[[Function], Function]:
    """For what is a part of the functions that call it.

    Numba must see there that rows count from 0 up: else it allows for negative indices, and the processor gets one
    value at a time instead of sixteen.
    """
    return cast("Callable[[Function], Function]", numba.njit(inline="always"))
