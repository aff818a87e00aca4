"""Compiled kernels of the int8 codec, for whole rows; bit-identical to torch, in one call instead of fifteen.

Each kernel stops at the first row that it leaves to torch: one with values that are not finite, or so large or so
small that they need more care. Floats are compared as integers that have the same order, in which NaN lies beyond both
infinities: the compiler may compare sixteen integers at once, but not sixteen floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.averaging.codecs.int8 import (
    HEADER_BYTES,
    HUGE_BIAS,
    HUGE_SCALE,
    KERNEL_EPSILON,
    LEVELS,
    ROW_NUMEL,
    SMALL_SCALE,
    UNUSED_SCALE_BITS,
)
from manyhands.averaging.codecs.kernels.compiling import (
    AVERAGE,
    DECODE_BESIDE,
    Bytes,
    Floats,
    add_in_any_order,
    after_writes_past_cache,
    compiled,
    part,
    write_past_cache,
)

INLINED = "32aceb73819d"
"""Digest of the other files whose code is compiled into these kernels: Numba's cache looks at this file only."""
ROW_BYTES = ROW_NUMEL + HEADER_BYTES
HIGHEST_FINITE = np.int32(0x7F7FFFFF)
LOWEST_FINITE = np.int32(-0x7F800000)
ALL_BUT_SIGN = np.int32(0x7FFFFFFF)
EPSILON = np.float32(KERNEL_EPSILON)
STEP = np.float32(KERNEL_EPSILON / LEVELS)
LEAST_SCALE = np.float32(SMALL_SCALE)
SCALE_LIMIT = np.float32(HUGE_SCALE)
BIAS_LIMIT = np.float32(HUGE_BIAS)
USED_SCALE_BITS = np.int32(~UNUSED_SCALE_BITS)
ROWS_KEPT_AT_ONCE = 16
"""Rows of own values that are copied at once: so nearly all writes are whole cache lines; one row has 13.5 of them."""


@part()
def _quantize_row(values: Floats, bits: Any, row: int, packed: Bytes, headers: Floats) -> bool:
    """Encode one row; returns False if the row is left to torch."""
    start, place = row * ROW_NUMEL, row * ROW_BYTES
    header = (place + ROW_NUMEL) // 4
    lowest, highest = HIGHEST_FINITE, LOWEST_FINITE
    for i in range(ROW_NUMEL):
        key = np.int32(bits[start + i] ^ ((bits[start + i] >> 31) & ALL_BUT_SIGN))
        lowest = min(lowest, key)
        highest = max(highest, key)
    if highest > HIGHEST_FINITE or lowest < LOWEST_FINITE:
        return False
    bias = np.int32(lowest ^ ((lowest >> 31) & ALL_BUT_SIGN)).view(np.float32)
    largest = np.int32(highest ^ ((highest >> 31) & ALL_BUT_SIGN)).view(np.float32)
    span = largest - bias
    scale = span / np.float32(LEVELS)
    if not scale < SCALE_LIMIT or (0 < scale < LEAST_SCALE):
        return False
    factor = np.float32(LEVELS) / (span + EPSILON)
    for i in range(ROW_NUMEL):
        packed[place + i] = np.uint8(np.int32(np.rint((values[start + i] - bias) * factor)))
    scale_bits = np.float32(scale + STEP).view(np.int32) & USED_SCALE_BITS
    headers[header] = np.int32(scale_bits).view(np.float32)
    headers[header + 1] = bias
    return True


@part()
def _is_ordinary(scale: np.float32, bias: np.float32) -> bool:
    """Whether an encoder can have written these, and no product or sum with them can overflow."""
    is_right = np.float32(scale).view(np.int32) & ~USED_SCALE_BITS == 0 and scale >= 0
    return bool(is_right and scale < SCALE_LIMIT and abs(bias) < BIAS_LIMIT)


@compiled("int64(float32[::1], uint8[::1])")
def encode(values: Floats, packed: Bytes) -> int:
    """Encode whole rows; returns how many were encoded."""
    bits, headers = values.view(np.int32), packed.view(np.float32)
    num_rows = values.size // ROW_NUMEL
    for row in range(num_rows):
        if not _quantize_row(values, bits, row, packed, headers):
            return row
    return num_rows


@compiled("int64(float32[::1], uint8[::1])")
def decode(values: Floats, packed: Bytes) -> int:
    """Decode whole rows; returns how many were decoded."""
    headers, decoded = packed.view(np.float32), np.empty(ROW_NUMEL, np.float32)
    num_rows = values.size // ROW_NUMEL
    num_done = num_rows
    for row in range(num_rows):
        place = row * ROW_BYTES
        header = (place + ROW_NUMEL) // 4
        scale, bias = headers[header], headers[header + 1]
        if not _is_ordinary(scale, bias):
            num_done = row
            break
        for i in range(ROW_NUMEL):
            decoded[i] = np.float32(packed[place + i]) * scale + bias
        write_past_cache(values, row * ROW_NUMEL, decoded, 0, ROW_NUMEL)
    after_writes_past_cache()
    return num_done


@compiled(DECODE_BESIDE)
def decode_beside(values: Floats, packed: Bytes, own: Floats, sums: Any) -> int:
    """Decode whole rows; returns how many were decoded.

    The arguments are those of :meth:`manyhands.averaging.codecs.codec.Codec.decode_beside`. The own values may lie in
    the memory of ``values``; rows that were not decoded still hold them.
    """
    headers, decoded = packed.view(np.float32), np.empty(ROW_NUMEL, np.float32)
    num_rows = values.size // ROW_NUMEL
    num_done = num_rows
    for row in range(num_rows):
        start, place = row * ROW_NUMEL, row * ROW_BYTES
        header = (place + ROW_NUMEL) // 4
        scale, bias = headers[header], headers[header + 1]
        if not _is_ordinary(scale, bias):
            num_done = row
            break
        for i in range(ROW_NUMEL):
            decoded[i] = np.float32(packed[place + i]) * scale + bias
        product, square, own_square = np.float32(0), np.float32(0), np.float32(0)
        for i in range(ROW_NUMEL):
            product = add_in_any_order(product, decoded[i] * own[start + i])
            square = add_in_any_order(square, decoded[i] * decoded[i])
            own_square = add_in_any_order(own_square, own[start + i] * own[start + i])
        if not np.isfinite(square + own_square):
            num_done = row
            break
        sums[0] += product
        sums[1] += square
        sums[2] += own_square
        write_past_cache(values, start, decoded, 0, ROW_NUMEL)
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
    """Weigh and add up whole rows, quantize the sums, and decode them; returns how many rows were averaged.

    The arguments are those of :meth:`manyhands.averaging.codecs.codec.Codec.average`. All steps for a row follow each
    other, while the row is in the processor's cache. If the own values lie in the memory of ``mean``, rows that were
    not averaged still hold them.
    """
    bits, headers, room_headers = mean.view(np.int32), packed.view(np.float32), rooms.view(np.float32)
    mine, values, added = np.empty(ROW_NUMEL, np.float32), np.empty(ROW_NUMEL, np.float32), np.empty(which.size)
    num_rows = mean.size // ROW_NUMEL
    num_done = num_rows
    for row in range(num_rows):
        start, place = row * ROW_NUMEL, row * ROW_BYTES
        header = (place + ROW_NUMEL) // 4
        is_ordinary = True
        if kept.size and row % ROWS_KEPT_AT_ONCE == 0:
            write_past_cache(kept, start, own, start, min(ROWS_KEPT_AT_ONCE, num_rows - row) * ROW_NUMEL)
        for i in range(ROW_NUMEL):
            mine[i] = own[start + i]
        for number in range(which.size):
            room, weight, square = which[number], weights[number], np.float32(0)
            if room < 0:
                for i in range(ROW_NUMEL):
                    values[i] = mine[i]
            else:
                scale, bias = room_headers[room, header], room_headers[room, header + 1]
                is_ordinary &= _is_ordinary(scale, bias)
                for i in range(ROW_NUMEL):
                    values[i] = np.float32(rooms[room, place + i]) * scale + bias
            for i in range(ROW_NUMEL):
                square = add_in_any_order(square, values[i] * values[i])
            added[number] = square
            is_ordinary &= np.isfinite(square)
            if number:
                for i in range(ROW_NUMEL):
                    mean[start + i] += values[i] * weight
            else:
                for i in range(ROW_NUMEL):
                    mean[start + i] = values[i] * weight
        if not is_ordinary or not _quantize_row(mean, bits, row, packed, headers):
            for i in range(ROW_NUMEL):
                mean[start + i] = mine[i]
            num_done = row
            break
        scale, bias = headers[header], headers[header + 1]
        for i in range(ROW_NUMEL):
            mean[start + i] = np.float32(packed[place + i]) * scale + bias
        for number in range(which.size):
            room, product = which[number], np.float32(0)
            if room < 0:
                for i in range(ROW_NUMEL):
                    product = add_in_any_order(product, mine[i] * mean[start + i])
            else:
                scale, bias = room_headers[room, header], room_headers[room, header + 1]
                for i in range(ROW_NUMEL):
                    value = np.float32(rooms[room, place + i]) * scale + bias
                    product = add_in_any_order(product, value * mean[start + i])
            sums[number, 0] += added[number]
            sums[number, 1] += product
    after_writes_past_cache()
    return num_done
