"""Detects a peer whose parameters differ from the majority's, names it in the log, and has it reload once.

All peers make a step from the same bits, so their parameters differ by rounding at most, unless something else changes
them: a user's code, say, or faulty memory. After each step a peer publishes 16 sums of its parameters, with random
signs. On average, the square of such a sum is the square of the vector's length, and the square of the difference of
two peers' sums is that of their distance (Alon, Matias and Szegedy, "The space complexity of approximating the
frequency moments", 1996). So a change of any parameter changes the sums by its size.

The majority is right. It is more than half of the peers of earlier rounds, not only of those that published: a minority
changes nothing for the others by what it publishes. For a newcomer, the peers count that decide which branch it loads.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from manyhands.averaging.grid.seats import NO_SEAT
from manyhands.averaging.messages import Position
from manyhands.averaging.sketch import MAX_SKETCH_BYTES, NUM_VALUES, disagreement_of, packed, unpacked
from manyhands.averaging.state.content import State
from manyhands.base.identity import PeerId
from manyhands.optim.lamb import Lamb
from manyhands.optim.manifest import RunManifest
from manyhands.optim.run.branches import Judges
from manyhands.optim.run.progress import Observed, ProgressReader

logger = logging.getLogger(__name__)

ROW = 1024
"""Values with a sign each, the same in all rows; each row as a whole has one more sign."""
SUMMED_NUMEL = 256 * ROW
"""Values added up together: they stay in a processor's cache."""

BOUND = 5e-4
"""For float32 parameters with a known optimizer: 300 times the rounding error of 10,000 steps
(``benchmarks/rounding_drift.py``), and less than one cast to bfloat16 and back changes."""
HALF_BOUND = 0.5
"""For an optimizer with half-precision parameters of its own: their rounding errors are as large as the updates."""
UNKNOWN_BOUND = 0.05
"""For other optimizers, whose rounding is unknown: Muon, say, computes its updates in bfloat16."""
CAUSES = "another schedule, code beside the optimizer, another precision, bad memory"
KNOWN_OPTIMIZERS = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, Lamb})
"""Optimizers with measured rounding errors and a finite update of moderate values; subclasses are not included."""


def bound_of(dtypes: Iterable[torch.dtype], optimizer: type[torch.optim.Optimizer]) -> float:
    """The largest distance between peers, as a fraction of the parameters' size, that rounding explains."""
    if not {torch.float16, torch.bfloat16}.isdisjoint(dtypes):
        return HALF_BOUND
    return BOUND if optimizer in KNOWN_OPTIMIZERS else UNKNOWN_BOUND


class Sketch(NamedTuple):
    """A peer's parameters after a step: the sums, as published or empty, and the norm of all parameters."""

    sums: bytes = b""
    size: float = 0.0


@torch.no_grad()
def sketch_of(tensors: Sequence[torch.Tensor], step: int) -> Sketch:
    """The signed sums and the norm of the parameters after a global step, with the signs of docs/reference/wire.md.

    Each value is read once, on its device, and each device is waited for once.
    """
    num_rows = sum(-(-tensor.numel() // ROW) for tensor in tensors)
    drawn = hashlib.shake_256(f"sketch after step {step}".encode()).digest(-(-(ROW + num_rows) // 8))
    bits = torch.frombuffer(bytearray(drawn), dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    of_columns, of_rows = torch.split(bits.flatten()[: ROW + num_rows].float() * 2 - 1, [ROW, num_rows])
    on_devices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}  # signs of rows; sums of columns, and norm
    first_row = 0
    for tensor in tensors:
        if (device := tensor.device) not in on_devices:
            on_devices[device] = (of_rows.to(device), torch.zeros(ROW + 1, device=device))
        signs, sums = on_devices[device]
        for piece in torch.split(tensor.detach().reshape(-1), SUMMED_NUMEL):
            first_row += _add(sums, piece.float(), signs[first_row:])
    columns, size = torch.zeros(ROW), 0.0
    for _, sums in on_devices.values():
        on_host = sums.cpu()
        columns += on_host[:ROW]
        size = math.hypot(size, on_host[ROW].item())
    return Sketch(packed((columns * of_columns).view(-1, NUM_VALUES).sum(0).tolist()), size)


def sketch_of_state(state: State, manifest: RunManifest) -> Sketch:
    """The sketch of the parameters and extra tensors in a state, as its donor would publish it."""
    frozen, specs = set(manifest.frozen), [*manifest.tensors, *manifest.extra_tensors]
    named = zip(specs, state.tensors, strict=False)  # the statistics of the optimizer follow
    tensors = [tensor for spec, tensor in named if spec.name not in frozen and tensor.is_floating_point()]
    return sketch_of(tensors, state.header.position.step)


def _add(sums: torch.Tensor, piece: torch.Tensor, signs: torch.Tensor) -> int:
    """Add rows to the sums of the columns, each with its sign, and to the norm; returns the number of rows."""
    sums[ROW] = torch.hypot(sums[ROW], torch.linalg.vector_norm(piece))
    num_full, num_left = divmod(piece.numel(), ROW)
    if num_full:
        sums[:ROW] += (piece[: num_full * ROW].view(num_full, ROW) * signs[:num_full, None]).sum(0)
    if num_left:
        sums[:num_left] += piece[num_full * ROW :] * signs[num_full]
    return num_full + (num_left > 0)


def distances(sketches: Mapping[PeerId, bytes], num_peers: int, bound: float, own_size: float) -> dict[PeerId, float]:
    """Each peer's distance from the majority, as a fraction of its size; empty without a majority.

    The majority holds about the median of each sum, which a minority cannot move beyond what the majority published.
    Peers within ``bound`` of the median are the majority if they are more than half of all ``num_peers``. Sums that are
    not finite are infinitely far off; a sketch of another length is left out.

    Args:
        own_size: norm of the own parameters: the sums alone may be small by chance, where all parameters are alike.
    """
    told = {peer_id: unpacked(sketch) for peer_id, sketch in sketches.items() if len(sketch) == MAX_SKETCH_BYTES}
    rows = [row for row in told.values() if row is not None]
    if 2 * len(rows) <= num_peers:
        return {}
    median = [statistics.median(column) for column in zip(*rows, strict=True)]
    size = max(math.hypot(*median), own_size if own_size < math.inf else 0.0) or sys.float_info.min  # all zero
    apart = {peer_id: math.inf if row is None else math.dist(row, median) / size for peer_id, row in told.items()}
    return apart if 2 * sum(distance <= bound for distance in apart.values()) > num_peers else {}


class Drift:
    """Compares this peer's parameters with the others' after its last step. Lives on the network thread."""

    def __init__(self, reader: ProgressReader, own_id: PeerId, bound: float, judges: Callable[[], Judges]) -> None:
        self._reader = reader  # of the others' progress records, which have the sketches
        self._judges = judges  # the other peers that count
        self._own_id = own_id
        self._bound = bound
        self._position: Position | None = None  # after the last step; None once a state was loaded
        self._sketch = Sketch()
        self._is_in_grid = False
        self._compared: tuple[int, Position] | None = None  # at which records, and where
        self._named: set[PeerId] = set()
        self._is_reloading = self._has_reloaded = False
        self._has_warned = False  # that there is no majority

    def moved(self, position: Position, sketch: Sketch, *, is_in_grid: bool) -> None:
        """This peer has made a step. In a grid groups differ by more than rounding, so no peer is judged."""
        self._position, self._sketch, self._is_in_grid = position, sketch, is_in_grid

    def loaded(self) -> None:
        """This peer has loaded a state, and is judged again from its next step on.

        Peers publish right after a step; users' own code, the same on all peers, may have changed the state since.
        """
        self._position = None
        if self._is_reloading:
            self._is_reloading, self._has_reloaded = False, True
            self._named.discard(self._own_id)  # it is named once more if this did not help

    def disagreement(self) -> float | None:
        """Distance of this peer from the majority after its last step, as a fraction of their size.

        In a grid, or without a majority, the distance of all peers. None if unknown.
        """
        if self._position is None:
            return None
        sketches, apart = self._published_at(self._position), self._distances_at(self._position)
        if apart and not self._is_in_grid:
            sketches = {peer: sums for peer, sums in sketches.items() if apart.get(peer, math.inf) <= self._bound}
        return disagreement_of([self._sketch.sums, *sketches.values()])

    def compare(self) -> bool:
        """Compare the peers after each step and each news, and name those that differ, once.

        Returns whether this peer must load the majority's state now: at most once for the same records.
        """
        here = self._position
        if here is None or self._is_in_grid or self._compared == (basis := (self._reader.version, here)):
            return False
        self._compared = basis
        if not (apart := self._distances_at(here)):
            self._warn_without_majority(here)
        differing = {peer_id for peer_id, distance in apart.items() if distance > self._bound}
        for peer_id in sorted(differing - self._named):
            self._name(peer_id, f"{100 * apart[peer_id]:.3g}% (rounding: {100 * self._bound:g}%)")
        self._named = self._named & (self._reader.observed().keys() | {self._own_id}) | differing
        if self._own_id in apart:
            self._is_reloading = self._own_id in differing and not self._has_reloaded
        return self._is_reloading and self._own_id in differing

    def _name(self, peer_id: PeerId, distance: str) -> None:
        what = f"differ from those of the majority by {distance}"
        if peer_id != self._own_id:
            logger.warning("The parameters of peer %s %s; that peer should load the majority's state", peer_id, what)
        elif not self._has_reloaded:
            logger.warning("The parameters of this peer %s: it loads the majority's state", what)
        else:
            logger.warning(
                "The parameters of this peer %s, although it has loaded the majority's state: something here "
                "changes them again (%s). It goes on with its own; remove the cause and restart it", what, CAUSES,
            )  # fmt: skip

    def _warn_without_majority(self, here: Position) -> None:
        """Warn once if the peers differ and no majority tells which is right, as with two peers."""
        num_others = self._num_others()
        apart = self.disagreement()  # of two peers half of what is between them
        if self._has_warned or apart is None or apart <= self._bound or len(self._published_at(here)) < num_others:
            return
        self._has_warned = True
        logger.warning(
            "The parameters of the %d peers are %.3g%% from their mean (rounding: %g%%), and no majority holds the "
            "same: nobody can tell whose are right. Look for what one of them has alone (%s)",
            num_others + 1, 100 * apart, 100 * self._bound, CAUSES,
        )  # fmt: skip

    def contradicts(self, position: Position, sketch: Sketch) -> bool:
        """Whether the majority published other sums for a position than those of a state that is said to be of it."""
        counted = self._counted()
        if any(counted[peer_id].record.seat != NO_SEAT for peer_id in self._published_at(position)):
            return False  # in a grid groups differ by more than rounding
        return self._distances_at(position, sketch).get(self._own_id, 0.0) > self._bound

    def ordered(self, donors: Iterable[PeerId], position: Position) -> list[PeerId]:
        """Order donors: first those that hold the majority's parameters, then the unknown ones; equal ones together."""
        apart, told = self._distances_at(position), self._published_at(position)
        sizes = Counter(told.values())  # of machines that round alike

        def rank(peer_id: PeerId) -> tuple[float, int]:
            is_apart = apart[peer_id] > self._bound if peer_id in apart else 0.5
            return is_apart, -sizes[told.get(peer_id, b"")]

        return sorted(donors, key=rank)

    def _distances_at(self, position: Position, own: Sketch | None = None) -> dict[PeerId, float]:
        if own is None:
            own = self._sketch if position == self._position else Sketch()
        sketches = self._published_at(position)
        if own.sums:
            sketches[self._own_id] = own.sums
        return distances(sketches, self._num_others() + 1, self._bound, own.size)

    def _counted(self) -> dict[PeerId, Observed]:
        observed = self._reader.observed()
        return {peer_id: observed[peer_id] for peer_id in self._judges().peers if peer_id in observed}

    def _num_others(self) -> int:
        """The other peers of which more than half decide, also those whose parameters do not count yet."""
        return len(self._counted()) + self._judges().num_open

    def _published_at(self, position: Position) -> dict[PeerId, bytes]:
        return {
            peer_id: seen.record.sketch
            for peer_id, seen in self._counted().items()
            if seen.record.position == position and seen.record.sketch_step == position.step
        }
