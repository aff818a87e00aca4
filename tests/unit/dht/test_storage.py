from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.identity import Identity, PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.records import TOMBSTONE, AgedRecord, Reason, Record, digest_of_records
from manyhands.dht.storage import Held, Storage
from tests.traced import traced_memory
from tests.unit.dht.examples import ALICE, MALLORY, WALL_NOW, open_record, owned_record

NOW = 1000.0
CONFIG = DhtConfig()
OFFERS = st.lists(
    st.builds(
        lambda value, subkey, sequence, age_s: AgedRecord(
            open_record(value, subkey=subkey, sequence=sequence)
            if subkey != "alice"
            else owned_record(value, sequence=sequence),
            age_s,
        ),
        value=st.integers(0, 2),
        subkey=st.sampled_from(["", "x", "alice"]),
        sequence=st.integers(0, 2),
        age_s=st.sampled_from([0.0, 1.0, 59.0, 60.0]),
    ),
    max_size=12,
)


def contents(storage: Storage, now: float = NOW) -> dict[str, tuple[Record, float]]:
    return {held.record.subkey: (held.record, held.expires_at) for held in storage.get("key", now)}


@given(OFFERS, st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(offers: list[AgedRecord], rng: random.Random) -> None:
    one, other = Storage(DhtConfig()), Storage(DhtConfig())
    for aged in offers:
        one.offer(aged, NOW, WALL_NOW)
    for aged in rng.sample(offers, len(offers)):
        other.offer(aged, NOW, WALL_NOW)
    assert contents(one) == contents(other)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(1, 20), st.integers(0, 5)), max_size=60))
def test_a_record_is_refused_exactly_if_what_is_held_leaves_no_room(steps: list[tuple[int, int, int, int]]) -> None:
    """After any number of records came, were replaced and expired."""
    config = DhtConfig(max_records=4, max_bytes=2000, max_records_per_key=6, max_records_per_source=2)
    storage, now = Storage(config), NOW

    def all_held() -> list[Held]:
        return [held for key in storage.keys(now) for held in storage.get(key, now)]

    for number, sequence, lifetime_s, pause_s in steps:
        now += pause_s
        record = open_record("v" * sequence * 20, key=f"key-{number % 2}", subkey=str(number), sequence=sequence)
        source = "10.0.0.1" if lifetime_s % 2 else ""
        others = [held for held in all_held() if held.record.subkey != record.subkey]
        fits = (
            len(others) < 4
            and sum(held.record.num_bytes for held in others) + record.num_bytes <= 2000
            and sum(held.record.key == record.key for held in others) < 3  # unsigned records take half of a key
            and not (source and sum(held.source == source for held in others) >= 2)
        )
        reason = storage.put(record, now + lifetime_s, now, source)
        if reason not in (Reason.STALE, Reason.UNCHANGED):
            assert (reason is Reason.ACCEPTED) == fits
        assert len(storage) == len(all_held())
        assert all(held.expires_at > now for held in all_held())
    storage.expire(now + 100)
    assert len(storage) == 0


def test_expired_records_leave_no_account_behind() -> None:
    storage = Storage(DhtConfig())
    with traced_memory() as num_held:
        for number in range(2000):
            owner = f"owner-{number}"
            record = msgspec.structs.replace(open_record(key=f"key-{number}"), owner=owner, signature=b"s")
            storage.put(record, NOW + number + 1, NOW + number, f"10.0.0.{number % 50}")
        storage.expire(NOW + 5000)
        assert num_held() < 100_000


def test_the_higher_sequence_counts() -> None:
    storage = Storage(DhtConfig())
    assert storage.put(open_record("second", sequence=2), NOW + 60, NOW) is Reason.ACCEPTED
    assert storage.put(open_record("first", sequence=1), NOW + 60, NOW) is Reason.STALE
    assert storage.put(open_record("third", sequence=3), NOW + 60, NOW) is Reason.ACCEPTED
    assert contents(storage)[""] == (open_record("third", sequence=3), NOW + 60)


def test_the_same_record_again_changes_nothing_but_the_expiry() -> None:
    storage = Storage(DhtConfig())
    storage.put(open_record(), NOW + 60, NOW)
    assert storage.put(open_record(), NOW + 50, NOW) is Reason.UNCHANGED
    assert contents(storage) == {"": (open_record(), NOW + 60)}
    assert storage.put(open_record(), NOW + 61, NOW) is Reason.UNCHANGED
    assert contents(storage, NOW + 60.5) == {"": (open_record(), NOW + 61)}


def test_each_subkey_expires_by_itself() -> None:
    storage = Storage(DhtConfig())
    storage.put(open_record(subkey="short"), NOW + 1, NOW)
    storage.put(open_record(subkey="long"), NOW + 2, NOW)
    assert contents(storage, NOW + 0.9).keys() == {"short", "long"}
    assert contents(storage, NOW + 1).keys() == {"long"}
    assert contents(storage, NOW + 2).keys() == set()
    assert storage.keys(NOW + 2) == []


def test_a_replaced_record_does_not_take_its_successor_along() -> None:
    storage = Storage(DhtConfig())
    storage.put(open_record(sequence=1), NOW + 1, NOW)
    storage.put(open_record(sequence=2), NOW + 5, NOW)
    assert contents(storage, NOW + 3) == {"": (open_record(sequence=2), NOW + 5)}


def test_an_expired_record_no_longer_stands_in_the_way() -> None:
    storage = Storage(DhtConfig())
    storage.put(open_record(sequence=2), NOW + 1, NOW)
    assert storage.put(open_record(sequence=1), NOW + 60, NOW + 1) is Reason.ACCEPTED


def test_records_that_are_handed_on_have_aged_by_the_time_held() -> None:
    storage = Storage(DhtConfig())
    storage.offer(AgedRecord(owned_record(ttl_s=60.0), 10.0), NOW, WALL_NOW)
    held = storage.held("key", ALICE.peer_id, NOW + 7)
    assert held is not None
    assert held.aged(NOW + 7).age_s == pytest.approx(17.0)


def test_a_forged_record_is_refused_and_the_true_one_stays() -> None:
    storage = Storage(DhtConfig())
    storage.offer(AgedRecord(owned_record("true"), 0.0), NOW, WALL_NOW)
    forged = open_record("forged", subkey=ALICE.peer_id, sequence=9).signed_by(MALLORY)
    assert storage.offer(AgedRecord(forged, 0.0), NOW, WALL_NOW) is Reason.WRONG_OWNER
    assert contents(storage)[ALICE.peer_id][0] == owned_record("true")


def test_a_tombstone_is_held_like_any_record() -> None:
    storage = Storage(DhtConfig())
    storage.put(open_record("value", sequence=1), NOW + 60, NOW)
    assert storage.put(open_record(None, sequence=2), NOW + 60, NOW) is Reason.ACCEPTED
    assert storage.put(open_record("value", sequence=1), NOW + 60, NOW) is Reason.STALE
    assert [held.record.value == TOMBSTONE for held in storage.get("key", NOW)] == [True]


@pytest.mark.parametrize(
    ("bound", "records", "refusal"),
    [
        (
            DhtConfig(max_records_per_key=2),
            [open_record(subkey="1"), owned_record(), owned_record(owner=MALLORY)],
            Reason.KEY_FULL,
        ),
        (
            DhtConfig(max_records_per_key=4),
            [open_record(subkey="1"), open_record(subkey="2"), open_record(subkey="3")],
            Reason.KEY_FULL,
        ),
        (
            DhtConfig(max_bytes_per_key=6000),
            [open_record("v" * 2500, subkey="1"), open_record("v" * 2500, subkey="2")],
            Reason.KEY_FULL,
        ),
        (
            DhtConfig(max_records_per_owner=1),
            [owned_record(key="1"), owned_record(key="2")],
            Reason.OWNER_FULL,
        ),
        (DhtConfig(max_records=1), [open_record(key="1"), owned_record(key="2")], Reason.STORAGE_FULL),
        (
            DhtConfig(max_bytes=3000),
            [open_record("v" * 2500, key="1"), open_record("v" * 2500, key="2")],
            Reason.STORAGE_FULL,
        ),
    ],
)
def test_records_beyond_a_bound_are_refused_until_there_is_room(
    bound: DhtConfig, records: list[Record], refusal: Reason
) -> None:
    storage = Storage(bound)
    *fitting, last = records
    for record in fitting:
        assert storage.put(record, NOW + 1, NOW) is Reason.ACCEPTED
    assert storage.put(last, NOW + 60, NOW) is refusal
    assert storage.put(last, NOW + 60, NOW + 1) is Reason.ACCEPTED, "the others have expired"


def test_one_network_does_not_keep_others_out_of_a_key_whatever_key_pairs_it_has() -> None:
    storage = Storage(DhtConfig(max_records_per_key=8))
    owners = [Identity.from_seed(bytes([number]) * 32) for number in range(8)]
    records = [owned_record(owner=owner, issued_at=NOW) for owner in owners]
    of_one = [storage.put(record, NOW + 60, NOW, f"10.0.0.{number}") for number, record in enumerate(records)]
    assert of_one == [Reason.ACCEPTED] * 6 + [Reason.SOURCE_FULL] * 2
    assert storage.put(records[7], NOW + 60, NOW, "10.0.1.1") is Reason.ACCEPTED
    assert storage.put(owned_record(owner=owners[0], key="other"), NOW + 60, NOW, "10.0.0.1") is Reason.ACCEPTED


def test_the_records_of_some_owners_are_those_of_a_page_and_of_a_digest_of_theirs() -> None:
    storage = Storage(DhtConfig())
    owners = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
    for owner in owners:
        assert storage.put(owned_record(owner=owner), NOW + 60, NOW) is Reason.ACCEPTED
    named = [owners[1].peer_id, owners[3].peer_id, PeerId("nobody")]
    got = storage.get("key", NOW, named)
    assert {held.record.owner for held in got} == set(named[:2])
    assert storage.page("key", None, NOW, named)[0] == sorted(got, key=lambda held: held.record.owner)
    assert storage.digest("key", NOW, named) == digest_of_records(held.record for held in got)
    assert len(storage.get("key", NOW)) == 4


class Members:
    """Alice, and those that are named later."""

    def __init__(self) -> None:
        self.owners = {ALICE.peer_id}

    def is_member(self, peer_id: PeerId) -> bool:
        return peer_id in self.owners

    def takes(self, record: Record) -> bool:
        return record.owner in self.owners


def test_strangers_have_little_room_in_a_run_whose_members_are_known() -> None:
    members = Members()
    storage = Storage(DhtConfig(max_records_per_key=256), members={"run": members})
    owners = [Identity.from_seed(bytes([number]) * 32) for number in range(8)]
    records = [owned_record(key="run.progress", owner=owner) for owner in owners]
    taken = [storage.put(record, NOW + 60, NOW, f"10.{number}.0.1") for number, record in enumerate(records)]
    assert taken == [Reason.ACCEPTED] * 4 + [Reason.KEY_FULL] * 4
    assert storage.put(open_record(key="run.progress"), NOW + 60, NOW) is Reason.KEY_FULL
    assert storage.put(owned_record(key="run.progress", owner=ALICE), NOW + 60, NOW) is Reason.ACCEPTED
    assert storage.put(owned_record(key="run.progress", owner=owners[0]), NOW + 61, NOW) is Reason.UNCHANGED
    assert storage.put(owned_record(key="other.progress", owner=owners[4]), NOW + 60, NOW) is Reason.ACCEPTED

    members.owners |= {owner.peer_id for owner in owners[:2]}
    storage.recount("run", NOW)
    assert storage.put(records[4], NOW + 60, NOW) is Reason.ACCEPTED, "two that have joined take none of that room"


def test_one_network_does_not_take_all_the_room_of_strangers() -> None:
    storage = Storage(DhtConfig(max_records_per_key=256), members={"run": Members()})
    owners = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
    records = [owned_record(key="run.progress", owner=owner) for owner in owners]
    of_one = [storage.put(record, NOW + 60, NOW, f"10.0.0.{number}") for number, record in enumerate(records)]
    assert of_one == [Reason.ACCEPTED] * 3 + [Reason.SOURCE_FULL]
    assert storage.put(records[3], NOW + 60, NOW, "10.0.1.1") is Reason.ACCEPTED


def test_records_that_came_before_the_members_were_known_have_no_more_room() -> None:
    members: dict[str, Members] = {}
    storage = Storage(DhtConfig(max_records_per_key=256), members=members)
    for number in range(8):
        owner = Identity.from_seed(bytes([number]) * 32)
        storage.put(owned_record(key="run.progress", owner=owner), NOW + 60, NOW)
    members["run"] = Members()
    storage.recount("run", NOW)
    assert len(storage) == 4


def test_a_full_storage_still_takes_new_values_of_what_it_holds() -> None:
    storage = Storage(DhtConfig(max_records=1))
    storage.put(open_record(sequence=1), NOW + 60, NOW)
    assert storage.put(open_record(sequence=2), NOW + 60, NOW) is Reason.ACCEPTED


def test_one_owner_does_not_use_up_the_room_of_another() -> None:
    storage = Storage(DhtConfig(max_records_per_owner=1))
    storage.put(owned_record(owner=MALLORY), NOW + 60, NOW)
    assert storage.put(owned_record(owner=ALICE), NOW + 60, NOW) is Reason.ACCEPTED


def test_a_record_that_is_renewed_for_ever_takes_no_more_memory() -> None:
    storage = Storage(DhtConfig())
    with traced_memory() as num_held:
        for sequence in range(10_000):
            storage.put(open_record(sequence=sequence), NOW + 1000 + sequence, NOW)
        assert num_held() < 50_000
    assert contents(storage, NOW + 10_999 + 1) == {}


def test_two_holders_of_the_same_have_the_same_digest() -> None:
    one, other = Storage(CONFIG), Storage(CONFIG)
    records = [owned_record(1), open_record(2), open_record(3, subkey="a")]
    for storage, order in ((one, records), (other, records[::-1])):
        for record in order:
            storage.put(record, NOW + 60.0, NOW)
    assert one.digest("key", NOW) == other.digest("key", NOW) != one.digest("another key", NOW)
    one.put(open_record(4, sequence=2), NOW + 5.0, NOW)
    assert one.digest("key", NOW) != other.digest("key", NOW), "a later record"
    other.put(open_record(4, sequence=2), NOW + 60.0, NOW)
    assert one.digest("key", NOW) == other.digest("key", NOW), "when it expires does not matter"
    assert one.digest("key", NOW + 6.0) != other.digest("key", NOW + 6.0), "whether it has does"
    assert one.digest("key", NOW + 61.0) == other.digest("key", NOW + 61.0) == digest_of_records([])


def test_a_page_of_at_most_so_many_records_goes_round() -> None:
    storage = Storage(DhtConfig())
    for subkey in "abcde":
        storage.put(open_record(subkey=subkey), NOW + 60, NOW)

    def page(after: str, most: int) -> tuple[str, bool]:
        held, is_more = storage.page("key", after, NOW, most=most)
        return "".join(one.record.subkey for one in held), is_more

    assert page("b", 2) == ("cd", True)
    assert page("d", 3) == ("eab", True)
    assert page("c", 5) == ("deabc", False)
    assert page("e", 9) == ("abcde", False)
    assert storage.num_held("key", NOW) == 5
    assert storage.num_held("other", NOW) == 0
