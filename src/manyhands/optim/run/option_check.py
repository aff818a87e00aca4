"""Notices peers that step with another learning rate, or other options, than this one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.manifest import OPTION_NAMES
from manyhands.optim.run.progress import MAX_OPTION_NAME, MAX_OPTION_NUMBERS, MAX_OPTIONS, Numbers
from manyhands.optim.run.progress_reader import ProgressReader

logger = logging.getLogger(__name__)

TOLERANCE = 1e-6
"""A schedule may differ in the last bits on machines of different kinds."""


class UnlikeOptions:
    """Compares the options of one peer with those that the others publish. Lives on the network thread.

    Args:
        reader: of what the others publish.
        standard: the options of each parameter group that the run has begun with, as in its manifest.
    """

    def __init__(self, reader: ProgressReader, standard: Sequence[Mapping[str, Any]]) -> None:
        self._reader = reader
        self._standard = numbers_of(standard)
        self._own: Numbers = {}
        self._basis: tuple[int, Position] | None = None
        self._told: set[PeerId] = set()

    def moved(self, options: Sequence[Mapping[str, Any]]) -> Numbers:
        """This peer steps with these options from now on; returns what it publishes: those that are not the standard's.

        These are few, as a schedule changes the learning rate, say.
        """
        own = numbers_of(options)
        names = [name for name, usual in self._standard.items() if own.get(name, usual) != usual]
        self._own = {name: own[name] for name in names[:MAX_OPTIONS]}
        return self._own

    def look(self, position: Position) -> None:
        """Log each peer that has other options at this peer's position, once."""
        observed = self._reader.observed()
        if self._basis == (self._reader.version, position):
            return
        self._basis = (self._reader.version, position)
        self._told &= observed.keys()
        found = [
            (peer_id, unlike)
            for peer_id, seen in observed.items()
            if peer_id not in self._told and seen.said == position and seen.record.options is not None
            and (unlike := self._difference(seen.record.options)) is not None
        ]  # fmt: skip
        if not found:
            return
        self._told.update(peer_id for peer_id, _ in found)
        peer_id, (name, here, there) = found[0]
        others = f" ({len(found) - 1} more peers differ as well)" if len(found) > 1 else ""
        logger.warning(
            "Peer %s has %s %.6g at step %d, this peer %.6g%s: their models part. Give all peers the same optimizer, "
            "and the same scheduler=", peer_id, OPTION_NAMES.get(name, name), there, position.step, here,
            others,
        )  # fmt: skip

    def _difference(self, other: Numbers) -> tuple[str, float, float] | None:
        """The first option that differs, with its value here and there."""
        for name, standard in self._standard.items():
            for here, there, usual in zip(
                self._own.get(name, standard), other.get(name, standard), standard, strict=False
            ):
                if not abs(here - there) <= TOLERANCE * max(abs(here), abs(there), abs(usual)):
                    return name, here, there
        return None


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> Numbers:
    """The numbers among the options by name, those of all groups one after the other; of many the first."""
    numbers: Numbers = {}
    for group in groups:
        for name, value in group.items():
            values = value if isinstance(value, (list, tuple)) else [value]
            if all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values):
                numbers.setdefault(name, []).extend(map(float, values))
    return {name: values[:MAX_OPTION_NUMBERS] for name, values in numbers.items() if len(name) <= MAX_OPTION_NAME}
