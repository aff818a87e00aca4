"""The rows of the peers, and the events that are made of what they publish."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from manyhands.averaging.messages import Position, short_id
from manyhands.averaging.peer_records import PeerRecord, SeenRecord
from manyhands.base.identity import PeerId
from manyhands.monitor import peer_table as table_module
from manyhands.monitor.credit import Credit
from manyhands.monitor.history import SeenPeer
from manyhands.monitor.peer_table import MAX_ALIKE, SILENT_S, PeerTable, reach_of
from manyhands.monitor.picture import RunEvent
from manyhands.optim.metrics import AccountRecord
from tests.unit.monitor.published import Peers

WALL_S = 1e9
TTL_S = 30.0


def seen(since: float, step: int = 1, *, began_at: float = 5.0, is_auxiliary: bool = False) -> SeenRecord:
    position = Position(step, b"")
    record = PeerRecord(
        position, False, [], TTL_S, samples=1, samples_per_second=2.5, is_auxiliary=is_auxiliary, began_at=began_at
    )
    return SeenRecord(record, since + TTL_S)


class Story:
    """Looks of a table, one after the other."""

    def __init__(self, known: list[SeenPeer] | None = None) -> None:
        self.credit = Credit()
        self.table = PeerTable({entry.peer: entry for entry in known or []})
        self.known: list[SeenPeer] = []

    def look(
        self, now: float, observed: dict[str, SeenRecord], accounts: dict[str, AccountRecord] | None = None
    ) -> list[RunEvent]:
        events, known = self.table.look(
            {PeerId(name): record for name, record in observed.items()},
            {PeerId(name): account for name, account in (accounts or {}).items()},
            now=now, wall_time=WALL_S + now, step=1, credit=self.credit,
        )  # fmt: skip
        self.known += known
        return events

    def state(self, name: str) -> str:
        return next(row.state for row in self.table.rows(self.credit, is_averaging=False) if row.peer_id == name)


def kinds(events: list[RunEvent]) -> list[tuple[str, str]]:
    return [(event.kind, event.peer_id) for event in events]


def test_a_silent_peer_has_died_and_may_come_back() -> None:
    story = Story()
    assert kinds(story.look(0.0, {"a": seen(0.0)})) == [("joined", "a")]
    assert story.look(SILENT_S, {"a": seen(0.0)}) == []
    assert story.table.silence_due_s(SILENT_S) == 0.0
    assert kinds(story.look(SILENT_S + 0.1, {"a": seen(0.0)})) == [("died", "a")]
    assert story.state("a") == "gone"
    assert kinds(story.look(20.0, {"a": seen(19.0)})) == [("joined", "a")]
    assert story.state("a") == "training"


def test_a_peer_that_says_goodbye_has_left_and_one_that_expires_has_died() -> None:
    story = Story()
    story.look(0.0, {"a": seen(0.0), "b": seen(-TTL_S / 3)})
    assert kinds(story.look(1.0, {"b": seen(-TTL_S / 3)})) == [("left", "a")]
    assert kinds(story.look(40.0, {})) == [("died", "b")]
    left = AccountRecord(has_left=True)
    story.look(50.0, {"c": seen(50.0)})
    assert kinds(story.look(51.0, {"c": seen(50.0)}, {"c": left})) == [("left", "c")]


def test_a_peer_that_was_there_before_a_restart_of_the_monitor_has_not_joined_again() -> None:
    story = Story()
    story.look(0.0, {"a": seen(0.0, began_at=77.0)}, {"a": AccountRecord(name="ann")})
    again = Story(story.known)
    assert again.look(100.0, {"a": seen(100.0, began_at=77.0)}) == []
    (row,) = again.table.rows(again.credit, is_averaging=False)
    assert (row.name, row.since) == ("ann", WALL_S)
    assert kinds(Story(story.known).look(100.0, {"a": seen(100.0, began_at=78.0)})) == [("joined", "a")]


def test_failures_are_told_once_with_their_reason() -> None:
    story = Story()
    first = AccountRecord(name="ann", rounds_committed=3, rounds_aborted=1, failed_step=2, failure="old")
    assert kinds(story.look(0.0, {"a": seen(0.0)}, {"a": first})) == [("joined", "a")]
    failed = msgspec.structs.replace(first, rounds_aborted=2, failed_step=4, failure="peer b left the group")
    (event,) = story.look(1.0, {"a": seen(1.0)}, {"a": failed})
    assert (event.kind, event.name) == ("aborted", "ann")
    assert event.text == "ann could not make step 4: peer b left the group"
    assert story.look(2.0, {"a": seen(2.0)}, {"a": msgspec.structs.replace(failed, step=9)}) == []
    reloaded = msgspec.structs.replace(failed, states_loaded=1, parameters_reloaded=1)
    assert kinds(story.look(3.0, {"a": seen(3.0)}, {"a": reloaded})) == [("reloaded", "a")]


def test_a_failure_of_many_and_a_crowd_of_newcomers_are_one_event_each() -> None:
    story, names = Story(), [f"peer {number}" for number in range(500)]
    observed = {name: seen(0.0) for name in names}
    (event,) = story.look(0.0, observed, dict.fromkeys(names, AccountRecord()))
    assert (event.kind, event.text.split(" (")[0]) == ("joined", "500 peers")
    failed = AccountRecord(rounds_aborted=1, failed_step=2, failure="the leader is gone")
    accounts = {name: msgspec.structs.replace(failed) for name in names}
    (event,) = story.look(1.0, observed, accounts)
    assert event.kind == "aborted"
    assert event.text.endswith("could not make step 2: the leader is gone")
    others = {
        name: AccountRecord(rounds_aborted=2, failed_step=3, failure=f"reason {number}")
        for number, name in enumerate(names)
    }
    events = story.look(2.0, observed, others)
    assert len(events) == MAX_ALIKE + 1, "a swarm of liars does not flood the list"


def test_a_row_says_why_samples_are_not_in_the_last_step() -> None:
    story, peers = Story(), Peers("abc")
    peers.commit({"a": 8, "b": 8})
    story.credit.look(peers.accounts, peers.positions, 0.0)
    story.look(0.0, {"a": seen(0.0), "d": seen(0.0), "x": seen(0.0, is_auxiliary=True)})
    peers.commit({"a": 8, "b": 8})
    peers.commit({"a": 8, "b": 8})
    story.credit.look(peers.accounts, peers.positions, 1.0)
    failed = AccountRecord(failed_step=3, failure="its link is too slow")
    story.look(
        1.0,
        {"a": seen(1.0, 3), "c": seen(1.0, 2), "d": seen(1.0, 2), "e": seen(1.0, 3), "x": seen(1.0, is_auxiliary=True)},
        {"d": failed, "e": AccountRecord(), "a": AccountRecord()},
    )
    rows = {row.peer_id: row for row in story.table.rows(story.credit, is_averaging=False)}
    assert (rows["a"].reason, rows["a"].samples, rows["a"].rounds_committed, rows["a"].rounds_missed) == ("", 24, 2, 0)
    assert rows["a"].share == 0.5
    assert rows["d"].reason == "its link is too slow"
    assert (rows["d"].rounds_committed, rows["d"].rounds_missed) == (0, 2)
    assert rows["e"].reason == "it had no samples in that step"
    assert "publishes no account" in rows["c"].reason
    assert (rows["x"].reach, rows["x"].rounds_missed) == ("auxiliary", 0)


@pytest.mark.parametrize(
    ("fields", "reach"),
    [
        ({}, "direct"),
        ({"is_client": True}, "client"),
        ({"is_client": True, "relay": "r"}, "relayed"),
        ({"is_client": True, "relay": "r", "is_punched": True}, "punched"),
        ({"relay": "r"}, "direct"),
        ({"is_auxiliary": True, "is_client": True}, "auxiliary"),
    ],
)
def test_a_row_says_how_others_reach_the_peer(fields: dict[str, Any], reach: str) -> None:
    record = msgspec.structs.replace(seen(0.0).record, **fields)
    assert reach_of(record) == reach


def test_a_swarm_of_short_lived_ids_is_forgotten_but_not_peers_with_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_GONE", 20)
    monkeypatch.setattr(table_module, "MAX_KNOWN", 30)
    story, peers, forgotten = Story(), Peers("ab"), list[bytes]()
    story.look(0.0, {"a": seen(0.0), "b": seen(0.0)}, {"a": AccountRecord(name="ann")})
    peers.commit({"a": 8, "b": 8})
    story.credit.look(peers.accounts, peers.positions, 0.0)
    for number in range(10):
        now = 1.0 + number
        story.look(now, {f"id {number} {one}": seen(now) for one in range(10)})
        forgotten += story.table.forget(story.credit)
    rows = story.table.rows(story.credit, is_averaging=False)
    assert sum(row.state == "gone" or row.state == "left" for row in rows) == 20
    assert {row.peer_id for row in rows if row.state == "training"} == {f"id 9 {one}" for one in range(10)}
    names = story.table.names
    assert len(names) <= 30
    assert names[short_id(PeerId("a"))] == ("a", "ann")
    assert len(forgotten) + len(names) == 102
