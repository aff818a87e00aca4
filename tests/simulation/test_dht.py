"""The DHT under faults, in virtual time."""

from __future__ import annotations

import pytest

from manyhands.testing import between
from tests.simulation.worlds import dht_world


@pytest.mark.parametrize("seed", range(5))
def test_two_halves_of_a_swarm_find_each_other_within_a_minute_of_the_end_of_a_partition(seed: int) -> None:
    world, seen = dht_world(seed)
    world.run(110.0)
    assert seen == {f"p{number}": 6 for number in range(6)}


def test_a_frozen_peer_is_missed_while_it_is_frozen_and_seen_again_after() -> None:
    world, seen = dht_world(seed=5)
    world.schedule(between(120, 150).freeze("p4"))
    world.run(145.0)
    assert {name: number for name, number in seen.items() if name != "p4"} == dict.fromkeys(
        ("p0", "p1", "p2", "p3", "p5"), 5
    )
    world, seen = dht_world(seed=5)
    world.schedule(between(120, 150).freeze("p4"))
    world.run(200.0)
    assert set(seen.values()) == {6}


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
def test_clocks_that_differ_by_a_minute_lose_nothing(skew_s: float) -> None:
    world, seen = dht_world(seed=7)
    for name in ("p1", "p3"):
        world.host(name).skew_s = skew_s
    world.run(29.0)  # before the partition, after the restart of p2
    assert set(seen.values()) == {6}
