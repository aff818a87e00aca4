"""What follows from how the others behaved; honest peers are never kept out."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from manyhands.averaging.matchmaking.candidates import (
    GOOD_ROUNDS,
    MAX_AVOIDED_S,
    REFUSED_S,
    STRIKES,
    Candidates,
)
from manyhands.testing import VirtualLoop
from tests.swarm import FixedRoster
from tests.unit.averaging.groups import group_of, peer

GOOD, BAD = peer(1), peer(2)
WAIT_S = 10.0


def run(story: Coroutine[Any, Any, None]) -> None:
    """In virtual time."""
    VirtualLoop().run(story, 1e6)


def after_a_good_round() -> tuple[Candidates, FixedRoster]:
    roster = FixedRoster({GOOD: False, BAD: False})
    view = Candidates(roster, WAIT_S)
    view.note_round([GOOD, BAD], [], is_committed=True)
    return view, roster


def test_a_known_peer_may_be_late_once_and_is_then_waited_for_less_and_less() -> None:
    async def story() -> None:
        view, _ = after_a_good_round()
        view.note_in_vain([BAD])
        assert view.is_heeded(BAD)
        for number in range(8):
            view.note_in_vain([BAD])
            await asyncio.sleep(min(WAIT_S * 4.0**number, MAX_AVOIDED_S) - 0.1)
            assert not view.is_heeded(BAD)
            assert view.expected() == {GOOD: False}
            assert not view.is_refused(BAD), "it has a place if it comes by itself"
            await asyncio.sleep(0.1)
            assert view.is_heeded(BAD)
        view.note_round([GOOD, BAD], [], is_committed=True)
        view.note_in_vain([BAD])
        assert view.is_heeded(BAD)

    run(story())


def test_only_one_that_was_to_blame_in_rounds_has_less_time_in_them_and_only_where_the_others_are_most() -> None:
    """Waits in vain are not known to all members alike."""

    async def story() -> None:
        view, _ = after_a_good_round()
        group = group_of(3)
        pair = msgspec.structs.replace(group, members=group.members[1:])
        for _ in range(2):
            view.note_in_vain([BAD])
            assert view.doubted(group) == set()
        for _ in range(2):
            assert view.doubted(group) == set()
            view.note_round([GOOD, BAD], [BAD], is_committed=True)
        assert view.doubted(group) == {group.rank_of(BAD)}
        assert view.doubted(pair) == set()
        await asyncio.sleep(WAIT_S)
        assert view.doubted(group) == set()

    run(story())


def test_one_that_was_to_blame_in_two_rounds_in_a_row_gets_a_place_only_now_and_then_until_a_good_round() -> None:
    """So it costs little if it is hostile, and gets on soon after a fault is over."""

    async def story() -> None:
        view, _ = after_a_good_round()
        view.note_round([GOOD, BAD], [BAD], is_committed=True)
        assert not view.is_paused(BAD)
        view.note_round([GOOD, BAD], [BAD], is_committed=True)
        for _ in range(4):  # the second penalty is four times as long
            assert view.is_paused(BAD)
            await asyncio.sleep(WAIT_S)
            assert not view.is_paused(BAD)
            view.note_round([GOOD, BAD], [BAD], is_committed=True)
        assert view.is_paused(BAD)
        view.note_round([GOOD, BAD], [], is_committed=True)
        assert not view.is_paused(BAD)

    run(story())


def test_a_peer_that_was_to_blame_itself_knows_it_for_as_long_as_the_others_may_refuse_it() -> None:
    async def story() -> None:
        view, _ = after_a_good_round()
        view.note_round([GOOD], [GOOD, BAD], is_committed=False)
        assert not view.is_to_blame()
        view.note_round([GOOD], [BAD], is_committed=True)
        assert view.is_to_blame()
        await asyncio.sleep(WAIT_S)
        assert not view.is_to_blame()
        view.note_round([GOOD], [BAD], is_committed=True)
        view.note_round([GOOD], [GOOD], is_committed=True)
        assert not view.is_to_blame()

    run(story())


def test_a_leader_that_did_not_close_its_group_is_followed_less_and_less_until_it_has_led_a_round() -> None:
    async def story() -> None:
        view, _ = after_a_good_round()
        view.note_unclosed(BAD)
        assert view.is_heeded(BAD)
        for number in range(3):
            view.note_unclosed(BAD)
            view.note_round([GOOD, BAD], [], leader=GOOD, is_committed=True)
            assert view.expected() == {GOOD: False}
            await asyncio.sleep(WAIT_S * 4.0**number)
            assert view.is_heeded(BAD)
        view.note_round([GOOD, BAD], [], leader=BAD, is_committed=True)
        view.note_unclosed(BAD)
        assert view.is_heeded(BAD)

    run(story())


def test_a_refusal_does_not_lapse() -> None:
    async def story() -> None:
        view, _ = after_a_good_round()
        for number in range(3):
            for _ in range(STRIKES - 1):
                view.strike(BAD)
            assert view.strike(BAD) == pytest.approx(REFUSED_S * 2**number)
            await asyncio.sleep(REFUSED_S * 2 ** (number + 2))

    run(story())


def test_a_penalty_is_no_longer_for_what_happens_while_it_lasts_and_lapses_as_long_after_it_as_the_next_would_be() -> (
    None
):
    async def story() -> None:
        view, _ = after_a_good_round()
        for _ in range(3):
            view.note_in_vain([BAD])
        await asyncio.sleep(WAIT_S)
        assert view.is_heeded(BAD)
        view.note_in_vain([BAD])
        await asyncio.sleep(4 * WAIT_S - 0.1)
        assert not view.is_heeded(BAD)
        await asyncio.sleep(0.1 + 16 * WAIT_S + 0.1)
        view.note_in_vain([BAD])
        await asyncio.sleep(WAIT_S)
        assert view.is_heeded(BAD), "the first one again"

    run(story())


def test_who_spoils_one_round_after_the_other_is_expected_only_after_a_fresh_record_and_then_later() -> None:
    async def story() -> None:
        view, roster = after_a_good_round()
        for number in range(3):
            view.note_round([GOOD, BAD], [BAD], is_committed=True)
            assert view.expected() == {GOOD: False}
            roster.missing.clear()  # it publishes at once
            assert (BAD in view.expected()) == (number == 0)
        view.note_round([GOOD, BAD], [], is_committed=True)
        view.note_round([GOOD, BAD], [BAD], is_committed=True)
        roster.missing.clear()
        assert set(view.expected()) == {GOOD, BAD}

    run(story())


def test_rounds_that_nobody_committed_do_not_keep_peers_apart() -> None:
    async def story() -> None:
        view, roster = after_a_good_round()
        for _ in range(9):
            view.note_round([GOOD, BAD], [BAD], is_committed=False)
            assert view.expected() == {GOOD: False}
            roster.missing.clear()
            assert set(view.expected()) == {GOOD, BAD}

    run(story())


def test_values_that_are_too_large_three_times_cost_ten_minutes_then_twenty() -> None:
    async def story() -> None:
        view, _ = after_a_good_round()
        for number in range(4):
            for _ in range(STRIKES - 1):
                assert view.strike(BAD) == 0.0
                assert not view.is_refused(BAD)
            assert view.strike(BAD) == pytest.approx(REFUSED_S * 2**number)
            await asyncio.sleep(REFUSED_S * 2**number - 0.1)
            assert view.is_refused(BAD)
            await asyncio.sleep(0.1)
            assert not view.is_refused(BAD)

    run(story())


def test_an_odd_batch_now_and_then_is_forgiven() -> None:
    async def story() -> None:
        view, _ = after_a_good_round()
        for _ in range(100):
            assert view.strike(BAD) == 0.0
            view.note_round([GOOD, BAD], [BAD], is_committed=True)
            for _ in range(GOOD_ROUNDS):
                view.note_round([GOOD, BAD], [], is_committed=True)
        assert not view.is_refused(BAD)

    run(story())


def test_what_is_remembered_is_bounded() -> None:
    async def story() -> None:
        view, _ = after_a_good_round()
        for number in range(10_000):
            view.note_round([peer(number)], [], is_committed=True)
            view.note_in_vain([peer(number)])
            view.note_unclosed(peer(number))
            view.strike(peer(number))
        assert max(len(known) for known in (view._avoided.known, view._not_followed.known, view._strikes)) <= 4096

    run(story())
