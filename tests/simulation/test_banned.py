"""A member of a run by invitation is banned while it trains: the others go on without it."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from manyhands.access.coordinator import Coordinator
from manyhands.access.managing import manage
from manyhands.peer import Presence
from manyhands.testing import Host
from tests.simulation.charted import ChartedRun
from tests.unit.access.world import CHARTER, OWNER

BANNED_S, END_S = 40.0, 90.0


def longest_wait_s(run: ChartedRun, since: float, until: float) -> float:
    """Between two steps of "good"."""
    times = [now for now, _ in run.steps["good"] if since <= now <= until]
    return max(later - earlier for earlier, later in itertools.pairwise([since, *times, until]))


@pytest.mark.long
def test_the_others_go_on_at_once_when_a_member_is_banned(caplog: pytest.LogCaptureFixture) -> None:
    run = ChartedRun(CHARTER)

    async def nothing_else(presence: Presence, coordinator: Coordinator) -> None:
        pass

    async def ban(host: Host) -> None:
        await asyncio.sleep(BANNED_S)
        owner = await run.presence(host, OWNER)
        await manage(owner.endpoint, owner.dht, CHARTER, [run.presences["bad"].peer_id])
        await asyncio.Event().wait()

    run.start_coordinator(nothing_else)
    run.world.start("owner", ban)
    run.start("good")
    run.start("bad")
    caplog.set_level(logging.INFO)
    run.world.run(END_S)
    assert "this peer was banned from run" in run.ended["bad"]
    assert longest_wait_s(run, 20.0, BANNED_S) < 4.0
    assert longest_wait_s(run, BANNED_S, END_S) < 8.0, "alone it takes 2 s, with the other peer 1 s"
    told = [record.getMessage() for record in caplog.records if "refused (banned)" in record.getMessage()]
    assert len(told) <= 4, told
