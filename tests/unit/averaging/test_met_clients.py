"""Which clients of a group may reduce: those that all other clients can exchange with."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from manyhands.averaging.matchmaking import admission
from manyhands.averaging.matchmaking.admission import Ways, clients_to_meet, fault_of, met_clients
from manyhands.averaging.messages import Group, Member, Position
from manyhands.base.identity import PeerId
from tests.unit.averaging.groups import peer

DIRECT = Member(peer(0), [], False, 1.0)
CLIENTS = [Member(peer(number), [], True, 1.0) for number in range(1, 5)]
MEMBERS = [DIRECT, *CLIENTS]


def ways(punched: str = "", relayed: str = "") -> Ways:
    """The ways to clients with these numbers."""
    return Ways(frozenset(peer(int(one)) for one in punched), frozenset(peer(int(one)) for one in relayed))


@pytest.mark.parametrize(
    ("said", "met"),
    [
        ({}, ""),
        ({1: ways("234"), 2: ways("134"), 3: ways("124"), 4: ways("123")}, "1234"),
        ({1: ways("234"), 2: ways("34"), 3: ways("4"), 4: ways("1")}, ""),  # both of a pair must say it
        ({1: ways("234"), 2: ways("1"), 3: ways("1"), 4: ways("1")}, "1"),  # the others do not reach each other
        ({1: ways("23"), 2: ways("134"), 3: ways("124"), 4: ways("23")}, "23"),
        ({1: ways("23", "4"), 2: ways("134"), 3: ways("124"), 4: ways("23", "1")}, "1234"),  # one pair has a relay
        ({1: ways("2", "34"), 2: ways("134"), 3: ways("24", "1"), 4: ways("23", "1")}, "234"),  # 1: most are relayed
        ({1: ways("", "234"), 2: ways("", "134"), 3: ways("", "124"), 4: ways("", "123")}, ""),
        ({2: ways("134"), 3: ways("124"), 4: ways("123")}, ""),  # 1 has said nothing
    ],
)
def test_a_client_reduces_if_all_others_reach_it_and_most_without_a_relay(said: dict[int, Ways], met: str) -> None:
    by_id: dict[PeerId, Ways] = {peer(number): one for number, one in said.items()}
    assert met_clients(MEMBERS, by_id) == {int(rank) for rank in met}


def test_a_client_alone_among_peers_that_can_be_dialled_does_not_reduce() -> None:
    assert met_clients(MEMBERS[:2], {}) == set()


def test_members_that_can_be_dialled_need_no_way() -> None:
    assert met_clients(MEMBERS[:3], {peer(1): ways("2"), peer(2): ways("1")}) == {1, 2}


def test_a_client_that_is_met_owns_a_span() -> None:
    members = [DIRECT, Member(peer(1), [], True, 1.0, is_met=True), Member(peer(2), [], True, 1.0)]
    group = Group(b"n", peer(0), Position(0, b""), members)
    assert group.bandwidths(range(3)) == [1, 1, 0]
    assert fault_of(group, peer(0), Member(peer(1), [], True, 1.0), Position(0, b""), "none") is None


def to_meet(own: int, members: Collection[int] = range(6), punchable: Collection[int] = range(6)) -> list[int]:
    """The numbers of the clients that one of the clients 1 to 5 connects to."""
    clients = {peer(number): number in punchable for number in range(1, 6)}
    found = clients_to_meet(peer(own), clients, [peer(number) for number in members])
    return sorted(number for number in range(6) if peer(number) in found)


def test_few_clients_all_meet_each_other() -> None:
    assert to_meet(3) == [1, 2, 4, 5]


@pytest.mark.parametrize("members", [(), range(6), (0, 4, 5)])
def test_of_many_clients_those_that_may_reduce_meet_all_and_the_others_only_these(
    members: Collection[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_REDUCING_CLIENTS", 2)
    clients = {1, 2, 3, 4, 5}
    chosen = sorted(clients & set(members) or clients, key=peer)[:2]
    for client in sorted(clients):
        expected = sorted(clients - {client}) if client in chosen else sorted(chosen)
        assert to_meet(client, members) == expected, client


def test_a_client_that_others_reach_by_relays_alone_is_none_of_those_that_may_reduce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_REDUCING_CLIENTS", 2)
    symmetric = set(sorted(range(1, 6), key=peer)[:3])
    chosen = sorted({1, 2, 3, 4, 5} - symmetric)
    for client in symmetric:
        assert to_meet(client, punchable=chosen) == chosen
    assert to_meet(chosen[0], punchable=chosen) == sorted({1, 2, 3, 4, 5} - {chosen[0]})
