"""Where averagers meet, against a DHT whose records the test writes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from manyhands.averaging.averager_presence import LAST_ROUND, PresenceTracker, first_position, next_position
from manyhands.averaging.messages import Group, Member, Position
from manyhands.averaging.peer_records import AVERAGING_KIND, GOODBYE, PEER_RECORD, PeerRecord, peer_key
from manyhands.base.errors import ManifestMismatch
from manyhands.base.identity import PeerId
from manyhands.dht import Reason
from tests.network import endpoints, identity_of
from tests.unit.dht.examples import open_record, owned_record
from tests.unit.optim.fake_dht import FakeDht

KEY = peer_key("run", AVERAGING_KIND)
START = first_position("run")
TENSORS = b"t" * 32
BOB, CAROL, DAVE = sorted(identity_of(number).peer_id for number in (101, 102, 103))


def record(position: Position = START, **fields: Any) -> PeerRecord:
    values: dict[str, Any] = {"tensors": TENSORS, "summary": "1", "is_client": False, "addresses": []}
    return PeerRecord(position=position, **(values | fields))


def plain(value: msgspec.Struct) -> Any:
    return msgspec.to_builtins(value, builtin_types=(bytes,))


class Case:
    """A presence tracker, and what it hears."""

    def __init__(self, endpoint: Any, max_group_size: int = 256) -> None:
        self.dht: Any = FakeDht()
        self.dht.declare = lambda key, schema: None
        self.endpoint = endpoint
        self.tracker = PresenceTracker(
            endpoint, self.dht, "run", TENSORS, "1", max_group_size=max_group_size, rng=random.Random(1)
        )
        self._sequence = 1000

    async def hears(self, peer_id: PeerId, value: Any) -> None:
        self._sequence += 1
        self.dht.put(KEY, peer_id, plain(value) if value != GOODBYE else value, sequence=self._sequence)
        await self.tracker.refresh()


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    async with endpoints(1) as (endpoint,):
        yield Case(endpoint)


def manifest_at(position: Position) -> Any:
    return Group(b"g" * 16, BOB, position, [Member(BOB, [], False, 1.0)]).manifest(b"d" * 32)


def test_round_numbers_wrap_around_after_the_last() -> None:
    assert next_position(START, manifest_at(START)).step == 1
    last = Position(LAST_ROUND, b"lie")
    after = next_position(last, manifest_at(last))
    assert after.step == 0
    assert after.lineage not in (START.lineage, last.lineage)
    beyond = Position(2**53, b"lie")
    assert next_position(beyond, manifest_at(beyond)).step == 0
    before = Position(LAST_ROUND - 1, b"lie")
    assert next_position(before, manifest_at(before)).step == LAST_ROUND


@pytest.mark.parametrize("value", [plain(record()), plain(record(Position(2**53, b"x"))), GOODBYE, None])
def test_records_signed_by_their_peer_fit_the_schema_and_unsigned_ones_do_not(value: Any) -> None:
    assert PEER_RECORD.fault_of(owned_record(value, key=KEY)) is None
    assert PEER_RECORD.fault_of(open_record(value, key=KEY)) is Reason.OTHER_SCHEMA


@pytest.mark.parametrize(
    "change",
    [
        {"position": {"step": 2**53 + 1, "lineage": b""}},
        {"position": {"step": -1, "lineage": b""}},
        {"summary": "x" * 401},
        {"addresses": ["/ip4/10.0.0.1/tcp/1"] * 9},
        {"num_steps": 2**60},
    ],
)
def test_records_out_of_bounds_do_not_fit_the_schema(change: dict[str, Any]) -> None:
    value = plain(record()) | change
    assert PEER_RECORD.fault_of(owned_record(value, key=KEY)) is Reason.OTHER_SCHEMA


async def test_peers_at_this_position_and_behind_are_expected(case: Case) -> None:
    ahead = Position(2, b"ahead")
    await case.hears(BOB, record())
    await case.hears(CAROL, record(ahead, is_client=True))
    await case.hears(DAVE, record(ahead, tensors=b"others"))
    assert set(case.tracker.expected()) == {BOB}
    case.tracker.begin_step()
    assert case.tracker.position() == ahead
    assert case.tracker.expected() == {BOB: False, CAROL: True}
    assert case.tracker.num_peers() == 3
    assert case.tracker.misfits() == [f"the tensors of peer {DAVE} differ: it has 1; here there are 1"]
    await case.hears(CAROL, GOODBYE)
    assert case.tracker.expected() == {BOB: False}


async def test_of_two_branches_of_one_length_the_higher_lineage_leads(case: Case) -> None:
    await case.hears(BOB, record(Position(2, b"a")))
    await case.hears(CAROL, record(Position(2, b"b")))
    case.tracker.catch_up()
    assert case.tracker.position() == Position(2, b"b")
    assert set(case.tracker.expected()) == {BOB, CAROL}


async def test_a_record_out_of_bounds_is_counted_and_changes_no_position(case: Case) -> None:
    case.dht.put(KEY, BOB, plain(record()) | {"position": {"step": 2**53 + 1, "lineage": b""}}, sequence=1)
    await case.tracker.refresh()
    case.tracker.begin_step()
    assert case.tracker.position() == START
    assert case.endpoint.counters["bad_records"] == 1


async def test_a_peer_that_was_lost_is_not_expected_before_a_fresh_record(case: Case) -> None:
    await case.hears(BOB, record())
    case.tracker.report_missing(BOB)
    case.tracker.begin_step()
    assert not case.tracker.expected()
    await case.hears(BOB, record())
    assert case.tracker.expected() == {BOB: False}


async def test_a_peer_that_missed_a_round_does_not_lead_until_it_has_made_a_step(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case.endpoint, "is_connected", lambda peer_id: True)
    await case.hears(BOB, record())
    case.tracker.report_missing(BOB)
    assert not case.tracker.expected()
    await case.hears(BOB, record())
    assert not case.tracker.expected(), "it only says that it is alive"
    case.tracker.begin_step()
    assert case.tracker.expected() == {BOB: True}, "for a moment, and not as a leader"
    await case.hears(BOB, record(num_steps=1))
    assert case.tracker.expected() == {BOB: False}


async def test_an_older_record_never_replaces_a_newer_one(case: Case) -> None:
    await case.hears(BOB, record(Position(5, b"")))
    case.dht.put(KEY, BOB, plain(record()), sequence=1)
    await case.tracker.refresh()
    assert case.tracker.leading() == Position(5, b"")
    await case.hears(BOB, GOODBYE)
    case.dht.put(KEY, BOB, plain(record()), sequence=2)
    await case.tracker.refresh()
    assert case.tracker.num_peers() == 1


async def test_joining_with_other_tensors_names_the_difference(case: Case) -> None:
    case.dht.put(KEY, BOB, plain(record(tensors=b"others", summary="2 with \x1b 3 values")), sequence=1)
    with pytest.raises(ManifestMismatch) as error:
        await case.tracker.start()
    assert error.value.differences == [f"the tensors of peer {BOB} differ: it has 2 with ? 3 values; here there are 1"]
    assert not case.dht.stored, "nobody hears of it"
