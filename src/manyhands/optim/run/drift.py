"""Detects a peer whose parameters differ from the majority's, names it in the log, and has it reload once.

All peers make a step with the same bits, so their parameters differ at most by rounding, unless a user's code or faulty
memory, say, changes them. After each step a peer publishes a *sketch*: 16 sums of its parameters with random signs. The
squared difference of two peers' sums is on average the squared distance of their parameters (Alon, Matias and Szegedy,
"The space complexity of approximating the frequency moments", 1996).

The majority is right. It is more than half of the electorate (:meth:`.belief.Belief.judges`): of the voters, say, or
for a newcomer of its initial peers. Those that have published no sketch count too, so a minority changes nothing for
the others. A peer that differs again after it has reloaded goes on with its own parameters, and says so: something on
its machine changes them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.sketch import MAX_SKETCH_BYTES, NUM_VALUES, disagreement_of, packed, unpacked
from manyhands.averaging.state.content import State
from manyhands.base.identity import PeerId
from manyhands.optim.lamb import Lamb
from manyhands.optim.manifest import RunManifest
from manyhands.optim.run.progress import ProgressReader

logger = logging.getLogger(__name__)

ROW = 1024
"""Number of values in a row of the sketch. The sign of a value is the product of two random signs: that of its column,
which is the same in all rows, and that of its row."""
SUMMED_NUMEL = 256 * ROW
"""Number of values that are added up together: so few that they stay in a processor's cache."""

BOUND = 5e-4
"""The bound for float32 parameters with a known optimizer. It is 300 times the rounding error of 10,000 steps
(``benchmarks/rounding_drift.py``), and less than the change by one cast to bfloat16 and back."""
HALF_BOUND = 0.5
"""The bound for an optimizer that steps on half-precision parameters, whose rounding errors are as large as updates."""
UNKNOWN_BOUND = 0.05
"""The bound for other optimizers, whose rounding is unknown: Muon, say, computes its updates in bfloat16."""
MAX_APART = 3.0
"""Limit of the distance between a mean of parameters and a peer's own, in a grid, in multiples of the usual distance
of two peers. That mean lies among the parameters of its group, and a distance of two sketches is off by a third."""
CAUSES = "another schedule, code beside the optimizer, another precision, bad memory"
KNOWN_OPTIMIZERS = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, Lamb})
"""Optimizers whose rounding errors were measured, and whose updates are finite where all inputs are moderate.

Subclasses are not included."""


def bound_of(dtypes: Iterable[torch.dtype], optimizer: type[torch.optim.Optimizer]) -> float:
    """The largest distance between peers that rounding explains, as a fraction of the parameters' norm."""
    if not {torch.float16, torch.bfloat16}.isdisjoint(dtypes):
        return HALF_BOUND
    return BOUND if optimizer in KNOWN_OPTIMIZERS else UNKNOWN_BOUND


class Sketch(NamedTuple):
    """A summary of a peer's parameters after a step, by which peers compare them."""

    sums: bytes = b""  # as published; empty if there are none
    size: float = 0.0  # the norm of all parameters


@torch.no_grad()
def sketch_of(tensors: Sequence[torch.Tensor], step: int) -> Sketch:
    """The sketch of the parameters after a global step, with the random signs of docs/reference/wire.md.

    Each value is read once, on its device, and each device is synchronized with once.
    """
    num_rows = sum(-(-tensor.numel() // ROW) for tensor in tensors)
    drawn = hashlib.shake_256(f"sketch after step {step}".encode()).digest(-(-(ROW + num_rows) // 8))
    bits = torch.frombuffer(bytearray(drawn), dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    of_columns, of_rows = torch.split(bits.flatten()[: ROW + num_rows].float() * 2 - 1, [ROW, num_rows])
    signs_on = {device: of_rows.to(device) for device in {tensor.device for tensor in tensors}}
    sums_on = {device: torch.zeros(ROW + 1, device=device) for device in signs_on}  # one for each column, and the norm
    first_row = 0
    for tensor in tensors:
        signs, sums = signs_on[tensor.device], sums_on[tensor.device]
        for piece in torch.split(tensor.detach().reshape(-1), SUMMED_NUMEL):
            missing, values = -piece.numel() % ROW, piece.float()
            rows = (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, ROW)
            sums[:ROW] += (rows * signs[first_row : first_row + len(rows), None]).sum(0)
            sums[ROW] = torch.hypot(sums[ROW], torch.linalg.vector_norm(rows))
            first_row += len(rows)
    on_host = [torch.zeros(ROW + 1), *(sums.cpu() for sums in sums_on.values())]
    columns = sum(sums[:ROW] for sums in on_host) * of_columns
    return Sketch(packed(columns.view(-1, NUM_VALUES).sum(0).tolist()), math.hypot(*(sums[ROW] for sums in on_host)))


def sketch_of_state(state: State, manifest: RunManifest) -> Sketch:
    """The sketch that a peer would publish which has just reached this state by a step."""
    frozen = set(manifest.frozen)
    specs = [*manifest.tensors, *manifest.extra_tensors]
    named = zip(specs, state.tensors, strict=False)  # the statistics of the optimizer follow
    tensors = [tensor for spec, tensor in named if spec.name not in frozen and tensor.is_floating_point()]
    return sketch_of(tensors, state.header.position.step)


def distances(
    sketches: Mapping[PeerId, bytes],
    num_peers: int,
    bound: float,
    own_size: float,
    measured: Mapping[PeerId, bytes] | None = None,
) -> dict[PeerId, float]:
    """Each peer's distance from the majority, as a fraction of the parameters' norm; empty without a majority.

    The reference is the median of each sum: a minority cannot move it beyond what the majority has published. Peers
    within ``bound`` of it are the majority if they are more than half of all ``num_peers``. Sums that are not finite
    are infinitely far off; a sketch of another length is left out.

    Args:
        sketches: the published sums of each peer that has any.
        num_peers: number of peers that count, those without a sketch included.
        own_size: norm of this peer's parameters. It is a lower bound for the norm of all: where all parameters are
            alike, the sums may be small by chance.
        measured: further sums whose distance is returned, but that do not count towards the median or the majority.
    """
    told = {peer_id: unpacked(sketch) for peer_id, sketch in sketches.items() if len(sketch) == MAX_SKETCH_BYTES}
    rows = [row for row in told.values() if row is not None]
    if 2 * len(rows) <= num_peers:
        return {}
    median = [statistics.median(column) for column in zip(*rows, strict=True)]
    size = max(math.hypot(*median), own_size if own_size < math.inf else 0.0)
    size = size or sys.float_info.min  # if all parameters are 0
    apart = {peer_id: math.inf if row is None else math.dist(row, median) / size for peer_id, row in told.items()}
    if 2 * sum(distance <= bound for distance in apart.values()) <= num_peers:
        return {}
    more = {peer_id: unpacked(sketch) for peer_id, sketch in (measured or {}).items()}
    apart.update({one: math.inf if row is None else math.dist(row, median) / size for one, row in more.items()})
    return apart


@dataclass(eq=False)
class Drift:
    """Compares this peer's parameters with the others' after its last step. Lives on the network thread.

    Args:
        bound: of :func:`bound_of`.
        judges: returns the other peers that count; see :meth:`.belief.Belief.judges`.
    """

    reader: ProgressReader
    own_id: PeerId
    bound: float
    judges: Callable[[], Collection[PeerId]]
    _position: Position | None = field(default=None, init=False)  # after the last step; None once a state was loaded
    _sketch: Sketch = field(default_factory=Sketch, init=False)
    _is_in_grid: bool = field(default=False, init=False)
    # of the last comparison: the version of the records, and this peer's position
    _compared: tuple[int, Position] | None = field(default=None, init=False)
    _must_reload: bool = field(default=False, init=False)  # the result of that comparison
    _named: set[PeerId] = field(default_factory=set, init=False)  # peers that the log has named
    _has_reloaded: bool = field(default=False, init=False)
    _has_warned: bool = field(default=False, init=False)  # of differences without a majority

    def moved(self, position: Position, sketch: Sketch, *, is_in_grid: bool) -> None:
        """Take in that this peer has made a step.

        In a grid the groups' parameters differ by more than rounding, so after such a step no peer is judged.
        """
        self._position, self._sketch, self._is_in_grid = position, sketch, is_in_grid

    def loaded(self) -> None:
        """Take in that this peer has loaded a state; it is compared again from its next step on.

        Until then its parameters may differ from all sketches: peers publish right after a step, and users' own code,
        the same on all peers, may have changed the parameters since.
        """
        self._position = None
        if self.own_id in self._named:
            self._has_reloaded = True
            self._named.discard(self.own_id)  # the log names it again if it still differs then

    def disagreement(self) -> float | None:
        """How far apart the parameters of this peer and the majority are after this peer's last step.

        It is the root mean square of their distances from their mean, as a fraction of the norm of that. In a grid, or
        without a majority, it is that of all peers. None if unknown.
        """
        if self._position is None:
            return None
        told, _ = self._told_at(self._position)
        apart = self._distances_at(self._position)
        if apart and not self._is_in_grid:
            told = {peer_id: record for peer_id, record in told.items() if apart.get(peer_id, math.inf) <= self.bound}
        return disagreement_of([self._sketch.sums, *(record.sketch for record in told.values())])

    def compare(self) -> bool:
        """Whether this peer must load the majority's state now.

        Compares the peers again if this peer has made a step or a record has changed, and logs each peer that differs
        once.
        """
        here = self._position
        if here is None or self._is_in_grid:
            return False
        if self._compared != (basis := (self.reader.version, here)):
            self._compared, self._must_reload = basis, self._compare_at(here)
        return self._must_reload

    def tries_reload(self) -> None:
        """Take in that this peer tries to load the majority's state; it tries again only after a record has changed."""
        self._must_reload = False

    def is_too_far(self, distance: float, size: float) -> bool:
        """Whether a mean of a group's parameters, in a grid, is farther from this peer's own than honest peers make it.

        All peers at its position count, as a grid has no roster.

        Args:
            distance: of the mean from this peer's own parameters.
            size: norm of these.
        """
        here, own, usual = self._position, unpacked(self._sketch.sums), 0.0
        if here is not None and own is not None:
            records = [seen.record for seen in self.reader.observed().values() if seen.record.position == here]
            sketches = [record.sketch for record in records if record.sketch_step == here.step]
            rows = [unpacked(sketch) for sketch in sketches if len(sketch) == MAX_SKETCH_BYTES]
            usual = statistics.median([math.inf if row is None else math.dist(own, row) for row in rows] or [0.0])
        return not distance <= max(self.bound * size, MAX_APART * usual)

    def _compare_at(self, here: Position) -> bool:
        if not (apart := self._distances_at(here)):
            self._warn_without_majority(here)
        differing = {peer_id for peer_id, distance in apart.items() if distance > self.bound}
        for peer_id in sorted(differing - self._named):
            who = f"peer {peer_id}"
            then = "; that peer should load the majority's state"
            if peer_id == self.own_id:
                who = "this peer"
                then = ": it loads the majority's state"
                if self._has_reloaded:
                    then = (
                        ", although it has loaded the majority's state: something on this machine changes them again "
                        f"({CAUSES}). It goes on with its own parameters; remove the cause and restart it"
                    )
            logger.warning("The parameters of %s differ from those of the majority by %.3g%% (rounding: %g%%)%s",
                           who, 100 * apart[peer_id], 100 * self.bound, then)  # fmt: skip
        self._named |= differing
        return self.own_id in differing and not self._has_reloaded

    def _warn_without_majority(self, here: Position) -> None:
        """Warn once if the peers differ and there is no majority, as with two peers."""
        told, num_others = self._told_at(here)
        apart = self.disagreement()  # from the mean: of two peers, half of their distance
        if self._has_warned or apart is None or apart <= self.bound or len(told) < num_others:
            return
        self._has_warned = True
        logger.warning(
            "The parameters of the %d peers are %.3g%% from their mean (rounding: %g%%), and no majority of them has "
            "the same parameters, so it is unknown which are right. Look for a cause on one of the machines (%s)",
            num_others + 1, 100 * apart, 100 * self.bound, CAUSES,
        )  # fmt: skip

    def contradicts(self, position: Position, sketch: Sketch) -> bool:
        """Whether a state claims a position for which the majority published another sketch.

        Args:
            position: of the state.
            sketch: of the state.
        """
        if any(record.seat.layout.sides for record in self._told_at(position)[0].values()):
            return False  # in a grid the groups' parameters differ by more than rounding
        told, num_judges = self._told_at(position)
        sketches = {peer_id: record.sketch for peer_id, record in told.items()}
        apart = distances(sketches, num_judges, self.bound, sketch.size, {self.own_id: sketch.sums})
        return apart.get(self.own_id, 0.0) > self.bound

    def ordered(self, donors: Iterable[PeerId], position: Position) -> list[PeerId]:
        """Order donors: those with the majority's parameters, those without a sketch, and then those that differ."""
        apart = self._distances_at(position)

        def rank(donor: PeerId) -> int:
            if donor not in apart:
                return 1
            return 2 if apart[donor] > self.bound else 0

        return sorted(donors, key=rank)

    def _distances_at(self, position: Position) -> dict[PeerId, float]:
        own = self._sketch if position == self._position else Sketch()
        told, num_others = self._told_at(position)
        sketches = {peer_id: record.sketch for peer_id, record in told.items()}
        if own.sums:
            sketches[self.own_id] = own.sums
        return distances(sketches, num_others + bool(own.sums), self.bound, own.size)

    def _told_at(self, position: Position) -> tuple[dict[PeerId, PeerRecord], int]:
        """The others' records with a sketch at a position, and the number of others that count."""
        observed = self.reader.observed()
        counted = {peer_id: observed[peer_id] for peer_id in self.judges() if peer_id in observed}
        told = {
            peer_id: seen.record
            for peer_id, seen in counted.items()
            if seen.record.position == position and seen.record.sketch_step == position.step
        }
        return told, len(counted)
