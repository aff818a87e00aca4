"""Sixteen bits for each value: fp16 with a scale for each piece, and bf16.

Float16 has 11 significant bits, but an exponent from -24 to 15 only. So each piece of 65,536 values is multiplied with
a power of two that brings its largest magnitude to [2^14, 2^15): gradients of 1e-8 and values of 1e38 keep 11 bits.
"""

from __future__ import annotations

import math

import torch

from manyhands.averaging.codecs.codec import BadEncoding, Codec, NotFinite, largest_magnitude, store, viewed_as

SCALE_BYTES = 4
LARGEST_BELOW_2_15 = 32752.0
LARGEST_BFLOAT16 = float(torch.finfo(torch.bfloat16).max)


class Fp16(Codec):
    """Float16 times a power of two for each piece.

    Error: at most 2^-11 of the value, and 2^-39 of the largest magnitude in the piece; for pieces that stay below
    2^-111 an absolute 2^-149.
    """

    name = "fp16"
    code = 2
    piece_numel = 1 << 16

    def _piece_bytes(self, numel: int) -> int:
        return 2 * numel + SCALE_BYTES if numel else 0

    def _encode_piece(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        largest = largest_magnitude(values_N)
        if not math.isfinite(largest):
            raise NotFinite("NaN or infinite values cannot be averaged")
        exponent = max(math.frexp(largest)[1] - 15, -126) if largest > 0 else 0
        scaled_N = values_N * math.ldexp(1.0, -exponent)
        if exponent == 113:  # rounded up to 2^15, they would be 2^128: infinite
            scaled_N.clamp_(-LARGEST_BELOW_2_15, LARGEST_BELOW_2_15)
        out[:SCALE_BYTES] = torch.tensor([math.ldexp(1.0, exponent)], dtype=torch.float32).view(torch.uint8)
        store(scaled_N, torch.float16, out[SCALE_BYTES:])

    def _decode_piece(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        scale = viewed_as(encoded[:SCALE_BYTES], torch.float32).item()
        if not (math.frexp(scale)[0] == 0.5 and 2.0**-126 <= scale <= 2.0**113):
            raise BadEncoding(f"{self.name}: a scale is {scale}, and not a power of two from 2^-126 to 2^113")
        out_N.copy_(viewed_as(encoded[SCALE_BYTES:], torch.float16)).mul_(scale)
        if not math.isfinite(largest_magnitude(out_N)):
            raise BadEncoding(f"{self.name}: NaN or infinite values")


class Bf16(Codec):
    """The upper half of each float32, rounded to nearest.

    Error: at most 2^-8 of the value, or 2^-134 where it is smaller than 2^-126. Values that would be rounded to
    infinity (from 3.396e38) become the largest bfloat16, 3.390e38.
    """

    name = "bf16"
    code = 3
    piece_numel = 1 << 16

    def _piece_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode_piece(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        largest = largest_magnitude(values_N)
        if not math.isfinite(largest):
            raise NotFinite("NaN or infinite values cannot be averaged")
        if largest > LARGEST_BFLOAT16:
            values_N = values_N.clamp(-LARGEST_BFLOAT16, LARGEST_BFLOAT16)
        store(values_N, torch.bfloat16, out)

    def _decode_piece(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        out_N.copy_(viewed_as(encoded, torch.bfloat16))
        if not math.isfinite(largest_magnitude(out_N)):
            raise BadEncoding(f"{self.name}: NaN or infinite values")
