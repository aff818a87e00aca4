"""Rounds in which somebody dies, freezes, comes late or lies: each ends in its bound, and nobody disagrees."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from manyhands.averaging.allreduce.streams import RoundStream
from manyhands.averaging.averager_presence import next_position
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import (
    ASK_VERDICT,
    JOIN,
    STREAM_KIND,
    VOTE,
    Group,
    JoinRequest,
    JoinResponse,
    Member,
    Position,
    RoundManifest,
    SpanResult,
    StreamHeader,
    Verdict,
    VerdictQuery,
    Vote,
)
from manyhands.averaging.round import driver as round_driver
from manyhands.averaging.round.driver import RoundDriver
from manyhands.averaging.round.exchange import Contribution, Exchange
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, PeerLost, Refused, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, Method, RpcConfig
from tests.integration.test_liars import send_instead
from tests.memory_transport import MemoryStream
from tests.network import PATIENCE_S
from tests.phases import (
    around_connects,
    around_rounds,
    before_voting,
    change_first_vote,
    rounds_of,
)
from tests.swarm import RUN_ID, FixedMeeting, averagers, endpoints, identity_of
from tests.sweeps import few_of
from tests.wire import Change, Handler, WatchedEndpoint

PATIENT = AveragingConfig(matchmaking_time_s=15.0, averaging_timeout_s=60.0)
"""A round that waits for one of its bounds fails the test by being slow."""
HEARTBEATS = RpcConfig(heartbeat_period_s=0.05, heartbeat_timeout_s=0.3, dial_timeout_s=0.3, hello_timeout_s=0.3)
NUMEL = 20_000
START = Position(0, b"start")


class Peer:
    """One member of a test's swarm."""

    def __init__(self, number: int, averager: RoundRunner, roster: FixedMeeting, endpoint: Endpoint) -> None:
        assert isinstance(endpoint, WatchedEndpoint)
        self.averager, self.roster, self.endpoint = averager, roster, endpoint
        self.run = RunEndpoint(endpoint, RUN_ID)
        self.peer_id = endpoint.peer_id
        self.values_N = torch.full((NUMEL,), float(number + 1))

    async def average(self, weight: float = 1.0) -> CommittedRound:
        return await self.averager.average(self.values_N, weight)

    async def kill(self) -> None:
        """Vanish without a word, as a killed process does."""
        await self.endpoint.wire.cut()

    def asked(self, method: Method[Any, Any]) -> Sequence[tuple[PeerId, Any]]:
        """Who has asked it, and what."""
        return self.endpoint.asked[self.run.method(method).name]

    def handler(self, method: Method[Any, Any]) -> Handler:
        """What answers such calls here."""
        return self.endpoint.handlers[self.run.method(method).name]

    def answer_by(self, method: Method[Any, Any], handler: Handler) -> None:
        """Have another handler answer such calls here."""
        self.run.unhandle(method)
        self.run.handle(method, handler)

    def ask_by(self, method: Method[Any, Any], change: Change) -> None:
        """Have this peer make such calls otherwise."""
        self.endpoint.changes[self.run.method(method).name] = change


def by_id(members: Sequence[tuple[RoundRunner, FixedMeeting, Endpoint]]) -> list[Peer]:
    """Members by peer id: the first one leads."""
    peers = [Peer(number, *member) for number, member in enumerate(members)]
    return sorted(peers, key=lambda peer: peer.peer_id)


def start(peers: Sequence[Peer]) -> list[asyncio.Task[CommittedRound]]:
    return [asyncio.ensure_future(peer.average()) for peer in peers]


async def outcomes(tasks: Sequence[asyncio.Task[CommittedRound]], within_s: float = 10.0) -> list[Any]:
    async with time_limit(within_s, "waiting for the rounds to end"):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def committed(peers: Sequence[Peer], within_s: float = 10.0) -> list[CommittedRound]:
    """The results of the next round of these peers, which must commit and be the same for all."""
    results = await outcomes(start(peers), within_s)
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert result.manifest == results[0].manifest
        assert result.averaged_N is not None
        assert torch.equal(result.averaged_N, results[0].averaged_N)
    mean = torch.stack([peer.values_N for peer in peers]).mean(dim=0)
    torch.testing.assert_close(results[0].averaged_N, mean)
    assert len(results[0].manifest.members) == len(peers)
    return list(results)


def stop_before_reducing(peer: Peer) -> asyncio.Event:
    """Have a peer stand still once its group has formed; the event tells that it has."""
    has_formed = asyncio.Event()

    async def stand_still(*_: object) -> Any:
        has_formed.set()
        await asyncio.Event().wait()

    around_rounds(peer.peer_id, stand_still)
    return has_formed


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    async with time_limit(within_s, "waiting for a condition of the test"):
        while not condition():
            await asyncio.sleep(0)


async def turns(number: int) -> None:
    """Let every task go on this often."""
    for _ in range(number):
        await asyncio.sleep(0)


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# matchmaking


async def test_a_peer_that_asks_while_the_leader_still_applies_the_last_round_is_held() -> None:
    async with averagers(2, config=PATIENT) as members:
        leader, fast = by_id(members)
        first = (await committed([leader, fast]))[0]
        fast.roster.at = next_position(START, first.manifest)
        early = start([fast])
        await turns(200)  # the request is there, and held
        assert not early[0].done()
        leader.roster.at = fast.roster.at
        results = await outcomes([*early, *start([leader])])
        assert [len(result.manifest.members) for result in results] == [2, 2]
        assert fast.roster.missing == []


async def test_a_peer_that_missed_the_round_refuses_a_request_for_the_next_one() -> None:
    async with averagers(2, config=PATIENT) as members:
        behind, ahead = by_id(members)
        ahead.roster.at = Position(1, b"later")
        request = JoinRequest(b"same", ahead.roster.at, Member(ahead.peer_id, [], False, 1.0), 5.0)
        with pytest.raises(Refused, match="other_position"):
            await ahead.run.call(behind.peer_id, JOIN, request, 5.0)


async def test_a_peer_whose_leader_is_dead_leads_the_peers_that_have_come_to_it() -> None:
    async with averagers(3, config=PATIENT) as members:
        dead, leader, early = by_id(members)
        await dead.kill()
        early.roster.missing = [dead.peer_id]
        waiting = start([early])
        await until(lambda: leader.roster.num_calls)
        results = await outcomes([*waiting, *start([leader])], 5.0)
        assert [len(result.manifest.members) for result in results] == [2, 2]


async def test_a_leader_that_is_behind_hears_it_from_the_peers_that_it_invites() -> None:
    """Else it would make a branch of its own with those who are behind too."""
    async with averagers(3, config=PATIENT) as members:
        leader, behind, ahead = by_id(members)
        ahead.roster.at = Position(1, b"later")
        for result in await outcomes(start([leader, behind]), 3.0):
            assert isinstance(result, RoundAborted)
            assert "the run is at step 1, not 0" in result.reason
        assert leader.roster.missing == behind.roster.missing == []


async def test_peers_that_wait_for_a_leader_that_has_moved_on_are_told_at_once() -> None:
    async with averagers(2, config=PATIENT) as members:
        leader, waiting = by_id(members)
        request = JoinRequest(b"same", START, Member(waiting.peer_id, [], False, 1.0), 5.0)
        call = asyncio.ensure_future(waiting.run.call(leader.peer_id, JOIN, request, 10.0))
        await until(lambda: leader.roster.num_calls)
        leader.roster.at = Position(1, b"loaded from elsewhere")
        async with time_limit(PATIENCE_S, "waiting for the answer"):
            with pytest.raises(Refused, match="the run is at step 1, not 0"):
                await call
        assert leader.roster.missing == [], "the absent are those of the position that it left"


async def test_a_leader_whose_training_loop_does_not_come_is_left_out_of_the_next_attempt() -> None:
    config = replace(PATIENT, matchmaking_time_s=0.3)
    async with averagers(3, config=config) as members:
        _, *others = by_id(members)
        began = asyncio.get_running_loop().time()
        results = await outcomes(start(others), 5.0)
        assert [len(result.manifest.members) for result in results] == [2, 2]
        matchmaking_s = asyncio.get_running_loop().time() - began - results[0].averaging_s
        assert matchmaking_s < 0.6, "it is waited for once, not by each leader in turn"


async def test_a_member_that_asks_twice_has_one_place() -> None:
    async with averagers(2, config=PATIENT) as members:
        leader, member = by_id(members)
        own = Member(member.peer_id, [], False, 1.0)
        request = JoinRequest(b"same", START, own, 5.0)
        calls = [asyncio.ensure_future(member.run.call(leader.peer_id, JOIN, request, 10.0)) for _ in range(2)]
        await until(lambda: leader.roster.num_calls == 2)
        calls[0].cancel()
        await turns(50)  # the cancellation arrives
        leading = asyncio.ensure_future(leader.averager.matchmaker.find_group(1.0, 0))
        async with time_limit(PATIENCE_S, "waiting for the group"):
            response, group = await calls[1], await leading
        assert response.group == group
        assert len(group.members) == 2


async def test_a_leader_that_leaves_the_run_refuses_the_peers_that_wait_for_it() -> None:
    async with averagers(3, config=PATIENT) as members:
        leader, member, _ = by_id(members)
        tasks = start([leader])
        await until(lambda: member.roster.num_calls)  # it looks for a group
        request = JoinRequest(b"same", START, Member(member.peer_id, [], False, 1.0), 5.0)
        call = asyncio.ensure_future(member.run.call(leader.peer_id, JOIN, request, 10.0))
        await until(lambda: leader.asked(JOIN))
        await leader.averager.close()
        async with time_limit(PATIENCE_S, "waiting for the answers"):
            (own,) = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(Refused, match="leaves the run"):
                await call
        assert isinstance(own, RoundAborted)
        with pytest.raises(RoundAborted, match="leaves the run"):
            await leader.average()


# deaths


async def aborted_then_committed_without(
    leader: Peer, others: Sequence[Peer], tasks: Sequence[asyncio.Task[CommittedRound]]
) -> None:
    """The round of a lost leader is aborted for all others, which then commit one without it."""
    for result in await outcomes(tasks, 5.0):
        assert isinstance(result, RoundAborted), result
        assert "the leader was lost" in result.reason
        assert result.blamed == [leader.peer_id]
    assert all(leader.peer_id in peer.roster.missing for peer in others)
    await committed(others)


async def test_members_abort_and_then_commit_without_a_leader_that_dies_once_the_group_has_formed() -> None:
    async with averagers(4, kind="tls", config=PATIENT) as members:
        leader, *others = by_id(members)
        has_formed = stop_before_reducing(leader)
        dying, tasks = start([leader]), start(others)
        await has_formed.wait()
        await leader.kill()
        await aborted_then_committed_without(leader, others, tasks)
        await end(dying)


def tell_only(leader: Peer, num_told: int) -> asyncio.Event:
    """Have a leader tell the verdict to ``num_told`` members; the event tells that they have their answer."""
    told = asyncio.Event()
    answered: list[PeerId] = []
    answer = leader.handler(ASK_VERDICT)

    async def answer_some(remote: PeerId, query: VerdictQuery) -> Verdict:
        verdict: Verdict = await answer(remote, query)
        if verdict.is_known and len(answered) >= num_told:
            told.set()
            await asyncio.Event().wait()
        if verdict.is_known:
            answered.append(remote)
        return verdict

    leader.answer_by(ASK_VERDICT, answer_some)
    return told


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_all_members_commit_if_the_leader_dies_after_it_told_one_of_the_commit(kind: str) -> None:
    async with averagers(4, kind=kind, config=PATIENT) as members:
        leader, *others = by_id(members)
        told = tell_only(leader, 1)
        dying, tasks = start([leader]), start(others)
        await told.wait()
        await until(lambda: any(task.done() for task in tasks))
        await leader.kill()
        results = await outcomes(tasks, 5.0)
        assert all(isinstance(result, CommittedRound) for result in results), results
        assert len({result.manifest.fingerprint() for result in results}) == 1
        assert all(torch.equal(result.averaged_N, results[0].averaged_N) for result in results)
        await end(dying)


async def test_members_abort_and_then_commit_without_a_leader_that_told_nobody_of_the_commit() -> None:
    async with averagers(4, config=PATIENT, in_doubt_s=0.3) as members:
        leader, *others = by_id(members)
        told = tell_only(leader, 0)
        dying, tasks = start([leader]), start(others)
        await told.wait()
        await leader.kill()
        await aborted_then_committed_without(leader, others, tasks)
        await end(dying)


@pytest.mark.parametrize(("num_turns", "commits"), [(20, False), (40, False), (90, True), (120, True)])
async def test_a_leader_whose_round_is_interrupted_ends_it_for_all_at_once(num_turns: int, commits: bool) -> None:
    """It lives on, and says so: no member is in doubt."""
    async with averagers(4, config=PATIENT, in_doubt_s=60.0) as members:
        leader, *others = by_id(members)
        leading, tasks = start([leader]), start(others)
        await turns(num_turns)
        await end(leading)
        first = await outcomes(tasks, 3.0)
        if commits:
            assert all(isinstance(result, CommittedRound) for result in first), first
            return
        for result in first:
            assert isinstance(result, RoundAborted), result
            assert "in doubt" not in result.reason
            assert result.blamed == [leader.peer_id]
        await committed(others)


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


def ask_nothing(peer: Peer) -> None:
    """Have a member ask nobody how its round goes on."""

    async def ask(query: VerdictQuery, call: Callable[[VerdictQuery], Awaitable[Verdict]]) -> Verdict:
        await never()
        return await call(query)

    peer.ask_by(ASK_VERDICT, ask)


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_leader_that_leaves_right_after_its_round_tells_the_verdict_first(kind: str) -> None:
    """One member votes only after the leader has begun to leave."""
    async with averagers(4, kind=kind, config=PATIENT) as members:
        leader, *others = by_id(members)
        late, may_vote = others[0], asyncio.Event()
        before_voting(late.peer_id, may_vote.wait)
        (leading,), tasks = start([leader]), start(others)
        result = await leading
        leaving = asyncio.ensure_future(leader.averager.close())
        await turns(20)
        may_vote.set()
        await leaving
        await leader.endpoint.close()
        for other in await outcomes(tasks, 5.0):
            assert isinstance(other, CommittedRound), other
            assert other.manifest == result.manifest


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_member_about_to_vote_hears_the_verdict_though_all_others_leave_at_once(kind: str) -> None:
    """The leader answers its query, which must not be given up for the vote that comes too late."""
    async with averagers(4, kind=kind, config=PATIENT) as members:
        late, may_vote = by_id(members)[1], asyncio.Event()
        others = [peer for peer in by_id(members) if peer.peer_id != late.peer_id]
        before_voting(late.peer_id, may_vote.wait)

        async def leave(peer: Peer) -> CommittedRound:
            result = await peer.average()
            await peer.averager.close()
            await peer.endpoint.close()
            return result

        (voting,), leaving = start([late]), [asyncio.ensure_future(leave(peer)) for peer in others]
        results = await outcomes(leaving)
        may_vote.set()
        for result in [*results, *await outcomes([voting], 5.0)]:
            assert isinstance(result, CommittedRound), result
            assert result.averaged_N is not None
            assert result.manifest == results[0].manifest


async def test_a_leader_that_leaves_does_not_wait_for_a_member_that_dies_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with averagers(4, config=PATIENT) as members:
        leader, *others = by_id(members)
        victim = others[0]
        before_voting(victim.peer_id, never)
        ask_nothing(victim)
        (leading,), tasks = start([leader]), start(others)
        await leading
        await outcomes(tasks[1:])
        monkeypatch.setattr(round_driver, "ANSWER_S", 1e6)
        leaving = asyncio.ensure_future(leader.averager.close())
        await turns(50)
        assert not leaving.done()
        await victim.kill()
        async with time_limit(PATIENCE_S, "waiting for the leader to leave"):
            await leaving
        await end(tasks)


async def test_a_leader_that_leaves_in_mid_round_waits_until_the_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own attempt is still going on, and so is that of a member that has not asked yet."""
    async with averagers(4, config=PATIENT) as members:
        leader, *others = by_id(members)
        before_voting(leader.peer_id, never)
        before_voting(others[0].peer_id, never)
        ask_nothing(others[0])
        begun = rounds_of(leader.peer_id)
        monkeypatch.setattr(round_driver, "ANSWER_S", 30.0)
        tasks = start([leader, *others])
        await until(lambda: begun)
        leaving = asyncio.ensure_future(leader.averager.close())
        await outcomes(tasks[2:])  # these know how it has ended
        await turns(50)
        assert not leaving.done()
        await others[0].kill()
        async with time_limit(PATIENCE_S, "waiting for the leader to leave"):
            await leaving
        await end(tasks)


async def test_a_member_that_aborted_in_doubt_does_not_pass_that_on_as_a_verdict() -> None:
    """Else whoever asks it, rather than a member that knows of the commit, would abort too."""
    async with averagers(3, config=PATIENT, in_doubt_s=0.1) as members:
        leader, doubting, asking = by_id(members)
        for peer in (leader, doubting):
            peer.roster.missing = [asking.peer_id]
        told, begun = tell_only(leader, 0), rounds_of(leader.peer_id)
        dying, tasks = start([leader]), start([doubting])
        await told.wait()  # the leader knows the verdict
        await leader.kill()
        assert all(isinstance(result, RoundAborted) for result in await outcomes(tasks, 5.0))
        query = VerdictQuery(begun[0].group.group_id)
        with pytest.raises(Refused, match="does not know"):
            await asking.run.call(doubting.peer_id, ASK_VERDICT, query, 2.0)
        await end(dying)


async def test_the_majority_commits_though_a_member_dies_before_it_votes() -> None:
    async with averagers(4, config=PATIENT) as members:
        *others, victim = by_id(members)
        has_result = asyncio.Event()

        async def never_vote() -> None:
            has_result.set()
            await asyncio.Event().wait()

        before_voting(victim.peer_id, never_vote)
        dying, tasks = start([victim]), start(others)
        await has_result.wait()
        await victim.kill()
        results = await outcomes(tasks, 5.0)
        assert all(len(result.manifest.members) == 4 for result in results), "its values are in the mean"
        await end(dying)


async def test_a_member_whose_round_is_interrupted_is_waited_for_no_longer() -> None:
    """Its process lives on, and answers calls."""
    async with averagers(2, config=PATIENT) as members:
        leader, member = by_id(members)
        has_result = asyncio.Event()

        async def never_vote() -> None:
            has_result.set()
            await never()

        before_voting(member.peer_id, never_vote)
        leading, interrupted = start([leader]), start([member])
        await has_result.wait()
        await end(interrupted)
        (result,) = await outcomes(leading, 5.0)
        assert isinstance(result, RoundAborted)
        assert result.blamed == [member.peer_id]


async def test_a_leader_that_was_started_again_is_lost_at_once() -> None:
    """It can be reached, and does not know the round."""

    async def refuse(*_: object) -> Verdict:
        raise Refused(leader.peer_id, "unknown_group", "this peer does not know how that round goes on")

    async with averagers(4, config=PATIENT) as members:
        leader, *others = by_id(members)
        leader.answer_by(ASK_VERDICT, refuse)
        leading, tasks = start([leader]), start(others)
        await aborted_then_committed_without(leader, others, tasks)
        await end(leading)


@pytest.mark.parametrize("has_another_result", [False, True])
async def test_a_member_that_lost_the_result_knows_that_its_vector_counted(has_another_result: bool) -> None:
    def lose(contribution: Contribution, vote: Vote) -> None:
        contribution.means = None
        vote.digests = [b"a memory chip that forgets"] * len(vote.digests) if has_another_result else []

    async with averagers(3, config=PATIENT) as members:
        *others, unlucky = by_id(members)
        change_first_vote(unlucky.peer_id, lose)
        results = await outcomes(start([*others, unlucky]))
        assert results[2].averaged_N is None
        assert results[2].manifest == results[0].manifest
        assert results[0].averaged_N is not None


async def test_a_member_waits_for_a_verdict_that_comes_soon_after_the_time_for_the_votes() -> None:
    """The votes of both commit the round; a member that left before would be behind."""
    config = replace(PATIENT, matchmaking_time_s=0.2, averaging_timeout_s=1.0)
    first = min(identity_of(number).peer_id for number in range(2))
    async with averagers(2, config=config, config_of={first: PATIENT}) as members:
        leader, member = by_id(members)
        before_voting(leader.peer_id, lambda: asyncio.sleep(1.3))
        await committed([leader, member])


@pytest.mark.parametrize("seed", few_of(range(12), 4))
async def test_the_others_agree_and_go_on_whichever_member_dies_and_whenever(seed: int) -> None:
    rng = random.Random(seed)
    async with averagers(4, clients=rng.choice([(), (1,)]), config=PATIENT, in_doubt_s=0.3) as members:
        peers = by_id(members)
        victim = rng.choice(peers)
        others = [peer for peer in peers if peer is not victim]
        dying, tasks = start([victim]), start(others)
        await turns(rng.randrange(250))
        await end(dying)
        await victim.kill()
        first = await outcomes(tasks, 8.0)
        results = [result for result in first if isinstance(result, CommittedRound)]
        assert len({result.manifest.fingerprint() for result in results}) <= 1
        held = [result.averaged_N for result in results if result.averaged_N is not None]
        assert all(torch.equal(averaged_N, held[0]) for averaged_N in held)
        assert all(isinstance(error, RoundAborted) for error in first if not isinstance(error, CommittedRound)), first
        if not results:
            for peer in others:
                peer.roster.missing = [victim.peer_id]
            await committed(others)


async def test_a_member_that_dies_after_it_answered_its_invitation_is_not_waited_for() -> None:
    async with averagers(3, config=PATIENT) as members:
        peers = by_id(members)
        victim = peers[2]
        tasks = start(peers[:2])
        await until(lambda: victim.roster.num_calls > 0)
        await victim.kill()
        first, second = await outcomes(tasks, 5.0)
        assert isinstance(first, CommittedRound), first
        assert isinstance(second, CommittedRound), second


def num_tasks() -> int:
    """Tasks that search for a group, or make a round."""
    names = [task.get_name() for task in asyncio.all_tasks()]
    return sum(name.startswith(("matchmaking: ", "rounds: ", "a round: ", "an exchange: ")) for name in names)


def in_memory() -> Counter[str]:
    """Parts of rounds that are in memory, and futures, by kind."""
    gc.collect()
    kinds = (RoundDriver, Exchange, Contribution, RoundStream, asyncio.Future)
    return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds))


async def make_failing_rounds(peers: Sequence[Peer]) -> None:
    for attempt in range(12):
        tasks = start(peers)
        await turns(20 * attempt)
        await end(tasks[2:])  # its training thread is interrupted, while its network lives on
        for result in await outcomes(tasks[:2], 5.0):
            assert isinstance(result, (RoundAborted, CommittedRound))
        for peer in peers:
            peer.roster.missing.clear()
    async with time_limit(5.0, "waiting for the streams of the rounds to end"):
        while any([await peer.endpoint.wire.num_open() > 4 for peer in peers]):  # two control connections, two kept
            await asyncio.sleep(0)
    await until(lambda: num_tasks() == 0)
    await committed(peers)


async def test_failed_rounds_leave_nothing_behind() -> None:
    config = replace(PATIENT, matchmaking_time_s=0.2)
    async with averagers(3, config=config, in_doubt_s=0.1, stream_s=0.2) as members:
        peers = by_id(members)
        num_listeners = len(peers[0].endpoint.on_lost)
        await make_failing_rounds(peers)
        before = in_memory()
        await make_failing_rounds(peers)
        more = in_memory() - before
        assert more.total() < 4, more  # not something of each round
        assert all(len(peer.endpoint.on_lost) == num_listeners for peer in peers)


# members that stand still


class Ice:
    """Peers from which nothing comes any more, though their streams stay open, until the thaw."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._frozen: list[Callable[[MemoryStream, int], bool]] = []
        self._thawed = asyncio.Event()
        send = MemoryStream.send

        async def send_or_wait(stream: MemoryStream, *buffers: bytes | bytearray | memoryview) -> None:
            num_bytes = sum(len(buffer) for buffer in buffers)
            if any(is_frozen(stream, num_bytes) for is_frozen in self._frozen):
                await self._thawed.wait()
            await send(stream, *buffers)

        send_now = MemoryStream.send_now
        self._held: list[Callable[[], None]] = []

        def send_now_or_hold(stream: MemoryStream, message: bytes) -> None:
            if any(is_frozen(stream, len(message)) for is_frozen in self._frozen):
                self._held.append(lambda: send_now(stream, message))
            else:
                send_now(stream, message)

        monkeypatch.setattr(MemoryStream, "send", send_or_wait)
        monkeypatch.setattr(MemoryStream, "send_now", send_now_or_hold)

    def freeze(self, peer: Peer, *, towards: Peer | None = None, bulk_only: bool = False) -> None:
        self._frozen.append(
            lambda stream, num_bytes: (
                stream.other.remote == peer.peer_id
                and (towards is None or stream.remote == towards.peer_id)
                and (not bulk_only or num_bytes > 2000)
            )
        )

    def thaw(self) -> None:
        self._frozen.clear()
        self._thawed.set()
        for send_held in self._held:
            with suppress(PeerLost):
                send_held()


@pytest.fixture
def ice(monkeypatch: pytest.MonkeyPatch) -> Ice:
    return Ice(monkeypatch)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("num_turns", [0, 40, 70, 100])
async def test_a_member_that_freezes_ends_the_round_within_seconds(ice: Ice, rank: int, num_turns: int) -> None:
    async with averagers(3, config=PATIENT, rpc_config=HEARTBEATS, stream_s=0.3, in_doubt_s=0.2) as members:
        peers = by_id(members)
        victim = peers[rank]
        others = [peer for peer in peers if peer is not victim]
        freezing, tasks = start([victim]), start(others)
        await turns(num_turns)
        ice.freeze(victim)
        results = await outcomes(tasks, 8.0)
        if not all(isinstance(result, CommittedRound) for result in results):
            for peer in others:
                peer.roster.missing = [victim.peer_id]
            await committed(others)
        ice.thaw()
        await end(freezing)


async def test_a_member_that_freezes_is_noticed_by_any_member_that_waits_for_it(ice: Ice) -> None:
    """Also by one that had nothing to do with it before, while the leader needs nothing more from it."""
    client = sorted(range(3), key=lambda number: identity_of(number).peer_id)[1]
    async with averagers(3, clients=(client,), config=PATIENT, rpc_config=HEARTBEATS) as members:
        leader, waiting, victim = peers = by_id(members)
        ice.freeze(victim, towards=waiting, bulk_only=True)
        begun = rounds_of(leader.peer_id)
        tasks = start(peers)
        await until(lambda: begun)
        count, rank = begun[0].machine.count, begun[0].machine.rank
        assert count is not None
        await until(lambda: rank in count.votes)
        assert count.votes[rank].digest, "it holds the result, and could commit with one more vote"
        ice.freeze(victim)
        for result in await outcomes(tasks[:2], 5.0):
            assert isinstance(result, CommittedRound), result
            assert victim.peer_id in leader.roster.missing
        ice.thaw()
        await end(tasks)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_member_does_not_wait_for_what_the_others_have_given_up(rank: int) -> None:
    """Their exchange fails whatever they try, and the round has an end."""

    async def give_up(*_: Any) -> RoundStream:
        raise RoundAborted("it gave up")

    async with averagers(4, config=PATIENT, stream_s=0.2) as members:
        peers = by_id(members)
        for peer in peers:
            if peer is not peers[rank]:
                around_connects(peer.peer_id, give_up)
        for result in await outcomes(start(peers), 5.0):
            assert isinstance(result, RoundAborted)
            assert "it gave up" in result.reason


async def test_a_member_whose_vote_is_lost_votes_again() -> None:
    """Its connection breaks under the vote; the leader is still there, and needs it."""
    async with averagers(2, config=PATIENT) as members:
        leader, member = by_id(members)
        count = leader.handler(VOTE)
        num_votes = 0

        async def break_the_first(remote: PeerId, vote: Vote) -> Any:
            nonlocal num_votes
            num_votes += 1
            if num_votes == 1:
                raise Unavailable("the connection broke")
            return count(remote, vote)

        leader.answer_by(VOTE, break_the_first)
        await committed([leader, member])
        assert num_votes == 2


async def test_a_member_that_stands_still_ends_the_round_at_its_bound() -> None:
    config = replace(PATIENT, matchmaking_time_s=0.5, averaging_timeout_s=1.0)
    async with averagers(3, config=config) as members:
        *others, victim = by_id(members)
        stop_before_reducing(victim)
        standing, tasks = start([victim]), start(others)
        for result in await outcomes(tasks, 3.0):
            assert isinstance(result, RoundAborted)
        await end(standing)


async def test_nobody_waits_for_a_member_whose_round_is_over() -> None:
    """One member cannot reach another and gives up; a third one's stream to it comes only after that."""
    async with averagers(4, config=PATIENT, stream_s=0.5) as members:
        _, late, unlucky, _ = peers = by_id(members)
        open_bulk, gave_up = late.endpoint.open_bulk, asyncio.Event()

        async def open_late(peer_id: PeerId, *arguments: Any, **options: Any) -> Any:
            if peer_id == unlucky.peer_id:
                await gave_up.wait()
            return await open_bulk(peer_id, *arguments, **options)

        async def fail(peer_id: PeerId, *_: Any, **options: Any) -> Any:
            raise PeerLost(peer_id, "cannot be dialled from here")

        late.endpoint.open_bulk = open_late  # type: ignore[method-assign]
        unlucky.endpoint.open_bulk = fail  # type: ignore[method-assign]

        async def tell() -> None:
            gave_up.set()

        before_voting(unlucky.peer_id, tell)
        results = await outcomes(start(peers), 5.0)
        assert all(isinstance(result, CommittedRound) for result in results), results
        held = [result.averaged_N for result in results]
        assert held[2] is None, "it does not hear the others"
        assert all(torch.equal(averaged_N, held[0]) for averaged_N in (held[1], held[3]))


async def test_a_client_that_cannot_open_its_stream_does_not_delay_the_others() -> None:
    """It says so in its vote, so that the reducer for which all others wait need not wait for it."""
    async with averagers(4, clients=[1, 2, 3], config=PATIENT, stream_s=30.0) as members:
        reducer, unlucky, *others = (Peer(number, *member) for number, member in enumerate(members))

        async def fail(peer_id: PeerId, *_: Any, **options: Any) -> Any:
            raise Unavailable("closed in the TLS handshake")

        unlucky.endpoint.open_bulk = fail  # type: ignore[method-assign]
        results = await outcomes(start([reducer, unlucky, *others]), 5.0)
        assert all(isinstance(result, CommittedRound) for result in results), results
        contributors = {peer.peer_id for peer in (reducer, *others)}
        assert all(result.manifest.contributors().keys() == contributors for result in results)


# members that send what they must not


@pytest.mark.parametrize(
    "spoil",
    [
        lambda group, own: replace_group(group, members=[m for m in group.members if m != own]),
        lambda group, own: replace_group(group, members=[*group.members, group.members[0]]),
        lambda group, own: replace_group(group, members=[changed(m, weight=7.0) for m in group.members]),
        lambda group, own: replace_group(group, members=[changed(m, is_client=True) for m in group.members]),
        lambda group, own: replace_group(group, members=[own]),
        lambda group, own: replace_group(group, members=[]),
        lambda group, own: replace_group(group, position=Position(9, b"elsewhere")),
        lambda group, own: replace_group(group, leader=own.peer_id),
    ],
    ids=["without us", "twice", "our weight", "clients only", "without the leader", "nobody", "position", "leader"],
)
async def test_a_group_that_is_not_for_this_peer_is_refused(spoil: Callable[[Group, Member], Group]) -> None:
    async with averagers(2, config=PATIENT) as members:
        liar, victim = by_id(members)

        async def lie(remote: PeerId, request: JoinRequest) -> JoinResponse:
            own = Member(liar.peer_id, [str(address) for address in liar.endpoint.addresses], False, 1.0)
            group = Group(b"nonce", liar.peer_id, request.position, [own, request.member])
            return JoinResponse(spoil(group, request.member))

        liar.answer_by(JOIN, lie)
        with pytest.raises(RoundAborted, match="a group that is not for this peer"):
            await victim.average()
        assert victim.roster.missing == [liar.peer_id]


def replace_group(group: Group, **changes: Any) -> Group:
    return msgspec.structs.replace(group, **changes)


def changed(member: Member, **changes: Any) -> Member:
    return msgspec.structs.replace(member, **changes)


async def test_join_requests_that_make_no_sense_are_refused() -> None:
    async with averagers(3, clients=(2,), config=PATIENT) as members:
        peers = {member[2].client_mode: Peer(0, *member) for member in members}
        leader, client = peers[False], peers[True]
        caller = next(Peer(1, *member) for member in members if member[2] not in (leader.endpoint, client.endpoint))
        own = Member(caller.peer_id, [], False, 1.0)
        good = JoinRequest(b"same", START, own, 5.0)
        bad: dict[str, JoinRequest] = {
            "other_manifest": msgspec.structs.replace(good, run_fingerprint=b"another"),
            "other_position": msgspec.structs.replace(good, position=Position(0, b"another")),
        }
        for code, request in bad.items():
            with pytest.raises(Refused, match=code):
                await caller.run.call(leader.peer_id, JOIN, request, 2.0)
        for weight in (float("nan"), float("inf"), -1.0):
            member = msgspec.structs.replace(own, weight=weight)
            with pytest.raises(Refused, match="bad_request"):
                await caller.run.call(leader.peer_id, JOIN, msgspec.structs.replace(good, member=member), 2.0)
        for_another = msgspec.structs.replace(good, member=msgspec.structs.replace(own, peer_id=client.peer_id))
        with pytest.raises(Refused, match="joins for itself"):
            await caller.run.call(leader.peer_id, JOIN, for_another, 2.0)
        await client.endpoint.connect(caller.endpoint.addresses[0])
        with pytest.raises(Refused, match="leads no group"):
            await caller.run.call(client.peer_id, JOIN, good, 2.0)
        assert leader.roster.num_calls == 0, "nobody waits for it"


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
async def test_a_negative_or_not_finite_weight_is_a_config_error(weight: float) -> None:
    async with averagers(2, config=PATIENT) as members:
        with pytest.raises(ConfigError, match="weight="):
            await by_id(members)[1].average(weight)


@pytest.mark.parametrize("rank", [0, 2])
async def test_a_member_that_sends_values_that_are_not_finite_is_left_out(rank: int) -> None:
    async with averagers(3, config=PATIENT) as members:
        peers = by_id(members)
        liar = peers[rank]
        send_instead(liar.peer_id, torch.full((NUMEL,), float("nan")))
        honest = [peer for peer in peers if peer is not liar]
        mean = torch.stack([peer.values_N for peer in honest]).mean(dim=0)
        for peer, result in zip(peers, await outcomes(start(peers)), strict=True):
            assert isinstance(result, CommittedRound), result
            assert result.manifest.weights[rank] == 0.0
            assert f"the values of peer {liar.peer_id} are not finite" in result.reason
            if peer is liar:
                assert result.averaged_N is None
            else:
                torch.testing.assert_close(result.averaged_N, mean)
                assert peer.roster.missing == [liar.peer_id]


def manifest_of(group: Group, **changes: Any) -> RoundManifest:
    return msgspec.structs.replace(group.manifest(b"digest"), **changes)


@pytest.mark.parametrize(
    "forge",
    [
        lambda group, digest: manifest_of(group, digest=digest, weights=[1.0, 5.0, 1.0]),
        lambda group, digest: manifest_of(group, digest=digest, members=[m.peer_id for m in group.members[:2]]),
        lambda group, digest: manifest_of(group, digest=digest, position=Position(8, b"")),
        lambda group, digest: manifest_of(group, digest=digest, group_id=b"another"),
    ],
    ids=["weights", "members", "position", "group"],
)
async def test_a_verdict_about_something_else_commits_nothing(forge: Callable[[Group, bytes], RoundManifest]) -> None:
    """Its manifest goes into the lineage, so a leader could split the run with it."""
    async with averagers(3, config=PATIENT, in_doubt_s=0.1) as members:
        liar, *others = by_id(members)
        groups: list[Group] = []
        join = liar.handler(JOIN)

        async def remember(remote: PeerId, request: JoinRequest) -> JoinResponse:
            response: JoinResponse = await join(remote, request)
            assert response.group is not None
            groups.append(response.group)
            return response

        async def lie(remote: PeerId, query: VerdictQuery) -> Verdict:
            return Verdict(True, forge(groups[0], b"digest"))

        liar.answer_by(JOIN, remember)
        liar.answer_by(ASK_VERDICT, lie)
        lying, tasks = start([liar]), start(others)
        await aborted_then_committed_without(liar, others, tasks)
        await end(lying)


@pytest.mark.parametrize(
    "change",
    [
        lambda group: replace_group(group, late=2),
        lambda group: replace_group(group, members=[changed(group.members[0], weight=7.0), *group.members[1:]]),
    ],
    ids=["late", "weight"],
)
async def test_a_leader_that_tells_one_member_another_group_causes_no_second_result(
    change: Callable[[Group], Group],
) -> None:
    """It counts the votes itself, so the members notice it among themselves: they do not meet in the exchange."""
    async with averagers(4, config=PATIENT, in_doubt_s=0.1) as members:
        liar, *others = by_id(members)
        join, count, ask = map(liar.handler, (JOIN, VOTE, ASK_VERDICT))
        told: list[Group] = []

        async def tell(remote: PeerId, request: JoinRequest) -> JoinResponse:
            response: JoinResponse = await join(remote, request)
            assert response.group is not None
            if remote == others[-1].peer_id:
                told[:] = [response.group, change(response.group)]
                return JoinResponse(told[1])
            return response

        def own_id(group_id: bytes) -> bytes:
            return told[0].group_id if told and group_id == told[1].group_id else group_id

        def take(remote: PeerId, vote: Vote) -> Any:
            return count(remote, msgspec.structs.replace(vote, group_id=own_id(vote.group_id)))

        async def answer(remote: PeerId, query: VerdictQuery) -> Verdict:
            verdict: Verdict = await ask(remote, msgspec.structs.replace(query, group_id=own_id(query.group_id)))
            if remote == others[-1].peer_id and (manifest := verdict.manifest) is not None:
                fitting = told[1].manifest(manifest.digest, manifest.parts, {0, 1, 2, 3} - manifest.left_out)
                return msgspec.structs.replace(verdict, manifest=fitting)
            return verdict

        liar.answer_by(JOIN, tell)
        liar.answer_by(VOTE, take)
        liar.answer_by(ASK_VERDICT, answer)
        lying, tasks = start([liar]), start(others)
        results = await outcomes(tasks, 20.0)
        held = [one for one in results if isinstance(one, CommittedRound) and one.averaged_N is not None]
        assert len({one.manifest.fingerprint() for one in held}) == 1, results
        assert len(held) == 2
        await end(lying)


async def test_a_member_that_hears_early_what_was_committed_believes_no_other_contributors_than_its_own() -> None:
    """It is told before it has voted, and then finds that it holds the same means."""
    async with averagers(3, config=PATIENT) as members:
        liar, other, late = by_id(members)
        ask = liar.handler(ASK_VERDICT)

        async def answer(remote: PeerId, query: VerdictQuery) -> Verdict:
            verdict: Verdict = await ask(remote, query)
            if remote == late.peer_id and (manifest := verdict.manifest) is not None:
                forged = msgspec.structs.replace(
                    manifest, weights=[1.0, 0.0, 1.0], parts=[SpanResult(0, NUMEL, 0, [1])]
                )
                return msgspec.structs.replace(verdict, manifest=forged)
            return verdict

        liar.answer_by(ASK_VERDICT, answer)
        begun = rounds_of(late.peer_id)
        before_voting(late.peer_id, lambda: until(lambda: begun[0].machine.verdict is not None))
        first, second, third = await outcomes(start([liar, other, late]))
        assert first.manifest == second.manifest != third.manifest
        assert third.averaged_N is None


NESTED = b"\x81\xa1?" + b"\x91" * 60_000 + b"\xc0"  # lists in lists, under a key that nobody knows


@pytest.mark.parametrize("unreadable", [b"\xff garbage", NESTED], ids=["garbage", "nested"])
async def test_streams_that_nobody_asked_for_do_no_harm(unreadable: bytes) -> None:
    async with averagers(3, config=replace(PATIENT, averaging_timeout_s=16.0)) as members:
        peers = by_id(members)
        target, stranger = peers[0].endpoint, peers[2].run
        garbage = await stranger.open_bulk(target.peer_id, STREAM_KIND, unreadable, 5.0)
        with pytest.raises(PeerLost):
            await garbage.receive_into(memoryview(bytearray(1)))
        header = msgspec.msgpack.encode(StreamHeader(b"a group that is not"))
        waiting = [await stranger.open_bulk(target.peer_id, STREAM_KIND, header, 5.0) for _ in range(2)]
        with pytest.raises(PeerLost):
            await waiting[1].receive_into(memoryview(bytearray(1)))
        assert target.counters["protocol_violations"] == 2
        await committed(peers)
        for stream in (garbage, *waiting):
            stranger.release(stream)
        await turns(50)
        another = await stranger.open_bulk(target.peer_id, STREAM_KIND, header, 5.0)
        await turns(50)
        assert target.counters["protocol_violations"] == 2, "the first one that waited is forgotten"
        stranger.release(another)


async def test_votes_of_strangers_count_nothing() -> None:
    async with averagers(4, config=PATIENT) as members:
        leader, member, absent, stranger = by_id(members)
        for peer in (leader, member, absent):
            peer.roster.missing = [stranger.peer_id]
        stop_before_reducing(absent)
        begun = rounds_of(leader.peer_id)
        tasks = start([leader, member, absent])
        await until(lambda: begun)
        group_id, count = begun[0].group.group_id, begun[0].machine.count
        voting = [
            asyncio.ensure_future(stranger.run.call(leader.peer_id, VOTE, Vote(group_id, 0, [b"forged"] * 3), 0.2))
            for _ in range(3)
        ]
        for error in await asyncio.gather(*voting, return_exceptions=True):
            assert isinstance(error, Refused)
            assert error.code == "not_a_member"
        assert count is not None
        assert [b"forged"] * 3 not in [vote.digests for vote in count.votes.values()]
        with pytest.raises(Refused, match="unknown_group"):
            await stranger.run.call(leader.peer_id, VOTE, Vote(b"no such group", 0, [b"forged"]), 1.0)
        await end(tasks)


async def test_a_leader_that_sends_everybody_in_circles_ends_the_attempt() -> None:
    async with endpoints(3) as swarm:
        one, another, own = sorted(swarm, key=lambda endpoint: endpoint.peer_id)
        roster = FixedMeeting(own, {one.peer_id: False, another.peer_id: False})
        averager = RoundRunner(own, RUN_ID, b"same", roster, PATIENT, random.Random(1))

        def point_to(other: Endpoint) -> Callable[[PeerId, JoinRequest], Awaitable[JoinResponse]]:
            async def answer(remote: PeerId, request: JoinRequest) -> JoinResponse:
                return JoinResponse(leader=other.peer_id, leader_addresses=["garbage", *map(str, other.addresses)])

            return answer

        RunEndpoint(one, RUN_ID).handle(JOIN, point_to(another))
        RunEndpoint(another, RUN_ID).handle(JOIN, point_to(one))
        async with time_limit(PATIENCE_S, "waiting for the end of the attempt"):
            with pytest.raises(RoundAborted, match=r"the others follow peer .*, which gives this one no place"):
                await averager.average(torch.ones(3), 1.0)
        await averager.close()
