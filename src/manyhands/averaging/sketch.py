"""The numbers that each peer publishes to compare its values with others', and the distance computed from them. Pure.

An averager publishes a sample of its values, the same ones as all others; the optimizer publishes sums of its
parameters (:mod:`manyhands.optim.run.drift`).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

NUM_VALUES = 16  # so many estimate a distance within a fifth or so, and keep a record small
MAX_SKETCH_BYTES = 4 * NUM_VALUES


def sketched_indices(numel: int, round_number: int) -> list[int]:
    """The indices of the values that all peers publish after a round; other ones for each round."""
    seed = hashlib.sha512(f"sketch after round {round_number}".encode()).digest()
    return [number % numel for number in struct.unpack(f"<{NUM_VALUES}I", seed)] if numel else []


def packed(values: Sequence[float]) -> bytes:
    """The numbers as little-endian float32; one that is too large for that becomes infinite."""
    largest = 3.4028234e38
    return struct.pack(f"<{len(values)}f", *(value if abs(value) <= largest else math.inf for value in values))


def unpacked(sketch: bytes) -> tuple[float, ...] | None:
    """The numbers of a sketch; None if there are none, or not all are finite."""
    if not sketch or len(sketch) % 4:
        return None
    row = struct.unpack(f"<{len(sketch) // 4}f", sketch)
    return row if all(map(math.isfinite, row)) else None


def disagreement_of(sketches: Sequence[bytes]) -> float | None:
    """The root mean square distance of the peers' numbers from their mean, as a fraction of the size of the mean.

    Sketches of another length than the first, and numbers that are not finite, are left out. None if fewer than two
    sketches are left, or their mean is 0.
    """
    rows = [row for sketch in sketches if len(sketch) == len(sketches[0]) and (row := unpacked(sketch)) is not None]
    means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    size_of_mean = math.hypot(*means)
    if len(rows) < 2 or not size_of_mean:
        return None
    distance = math.hypot(*(value - mean for row in rows for value, mean in zip(row, means, strict=True)))
    return distance / math.sqrt(len(rows)) / size_of_mean
