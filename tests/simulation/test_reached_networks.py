"""The networks in which initial peers have reached the others decide for newcomers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, cast

import pytest

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.timing import MINUTE_S, TWO_DIALS_S
from manyhands.base.errors import Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.run.belief import Records, believed_by_a_newcomer
from manyhands.optim.run.reached_networks import ReachedNetworks, told_votes
from manyhands.reach.messages import ReachedRequest, ReachedResponse
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World

ANSWER_S = 0.2
LONG_S = 1.5  # a peer that does not answer


class Asked:
    """In place of an endpoint: peers that say where they have reached others, and what this peer has reached itself.

    Attributes:
        told: by peer, where it says that it has reached others; all others do not answer.
        reached: where this peer itself has reached others.
        hosts: of the peers that are connected to this one.
        num_requests: how often a peer was asked.
    """

    def __init__(
        self, told: dict[PeerId, dict[PeerId, str]] | None = None, reached: dict[PeerId, str] | None = None
    ) -> None:
        self.told = told or {}
        self.reached = reached or {}
        self.hosts: dict[PeerId, str] = {}
        self.num_requests = 0

    def reached_host(self, peer_id: PeerId) -> str:
        return self.reached.get(peer_id, "")

    def host_of(self, peer_id: PeerId) -> str:
        return self.hosts.get(peer_id, "")

    async def call(self, peer_id: PeerId, method: object, request: ReachedRequest, timeout_s: float) -> ReachedResponse:
        self.num_requests += 1
        await asyncio.sleep(ANSWER_S if peer_id in self.told else LONG_S)
        if peer_id not in self.told:
            raise Unavailable("no answer")
        return ReachedResponse([self.told[peer_id].get(other, "") for other in request.peers])


def networks_of(
    asked: Asked, initial_peers: Collection[PeerId] = (), on_news: Callable[[], None] = lambda: None
) -> ReachedNetworks:
    return ReachedNetworks(cast(Endpoint, asked), lambda: frozenset(initial_peers), on_news)


def records_of(hosts: dict[PeerId, str], step: int = 10) -> Records:
    return {
        peer_id: PeerRecord(
            Position(step, b""), not host, [f"/ip4/{host}/tcp/1"] if host else [], 30.0, samples_per_second=1.0
        )
        for peer_id, host in hosts.items()
    }


def in_virtual_time(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def program(_: Host) -> None:
        await check()

    world = World(1)
    world.start("here", program)
    world.run(1000.0)


async def believed(records: Records, networks: ReachedNetworks) -> set[PeerId]:
    """The peers that a newcomer believes, once it was told; none if nobody has a vote then."""
    while not (found := believed_by_a_newcomer(records, frozenset(), networks.poll)):
        if not await networks.brings_news():
            break
    await networks.close()
    return set(found)


COORDINATOR, SECOND, THIRD = PeerId("coordinator"), PeerId("second"), PeerId("third")
HONEST = {PeerId(f"honest {number}"): f"45.{number}.1.2" for number in range(3)}
FALSE = {PeerId(f"false {number}"): f"46.{number // 250}.{number % 250}.2" for number in range(1000)}
AHEAD = records_of(FALSE, 1000)


@pytest.mark.parametrize("is_reached", [False, True])
def test_a_thousand_identities_of_one_machine_neither_mislead_a_newcomer_nor_hold_it_up(is_reached: bool) -> None:
    """The coordinator has reached none of them, or all in one network, and a stranger says that they are everywhere."""

    async def check() -> None:
        now = asyncio.get_running_loop().time
        false = dict.fromkeys(FALSE, "47.1.1.1") if is_reached else {}
        asked = Asked({COORDINATOR: HONEST | false, PeerId("stranger"): FALSE})
        began = now()
        assert await believed({**records_of(HONEST), **AHEAD}, networks_of(asked, [COORDINATOR])) == HONEST.keys()
        assert now() < began + 5.0

    in_virtual_time(check)


def test_a_newcomer_that_was_told_asks_only_about_peers_that_have_come_since() -> None:
    async def check() -> None:
        asked, late = Asked({COORDINATOR: HONEST}), {PeerId("late"): "48.1.1.2"}
        networks = networks_of(asked, [COORDINATOR])
        for records in ([records_of(HONEST)] * 5) + ([records_of(HONEST | late)] * 5):
            networks.poll(records)
            while await networks.brings_news():
                pass
            assert networks.poll(records).keys() == HONEST.keys()
            await asyncio.sleep(TWO_DIALS_S)
        assert asked.num_requests == 2
        await networks.close()

    in_virtual_time(check)


def test_until_the_initial_peers_have_answered_nobody_is_followed() -> None:
    """A stranger that is connected already is not, although this newcomer has reached it itself."""

    async def check() -> None:
        stranger, news = PeerId("stranger"), list[float]()
        asked = Asked({COORDINATOR: HONEST}, reached={stranger: "48.1.1.2"})
        networks = networks_of(asked, [COORDINATOR], lambda: news.append(1.0))
        records = {**records_of(HONEST), **records_of({stranger: "48.1.1.2"}, 50)}
        assert networks.poll(records) == {}
        assert not believed_by_a_newcomer(records, frozenset(), networks.poll)
        assert await believed(records, networks) == HONEST.keys()
        assert news == [1.0]

    in_virtual_time(check)


@pytest.mark.parametrize("initial_peers", [[], [COORDINATOR]], ids=["none given", "gone"])
def test_a_peer_whose_initial_peers_do_not_answer_counts_where_it_has_reached_others_itself(
    initial_peers: list[PeerId],
) -> None:
    async def check() -> None:
        asked = Asked(reached=HONEST | dict.fromkeys(FALSE, "47.1.1.1"))
        assert await believed({**records_of(HONEST), **AHEAD}, networks_of(asked, initial_peers)) == HONEST.keys()

    in_virtual_time(check)


def test_while_nobody_was_reached_the_initial_peers_are_asked_again() -> None:
    """A coordinator that was restarted a moment ago, say."""

    async def check() -> None:
        told: dict[PeerId, str] = {}
        networks = networks_of(Asked({COORDINATOR: told}), [COORDINATOR])
        while await networks.brings_news() or not networks.poll(records_of(HONEST)):
            await asyncio.sleep(0.1)
            if asyncio.get_running_loop().time() > 30.0:
                told |= HONEST
        assert asyncio.get_running_loop().time() < 30.0 + TWO_DIALS_S + 1.0
        await networks.close()

    in_virtual_time(check)


def test_a_crowd_that_an_initial_peer_cannot_answer_for_in_time_holds_a_newcomer_up_for_seconds_only() -> None:
    """4,000 identities that nobody has reached take 63 requests of 0.2 s; trainers that are connected come first."""

    async def check() -> None:
        crowd = records_of({PeerId(f"crowd {number}"): "47.1.1.1" for number in range(4000)}, 1000)
        began = asyncio.get_running_loop().time()
        assert await believed(crowd, networks_of(Asked({COORDINATOR: {}}), [COORDINATOR])) == set()
        assert asyncio.get_running_loop().time() < began + 10.0
        asked = Asked({COORDINATOR: HONEST})
        asked.hosts = dict(HONEST)
        assert await believed({**crowd, **records_of(HONEST)}, networks_of(asked, [COORDINATOR])) == HONEST.keys()

    in_virtual_time(check)


def test_a_peer_that_the_initial_peers_reach_later_votes_within_a_minute_also_if_another_one_votes_already() -> None:
    """A coordinator that was restarted a moment ago knows a stranger, and the trainers later."""

    async def check() -> None:
        told = {PeerId("stranger"): "48.1.1.2"}
        records = records_of(HONEST | told)
        networks = networks_of(Asked({COORDINATOR: told}), [COORDINATOR])
        networks.poll(records)
        assert await networks.brings_news()
        assert networks.poll(records).keys() == told.keys()
        told |= HONEST
        await asyncio.sleep(MINUTE_S)
        networks.poll(records)
        assert await networks.brings_news()
        assert networks.poll(records).keys() == told.keys()
        await networks.close()

    in_virtual_time(check)


def test_connected_clients_vote_where_no_peer_with_an_address_was_reached() -> None:
    async def check() -> None:
        ann, bob, carol = HONEST
        records = records_of({ann: "45.2.1.1", bob: "", carol: ""})
        asked = Asked({COORDINATOR: {}})
        asked.hosts[bob] = "46.1.1.1"
        networks = networks_of(asked, [COORDINATOR])
        networks.poll(records)
        assert await networks.brings_news()
        assert networks.poll(records) == {bob: "46.1.1.0/24"}
        asked.reached[ann] = "45.2.1.1"
        assert networks.poll(records) == {ann: "45.2.1.0/24"}
        await networks.close()

    in_virtual_time(check)


def test_of_three_initial_peers_one_that_lies_decides_nothing_and_those_that_are_gone_do_not_count() -> None:
    async def check() -> None:
        records = {**records_of(HONEST), **AHEAD}
        asked = Asked({COORDINATOR: HONEST, SECOND: HONEST, THIRD: FALSE})
        assert await believed(records, networks_of(asked, [COORDINATOR, SECOND, THIRD])) == HONEST.keys()
        asked = Asked({COORDINATOR: HONEST})
        assert await believed(records, networks_of(asked, [COORDINATOR, SECOND, THIRD])) == HONEST.keys()

    in_virtual_time(check)


HERE, THERE = "45.1.1.1", "46.1.1.1"
ANN, BOB = PeerId("ann"), PeerId("bob")


@pytest.mark.parametrize(
    ("answers", "votes"),
    [
        ([], [""]),
        ([[""]], [""]),
        ([[HERE]], ["45.1.1.0/24"]),
        ([[HERE], [""]], ["45.1.1.0/24"]),
        ([[HERE], [""], [""]], [""]),  # one of three
        ([[HERE], [HERE], [THERE]], ["45.1.1.0/24"]),
        ([[HERE], ["45.1.1.2"], [THERE]], ["45.1.1.0/24"]),
        ([[THERE], [HERE]], ["45.1.1.0/24"]),  # reached with IPv4 by one, and with IPv6 by the other, say
        ([["127.0.0.1", "127.0.0.1"]], [ANN, BOB]),  # on the machine of the initial peer
        ([["no address", HERE]], ["", "45.1.1.0/24"]),
    ],
)
def test_at_least_half_of_the_initial_peers_that_answer_must_name_one_network(
    answers: list[list[str]], votes: list[str]
) -> None:
    assert list(told_votes([ANN, BOB][: len(votes)], answers).values()) == votes
