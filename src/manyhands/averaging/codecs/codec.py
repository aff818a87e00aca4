"""The base class of codecs: float values to bytes and back, in a size that depends only on the number of values.

The rules that all codecs keep, and that their tests check:

- Values are encoded in pieces: a piece is processed while it is in the processor's cache, and the encoding of a vector
is that of its pieces in order. The last piece may be shorter.
- Little-endian, in the layout of docs/reference/wire.md. The hosts are little-endian, too: x86-64 and AArch64.
- Decoded values are bit-identical on all machines: each product in them is exact, so it does not matter whether the
processor rounds between a multiplication and an addition. A round's vote relies on it: it compares the encoded means,
not the decoded ones. (With ``torch.set_flush_denormal`` a peer gets zeros where others have values below 2^-126, and
this is not detected.)
- Encoders refuse values that are not finite, and decoders never return any, whatever bytes another peer sent.
- A codec has no state, so many threads may use it at once. The kernels of torch release the GIL.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch

from manyhands.averaging.codecs.kernels import kernel
from manyhands.base.errors import ManyhandsError

FLOAT_BYTES = 4
PRODUCT_NUMEL = 8192
"""Values in one dot product of :func:`product_of`: so few that BLAS computes it on the calling thread."""


class NotFinite(ManyhandsError, ValueError):
    """Values to encode contain NaN or infinity."""


class BadEncoding(ManyhandsError, ValueError):
    """Encoded bytes that no encoder of ours writes: of a wrong length, or with scales or values that are not finite."""


class Codec(abc.ABC):
    """Turns values into bytes and back.

    Attributes:
        code: number of the codec on the wire; it is never used again for another layout.
        piece_numel: values in a piece, such as a row; the last piece of a slice may have fewer.
        block_numel: values in the pieces that torch processes at once; at least one piece.
        unit_numel: the borders of spans and chunks should be multiples of this many values.
        passes_on: whether a reducer sends all contributions to a mean, in place of the mean.
        error: the L2 norm of the error of encoded values is at most this multiple of their L2 norm, where these are not
            tiny (below 2^-100).
    """

    name: ClassVar[str]
    code: ClassVar[int]
    dtype: ClassVar[torch.dtype] = torch.float32
    piece_numel: int
    block_numel: int = 1 << 20
    unit_numel: int = 1
    passes_on: ClassVar[bool] = False
    error: ClassVar[float] = 0.0

    def num_bytes(self, numel: int) -> int:
        """Encoded size of ``numel`` values in bytes."""
        num_pieces, rest = divmod(numel, self.piece_numel)
        return num_pieces * self._piece_bytes(self.piece_numel) + self._piece_bytes(rest)

    def encode(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        """Write the encoded values to ``out``.

        Args:
            values_N: on the CPU, of any floating dtype, which is rounded to that of the codec.
            out: uint8, shape [num_bytes(N)], contiguous; any alignment.
        Raises:
            NotFinite: a value is NaN, infinite, or too large for the codec's dtype; ``out`` is then undefined, and must
                not be sent.
        """
        assert (values_N.dim(), values_N.is_floating_point()) == (1, True)
        assert _is_bytes(out, self.num_bytes(values_N.numel())), "a compiled kernel does not look at bounds"
        values_N, out = self._after_kernel("encode", values_N, out)
        for block, place in self._blocks(values_N.numel(), out):
            self._encode_block(values_N[block].detach().to(self.dtype).contiguous(), place)

    def decode(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        """Write the decoded values to ``out_N``.

        Args:
            encoded: uint8, in one dimension; any alignment; never written. May come from a stranger.
            out_N: of the dtype of the codec, contiguous.
        Raises:
            BadEncoding: the length is not ``num_bytes(N)``, or a value would not be finite; ``out_N`` is then
                undefined, and must not be used.
        """
        assert (out_N.dim(), out_N.dtype, out_N.is_contiguous()) == (1, self.dtype, True)
        if not _is_bytes(encoded, self.num_bytes(out_N.numel())):
            raise BadEncoding(
                f"{out_N.numel()} values in {self.name} are {self.num_bytes(out_N.numel())} bytes, but there are "
                f"{encoded.numel()}"
            )
        out_N, encoded = self._after_kernel("decode", out_N, encoded)
        for block, place in self._blocks(out_N.numel(), encoded):
            self._decode_block(place, out_N[block])

    def average(
        self,
        own_N: torch.Tensor,
        kept_N: torch.Tensor,
        rooms: torch.Tensor,
        which: Sequence[int],
        weights: Sequence[float],
        mean_N: torch.Tensor,
        out: torch.Tensor,
        sums: np.ndarray,
    ) -> int:
        """Add up all contributions, encode the mean, and decode it, in one pass over the memory.

        It stops where a compiled kernel cannot go on, or values break the rules; the caller averages the rest itself.

        Args:
            own_N: own values, unencoded; may be ``mean_N``.
            kept_N: if not empty, receives a copy of the own values that were averaged.
            rooms: the other members' encoded values, uint8, shape [rooms, bytes of a room].
                A room may be larger than its values.
            which: in the order of addition, the room of each contribution, or -1 for ``own_N``.
            weights: the factor of each contribution, in the same order.
            mean_N: receives the decoded mean; contiguous, of the codec's dtype.
            out: receives the encoded mean; see :meth:`encode`.
            sums: float64, shape [contributions, 2], to which are added, of the averaged values of each contribution,
                the sum of the squares, and the dot product with the decoded mean.
        Returns:
            The number of values that were averaged, from the first on.
        """
        numel = mean_N.numel() // self.piece_numel * self.piece_numel
        whole_N, whole_out = mean_N[:numel], out[: self.num_bytes(numel)]
        run = kernel(self.name, "average", whole_N, whole_out)
        if run is None or rooms.shape[1] < whole_out.numel() or rooms.shape[1] % FLOAT_BYTES:
            return 0
        places = np.array(which, dtype=np.int64)
        shares = np.array(weights, dtype=np.float32)
        arrays = (one.numpy() for one in (whole_N, whole_out, own_N.detach(), kept_N, rooms))
        return self.piece_numel * int(run(*arrays, places, shares, sums))

    def decode_beside(self, encoded: torch.Tensor, out_N: torch.Tensor, own_N: torch.Tensor) -> tuple[float, ...]:
        """Like :meth:`decode`, and compare with other values, in one pass over the memory where there is a kernel.

        Args:
            own_N: as many values; may be ``out_N``, which then overwrites them.
        Returns:
            The dot product of both, and the sums of the squares of the decoded values, and of the others.
        """
        sums, done = np.zeros(3), 0
        numel = out_N.numel() // self.piece_numel * self.piece_numel
        whole_N, whole_encoded = out_N[:numel], encoded[: self.num_bytes(numel)]
        run = kernel(self.name, "decode_beside", whole_N, whole_encoded)
        if run is not None and whole_encoded.numel() == self.num_bytes(numel):
            own = own_N[:numel].detach().numpy()
            done = self.piece_numel * int(run(whole_N.numpy(), whole_encoded.numpy(), own, sums))
        if done == out_N.numel():
            return tuple(map(float, sums))
        rest_N, kept_N = out_N[done:], own_N[done:].clone()
        self.decode(encoded[self.num_bytes(done) :], rest_N)
        rest = product_of(rest_N, kept_N), square_of(rest_N), square_of(kept_N)
        return tuple(float(one) + other for one, other in zip(sums, rest, strict=True))

    def _after_kernel(
        self, name: str, values_N: torch.Tensor, encoded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Process as much as a compiled kernel can; returns the values and the bytes that torch must process."""
        numel = values_N.numel() // self.piece_numel * self.piece_numel
        whole_N = values_N[:numel]
        whole_encoded = encoded[: self.num_bytes(numel)]
        run = kernel(self.name, name, whole_N, whole_encoded)
        done = self.piece_numel * run(whole_N.detach().numpy(), whole_encoded.numpy()) if run is not None else 0
        return values_N[done:], encoded[self.num_bytes(done) :]

    def _blocks(self, numel: int, encoded: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Runs of whole pieces, and the last piece if it is shorter, with their encodings."""
        whole = numel - numel % self.piece_numel
        step = self.block_numel - self.block_numel % self.piece_numel
        for start, stop in itertools.pairwise(sorted({*range(0, whole, step), whole, numel})):
            yield slice(start, stop), encoded[self.num_bytes(start) : self.num_bytes(stop)]

    @abc.abstractmethod
    def _piece_bytes(self, numel: int) -> int:
        """Bytes of a piece of 0 to ``piece_numel`` values."""

    @abc.abstractmethod
    def _encode_block(self, values_N: torch.Tensor, out: torch.Tensor) -> None:
        """Encode whole pieces, or a shorter one; contiguous, of the dtype of the codec."""

    @abc.abstractmethod
    def _decode_block(self, encoded: torch.Tensor, out_N: torch.Tensor) -> None:
        """Decode whole pieces, or a shorter one, of the right length."""


def largest_magnitude(values: torch.Tensor) -> float:
    """The largest absolute value; NaN if any is NaN."""
    low, high = (bound.item() for bound in torch.aminmax(values))
    return max(-low, high)  # NaN is in both


def product_of(one_N: torch.Tensor, other_N: torch.Tensor) -> float:
    """The dot product of two vectors; infinite or NaN only if a value is."""
    one, other = one_N.numpy(), other_N.numpy()
    num_whole = len(one) - len(one) % PRODUCT_NUMEL
    rows, columns = one[:num_whole].reshape(-1, 1, PRODUCT_NUMEL), other[:num_whole].reshape(-1, PRODUCT_NUMEL, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        product = float(np.matmul(rows, columns).sum()) + float(np.dot(one[num_whole:], other[num_whole:]))
    if math.isfinite(product):
        return product
    return float(torch.dot(one_N.double(), other_N.double()))  # float32 cannot overflow in float64


def square_of(values: torch.Tensor) -> float:
    """The sum of the squares of all values; infinite if one of them is not finite."""
    square = product_of(values, values)
    return square if math.isfinite(square) else math.inf


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN."""
    # the sum is the fastest pass over memory, but it may overflow although all values are finite
    return math.isfinite(values.sum().item()) or math.isfinite(largest_magnitude(values))


def check_finite(values: torch.Tensor) -> None:
    """Raises NotFinite if a value is infinite or NaN."""
    if not is_finite(values):
        raise NotFinite("NaN or infinite values cannot be averaged")


def viewed_as(encoded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reinterpret bytes as numbers, without a copy if the address is aligned for them."""
    return (encoded if _is_aligned(encoded, dtype) else encoded.clone()).view(dtype)


def store(values: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Write values as numbers of a dtype into bytes, in one pass where the address is right for such numbers."""
    if _is_aligned(out, dtype):
        out.view(dtype).copy_(values)
    else:
        out.copy_(values.to(dtype).view(torch.uint8))


def _is_aligned(data: torch.Tensor, dtype: torch.dtype) -> bool:
    return data.data_ptr() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0


def _is_bytes(tensor: torch.Tensor, num_bytes: int) -> bool:
    return tensor.dtype == torch.uint8 and tensor.shape == (num_bytes,) and tensor.is_contiguous()
