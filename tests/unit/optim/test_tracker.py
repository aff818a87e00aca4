"""One peer's place in a run, against a DHT whose answers the test writes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from manyhands.averaging.grid.seats import NO_SEAT, Layout, Seat
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import GOODBYE, PROGRESS_KIND, PeerRecord, peer_key
from manyhands.averaging.roster import Roster, Standing
from manyhands.base.deadline import time_limit
from manyhands.base.identity import PeerId
from manyhands.dht import StoredValue
from manyhands.optim.config import ProgressConfig
from manyhands.optim.run.progress import CROWD, LARGE, SAMPLE
from manyhands.optim.run.run_machine import Situation
from manyhands.optim.run.tracker import MIN_STRANGERS, ProgressTracker
from manyhands.rpc import Endpoint
from tests.network import PATIENCE_S
from tests.swarm import endpoints, identity_of
from tests.unit.optim.fake_dht import FakeDht

KEY = peer_key("run", PROGRESS_KIND)
BOB, CAROL, DAVE = sorted(identity_of(number).peer_id for number in (101, 102, 103))
TTL_S = 30.0
HERE, NEXT = Position(3, b"here"), Position(4, b"next")


class Run:
    """A tracker, and what the test does to it."""

    def __init__(self, endpoint: Endpoint, config: ProgressConfig, target_batch_size: int) -> None:
        self.dht: Any = FakeDht()
        self.endpoint = endpoint
        self.connected: set[PeerId] = set()
        endpoint.is_connected = self.connected.__contains__  # type: ignore[method-assign]
        endpoint.carries_bulk = self.connected.__contains__  # type: ignore[method-assign]
        self.tracker = ProgressTracker(
            endpoint,
            self.dht,
            "run",
            target_batch_size,
            HERE,
            config,
            is_auxiliary=False,
            began_at=0.0,
            salt=b"salt",
        )
        self._sequence = 0

    async def hears(self, peer_id: PeerId, position: Position = HERE, *, age_s: float = 0.0, **fields: Any) -> None:
        """A record of a peer, issued ``age_s`` seconds ago, is in the DHT and is read."""
        self._sequence += 1
        ttl_s = fields.pop("ttl_s", TTL_S)
        values: dict[str, Any] = {"samples": 0, "samples_per_second": 1.0, "lineage_samples": 0, "is_client": False}
        record = PeerRecord(position=position, addresses=[], ttl_s=ttl_s, **(values | fields))
        value = msgspec.to_builtins(record, builtin_types=(bytes,))
        self.dht.put(KEY, peer_id, value, sequence=self._sequence, remaining_s=ttl_s - age_s)
        await self.tracker.refresh()

    def put_many(self, num_peers: int, position: Position = HERE, **fields: Any) -> None:
        """Records of so many peers are in the DHT; the first ones are the same each time."""
        for number in range(num_peers):
            self._sequence += 1
            record = PeerRecord(position, False, [], TTL_S, samples_per_second=1.0, **fields)
            value = msgspec.to_builtins(record, builtin_types=(bytes,))
            peer_id = identity_of(1000 + number).peer_id
            self.dht.put(KEY, peer_id, value, sequence=self._sequence, remaining_s=TTL_S)

    def members_are(self, *peer_ids: PeerId) -> None:
        """These are the members of the roster, and lead in this order."""
        standings = {
            peer_id: Standing(is_member=True, can_lead=True, led=place) for place, peer_id in enumerate(peer_ids)
        }
        self.tracker.roster = lambda: Roster(standings, round=len(peer_ids))

    def position_of(self, peer_id: PeerId) -> Position:
        return self.tracker.records()[peer_id].position


@asynccontextmanager
async def run_of_one(
    config: ProgressConfig | None = None, target_batch_size: int = 10, *, is_client: bool = False
) -> AsyncIterator[Run]:
    async with endpoints(1, clients=[0] if is_client else []) as (endpoint,):
        run = Run(endpoint, config or ProgressConfig(ttl_s=TTL_S), target_batch_size)
        try:
            yield run
        finally:
            await run.tracker.close()


async def until(condition: Callable[[], Any]) -> None:
    async with time_limit(PATIENCE_S, "waiting for the tracker"):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_trainer_without_a_new_sample_for_long_is_idle_unless_it_is_busy_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manyhands.optim.run.tracker.IDLE_S", 0.1)
    async with run_of_one() as run:
        run.tracker.start()
        await until(lambda: run.tracker.is_idle)
        num_stored = len(run.dht.stored)
        await run.tracker.publish()
        assert len(run.dht.stored) == num_stored
        run.tracker.is_busy = True
        await run.tracker.publish()
        assert len(run.dht.stored) > num_stored
        run.tracker.is_busy = False
        run.tracker.report(4, 1.0)
        assert not run.tracker.is_idle


async def test_of_many_strangers_some_count_whoever_came_first_and_peers_of_the_roster_always_do() -> None:
    async with run_of_one() as run:
        run.members_are(BOB, run.endpoint.peer_id)
        run.put_many(MIN_STRANGERS + 200)
        await run.hears(BOB)
        assert run.tracker.num_peers_here() == MIN_STRANGERS + 202, "it has made no step, so it knows nobody"
        run.tracker.move(HERE, 0, [BOB, run.endpoint.peer_id])
        await run.hears(BOB)
        assert run.tracker.num_peers_here() == MIN_STRANGERS + 2
        counting = run.tracker.observed().keys() - {BOB}
        first = {identity_of(1000 + number).peer_id for number in range(MIN_STRANGERS)}
        assert 0 < len(counting & first) < MIN_STRANGERS
        run.put_many(MIN_STRANGERS + 200)  # newer records
        await run.tracker.refresh()
        assert run.tracker.observed().keys() - {BOB} == counting, "the lots stay the same"


async def test_among_more_strangers_than_may_count_only_peers_that_count_and_some_others_are_read() -> None:
    """Else each read would take as long as all the records that strangers may store."""
    async with run_of_one() as run:
        run.members_are(BOB, run.endpoint.peer_id)
        run.tracker.move(HERE, 0, [BOB, run.endpoint.peer_id])
        run.put_many(50 * MIN_STRANGERS)
        await run.hears(BOB)
        assert (run.dht.num_reads, run.dht.num_parts) == (1, 0)
        counting = run.tracker.observed().keys()
        run.put_many(50 * MIN_STRANGERS, samples=1)
        await run.hears(BOB, samples=2)
        assert (run.dht.num_reads, run.dht.num_parts) == (1, 1)
        assert {record.samples for record in run.tracker.records().values()} == {1, 2}, "those that count are read"
        assert len(run.tracker.observed().keys() & counting) > MIN_STRANGERS / 2, "lots decide, not who came last"
        assert run.tracker.num_peers_here() == MIN_STRANGERS + 2
        run.dht.part_holder.clear()
        hearing = asyncio.create_task(run.hears(BOB, samples=3))
        await until(lambda: run.tracker.records()[BOB].samples == 3)  # whoever holds the read of the others up
        run.dht.part_holder.set()
        await hearing
        run.dht.records[KEY] = {BOB: run.dht.records[KEY][BOB]}
        await run.tracker.refresh()
        await run.tracker.refresh()
        assert (run.dht.num_reads, run.dht.num_parts) == (2, 3), "the strangers have left"


async def test_auxiliary_peers_of_the_last_round_are_no_strangers() -> None:
    """They bring no samples, so the roster has none of them; where all trainers are clients, they alone can lead."""
    async with run_of_one() as run:
        run.members_are(BOB, run.endpoint.peer_id)
        run.put_many(5 * MIN_STRANGERS)
        auxiliaries = {identity_of(1000 + number).peer_id for number in range(3)}
        run.tracker.move(HERE, 0, [BOB, run.endpoint.peer_id, *auxiliaries])
        await run.hears(BOB)
        assert run.tracker.num_peers_here() == MIN_STRANGERS + 5
        assert auxiliaries <= run.tracker.observed().keys()


async def test_in_a_grid_all_count_as_their_seats_are_needed() -> None:
    async with run_of_one() as run:
        run.members_are(BOB, run.endpoint.peer_id)
        run.tracker.move(HERE, 0, [BOB, run.endpoint.peer_id])
        run.tracker.sit(Seat(Layout((20, 20)), 1, 0))
        run.put_many(MIN_STRANGERS + 200)
        await run.tracker.refresh()
        assert run.tracker.num_peers_here() == MIN_STRANGERS + 201


async def test_a_goodbye_counts_however_it_was_encoded() -> None:
    async with run_of_one() as run:
        await run.hears(BOB)
        assert run.tracker.num_peers_here() == 2
        long_form = b"\xd9\x07" + GOODBYE.encode()  # str 8, where its length would fit into one byte
        run.dht.records[KEY][BOB] = StoredValue(long_form, 99, 30.0, BOB)
        await run.tracker.refresh()
        assert run.tracker.num_peers_here() == 1


# records that come late


async def test_a_record_from_before_a_round_does_not_move_a_peer_back() -> None:
    async with run_of_one() as run:
        await run.hears(BOB)
        run.tracker.move(NEXT, 20, [run.endpoint.peer_id, BOB])
        await run.hears(BOB, HERE, age_s=0.5, samples=9)
        assert run.position_of(BOB) == NEXT
        assert run.tracker.num_peers_here() == 2
        assert BOB in run.tracker.view.expected


@pytest.mark.parametrize("ttl_s", [20.0, 300.0])
async def test_a_round_outweighs_older_records_of_any_lifetime(ttl_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.averaging.peer_records.MOMENT_S", 0.0)  # no record is on its way
    async with run_of_one() as run:
        await run.hears(BOB, ttl_s=ttl_s)
        run.tracker.move(NEXT, 20, [BOB])
        await run.hears(BOB, HERE, age_s=0.5, ttl_s=ttl_s)
        assert run.position_of(BOB) == NEXT
        await run.hears(BOB, HERE, ttl_s=ttl_s)
        assert run.position_of(BOB) == HERE, "it says so after the round, so it does not hold the result"


async def test_a_peer_that_said_more_than_the_round_is_believed() -> None:
    async with run_of_one() as run:
        beyond = Position(5, b"beyond")
        await run.hears(BOB, beyond, samples=4)
        await run.hears(CAROL, NEXT, samples=3)
        run.tracker.move(NEXT, 20, [BOB, CAROL])
        assert run.position_of(BOB) == beyond
        assert run.tracker.records()[CAROL].samples == 3, "samples that it has told already are not forgotten"


async def test_an_older_record_never_replaces_a_newer_one() -> None:
    async with run_of_one() as run:
        await run.hears(BOB, samples=7)
        newer = run.dht.records[KEY][BOB]
        run.dht.put(KEY, BOB, newer.value | {"samples": 1}, sequence=newer.sequence - 1)
        await run.tracker.refresh()
        assert run.tracker.progress.samples == 7


async def test_records_expire() -> None:
    async with run_of_one() as run:
        await run.hears(BOB, age_s=TTL_S - 1.0)
        assert run.tracker.num_peers_here() == 2
        await asyncio.sleep(1.01)
        assert run.tracker.num_peers_here() == 1


async def test_a_goodbye_counts_at_once() -> None:
    async with run_of_one() as run:
        await run.hears(BOB)
        run.dht.put(KEY, BOB, GOODBYE, sequence=99)
        await run.tracker.refresh()
        assert run.tracker.num_peers_here() == 1
        await run.hears(BOB)
        assert run.tracker.num_peers_here() == 1, "what it said before it left is older"


# what others may write


@pytest.mark.parametrize("value", [None, 7, "leaving", b"bytes", [], {}, {"position": {"step": 1}}, {"samples": -1}])
async def test_records_that_cannot_be_read_are_counted_and_ignored(value: Any) -> None:
    async with run_of_one() as run:
        await run.hears(CAROL)
        run.dht.put(KEY, BOB, value, sequence=1)
        await run.tracker.refresh()
        assert run.endpoint.counters["bad_records"] == 1
        assert run.tracker.records().keys() == {CAROL}
        await run.hears(BOB)
        assert run.tracker.records().keys() == {BOB, CAROL}, "it may have been mended"


async def test_nobody_speaks_for_another_peer() -> None:
    async with run_of_one() as run:
        await run.hears(CAROL)
        value = run.dht.records[KEY][CAROL].value
        run.dht.put(KEY, BOB, value, sequence=1, owner="")
        run.dht.put(KEY, "anybody", value, sequence=1, owner="")
        run.dht.put(KEY, run.endpoint.peer_id, value | {"samples": 100}, sequence=1)
        await run.tracker.refresh()
        assert run.tracker.records().keys() == {CAROL}
        assert run.tracker.progress.samples == 0


async def test_a_kind_of_address_from_the_future_does_not_hide_a_peer() -> None:
    async with run_of_one() as run:
        await run.hears(BOB)
        value = run.dht.records[KEY][BOB].value
        addresses = ["/quantum/entangled", "/ip4/203.0.113.7/tcp/31337"]
        run.dht.put(KEY, BOB, value | {"addresses": addresses, "mood": "fine"}, sequence=99)
        await run.tracker.refresh()
        assert run.tracker.num_peers_here() == 2
        assert [address.host for address in run.endpoint.addresses_of(BOB)] == ["203.0.113.7"]


# whom to expect


async def test_a_missing_peer_is_not_expected_before_a_fresh_record() -> None:
    async with run_of_one() as run:
        await run.hears(BOB, is_client=True)
        await run.hears(CAROL)
        assert run.tracker.view.expected == {BOB: True, CAROL: False}
        run.tracker.report_missing(BOB)
        run.tracker.report_missing(PeerId("never heard of"))
        assert run.tracker.view.expected == {CAROL: False}
        await run.tracker.refresh()
        assert run.tracker.view.expected == {CAROL: False}
        assert run.tracker.num_peers_here() == 3, "it may still be there: nobody steps alone"
        await run.hears(BOB)
        assert run.tracker.view.expected == {BOB: False, CAROL: False}


async def test_a_peer_that_came_to_a_round_is_not_missing() -> None:
    async with run_of_one() as run:
        await run.hears(BOB)
        run.tracker.report_missing(BOB)
        run.tracker.move(NEXT, 20, [BOB])
        assert run.tracker.view.expected == {BOB: False}


async def test_a_member_that_was_lost_in_a_round_counts_as_there_but_is_not_expected() -> None:
    async with run_of_one() as run:
        await run.hears(BOB)
        await run.hears(CAROL)
        run.tracker.move(NEXT, 20, [BOB, CAROL], b"", [CAROL])
        assert run.tracker.view.expected == {BOB: False}
        assert run.tracker.num_peers_here() == 3
        await run.hears(CAROL, NEXT)
        assert run.tracker.view.expected == {BOB: False, CAROL: False}


async def test_barred_peers_count_for_nothing_so_a_single_member_goes_on_without_them() -> None:
    """They get no place for some rounds: if it waited for them, there would be no round."""
    async with run_of_one(target_batch_size=16) as run:
        me = run.endpoint.peer_id
        barred = Standing(can_lead=True, faults=2, fault_round=7)
        run.tracker.roster = lambda: Roster({me: Standing(is_member=True), BOB: barred}, round=8)
        await run.hears(BOB, samples=12, samples_per_second=4.0, batch_s=1.0)
        run.tracker.report(4, 4.0, 1.0)
        situation = situation_of(run)
        assert (situation.is_due, situation.is_alone, situation.can_meet) == (False, True, False)
        run.tracker.roster = lambda: Roster({me: Standing(is_member=True), BOB: barred}, round=10)
        await run.hears(BOB, samples=12, samples_per_second=4.0, batch_s=1.0)
        situation = situation_of(run)
        assert (situation.is_due, situation.is_alone, situation.can_meet) == (True, False, True)


async def test_peers_at_other_positions_are_not_expected() -> None:
    async with run_of_one() as run:
        await run.hears(BOB, NEXT)
        await run.hears(CAROL, Position(3, b"another branch"))
        assert run.tracker.view.expected == {}
        assert run.tracker.num_peers_here() == 1


async def test_a_call_makes_a_round_due_a_little_before_the_target_is_counted_until_it_is_answered() -> None:
    """The predicted samples of a peer may be wrong by a tenth of the target, of 10 samples here."""
    async with run_of_one() as run:
        run.tracker.report(9, 2.0)
        assert not run.tracker.is_due()
        run.tracker.call_to_round()
        assert run.tracker.is_due()
        assert run.tracker.can_meet_somebody()
        run.tracker.is_called = run.tracker.is_moving = False
        assert not run.tracker.is_due()
        assert not run.tracker.can_meet_somebody()
        run.tracker.call_to_round()
        run.tracker.move(NEXT, 20, [])
        assert not run.tracker.is_due()


async def test_a_call_makes_no_round_due_far_below_the_target() -> None:
    """Whoever calls, and however often: this peer reads once what the others say, and goes by that."""
    async with run_of_one() as run:
        run.tracker.report(4, 2.0)
        for _ in range(100):
            run.tracker.call_to_round()
        assert not run.tracker.is_due()
        await run.hears(BOB, samples=6)
        assert run.tracker.is_due()


async def test_the_target_is_reached_together() -> None:
    async with run_of_one() as run:
        run.tracker.report(4, 2.0)
        assert not run.tracker.is_due()
        await run.hears(BOB, samples=6)
        assert run.tracker.is_due()
        run.tracker.move(NEXT, 20, [BOB])
        assert run.tracker.progress.samples == 0


# branches


def situation_of(run: Run) -> Situation:
    return run.tracker.situation(lacks_state="", differs=False, has_newcomers=False, allow_solo=False)


def arrives_in_s(run: Run, within_s: float) -> float:
    now, one = asyncio.get_running_loop().time(), situation_of(run)
    return one.others.arrives_in_s(one.missing_samples, within_s, now, one.voters)


async def test_batches_that_are_being_computed_complete_the_target() -> None:
    async with run_of_one(target_batch_size=16) as run:
        await run.hears(BOB, samples=4, samples_per_second=4.0, batch_s=1.0)
        run.tracker.report(4, 4.0, 1.0)
        assert arrives_in_s(run, 1.0) == math.inf, "4 here, 4 there and 4 in the batch that is computed there"
        run.tracker.report(8, 4.0, 1.0)
        assert arrives_in_s(run, 1.0) == 1.0
        assert arrives_in_s(run, 0.9) == math.inf
        assert not run.tracker.is_due(), "a step begins by what was counted"


async def test_only_the_batches_of_voters_are_waited_for_once_the_run_has_some() -> None:
    async with run_of_one(target_batch_size=16) as run:
        here, me = run.tracker.own.position, run.endpoint.peer_id
        member, bob = Standing(is_member=True), Standing(demoted=1)
        for voters, is_waited_for in [({}, True), ({me: member}, False), ({me: member, BOB: bob}, True)]:
            run.tracker.roster = lambda those=voters: Roster(those)
            run.tracker.load(here, 0)
            await run.hears(BOB, samples=4, samples_per_second=4.0, batch_s=1.0)
            run.tracker.report(8, 4.0, 1.0)
            assert (arrives_in_s(run, 1.0) < math.inf) == is_waited_for
        run.tracker.roster = lambda: Roster({me: Standing(is_member=True)})
        run.tracker.load(here, 0)
        await run.hears(BOB, samples=8, samples_per_second=4.0, batch_s=1.0)
        run.tracker.report(8, 4.0, 1.0)
        assert run.tracker.is_due(), "what it has published counts"


async def test_in_a_crowd_no_batches_are_waited_for() -> None:
    async with run_of_one(target_batch_size=CROWD * 8) as run:
        run.tracker.report(8, 4.0, 1.0)
        for number in range(CROWD):
            assert number < CROWD - 1 or situation_of(run).is_near, "of 40 peers"
            await run.hears(identity_of(200 + number).peer_id, samples=8, samples_per_second=4.0, batch_s=1.0)
        assert not situation_of(run).is_near, "of 41"


async def test_samples_that_a_peer_tells_directly_end_the_wait_and_older_records_do_not_undo_it() -> None:
    async with run_of_one(target_batch_size=16) as run:
        run.tracker.report(8, 4.0, 1.0)
        await run.hears(BOB, samples=4, samples_per_second=4.0, batch_s=1.0)
        waiting = asyncio.create_task(run.tracker.wait_until_due(5.0))
        await asyncio.sleep(0)
        run.tracker.heard(BOB, PeerRecord(HERE, False, [], TTL_S, samples=8, samples_per_second=4.0, batch_s=1.0))
        async with time_limit(4.0, "hearing that the target is reached"):
            await waiting
        await run.hears(BOB, age_s=0.2, samples=4, samples_per_second=4.0, batch_s=1.0)
        assert run.tracker.is_due(), "it was published before"


async def test_a_branch_whose_state_cannot_be_had_is_not_followed_and_not_forgotten() -> None:
    async with run_of_one() as run:
        await run.hears(BOB, NEXT)
        assert run.tracker.leading_branch().position == NEXT
        run.tracker.report_missing(BOB)
        assert run.tracker.leading_branch().position == NEXT, "it came to no round because it is ahead"
        run.tracker.report_without_state(BOB)
        assert run.tracker.leading_branch().position == HERE, "those who are here go on together"
        assert not run.tracker.is_on_best_branch(), "but nobody goes on alone"
        await run.hears(BOB, NEXT)
        assert run.tracker.leading_branch().position == NEXT


async def test_a_peer_that_is_behind_is_waited_for_unless_it_is_missing() -> None:
    async with run_of_one() as run:
        await run.hears(BOB, Position(2, b"before"))
        assert run.tracker.behind()
        run.tracker.report_missing(BOB)
        assert not run.tracker.behind()


# publishing and reading


async def test_where_this_peer_was_is_not_published_while_a_result_is_applied() -> None:
    config = ProgressConfig(min_refresh_s=0.01, max_refresh_s=0.02, ttl_s=0.06)
    async with run_of_one(config) as run:
        run.tracker.start()
        while not run.dht.stored:
            await asyncio.sleep(0)
        run.tracker.is_moving = True
        await asyncio.sleep(0.01)  # one that was under way
        num_before = len(run.dht.stored)
        run.tracker.report(5, 1.0)
        await asyncio.sleep(0.08)
        assert len(run.dht.stored) == num_before
        run.tracker.move(NEXT, 20, [])
        while len(run.dht.stored) == num_before:
            await asyncio.sleep(0.001)
        assert msgspec.convert(run.dht.stored[-1], PeerRecord).position == NEXT


async def test_a_new_position_is_published_at_once() -> None:
    """Who has just loaded the state is not seen before, and would be left out of the next round."""
    async with run_of_one(ProgressConfig(min_refresh_s=5.0)) as run:
        run.tracker.start()
        async with time_limit(4.0, "waiting for the record"):
            while not run.dht.stored:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            run.tracker.move(NEXT, 20, [])
            while len(run.dht.stored) < 2:
                await asyncio.sleep(0.001)
        assert msgspec.convert(run.dht.stored[-1], PeerRecord).position == NEXT


async def test_far_from_the_target_a_steady_peer_publishes_nothing_new() -> None:
    async with run_of_one(ProgressConfig(min_refresh_s=0.001), target_batch_size=10**9) as run:
        run.tracker.report(1000, 1e5)
        run.tracker.start()
        await until(lambda: len(run.dht.stored) >= 1)
        started = asyncio.get_running_loop().time()
        for _ in range(20):
            await asyncio.sleep(0.002)
            samples = 1000 + round((asyncio.get_running_loop().time() - started) * 1e5)
            run.tracker.report(samples, 1e5)
        assert len(run.dht.stored) <= 2, "one that was under way when it began"
        run.tracker.report(samples, 2e5)
        await until(lambda: run.dht.stored[-1]["samples_per_second"] == 2e5)


async def test_near_the_target_every_batch_is_published() -> None:
    async with run_of_one(ProgressConfig(min_refresh_s=0.001), target_batch_size=1000) as run:
        run.tracker.start()
        for samples in (100, 110, 120):
            run.tracker.report(samples, 1e5)
            await until(lambda samples=samples: run.dht.stored and run.dht.stored[-1]["samples"] == samples)


async def test_a_record_tells_how_long_ago_its_samples_were_counted() -> None:
    async with run_of_one(ProgressConfig(min_refresh_s=0.001, max_refresh_s=0.05, ttl_s=0.06)) as run:
        run.tracker.start()
        counted_at = asyncio.get_running_loop().time()
        run.tracker.report(5, 1.0)
        num_before = len(run.dht.stored)
        await until(lambda: len(run.dht.stored) >= num_before + 3)
        last = msgspec.convert(run.dht.stored[-1], PeerRecord)
        assert 0.01 < last.counted_s_ago <= asyncio.get_running_loop().time() - counted_at


async def test_a_record_that_reached_nobody_is_published_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_of_one(ProgressConfig(min_refresh_s=0.001), target_batch_size=10**9) as run:
        stored = run.dht.store

        async def store_nowhere(*args: Any, **fields: Any) -> int:
            await stored(*args, **fields)
            return 0

        run.dht.store = store_nowhere
        run.tracker.start()
        await until(lambda: run.dht.stored)
        await asyncio.sleep(0.005)
        num_before = len(run.dht.stored)
        run.tracker.report(0, 0.0)
        await until(lambda: len(run.dht.stored) > num_before)


async def test_records_are_read_when_the_target_must_be_reached() -> None:
    async with run_of_one(ProgressConfig(min_refresh_s=0.3)) as run:
        await run.hears(BOB, samples=4, samples_per_second=20.0)
        run.tracker.report(1, 1.0)
        assert not run.tracker.is_worth_a_look(), "it was read a moment ago"
        await asyncio.sleep(0.5)
        run.tracker.report(1, 1.0)
        assert not run.tracker.is_due(), "nobody has said so"
        assert run.tracker.outlook.samples >= 10
        assert run.tracker.is_worth_a_look()
        run.tracker.call_to_round()
        assert not run.tracker.is_worth_a_look()


@pytest.mark.parametrize("slow", ["first_holder", "other_holders"])
async def test_a_slow_holder_of_the_records_holds_up_no_step_that_they_make_due(slow: str) -> None:
    async with run_of_one() as run:
        await run.hears(BOB, samples=4)
        run.put_many(1, samples=6)
        getattr(run.dht, slow).clear()
        async with time_limit(PATIENCE_S / 2, "looking"):
            await run.tracker.look(PATIENCE_S)
        assert run.tracker.is_due()


@pytest.mark.parametrize(("are_clients", "is_first"), [(True, True), (False, False)])
async def test_in_a_crowd_the_peer_that_would_lead_reads_first(are_clients: bool, is_first: bool) -> None:
    async with run_of_one(ProgressConfig(min_refresh_s=0.001)) as run:
        for number in range(2 * CROWD):  # no id is lower than this
            await run.hears(PeerId(f"0{number}"), samples=1, samples_per_second=100.0, is_client=are_clients)
        run.tracker.target_batch_size = 2 * CROWD + 10
        await asyncio.sleep(0.01)
        run.tracker.report(1, 1.0)
        assert run.tracker.outlook.samples >= run.tracker.target_batch_size > run.tracker.progress.samples
        assert run.tracker.is_worth_a_look() == is_first


# a sample of the records


def first_peers(num: int) -> list[PeerId]:
    return [identity_of(1000 + number).peer_id for number in range(num)]


async def reads_of(run: Run) -> tuple[int, int]:
    """The numbers of reads of a part and of all records that the tracker makes at its next regular read."""
    run.tracker.start()
    before = run.dht.num_parts, run.dht.num_reads
    run.tracker.refresh_soon()
    await until(lambda: (run.dht.num_parts, run.dht.num_reads) != before)
    return run.dht.num_parts - before[0], run.dht.num_reads - before[1]


async def test_up_to_a_hundred_peers_all_records_are_read_and_the_sums_are_exact() -> None:
    async with run_of_one(target_batch_size=10_000) as run:
        run.put_many(LARGE - 1, samples=3)
        run.members_are(*first_peers(LARGE - 1), run.endpoint.peer_id)
        await run.tracker.find_place()
        assert await reads_of(run) == (0, 1)
        assert run.tracker.progress.num_peers == LARGE
        assert run.tracker.progress.samples == 3 * (LARGE - 1)


async def test_a_member_of_a_large_run_reads_a_sample_and_the_next_leaders() -> None:
    async with run_of_one(target_batch_size=1_000_000) as run:
        num_peers = 5 * LARGE
        run.put_many(num_peers, samples=3)
        leaders = first_peers(3)
        run.members_are(*leaders, run.endpoint.peer_id)
        await run.tracker.find_place()
        assert await reads_of(run) == (1, 0)
        assert SAMPLE <= len(run.tracker.observed()) <= 3 * SAMPLE + 3
        assert set(leaders) <= run.tracker.observed().keys()
        assert run.tracker.progress.num_peers == pytest.approx(num_peers, rel=0.02)
        assert run.tracker.progress.samples == pytest.approx(3 * num_peers, rel=0.02)
        assert run.tracker.outlook.samples_per_second == pytest.approx(num_peers, rel=0.02)


async def test_peers_that_have_left_do_not_count_though_their_goodbyes_are_still_held() -> None:
    async with run_of_one(target_batch_size=1_000_000) as run:
        num_peers = 5 * LARGE
        run.put_many(num_peers)
        run.members_are(*first_peers(3), run.endpoint.peer_id)
        for peer_id in first_peers(num_peers)[3::3]:
            run.dht.put(KEY, peer_id, GOODBYE, sequence=10_000)
        await run.tracker.find_place()
        for _ in range(4):
            await run.tracker.find_place()
        assert run.tracker.outlook.num_peers == pytest.approx(2 / 3 * num_peers, rel=0.15)


async def test_a_holder_that_lies_about_the_number_of_records_changes_nothing() -> None:
    async with run_of_one(target_batch_size=1_000_000) as run:
        num_peers = 5 * LARGE
        run.put_many(num_peers)
        run.members_are(*first_peers(3), run.endpoint.peer_id)
        for inflated in (1, 1, 10, 1, 1):
            run.dht.inflated = inflated
            await run.tracker.find_place()
        assert run.tracker.outlook.num_peers == pytest.approx(num_peers, rel=0.02)


async def test_the_peer_that_leads_reads_all_records_and_so_does_a_member_that_nobody_calls_at_the_target() -> None:
    config = ProgressConfig(min_refresh_s=0.001, max_refresh_s=0.01)
    async with run_of_one(config, target_batch_size=1_000_000) as run:
        run.put_many(5 * LARGE, samples=3)
        others = first_peers(3)
        run.members_are(run.endpoint.peer_id, *others)
        await run.tracker.find_place()
        assert await reads_of(run) == (0, 1)
        assert run.tracker.progress.samples == 3 * 5 * LARGE
        run.members_are(*others, run.endpoint.peer_id)
        assert await reads_of(run) == (1, 0)
        run.tracker.target_batch_size = 3 * 5 * LARGE // 2
        run.tracker.judge()
        await until(lambda: not run.tracker.is_partial)  # reads as the leader would


async def test_only_guests_of_a_large_run_come_by_the_estimate_as_the_leader_calls_the_members() -> None:
    async with run_of_one(target_batch_size=5 * LARGE) as run:
        run.put_many(5 * LARGE, counted_s_ago=5.0)  # five samples each, by prediction; none published
        run.members_are(*first_peers(3), run.endpoint.peer_id)
        await run.tracker.find_place()
        assert run.tracker.outlook.samples == run.tracker.target_batch_size
        assert not run.tracker.is_due()
        run.tracker.call_to_round()
        assert run.tracker.is_due()
        run.tracker.is_called = False
        run.members_are(*first_peers(3))
        run.tracker.judge()
        assert run.tracker.is_due()


async def test_a_mate_of_the_last_round_whose_record_is_read_later_has_gone_on_too() -> None:
    async with run_of_one() as run:
        mates = first_peers(2)
        run.put_many(3, samples=5)
        run.tracker.move(NEXT, 20, [run.endpoint.peer_id, *mates])
        await run.tracker.refresh()
        stranger = first_peers(3)[2]
        assert [run.position_of(mate) for mate in mates] == [NEXT, NEXT]
        assert run.position_of(stranger) == HERE
        assert run.tracker.progress.samples == 0


@pytest.mark.parametrize("why", ["a grid", "step 0", "no roster"])
async def test_all_records_are_read_where_a_sample_does_not_tell_enough(why: str) -> None:
    async with run_of_one(target_batch_size=1_000_000) as run:
        seat = Seat(Layout((30, 30)), 7, 6) if why == "a grid" else NO_SEAT
        position = Position(0, b"") if why == "step 0" else HERE
        run.put_many(5 * LARGE, position, seat=seat)
        if why != "no roster":
            await run.tracker.find_place()
        if why == "a grid":
            run.members_are(*first_peers(3), run.endpoint.peer_id)
            run.tracker.sit(seat)
        assert await reads_of(run) == (0, 1)
        assert len(run.tracker.observed()) == 5 * LARGE


async def test_records_are_read_less_and_less_often_at_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    config, delays = ProgressConfig(min_refresh_s=0.5, max_refresh_s=10.0), list[float]()

    async def note(_: asyncio.Event, seconds: float) -> None:
        delays.append(seconds)
        if len(delays) == 7:
            await asyncio.Event().wait()

    monkeypatch.setattr("manyhands.optim.run.tracker.wait_at_most", note)
    async with run_of_one(config) as run:
        await run.hears(BOB, samples=10)
        run.tracker.start()
        await until(lambda: len(delays) == 7)
        assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


async def test_samples_of_a_peer_are_extrapolated_from_the_end_of_its_round_on() -> None:
    async with run_of_one() as run:
        await run.hears(BOB, age_s=9.0, samples=0, samples_per_second=1.0, counted_s_ago=1.0)
        assert run.tracker.outlook.samples == 10
        run.tracker.move(NEXT, 20, [BOB])
        assert run.tracker.outlook.samples < 10
        assert run.tracker.records()[BOB].samples == 0


async def test_a_peer_that_never_began_says_no_goodbye() -> None:
    async with run_of_one() as run:
        await run.tracker.close()
        assert run.dht.stored == []


async def test_the_dht_is_told_which_peers_are_members() -> None:
    """It checks their records at once, however many others there are."""
    async with run_of_one() as run:
        run.tracker.start()
        run.members_are(BOB)
        assert set(run.dht.met["run"]()) == {BOB}
        await run.tracker.close()
        assert not run.dht.met


async def test_a_closed_tracker_publishes_a_goodbye() -> None:
    async with run_of_one() as run:
        run.tracker.start()
        await run.tracker.close()
        assert run.dht.stored[-1] == GOODBYE


async def test_records_are_read_again_when_something_happened() -> None:
    async with run_of_one(ProgressConfig(min_refresh_s=10.0, max_refresh_s=20.0)) as run:
        run.tracker.start()
        while run.dht.num_reads < 1:
            await asyncio.sleep(0)
        run.tracker.refresh_soon()
        async with time_limit(PATIENCE_S, "waiting for a read"):
            while run.dht.num_reads < 2:
                await asyncio.sleep(0.001)


async def test_a_round_that_commits_during_a_read_is_not_undone_by_it() -> None:
    async with run_of_one() as run:
        await run.hears(BOB)
        run.dht.gate.clear()
        reading = asyncio.ensure_future(run.hears(BOB, HERE, age_s=0.2))
        await asyncio.sleep(0.001)
        run.tracker.move(NEXT, 20, [BOB])
        run.dht.gate.set()
        await reading
        assert run.position_of(BOB) == NEXT


# peers that cannot be dialled, and those that have no data


async def test_a_helper_is_no_trainer_and_may_lead_where_no_trainer_can_be_dialled() -> None:
    async with run_of_one() as run:
        await run.hears(BOB, is_client=True)
        await run.hears(CAROL, is_auxiliary=True)
        assert run.tracker.num_peers_here() == 2
        assert run.tracker.view.expected == {BOB: True, CAROL: False}
    async with run_of_one(is_client=True) as run:
        await run.hears(BOB, is_client=True)
        assert run.tracker.is_stranded()
        assert not run.tracker.can_meet_somebody()
        await run.hears(CAROL, is_auxiliary=True)
        assert not run.tracker.is_stranded()
        assert run.tracker.view.expected == {BOB: True, CAROL: False}
        assert run.tracker.can_meet_somebody()
        await run.hears(DAVE)
        assert run.tracker.view.expected == {BOB: True, CAROL: False, DAVE: False}
        assert run.tracker.num_peers_here() == 3


async def test_a_client_calls_on_hosts_that_are_behind_if_all_hosts_are() -> None:
    async with run_of_one(is_client=True) as run:
        run.tracker.move(NEXT, 20, [])
        assert run.tracker.in_need() == []
        await run.hears(BOB, is_auxiliary=True)
        await run.hears(CAROL, is_client=True)
        assert run.tracker.in_need() == [BOB]
        assert not run.tracker.should_load_state()
        await run.hears(DAVE, NEXT, lineage_samples=20)
        assert run.tracker.in_need() == [], "it can have the state from that one"


async def test_a_client_follows_only_peers_that_can_be_dialled() -> None:
    async with run_of_one(is_client=True) as run:
        await run.hears(BOB, NEXT, is_client=True)
        assert not run.tracker.should_load_state(), "it could not have it"
        assert run.tracker.is_on_best_branch()
        assert run.tracker.trainers()
        await run.hears(CAROL, NEXT, is_auxiliary=True)
        assert run.tracker.leading_branch().holders == (CAROL,)


async def test_a_host_follows_a_client_once_that_is_connected() -> None:
    async with run_of_one() as run:
        await run.hears(BOB, NEXT, is_client=True)
        assert not run.tracker.should_load_state()
        assert run.tracker.is_on_best_branch(), "it goes on until then"
        run.tracker.load(Position(0, b"begin"), 0)
        assert not run.tracker.is_on_best_branch(), "a newcomer waits"
        assert run.tracker.branches.waits_for_clients()
        run.connected.add(BOB)
        assert run.tracker.leading_branch().holders == (BOB,)
