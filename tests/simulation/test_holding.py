"""Places that are held ahead of the values: the group stands before anybody comes to it, whoever dies meanwhile."""

from __future__ import annotations

import pytest

from manyhands.testing import at, between
from tests.simulation.groups import AT_ONCE_S, Seeker, everybody, search

HOPS_S = 0.25
"""A few messages over links of 20 ms, and a poll."""


def test_who_holds_a_place_comes_to_a_group_that_stands() -> None:
    world = search(everybody("abcdefgh", **{name: {"holds_s": 2.0, "begins_s": 8.0} for name in "abcdefgh"}))
    world.run()
    for name in "abcdefgh":
        assert world.members(name) == set("abcdefgh")
        assert world[name].took_s < HOPS_S
    world.check_that_groups_agree()


def test_one_who_comes_has_all_others_called() -> None:
    """h comes first; nobody else has been told by anything but the leader."""
    world = search(everybody("abch", **{name: {"holds_s": 2.0, "begins_s": 8.0} for name in "abc"}, h={
        "holds_s": 2.0, "begins_s": 5.0}))  # fmt: skip
    world.world.run(6.0)
    assert [world[name].roster.num_calls for name in "abch"] == [1, 1, 1, 0]


def test_nobody_is_called_to_a_round_that_only_forms() -> None:
    world = search(everybody("abc", **{name: {"holds_s": 2.0, "begins_s": 8.0} for name in "abc"}))
    world.world.run(7.0)
    assert [world[name].roster.num_calls for name in "abc"] == [0, 0, 0]


@pytest.mark.parametrize("how", ["kill", "crash"])
def test_a_machine_that_goes_while_the_group_stands_is_not_waited_for(how: str) -> None:
    """a leads; if its power is gone, heartbeats show it within 8.5 s, before anybody comes."""
    for victim in "ac":
        world = search(everybody("abcd", **{name: {"holds_s": 2.0, "begins_s": 20.0} for name in "abcd"}))
        world.world.schedule(getattr(at(4.0), how)(victim))
        world.run()
        rest = set("abcd") - {victim}
        for other in rest:
            assert world.members(other) == rest, (victim, world[other].reasons)
            assert world[other].took_s < HOPS_S, victim
        world.check_that_groups_agree()


def test_one_that_cannot_be_reached_is_found_out_ahead() -> None:
    """A dial to it takes 5 s, in which nobody waits."""
    seekers = everybody("abcd", **{name: {"holds_s": 2.0, "begins_s": 10.0} for name in "abc"})
    world = search(seekers)
    world.world.schedule(between(0.6, 100.0).partition({"d"}, set("abc")))
    world.run()
    for name in "abc":
        assert world.members(name) == set("abc")
        assert world[name].took_s < HOPS_S


def test_who_gives_its_place_up_leaves_the_others_theirs() -> None:
    """It is expected still; since it does not say that it goes, it is waited for as anybody who does not come."""
    seekers = everybody("abc", **{name: {"holds_s": 2.0, "begins_s": 8.0} for name in "ab"}, c={
        "holds_s": 2.0, "begins_s": None, "gives_up_s": 5.0})  # fmt: skip
    world = search(seekers)
    world.run()
    for name in "ab":
        assert world.members(name) == set("ab"), world[name].reasons


def test_those_who_know_different_peers_hold_places_with_one_leader() -> None:
    """b follows c until a calls it; c and d have never heard of a."""
    world = search(
        [
            Seeker("a", "b", 8.0, holds_s=2.0),
            Seeker("b", "acd", 8.0, holds_s=2.0),
            Seeker("c", "bd", 8.0, holds_s=2.0),
            Seeker("d", "bc", 8.0, holds_s=2.0),
        ]
    )
    world.run()
    for name in "abcd":
        assert world.members(name) == set("abcd"), world[name].reasons
        assert world[name].took_s < HOPS_S
    world.check_that_groups_agree()


def test_some_who_hold_no_places_come_all_the_same() -> None:
    world = search(everybody("abcd", **{name: {"holds_s": 2.0, "begins_s": 8.0} for name in "bc"}, a={
        "begins_s": 8.0}, d={"begins_s": 8.1}))  # fmt: skip
    world.run()
    for name in "abcd":
        assert world.members(name) == set("abcd")
        assert world[name].took_s < AT_ONCE_S
