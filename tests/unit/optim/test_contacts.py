"""What a peer finds out of others by calling and dialling them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.roster import Roster, Standing
from manyhands.base.errors import DialFailed, DialReason, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.run import contacts
from manyhands.optim.run.contacts import Contacts
from manyhands.optim.run.progress import View
from manyhands.runtime import TaskOwner
from tests.averagers import sim_peers
from tests.network import until

ADDRESSES = ["/ip4/10.0.0.1/tcp/4001", "/ip4/10.0.0.1/tcp/4002"]
MISSING = PeerId("missing")


async def is_dead(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a missing peer is forgotten, one of whose addresses refuses; the dial of the other one fails like this.

    Raises:
        BaseException: what the task in the background has raised.
    """

    async def probe(address: object, timeout_s: float) -> None:
        raise DialFailed(str(address), DialReason.REFUSED) if str(address) == ADDRESSES[0] else failure

    monkeypatch.setattr(contacts, "DIAL_S", 0.0)
    observed = {MISSING: SimpleNamespace(record=SimpleNamespace(addresses=ADDRESSES))}
    forgotten: list[PeerId] = []
    tracker: Any = SimpleNamespace(
        missing=lambda: observed, observed=lambda: observed, forget=forgotten.append, judge=lambda: None
    )
    failures: list[BaseException] = []
    tasks = TaskOwner("test", failures.append)
    async with sim_peers(1) as (peer,):
        monkeypatch.setattr(peer.presence.endpoint, "probe", probe)
        Contacts(peer.presence, "run", tracker, tasks).look_for_the_dead()
        await until(lambda: not len(tasks), "it has looked")
    for error in failures:
        raise error
    return forgotten == [MISSING]


@pytest.mark.parametrize(
    ("failure", "proves_it"),
    [
        (DialFailed("", DialReason.REFUSED), True),
        (DialFailed("", DialReason.HELD_BACK), True),
        (DialFailed("", DialReason.TIMED_OUT), False),
        (Unavailable("this peer was closed"), False),
    ],
)
async def test_a_peer_is_dead_if_its_dials_are_refused_and_not_if_they_time_out(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, *, proves_it: bool
) -> None:
    assert await is_dead(failure, monkeypatch) is proves_it


async def test_an_error_of_the_program_says_nothing_about_a_peer_and_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ZeroDivisionError):
        await is_dead(ZeroDivisionError(), monkeypatch)


class Run:
    """A peer's progress in a run, as far as its contacts need it: who is in the roster and in the DHT."""

    def __init__(self, *roster: PeerId, is_idle: bool = False) -> None:
        self.own = PeerRecord(Position(3, b"here"), is_client=False, addresses=[])
        self.is_idle = is_idle
        self.view = View({}, self.own.position)
        self.told: dict[PeerId, PeerRecord] = {}
        self.roster = lambda: Roster({peer_id: Standing() for peer_id in roster})

    def observed(self) -> dict[PeerId, PeerRecord]:
        return self.told

    def missing(self) -> dict[PeerId, PeerRecord]:
        return {}

    async def look(self, timeout_s: float) -> None:
        """The DHT shows nobody."""

    def heard(self, peer_id: PeerId, record: PeerRecord) -> None:
        self.told[peer_id] = record


@pytest.mark.parametrize("is_idle", [False, True])
async def test_a_peer_of_the_roster_that_the_dht_does_not_show_is_asked_and_answers_while_it_trains(
    *, is_idle: bool
) -> None:
    async with sim_peers(2) as (asking, asked):
        here: Any = Run(asking.presence.peer_id, asked.presence.peer_id)
        there: Any = Run(is_idle=is_idle)
        contacts = Contacts(asking.presence, "run", here, TaskOwner("test"))
        Contacts(asked.presence, "run", there, TaskOwner("test"))
        assert not await contacts.ask_others(checks_link=False)
        assert here.told == ({} if is_idle else {asked.presence.peer_id: there.own})
        assert there.told == {}, "it takes in only records of peers that the DHT shows"


async def test_a_peer_that_knows_others_may_be_cut_off_if_none_of_the_dht_answers() -> None:
    async with sim_peers(2) as (other, asking):
        run: Any = Run()
        contacts = Contacts(asking.presence, "run", run, TaskOwner("test"))
        assert not await contacts.ask_others(checks_link=True)
        await other.presence.stop()
        assert not await contacts.ask_others(checks_link=False)
        assert await contacts.ask_others(checks_link=True)
