"""What the peers of a run publish and send arrives as it was meant."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.grid.seats import Layout, Seat
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.roster import Roster, Standing
from manyhands.averaging.state.content import Origin, StateHeader
from manyhands.averaging.state.server import StateAnswer
from manyhands.base.identity import PeerId
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.dht.records import decode_value, encode_value
from manyhands.optim.manifest import RunManifest, manifest_key, read_manifest
from manyhands.optim.metrics import HeldoutRecord, MetricsRecord
from manyhands.optim.serializable import is_serializable
from tests.unit.optim.fake_dht import FakeDht

COUNTS = st.integers(0, 2**53)
AMOUNTS = st.floats(0, 1e300)
TEXTS = st.text(max_size=20)
POSITIONS = st.builds(Position, COUNTS, st.binary(max_size=64))
SPECS = st.lists(
    st.builds(ParameterSpec, TEXTS, st.lists(st.integers(0, 2**40), max_size=4).map(tuple), TEXTS), max_size=4
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
SEATS = st.builds(Seat, st.just(Layout((3, 2))), st.integers(0, 5), COUNTS)
RECORDS = st.one_of(
    st.builds(
        PeerRecord,
        POSITIONS,
        st.booleans(),
        st.lists(TEXTS, max_size=3),
        AMOUNTS,
        SEATS,
        samples=COUNTS,
        samples_per_second=AMOUNTS,
        lineage_samples=COUNTS,
        tensors=st.binary(max_size=64),
        summary=TEXTS,
        num_steps=COUNTS,
    ),
    st.builds(MetricsRecord, COUNTS, AMOUNTS, COUNTS, st.floats(-1e300, 1e300), COUNTS.filter(bool)),
    st.builds(HeldoutRecord, COUNTS, st.floats(-1e300, 1e300), st.floats(0, 1), st.floats(0, 1), COUNTS),
)
MANIFESTS = st.builds(
    RunManifest,
    protocol=TEXTS,
    run_id=st.just("run"),
    target_batch_size=COUNTS,
    tensors=SPECS,
    frozen=st.lists(TEXTS, max_size=3),
    optimizer=TEXTS,
    hyper_parameters=st.lists(st.dictionaries(TEXTS, PLAIN, max_size=3), max_size=2),
    scheduler=TEXTS,
    codec=TEXTS,
    extra=st.dictionaries(TEXTS, TEXTS, max_size=3),
)


@given(RECORDS)
def test_records_survive_the_dht(record: msgspec.Struct) -> None:
    stored = encode_value(msgspec.to_builtins(record, builtin_types=(bytes,)))
    assert msgspec.convert(decode_value(stored), type(record)) == record


@given(MANIFESTS)
def test_manifests_survive_the_dht_with_their_fingerprint(manifest: RunManifest) -> None:
    dht: Any = FakeDht()
    dht.put(manifest_key("run"), "peer", zlib.compress(manifest.encoded()), sequence=1)
    signed = asyncio.run(read_manifest(dht, "run"))
    assert signed is not None
    read = signed.manifest
    assert read == manifest
    assert read.fingerprint() == manifest.fingerprint()


STANDINGS = st.builds(Standing, COUNTS, is_member=st.booleans(), doubted_by=TEXTS.map(PeerId), faults=COUNTS)
ROSTERS = st.builds(Roster, st.dictionaries(TEXTS.map(PeerId), STANDINGS, max_size=3), COUNTS, former=st.tuples(TEXTS))
ORIGINS = st.none() | st.builds(Origin, POSITIONS, st.none() | st.lists(TEXTS.map(PeerId), max_size=3))


@given(
    st.builds(
        StateHeader, POSITIONS, COUNTS, SPECS, st.binary(max_size=20), st.binary(max_size=32), ORIGINS, roster=ROSTERS
    )
)
def test_headers_of_states_survive_the_wire(header: StateHeader) -> None:
    answer = msgspec.msgpack.decode(msgspec.msgpack.encode(StateAnswer(header)), type=StateAnswer)
    assert answer.header == header


@pytest.mark.parametrize(("depth", "travels"), [(32, True), (33, False), (100_000, False)])
def test_values_nested_deeper_than_32_are_not_serializable(depth: int, travels: bool) -> None:
    value: Any = 1
    for level in range(depth):
        value = {"x": value} if level % 2 else [value]
    assert is_serializable(value) == travels
