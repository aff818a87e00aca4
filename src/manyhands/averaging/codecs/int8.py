"""Eight bits for each value, between the smallest and the largest of its row of 216: 8.30 bits with the rows' headers.

The rows are those of fbgemm's "fused 8-bit rowwise" embeddings, whose kernels torch has: the values as uint8, then
scale and bias as float32; a value is ``scale * q + bias``. There are four differences from the kernel's output:

- The lower 8 bits of each scale are zero. With 16 significant bits, the product with 8 bits is exact, and all machines
decode the same, whether or not they fuse it with the addition.
- The kernel divides by ``range + 1e-8`` and writes a scale for ``range``. The scale is corrected, and rows of a very
small range are encoded again, multiplied by 2^120.
- Rows whose range is near the largest float32 or above are encoded again, multiplied by 2^-8. Such scales and biases
are decoded in float64, and clamped to the largest float32.
- NaN, which the kernel does not detect, is refused.

Where torch lacks the kernels, or the values are not on a CPU, plain operations do the same. The headers are then the
same in every bit; a value in the middle between two steps may go to either of them.

Sources: Guan et al., Post-training 4-bit quantization on embedding tables, arXiv:1911.02079 (the rows); pytorch/FBGEMM,
``FloatOrHalfToFused8BitRowwiseQuantizedSBFloat`` (the kernel).
"""

from __future__ import annotations

import math

import numpy as np
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

_HAS_KERNELS = all(
    hasattr(torch.ops.quantized, name) for name in ("embedding_bag_byte_prepack", "embedding_bag_byte_unpack")
)


class Int8(Codec):
    """Affine 8-bit quantization of rows of 216 values.

    Error: at most 1/480 of the row's range (largest less smallest), 2^-22 of its largest magnitude, and 2^-132. A row
    of equal values is exact.
    """

    name = "int8"
    code = 4
    piece_numel = 1024 * ROW_NUMEL
    unit_numel = ROW_NUMEL
    cut_numel = ROW_NUMEL

    def _piece_bytes(self, numel: int) -> int:
        return numel + HEADER_BYTES * -(-numel // ROW_NUMEL)

    def _encode_piece(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        check_finite(values_N)
        num_rows, rest = divmod(values_N.numel(), ROW_NUMEL)
        if num_rows:
            rows = _encode_rows(values_N[: num_rows * ROW_NUMEL].view(num_rows, ROW_NUMEL))
            out[: rows.numel()].copy_(rows.view(-1))
        if rest:  # to a multiple of 4 values, so that the header is at an address of float32
            row = torch.cat([values_N[-rest:], values_N[-1:].expand(-rest % 4)])
            packed = _encode_rows(row[None])[0]
            out[-rest - HEADER_BYTES : -HEADER_BYTES].copy_(packed[:rest])
            out[-HEADER_BYTES:].copy_(packed[-HEADER_BYTES:])

    def largest_square(self, encoded: torch.Tensor, numel: int) -> float:
        """Like :meth:`Codec.largest_square`: each value of a row is between its first and its last step."""
        num_rows = numel // ROW_NUMEL
        whole = num_rows * (ROW_NUMEL + HEADER_BYTES)
        headers = encoded[:whole].numpy().reshape(num_rows, ROW_NUMEL + HEADER_BYTES)[:, ROW_NUMEL:].copy()
        if numel % ROW_NUMEL:
            headers = np.concatenate([headers, encoded[None, -HEADER_BYTES:].numpy()])
        headers = headers.view(np.float32).astype(np.float64)
        low = headers[:, 1]
        largest = np.maximum(np.abs(low), np.abs(low + LEVELS * headers[:, 0]))
        return float(np.dot(largest, largest)) * ROW_NUMEL

    def _decode_piece(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        num_rows, rest = divmod(out_N.numel(), ROW_NUMEL)
        if num_rows:
            rows = encoded[: num_rows * (ROW_NUMEL + HEADER_BYTES)].view(num_rows, -1)
            _decode_rows(rows, out_N[: num_rows * ROW_NUMEL].view(num_rows, ROW_NUMEL))
        if rest:
            steps, header = encoded[-rest - HEADER_BYTES : -HEADER_BYTES], encoded[-HEADER_BYTES:]
            row = torch.cat([steps, steps.new_zeros(-rest % 4), header])
            values = out_N.new_empty(1, row.numel() - HEADER_BYTES)
            _decode_rows(row[None], values)
            out_N[-rest:] = values[0, :rest]


def _encode_rows(rows: torch.Tensor) -> torch.Tensor:
    """Encode R rows of V values each, V a multiple of 4, to uint8, shape [R, V + HEADER_BYTES]."""
    packed = _pack(rows)
    scales = _headers(packed)[:, 0]
    low, high = torch.aminmax(scales)
    again = []
    if low.item() < SMALL_SCALE:
        again.append((((scales > 0) & (scales < SMALL_SCALE)).nonzero()[:, 0], 2.0**120))
    if not high.item() < HUGE_SCALE:
        again.append(((~(scales < HUGE_SCALE)).nonzero()[:, 0], 2.0**-8))
    scales.add_(KERNEL_EPSILON / LEVELS)
    for which, factor in again:
        if not which.numel():  # all of these scales are 0: rows of equal values
            continue
        packed_again = _pack(rows[which] * factor)
        headers = _headers(packed_again)
        headers[:, 0].add_(KERNEL_EPSILON / LEVELS)
        headers.div_(factor)
        packed[which] = packed_again
    scales.view(torch.int32).bitwise_and_(~UNUSED_SCALE_BITS)
    return packed


def _decode_rows(packed: torch.Tensor, out_rows: torch.Tensor) -> None:
    """The inverse of ``_encode_rows``; refuses bytes that it would not write."""
    headers = _headers(packed)
    highest_scale, highest_bias = headers.abs().amax(0).tolist()
    if not (math.isfinite(highest_scale) and math.isfinite(highest_bias)):
        raise BadEncoding("int8: a scale or a bias is not finite")
    if bool(headers[:, 0].view(torch.int32).bitwise_and(SIGN_BIT | UNUSED_SCALE_BITS).any()):
        raise BadEncoding("int8: a scale is below 0, or has more than 16 significant bits")
    if highest_scale < HUGE_SCALE and highest_bias < HUGE_BIAS:
        out_rows.copy_(_unpack(packed, headers))
    else:
        exact = headers.double()
        values = packed[:, :-HEADER_BYTES].double().mul_(exact[:, :1]).add_(exact[:, 1:])
        out_rows.copy_(values.clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32))


def _headers(packed: torch.Tensor) -> torch.Tensor:
    """Scale and bias of each row, float32, shape [R, 2]; in place, unless the rows lie at an odd address."""
    return viewed_as(packed.view(-1), torch.float32).view(packed.shape[0], -1)[:, -2:]


def _pack(rows: torch.Tensor) -> torch.Tensor:
    if _HAS_KERNELS and rows.device.type == "cpu":
        packed: torch.Tensor = torch.ops.quantized.embedding_bag_byte_prepack(rows)
        return packed
    return pack_without_kernel(rows)


def _unpack(packed: torch.Tensor, headers: torch.Tensor) -> torch.Tensor:
    if _HAS_KERNELS and packed.device.type == "cpu":
        values: torch.Tensor = torch.ops.quantized.embedding_bag_byte_unpack(packed)
        return values
    return unpack_without_kernel(packed, headers)


def pack_without_kernel(rows: torch.Tensor) -> torch.Tensor:
    """The encoding of fbgemm's kernel, on any device."""
    smallest = rows.amin(1, keepdim=True)
    ranges = rows.amax(1, keepdim=True) - smallest
    steps = (rows - smallest).mul_(LEVELS / (ranges + KERNEL_EPSILON)).round_().clamp_(0, LEVELS)
    headers = torch.cat([ranges / LEVELS, smallest], 1)
    return torch.cat([steps.to(torch.uint8), headers.view(torch.uint8)], 1)


def unpack_without_kernel(packed: torch.Tensor, headers: torch.Tensor) -> torch.Tensor:
    """The decoding of fbgemm's kernel, on any device."""
    return packed[:, :-HEADER_BYTES].float().mul_(headers[:, :1]).add_(headers[:, 1:])
