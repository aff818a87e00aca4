"""Detects peers whose parameters differ from those of the others, names them, and has this peer reload if it is one.

All peers make a step with the same bits, so parameters differ by rounding at most, unless something changes them behind
the optimizer's back: a user's code, say, or memory that fails. What the majority holds is right. A majority is more
than half of all peers that are known, not of those that have published something: a minority that publishes what it
likes changes nothing for the others.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from manyhands.averaging.messages import Position
from manyhands.averaging.sketch import MAX_SKETCH_BYTES, MIN_SKETCHES, disagreement_of, unpacked
from manyhands.base.identity import PeerId
from manyhands.optim.run.overflow_risk import KNOWN_OPTIMIZERS
from manyhands.optim.run.progress_reader import ProgressReader
from manyhands.optim.run.signed_sums import Sketch

logger = logging.getLogger(__name__)

BOUND = 5e-4
"""Of float32 parameters, with an optimizer that is known: 300 times what rounding does in 10,000 steps
(``benchmarks/rounding_drift.py``), and less than one cast to bfloat16 and back does.
"""
HALF_BOUND = 0.5
"""Where the optimizer itself has parameters in half precision: what rounding loses there is as large as the updates."""
UNKNOWN_BOUND = 0.05
"""With any other optimizer than those of :data:`manyhands.optim.run.overflow_risk.KNOWN_OPTIMIZERS`, of whose rounding
nothing is known: Muon, say, computes its updates in bfloat16.
"""
HALF = frozenset({torch.float16, torch.bfloat16})
RELOAD_PERIOD_STEPS = 100
"""Global steps from one reload to the next: when the first did not help, something changes the parameters again."""
KEPT_STEPS = 4
"""Records of others are read late; they are compared with what this peer held at the same position."""
MAX_NAMED = 3


def bound_of(dtypes: Iterable[torch.dtype], optimizer: type[torch.optim.Optimizer]) -> float:
    """Peers that are further apart than this, as a fraction of the parameters' size, differ by more than rounding."""
    if not HALF.isdisjoint(dtypes):
        return HALF_BOUND
    return BOUND if optimizer in KNOWN_OPTIMIZERS else UNKNOWN_BOUND


class Comparison(NamedTuple):
    """How far apart peers are at one position.

    Attributes:
        apart: distance of each from what the majority holds, as a fraction of its size; without a majority, from the
            peer that compares.
        majority: those who hold the same; empty if these are not more than half of all.
        num_peers: all that are known.
    """

    apart: Mapping[PeerId, float]
    majority: frozenset[PeerId]
    num_peers: int


def compared(
    sketches: Mapping[PeerId, bytes], own_id: PeerId, num_peers: int, bound: float, own_size: float = 0.0
) -> Comparison | None:
    """Compare published sketches; None if too few peers have published one.

    The majority holds about the median of each number: a minority cannot move that beyond what the majority published.

    Args:
        sketches: by peer; those of another length are left out, those that are not finite are infinitely far off.
        own_id: the peer that compares.
        num_peers: all that are known.
        bound: within it of the median, peers hold the same.
        own_size: norm of the own parameters. The sums alone may be small by chance, where all parameters are alike.
    """
    told = {peer_id: sketch for peer_id, sketch in sketches.items() if len(sketch) == MAX_SKETCH_BYTES}
    rows = {peer_id: row for peer_id, sketch in told.items() if (row := unpacked(sketch)) is not None}
    if not rows or len(told) < MIN_SKETCHES or 2 * len(told) <= num_peers:
        return None
    unlike = dict.fromkeys(told.keys() - rows.keys(), math.inf)
    median = [statistics.median(column) for column in zip(*rows.values(), strict=True)]
    apart = _distances(rows, median, own_size) | unlike
    majority = frozenset(peer_id for peer_id, distance in apart.items() if distance <= bound)
    if 2 * len(majority) > num_peers:
        return Comparison(apart, majority, num_peers)
    if own_id not in rows:
        return None
    return Comparison(_distances(rows, rows[own_id], own_size) | unlike, frozenset(), num_peers)


def _distances(rows: Mapping[PeerId, Sequence[float]], other: Sequence[float], own_size: float) -> dict[PeerId, float]:
    size = max(math.hypot(*other), own_size if math.isfinite(own_size) else 0.0)
    distances = {peer_id: math.dist(row, other) for peer_id, row in rows.items()}
    return {peer_id: distance / size if size else math.inf if distance else 0.0
            for peer_id, distance in distances.items()}  # fmt: skip


class Drift:
    """Compares one peer's parameters with those of the others. Lives on the network thread.

    Args:
        reader: of the others' progress records, which have the sketches.
        bound: see :func:`bound_of`.
    """

    def __init__(self, reader: ProgressReader, own_id: PeerId, bound: float) -> None:
        self._reader = reader
        self._own_id = own_id
        self._bound = bound
        self._held: dict[Position, Sketch] = {}  # by this peer, the newest last
        self._is_in_grid = False
        self._basis: tuple[int, Position] | None = None  # of the last comparison: records, and own position
        self._named: set[PeerId] = set()  # others, in the log
        self._tried_at: Position | None = None
        self._is_reloading = False  # or tries to
        self._next_reload = 0  # global step
        self._is_said = False  # that this peer is far off and goes on nevertheless

    def moved(self, position: Position, sketch: Sketch, *, is_in_grid: bool) -> None:
        """This peer has made a step.

        Args:
            is_in_grid: its groups may differ by more than rounding; nobody is judged.
        """
        if is_in_grid or self._is_in_grid:
            self._held.clear()
        self._is_in_grid = is_in_grid
        self._held[position] = sketch
        while len(self._held) > KEPT_STEPS:
            del self._held[next(iter(self._held))]

    def loaded(self, position: Position) -> None:
        """This peer has loaded a state; what it held before is gone.

        It is judged from its next step on. Peers publish right after a step; a state has been changed since by code
        beside the optimizer that all peers have alike.
        """
        self._held.clear()
        if self._is_reloading:
            self._is_reloading = self._is_said = False
            self._next_reload = position.step + RELOAD_PERIOD_STEPS

    def disagreement(self) -> float | None:
        """How far apart the parameters were after this peer's last step, as a fraction of their size; or None.

        Of this peer and the majority, as one of the others may publish what it likes; of all in a grid, or without one.
        """
        if not self._held:
            return None
        position, own = next(reversed(self._held.items()))
        sketches = self._published_at(position)
        comparison = None if self._is_in_grid else self._compare_at(position)
        if comparison is not None and comparison.majority:
            sketches = {peer_id: sketches[peer_id] for peer_id in comparison.majority & sketches.keys()}
        return disagreement_of([own.sums, *sketches.values()])

    def should_load(self) -> bool:
        """Whether this peer must load the state of the majority now. Logs what is new."""
        comparison = self._compare_anew()
        if comparison is None:
            return False
        self._name_others(comparison)
        if not comparison.majority or self._own_id not in comparison.apart.keys() - comparison.majority:
            return False
        position = next(reversed(self._held))
        if position == self._tried_at:
            return False
        records = self._reader.records()
        can_load = any(peer_id in records and not records[peer_id].is_client for peer_id in comparison.majority)
        what = f"The parameters of this peer are {self._distance(comparison, [self._own_id])}"
        if position.step < self._next_reload:
            self._warn_once(
                f"{what}, although it has loaded their state: something here changes them again (code beside the "
                "optimizer, another precision, bad memory), or the state was wrong. It goes on with its own"
            )
            return False
        if not can_load:
            self._warn_once(f"{what}, and nobody can dial these to load their state: it goes on with its own")
            return False
        if not self._is_reloading:
            logger.warning("%s: it loads their state", what)
        self._is_reloading, self._tried_at = True, position
        return True

    def ordered(self, donors: Iterable[PeerId], position: Position) -> list[PeerId]:
        """Those who hold what the majority holds first, then those of whom it is not known."""
        comparison = self._compare_at(position)
        if comparison is None or not comparison.majority:
            return list(donors)
        majority, apart = comparison.majority, comparison.apart
        return sorted(donors, key=lambda peer_id: 0 if peer_id in majority else 1 if peer_id not in apart else 2)

    def _name_others(self, comparison: Comparison) -> None:
        """Each once, as long as it is in the run; without a majority only when all have published."""
        if not comparison.majority and len(comparison.apart) < comparison.num_peers:
            return
        limit = self._bound if comparison.majority else 2 * self._bound  # from the median, and from one another
        self._named &= self._reader.observed().keys()
        far = {peer_id for peer_id, apart in comparison.apart.items() if apart > limit}
        if new := sorted(far - self._named - {self._own_id}):
            self._named.update(new)
            names = ", ".join(new[:MAX_NAMED]) + (f" and {len(new) - MAX_NAMED} more" if len(new) > MAX_NAMED else "")
            plural = "s" if len(new) > 1 else ""
            logger.warning("The parameters of peer%s %s are %s", plural, names, self._distance(comparison, new))

    def _distance(self, comparison: Comparison, peers: Sequence[PeerId]) -> str:
        """How far peers are from the majority, or from this peer, in words."""
        furthest = max(comparison.apart[peer_id] for peer_id in peers)
        share = f"{furthest:.2%}" if furthest < 10 else f"{furthest:.2g} times"
        far = "infinitely far" if math.isinf(furthest) else f"{'up to ' * (len(peers) > 1)}{share} of their size away"
        if comparison.majority:
            return (f"{far} from those that {len(comparison.majority)} of {comparison.num_peers} peers hold (rounding "
                    f"stays below {self._bound:.2%})")  # fmt: skip
        return (f"{far} from this peer's (rounding stays below {self._bound:.2%}), and of {comparison.num_peers} peers "
                "no majority holds the same: nobody can tell whose are right")  # fmt: skip

    def _warn_once(self, message: str) -> None:
        if not self._is_said:
            self._is_said = True
            logger.warning("%s", message)

    def _compare_anew(self) -> Comparison | None:
        """At the last position of which enough have published; None also when there is no news."""
        if self._is_in_grid or not self._held:
            return None
        self._reader.observed()  # forgets what has expired
        basis = (self._reader.version, next(reversed(self._held)))
        if basis == self._basis:
            return None
        self._basis = basis
        return next((found for found in map(self._compare_at, reversed(self._held)) if found is not None), None)

    def _compare_at(self, position: Position) -> Comparison | None:
        sketches, own = self._published_at(position), self._held.get(position, Sketch())
        if own.sums:
            sketches[self._own_id] = own.sums
        num_others = len(self._reader.observed().keys() - self._reader.strangers().keys())
        return compared(sketches, self._own_id, num_others + 1, self._bound, own.size)

    def _published_at(self, position: Position) -> dict[PeerId, bytes]:
        strangers = self._reader.strangers()
        return {
            peer_id: seen.record.sketch
            for peer_id, seen in self._reader.observed().items()
            if seen.said == position and seen.record.sketch_step == position.step and peer_id not in strangers
        }
