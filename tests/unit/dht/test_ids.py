"""Points of the key space, and the distance between two of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.identity import PeerId
from manyhands.dht.ids import distance, id_from_bytes, id_to_bytes, key_id, node_id

IDS = st.integers(0, 2**256 - 1)


def test_points_are_sha256_of_the_text() -> None:
    expected = 0xBA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD  # FIPS 180, example "abc"
    assert node_id(PeerId("abc")) == key_id("abc") == expected


@given(IDS, IDS, IDS)
def test_distance_is_a_metric(a: int, b: int, c: int) -> None:
    assert distance(a, b) == distance(b, a)
    assert (distance(a, b) == 0) == (a == b)
    assert distance(a, c) <= distance(a, b) + distance(b, c)


@given(IDS)
def test_a_point_survives_the_wire(point: int) -> None:
    assert id_from_bytes(id_to_bytes(point)) == point
