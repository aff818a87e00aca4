"""The other peers at one position, as one peer sees them: how far they are together, and whom it expects. Pure.

All times are those of the loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import Reckoning, busy_until
from manyhands.optim.run.progress_reader import Observed


class View:
    """What the records of the others say of one position. It does not change; another record makes another view.

    Args:
        observed: the records of all other peers.
        left_out: peers that do not count at the position: strangers.
        missing: peers at the position that came to no round since their last record. They count, but are not expected.

    Attributes:
        trainers: the records of those at the position that train.
        helpers: the records of the auxiliary peers there.
        samples: of all trainers together, as they have said.
        samples_per_second: likewise.
        hosts: the trainers that can be dialled, the one that leads first.
    """

    def __init__(
        self,
        observed: Mapping[PeerId, Observed],
        position: Position,
        left_out: Container[PeerId] = (),
        missing: Container[PeerId] = (),
    ) -> None:
        here = {peer_id: seen for peer_id, seen in observed.items()
                if seen.record.position == position and peer_id not in left_out}  # fmt: skip
        self.observed = observed
        self.trainers = {peer_id: seen for peer_id, seen in here.items() if not seen.record.is_auxiliary}
        self.helpers = {peer_id: seen for peer_id, seen in here.items() if seen.record.is_auxiliary}
        records = [seen.record for seen in self.trainers.values()]
        self.samples = sum([record.samples for record in records])
        self.samples_per_second = sum([record.samples_per_second for record in records])
        self.hosts = sorted([peer_id for peer_id, seen in self.trainers.items() if not seen.record.is_client])
        self.longest_batch_s = max([record.batch_s for record in records], default=0.0)
        self._awaited = {peer_id: seen for peer_id, seen in self.trainers.items() if peer_id not in missing}
        self._awaited_helpers = {peer_id: seen for peer_id, seen in self.helpers.items() if peer_id not in missing}

    @cached_property
    def reachable(self) -> Mapping[PeerId, Observed]:
        """Trainers and auxiliary peers that came to a round or were not needed in one."""
        return {**self._awaited, **self._awaited_helpers}

    def expected(self, *, with_helpers: bool) -> Mapping[PeerId, bool]:
        """The peers that should come to the next round, and whether each is in client mode.

        Args:
            with_helpers: auxiliary peers too, if no trainer can be dialled.
        """
        return self._expected_with_helpers if with_helpers and not self.hosts else self._expected_trainers

    @cached_property
    def _expected_trainers(self) -> Mapping[PeerId, bool]:
        return {peer_id: seen.record.is_client for peer_id, seen in self._awaited.items()}

    @cached_property
    def _expected_with_helpers(self) -> Mapping[PeerId, bool]:
        return {peer_id: seen.record.is_client for peer_id, seen in self.reachable.items()}

    # as time goes on

    def reckoned_samples(self, now: float) -> int:
        """What all trainers together must have by now.

        As long as none of them is reckoned on for longer than it may be, their samples together are a straight line in
        time. Each that reaches its limit leaves the line for a constant, so this costs the same however many they are.
        """
        num_at_limit = bisect_right(self._growth.limits, now)
        grown = self._growth.at_limit[num_at_limit]
        if num_at_limit == len(self._growth.limits):
            return grown
        since_s = now - self._growth.origin
        growing = self._growth.at_origin[num_at_limit] + self._growth.slopes[num_at_limit] * since_s
        return grown + max(int(growing), 0)

    @cached_property
    def _growth(self) -> _Growth:
        reckonings = sorted([seen.reckoning for seen in self.trainers.values()], key=_limit_of)
        origin = max([reckoning.since for reckoning in reckonings], default=0.0)
        return _Growth(
            origin,
            [_limit_of(reckoning) for reckoning in reckonings],
            list(accumulate([reckoning.at(_limit_of(reckoning)) for reckoning in reckonings], initial=0)),
            _sums_of_rest([_samples_at(reckoning, origin) for reckoning in reckonings]),
            _sums_of_rest([reckoning.samples_per_second for reckoning in reckonings]),
        )

    def arriving_samples(self, now: float) -> int:
        """What the trainers that are not missing bring if each finishes its batch and begins no other one."""
        return sum(seen.reckoning.with_batch_at(now, seen.record.batch_s) for seen in self._awaited.values())

    def busy_until(self, instant: float) -> float:
        """When the last of them must have finished the batch that it computes at an instant."""
        ends = [busy_until(seen.record, seen.reckoning, instant) for seen in self._awaited.values()]
        return max(ends, default=instant)


class _Growth(NamedTuple):
    """How the samples of several peers grow, ordered by how long each peer is reckoned on.

    Attributes:
        origin: when the last of them said something: so the sums stay small.
        limits: of each, when it is not reckoned on any more.
        at_limit: what the first N have together at their limits, for N from 0 to all.
        at_origin: the samples that all but the first N have together at the origin.
        slopes: how fast these grow, in samples per second.
    """

    origin: float
    limits: Sequence[float]
    at_limit: Sequence[int]
    at_origin: Sequence[float]
    slopes: Sequence[float]


def _limit_of(reckoning: Reckoning) -> float:
    return reckoning.since + reckoning.limit_s


def _samples_at(reckoning: Reckoning, origin: float) -> float:
    return reckoning.samples + reckoning.samples_per_second * (reckoning.counted_s_ago + origin - reckoning.since)


def _sums_of_rest(values: Sequence[float]) -> Sequence[float]:
    """Of all but the first N, for N from 0 to all; those that are gone leave no rounding error behind."""
    return list(accumulate(reversed(values), initial=0.0))[::-1]
