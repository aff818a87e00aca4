"""Unencoded values: exact, 4 or 8 bytes each.

They need not be copied: the encoding of a contiguous tensor is its own memory, ``values_N.view(torch.uint8)``, and
bytes received into such a view only have to be checked with ``check_finite``.
"""

from __future__ import annotations

import torch

from manyhands.averaging.codecs.codec import BadEncoding, Codec, NotFinite, check_finite


class Plain(Codec):
    """Unencoded float32."""

    name = "none"
    code = 0
    piece_numel = 1 << 20

    def _piece_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def _encode_piece(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        check_finite(values_N)
        out.copy_(values_N.view(torch.uint8))

    def _decode_piece(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
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
