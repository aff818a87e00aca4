"""Whom a node takes for the holders of a key."""

from __future__ import annotations

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.holder_cache import HolderCache
from manyhands.dht.ids import distance, key_id, node_id
from manyhands.dht.routing import Contact, RoutingTable
from tests.unit.dht.examples import contact

NOW = 100.0
CONFIG = DhtConfig(k=3, replicas=3)


def nearest_first(num: int) -> list[Contact]:
    """Contacts in the order of their distance to the key."""
    return sorted(map(contact, range(num)), key=lambda one: distance(node_id(one.peer_id), key_id("key")))


def far_node(peers: list[Contact]) -> tuple[HolderCache, RoutingTable, PeerId]:
    """The node that is farthest from the key; its table has room for three of those near the key, the farthest ones."""
    own_id = peers[-1].peer_id
    table = RoutingTable(own_id, CONFIG.k, max_failures=2)
    return HolderCache(own_id, table, CONFIG), table, own_id


def test_holders_count_though_the_table_has_no_room_for_them() -> None:
    peers = nearest_first(60)
    replicas, table, _ = far_node(peers)
    holders = [one.peer_id for one in peers[:3]]
    for one in reversed(peers[:-1]):
        table.seen(one)
    assert not set(replicas.known("key")) <= set(holders), "the farther ones were there first"
    replicas.remember("key", holders, NOW, complete=holders)
    assert replicas.recall_complete("key", NOW) == tuple(holders)


def test_readers_ask_the_holders_that_had_the_records_if_they_are_more_than_half() -> None:
    peers = nearest_first(60)
    replicas, _, _ = far_node(peers)
    one, two, three = (peer.peer_id for peer in peers[:3])
    replicas.remember("key", [one, two, three], NOW, complete=[one, three])
    assert replicas.recall_complete("key", NOW) == (one, three)
    assert replicas.recall("key", NOW) == (one, two, three), "writers need all"
    replicas.remember("key", [three, one, two], NOW)
    assert replicas.recall_complete("key", NOW) == (three, one), "a lookup of a writer asks for no records"
    replicas.remember("key", [one, two, three], NOW, complete=[two])
    assert replicas.recall_complete("key", NOW) == ()
    replicas.remember("key", [one, two, peers[3].peer_id], NOW)
    assert replicas.recall_complete("key", NOW) == ()


def test_a_node_that_hears_of_a_nearer_node_looks_the_holders_up_again() -> None:
    peers = nearest_first(60)
    replicas, table, _ = far_node(peers)
    replicas.remember("key", [one.peer_id for one in peers[1:4]], NOW)
    table.seen(peers[20])
    assert replicas.recall("key", NOW)
    table.seen(peers[0])
    assert not replicas.recall("key", NOW)


def test_any_new_peer_is_a_holder_while_there_are_too_few() -> None:
    peers = nearest_first(60)
    replicas, table, own_id = far_node(peers)
    replicas.remember("key", [peers[0].peer_id, own_id], NOW)
    assert replicas.recall("key", NOW)
    table.seen(peers[20])
    assert not replicas.recall("key", NOW)
