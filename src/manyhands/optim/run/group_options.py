"""Checks the options of the parameter groups, such as the learning rate: only the run's schedule may change them.

Each peer checks its own before a step, and compares them with those that others publish.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.averaging.messages import Position
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId
from manyhands.optim.manifest import OPTION_NAMES
from manyhands.optim.run.progress import MAX_OPTION_NAME, MAX_OPTION_NUMBERS, MAX_OPTIONS, Numbers
from manyhands.optim.run.progress_reader import ProgressReader
from manyhands.optim.state.state import hyper_parameters_of

logger = logging.getLogger(__name__)

Options = list[dict[str, Any]]

TOLERANCE = 1e-6
"""A schedule may differ in the last bits on machines of different kinds."""
_NOT_USED = {"param_names", "initial_lr"}  # in a step; torch's schedulers write the latter when they are made


def options_of(groups: Sequence[Mapping[str, Any]]) -> Options:
    """A copy of the options that an optimizer steps with."""
    used = [{name: value for name, value in group.items() if name not in _NOT_USED} for group in groups]
    return hyper_parameters_of(used)


def check_unchanged(before: Options, groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that the groups' options are unchanged.

    Raises:
        ConfigError: an option changed; says which, and what to write instead.
    """
    if len(groups) != len(before):
        raise ConfigError(
            f"there were {len(before)} parameter groups and are {len(groups)} now; give all groups to the wrapped "
            "optimizer at first"
        )
    for index, (options, group) in enumerate(zip(before, groups, strict=True)):
        for name, old in options.items():
            new = group.get(name, old)
            if isinstance(new, tuple):
                new = list(new)
            if type(new) is not type(old):  # a learning rate in a tensor, say
                new = options_of([{name: new}])[0].get(name, old)
            if new != old:
                where = f" of parameter group {index}" if len(before) > 1 else ""
                raise ConfigError(
                    f"the option {name!r}{where} was {old!r} and is {new!r} now: something other than scheduler= has "
                    "changed it. Peers call step() unequally often, so each would train with a value of its own. Give "
                    "the schedule to the optimizer, which steps it once for each global step on all peers, and call no "
                    "scheduler.step() in the loop:\n"
                    "    optimizer = manyhands.Optimizer(..., "
                    "scheduler=lambda inner: CosineAnnealingLR(inner, T_max=1000))\n"
                    "A transformers.Trainer makes a schedule of its own, but for this line before trainer.train():\n"
                    "    trainer.add_callback(manyhands.training.transformers.CollaborativeCallback(trainer))"
                )


class UnlikeOptions:
    """Names peers that step with another learning rate, or other options, than this one. Lives on the network thread.

    Args:
        reader: of the others' records.
        standard: the options of each parameter group at the beginning of the run, as in its manifest.
    """

    def __init__(self, reader: ProgressReader, standard: Sequence[Mapping[str, Any]]) -> None:
        self._reader = reader
        self._standard = numbers_of(standard)
        self._own: Numbers = {}
        self._named: set[PeerId] = set()
        self._looked_at: tuple[int, Position] | None = None  # at which records, and where

    def moved(self, options: Sequence[Mapping[str, Any]]) -> Numbers:
        """Set this peer's current options; returns those changed by a schedule, for publication."""
        own = numbers_of(options)
        names = [name for name, usual in self._standard.items() if own.get(name, usual) != usual]
        self._own = {name: own[name] for name in names[:MAX_OPTIONS]}
        return self._own

    def look(self, position: Position) -> None:
        """Log the peers with other options at this peer's position, once each."""
        if self._looked_at == (basis := (self._reader.version, position)):
            return
        self._looked_at, observed = basis, self._reader.observed()
        self._named &= observed.keys()
        found = {
            peer_id: difference
            for peer_id, seen in observed.items()
            if peer_id not in self._named and seen.said == position and seen.record.options is not None
            and (difference := self._difference(seen.record.options))
        }  # fmt: skip
        if not found:
            return
        self._named |= found.keys()
        peer_id, (name, here, there) = next(iter(found.items()))
        others = f" ({len(found) - 1} more peers differ as well)" if len(found) > 1 else ""
        logger.warning(
            "Peer %s has %s %.6g at step %d, this peer %.6g%s: their models part. Give all peers the same optimizer, "
            "and the same scheduler=", peer_id, OPTION_NAMES.get(name, name), there, position.step, here, others,
        )  # fmt: skip

    def _difference(self, other: Numbers) -> tuple[str, float, float] | None:
        """The first option that differs, with its value here and there."""
        for name, standard in self._standard.items():
            pairs = zip(self._own.get(name, standard), other.get(name, standard), standard, strict=False)
            for here, there, usual in pairs:
                if not abs(here - there) <= TOLERANCE * max(abs(here), abs(there), abs(usual)):
                    return name, here, there
        return None


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> Numbers:
    """The numeric options by name, those of all groups in order; the first of many."""
    numbers: Numbers = {}
    for group in groups:
        for name, value in group.items():
            values = value if isinstance(value, (list, tuple)) else [value]
            if all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values):
                numbers.setdefault(name, []).extend(map(float, values))
    return {name: values[:MAX_OPTION_NUMBERS] for name, values in numbers.items() if len(name) <= MAX_OPTION_NAME}
