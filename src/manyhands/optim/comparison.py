"""How far apart the peers of a run are, by the few numbers that each publishes of its parameters after a step. Pure.

All make a step with the same bits, so parameters differ by rounding at most, unless something changes them behind the
optimizer's back: a user's code, say, or memory that fails. What the majority holds is right. A majority is more than
half of all peers that are known, not of those that have told something: so a minority that publishes what it likes
changes nothing for the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from manyhands.averaging.sketch import MAX_SKETCH_BYTES, MIN_SKETCHES, unpacked
from manyhands.base.identity import PeerId
from manyhands.optim.risk import KNOWN_OPTIMIZERS

BOUND = 5e-4
"""Of float32 parameters, with an optimizer that is known: 300 times what rounding does in 10,000 steps
(``benchmarks/rounding_drift.py``), and less than one cast to bfloat16 and back does.
"""
HALF_BOUND = 0.5
"""Where the optimizer itself has parameters in half precision: what rounding loses there is as large as the updates."""
UNKNOWN_BOUND = 0.05
"""With any other optimizer than those of :data:`manyhands.optim.risk.KNOWN_OPTIMIZERS`, of whose rounding nothing is
known: Muon, say, computes its updates in bfloat16.
"""
HALF = frozenset({torch.float16, torch.bfloat16})
MAX_NAMED = 3


def bound_of(dtypes: Iterable[torch.dtype], optimizer: type[torch.optim.Optimizer]) -> float:
    """Peers that are further apart than this, as a fraction of the parameters' size, differ by more than rounding."""
    if not HALF.isdisjoint(dtypes):
        return HALF_BOUND
    return BOUND if optimizer in KNOWN_OPTIMIZERS else UNKNOWN_BOUND


@dataclass(frozen=True)
class Comparison:
    """Where peers are that have told of their parameters at one position.

    Attributes:
        apart: how far each is from what the majority holds, as a fraction of its size; without a majority, from the
            peer that compares.
        majority: those who hold the same; empty if these are not more than half of all.
        num_peers: all that are known.
    """

    apart: Mapping[PeerId, float]
    majority: frozenset[PeerId]
    num_peers: int

    @property
    def is_complete(self) -> bool:
        """All have told."""
        return len(self.apart) == self.num_peers


def compared(
    sketches: Mapping[PeerId, bytes], own_id: PeerId, num_peers: int, bound: float, own_size: float = 0.0
) -> Comparison | None:
    """Compare what peers have told; None if too few have.

    The majority holds about the median of each number: a minority cannot move that beyond what the majority has told.

    Args:
        sketches: by peer; those of another length have told nothing, those that are not finite are infinitely far off.
        own_id: the peer that compares.
        num_peers: all that are known.
        bound: within it of the median, peers hold the same.
        own_size: of the own parameters. The sums alone may be small by chance, where all parameters are about the same.
    """
    told = {peer_id: sketch for peer_id, sketch in sketches.items() if len(sketch) == MAX_SKETCH_BYTES}
    rows = {peer_id: row for peer_id, sketch in told.items() if (row := unpacked(sketch)) is not None}
    if not rows or len(told) < MIN_SKETCHES or 2 * len(told) <= num_peers:
        return None
    unlike = dict.fromkeys(told.keys() - rows.keys(), math.inf)
    median = [statistics.median(column) for column in zip(*rows.values(), strict=True)]
    apart = _apart(rows, median, own_size) | unlike
    majority = frozenset(peer_id for peer_id, distance in apart.items() if distance <= bound)
    if 2 * len(majority) > num_peers:
        return Comparison(apart, majority, num_peers)
    if own_id not in rows:
        return None
    return Comparison(_apart(rows, rows[own_id], own_size) | unlike, frozenset(), num_peers)


def _apart(rows: Mapping[PeerId, Sequence[float]], reference: Sequence[float], own_size: float) -> dict[PeerId, float]:
    size = math.hypot(*reference)  # the larger one: the own parameters may be gone
    if math.isfinite(own_size):
        size = max(size, own_size)
    distances = {peer_id: math.dist(row, reference) for peer_id, row in rows.items()}
    return {peer_id: distance / size if size else math.inf if distance else 0.0
            for peer_id, distance in distances.items()}  # fmt: skip


def describe_others(apart: Mapping[PeerId, float], comparison: Comparison, bound: float) -> str:
    """The words for other peers that hold other parameters."""
    peers = sorted(apart)
    names = ", ".join(peers[:MAX_NAMED]) + (f" and {len(peers) - MAX_NAMED} more" if len(peers) > MAX_NAMED else "")
    who = f"peer{'s' if len(peers) > 1 else ''} {names}"
    far = _distance(max(apart.values()), "up to ")
    if comparison.majority:
        return (
            f"The parameters of {who} are {far} from those that {len(comparison.majority)} of "
            f"{comparison.num_peers} peers hold (rounding stays below {bound:.2%})"
        )
    return (
        f"The parameters of {who} are {far} from this peer's (rounding stays below "
        f"{bound:.2%}), and of {comparison.num_peers} peers no majority holds the same: nobody can tell whose are right"
    )


def describe_own(distance: float, comparison: Comparison, bound: float) -> str:
    """The words for this peer, when the others hold other parameters."""
    return (
        f"The parameters of this peer are {_distance(distance)} from those that "
        f"{len(comparison.majority)} of {comparison.num_peers} peers hold (rounding stays below {bound:.2%})"
    )


def _distance(distance: float, limit: str = "") -> str:
    if math.isinf(distance):
        return "infinitely far"
    share = f"{distance:.2%}" if distance < 10 else f"{distance:.2g} times"
    return f"{limit}{share} of their size away"
