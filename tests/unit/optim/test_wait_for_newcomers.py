"""A peer that downloads the state again and again holds nobody up for long; one that then comes is waited for."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.run import collaboration as collaboration_module
from manyhands.optim.run.collaboration import PAUSE_S, Collaboration
from manyhands.optim.run.drift import Sketch

MATE, GUEST = PeerId("mate"), PeerId("guest")
STEP_S = 10.0


class Host:
    """A peer in a group, whose state others download. Time goes on with its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._followers: Collection[PeerId] = ()
        loop = SimpleNamespace(time=lambda: self.now)
        monkeypatch.setattr(collaboration_module, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
        ignored: Any = SimpleNamespace(move=lambda *_: None, moved=lambda *_, **__: None, listen_if_possible=bool)
        local: Any = SimpleNamespace(origin=None)
        presence: Any = SimpleNamespace(rng=None, own_mode=ignored, run_id="run")
        averaging: Any = SimpleNamespace(averaging_timeout_s=60.0, matchmaking_time_s=15.0)
        self._part = Collaboration(
            presence, presence, local, averaging, ignored,
            is_auxiliary=False, allow_solo=False, start_new=None,
        )  # fmt: skip
        server: Any = SimpleNamespace(followers=lambda *_, **__: set(self._followers))
        self._part._server, self._part.tracker, self._part._drift = server, ignored, ignored

    def step(self, followers: Collection[PeerId], members: Collection[PeerId]) -> bool:
        """Make a step; returns whether it waits for the followers."""
        self._followers, self._part._due_since = followers, self.now
        has_waited = self._part._begin_wait_for_newcomers(is_alone=False)
        outcome: Any = SimpleNamespace(members=members, is_in_grid=False)
        self._part.move(Position(1, b""), 0, outcome, Sketch())
        self.now += STEP_S
        return has_waited


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_who_never_comes_to_the_round_is_waited_for_once_and_then_hardly_ever(host: Host) -> None:
    """Whatever identity it takes."""
    waits = [number * STEP_S for number in range(400) if host.step([PeerId(f"guest {number}")], [MATE])]
    gaps = [later - earlier for earlier, later in itertools.pairwise(waits)]
    assert gaps
    assert all(PAUSE_S <= gap <= PAUSE_S + STEP_S for gap in gaps)


def test_who_comes_is_waited_for_the_next_time_too(host: Host) -> None:
    assert all(host.step([GUEST], [MATE, GUEST]) for _ in range(100))


def test_steps_that_wait_for_nobody_change_nothing(host: Host) -> None:
    assert not any(host.step([], [MATE]) for _ in range(100))
    assert host.step([GUEST], [MATE])
