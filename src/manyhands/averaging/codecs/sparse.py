"""Sends only the largest values of each chunk, as an index and a few bits: by default 141 times smaller than float32.

What is not sent is added to the next change (:class:`Unsent`). A mean of several such vectors has more values than
each of them, so the means of a span are not encoded anew: its reducer passes the contributions on, and all members add
them up in the order of ranks (:class:`manyhands.averaging.codecs.plan.Gathered`).

Layout of a piece, which is one chunk: a table of magnitudes in bfloat16, the mean of each bin; then for each kept value
its index and, in the lowest bits, sign and bin, packed without gaps, high bits first. The bins divide the range of the
kept magnitudes evenly. With 8 significant bits in the table, a product with a small integer is exact, and so decoded
values are the same on all machines.

Sources: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, arXiv:2508.15706; Karimireddy et al.,
Error feedback fixes SignSGD, arXiv:1901.09847.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from manyhands.averaging.codecs.codec import BadEncoding, Codec, NotFinite, square_of, viewed_as
from manyhands.base.arguments import whole
from manyhands.base.errors import ConfigError

if TYPE_CHECKING:
    from manyhands.averaging.codecs.plan import Plan

SPARSE = "sparse"
MAX_BITS = 4
LARGEST = 255 * 2.0**120
"""The largest bfloat16."""


class Sparse(Codec):
    """Sends only the largest values of each chunk of a change; for local steps.

    Args:
        top: number of values that are sent of each chunk.
        chunk: number of values in a chunk.
        bits: bits of each sent value, in addition to its index.
        decay: the values that were not sent are added to the next change, times this factor.
    Raises:
        ConfigError: an argument is out of its range.
    """

    name = SPARSE
    code = 6
    passes_on = True

    def __init__(self, top: int = 64, chunk: int = 4096, bits: int = 2, decay: float = 0.95) -> None:
        limits = (("chunk", chunk, 2, 1 << 16, 4096), ("top", top, 1, chunk, 64), ("bits", bits, 1, MAX_BITS, 2))
        for name, number, least, most, example in limits:
            if whole(name, number, least=least, example=example) > most:
                raise ConfigError(f"{name}={number} must be at most {most}; for example {min(example, most)}")
        if not (isinstance(decay, (int, float)) and 0 < decay <= 1):
            raise ConfigError(f"decay={decay!r} must be above 0 and at most 1; for example 0.95")
        self.top = top
        self.chunk = chunk
        self.bits = bits
        self.decay = decay
        self.piece_numel = self.unit_numel = chunk
        self._num_bins = 1 << (bits - 1)
        self._code_bits = (chunk - 1).bit_length() + bits

    @property
    def setting(self) -> str:
        """The name with all numbers, as :func:`manyhands.averaging.codecs.codec_named` takes it."""
        return f"{SPARSE}-{self.top}-{self.chunk}-{self.bits}-{self.decay:g}"

    def num_kept(self, numel: int) -> int:
        """The number of values that are sent of a piece with ``numel`` values."""
        return math.ceil(self.top * numel / self.chunk)

    def _piece_bytes(self, numel: int) -> int:
        return 2 * self._num_bins + math.ceil(self.num_kept(numel) * self._code_bits / 8) if numel else 0

    def _encode_block(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        rows = values_N.view(-1, min(self.chunk, values_N.numel()))
        magnitudes, indices = rows.abs().topk(self.num_kept(rows.shape[1]), dim=1)
        if not bool(magnitudes[:, 0].isfinite().all()):  # NaN is the largest
            raise NotFinite("NaN or infinite values cannot be averaged")
        low, high = magnitudes[:, -1:], magnitudes[:, :1]
        scales = torch.where(high > low, self._num_bins / (high - low), 0.0).nan_to_num_(posinf=0.0)
        bins = ((magnitudes - low) * scales).to(torch.int64).clamp_(max=self._num_bins - 1)
        sums = torch.zeros(len(rows), self._num_bins, dtype=torch.float64).scatter_add_(1, bins, magnitudes.double())
        counts = torch.zeros_like(sums).scatter_add_(1, bins, torch.ones_like(magnitudes, dtype=torch.float64))
        table = (sums / counts.clamp_(min=1)).clamp_(max=LARGEST).to(torch.bfloat16)
        signs = (rows.gather(1, indices) < 0).to(torch.int64)
        codes = (indices << self.bits) | (signs << (self.bits - 1)) | bins
        packed = _packed(codes.numpy(), self._code_bits)
        place = out.view(len(rows), -1)
        place[:, : 2 * self._num_bins].copy_(table.view(torch.uint8))
        place[:, 2 * self._num_bins :].copy_(torch.from_numpy(packed))

    def _decode_block(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        numel = min(self.chunk, out_N.numel())
        rows = out_N.view(-1, numel).zero_()
        place = encoded.view(out_N.numel() // numel, -1)
        table = viewed_as(place[:, : 2 * self._num_bins].reshape(-1), torch.bfloat16).float().view(len(rows), -1)
        if not bool((table.isfinite() & (table >= 0)).all()):
            raise BadEncoding(f"{self.name}: a magnitude is negative or not finite")
        packed = place[:, 2 * self._num_bins :].numpy()
        codes = torch.from_numpy(_unpacked(packed, self._code_bits, self.num_kept(numel)))
        indices = codes >> self.bits
        if bool((indices >= numel).any()):
            raise BadEncoding(f"{self.name}: an index is beyond the {numel} values of its chunk")
        values = table.gather(1, codes & (self._num_bins - 1))
        rows.scatter_(1, indices, torch.where((codes >> (self.bits - 1)) & 1 == 1, -values, values))


class Unsent:
    """What a peer has not sent of its vectors so far; it is added to the next one, and less of it each time.

    In each round: ``encode`` each chunk, then ``commit`` if the others used it, else ``abort``. Several threads may
    encode chunks at once; call ``commit`` and ``abort`` when all are done.

    Memory: one vector, and during a round one more for encoded values.

    Args:
        plan: with a sparse codec.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._decay = min(segment.codec.decay for segment in plan.segments if isinstance(segment.codec, Sparse))
        self._kept_N = torch.zeros(plan.numel, dtype=plan.dtype)
        self._pending: dict[int, tuple[slice, torch.Tensor]] = {}  # by start: what this round does not send

    def encode(self, values: torch.Tensor, start: int, out: torch.Tensor) -> None:
        """Encode ``values``, which is ``flat_N[start : start + len(values)]``, plus what was not sent of it before.

        Raises as :meth:`Plan.encode <manyhands.averaging.codecs.plan.Plan.encode>`.
        """
        part = slice(start, start + values.numel())
        whole = self._with_kept(values, part)
        self.plan.encode(whole, start, out)
        decoded = torch.empty_like(whole)
        self.plan.decode(out, start, decoded)
        self._pending[start] = part, whole.sub_(decoded)

    def commit(self) -> None:
        """Count the round: what it did not send is added in the next one."""
        for part, unsent in self._pending.values():
            self._kept_N[part] = unsent
        self._pending.clear()

    def abort(self) -> None:
        """Discard the round; no effect after a commit."""
        self._pending.clear()

    def norm_of(self, flat_N: torch.Tensor) -> float:
        """The L2 norm of what is sent of a vector, as receivers decode it; infinite if the vector is not finite."""
        square = 0.0
        for segment in self.plan.segments:
            codec = segment.codec
            step = max(codec.unit_numel, codec.block_numel - codec.block_numel % codec.unit_numel)
            for start in range(segment.start, segment.stop, step):
                part = slice(start, min(start + step, segment.stop))
                encoded = torch.empty(self.plan.num_bytes(part.start, part.stop), dtype=torch.uint8)
                decoded = torch.empty(part.stop - part.start, dtype=self.plan.dtype)
                try:
                    self.plan.encode(self._with_kept(flat_N[part], part), part.start, encoded)
                except NotFinite:
                    return math.inf
                self.plan.decode(encoded, part.start, decoded)
                for gap in self.plan.uncompared(part):
                    decoded[gap] = 0
                square += square_of(decoded)
        return math.sqrt(square)

    def _with_kept(self, values: torch.Tensor, part: slice) -> torch.Tensor:
        return torch.add(values, self._kept_N[part], alpha=self._decay)


@functools.lru_cache(maxsize=8)
def sparse_named(setting: str) -> Sparse:
    """The codec of a :attr:`Sparse.setting`; always the same object, as plans compare codecs by identity."""
    try:
        _, top, chunk, bits, decay = setting.split("-", 4)
        return Sparse(int(top), int(chunk), int(bits), float(decay))
    except ValueError as error:
        raise ConfigError(f"codec {setting!r} is unknown; for example {Sparse().setting!r}") from error


def _packed(codes: np.ndarray, num_bits: int) -> np.ndarray:
    """Pack integers of ``num_bits`` bits, shape [rows, codes], into bytes, shape [rows, bytes]."""
    shifts = np.arange(num_bits - 1, -1, -1)
    bits = ((codes[:, :, None] >> shifts) & 1).astype(np.uint8)
    return np.packbits(bits.reshape(len(codes), -1), axis=1)


def _unpacked(packed: np.ndarray, num_bits: int, num_codes: int) -> np.ndarray:
    bits = np.unpackbits(packed, axis=1, count=num_codes * num_bits).reshape(len(packed), num_codes, num_bits)
    return bits.astype(np.int64) @ (1 << np.arange(num_bits - 1, -1, -1))
