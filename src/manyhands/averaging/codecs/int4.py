"""Four bits for each value, in blocks of 32 with a scale of 16 bits: 4.5 bits in all.

A block is divided by its value of the largest magnitude, sign included, which gets level -8 of the 16 levels from -8 to
7: the scale is that value divided by -8, rounded to bfloat16. With 8 significant bits in the scale, each decoded value
is exact, so the same on all machines; and zero stays zero.

Layout of a piece of up to 131,072 values: the scales of all blocks, then the levels plus 8, two in a byte: byte ``i``
has value ``i`` in its lower half, and value ``i + ceil(n / 2)`` in its upper half, or 8 where there is none.

torch also has a kernel for 4 bits (fbgemm's), four times as fast. It is not used: its scale and bias are float16, too
coarse for gradients below 1e-6 and too small for values above 65504.

Source: ggml's ``Q4_0`` (scale of 32 values from the signed largest one); Dettmers et al., 8-bit optimizers via
block-wise quantization, arXiv:2110.02861.
"""

from __future__ import annotations

import math

import torch

from manyhands.averaging.codecs.codec import BadEncoding, Codec, NotFinite, largest_magnitude, viewed_as

BLOCK_NUMEL = 32
SMALLEST_SCALE = 2.0**-120
LARGEST_SCALE = 255 * 2.0**117
"""The largest bfloat16 whose eightfold is finite."""


class Int4(Codec):
    """Signed 4-bit quantization of blocks of 32 values.

    Error: at most 0.134 of the largest magnitude in the block, plus 2^-117. This is reached by a value of the
    same magnitude and the other sign; for values of the same sign it is 0.067 in place of 0.134.
    """

    name = "int4"
    code = 5
    piece_numel = block_numel = 1 << 17
    unit_numel = BLOCK_NUMEL
    # the worst are 31 values that lie just between two levels, beside one of the largest magnitude
    error = 0.37

    def _piece_bytes(self, numel: int) -> int:
        return 2 * _num_blocks(numel) + (numel + 1) // 2

    def _encode_block(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        numel = values_N.numel()
        if missing := -numel % BLOCK_NUMEL:
            values_N = torch.cat([values_N, values_N.new_zeros(missing)])
        blocks = values_N.view(-1, BLOCK_NUMEL)
        low = blocks.amin(1, keepdim=True)
        high = blocks.amax(1, keepdim=True)
        peaks = torch.where(high > -low, high, low)
        if not math.isfinite(largest_magnitude(peaks)):
            raise NotFinite("NaN or infinite values cannot be averaged")
        scales = peaks.div_(-8).clamp_(-LARGEST_SCALE, LARGEST_SCALE)
        scales = torch.where(scales.abs() < SMALLEST_SCALE, 0.0, scales).to(torch.bfloat16)
        inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
        # +8.5, as the conversion cuts off; to int8, as the conversion to uint8 is six times slower
        levels = (blocks * inverse).add_(8.5).clamp_(max=15.5).to(torch.int8).view(torch.uint8).view(-1)
        num_packed = (numel + 1) // 2
        packed = torch.bitwise_left_shift(levels[num_packed : 2 * num_packed], 4).bitwise_or_(levels[:num_packed])
        num_scales_bytes = out.numel() - num_packed
        out[:num_scales_bytes].copy_(scales.view(-1).view(torch.uint8))
        out[num_scales_bytes:].copy_(packed)

    def _decode_block(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        numel = out_N.numel()
        num_scales = _num_blocks(numel)
        scales = viewed_as(encoded[: 2 * num_scales], torch.bfloat16).float()
        low, high = torch.aminmax(scales)
        if not (low.item() >= -LARGEST_SCALE and high.item() <= LARGEST_SCALE):  # NaN is neither
            raise BadEncoding(f"{self.name}: a scale is NaN, or beyond {LARGEST_SCALE:.3g}")
        packed = encoded[2 * num_scales :]
        levels = torch.empty(num_scales * BLOCK_NUMEL + 1, dtype=torch.uint8, device=out_N.device)
        num_packed = packed.numel()
        torch.bitwise_and(packed, 15, out=levels[:num_packed])
        torch.bitwise_right_shift(packed, 4, out=levels[num_packed : 2 * num_packed])
        signed = levels.view(torch.int8)[:numel].sub_(8)
        out_N.copy_(signed)
        full = numel - numel % BLOCK_NUMEL
        out_N[:full].view(-1, BLOCK_NUMEL).mul_(scales[: full // BLOCK_NUMEL, None])
        out_N[full:].mul_(scales[-1])


def _num_blocks(numel: int) -> int:
    return math.ceil(numel / BLOCK_NUMEL)
