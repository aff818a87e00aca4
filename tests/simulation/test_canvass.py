"""Peers are dialled before their votes count, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any, cast

import pytest
from msgspec.structs import replace

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.timing import DIAL_S, TWO_DIALS_S
from manyhands.base.errors import Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.run.belief import Records, believed_by_a_newcomer
from manyhands.optim.run.canvass import AT_ONCE, ENOUGH_VOTES, Canvass, told_votes
from manyhands.reach.messages import ReachedRequest, ReachedResponse
from manyhands.rpc import Endpoint
from manyhands.rpc.backoff import TooEarly
from manyhands.testing import Host, World
from tests.sweeps import few_of

ANSWER_S = 0.2


class Dials:
    """In place of an endpoint: peers that answer, each at a host, and others that never do.

    Attributes:
        told: by peer, where it says that it has reached others.
    """

    client_mode = True

    def __init__(self, hosts: dict[PeerId, str], told: dict[PeerId, dict[PeerId, str]] | None = None) -> None:
        self.hosts = hosts
        self.told = told or {}
        self.of: Counter[PeerId] = Counter()
        self.connected: set[PeerId] = set()
        self.most_at_once = 0
        self.held_back: set[PeerId] = set()
        self._num = 0
        self._reached: set[PeerId] = set()

    def learn(self, peer_id: PeerId, addresses: object) -> None:
        pass

    def is_connected(self, peer_id: PeerId) -> bool:
        return peer_id in self.connected

    def reached_host(self, peer_id: PeerId) -> str:
        return self.hosts[peer_id] if peer_id in self._reached else ""

    async def reach(self, peer_id: PeerId, timeout_s: float) -> None:
        if peer_id in self.held_back:
            raise TooEarly("the last dial failed a moment ago")
        self.of[peer_id] += 1
        self._num += 1
        self.most_at_once = max(self.most_at_once, self._num)
        is_there = peer_id in self.hosts
        await asyncio.sleep(ANSWER_S if is_there else timeout_s)
        self._num -= 1
        if not is_there:
            raise Unavailable("no answer")
        self._reached.add(peer_id)

    async def call(self, peer_id: PeerId, method: object, request: ReachedRequest, timeout_s: float) -> ReachedResponse:
        if peer_id not in self.told:
            raise Unavailable("no answer")
        return ReachedResponse([self.told[peer_id].get(other, "") for other in request.peers])


def canvass_of(
    dials: Dials, on_news: Callable[[], None] = lambda: None, initial_peers: Collection[PeerId] = ()
) -> Canvass:
    return Canvass(cast(Endpoint, dials), random.Random(3), lambda: frozenset(initial_peers), on_news)


def records_of(hosts: dict[PeerId, str]) -> Records:
    position = Position(10, b"")
    return {
        peer_id: PeerRecord(position, False, [f"/ip4/{host}/tcp/1"], 30.0, samples_per_second=1.0)
        for peer_id, host in hosts.items()
    }


def in_virtual_time(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def program(_: Host) -> None:
        await check()

    world = World(1)
    world.start("here", program)
    world.run(1000.0)


async def ended(canvass: Canvass) -> None:
    while await canvass.brings_news():
        pass


HONEST = {PeerId(f"honest {number}"): f"45.{number}.1.2" for number in range(3)}
FALSE = {PeerId(f"false {number}"): f"46.{number // 250}.{number % 250}.2" for number in range(1000)}


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_thousand_false_identities_are_dialled_once_and_delay_the_honest_for_less_than_two_minutes(
    is_answered: bool,
) -> None:
    """None of them answers, or all do on one machine."""

    async def check() -> None:
        now = asyncio.get_running_loop().time
        dials = Dials(HONEST | (dict.fromkeys(FALSE, "47.1.1.1") if is_answered else {}))
        canvass = canvass_of(dials)
        records = records_of(HONEST | FALSE)
        assert canvass.poll(records).num_open
        began = now()
        await ended(canvass)
        assert now() < began + (10.0 if is_answered else 100.0)
        voters, num_open = canvass.poll(records)
        assert not num_open
        assert voters.keys() >= HONEST.keys()
        assert len(set(voters.values())) == len(HONEST) + is_answered
        assert dials.of == dict.fromkeys(records, 1)
        assert dials.most_at_once <= AT_ONCE
        await canvass.close()

    in_virtual_time(check)


def test_in_a_large_run_few_peers_are_dialled() -> None:
    async def check() -> None:
        dials = Dials(FALSE)
        canvass = canvass_of(dials)
        canvass.poll(records_of(FALSE))
        await ended(canvass)
        voters, num_open = canvass.poll(records_of(FALSE))
        assert (len(voters), num_open) == (ENOUGH_VOTES, 0)
        assert sum(dials.of.values()) <= ENOUGH_VOTES + AT_ONCE
        await canvass.close()

    in_virtual_time(check)


def test_a_peer_that_was_cut_off_is_dialled_again_when_it_connects() -> None:
    async def check() -> None:
        ann, bob, eve = HONEST
        dials = Dials({bob: HONEST[bob]})
        dials.connected.add(eve)  # it has dialled this peer, and cannot be dialled itself
        news: list[float] = []
        canvass = canvass_of(dials, lambda: news.append(1.0))
        records = records_of(HONEST)
        for _ in range(2):
            canvass.poll(records)
            await ended(canvass)
        assert canvass.poll(records).voters.keys() == {bob}
        assert dials.of == dict.fromkeys(HONEST, 1)
        assert news
        news.clear()
        dials.hosts[ann] = HONEST[ann]
        dials.connected.add(ann)
        assert canvass.poll(records).num_open
        await ended(canvass)
        assert canvass.poll(records).voters.keys() == {ann, bob}
        assert dials.of == {ann: 2, bob: 1, eve: 1}
        assert len(news) == 1
        await canvass.close()

    in_virtual_time(check)


def test_a_peer_that_reaches_nobody_tries_again() -> None:
    async def check() -> None:
        dials = Dials({})
        canvass = canvass_of(dials)
        records = records_of(HONEST)
        canvass.poll(records)
        await ended(canvass)
        for _ in range(5):
            assert canvass.poll(records).num_open, "it cannot tell"
        assert dials.of == dict.fromkeys(HONEST, 1)
        dials.hosts |= HONEST
        await asyncio.sleep(TWO_DIALS_S)
        while canvass.poll(records).num_open:
            await asyncio.sleep(DIAL_S)
        assert dials.of == dict.fromkeys(HONEST, 2)
        await canvass.close()

    in_virtual_time(check)


def test_while_peers_may_still_vote_the_first_one_that_answers_does_not_decide() -> None:
    """A stranger at a lower step answers first; the honest ones are higher, and one of them takes longer."""

    async def check() -> None:
        stranger, late = PeerId("stranger"), PeerId("late")
        hosts = HONEST | {stranger: "48.1.1.2", late: "49.1.1.2"}
        records = {
            peer_id: replace(record, position=Position(50 if peer_id == stranger else 100, b""))
            for peer_id, record in records_of(hosts).items()
        }
        for answering in ({stranger}, {stranger, *list(HONEST)[:1]}):
            canvass = canvass_of(Dials({peer_id: hosts[peer_id] for peer_id in answering}))
            assert not believed_by_a_newcomer(records, frozenset(), canvass.poll)
            await asyncio.sleep(2 * ANSWER_S)
            assert canvass.poll(records).voters.keys() == answering
            assert not believed_by_a_newcomer(records, frozenset(), canvass.poll)
            await canvass.close()

    in_virtual_time(check)


def test_a_peer_that_does_not_answer_delays_nobody_once_most_have_answered() -> None:
    """A newcomer to a run of three, and of a fourth that died a moment ago."""

    async def check() -> None:
        now = asyncio.get_running_loop().time
        records = records_of(HONEST | {PeerId("dead"): "48.1.1.2"})
        canvass = canvass_of(Dials(HONEST))
        began = now()
        while not believed_by_a_newcomer(records, frozenset(), canvass.poll):
            assert await canvass.brings_news()
        assert now() < began + 2 * ANSWER_S
        await canvass.close()

    in_virtual_time(check)


def test_a_peer_that_the_backoff_kept_from_being_dialled_is_dialled_soon() -> None:
    async def check() -> None:
        ann, *_ = HONEST
        dials, records = Dials(HONEST), records_of(HONEST)
        dials.held_back.add(ann)
        canvass = canvass_of(dials)
        canvass.poll(records)
        await ended(canvass)
        assert canvass.poll(records).voters.keys() == HONEST.keys() - {ann}
        dials.held_back.clear()
        await asyncio.sleep(TWO_DIALS_S)
        canvass.poll(records)
        await ended(canvass)
        assert canvass.poll(records).voters.keys() == HONEST.keys()
        await canvass.close()

    in_virtual_time(check)


COORDINATOR = PeerId("coordinator")


@pytest.mark.parametrize("num_false", few_of([3 * AT_ONCE, len(FALSE)], 1, pytest.mark.long))
def test_a_peer_that_reaches_its_initial_peer_alone_follows_those_that_this_one_has_reached(num_false: int) -> None:
    """Identities of one machine are ahead, and another peer says that it has reached them everywhere."""

    async def check() -> None:
        stranger = PeerId("stranger")
        false = dict(list(FALSE.items())[:num_false])
        told = {COORDINATOR: HONEST | dict.fromkeys(false, "47.1.1.1"), stranger: false}
        canvass = canvass_of(Dials({}, told), initial_peers=[COORDINATOR])
        ahead = Position(1000, b"elsewhere")
        records = {
            **records_of(HONEST),
            **{one: replace(record, position=ahead) for one, record in records_of(false).items()},
        }
        while not (believed := believed_by_a_newcomer(records, frozenset([COORDINATOR]), canvass.poll)):
            assert await canvass.brings_news()
        assert believed.keys() == HONEST.keys()
        await canvass.close()

    in_virtual_time(check)


def test_a_peer_counts_where_this_one_has_reached_it_whatever_its_initial_peer_says() -> None:
    async def check() -> None:
        ann, bob, _ = HONEST
        told = {COORDINATOR: {ann: "48.1.1.1", bob: "48.1.1.1"}}
        canvass = canvass_of(Dials({ann: HONEST[ann]}, told), initial_peers=[COORDINATOR])
        canvass.poll(records_of(HONEST))
        await ended(canvass)
        assert canvass.poll(records_of(HONEST)).voters == {ann: "45.0.1.0/24", bob: "48.1.1.0/24"}
        await canvass.close()

    in_virtual_time(check)


def test_a_peer_that_others_can_dial_asks_nobody_where_the_others_are() -> None:
    async def check() -> None:
        ann, bob, _ = HONEST
        dials = Dials({ann: HONEST[ann]}, {COORDINATOR: {bob: "48.1.1.1"}})
        dials.client_mode = False
        canvass = canvass_of(dials, initial_peers=[COORDINATOR])
        canvass.poll(records_of(HONEST))
        await ended(canvass)
        assert canvass.poll(records_of(HONEST)).voters == {ann: "45.0.1.0/24"}
        await canvass.close()

    in_virtual_time(check)


def test_a_peer_that_reaches_a_stranger_does_not_follow_it_before_its_initial_peer_was_asked() -> None:
    async def check() -> None:
        stranger = PeerId("stranger")
        canvass = canvass_of(Dials({stranger: "48.1.1.2"}, {COORDINATOR: HONEST}), initial_peers=[COORDINATOR])
        records = records_of(HONEST)
        records = {
            **records,
            stranger: replace(records_of({stranger: "48.1.1.2"})[stranger], position=Position(50, b"")),
        }
        while not (believed := believed_by_a_newcomer(records, frozenset([COORDINATOR]), canvass.poll)):
            assert await canvass.brings_news()
        assert believed.keys() == HONEST.keys()
        await canvass.close()

    in_virtual_time(check)


HERE, THERE = "45.1.1.1", "46.1.1.1"


@pytest.mark.parametrize(
    ("answers", "vote"),
    [
        ([], []),
        ([[""]], [""]),
        ([[HERE]], ["45.1.1.0/24"]),
        ([[HERE], [""]], ["45.1.1.0/24"]),
        ([[HERE], [""], [""]], [""]),  # one of three
        ([[HERE], [HERE], [THERE]], ["45.1.1.0/24"]),
        ([[HERE], ["45.1.1.2"], [THERE]], ["45.1.1.0/24"]),
        ([[THERE], [HERE]], ["45.1.1.0/24"]),  # reached with IPv4 by one, and with IPv6 by the other, say
        ([["127.0.0.1", "127.0.0.1"]], ["127.0.0.1"] * 2),
        ([["no address", HERE]], ["", "45.1.1.0/24"]),
    ],
)
def test_at_least_half_of_the_initial_peers_must_name_one_network(answers: list[list[str]], vote: list[str]) -> None:
    assert told_votes(answers) == vote
