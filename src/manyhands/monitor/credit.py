"""Adds up the samples that each peer has contributed to a run, from committed global steps alone. Pure.

Each trainer publishes the lists of its last committed steps (:mod:`manyhands.optim.metrics`). The rules:

* The *leading branch* ends at the position that most trainers are at, or the furthest of several such positions. A
  trainer that is one step behind a position counts for it too, if at least two peers have published the step to it.
  The earlier steps of the branch are found backwards, as each published step names the lineage before it.
* A list is believed if more than half of the contributors that it names have published it, and it is of the leading
  branch. Of several lists of a step, the one with the most publishers comes first. In a grid of groups, further lists
  are believed if they name no peer of those before.
* No peer is credited on its own word alone: a second peer, which need not be a contributor, must have published the
  list. The exception is a step that a peer made alone, which leads to a lineage of its own. Such a step is believed
  only while the run is on that branch.
* Each peer is credited once for each step.

Credit follows the leading branch. If the run restarts from an earlier checkpoint, or two parts of a split run meet, the
steps of the branch that was left are taken back, and those that replace them are credited.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from manyhands.averaging.messages import Position, short_id
from manyhands.base.identity import PeerId
from manyhands.monitor.picture import LeaderboardRow
from manyhands.optim.metrics import SHARE_BYTES, AccountRecord, CommittedStep, packed, short_lineage, unpacked

PATIENCE_S = 60.0
"""Seconds after which a run that has gone back is taken to stay there: twice the lifetime of a progress record."""
MAX_KEPT_SHARES = 4_000_000
"""Most entries in all kept lists together. The steps of kept lists can be taken back; those before them are final."""


class CreditedStep(msgspec.Struct, frozen=True, gc=False):
    """One believed global step.

    Attributes:
        after: the lineage that it led to, shortened.
        num_signers: number of contributors that have published its lists; 0 if another monitor has sent it.
        shares: short ids and samples, as packed by :func:`manyhands.optim.metrics.packed`.
    """

    step: int
    after: bytes
    num_signers: int
    shares: bytes


class Total(NamedTuple):
    """The credit of one peer: ``samples`` in ``rounds`` global steps."""

    samples: int
    rounds: int


class Changes(msgspec.Struct):
    """The changes of one look.

    Attributes:
        put: steps that are credited now. They replace what was credited for the same steps.
        removed: numbers of the steps that were taken back.
        settled: steps that are final now.
    """

    put: list[CreditedStep] = []
    removed: list[int] = []
    settled: list[CreditedStep] = []


class Credit:
    """Adds up the believed steps of a run.

    Args:
        steps: known from before, in any order.
        settled: the totals of final steps, by short id.
    """

    def __init__(self, steps: Iterable[CreditedStep] = (), settled: Mapping[bytes, Total] | None = None) -> None:
        self._steps: dict[int, CreditedStep] = {}
        self._samples: Counter[bytes] = Counter()
        self._rounds: Counter[bytes] = Counter()
        self._seen: set[int] = set()  # steps that this monitor has seen itself since it started
        self._seen_rounds: Counter[bytes] = Counter()
        self._num_shares = 0
        self._final_step = -1  # this step and those before it are in the totals, and their lists are not kept
        self._leading: tuple[int, bytes] | None = None
        self._behind_since = math.inf
        self.version = 0
        """Grows with each change."""
        for peer, total in (settled or {}).items():
            self._samples[peer], self._rounds[peer] = total
        for step in steps:
            self._put(step, Changes(), is_seen=False)
        if settled:
            self._final_step = max(self._final_step, min(self._steps, default=0) - 1)

    # what is known

    @property
    def newest_step(self) -> int:
        """The newest credited step; -1 without one."""
        return max(self._steps, default=-1)

    @property
    def num_samples(self) -> int:
        """The credited samples of all peers."""
        return sum(self._samples.values())

    @property
    def totals(self) -> dict[bytes, Total]:
        """The credit of each peer, by short id."""
        return {peer: Total(samples, self._rounds[peer]) for peer, samples in self._samples.items() if samples > 0}

    def total_of(self, peer_id: PeerId) -> Total:
        """The credit of a peer."""
        peer = short_id(peer_id)
        return Total(self._samples[peer], self._rounds[peer])

    @property
    def num_seen_steps(self) -> int:
        """Number of steps that were credited since the monitor started."""
        return len(self._seen)

    def seen_rounds_of(self, peer_id: PeerId) -> int:
        """Number of these steps that have samples of a peer."""
        return self._seen_rounds[short_id(peer_id)]

    def shares_of(self, step: int) -> dict[bytes, int]:
        """The samples of each contributor to a step, by short id; empty if the step is not credited."""
        return unpacked(self._steps[step].shares) if step in self._steps else {}

    # news

    def look(
        self, accounts: Mapping[PeerId, AccountRecord], positions: Mapping[PeerId, Position], now: float
    ) -> Changes:
        """Credit the steps that are believed now.

        Args:
            accounts: the last account of each peer that has trained lately.
            positions: of the peers that train now.
            now: seconds of a monotonic clock.
        """
        changes = Changes()
        published = _Published(accounts)
        leading = published.leading(positions) if positions else self._leading_without_trainers(published)
        if leading is None:
            return changes
        self._leading = leading
        branch = published.branch_to(*leading)
        self._take_back_forks(branch, changes)
        self._take_back_later(leading[0], now, changes)
        for step, after in sorted(branch.items()):
            known = self._steps.get(step)
            if step <= self._final_step or (
                known is not None and published.num_signers(step, after) <= known.num_signers
            ):
                continue
            believed = published.believed(step, after)
            if believed is not None and (known is None or believed.num_signers > known.num_signers):
                self._put(believed, changes)
        return changes

    def add_told(self, steps: Iterable[CreditedStep]) -> Changes:
        """Credit the steps that another monitor has sent, if they are before the newest one that this one knows."""
        changes = Changes()
        newest = self.newest_step
        for step in steps:
            if self._final_step < step.step < newest and step.step not in self._steps and _is_list(step.shares):
                self._put(msgspec.structs.replace(step, num_signers=0), changes, is_seen=False)
        return changes

    def _leading_without_trainers(self, published: _Published) -> tuple[int, bytes] | None:
        """The last leading position, moved along the steps that most of the peers there have made since."""
        leading = self._leading
        while leading is not None and (onwards := published.onwards(*leading)) is not None:
            leading = onwards
        return leading

    def _take_back_forks(self, branch: Mapping[int, bytes], changes: Changes) -> None:
        """Take back the steps that are known to be on another branch than the leading one."""
        forked = [step for step, after in branch.items() if step in self._steps and self._steps[step].after != after]
        if not forked:
            return
        first = min(forked)
        for step in [step for step in self._steps if step >= first and self._steps[step].after != branch.get(step)]:
            self._remove(step, changes)

    def _take_back_later(self, leading_step: int, now: float, changes: Changes) -> None:
        """Take back the steps that the run no longer has, once it has been behind them for a while."""
        if self.newest_step <= leading_step:
            self._behind_since = math.inf
            return
        self._behind_since = min(self._behind_since, now)
        if now - self._behind_since >= PATIENCE_S:
            for step in [step for step in self._steps if step > leading_step]:
                self._remove(step, changes)

    def _put(self, step: CreditedStep, changes: Changes, *, is_seen: bool = True) -> None:
        self._remove(step.step, Changes())
        self._steps[step.step] = step
        shares = unpacked(step.shares)
        for peer, samples in shares.items():
            self._samples[peer] += samples
            self._rounds[peer] += 1
        if is_seen:
            self._seen.add(step.step)
            self._seen_rounds.update(shares.keys())
        self._num_shares += len(step.shares) // SHARE_BYTES
        self.version += 1
        changes.put.append(step)
        while self._num_shares > MAX_KEPT_SHARES and len(self._steps) > 1:
            self._final_step = min(self._steps)
            oldest = self._steps.pop(self._final_step)
            self._num_shares -= len(oldest.shares) // SHARE_BYTES
            changes.settled.append(oldest)

    def _remove(self, step: int, changes: Changes) -> None:
        if (known := self._steps.pop(step, None)) is None:
            return
        shares = unpacked(known.shares)
        for peer, samples in shares.items():
            self._samples[peer] -= samples
            self._rounds[peer] -= 1
        if step in self._seen:
            self._seen.remove(step)
            self._seen_rounds.subtract(shares.keys())
        self._num_shares -= len(known.shares) // SHARE_BYTES
        self.version += 1
        changes.removed.append(step)


class _List(NamedTuple):
    """A list of a step that some peers have published.

    Attributes:
        num_signers: number of contributors that have published it.
        num_publishers: number of all peers that have published it, also of those without samples in the step.
        is_proven: whether the lineage proves that the only contributor made the step alone.
    """

    shares: Mapping[bytes, int]
    num_signers: int
    num_publishers: int
    is_proven: bool
    is_grid: bool
    digest: bytes

    @property
    def is_believable(self) -> bool:
        is_majority = 2 * self.num_signers > len(self.shares)
        return self.is_proven or (is_majority and self.num_publishers > 1)

    @property
    def order(self) -> tuple[object, ...]:
        return (not self.is_proven, -self.num_signers, -self.num_publishers, -len(self.shares), self.digest)


class _Published:
    """The steps in all accounts, by number and lineage."""

    def __init__(self, accounts: Mapping[PeerId, AccountRecord]) -> None:
        self._made: defaultdict[tuple[int, bytes], list[tuple[PeerId, CommittedStep]]] = defaultdict(list)
        for peer_id, account in accounts.items():
            for made in account.steps:
                self._made[made.step, made.after].append((peer_id, made))
        self._next: defaultdict[tuple[int, bytes], Counter[bytes]] = defaultdict(Counter)
        self._before: dict[tuple[int, bytes], bytes] = {}
        for (step, after), signed in self._made.items():
            before = Counter(short_lineage(made.before) for _, made in signed)
            self._before[step, after] = most = _most(before)
            self._next[step - 1, most][after] += len(signed)

    def leading(self, positions: Mapping[PeerId, Position]) -> tuple[int, bytes]:
        """The position that most trainers are at, or one step behind if several peers have made that step."""
        there = Counter((position.step, short_lineage(position.lineage)) for position in positions.values())

        def support(place: tuple[int, bytes]) -> tuple[int, int, bytes]:
            before = self._before.get(place)
            is_shared = len(self._made.get(place, ())) > 1  # otherwise one peer alone may have made it
            earlier = there[place[0] - 1, before] if is_shared and before is not None else 0
            return (there[place] + earlier, *place)

        return max(there, key=support)

    def onwards(self, step: int, lineage: bytes) -> tuple[int, bytes] | None:
        """The next position, if more than half of the peers that made this step have made it."""
        if not (nexts := self._next.get((step, lineage))):
            return None
        after = _most(nexts)
        is_majority = 2 * nexts[after] > len(self._made.get((step, lineage), ()))
        return (step + 1, after) if is_majority else None

    def branch_to(self, step: int, lineage: bytes) -> dict[int, bytes]:
        """The steps that led to a position, each with the lineage after it, as far back as they are published."""
        branch = {}
        while (before := self._before.get((step, lineage))) is not None:
            branch[step] = lineage
            step -= 1
            lineage = before
        return branch

    def num_signers(self, step: int, after: bytes) -> int:
        """The largest number of signers that a believed list of a step can have."""
        return len(self._made[step, after])

    def believed(self, step: int, after: bytes) -> CreditedStep | None:
        """The believed lists of a step, combined; None if none is believed.

        The first list by ``order`` is considered, and in a grid also each later one that shares no peer with those
        before it.
        """
        lists = sorted(self._lists(step, after), key=lambda found: found.order)
        if lists:
            lists = [found for found in lists if found.is_grid] if lists[0].is_grid else lists[:1]
        num_signers = 0
        shares: dict[bytes, int] = {}
        for found in lists:
            if found.is_believable and shares.keys().isdisjoint(found.shares):
                num_signers += found.num_signers
                shares |= found.shares
        return CreditedStep(step, after, num_signers, packed(shares)) if num_signers else None

    def _lists(self, step: int, after: bytes) -> Iterable[_List]:
        by_digest: defaultdict[bytes, list[tuple[PeerId, CommittedStep]]] = defaultdict(list)
        for peer_id, made in self._made[step, after]:
            by_digest[made.digest].append((peer_id, made))
        for digest, signed in by_digest.items():
            listed = next((made for _, made in signed if made.shares and made.has_true_digest()), None)
            if listed is None:
                continue
            shares = unpacked(listed.shares)
            signers = [(peer_id, made) for peer_id, made in signed if short_id(peer_id) in shares]
            is_proven = len(shares) == 1 and any(made.is_proven_alone(peer_id) for peer_id, made in signers)
            yield _List(shares, len(signers), len(signed), is_proven, listed.is_grid, digest)


def _most(counts: Mapping[bytes, int]) -> bytes:
    """The most frequent key; the lowest of several."""
    return min(counts, key=lambda name: (-counts[name], name))


def _is_list(shares: bytes) -> bool:
    return len(shares) % SHARE_BYTES == 0 and len(unpacked(shares)) == len(shares) // SHARE_BYTES


def leaders_of(totals: Mapping[bytes, Total], names: Mapping[bytes, tuple[str, str]]) -> list[LeaderboardRow]:
    """The leaderboard: peers of one name are one row.

    Args:
        totals: by short id.
        names: peer id and name (empty without one) of each short id that is known.
    """
    rows: dict[str, tuple[str, list[str], int]] = {}
    for peer, total in totals.items():
        peer_id, name = names.get(peer, (peer.hex(), ""))
        key = f"name {name}" if name else f"peer {peer_id}"
        _, peer_ids, samples = rows.get(key, (name, [], 0))
        rows[key] = (name, [*peer_ids, peer_id], samples + total.samples)
    ordered = sorted(rows.values(), key=lambda row: (-row[2], row[0], row[1]))
    return _ranked(ordered, sum(total.samples for total in totals.values()))


def _ranked(rows: Sequence[tuple[str, list[str], int]], num_samples: int) -> list[LeaderboardRow]:
    leaders: list[LeaderboardRow] = []
    for number, (name, peer_ids, samples) in enumerate(rows, start=1):
        rank = leaders[-1].rank if leaders and leaders[-1].samples == samples else number
        share = samples / num_samples if num_samples else 0.0
        leaders.append(LeaderboardRow(rank=rank, name=name, peer_ids=sorted(peer_ids), samples=samples, share=share))
    return leaders
