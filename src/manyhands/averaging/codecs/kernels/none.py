"""Compiled kernels for unencoded values: all that an all-reduce computes of them, in one pass over the memory.

Each kernel stops at the first row that it leaves to torch: one with values that are not finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.averaging.codecs.kernels.compiling import (
    AVERAGE,
    DECODE_BESIDE,
    Bytes,
    Floats,
    add_in_any_order,
    after_writes_past_cache,
    compiled,
    write_past_cache,
)

INLINED = "32aceb73819d"
"""Digest of the other files whose code is compiled into these kernels; see ``INLINED`` of int8."""
ROW_NUMEL = 1056
"""Values that are averaged at a time: rows of a few members fit into the processor's first cache. A piece of means, as
it is received (``PIECE_NUMEL``), has 62 rows."""


@compiled(DECODE_BESIDE)
def decode_beside(values: Floats, packed: Bytes, own: Floats, sums: Any) -> int:
    """Copy values; returns how many were copied.

    The arguments are those of :meth:`manyhands.averaging.codecs.codec.Codec.decode_beside`. The own values may lie in
    the memory of ``values``; those that were not overwritten are still there.
    """
    received = packed.view(np.float32)
    num_rows = values.size // ROW_NUMEL
    num_done = num_rows * ROW_NUMEL
    for row in range(num_rows):
        start = row * ROW_NUMEL
        product, square, own_square = np.float32(0), np.float32(0), np.float32(0)
        for i in range(ROW_NUMEL):
            value, mine = received[start + i], own[start + i]
            product = add_in_any_order(product, value * mine)
            square = add_in_any_order(square, value * value)
            own_square = add_in_any_order(own_square, mine * mine)
        if not np.isfinite(square + own_square):
            num_done = start
            break
        sums[0] += product
        sums[1] += square
        sums[2] += own_square
        write_past_cache(values, start, received, start, ROW_NUMEL)
    after_writes_past_cache()
    return num_done


@compiled(AVERAGE)
def average(
    mean: Floats,
    packed: Bytes,
    own: Floats,
    kept: Floats,
    rooms: Bytes,
    which: Any,
    weights: Floats,
    sums: Any,
) -> int:
    """Weigh and add up the contributions; returns how many values were averaged.

    The arguments are those of :meth:`manyhands.averaging.codecs.codec.Codec.average`; ``packed`` is the memory of
    ``mean``. If the own values lie there too, those that were not averaged are still there.
    """
    received = rooms.view(np.float32)
    values, total = np.empty(ROW_NUMEL, np.float32), np.empty(ROW_NUMEL, np.float32)
    added = np.empty(which.size)
    num_rows = mean.size // ROW_NUMEL
    num_done = num_rows * ROW_NUMEL
    for row in range(num_rows):
        start = row * ROW_NUMEL
        is_finite = True
        for number in range(which.size):
            room, weight, square = which[number], weights[number], np.float32(0)
            if room < 0:
                for i in range(ROW_NUMEL):
                    values[i] = own[start + i]
            else:
                for i in range(ROW_NUMEL):
                    values[i] = received[room, start + i]
            for i in range(ROW_NUMEL):
                square = add_in_any_order(square, values[i] * values[i])
            if number:
                for i in range(ROW_NUMEL):
                    total[i] += values[i] * weight
            else:
                for i in range(ROW_NUMEL):
                    total[i] = values[i] * weight
            is_finite &= np.isfinite(square)
            added[number] = square
        if not is_finite:
            num_done = start
            break
        for number in range(which.size):
            room, product = which[number], np.float32(0)
            if room < 0:
                for i in range(ROW_NUMEL):
                    product = add_in_any_order(product, own[start + i] * total[i])
            else:
                for i in range(ROW_NUMEL):
                    product = add_in_any_order(product, received[room, start + i] * total[i])
            sums[number, 0] += added[number]
            sums[number, 1] += product
        if kept.size:
            write_past_cache(kept, start, own, start, ROW_NUMEL)
        for i in range(ROW_NUMEL):
            mean[start + i] = total[i]
    after_writes_past_cache()
    return num_done
