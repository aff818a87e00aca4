"""A few numbers that tell how far apart two large vectors are: sums of all their values, with signs drawn by chance.

The squares of such sums are on average the square of the vector's length, and those of the differences of two peers'
sums the square of their distance (Alon, Matias and Szegedy, "The space complexity of approximating the frequency
moments", 1996). So a change of any value shows by its size, wherever it is; a sample of the values would miss most.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from manyhands.averaging.sketch import NUM_VALUES, packed

ROW = 1024
"""Values whose signs are drawn one by one; the signs of all of a row are those, or the opposite."""
PIECE = 256 * ROW
"""Values that are looked at together: they stay in a processor's cache."""


class Sketch(NamedTuple):
    """What stands for a peer's parameters after a step.

    Attributes:
        sums: as they are published; none if nobody asks for them.
        size: Euclidean norm of all values.
    """

    sums: bytes = b""
    size: float = 0.0


def sketch_of(tensors: Sequence[torch.Tensor], step: int) -> Sketch:
    """Of the parameters after this global step."""
    sums, size = signed_sums(tensors, step)
    return Sketch(packed(sums), size)


@torch.no_grad()
def signed_sums(tensors: Sequence[torch.Tensor], step: int) -> tuple[list[float], float]:
    """``NUM_VALUES`` sums of all values, and their Euclidean norm.

    The signs are drawn anew for each global step, alike on all peers. It reads the values once, wherever they are, and
    asks each device once.
    """
    num_rows = sum(-(-tensor.numel() // ROW) for tensor in tensors)
    signs = _signs(f"sketch after step {step}", ROW + num_rows)
    of_columns, of_rows = signs[:ROW], signs[ROW:]
    on_devices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}  # signs of rows; sums of columns, and norm
    first_row = 0
    for tensor in tensors:
        device = tensor.device
        if device not in on_devices:
            on_devices[device] = (of_rows.to(device), torch.zeros(ROW + 1, device=device))
        rows, sums = on_devices[device]
        for piece in torch.split(tensor.detach().reshape(-1), PIECE):
            first_row += _add(sums, piece.to(torch.float32), rows[first_row:])
    columns, norms = torch.zeros(ROW), []
    for _, sums in on_devices.values():
        on_host = sums.cpu()
        columns += on_host[:ROW]
        norms.append(float(on_host[ROW]))
    return (columns * of_columns).view(-1, NUM_VALUES).sum(0).tolist(), math.hypot(*norms)


def _add(sums: torch.Tensor, piece: torch.Tensor, signs: torch.Tensor) -> int:
    """Add rows to the sums of the columns, each with its sign, and to the norm.

    Returns how many there were, the last one not full.
    """
    sums[ROW] = torch.hypot(sums[ROW], torch.linalg.vector_norm(piece))
    num_full, num_left = divmod(piece.numel(), ROW)
    if num_full:
        full = piece[: num_full * ROW].view(num_full, ROW)
        sums[:ROW] += (full * signs[:num_full, None]).sum(0)
    if num_left:
        sums[:num_left] += piece[num_full * ROW :] * signs[num_full]
    return num_full + (num_left > 0)


def _signs(what: str, num: int) -> torch.Tensor:
    """So many of +1 and -1: the bits of SHAKE-256, the lowest of each byte first."""
    drawn = torch.frombuffer(bytearray(hashlib.shake_256(what.encode()).digest(-(-num // 8))), dtype=torch.uint8)
    bits = (drawn[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.reshape(-1)[:num].to(torch.float32) * 2 - 1
