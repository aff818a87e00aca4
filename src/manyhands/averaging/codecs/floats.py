"""Floats with 64, 32 or 16 bits for each value: exact, bf16, and fp16 with a scale for each piece.

Unencoded values need not be copied: the encoding of a contiguous tensor is its own memory,
``values_N.view(torch.uint8)``, and bytes received into such a view only have to be checked with ``check_finite``.

Float16 has 11 significant bits, but only exponents from -24 to 15. So each piece of 65,536 values is multiplied by a
power of two that brings its largest magnitude to [2^14, 2^15): gradients of 1e-8 and values of 1e38 keep 11 bits.
"""

from __future__ import annotations

import math

import torch

from manyhands.averaging.codecs.codec import (
    BadEncoding,
    Codec,
    NotFinite,
    check_finite,
    largest_magnitude,
    store,
    viewed_as,
)

SCALE_BYTES = 4
LARGEST_BELOW_2_15 = 32752.0
LARGEST_BFLOAT16 = float(torch.finfo(torch.bfloat16).max)


class Plain(Codec):
    """Unencoded float32."""

    name = "none"
    code = 0
    piece_numel = 1

    def _piece_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def _encode_block(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        check_finite(values_N)
        out.copy_(values_N.view(torch.uint8))

    def _decode_block(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        out_N.view(torch.uint8).copy_(encoded)
        try:
            check_finite(out_N)
        except NotFinite as error:
            raise BadEncoding(f"{self.name}: NaN or infinite values") from error


class PlainFloat64(Plain):
    """Unencoded float64, for vectors of float64, which are reduced in float64."""

    name = "none_float64"
    code = 1
    dtype = torch.float64


class Fp16(Codec):
    """Float16 times a power of two for each piece.

    Error: at most 2^-11 of the value, plus 2^-39 of the largest magnitude in the piece; in pieces whose magnitudes stay
    below 2^-111, plus 2^-149.
    """

    name = "fp16"
    code = 2
    piece_numel = unit_numel = 1 << 16
    error = 2.0**-11 + 2.0**-31

    def _piece_bytes(self, numel: int) -> int:
        return 2 * numel + SCALE_BYTES if numel else 0

    def _encode_block(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        rows = values_N.view(max(1, values_N.numel() // self.piece_numel), -1)
        largest = torch.maximum(-rows.amin(1), rows.amax(1))
        if not math.isfinite(largest.max().item()):
            raise NotFinite("NaN or infinite values cannot be averaged")
        exponents = torch.where(largest > 0, torch.frexp(largest).exponent - 15, 0).clamp_(min=-126)
        one = torch.ones_like(largest)
        scaled = rows * torch.ldexp(one, -exponents)[:, None]
        if exponents.max().item() == 113:  # rounded up to 2^15, they would be 2^128: infinite
            highest = torch.where(exponents == 113, LARGEST_BELOW_2_15, math.inf)[:, None]
            scaled = torch.maximum(torch.minimum(scaled, highest), -highest)
        pieces = out.view(len(rows), -1)
        pieces[:, :SCALE_BYTES].copy_(torch.ldexp(one, exponents)[:, None].view(torch.uint8))
        store(scaled, torch.float16, pieces[:, SCALE_BYTES:])

    def _decode_block(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        rows = out_N.view(max(1, out_N.numel() // self.piece_numel), -1)
        pieces = encoded.view(len(rows), -1)
        scales = viewed_as(pieces[:, :SCALE_BYTES].reshape(-1), torch.float32)[:, None]
        is_right = (torch.frexp(scales).mantissa == 0.5) & (scales >= 2.0**-126) & (scales <= 2.0**113)
        if not bool(is_right.all()):
            scale = scales[~is_right][0].item()
            raise BadEncoding(f"{self.name}: a scale is {scale}, and not a power of two from 2^-126 to 2^113")
        rows.copy_(viewed_as(pieces[:, SCALE_BYTES:], torch.float16)).mul_(scales)
        if not math.isfinite(largest_magnitude(out_N)):
            raise BadEncoding(f"{self.name}: NaN or infinite values")


class Bf16(Codec):
    """The upper half of each float32, rounded to nearest.

    Error: at most 2^-8 of the value, or 2^-134 where it is smaller than 2^-126. Values that would be rounded to
    infinity (from 3.396e38) become the largest bfloat16, 3.390e38.
    """

    name = "bf16"
    code = 3
    piece_numel = 1
    error = 2.0**-8

    def _piece_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode_block(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        largest = largest_magnitude(values_N)
        if not math.isfinite(largest):
            raise NotFinite("NaN or infinite values cannot be averaged")
        if largest > LARGEST_BFLOAT16:
            values_N = values_N.clamp(-LARGEST_BFLOAT16, LARGEST_BFLOAT16)
        store(values_N, torch.bfloat16, out)

    def _decode_block(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        out_N.copy_(viewed_as(encoded, torch.bfloat16))
        if not math.isfinite(largest_magnitude(out_N)):
            raise BadEncoding(f"{self.name}: NaN or infinite values")
