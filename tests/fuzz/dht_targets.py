"""Fuzz targets: what DHT nodes send each other."""

from __future__ import annotations

import functools

import msgspec

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, ProtocolViolation
from manyhands.dht.config import DhtConfig
from manyhands.dht.ids import id_from_bytes, id_to_bytes, key_id
from manyhands.dht.known_peers import MAX_PEERS, KnownPeers
from manyhands.dht.lookup import Lookup
from manyhands.dht.messages import (
    FIND,
    PING,
    STORE,
    TOPICS,
    FindRequest,
    FindResponse,
    PingRequest,
    PingResponse,
    StoreOutcome,
    StoreRequest,
    StoreResponse,
    TopicsRequest,
    TopicsResponse,
)
from manyhands.dht.records import AgedRecord, Reason, Record, decode_value, fault_of
from manyhands.dht.routing import Contact, RoutingTable
from manyhands.dht.storage import Storage
from tests.fuzz.target import Target, decoded
from tests.network import identity_of
from tests.unit.dht.examples import ALICE, MALLORY, WALL_NOW, open_record, owned_record

CONFIG = DhtConfig()
OWN_ID = identity_of(1).peer_id
RECORDS = [
    open_record({"step": 3, "names": ["a", None, True]}, subkey="anything"),
    open_record(None),
    owned_record([1, 2.5, -7, b"bytes", "text"]),
    owned_record({"position": {"step": 1, "lineage": b""}}, owner=MALLORY, sequence=2**62),
]
SIGNED = {record.signed_bytes() for record in RECORDS if record.owner}
CONTACTS = [
    Contact(identity_of(number).peer_id, [f"/ip4/10.0.0.{number}/tcp/1", f"/dns4/host{number}/tcp/2"])
    for number in range(2, 6)
]
AGED = [AgedRecord(record, 3.5) for record in RECORDS]


def _value(data: bytes) -> None:
    decode_value(data)


def _record(data: bytes) -> None:
    record = decoded(data, Record)
    if fault_of(record, CONFIG) is None and record.owner:
        assert record.signed_bytes() in SIGNED, "a signature counts for what was signed and nothing else"


def _offered(records: list[AgedRecord]) -> None:
    """Store records, read them again, and let their time pass."""
    storage = Storage(CONFIG)
    for aged in records:
        reason = storage.offer(aged, 100.0, WALL_NOW)
        assert isinstance(reason, Reason)
    assert len(storage) <= len(records)
    for key in storage.keys(100.0):
        for held in storage.get(key, 100.0):
            assert 100.0 < held.expires_at <= 100.0 + CONFIG.max_ttl_s
            decode_value(held.record.value)
    storage.expire(101.0 + CONFIG.max_ttl_s)
    assert len(storage) == 0


def _found(response: FindResponse) -> None:
    """Use an answer as a lookup does."""
    point = key_id("key")
    seed = CONTACTS[0]
    lookup = Lookup(point, [seed], own_id=OWN_ID, k=CONFIG.k, alpha=CONFIG.alpha)
    assert lookup.take_next() == [seed]
    lookup.answered(seed.peer_id, response.contacts)
    table = RoutingTable(OWN_ID, CONFIG.k, CONFIG.max_failures)
    for contact in lookup.take_next():
        table.seen(contact)
        for text in contact.addresses:
            try:
                Address.parse(text).with_peer(contact.peer_id)
            except ConfigError:
                break
    assert len(table.nearest(point, CONFIG.k)) <= len(response.contacts)
    _offered(response.records)


def _find_request(data: bytes) -> None:
    request = decoded(data, FindRequest)
    assert id_to_bytes(id_from_bytes(request.target)) == request.target


def _store_response(data: bytes) -> None:
    outcomes = decoded(data, StoreResponse).outcomes
    _offered([outcome.later for outcome in outcomes if outcome.later is not None])


def _known_peers(data: bytes) -> None:
    """What is read can be dialled, and is read again as it was."""
    known = KnownPeers.from_json(data, WALL_NOW)
    contacts = known.latest_first()
    assert len(contacts) <= MAX_PEERS
    for contact in contacts:
        assert contact.addresses
        for text in contact.addresses:
            assert Address.parse(text).with_peer(contact.peer_id).port
    assert KnownPeers.from_json(known.to_json(), WALL_NOW).latest_first() == contacts


KNOWN_PEERS = KnownPeers()
KNOWN_PEERS.heard_of(CONTACTS, WALL_NOW)

SEEDS: dict[type[msgspec.Struct], list[msgspec.Struct]] = {
    PingRequest: [PingRequest()],
    PingResponse: [PingResponse()],
    FindRequest: [FindRequest(id_to_bytes(key_id("key")), "key"), FindRequest(bytes(32))],
    FindResponse: [FindResponse(CONTACTS, AGED), FindResponse([])],
    StoreRequest: [StoreRequest(AGED)],
    TopicsRequest: [TopicsRequest("manifest")],
    TopicsResponse: [TopicsResponse(["run", "another"])],
    StoreResponse: [
        StoreResponse([StoreOutcome(True, "accepted"), StoreOutcome(False, "stale", AGED[2])]),
    ],
}


def _encoded(kind: type[msgspec.Struct]) -> list[bytes]:
    return [msgspec.msgpack.encode(message) for message in SEEDS[kind]]


_VIOLATION = (ProtocolViolation,)
TARGETS = [
    Target(
        name="known-peers-file",
        seeds=[KNOWN_PEERS.to_json()],
        run=_known_peers,
        errors=(ConfigError,),
        kind="bytes",
        weight=0.5,
    ),
    Target(name="dht.value", seeds=[record.value for record in RECORDS], run=_value, errors=(ValueError,)),
    Target(name="dht.record", seeds=[msgspec.msgpack.encode(r) for r in RECORDS], run=_record, errors=_VIOLATION),
    Target(
        name=f"{PING.name}.request",
        seeds=_encoded(PingRequest),
        run=lambda data: decoded(data, PingRequest),
        errors=_VIOLATION,
        weight=0.2,
    ),
    Target(
        name=f"{PING.name}.response",
        seeds=_encoded(PingResponse),
        run=lambda data: decoded(data, PingResponse),
        errors=_VIOLATION,
        weight=0.2,
    ),
    Target(name=f"{FIND.name}.request", seeds=_encoded(FindRequest), run=_find_request, errors=_VIOLATION),
    Target(
        name=f"{FIND.name}.response",
        seeds=_encoded(FindResponse),
        run=lambda data: _found(decoded(data, FindResponse)),
        errors=_VIOLATION,
    ),
    Target(
        name=f"{STORE.name}.request",
        seeds=_encoded(StoreRequest),
        run=lambda data: _offered(decoded(data, StoreRequest).records),
        errors=_VIOLATION,
    ),
    *(
        Target(
            name=f"{TOPICS.name}.{name}",
            seeds=_encoded(kind),
            run=functools.partial(decoded, kind=kind),
            errors=_VIOLATION,
            weight=0.2,
        )
        for name, kind in (("request", TopicsRequest), ("response", TopicsResponse))
    ),
    Target(name=f"{STORE.name}.response", seeds=_encoded(StoreResponse), run=_store_response, errors=_VIOLATION),
]
assert ALICE.peer_id in {record.owner for record in RECORDS}
