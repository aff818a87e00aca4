"""What a coordinator gives, to whom, and what it remembers after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands.access import Charter, SignedCharter
from manyhands.access.charters import read_charters
from manyhands.access.ledger import Ledger
from manyhands.access.managing import manage
from manyhands.access.messages import MAX_BANS, RECORD_TTL_S, CharterRecord, LeaseRequest, RunMethods, charter_key
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.ticket import Ticket
from manyhands.dht import DhtConfig
from manyhands.dht.issuing import Issuer
from manyhands.peer import Presence
from tests.dht_requests import store_at
from tests.network import PATIENCE_S, identity_of
from tests.unit.access.world import (
    CHARTER,
    COORDINATOR,
    HOUR_S,
    LOOKS_OFTEN,
    OWNER,
    RUN,
    SECOND,
    START_S,
    Clock,
    World,
    charter_of,
    lease_of,
    new_world,
    token_of,
)


async def joined(world: World, *numbers: int) -> list[Presence]:
    """Peers that have joined with a ticket."""
    presences = [await world.peer(number) for number in numbers]
    for presence in presences:
        await presence.join_run(world.ticket(token_of(10)))
    return presences


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (b"", "run 'ours' is by invitation, and this ticket contains none; ask its coord"),
        (token_of(expires_at=START_S - 1), "the invitation has expired; ask for another ticket"),
        (token_of(peer_id=identity_of(77).peer_id), "the invitation is for peer .* and this one is"),
        (token_of(charter=charter_of(run_id="other")), "the invitation is for another run; ask for another ticket"),
        (token_of(signer=identity_of(77)), "is not a coordinator of the run; ask for another ticket"),
        (b"a password", "cannot be read"),
    ],
)
async def test_a_bad_token_gives_no_lease_and_says_why(token: bytes, message: str) -> None:
    async with new_world() as world:
        assert await (await world.peer(2)).serve_charter(CHARTER)
        with pytest.raises(ConfigError, match=message):
            await (await world.peer(10)).join_run(world.ticket(token))
        assert not world.peers[1].endpoint.gates, "nothing of the run is left behind"


async def test_a_token_for_one_peer_is_of_use_to_that_peer() -> None:
    async with new_world() as world:
        await (await world.peer(2)).serve_charter(CHARTER)
        await (await world.peer(10)).join_run(world.ticket(token_of(peer_id=identity_of(10).peer_id)))


async def test_each_use_counts_once_for_each_peer_also_after_a_restart(tmp_path: Path) -> None:
    async with new_world() as world:
        first = await world.peer(2, folder=tmp_path)
        await first.serve_charter(CHARTER)
        ticket = world.ticket(token_of(2))
        await (await world.peer(10)).join_run(ticket)
        again = await world.peer(11)
        await again.join_run(ticket)
        await again.members[RUN].close()
        await again.join_run(ticket)
        with pytest.raises(ConfigError, match="the invitation was for 2 peers and is used up"):
            await (await world.peer(12)).join_run(ticket)
    async with new_world() as world:
        await (await world.peer(2, folder=tmp_path)).serve_charter(CHARTER)
        with pytest.raises(ConfigError, match="the invitation was for 2 peers and is used up"):
            await (await world.peer(12)).join_run(world.ticket(token_of(2)))


async def test_peers_that_come_at_the_same_moment_do_not_share_a_use() -> None:
    async with new_world() as world:
        await (await world.peer(2)).serve_charter(CHARTER)
        ticket = world.ticket(token_of(3))
        peers = [await world.peer(number) for number in range(10, 16)]
        outcomes = await asyncio.gather(*(peer.join_run(ticket) for peer in peers), return_exceptions=True)
        assert sum(outcome is None for outcome in outcomes) == 3


async def test_an_invitation_is_redeemed_in_one_place_so_that_it_is_counted_once() -> None:
    async with new_world() as world:
        first, second = await world.peer(2), await world.peer(3)
        await first.serve_charter(CHARTER)
        await second.serve_charter(CHARTER)
        ticket = world.ticket(token_of(coordinator=SECOND.peer_id))
        await (await world.peer(10)).join_run(ticket)
        with pytest.raises(ConfigError, match="used up"):
            await (await world.peer(11)).join_run(ticket)


@pytest.mark.parametrize(("ahead_s", "words"), [(HOUR_S, "3600 s ahead of"), (-HOUR_S, "3600 s behind")])
async def test_clocks_an_hour_apart_are_one_line_that_says_so(ahead_s: float, words: str) -> None:
    async with new_world() as world:
        await (await world.peer(2)).serve_charter(CHARTER)
        newcomer = await world.peer(10, clock=Clock(START_S + ahead_s))
        with pytest.raises(ConfigError, match=f"the clock of this machine is (about )?{words}") as caught:
            await newcomer.join_run(world.ticket(token_of()))
        assert "timedatectl set-ntp true" in str(caught.value)
        assert "\n" not in str(caught.value)


async def test_a_coordinator_that_cannot_write_its_accounts_gives_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with new_world() as world:
        await (await world.peer(2, folder=tmp_path)).serve_charter(CHARTER)

        def disk_full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("manyhands.access.ledger.write_whole", disk_full)
            with pytest.raises(Unavailable, match="cannot write its files: No space left on device"):
                await (await world.peer(10)).join_run(world.ticket(token_of()))
        await world.peers[1].join_run(world.ticket(token_of()))


async def test_the_owner_bans_and_lists_over_the_network_and_nobody_else_does() -> None:
    async with new_world() as world:
        await (await world.peer(2)).serve_charter(CHARTER)
        bad = await world.peer(10)
        await bad.join_run(world.ticket(token_of()))
        owner = await world.peer(1)
        assert [member.peer_id for member in await manage(owner.endpoint, owner.dht, CHARTER)] == [bad.peer_id]
        with pytest.raises(Refused, match="only the owner"):
            await manage(bad.endpoint, bad.dht, CHARTER, [owner.peer_id])
        with pytest.raises(Refused, match="is not a peer id"):
            await manage(owner.endpoint, owner.dht, CHARTER, [PeerId("nobody")])
        (member,) = await manage(owner.endpoint, owner.dht, CHARTER, [bad.peer_id])
        assert member.is_banned
        await bad.members[RUN].close()
        with pytest.raises(ConfigError, match=r"this peer was banned from run 'ours' by .*; ask its owner"):
            await bad.join_run(world.ticket(token_of()))


async def test_the_oldest_ban_stays_when_there_are_too_many() -> None:
    async with new_world() as world:
        first, owner = await world.peer(2), await world.peer(1)
        await first.serve_charter(CHARTER)
        banned = [identity_of(100 + number).peer_id for number in range(MAX_BANS + 1)]
        await manage(owner.endpoint, owner.dht, CHARTER, banned[:MAX_BANS])
        assert len(await manage(owner.endpoint, owner.dht, CHARTER, banned[:1])) == MAX_BANS
        with pytest.raises(Refused, match="1000 peers are banned, the most that a charter allows"):
            await manage(owner.endpoint, owner.dht, CHARTER, banned[-1:])
        (published,) = await read_charters(owner.dht, RUN, publishers=CHARTER.coordinators)
        assert set(published.record.bans) == set(banned[:MAX_BANS])


async def test_a_ban_whose_record_nobody_took_is_published_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("manyhands.access.coordinator.BANS_PERIOD_S", 0.01)
    async with new_world() as world:
        first = await world.peer(2, folder=tmp_path)
        await first.serve_charter(CHARTER)
        store, num_failed = first.dht.store, 0

        async def fail_first(*arguments: Any, **options: Any) -> Any:
            nonlocal num_failed
            num_failed += 1
            if num_failed <= 3:
                raise Unavailable("nobody takes it")
            return await store(*arguments, **options)

        monkeypatch.setattr(first.dht, "store", fail_first)
        bad = identity_of(50).peer_id
        Ledger(tmp_path).ban(bad, START_S)
        async with time_limit(PATIENCE_S, "waiting for the ban"):
            while bad not in [
                peer_id
                for entry in await read_charters(first.dht, RUN, publishers=[first.peer_id])
                for peer_id in entry.record.bans
            ]:
                await asyncio.sleep(0.01)
    assert sum("were not published" in record.message for record in caplog.records) == 1


async def test_a_ban_that_was_written_beside_the_coordinator_is_published_by_it(tmp_path: Path) -> None:
    async with new_world() as world:
        first = await world.peer(2, folder=tmp_path)
        await first.serve_charter(CHARTER)
        other = await world.peer(10, config=LOOKS_OFTEN)
        await other.join_run(world.ticket(token_of()))
        bad = identity_of(50).peer_id
        Ledger(tmp_path).ban(bad, START_S)
        async with time_limit(PATIENCE_S, "waiting for the ban"):
            while not other.members[RUN].is_banned(bad):
                await asyncio.sleep(0.05)
        with pytest.raises(Refused, match=f"was banned from run 'ours' by {COORDINATOR.peer_id}"):
            other.members[RUN].check(bad)


async def test_a_peer_that_the_charter_does_not_name_publishes_it_and_signs_nothing(tmp_path: Path) -> None:
    async with new_world() as world:
        assert not await (await world.peer(7)).serve_charter(CHARTER)
        with pytest.raises(Unavailable, match="no coordinator of run 'ours' gives a lease"):
            await (await world.peer(10)).join_run(world.ticket(token_of()))


async def test_a_state_dir_is_of_one_charter(tmp_path: Path) -> None:
    async with new_world() as world:
        Ledger(tmp_path).keep_charter(CHARTER)
        with pytest.raises(
            ConfigError, match="belongs to a coordinator of run 'ours' with another charter; name another"
        ):
            await (await world.peer(2, folder=tmp_path)).serve_charter(charter_of(created_at=2.0))


def test_accounts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.keep_charter(CHARTER)
    (tmp_path / "coordinator" / "bans.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bans.json cannot be read"):
        Ledger(tmp_path)


async def test_a_ticket_whose_charter_nobody_knows_is_refused() -> None:
    async with new_world() as world:
        await world.peer(2)
        newcomer = await world.peer(10)
        with pytest.raises(
            Unavailable, match="none of the peers here has the charter of run 'ours'; start one of its coord"
        ):
            await newcomer.join_run(world.ticket(token_of()))
        other = charter_of(created_at=2.0)
        await world.peers[0].serve_charter(other)
        with pytest.raises(ConfigError, match="has another charter than the one of this ticket"):
            await newcomer.join_run(world.ticket(token_of()))


async def test_a_forged_charter_in_the_dht_is_passed_over() -> None:
    async with new_world() as world:
        await (await world.peer(2)).serve_charter(CHARTER)
        liar = await world.peer(20)
        own = SignedCharter.sign(liar.endpoint.identity, Charter(RUN, liar.peer_id, "open"))
        await liar.serve_charter(own)
        newcomer = await world.peer(10)
        await newcomer.join_run(world.ticket(token_of()))
        assert newcomer.members[RUN].charter == CHARTER
        assert OWNER.peer_id == newcomer.members[RUN].charter.charter.owner


def test_a_ticket_carries_charter_and_token() -> None:
    from tests.unit.base.test_ticket import ADDRESSES

    ticket = Ticket(RUN, ADDRESSES, b"", CHARTER.digest, token_of())
    assert Ticket.parse(str(ticket)) == ticket
    assert len(str(ticket)) <= 1000
    assert ticket.is_charted
    assert not Ticket(RUN, ADDRESSES, b"digest").is_charted


async def test_a_leaked_key_stops_a_coordinator_but_ends_no_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("manyhands.access.coordinator.BANS_PERIOD_S", 0.01)
    monkeypatch.setattr("manyhands.access.coordinator.TWIN_PERIOD_S", 0.0)
    monkeypatch.setattr("manyhands.base.twin.EARLIER_LIFE_S", -60.0)
    monkeypatch.setattr("manyhands.base.twin.STAY_S", 0.0)
    async with new_world() as world:
        first = await world.peer(2)
        await first.serve_charter(CHARTER)
        member, attacker = (await joined(world, 10))[0], await world.peer(20)
        value = msgspec.to_builtins(CharterRecord(CHARTER.signed.encoded(), began_at=1.0), builtin_types=(bytes,))
        issuer = Issuer(COORDINATOR, DhtConfig(), lambda: START_S + 5.0)
        record = issuer.issue(charter_key(RUN), COORDINATOR.peer_id, value, RECORD_TTL_S)
        for peer in (first, member):
            await store_at(attacker.endpoint, peer.peer_id, [record])
        async with time_limit(PATIENCE_S, "for the coordinator to stop"):
            while "somebody else has its key" not in caplog.text:
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="is a copy of another one"):
            await joined(world, 11)
        first.check_own(RUN)
        assert await first.dht.get(charter_key(RUN), owners=[first.peer_id])
    assert sum("somebody else has its key" in record.message for record in caplog.records) == 1


async def test_nobody_joins_by_a_revoked_invitation_and_who_has_joined_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.access.coordinator.BANS_PERIOD_S", 0.01)
    async with new_world() as world:
        first = await world.peer(2, folder=tmp_path)
        await first.serve_charter(CHARTER)
        (member,) = await joined(world, 10)
        assert Ledger(tmp_path).revoke(b"an id of 12.".hex(), START_S) == [member.peer_id]
        read_bans, was_read = Ledger.read_bans, asyncio.Event()

        def note(ledger: Ledger) -> None:
            read_bans(ledger)
            was_read.set()

        monkeypatch.setattr(Ledger, "read_bans", note)
        async with time_limit(PATIENCE_S, "for the coordinator to read it"):
            await was_read.wait()
        with pytest.raises(ConfigError, match="the invitation was revoked; ask for another ticket"):
            await joined(world, 11)
        renewal = LeaseRequest(CHARTER.digest, START_S, b"", lease_of(member.peer_id).signed.encoded())
        assert (await member.endpoint.call(first.peer_id, RunMethods(RUN).lease, renewal)).lease
