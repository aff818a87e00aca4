"""Who belongs together in a grid: those whom the rounds of the last steps connect."""

from __future__ import annotations

import hashlib
import random

import msgspec
import pytest

from manyhands.averaging.grid.seats import Layout, group_of, layout_for, next_cell
from manyhands.averaging.messages import NUM_RECENT_STEPS, ROUND_NAME_BYTES, RecentRounds
from manyhands.base.identity import PeerId
from manyhands.optim.run.partition_detector import PartitionDetector

SIZES = [(12, 4), (36, 6), (256, 16)]


class Run:
    """Peers that step in a grid; a group of which only one is there has no round, and who has none loads the state."""

    def __init__(self, num_peers: int, max_group_size: int) -> None:
        self.layout: Layout = layout_for(num_peers, max_group_size)
        self.peers = [PeerId(f"{number:03}") for number in range(num_peers)]
        self.detectors = {peer_id: PartitionDetector() for peer_id in self.peers}
        self._cells = {peer_id: number for number, peer_id in enumerate(self.peers)}
        self._number = 0

    def step(self, *parts: list[PeerId], p_fail: float = 0.0, rng: random.Random | None = None) -> None:
        """Those of each part step among themselves; each round of a peer fails with a probability."""
        fingerprints: dict[PeerId, list[bytes]] = {peer_id: [] for peer_id in self.peers}
        for _ in range(self.layout.num_rounds):
            for number, part in enumerate(parts):
                groups: dict[int, list[PeerId]] = {}
                for peer_id in part:
                    if rng is None or rng.random() >= p_fail:
                        group = group_of(self.layout, self._cells[peer_id], self._number)
                        groups.setdefault(group, []).append(peer_id)
                for group, members in groups.items():
                    if len(members) > 1:
                        name = hashlib.sha256(f"{self._number} {number} {group}".encode()).digest()
                        for peer_id in members:
                            fingerprints[peer_id].append(name)
            self._cells = {peer_id: next_cell(self.layout, cell, self._number) for peer_id, cell in self._cells.items()}
            self._number += 1
        for part in parts:
            made = [peer_id for peer_id in part if fingerprints[peer_id]]
            for peer_id in made:
                self.detectors[peer_id].record_rounds(fingerprints[peer_id])
            for peer_id in set(part) - set(made):
                self.detectors[peer_id].follow(self.detectors[made[0]].recent_rounds)

    def strangers(self, peer_id: PeerId) -> dict[PeerId, bytes]:
        said = {other: detector.recent_rounds for other, detector in self.detectors.items() if other != peer_id}
        return self.detectors[peer_id].strangers(said)


@pytest.mark.parametrize(("num_peers", "max_group_size"), SIZES)
def test_parts_of_a_cut_are_strangers_once_it_is_so_many_steps_old_and_not_before(
    num_peers: int, max_group_size: int
) -> None:
    run = Run(num_peers, max_group_size)
    for _ in range(6):
        run.step(run.peers)
    few, many = run.peers[: num_peers // 3], run.peers[num_peers // 3 :]
    for steps_apart in range(1, NUM_RECENT_STEPS + 1):
        run.step(few, many)
        strangers = run.strangers(few[0])
        assert sorted(strangers) == (many if steps_apart == NUM_RECENT_STEPS else [])
    assert len(set(strangers.values())) == 1, "they are one part"
    assert sorted(run.strangers(many[0])) == few
    run.step(run.peers)  # not that they should
    assert not run.strangers(few[0])


@pytest.mark.parametrize(("num_peers", "max_group_size"), SIZES)
def test_failed_rounds_and_dead_peers_make_no_strangers(num_peers: int, max_group_size: int) -> None:
    rng = random.Random(num_peers)
    run = Run(num_peers, max_group_size)
    alive = list(run.peers)
    for number in range(24):
        if number % 4 == 0:
            alive.remove(rng.choice(alive))
        run.step(alive, p_fail=0.2, rng=rng)
        for peer_id in rng.sample(alive, 3):
            assert not run.strangers(peer_id).keys() & set(alive), number


def test_of_three_parts_each_has_a_name() -> None:
    run = Run(36, 6)
    parts = [run.peers[:12], run.peers[12:24], run.peers[24:]]
    for _ in range(NUM_RECENT_STEPS):
        run.step(*parts)
    strangers = run.strangers(parts[0][0])
    assert [len({strangers[peer_id] for peer_id in part}) for part in parts[1:]] == [1, 1]
    assert len(set(strangers.values())) == 2


def test_records_of_the_steps_before_make_no_strangers() -> None:
    """A peer reads nothing for a while; older ones are not asked about."""
    run = Run(36, 6)
    for _ in range(NUM_RECENT_STEPS):
        run.step(run.peers)
    reader = run.detectors[run.peers[0]]
    said = {peer_id: run.detectors[peer_id].recent_rounds for peer_id in run.peers[1:]}
    for _ in range(NUM_RECENT_STEPS - 1):
        run.step(run.peers)
        assert not reader.strangers(said)


def test_a_record_that_spans_the_cut_is_the_same_to_both_parts() -> None:
    """Of a peer that died in the third step after it."""
    run = Run(36, 6)
    for _ in range(NUM_RECENT_STEPS):
        run.step(run.peers)
    parts = run.peers[:18], run.peers[18:]
    for _ in range(NUM_RECENT_STEPS - 1):
        run.step(*parts)
    dead = run.peers[-1]
    before = run.detectors[dead].recent_rounds
    run.step(*parts)
    said = {peer_id: run.detectors[peer_id].recent_rounds for peer_id in run.peers} | {dead: before}
    views = [
        run.detectors[own].strangers({peer_id: steps for peer_id, steps in said.items() if peer_id != own})
        for own in (run.peers[0], run.peers[18])
    ]
    assert views[0].keys() == {*parts[1]}
    assert views[1].keys() == {*parts[0]}


def test_rounds_of_a_state_that_are_cut_short_make_no_strangers() -> None:
    """A donor may say what it likes."""
    run = Run(12, 4)
    reader = run.detectors[run.peers[0]]
    reader.follow([b"abc", b"", b"x" * (ROUND_NAME_BYTES + 1)])
    for _ in range(NUM_RECENT_STEPS):
        run.step(run.peers)
        assert not run.strangers(run.peers[0])


def test_who_has_not_made_enough_steps_in_a_grid_is_no_stranger_and_takes_nobody_for_one() -> None:
    run = Run(12, 4)
    for _ in range(NUM_RECENT_STEPS):
        run.step(run.peers[:6], run.peers[6:])
    newcomer, said = PartitionDetector(), {peer_id: run.detectors[peer_id].recent_rounds for peer_id in run.peers}
    assert not newcomer.strangers(said)
    for number in range(NUM_RECENT_STEPS - 1):
        newcomer.record_rounds([bytes([number]) * 32])
    assert not newcomer.strangers(said)
    mine = run.detectors[run.peers[0]]
    assert PeerId("new") not in mine.strangers({**said, PeerId("new"): newcomer.recent_rounds, PeerId("old"): []})
    newcomer.record_rounds([b"alone" * 8])
    assert PeerId("new") in mine.strangers({**said, PeerId("new"): newcomer.recent_rounds})


def test_who_loads_a_state_belongs_to_those_who_made_it() -> None:
    run = Run(12, 4)
    few, many = run.peers[:5], run.peers[5:]
    for _ in range(NUM_RECENT_STEPS):
        run.step(few, many)
    run.detectors[few[0]].follow(run.detectors[many[0]].recent_rounds)
    assert sorted(run.strangers(few[0])) == few[1:]
    run.detectors[few[0]].follow([])
    assert not run.strangers(few[0]), "nothing is known"


def test_what_is_published_is_bounded() -> None:
    detector = PartitionDetector()
    for number in range(100):
        detector.record_rounds([bytes([number, axis]) * 16 for axis in range(16)])
    published = detector.recent_rounds
    assert (len(published), len(published[0])) == (NUM_RECENT_STEPS, 16 * ROUND_NAME_BYTES)
    assert msgspec.convert(published, RecentRounds) == published
    for wrong in ([*published, b""], [b"x" * (16 * ROUND_NAME_BYTES + 1)]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, RecentRounds)


def test_whatever_a_stranger_publishes_is_some_round() -> None:
    run = Run(12, 4)
    for _ in range(NUM_RECENT_STEPS):
        run.step(run.peers)
    odd = {PeerId("x"): [b"", b"abc", b"x" * 13, b""], PeerId("y"): [b""] * 4}
    said = {peer_id: run.detectors[peer_id].recent_rounds for peer_id in run.peers[1:]}
    assert run.detectors[run.peers[0]].strangers({**said, **odd}).keys() == {PeerId("x")}
