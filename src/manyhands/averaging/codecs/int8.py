"""Eight bits for each value, between the smallest and the largest of its row of 216: 8.30 bits with the rows' headers.

The rows are those of fbgemm's "fused 8-bit rowwise" embeddings: the values as uint8, then scale and bias as float32; a
value is ``scale * q + bias``. With these differences:

- The lower 8 bits of each scale are zero. With 16 significant bits, the product with 8 bits is exact, and all machines
decode the same, whether or not they fuse it with the addition.
- fbgemm divides by ``range + 1e-8`` and writes a scale for ``range``. The scale is corrected, and rows of a very small
range are encoded exactly, in float64.
- So are rows whose range is near the largest float32 or above. Such scales and biases are decoded in float64, too, and
clamped to the largest float32.
- NaN is refused.

Compiled kernels (:mod:`manyhands.averaging.codecs.kernels.int8`) do the same to ordinary rows, faster.

Sources: Guan et al., Post-training 4-bit quantization on embedding tables, arXiv:1911.02079 (the rows); pytorch/FBGEMM,
``FloatOrHalfToFused8BitRowwiseQuantizedSBFloat``.
"""

from __future__ import annotations

import math

import torch

from manyhands.averaging.codecs.codec import BadEncoding, Codec, check_finite, viewed_as
from manyhands.averaging.codecs.int8_rows import (
    HEADER_BYTES,
    HUGE_BIAS,
    HUGE_SCALE,
    KERNEL_EPSILON,
    LEVELS,
    ROW_NUMEL,
    SMALL_SCALE,
    UNUSED_SCALE_BITS,
)

LARGEST_FLOAT32 = float(torch.finfo(torch.float32).max)
SIGN_BIT = -(1 << 31)


class Int8(Codec):
    """Affine 8-bit quantization of rows of 216 values.

    Error: at most 1/480 of the row's range (largest less smallest), 2^-22 of its largest magnitude, and 2^-132. A row
    of equal values is exact.
    """

    name = "int8"
    code = 4
    piece_numel = 1024 * ROW_NUMEL
    unit_numel = ROW_NUMEL

    def _piece_bytes(self, numel: int) -> int:
        return numel + HEADER_BYTES * -(-numel // ROW_NUMEL)

    def _encode_piece(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        check_finite(values_N)
        for values, packed in _rows_of(values_N, out):
            packed.copy_(_encode_rows(values))

    def _decode_piece(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        for values, packed in _rows_of(out_N, encoded):
            _decode_rows(packed, values)


def _rows_of(values_N: torch.Tensor, encoded: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The whole rows, and the last one if it is shorter: its values and its encoding, both in two dimensions."""
    num_whole, rest = divmod(values_N.numel(), ROW_NUMEL)
    at, place = num_whole * ROW_NUMEL, num_whole * (ROW_NUMEL + HEADER_BYTES)
    rows = [(values_N[:at].view(-1, ROW_NUMEL), encoded[:place].view(-1, ROW_NUMEL + HEADER_BYTES))]
    if rest:
        rows.append((values_N[None, at:], encoded[None, place:]))
    return [row for row in rows if row[0].numel()]


def _encode_rows(rows: torch.Tensor) -> torch.Tensor:
    """Encode R rows of V values each to uint8, shape [R, V + HEADER_BYTES]."""
    smallest = rows.amin(1, keepdim=True)
    ranges = rows.amax(1, keepdim=True) - smallest
    scales = ranges / LEVELS
    steps = (rows - smallest).mul_(ranges.new_tensor(LEVELS) / (ranges + KERNEL_EPSILON))
    is_ordinary = (scales == 0) | ((scales >= SMALL_SCALE) & (scales < HUGE_SCALE))
    scales = scales + KERNEL_EPSILON / LEVELS
    if not bool(is_ordinary.all()):
        others = ~is_ordinary[:, 0]
        exact = rows[others].double()
        low = exact.amin(1, keepdim=True)
        exact_ranges = exact.amax(1, keepdim=True) - low
        steps[others] = ((exact - low) * (LEVELS / exact_ranges)).float()
        scales[others] = (exact_ranges / LEVELS).float()
    scales.view(torch.int32).bitwise_and_(~UNUSED_SCALE_BITS)
    headers = torch.cat([scales, smallest], 1)
    return torch.cat([steps.round_().clamp_(0, LEVELS).to(torch.uint8), headers.view(torch.uint8)], 1)


def _decode_rows(packed: torch.Tensor, out_rows: torch.Tensor) -> None:
    """The inverse of ``_encode_rows``; refuses bytes that it would not write."""
    headers = viewed_as(packed[:, -HEADER_BYTES:].contiguous().view(-1), torch.float32).view(-1, 2)
    highest_scale, highest_bias = headers.abs().amax(0).tolist()
    if not (math.isfinite(highest_scale) and math.isfinite(highest_bias)):
        raise BadEncoding("int8: a scale or a bias is not finite")
    if bool(headers[:, 0].view(torch.int32).bitwise_and(SIGN_BIT | UNUSED_SCALE_BITS).any()):
        raise BadEncoding("int8: a scale is below 0, or has more than 16 significant bits")
    steps = packed[:, :-HEADER_BYTES]
    if highest_scale < HUGE_SCALE and highest_bias < HUGE_BIAS:
        out_rows.copy_(steps).mul_(headers[:, :1]).add_(headers[:, 1:])
    else:
        exact = headers.double()
        values = steps.double().mul_(exact[:, :1]).add_(exact[:, 1:])
        out_rows.copy_(values.clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32))
