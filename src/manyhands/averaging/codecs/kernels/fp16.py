"""Compiled kernels of the fp16 codec, for whole pieces; the results are bit-identical to those of torch.

Each kernel stops at the first piece that it leaves to torch: one with values that are not finite, or that may overflow
in a multiplication.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import config, types
from numba.extending import intrinsic

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
"""Digest of the other files whose code is compiled into these kernels; see ``INLINED`` of int8."""
PIECE_NUMEL = 1 << 16
SCALE_BYTES = 4
PIECE_BYTES = SCALE_BYTES + 2 * PIECE_NUMEL
ROW_NUMEL = 256
"""Values that are decoded at a time; a piece has a multiple of them."""
ALL_BUT_SIGN = np.int32(0x7FFFFFFF)
HIGHEST_FINITE = np.int32(0x7F7FFFFF)
HIGHEST_EXPONENT = 111
"""The largest exponent of a scale with which no product can overflow."""
HALF_INFINITY = np.uint16(0x7C00)
HALF_BUT_SIGN = np.uint16(0x7FFF)


def _has_float16() -> bool:
    """Whether the processor that Numba compiles for has float16 instructions; without them the process would end."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    is_host = getattr(config, "CPU_NAME", None) is None and getattr(config, "CPU_FEATURES", None) is None
    return is_host and bool(binding.get_host_cpu_features().get("f16c"))


if not _has_float16():
    raise ImportError("this processor has no instructions for float16")


def _narrow(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 rounded to float16, to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


def _widen(typing_context: Any, bits: Any) -> Any:
    """The float32 with the value of a float16 that has these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


_to_half: Any = intrinsic(_narrow)
_from_half: Any = intrinsic(_widen)


@part()
def _write_piece(values: Floats, bits: Any, piece: int, halves: Any, scales: Floats) -> bool:
    """Encode one piece; returns False if the piece is left to torch."""
    start, scale_at = piece * PIECE_NUMEL, piece * (PIECE_BYTES // 4)
    place = 2 * scale_at + SCALE_BYTES // 2
    largest = np.int32(0)
    for i in range(PIECE_NUMEL):
        magnitude = np.int32(bits[start + i] & ALL_BUT_SIGN)
        largest = max(largest, magnitude)
    if largest > HIGHEST_FINITE:
        return False
    exponent = max((largest >> 23) - 141, -126) if largest > 0 else 0
    if exponent > HIGHEST_EXPONENT:
        return False
    scales[scale_at] = np.int32((exponent + 127) << 23).view(np.float32)
    factor = np.int32((127 - exponent) << 23).view(np.float32)
    for i in range(PIECE_NUMEL):
        halves[place + i] = _to_half(values[start + i] * factor)
    return True


@part()
def _is_ordinary(scale: np.float32, halves: Any, place: int) -> bool:
    """Whether an encoder can have written a piece, and no product with its scale can overflow."""
    bits = np.float32(scale).view(np.int32)
    exponent = (bits >> 23) - 127
    if bits & np.int32(0x7FFFFF) or not -126 <= exponent <= HIGHEST_EXPONENT:
        return False
    largest = np.uint16(0)
    for i in range(PIECE_NUMEL):
        magnitude = np.uint16(halves[place + i] & HALF_BUT_SIGN)
        largest = max(largest, magnitude)
    return bool(largest < HALF_INFINITY)


@compiled("int64(float32[::1], uint8[::1])")
def encode(values: Floats, encoded: Bytes) -> int:
    """Encode whole pieces; returns how many were encoded."""
    bits, halves, scales = values.view(np.int32), encoded.view(np.uint16), encoded.view(np.float32)
    num_pieces = values.size // PIECE_NUMEL
    for piece in range(num_pieces):
        if not _write_piece(values, bits, piece, halves, scales):
            return piece
    return num_pieces


@compiled("int64(float32[::1], uint8[::1])")
def decode(values: Floats, encoded: Bytes) -> int:
    """Decode whole pieces; returns how many were decoded."""
    halves, scales = encoded.view(np.uint16), encoded.view(np.float32)
    decoded = np.empty(ROW_NUMEL, np.float32)
    num_pieces = values.size // PIECE_NUMEL
    num_done = num_pieces
    for piece in range(num_pieces):
        start, scale_at = piece * PIECE_NUMEL, piece * (PIECE_BYTES // 4)
        scale, place = scales[scale_at], 2 * scale_at + SCALE_BYTES // 2
        if not _is_ordinary(scale, halves, place):
            num_done = piece
            break
        for row in range(PIECE_NUMEL // ROW_NUMEL):
            for i in range(ROW_NUMEL):
                decoded[i] = _from_half(halves[place + row * ROW_NUMEL + i]) * scale
            write_past_cache(values, start + row * ROW_NUMEL, decoded, 0, ROW_NUMEL)
    after_writes_past_cache()
    return num_done


@compiled(DECODE_BESIDE)
def decode_beside(values: Floats, encoded: Bytes, own: Floats, sums: Any) -> int:
    """Decode whole pieces; returns how many were decoded. See the kernel of this name for int8."""
    halves, scales = encoded.view(np.uint16), encoded.view(np.float32)
    decoded = np.empty(ROW_NUMEL, np.float32)
    num_pieces = values.size // PIECE_NUMEL
    num_done = num_pieces
    for piece in range(num_pieces):
        scale_at = piece * (PIECE_BYTES // 4)
        scale, place = scales[scale_at], 2 * scale_at + SCALE_BYTES // 2
        if not _is_ordinary(scale, halves, place):
            num_done = piece
            break
        for row in range(PIECE_NUMEL // ROW_NUMEL):
            start = piece * PIECE_NUMEL + row * ROW_NUMEL
            for i in range(ROW_NUMEL):
                decoded[i] = _from_half(halves[place + row * ROW_NUMEL + i]) * scale
            product, square, own_square = 0.0, 0.0, 0.0
            for i in range(ROW_NUMEL):
                product = add_in_any_order(product, np.float64(decoded[i]) * own[start + i])
                square = add_in_any_order(square, np.float64(decoded[i]) * decoded[i])
                own_square = add_in_any_order(own_square, np.float64(own[start + i]) * own[start + i])
            sums[0] += product
            sums[1] += square
            sums[2] += own_square
            write_past_cache(values, start, decoded, 0, ROW_NUMEL)
    after_writes_past_cache()
    return num_done


@compiled(AVERAGE)
def average(
    mean: Floats,
    encoded: Bytes,
    own: Floats,
    kept: Floats,
    rooms: Bytes,
    which: Any,
    weights: Floats,
    sums: Any,
) -> int:
    """Weigh and add up whole pieces, round the sums, and decode them; returns how many pieces were averaged.

    The arguments are those of the kernel of this name for int8, which works on rows.
    """
    bits, halves, scales = mean.view(np.int32), encoded.view(np.uint16), encoded.view(np.float32)
    mine, added = np.empty(PIECE_NUMEL, np.float32), np.empty(which.size)
    num_pieces = mean.size // PIECE_NUMEL
    num_done = num_pieces
    for piece in range(num_pieces):
        start, scale_at = piece * PIECE_NUMEL, piece * (PIECE_BYTES // 4)
        place = 2 * scale_at + SCALE_BYTES // 2
        is_ordinary = True
        if kept.size:
            write_past_cache(kept, start, own, start, PIECE_NUMEL)
        for i in range(PIECE_NUMEL):
            mine[i] = own[start + i]
        for number in range(which.size):
            room, weight, square = which[number], weights[number], 0.0
            if room < 0:
                for i in range(PIECE_NUMEL):
                    square = add_in_any_order(square, np.float64(mine[i]) * mine[i])
                added[number] = square
                if number == 0:
                    for i in range(PIECE_NUMEL):
                        mean[start + i] = mine[i] * weight
                else:
                    for i in range(PIECE_NUMEL):
                        mean[start + i] += mine[i] * weight
                continue
            given = rooms[room]
            given_halves = given.view(np.uint16)
            scale = given.view(np.float32)[scale_at]
            if not _is_ordinary(scale, given_halves, place):
                is_ordinary = False
                break
            for i in range(PIECE_NUMEL):
                value = _from_half(given_halves[place + i]) * scale
                square = add_in_any_order(square, np.float64(value) * value)
            added[number] = square
            if number == 0:
                for i in range(PIECE_NUMEL):
                    mean[start + i] = _from_half(given_halves[place + i]) * scale * weight
            else:
                for i in range(PIECE_NUMEL):
                    mean[start + i] += _from_half(given_halves[place + i]) * scale * weight
        if not is_ordinary or not _write_piece(mean, bits, piece, halves, scales):
            for i in range(PIECE_NUMEL):
                mean[start + i] = mine[i]
            num_done = piece
            break
        scale = scales[scale_at]
        for i in range(PIECE_NUMEL):
            mean[start + i] = _from_half(halves[place + i]) * scale
        for number in range(which.size):
            room, product = which[number], 0.0
            if room < 0:
                for i in range(PIECE_NUMEL):
                    product = add_in_any_order(product, np.float64(mine[i]) * mean[start + i])
            else:
                given_halves = rooms[room].view(np.uint16)
                scale = rooms[room].view(np.float32)[scale_at]
                for i in range(PIECE_NUMEL):
                    value = _from_half(given_halves[place + i]) * scale
                    product = add_in_any_order(product, np.float64(value) * mean[start + i])
            sums[number, 0] += added[number]
            sums[number, 1] += product
    after_writes_past_cache()
    return num_done
