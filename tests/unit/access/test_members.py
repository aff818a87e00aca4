"""Who passes the gate of a run, as leases expire, coordinators come and go, and peers are banned."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands.access import Members, RunGate
from manyhands.access.charters import read_charters
from manyhands.access.lease import SignedLease
from manyhands.access.ledger import Ledger
from manyhands.access.managing import manage
from manyhands.access.messages import (
    LEASE_RECORDS,
    RECORD_TTL_S,
    LeaseRequest,
    RunMethods,
    Shown,
    charter_key,
    leases_key,
)
from manyhands.base.errors import ConfigError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.peer import Presence
from manyhands.rpc import Endpoint, Method
from tests.network import ECHO, PATIENCE_S, Text, serve_echo
from tests.unit.access.world import (
    CHARTER,
    HOUR_S,
    LOOKS_OFTEN,
    OWNER,
    PEER,
    RUN,
    SECOND,
    START_S,
    charter_of,
    lease_of,
    new_world,
    token_of,
)
from tests.unit.access.world import members as members_with

members = functools.partial(members_with, config=LOOKS_OFTEN)


class Numbers(msgspec.Struct):
    """Another request than the method takes."""

    text: int


async def not_called(*_: object) -> None:
    pytest.fail("it was served")


async def echo(caller: Presence, callee: Presence) -> str:
    """Through the gate of the run, as its rounds are called."""
    gate = RunGate(caller.endpoint, RUN)
    caller.endpoint.learn(callee.peer_id, callee.endpoint.addresses)
    call = lambda left_s: caller.endpoint.call(callee.peer_id, ECHO, Text("hello"), left_s)  # noqa: E731
    return (await gate.through(callee.peer_id, 5.0, call)).text


def serve(presence: Presence) -> None:
    endpoint = presence.endpoint
    endpoint.handle(ECHO, lambda remote, request: Text(request.text), RunGate(endpoint, RUN).check)


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)


async def test_members_call_each_other_and_show_their_leases_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with new_world() as world:
        one, two = await members(world, 10, 11)
        serve(two)
        shown: list[tuple[PeerId, PeerId]] = []
        call = Endpoint.call

        async def counted(self: Endpoint, peer_id: PeerId, method: Any, request: Any, timeout_s: float = 5.0) -> Any:
            if isinstance(request, Shown):
                shown.append((self.peer_id, peer_id))
            return await call(self, peer_id, method, request, timeout_s)

        monkeypatch.setattr(Endpoint, "call", counted)
        assert [await echo(one, two) for _ in range(3)] == ["hello"] * 3
        assert shown == [(one.peer_id, two.peer_id)]


async def test_a_guard_turns_a_call_down_before_it_is_decoded() -> None:
    async with new_world() as world:
        (one,) = await members(world, 10)
        serve(one)
        stranger = await world.peer(20)
        counters = one.endpoint.counters
        stranger.endpoint.learn(one.peer_id, one.endpoint.addresses)
        nonsense: Method[Numbers, Numbers] = Method(ECHO.name, Numbers, Numbers)
        with pytest.raises(Refused, match="is by invitation"):
            await stranger.endpoint.call(one.peer_id, nonsense, Numbers(1), 5.0)
        assert counters["protocol_violations"] == 0
        serve_echo(stranger.endpoint)
        one.endpoint.accept_bulk("kind", not_called, RunGate(one.endpoint, RUN).check)
        with pytest.raises(Refused, match="is by invitation"):
            await stranger.endpoint.open_bulk(one.peer_id, "kind", b"", 5.0)


async def test_a_run_without_a_charter_has_no_gate() -> None:
    async with new_world() as world:
        one, two = await world.peer(10), await world.peer(11)
        serve(two)
        assert await echo(one, two) == "hello"
        assert not two.dht.filters


async def test_a_peer_without_a_lease_is_called_by_no_member() -> None:
    async with new_world() as world:
        (one,) = await members(world, 10)
        stranger = await world.peer(20)
        serve_echo(stranger.endpoint)
        with pytest.raises(Refused, match=r"no method 'ours\.access\.show' here"):
            await echo(one, stranger)


async def test_a_lease_of_another_peer_is_worth_nothing() -> None:
    async with new_world() as world:
        one, two = await members(world, 10, 11)
        serve(one)
        thief = await world.peer(20)
        published = (await thief.dht.get(leases_key(RUN)))[two.peer_id]
        own = SignedLease.from_bytes(LEASE_RECORDS.decode(published.raw), CHARTER, two.peer_id)
        stolen = Members(thief.endpoint, thief.dht, CHARTER, own_lease=lambda: own)
        await stolen.watch()
        await stolen.enter()
        with pytest.raises(Refused, match="its lease is that of peer"):
            await echo(thief, one)
        await thief.dht.store(f"{RUN}.progress", "progress", 60.0, subkey=thief.peer_id)
        assert await one.dht.get(f"{RUN}.progress") == {}
        await stolen.close()


async def test_an_expired_lease_does_not_count_while_a_coordinator_is_there() -> None:
    async with new_world() as world:
        one, late = await members(world, 10, 11)
        serve(one)
        await echo(late, one)
        one.members[RUN].check(late.peer_id)
        await late.stop()
        world.clock.now += 13 * HOUR_S
        with pytest.raises(Refused, match="no valid lease"):
            one.members[RUN].check(late.peer_id)


async def test_leases_are_renewed_after_half_their_life_and_others_learn_it() -> None:
    async with new_world() as world:
        one, two = await members(world, 10, 11)
        serve(two)
        await echo(one, two)
        before = one.members[RUN].lease_of(one.peer_id)
        assert before is not None
        world.clock.now += 7 * HOUR_S
        await until(lambda: one.members[RUN].lease_of(one.peer_id) != before)
        await until(lambda: two.members[RUN].lease_of(two.peer_id).issued_at > START_S)  # type: ignore[union-attr]
        world.clock.now += 7 * HOUR_S  # the leases that both have shown are over
        assert await echo(one, two) == "hello"


async def test_leased_peers_go_on_for_a_day_while_no_coordinator_answers(caplog: pytest.LogCaptureFixture) -> None:
    async with new_world() as world:
        one, two = await members(world, 10, 11)
        serve(two)
        await world.peers[0].stop()

        def told() -> list[str]:
            messages = [record.getMessage() for record in caplog.records]
            return [message for message in messages if "No coordinator of run ours answers" in message]

        with caplog.at_level(logging.WARNING):
            world.clock.now += 7 * HOUR_S
            await until(lambda: len(told()) == 2)
            world.clock.now += 20 * HOUR_S
            assert await echo(one, two) == "hello"
            await asyncio.sleep(0.5)
        assert len(told()) == 2, "each says it once"
        assert "for at most 29 h" in told()[0]
        world.clock.now += 10 * HOUR_S
        with pytest.raises(Refused, match="no valid lease"):
            await echo(one, two)


async def test_a_peer_that_has_forgotten_the_meeting_is_shown_the_lease_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with new_world() as world:
        one, two = await members(world, 10, 11)
        serve(two)
        await echo(one, two)
        monkeypatch.setattr("manyhands.access.members.MAX_LEASES", 4)
        for number in range(30, 34):  # these push the lease of the first one out
            other = await world.peer(number)
            other.endpoint.learn(two.peer_id, two.endpoint.addresses)
            shown = Shown(CHARTER.digest, lease_of(other.peer_id).signed.encoded())
            await other.endpoint.call(two.peer_id, RunMethods(RUN).show, shown, 5.0)
        assert two.members[RUN].lease_of(one.peer_id) is None
        assert await echo(one, two) == "hello"


async def test_banned_peers_pass_no_gate_and_their_records_do_not_count() -> None:
    async with new_world() as world:
        one, bad = await members(world, 10, 11)
        serve(one)
        await echo(bad, one)
        await bad.dht.store(f"{RUN}.progress", "progress", 60.0, subkey=bad.peer_id)
        assert bad.peer_id in await one.dht.get(f"{RUN}.progress")
        owner = await world.peer(1)
        await manage(owner.endpoint, owner.dht, CHARTER, [bad.peer_id])
        await until(lambda: one.members[RUN].is_banned(bad.peer_id))
        with pytest.raises(Refused, match="was banned from run 'ours'"):
            await echo(bad, one)
        assert bad.peer_id not in await one.dht.get(f"{RUN}.progress")


async def test_a_banned_peer_ends_when_it_is_told_and_does_not_come_back_with_its_kept_lease(tmp_path: Path) -> None:
    async with new_world() as world:
        await members(world)
        bad = await world.peer(11, folder=tmp_path, config=LOOKS_OFTEN)
        await bad.join_run(world.ticket(token_of()))
        bad.check_own(RUN)
        owner = await world.peer(1)
        await manage(owner.endpoint, owner.dht, CHARTER, [bad.peer_id])
        await until(lambda: bad.members[RUN].is_banned(bad.peer_id))
        with pytest.raises(ConfigError, match=r"this peer was banned from run 'ours' by .*; ask its owner"):
            bad.check_own(RUN)
        await bad.members[RUN].close()
        with pytest.raises(ConfigError, match="this peer was banned from run 'ours'"):
            await bad.join_run(world.ticket(token_of()))


async def test_no_coordinator_bans_the_owner_or_another_coordinator() -> None:
    async with new_world() as world:
        (one,) = await members(world, 10)
        coordinator = world.peers[0]
        (published,) = await read_charters(one.dht, RUN, publishers=[coordinator.peer_id])
        record = msgspec.structs.replace(published.record, bans=[SECOND.peer_id, OWNER.peer_id, PEER.peer_id])
        value = msgspec.to_builtins(record, builtin_types=(bytes,))
        await coordinator.dht.store(charter_key(RUN), value, RECORD_TTL_S, subkey=coordinator.peer_id)
        await until(lambda: one.members[RUN].is_banned(PEER.peer_id))
        assert not one.members[RUN].is_banned(SECOND.peer_id)
        assert not one.members[RUN].is_banned(OWNER.peer_id)


async def test_records_of_a_newcomer_count_at_once() -> None:
    async with new_world() as world:
        (one,) = await members(world, 10)
        assert await one.dht.get(f"{RUN}.progress") == {}
        (two,) = await members(world, 11)
        await two.dht.store(f"{RUN}.progress", "progress", 60.0, subkey=two.peer_id)
        await two.dht.store(f"{RUN}.progress", "anonymous", 60.0, subkey="a name")
        assert set(await one.dht.get(f"{RUN}.progress")) == {two.peer_id}


async def test_an_open_run_with_a_charter_lets_everybody_pass() -> None:
    async with new_world() as world:
        charter = charter_of("open")
        await (await world.peer(2)).serve_charter(charter)
        one, two = await world.peer(10), await world.peer(11)
        await one.join_run(world.ticket(charter=charter))
        serve(one)
        assert await echo(two, one) == "hello"
        assert set(one.dht.filters) == {RUN}


async def test_a_restart_needs_no_coordinator(tmp_path: Path) -> None:
    async with new_world() as world:
        await (await world.peer(2)).serve_charter(CHARTER)
        ticket = world.ticket(token_of())
        one = await world.peer(10, folder=tmp_path)
        await one.join_run(ticket)
        lease = one.members[RUN].lease_of(one.peer_id)
    async with new_world() as world:
        one = await world.peer(10, folder=tmp_path)
        await one.join_run(ticket)
        assert one.members[RUN].lease_of(one.peer_id) == lease


async def test_a_peer_restarts_within_the_grace_of_an_expired_lease_and_not_after_it(tmp_path: Path) -> None:
    async with new_world() as world:
        await (await world.peer(2)).serve_charter(CHARTER)
        ticket = world.ticket(token_of())
        await (await world.peer(10, folder=tmp_path)).join_run(ticket)
    async with new_world() as world:
        world.clock.now += 30 * HOUR_S
        one = await world.peer(10, folder=tmp_path)
        await one.join_run(ticket)
        assert one.members[RUN].lease_of(one.peer_id) is not None
        await one.members[RUN].close()
        world.clock.now += 7 * HOUR_S
        with pytest.raises(Unavailable, match="no coordinator of run 'ours' gives a lease"):
            await one.join_run(ticket)


async def test_a_coordinator_of_an_open_run_gives_a_lease_to_everybody_and_counts_none(tmp_path: Path) -> None:
    async with new_world() as world:
        charter = charter_of("open")
        first, peer = await world.peer(2, folder=tmp_path), await world.peer(10)
        await first.serve_charter(charter)
        request = LeaseRequest(charter.digest, START_S)
        response = await peer.endpoint.call(first.peer_id, RunMethods(RUN).lease, request, 5.0)
        assert SignedLease.from_bytes(response.lease, charter, peer.peer_id).lease.role == "trainer"
        assert not Ledger(tmp_path).members()
