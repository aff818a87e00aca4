"""The other peers at one position, summed up once and reckoned on from there. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import ProgressRecord, Reckoning


class Crowd:
    """What the peers at one position have said, and what they must have by now.

    As long as none of them is reckoned on for longer than it may be, their samples together are a straight line in
    time. Each that reaches its limit leaves the line for a constant, so asking costs the same however many they are.

    Args:
        peers: the record of each, and how it is reckoned on from there.

    Attributes:
        num_peers: how many they are.
        samples: of all together, as they have said.
        samples_per_second: likewise.
        longest_batch_s: of those that have said how long a batch takes.
        hosts: those that can be dialled, the one that leads first.
    """

    def __init__(self, peers: Mapping[PeerId, tuple[ProgressRecord, Reckoning]]) -> None:
        records = [record for record, _ in peers.values()]
        self.num_peers = len(records)
        self.samples = sum([record.samples for record in records])
        self.samples_per_second = sum([record.samples_per_second for record in records])
        self.longest_batch_s = max([record.batch_s for record in records], default=0.0)
        self.hosts = sorted([peer_id for peer_id, (record, _) in peers.items() if not record.is_client])
        self._origin = max([reckoning.since for _, reckoning in peers.values()], default=0.0)
        self._growing = sorted([reckoning for _, reckoning in peers.values()], key=_limit_of, reverse=True)
        self._grown = 0  # samples of those that have reached their limits
        self._offset = sum([self._offset_of(reckoning) for reckoning in self._growing])
        self._slope = sum([reckoning.samples_per_second for reckoning in self._growing])

    def reckoned_samples(self, now: float) -> int:
        """What they must have by now, together; ``now`` never goes back."""
        growing = self._growing
        while growing and _limit_of(growing[-1]) <= now:
            reckoning = growing.pop()
            self._grown += reckoning.at(now)
            self._offset -= self._offset_of(reckoning)
            self._slope -= reckoning.samples_per_second
        if not growing:
            return self._grown
        return self._grown + max(int(self._offset + self._slope * (now - self._origin)), 0)

    def _offset_of(self, reckoning: Reckoning) -> float:
        """Its samples at the origin, which is when the last of them said something: so the sums stay small."""
        since_s = self._origin - reckoning.since
        return reckoning.samples + reckoning.samples_per_second * (reckoning.counted_s_ago + since_s)


def _limit_of(reckoning: Reckoning) -> float:
    return reckoning.since + reckoning.limit_s
