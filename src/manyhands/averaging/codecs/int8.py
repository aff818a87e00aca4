"""Eight bits for each value, between the smallest and the largest of its row of 216: 8.30 bits with the rows' headers.

The rows are those of fbgemm's "fused 8-bit rowwise" embeddings: the values as uint8, then scale and bias as float32; a
value is ``scale * q + bias``. This codec differs:

- The lower 8 bits of each scale are zero. With 16 significant bits, the product with 8 bits is exact, and all machines
decode the same, whether or not they fuse it with the addition.
- fbgemm divides by ``range + 1e-8`` and writes a scale for ``range``. The scale is corrected, and rows of a very small
range are encoded exactly, in float64.
- Rows whose range is near the largest float32, or above, are encoded in float64, too. With such scales and biases the
decoder also computes in float64, and clamps the values to the largest float32.
- The encoder refuses NaN.

Compiled kernels (:mod:`manyhands.averaging.codecs.kernels.int8`) do the same to ordinary rows, faster.

Sources: Guan et al., Post-training 4-bit quantization on embedding tables, arXiv:1911.02079 (the rows); pytorch/FBGEMM,
``FloatOrHalfToFused8BitRowwiseQuantizedSBFloat``.
"""

from __future__ import annotations

import math

import torch

from manyhands.averaging.codecs.codec import BadEncoding, Codec, check_finite, viewed_as

ROW_NUMEL = 216
"""With more values in a row, the squared error on N(0,1) is above 4e-5; with fewer, there are more than 8.3 bits."""
HEADER_BYTES = 8
LEVELS = 255
KERNEL_EPSILON = 1e-8
SMALL_SCALE = 2.0**-30
HUGE_SCALE = 2.0**118
HUGE_BIAS = 2.0**126
UNUSED_SCALE_BITS = 0xFF
LARGEST_FLOAT32 = float(torch.finfo(torch.float32).max)
SIGN_BIT = -(1 << 31)


class Int8(Codec):
    """Affine 8-bit quantization of rows of 216 values.

    Error: at most 1/480 of the row's range (largest value minus smallest), plus 2^-22 of its largest magnitude, plus
    2^-132. A row of equal values is exact.
    """

    name = "int8"
    code = 4
    piece_numel = unit_numel = ROW_NUMEL
    block_numel = 1024 * ROW_NUMEL
    # a row whose range is r has a norm of at least r / sqrt(2), and an error of at most r / 480 for each value
    error = math.sqrt(2 * ROW_NUMEL) / 480 + 1e-5

    def _piece_bytes(self, numel: int) -> int:
        return numel + HEADER_BYTES if numel else 0

    def _encode_block(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        check_finite(values_N)
        rows = values_N.view(-1, min(ROW_NUMEL, values_N.numel()))
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
        packed = out.view(len(rows), -1)
        headers = torch.cat([scales, smallest], 1)
        packed[:, :-HEADER_BYTES].copy_(steps.round_().clamp_(0, LEVELS))
        packed[:, -HEADER_BYTES:].copy_(headers.view(torch.uint8))

    def _decode_block(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        rows = out_N.view(-1, min(ROW_NUMEL, out_N.numel()))
        packed = encoded.view(len(rows), -1)
        headers = viewed_as(packed[:, -HEADER_BYTES:].reshape(-1), torch.float32).view(-1, 2)
        highest_scale, highest_bias = headers.abs().amax(0).tolist()
        if not (math.isfinite(highest_scale) and math.isfinite(highest_bias)):
            raise BadEncoding("int8: a scale or a bias is not finite")
        if bool(headers[:, 0].view(torch.int32).bitwise_and(SIGN_BIT | UNUSED_SCALE_BITS).any()):
            raise BadEncoding("int8: a scale is below 0, or has more than 16 significant bits")
        steps = packed[:, :-HEADER_BYTES]
        if highest_scale < HUGE_SCALE and highest_bias < HUGE_BIAS:
            rows.copy_(steps).mul_(headers[:, :1]).add_(headers[:, 1:])
        else:
            exact = headers.double()
            values = steps.double().mul_(exact[:, :1]).add_(exact[:, 1:])
            rows.copy_(values.clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32))
