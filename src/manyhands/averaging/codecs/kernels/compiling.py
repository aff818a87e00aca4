"""Compiles the kernels with Numba, and lets them write to memory past the processor's cache.

Sources: Lam et al., Numba: a LLVM-based Python JIT compiler, LLVM-HPC 2015; LLVM Language Reference, "store" and its
``!nontemporal`` metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

AVERAGE = (
    "int64(float32[::1], uint8[::1], float32[::1], float32[::1], uint8[:, ::1], int64[::1], float32[::1], "
    "float64[:, ::1])"
)
"""Numba signature of the kernels that average."""
DECODE_BESIDE = "int64(float32[::1], uint8[::1], float32[::1], float64[::1])"
"""Numba signature of the kernels that decode and compare."""

LANES = 8
"""Number of float32 in one write past the cache; rows that are written in that way have a multiple of it."""
LANES_BYTES = 32


def compiled(signature: str) -> Callable[[Function], Function]:
    """Compile a kernel now, or load what an earlier process compiled. The kernel runs without the GIL."""
    jit = numba.njit(signature, cache=True, nogil=True, error_model="numpy", boundscheck=False)
    return cast("Callable[[Function], Function]", jit)


def part() -> Callable[[Function], Function]:
    """Inline a function into the kernels that call it.

    Numba then sees that the row numbers count from 0 up. Otherwise it allows for negative indices, and the processor
    works on one value at a time instead of sixteen.
    """
    return cast("Callable[[Function], Function]", numba.njit(inline="always"))


def _moving(_typing: Any, _target: Any, _source: Any) -> Any:
    """Move ``LANES`` floats from one address to another, the latter a multiple of ``LANES_BYTES``."""

    def generate(context: Any, builder: Any, _signature: Any, addresses: Any) -> Any:
        lanes = ir.VectorType(ir.FloatType(), LANES).as_pointer()
        target, source = (builder.inttoptr(address, lanes) for address in addresses)
        store = builder.store(builder.load(source, align=4), target, align=LANES_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


def _fence(_typing: Any) -> Any:
    """Complete all writes past the cache, which the processor may hold back, before another thread is told of them."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _adding(_typing: Any, total: Any, _value: Any) -> Any:
    """Add to a sum in any order, so that the processor may add many values at once; its last bits may vary."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments, flags=("reassoc",))

    return total(total, total), generate


_move_past_cache: Any = intrinsic(_moving)
after_writes_past_cache: Any = intrinsic(_fence)
add_in_any_order: Any = intrinsic(_adding)


@part()
def write_past_cache(values: Floats, start: int, source: Floats, source_start: int, numel: int) -> None:
    """Copy ``numel`` values, which are not read again soon, to ``values[start:]``, past the processor's cache.

    So the processor neither reads the former content of the target, nor drops other data from its cache. ``numel`` is
    a multiple of ``LANES``; source and target must not overlap. After the last write, call
    :func:`after_writes_past_cache`.
    """
    target, begin = values.ctypes.data + 4 * start, source.ctypes.data + 4 * source_start
    if target % LANES_BYTES == 0:
        for at in range(0, 4 * numel, LANES_BYTES):
            _move_past_cache(target + at, begin + at)
    else:
        for i in range(numel):
            values[start + i] = source[source_start + i]
