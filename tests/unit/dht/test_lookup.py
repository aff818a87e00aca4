from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.base.identity import PeerId
from manyhands.dht.ids import distance, node_id
from manyhands.dht.lookup import Lookup
from manyhands.dht.routing import Contact, RoutingTable
from tests.unit.dht.examples import contact


def by_distance(contacts: list[Contact], target: int) -> list[Contact]:
    return sorted(contacts, key=lambda contact: distance(node_id(contact.peer_id), target))


def network(num_peers: int, k: int, rng: random.Random) -> dict[PeerId, RoutingTable]:
    """Peers that met each other in a random order: each has a table with full buckets, but different ones."""
    everyone = [contact(number) for number in range(num_peers)]
    tables = {}
    for someone in everyone:
        table = RoutingTable(someone.peer_id, k, max_failures=2)
        for other in rng.sample(everyone, num_peers):
            table.seen(other)
        tables[someone.peer_id] = table
    return tables


def run(lookup: Lookup, ask: Callable[[PeerId], list[Contact] | None], alpha: int, rng: random.Random) -> int:
    """Drive a lookup; answers come in a random order. Returns how many were asked.

    Args:
        ask: returns whom a peer names; None if it does not answer.
    """
    asked: list[Contact] = []
    num_asked = 0
    while not lookup.is_finished:
        asked += lookup.take_next()
        assert 0 < len(asked) <= alpha
        peer_id = asked.pop(rng.randrange(len(asked))).peer_id
        num_asked += 1
        named = ask(peer_id)
        if named is None:
            lookup.failed(peer_id)
        else:
            lookup.answered(peer_id, named)
    return num_asked


@given(
    num_peers=st.integers(1, 80),
    k=st.integers(3, 8),
    alpha=st.integers(1, 4),
    target=st.integers(0, 2**256 - 1),
    seed=st.integers(),
)
def test_a_lookup_finds_the_nearest_peer_of_the_whole_network(
    num_peers: int, k: int, alpha: int, target: int, seed: int
) -> None:
    """Whoever is nearer to the target than the nearest that answered lies in one bucket of that one."""
    found, nearest = look_up(num_peers, k, alpha, target, seed)
    assert found[:1] == nearest[:1]
    assert len(found) == len(nearest)


def test_a_lookup_nearly_always_finds_all_of_the_nearest_peers() -> None:
    """A farther one of them may be in no full bucket of the others."""
    rng = random.Random(1)
    outcomes = [look_up(rng.randrange(30, 60), 5, 3, rng.getrandbits(256), seed) for seed in range(200)]
    assert sum(found == nearest for found, nearest in outcomes) >= 198


def look_up(num_peers: int, k: int, alpha: int, target: int, seed: int) -> tuple[list[Contact], list[Contact]]:
    """What a lookup in a network finds, and what there is."""
    rng = random.Random(seed)
    tables = network(num_peers, k, rng)
    start = contact(rng.randrange(num_peers))
    others = [contact(number) for number in range(num_peers) if contact(number) != start]
    seeds = tables[start.peer_id].nearest(target, k)
    lookup = Lookup(target, seeds, own_id=start.peer_id, k=k, alpha=alpha)
    run(lookup, lambda peer_id: tables[peer_id].nearest(target, k), alpha, rng)
    return lookup.nearest(), by_distance(others, target)[:k]


def test_peers_that_died_do_not_hide_the_nearest_living_ones() -> None:
    rng = random.Random(3)
    num_peers, k, alpha = 60, 8, 3
    tables = network(num_peers, k, rng)
    for target in (node_id(PeerId("here")), node_id(PeerId("there"))):
        nearest = by_distance([contact(number) for number in range(1, num_peers)], target)
        dead = {someone.peer_id for someone in nearest[:12:3]}

        def ask(peer_id: PeerId, target: int = target, dead: set[PeerId] = dead) -> list[Contact] | None:
            return None if peer_id in dead else tables[peer_id].nearest(target, k)

        seeds = tables[contact(0).peer_id].nearest(target, k)
        lookup = Lookup(target, seeds, own_id=contact(0).peer_id, k=k, alpha=alpha)
        run(lookup, ask, alpha, rng)
        found = k - len(dead)  # beyond these, everybody may know only dead peers
        assert lookup.nearest()[:found] == [someone for someone in nearest if someone.peer_id not in dead][:found]
        assert not {someone.peer_id for someone in lookup.nearest()} & dead


def test_a_lookup_asks_far_fewer_than_all_peers() -> None:
    rng = random.Random(5)
    tables = network(200, 5, rng)
    seeds = tables[contact(0).peer_id].nearest(0, 5)
    lookup = Lookup(0, seeds, own_id=contact(0).peer_id, k=5, alpha=3)
    assert run(lookup, lambda peer_id: tables[peer_id].nearest(0, 5), 3, rng) < 30


def test_nearer_peers_are_asked_before_farther_ones_and_nobody_twice() -> None:
    nearest = by_distance([contact(number) for number in range(6)], 0)
    lookup = Lookup(0, nearest[2:4], own_id=PeerId("me"), k=3, alpha=1)
    assert lookup.take_next() == [nearest[2]]
    assert lookup.take_next() == []
    lookup.answered(nearest[2].peer_id, [nearest[5], nearest[0], nearest[2]])
    assert lookup.take_next() == [nearest[0]]
    lookup.answered(nearest[0].peer_id, nearest)
    assert lookup.take_next() == [nearest[1]]
    lookup.failed(nearest[1].peer_id)
    assert lookup.take_next() == [nearest[3]]
    lookup.answered(nearest[3].peer_id, [])
    assert lookup.is_finished
    assert lookup.nearest() == [nearest[0], nearest[2], nearest[3]]


def test_a_lookup_ends_without_waiting_for_peers_that_nearer_ones_replaced() -> None:
    near, middle, far = by_distance([contact(number) for number in range(3)], 0)
    lookup = Lookup(0, [middle, far], own_id=PeerId("me"), k=2, alpha=2)
    assert lookup.take_next() == [middle, far]
    lookup.answered(middle.peer_id, [near])
    lookup.take_next()
    lookup.answered(near.peer_id, [])
    assert lookup.is_finished
    assert lookup.nearest() == [near, middle]


def test_the_peer_itself_is_not_asked_and_without_seeds_nothing_is_to_do() -> None:
    lookup = Lookup(0, [contact(0)], own_id=contact(0).peer_id, k=2, alpha=2)
    assert lookup.is_finished
    assert lookup.take_next() == []


def test_only_the_nearest_peers_of_a_long_answer_are_asked() -> None:
    liar, *invented = (contact(number) for number in range(50))
    lookup = Lookup(0, [liar], own_id=PeerId("me"), k=2, alpha=1)
    lookup.take_next()
    lookup.answered(liar.peer_id, invented)
    num_asked = 1
    while not lookup.is_finished:
        for someone in lookup.take_next():
            lookup.failed(someone.peer_id)
            num_asked += 1
    assert num_asked == 3


@settings(max_examples=15)
@given(num=st.integers(1, 5), target=st.integers(0, 2**256 - 1), seed=st.integers(0, 2**32))
def test_a_lookup_of_few_peers_finds_exactly_the_nearest_and_asks_fewer(num: int, target: int, seed: int) -> None:
    rng = random.Random(seed)
    tables = network(60, 8, rng)
    others = [contact(number) for number in range(1, 60)]
    num_asked = []
    for wanted in (num, 8):
        seeds = tables[contact(0).peer_id].nearest(target, 8)
        lookup = Lookup(target, seeds, own_id=contact(0).peer_id, k=8, alpha=1, num=wanted)
        num_asked.append(run(lookup, lambda peer_id: tables[peer_id].nearest(target, 8), 1, random.Random(seed)))
        assert lookup.nearest() == by_distance(others, target)[:wanted]
    assert num_asked[0] < num_asked[1]


def test_other_peers_are_asked_in_place_of_a_slow_one_which_is_not_waited_for() -> None:
    peers = by_distance([contact(number) for number in range(6)], 0)
    lookup = Lookup(0, peers, own_id=PeerId("me"), k=6, alpha=3, num=3)
    assert lookup.take_next() == peers[:3]
    lookup.slow(peers[0].peer_id)
    assert lookup.take_next() == [peers[3]]
    for peer in peers[1:4]:
        assert not lookup.is_finished
        lookup.answered(peer.peer_id, [])
    assert lookup.is_finished
    assert lookup.is_slow(peers[0].peer_id)
    assert lookup.nearest() == peers[1:4]


def test_a_slow_peer_that_answers_counts_again() -> None:
    peers = by_distance([contact(number) for number in range(5)], 0)
    lookup = Lookup(0, peers[1:], own_id=PeerId("me"), k=6, alpha=3, num=3)
    lookup.take_next()
    lookup.slow(peers[1].peer_id)
    lookup.answered(peers[1].peer_id, [peers[0]])
    assert not lookup.is_slow(peers[1].peer_id)
    assert lookup.take_next() == [peers[0]]
    lookup.answered(peers[0].peer_id, [])
    lookup.answered(peers[2].peer_id, [])
    assert lookup.is_finished
    assert lookup.nearest() == peers[:3]


def test_slow_peers_are_waited_for_if_most_are_slow() -> None:
    peers = by_distance([contact(number) for number in range(6)], 0)
    lookup = Lookup(0, peers, own_id=PeerId("me"), k=6, alpha=3, num=3)
    lookup.take_next()
    lookup.slow(peers[0].peer_id)
    lookup.slow(peers[1].peer_id)
    lookup.take_next()
    lookup.answered(peers[2].peer_id, [])
    assert not lookup.is_finished, "the three nearest may have what is looked for"
    lookup.failed(peers[0].peer_id)
    assert not lookup.is_finished, "the fourth is now among them"


def test_a_slow_peer_is_waited_for_where_few_are_known() -> None:
    """Another one could not take its place."""
    peers = by_distance([contact(number) for number in range(2)], 0)
    for known in (peers, peers[:1]):
        lookup = Lookup(0, known, own_id=PeerId("me"), k=20, alpha=3, num=5)
        lookup.take_next()
        lookup.slow(peers[0].peer_id)
        for other in known[1:]:
            lookup.answered(other.peer_id, [])
        assert not lookup.is_finished
        lookup.answered(peers[0].peer_id, [])
        assert lookup.is_finished
        assert lookup.nearest() == known


def test_nearer_peers_that_never_answer_do_not_hide_those_that_did() -> None:
    peers = by_distance([contact(number) for number in range(6)], 0)
    lookup = Lookup(0, peers[3:], own_id=PeerId("me"), k=6, alpha=3, num=3)
    lookup.take_next()
    lookup.answered(peers[4].peer_id, [])
    lookup.answered(peers[3].peer_id, peers[:3])
    lookup.take_next()
    assert not lookup.is_finished
    assert lookup.nearest() == [peers[3], peers[4]], "what there is when the time is up"


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), num=st.integers(1, 6))
def test_a_lookup_ends_with_the_nearest_that_answered_whichever_are_slow_or_fail(seed: int, num: int) -> None:
    rng = random.Random(seed)
    tables = network(40, 6, rng)
    lookup = Lookup(0, tables[contact(0).peer_id].nearest(0, 6), own_id=contact(0).peer_id, k=6, alpha=3, num=num)
    asked: list[Contact] = []
    answered: list[Contact] = []
    slow: set[PeerId] = set()
    while not lookup.is_finished:
        asked += lookup.take_next()
        assert asked, "it waits for nobody"
        someone = rng.choice(asked)
        what = rng.random()
        if what < 0.3 and someone.peer_id not in slow:
            slow.add(someone.peer_id)
            lookup.slow(someone.peer_id)
            continue
        asked.remove(someone)
        if what < 0.5:
            lookup.failed(someone.peer_id)
        else:
            answered.append(someone)
            lookup.answered(someone.peer_id, tables[someone.peer_id].nearest(0, 6))
    assert lookup.nearest() == by_distance(answered, 0)[: len(lookup.nearest())]
