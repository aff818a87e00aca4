"""Each new replica is given the records that it should hold, once."""

from __future__ import annotations

from manyhands.base.identity import PeerId
from manyhands.dht.replication import ReplicationPlanner


def test_a_newcomer_is_given_what_it_should_hold_once() -> None:
    handover = ReplicationPlanner()
    replicas = {"near": [PeerId("old")], "far": [PeerId("other")]}
    for peer_id, keys in handover.plan(replicas, replicas.__getitem__).items():
        handover.given(peer_id, keys)
    replicas["near"] = [PeerId("new"), PeerId("old")]
    assert handover.plan(replicas, replicas.__getitem__) == {"new": ["near"]}
    assert handover.plan(replicas, replicas.__getitem__) == {"new": ["near"]}, "it did not arrive"
    handover.given(PeerId("new"), ["near"])
    assert handover.plan(replicas, replicas.__getitem__) == {}


def test_a_peer_that_was_lost_or_was_no_replica_for_a_while_is_given_the_key_again() -> None:
    handover = ReplicationPlanner()
    handover.plan(["key"], lambda _: [PeerId("a"), PeerId("b")])
    handover.given(PeerId("a"), ["key"])
    handover.given(PeerId("b"), ["key"])
    handover.forget(PeerId("a"))
    assert handover.plan(["key"], lambda _: [PeerId("a")]) == {"a": ["key"]}
    assert handover.plan(["key"], lambda _: [PeerId("b")]) == {"b": ["key"]}, "b was not among the replicas"


def test_keys_that_expired_are_forgotten() -> None:
    handover = ReplicationPlanner()
    handover.given(PeerId("a"), [f"key-{number}" for number in range(100)])
    handover.plan(["key-1"], lambda _: [PeerId("a")])
    assert handover.plan(["key-1", "key-2"], lambda _: [PeerId("a")]) == {"a": ["key-2"]}
