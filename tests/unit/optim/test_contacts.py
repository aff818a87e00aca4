"""What failed dials prove about a peer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.base.errors import DialFailed, DialReason, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.run import contacts
from manyhands.optim.run.contacts import Contacts
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
