"""A lookup does not follow a peer most of whose contacts are bad."""

from __future__ import annotations

import pytest

from manyhands.base.identity import PeerId
from manyhands.dht.ids import distance, node_id
from manyhands.dht.lookup import NUM_BAD, Lookup
from manyhands.dht.routing import Contact
from tests.unit.dht.examples import contact

TARGET = 0
NUM = 3


def begun(
    num_seeds: int, *, named_twice: int | None = None, num_liars: int = 1
) -> tuple[Lookup, list[Contact], list[Contact]]:
    """A lookup of which the first seeds have answered; the contacts that liars named, and the seeds: all in order."""
    contacts = sorted(map(contact, range(40)), key=lambda one: distance(node_id(one.peer_id), TARGET))
    named, seeds = contacts[:20], contacts[20 : 20 + num_seeds]
    lookup = Lookup(TARGET, seeds, own_id=PeerId("own"), k=20, alpha=NUM_BAD, num=NUM)
    assert lookup.take_next() == seeds[:NUM_BAD]
    for seed in seeds[:num_liars]:
        lookup.answered(seed.peer_id, named)
    for seed in seeds[num_liars:NUM_BAD]:
        lookup.answered(seed.peer_id, [] if named_twice is None else [named[named_twice]])
    assert lookup.take_next() == named[:NUM_BAD]
    return lookup, named, seeds


@pytest.mark.parametrize("num_liars", [1, 2, 3])
@pytest.mark.parametrize("is_slow", [True, False])
def test_a_peer_that_named_too_many_bad_peers_is_followed_no_further(is_slow: bool, num_liars: int) -> None:
    lookup, named, seeds = begun(5, num_liars=num_liars)
    for one in named[:NUM_BAD]:
        assert not lookup.is_finished
        (lookup.slow if is_slow else lookup.failed)(one.peer_id)
    assert lookup.is_finished
    assert lookup.nearest() == seeds[:NUM]


def test_a_peer_that_named_bad_peers_is_followed_where_too_few_others_are_known() -> None:
    lookup, named, _ = begun(NUM - 1)
    for one in named[:NUM_BAD]:
        lookup.failed(one.peer_id)
    assert lookup.take_next() == named[NUM_BAD : 2 * NUM_BAD]


def test_a_peer_that_others_name_as_well_is_asked() -> None:
    lookup, named, _ = begun(5, named_twice=10)
    for one in named[:NUM_BAD]:
        lookup.failed(one.peer_id)
    assert lookup.take_next() == [named[10]]


def test_a_peer_is_followed_again_when_the_slow_peers_that_it_named_answer() -> None:
    lookup, named, _ = begun(5)
    for one in named[:NUM_BAD]:
        lookup.slow(one.peer_id)
    assert lookup.is_finished
    for one in named[:2]:
        lookup.answered(one.peer_id, [])
    assert lookup.nearest()[:2] == named[:2]
    assert lookup.take_next() == [named[NUM_BAD]]


def test_real_peers_named_among_fakes_do_not_make_up_for_the_fakes() -> None:
    contacts = sorted(map(contact, range(40)), key=lambda one: distance(node_id(one.peer_id), TARGET))
    real, fakes, seeds = contacts[:4], contacts[4:20], contacts[20:30]
    lookup = Lookup(TARGET, seeds, own_id=PeerId("own"), k=20, alpha=NUM_BAD, num=5)
    lookup.take_next()
    for seed, named in zip(seeds[:NUM_BAD], ([*real, *fakes], [*real, *fakes], real), strict=True):
        lookup.answered(seed.peer_id, named)
    asked_fakes = 0
    while not lookup.is_finished:
        for one in lookup.take_next():
            asked_fakes += one in fakes
            if one in fakes:
                lookup.failed(one.peer_id)
            else:
                lookup.answered(one.peer_id, [])
    assert asked_fakes == NUM_BAD
    assert lookup.nearest() == [*real, seeds[0]]


def test_peers_that_name_a_few_dead_ones_among_many_are_followed() -> None:
    lookup, named, _ = begun(5, num_liars=3)
    dead = {named[number].peer_id for number in (0, 3, 5)}
    asked = named[:NUM_BAD]
    while asked:
        for one in asked:
            if one.peer_id in dead:
                lookup.failed(one.peer_id)
            else:
                lookup.answered(one.peer_id, named)
        asked = lookup.take_next()
    assert lookup.nearest() == [named[1], named[2], named[4]]
