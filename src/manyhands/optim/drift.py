"""Notices when peers of a run come to hold other parameters, and when this one has to load those of the majority.

A peer that is too far off loads the state of the run. If it is soon far off again, loading does not help: something
changes its parameters all the time. So it says so, goes on, and tries again much later. Without a majority nobody knows
whose parameters are right; then it is only told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from manyhands.averaging.messages import Position
from manyhands.averaging.sketch import disagreement_of
from manyhands.base.identity import PeerId
from manyhands.optim.comparison import Comparison, compared, describe_others, describe_own
from manyhands.optim.progress_reader import ProgressReader
from manyhands.optim.signed_sums import Sketch

logger = logging.getLogger(__name__)

PATIENCE_STEPS = 100
"""Global steps from one load to the next; each time twice as many."""
MAX_DOUBLINGS = 20
QUIET_STEPS = 10
"""Whoever has held the same as the others for so many global steps is told of again when it no longer does."""
KEPT_STEPS = 4
"""What others publish is read late; it is compared with what this peer held at the same position, of its last ones."""


class Drift:
    """Compares one peer's parameters with those of the others. Lives on the network thread.

    Args:
        reader: of what the others publish.
        bound: see :func:`manyhands.optim.comparison.bound_of`.
    """

    def __init__(self, reader: ProgressReader, own_id: PeerId, bound: float) -> None:
        self._reader = reader
        self._own_id = own_id
        self._bound = bound
        self._held: dict[Position, Sketch] = {}  # by this peer, the newest last
        self._is_in_grid = False
        self._comparison: Comparison | None = None
        self._basis: tuple[int, Position, Sketch] | None = None  # of the comparison
        self._far: dict[PeerId, int] = {}  # others who are known to be far off, and when last (global step)
        self._is_loading = False  # or tries to
        self._is_said = False  # that this peer is far off and goes on nevertheless
        self._tried_at: Position | None = None
        self._next_load = 0  # global step
        self._num_loads = 0

    # what this peer holds

    def moved(self, position: Position, sketch: Sketch, *, is_in_grid: bool) -> None:
        """This peer has made a step.

        Args:
            is_in_grid: its groups may differ by more than rounding; nobody is judged.
        """
        if is_in_grid or self._is_in_grid:
            self._held.clear()
            self._comparison = None
        self._is_in_grid = is_in_grid
        self._held[position] = sketch
        while len(self._held) > KEPT_STEPS:
            del self._held[next(iter(self._held))]

    def loaded(self, position: Position) -> None:
        """This peer has loaded a state; what it held before is gone.

        It is judged from its next step on. What others have told is of right after their step, before code beside the
        optimizer has changed it on all peers alike; a state has been changed by that.
        """
        self._held.clear()
        self._comparison = None
        if not self._is_loading:
            return
        self._next_load = position.step + PATIENCE_STEPS * 2 ** min(self._num_loads, MAX_DOUBLINGS)
        self._num_loads += 1
        self._is_loading = self._is_said = False

    # what the others hold

    def disagreement(self) -> float | None:
        """How far apart the parameters were after this peer's last step, as a fraction of their size; or None.

        Of this peer and the majority, as one of the others may tell what it likes; of all in a grid, or without one.
        """
        if not self._held:
            return None
        position, own = next(reversed(self._held.items()))
        said = self._said_at(position)
        comparison = None if self._is_in_grid else self._compare_at(position)
        peers = comparison.majority & said.keys() if comparison is not None and comparison.majority else said.keys()
        return disagreement_of([own.sums, *(said[peer_id] for peer_id in peers)])

    def should_load(self) -> bool:
        """Whether this peer must load the state of the majority. Tells the log what is new."""
        if not self._compare_anew() or (comparison := self._comparison) is None:
            return False
        position = next(reversed(self._held))
        self._tell_of_others(comparison, position.step)
        if not self._is_far(comparison):
            self._is_loading = self._is_loading and not comparison.majority
            return False
        if position == self._tried_at:
            return False
        what = describe_own(comparison.apart[self._own_id], comparison, self._bound)
        if position.step < self._next_load or not self._donors(comparison):
            self._go_on(what, position.step)
            return False
        if not self._is_loading:
            logger.warning("%s: it loads their state", what)
        self._is_loading, self._tried_at = True, position
        return True

    def ordered(self, donors: Iterable[PeerId], position: Position) -> list[PeerId]:
        """Those who hold what the majority holds first, then those of whom it is not known."""
        comparison = self._compare_at(position) or self._comparison
        if comparison is None or not comparison.majority:
            return list(donors)
        majority, apart = comparison.majority, comparison.apart
        return sorted(donors, key=lambda peer_id: 0 if peer_id in majority else 1 if peer_id not in apart else 2)

    def _is_far(self, comparison: Comparison) -> bool:
        return bool(comparison.majority) and self._own_id in comparison.apart.keys() - comparison.majority

    def _donors(self, comparison: Comparison) -> list[PeerId]:
        records = self._reader.records()
        return [peer_id for peer_id in comparison.majority if peer_id in records and not records[peer_id].is_client]

    def _go_on(self, what: str, step: int) -> None:
        if self._is_said:
            return
        self._is_said = True
        if step < self._next_load:
            logger.warning("%s, although it has loaded their state: something here changes them again (code beside the "
                           "optimizer, another precision, bad memory), or the state was wrong. It goes on with its own",
                           what)  # fmt: skip
        else:
            logger.warning("%s, and nobody can dial these to load their state: it goes on with its own", what)

    def _tell_of_others(self, comparison: Comparison, step: int) -> None:
        if not comparison.majority and not comparison.is_complete:
            return
        limit = self._bound if comparison.majority else 2 * self._bound  # from the median, and from one another
        far = {peer_id: apart for peer_id, apart in comparison.apart.items() if apart > limit}
        far.pop(self._own_id, None)
        here = self._reader.observed()
        self._far = {peer_id: at for peer_id, at in self._far.items() if step - at < QUIET_STEPS and peer_id in here}
        new = {peer_id: apart for peer_id, apart in far.items() if peer_id not in self._far}
        self._far.update(dict.fromkeys(far, step))
        if new:
            logger.warning("%s", describe_others(new, comparison, self._bound))

    def _compare_anew(self) -> bool:
        """At the last position that enough have told of; returns whether there was news."""
        if self._is_in_grid or not self._held:
            return False
        self._reader.observed()  # forgets what has expired
        basis = (self._reader.version, *next(reversed(self._held.items())))
        if basis == self._basis:
            return False
        self._basis = basis
        comparisons = map(self._compare_at, reversed(self._held))
        self._comparison = next((each for each in comparisons if each is not None), None)
        return True

    def _compare_at(self, position: Position) -> Comparison | None:
        sketches = self._said_at(position)
        own = self._held.get(position, Sketch())
        if own.sums:
            sketches[self._own_id] = own.sums
        num_others = len(self._reader.observed().keys() - self._reader.strangers().keys())
        return compared(sketches, self._own_id, num_others + 1, self._bound, own.size)

    def _said_at(self, position: Position) -> dict[PeerId, bytes]:
        strangers = self._reader.strangers()
        return {
            peer_id: seen.record.sketch
            for peer_id, seen in self._reader.observed().items()
            if seen.said == position and seen.record.sketch_step == position.step and peer_id not in strangers
        }
