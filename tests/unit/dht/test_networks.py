"""Few holders of a key are in one network, as long as there are others."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.identity import PeerId
from manyhands.dht.ids import key_id, node_id
from manyhands.dht.lookup import Lookup
from manyhands.dht.networks import MAX_PER_NETWORK, network_of, spread
from manyhands.dht.routing import Contact, RoutingTable
from tests.unit.dht.examples import contact

NUM = 5


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("::ffff:192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/48"),
        ("run.example.org", "run.example.org"),
    ],
)
def test_the_network_of_a_host_is_its_prefix_or_its_name(host: str, network: str) -> None:
    assert network_of(host) == network


@given(networks=st.lists(st.sampled_from("abcde"), max_size=30), num=st.integers(1, 8))
def test_at_most_two_peers_of_a_network_are_chosen_while_there_are_others(networks: list[str], num: int) -> None:
    """Compared with the rule said another way: the first two of each network come before all others."""
    chosen = spread(range(len(networks)), num, networks.__getitem__)
    rank_in_network = [networks[:place].count(network) for place, network in enumerate(networks)]
    preferred = sorted(range(len(networks)), key=lambda place: (rank_in_network[place] >= MAX_PER_NETWORK, place))
    assert chosen == sorted(preferred[:num])


def test_a_swarm_in_one_network_has_the_nearest_as_holders() -> None:
    assert spread(range(20), NUM, lambda _: "192.0.2.0/24") == list(range(NUM))


def nearest_first(num: int, target: int) -> list[Contact]:
    return sorted(map(contact, range(num)), key=lambda one: node_id(one.peer_id) ^ target)


@given(seed=st.integers(), num_peers=st.integers(2, 60), target=st.integers(0, 2**256 - 1), is_client=st.booleans())
def test_a_table_and_a_lookup_that_know_the_same_peers_name_the_same_holders(
    seed: int, num_peers: int, target: int, is_client: bool
) -> None:
    rng = random.Random(seed)
    everyone = nearest_first(num_peers, target)
    networks = {one.peer_id: rng.choice("aaaabcdef") for one in everyone}
    own_id = rng.choice(everyone).peer_id
    table = RoutingTable(own_id, k=64, max_failures=2)
    for one in everyone:
        table.seen(one, network="moved since" if rng.random() < 0.1 else networks[one.peer_id])
        table.seen(one, network=networks[one.peer_id])
    others = [one for one in everyone if one.peer_id != own_id]
    expected = spread(
        [one.peer_id for one in everyone if not is_client or one.peer_id != own_id], NUM, networks.__getitem__
    )
    assert table.holders(target, NUM, None if is_client else networks[own_id]) == expected

    def where(one: Contact) -> str:
        return networks[one.peer_id]

    lookup = Lookup(target, others, own_id=own_id, k=64, alpha=3, num=NUM, is_client=is_client, network_of=where)
    while not lookup.is_finished:
        for one in lookup.take_next():
            lookup.answered(one.peer_id, others)
    assert [one.peer_id for one in lookup.nearest()] == spread(
        [one.peer_id for one in others], NUM, networks.__getitem__
    )


def test_a_peer_that_is_elsewhere_than_it_was_said_to_be_counts_where_it_was_reached() -> None:
    everyone = nearest_first(10, 0)
    fakes, honest = everyone[:6], everyone[6:]
    reached: set[PeerId] = set()

    def where(one: Contact) -> str:
        return "one machine" if one in fakes and one.peer_id in reached else one.peer_id

    lookup = Lookup(0, everyone, own_id=PeerId("me"), k=20, alpha=3, num=NUM, network_of=where)
    while not lookup.is_finished:
        for one in lookup.take_next():
            reached.add(one.peer_id)
            lookup.answered(one.peer_id, [])
    assert lookup.nearest() == [*fakes[:MAX_PER_NETWORK], *honest[:3]]


def test_an_answer_for_a_key_names_those_of_other_networks_first() -> None:
    """Twenty identities near a key cost a second to make; they may not be all that others hear of."""
    table = RoutingTable(PeerId("me"), k=64, max_failures=2)
    everyone = nearest_first(40, key_id("key"))
    for place, one in enumerate(everyone):
        table.seen(one, network="one machine" if place < 20 else one.peer_id)
    named = Counter(one in everyone[:20] for one in table.nearest_spread(key_id("key"), 20))
    assert named == {True: MAX_PER_NETWORK, False: 20 - MAX_PER_NETWORK}
