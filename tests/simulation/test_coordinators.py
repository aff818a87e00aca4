"""Several coordinators, in virtual time: what happens when they come, die and come back, and when none is left."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from manyhands.base.address import Address
from manyhands.base.errors import JoinFailed
from manyhands.dht.initial_peers import MOST_WAIT_S
from manyhands.peer import Presence
from manyhands.state_dir import StateDir
from manyhands.testing import Host, World, at, between
from manyhands.transport import ControlStream
from tests.sweeps import few_of

KEY = "who is there"
PORT = 31337
TTL_S = 60.0
PERIOD_S = 5.0


class Swarm:
    """Peers that publish themselves and read who is there, every few seconds.

    Attributes:
        seen: the names that each peer read last.
        failed: the peers that could not join, and why.
    """

    def __init__(self, seed: int, state_dirs: Path | None = None) -> None:
        self.world = World(seed)
        self.world.network.default_link.latency_s = 0.02
        self.world.network.default_link.jitter_s = 0.01
        self.seen: dict[str, set[str]] = {}
        self.failed: dict[str, JoinFailed] = {}
        self.presences: dict[str, Presence] = {}
        self._state_dirs = state_dirs
        self._open_dirs: dict[str, StateDir] = {}

    def address(self, name: str, *, with_id: bool = True) -> Address:
        """Where a peer listens: the same after a restart."""
        return Address.of(self.world.host(name).ip, PORT, self.world.identity(name).peer_id if with_id else None)

    def start(self, names: Iterable[str], initial_peers: Sequence[Address], *, at_s: float = 0.0) -> None:
        """Start peers; a coordinator may begin alone."""
        for name in names:

            async def program(host: Host) -> None:
                await asyncio.sleep(at_s - self.world.loop.time())
                await self._live(host, initial_peers)

            self.world.start(name, program)

    async def _live(self, host: Host, initial_peers: Sequence[Address]) -> None:
        name = host.name
        presence = Presence(
            self.world.transport(host),
            rng=self.world.rng(f"{name} {host.life}"),
            wall_clock=host.wall_clock,
            state_dir=self._state_dir(name),
        )
        self.presences[name] = presence
        is_coordinator = name.startswith("c")
        try:
            await presence.start(initial_peers, [Address.of(host.ip, PORT)], must_join=not is_coordinator)
            while True:
                await presence.dht.store(KEY, name, TTL_S, subkey=presence.peer_id)
                self.seen[name] = {value.value for value in (await presence.dht.get(KEY)).values()}
                await asyncio.sleep(PERIOD_S)
        except JoinFailed as error:
            self.failed[name] = error
        finally:
            await presence.stop()

    def _state_dir(self, name: str) -> StateDir | None:
        if self._state_dirs is None:
            return None
        if name in self._open_dirs:  # a killed process lets go of its lock
            self._open_dirs[name].close()
        self._open_dirs[name] = StateDir(self._state_dirs / name)
        return self._open_dirs[name]

    def close(self) -> None:
        for state_dir in self._open_dirs.values():
            state_dir.close()


def assert_all_see(swarm: Swarm, readers: Iterable[str], names: Iterable[str]) -> None:
    everybody = set(names)
    missed = {reader: sorted(everybody - swarm.seen.get(reader, set())) for reader in readers}
    assert not any(missed.values()), {reader: names for reader, names in missed.items() if names}


def names_of(prefix: str, num: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(num)]


@pytest.mark.parametrize(
    ("num_peers", "with_id", "seed"),
    [(5, True, 0), *few_of([(5, False, 1)], 0, pytest.mark.long), *few_of([(5, True, 2), (22, True, 3)], 0)],
)
def test_islands_with_the_same_coordinators_merge_within_a_minute_of_a_link(
    num_peers: int, with_id: bool, seed: int
) -> None:
    """Larger ones too, in which a peer does not know everybody."""
    swarm = Swarm(seed)
    one, other = ["c1", *names_of("a", num_peers)], ["c2", *names_of("b", num_peers)]
    both = [swarm.address(name, with_id=with_id) for name in ("c1", "c2")]
    swarm.world.schedule(between(0, 100).partition(one, other))
    swarm.start(["c1", "c2"], both)
    swarm.start([*one[1:], *other[1:]], both, at_s=15.0)
    apart: list[set[str]] = []
    swarm.world.schedule(at(99).call(lambda: apart.extend(swarm.seen.values())))
    swarm.world.run(160.0)
    assert sorted(map(len, apart)) == [num_peers + 1] * (2 * num_peers + 2), "they did start apart"
    assert_all_see(swarm, [*one, *other], [*one, *other])


@pytest.mark.long
def test_islands_of_which_only_the_coordinators_know_each_other_merge() -> None:
    swarm = Swarm(5)
    one, other = ["c1", *names_of("a", 5)], ["c2", *names_of("b", 5)]
    swarm.world.schedule(between(0, 200).partition(one, other))
    swarm.start(["c1"], [swarm.address("c2")])
    swarm.start(["c2"], [swarm.address("c1")])
    swarm.start(one[1:], [swarm.address("c1")], at_s=20.0)
    swarm.start(other[1:], [swarm.address("c2")], at_s=20.0)
    swarm.world.run(290.0)
    assert_all_see(swarm, [*one, *other], [*one, *other])


def test_when_all_coordinators_die_the_others_go_on_and_newcomers_join_through_them() -> None:
    swarm = Swarm(6)
    ordinary = names_of("p", 6)
    both = [swarm.address("c1"), swarm.address("c2")]
    swarm.start(["c1", "c2"], both)
    swarm.start(ordinary, both, at_s=5.0)
    swarm.start(["d0"], [swarm.address("p3")], at_s=150.0)
    swarm.start(["d1"], both, at_s=150.0)
    swarm.world.schedule(at(60).kill("c1"), at(60).crash("c2"))
    swarm.world.run(180.0)
    assert_all_see(swarm, [*ordinary, "d0"], [*ordinary, "d0"])
    assert not swarm.seen["p0"] & {"c1", "c2"}, "what nobody renews goes away"
    assert set(swarm.failed) == {"d1"}, "who knows the dead ones only is told so"


@pytest.mark.parametrize("down_s", few_of([1.0, 30.0], 1, pytest.mark.long))
def test_a_coordinator_that_is_restarted_resumes_its_role(down_s: float) -> None:
    """It keeps nothing but its identity and its port, and knows nobody when it begins again."""
    swarm = Swarm(7)
    ordinary = names_of("p", 6)
    swarm.start(["c1"], [])
    swarm.start(ordinary, [swarm.address("c1")], at_s=5.0)
    swarm.world.schedule(at(60).kill("c1"), at(60 + down_s).restart("c1"))
    swarm.start(["d0"], [swarm.address("c1")], at_s=120.0)
    num_records: list[int] = []
    swarm.world.schedule(at(179).call(lambda: num_records.append(swarm.presences["c1"].dht.num_records)))
    swarm.world.run(180.0)
    everybody = ["c1", *ordinary, "d0"]
    assert_all_see(swarm, everybody, everybody)
    assert num_records == [len(everybody)], "its records came back"


@pytest.mark.long
def test_a_dead_coordinator_is_dialled_for_ever_but_not_by_all_at_once() -> None:
    swarm = Swarm(14)
    ordinary = names_of("p", 6)
    dials: dict[str, list[float]] = {}

    async def count(stream: ControlStream) -> None:
        dials.setdefault(stream.remote, []).append(swarm.world.loop.time())

    async def turn_all_away(host: Host) -> None:
        listener = await swarm.world.transport(host).listen(swarm.address("c1", with_id=False), count)
        try:
            await asyncio.sleep(600.0)
        finally:
            await listener.close()

    swarm.world.start("c1", turn_all_away)
    swarm.start(["c2"], [])
    swarm.start(ordinary, [swarm.address("c1"), swarm.address("c2")], at_s=5.0)
    swarm.world.run(600.0)
    assert len(dials) == len(ordinary)
    for times in dials.values():
        assert max(later - earlier for earlier, later in itertools.pairwise([*times, 600.0])) < MOST_WAIT_S + 1.0
        assert len(times) > 20
    late = sorted(time for times in dials.values() for time in times if time > 100.0)
    in_a_second = Counter(int(time) for time in late)
    assert max(in_a_second.values()) <= 3


@pytest.mark.parametrize("initial_peers", [["c1"], ["c2"], ["c1", "c2"]])
def test_a_coordinator_starts_though_no_other_one_is_there(initial_peers: list[str]) -> None:
    swarm = Swarm(8)
    swarm.start(["c1"], [swarm.address(name) for name in initial_peers])
    swarm.start(["p0"], [swarm.address("c1")], at_s=20.0)
    swarm.world.run(40.0)
    assert_all_see(swarm, ["c1", "p0"], ["c1", "p0"])


def test_an_ordinary_peer_that_is_on_the_list_may_begin_alone() -> None:
    swarm = Swarm(9)
    swarm.start(["p0"], [swarm.address("p0", with_id=False), swarm.address("c1")])
    swarm.start(["p1"], [swarm.address("c1")])
    swarm.world.run(20.0)
    assert swarm.seen == {"p0": {"p0"}}
    assert set(swarm.failed) == {"p1"}


def test_a_peer_comes_back_by_its_state_file_alone(tmp_path: Path) -> None:
    swarm = Swarm(10, tmp_path)
    ordinary = names_of("p", 4)
    swarm.start(["c1"], [])
    swarm.start(ordinary, [swarm.address("c1")], at_s=5.0)
    swarm.world.schedule(at(60).kill("c1"), at(90).kill("p2"), at(150).restart("p2"))
    swarm.world.run(170.0)
    swarm.close()
    assert_all_see(swarm, ordinary, ordinary)


def test_a_coordinator_with_a_state_dir_finds_the_others_at_once(tmp_path: Path) -> None:
    swarm = Swarm(11, tmp_path)
    ordinary = names_of("p", 4)
    swarm.start(["c1"], [])
    swarm.start(ordinary, [swarm.address("c1")], at_s=5.0)
    swarm.world.schedule(at(60).kill("c1"), at(90).restart("c1"))
    swarm.world.run(91.0)
    swarm.close()
    assert_all_see(swarm, ["c1"], ["c1", *ordinary])


@pytest.mark.long
def test_halves_without_a_coordinator_merge_through_peers_that_they_knew() -> None:
    swarm = Swarm(12)
    one, other = names_of("a", 3), names_of("b", 3)
    swarm.start(["c1"], [])
    swarm.start([*one, *other], [swarm.address("c1")], at_s=5.0)
    swarm.world.schedule(at(60).kill("c1"), between(90, 300).partition(one, other))
    apart: list[set[str]] = []
    swarm.world.schedule(at(299).call(lambda: apart.extend(swarm.seen[name] for name in one)))
    swarm.world.run(360.0)
    assert apart == [set(one)] * 3
    assert_all_see(swarm, [*one, *other], [*one, *other])


def test_a_peer_that_was_cut_off_comes_back_though_the_coordinators_are_gone() -> None:
    swarm = Swarm(13)
    ordinary = names_of("p", 5)
    swarm.start(["c1"], [])
    swarm.start(ordinary, [swarm.address("c1")], at_s=5.0)
    swarm.world.schedule(at(60).kill("c1"), between(90, 400).partition(["p0"], ordinary[1:]))
    alone: list[int] = []
    swarm.world.schedule(at(399).call(lambda: alone.append(swarm.presences["p0"].dht.num_known_peers)))
    swarm.world.run(440.0)
    assert alone == [0]
    assert_all_see(swarm, ordinary, ordinary)
