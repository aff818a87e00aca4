"""How far apart peers are: each publishes a few numbers that stand for all its values. Pure.

An averager publishes some of its values, the same ones as all others; the optimizer publishes sums of its parameters
(:mod:`manyhands.optim.run.signed_sums`).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

NUM_VALUES = 16
MAX_SKETCH_BYTES = 4 * NUM_VALUES
MIN_SKETCHES = 2


def sketched_indices(numel: int, round_number: int) -> list[int]:
    """Which values of a vector are told after a step; drawn anew for each."""
    seed = hashlib.sha512(f"sketch after round {round_number}".encode()).digest()
    drawn = struct.unpack(f"<{NUM_VALUES}I", seed)
    return [number % numel for number in drawn] if numel else []


def packed(values: Sequence[float]) -> bytes:
    """As little-endian float32; what is larger than that becomes infinite."""
    largest = 3.4028234e38
    return struct.pack(f"<{len(values)}f", *(value if abs(value) <= largest else math.inf for value in values))


def unpacked(sketch: bytes) -> tuple[float, ...] | None:
    """The numbers of a sketch; None if it has none, or not all are finite."""
    if not sketch or len(sketch) % 4:
        return None
    row = struct.unpack(f"<{len(sketch) // 4}f", sketch)
    return row if all(map(math.isfinite, row)) else None


def disagreement_of(sketches: Sequence[bytes]) -> float | None:
    """The root mean square distance of the peers' values from their mean, as a fraction of the latter's size.

    Sketches of another length than the first, and values that are not finite, are left out. None if there are fewer
    than two sketches, or the mean is 0.
    """
    if not sketches:
        return None
    rows = [row for sketch in sketches if len(sketch) == len(sketches[0]) and (row := unpacked(sketch)) is not None]
    if len(rows) < MIN_SKETCHES:
        return None
    means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    size_of_mean = math.hypot(*means)
    if not size_of_mean:
        return None
    distance = math.hypot(*(value - mean for row in rows for value, mean in zip(row, means, strict=True)))
    return distance / math.sqrt(len(rows)) / size_of_mean
