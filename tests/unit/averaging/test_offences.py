"""Who spoils one round after the other is expected less and less."""

from __future__ import annotations

import asyncio

from manyhands.averaging.matchmaking.candidates import Candidates
from manyhands.averaging.matchmaking.conduct import MAX_AVOIDED_S
from manyhands.testing import VirtualLoop
from tests.swarm import FixedRoster
from tests.unit.averaging.groups import peer

GOOD, BAD = peer(1), peer(2)
WAIT_S = 10.0


def test_who_spoils_one_round_after_the_other_is_expected_less_and_less() -> None:
    """The first time until a fresh record, then longer each time, whatever its record; a good round ends that."""

    async def offend() -> list[float]:
        loop, roster = asyncio.get_running_loop(), FixedRoster({GOOD: False, BAD: False})
        view = Candidates(roster, WAIT_S)
        absent_s = []
        view.note_round([GOOD, BAD], [], is_committed=True)
        for _ in range(9):
            view.note_round([GOOD, BAD], [BAD], is_committed=True)
            assert view.expected() == {GOOD: False}
            roster.missing.clear()  # it publishes at once
            began = loop.time()
            while BAD not in view.expected():
                await asyncio.sleep(0.5)
            absent_s.append(loop.time() - began)
        view.note_round([GOOD, BAD], [], is_committed=True)
        view.note_round([GOOD, BAD], [BAD], is_committed=True)
        roster.missing.clear()
        assert set(view.expected()) == {GOOD, BAD}
        return absent_s

    assert VirtualLoop().run(offend()) == [0.0, *(min(WAIT_S * 4.0**n, MAX_AVOIDED_S) for n in range(8))]


def test_rounds_that_nobody_committed_do_not_keep_peers_apart() -> None:
    async def quarrel() -> None:
        roster = FixedRoster({GOOD: False, BAD: False})
        view = Candidates(roster, WAIT_S)
        for _ in range(9):
            view.note_round([GOOD, BAD], [BAD], is_committed=False)
            assert view.expected() == {GOOD: False}
            roster.missing.clear()
            assert set(view.expected()) == {GOOD, BAD}

    VirtualLoop().run(quarrel())
