from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.read_result import ReadResult
from manyhands.dht.records import TOMBSTONE, AgedRecord, Reason
from manyhands.dht.storage import Storage
from tests.unit.dht.examples import ALICE, BOB, MALLORY, WALL_NOW, open_record, owned_record

NOW = 1000.0
CONFIG = DhtConfig(max_records_per_key=4)
ONE, OTHER = PeerId("one"), PeerId("other")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from(["", "x", "alice"]), st.integers(0, 3), st.sampled_from([0.0, 1.0, 60.0])
        ),
        max_size=12,
    )
)
def test_a_read_result_accepts_the_records_that_a_storage_would(shown: list[tuple[int, str, int, float]]) -> None:
    findings, storage = ReadResult("key", CONFIG), Storage(CONFIG)
    for value, subkey, sequence, age_s in shown:
        if subkey == "alice":
            record = owned_record(value or None, sequence=sequence)
        else:
            record = open_record(value or None, subkey=subkey, sequence=sequence)
        aged = AgedRecord(record, age_s)
        assert findings.offer(aged, NOW, WALL_NOW) == storage.offer(aged, NOW, WALL_NOW)
    values = findings.values(NOW)
    held = {held.record.subkey: held for held in storage.get("key", NOW) if held.record.value != TOMBSTONE}
    assert values.keys() == held.keys()
    for subkey, stored in values.items():
        assert stored.value == msgspec.msgpack.decode(held[subkey].record.value)
        assert NOW + stored.remaining_s == held[subkey].expires_at
        assert stored.owner == held[subkey].record.owner


def test_records_that_were_not_asked_for_or_are_forged_are_refused() -> None:
    findings = ReadResult("key", CONFIG)
    forged = msgspec.structs.replace(owned_record(), signature=b"forged")
    for record, reason in ((open_record(key="another"), Reason.MALFORMED), (forged, Reason.BAD_SIGNATURE)):
        assert findings.offer(AgedRecord(record, 0.0), NOW, WALL_NOW) is reason
    assert findings.values(NOW) == {}


def test_a_key_has_only_so_much_room() -> None:
    findings = ReadResult("key", CONFIG)
    reasons = [findings.add(open_record(subkey=str(number)), NOW + 1) for number in range(3)]
    assert reasons == [Reason.ACCEPTED] * 2 + [Reason.KEY_FULL], "half of it is for signed ones"
    assert findings.add(open_record(subkey="0", sequence=2), NOW + 1) is Reason.ACCEPTED
    reasons = [findings.add(owned_record(owner=owner), NOW + 1) for owner in (ALICE, BOB, MALLORY)]
    assert reasons == [Reason.ACCEPTED] * 2 + [Reason.KEY_FULL]
    large = ReadResult("key", DhtConfig(max_bytes_per_key=1000))
    assert large.add(open_record(b"x" * 1000), NOW + 1) is Reason.KEY_FULL


def test_values_of_a_read_result_expire() -> None:
    findings = ReadResult("key", CONFIG)
    findings.add(open_record(), NOW + 1)
    assert findings.values(NOW + 0.5)[""].remaining_s == 0.5
    assert findings.values(NOW + 1) == {}


def test_holders_that_lack_records_are_not_complete() -> None:
    findings = ReadResult("key", DhtConfig())
    assert findings.are_complete([ONE]), "nobody lacks what is not"
    records = [open_record(subkey=str(number)) for number in range(20)]
    for record in records:
        findings.add(record, NOW + 1)
    findings.note_shown(ONE, records)
    findings.note_shown(OTHER, records[:17])
    assert not findings.are_complete([ONE, OTHER])
    findings.note_shown(OTHER, records[:1])
    assert findings.are_complete([ONE, OTHER]), "two may be on their way"
    assert not findings.are_complete([ONE, ALICE.peer_id])
