"""The events of ``make soak``."""

from __future__ import annotations

import math

import pytest

from tests.faults.soak import MAX_PEERS, MIN_RUNNING, SETTLE_S, VETERANS, WEIGHTS, events

MINUTES = 30.0


@pytest.mark.parametrize("seed", range(5))
def test_at_least_three_peers_have_long_run_undisturbed_and_at_most_ten_are_there(seed: int) -> None:
    calm_at_s: dict[int, float] = {}  # by place with a peer
    hits_newcomers = False
    for event in events(seed, MINUTES * 60):
        if event.kind == "join":
            assert event.place not in calm_at_s, "the place was empty"
            calm_at_s[event.place] = event.at_s
            assert len(calm_at_s) <= MAX_PEERS
            continue
        assert calm_at_s[event.place] <= event.at_s, "one thing at a time"
        since_s = event.at_s - calm_at_s[event.place]
        if event.kind in ("kill", "leave"):
            assert event.place not in VETERANS, "these show what grows slowly"
            hits_newcomers |= since_s < SETTLE_S
            del calm_at_s[event.place]
        else:
            assert since_s >= SETTLE_S, "a newcomer may refuse a wrong clock, and give up if it is stopped"
            calm_at_s[event.place] = event.at_s + event.lasts_s
        assert sum(until_s <= event.at_s - SETTLE_S for until_s in calm_at_s.values()) >= MIN_RUNNING
    assert hits_newcomers
    assert calm_at_s.keys() >= VETERANS


def test_events_follow_from_the_seed_and_end_in_time() -> None:
    one = list(events(3, MINUTES * 60))
    assert one == list(events(3, MINUTES * 60)) != list(events(4, MINUTES * 60))
    assert max(event.at_s + event.lasts_s for event in one) <= MINUTES * 60
    assert {event.kind for event in one} == set(WEIGHTS)
    assert all(math.isfinite(event.amount) for event in one)
