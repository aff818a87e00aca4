"""Peers of two parts of a run, whose positions have the same name: no group has both, whoever expects whom."""

from __future__ import annotations

import pytest

from tests.simulation.groups import AT_ONCE_S, Search, everybody, search

ONE, OTHER = {"part": b"one"}, {"part": b"other"}


def parts(one: str, other: str, **changes: dict[str, object]) -> Search:
    """Two parts of a run in which all expect each other, as their records have not been read yet."""
    of_all = {name: ONE | changes.get(name, {}) for name in one} | {
        name: OTHER | changes.get(name, {}) for name in other
    }
    return search(everybody("".join(sorted(one + other)), **of_all))


def test_whoever_expects_whom_a_stranger_is_in_no_group_with_the_others_and_nobody_waits_for_it() -> None:
    """a would lead all of them; c asks it for a place, and b and d are invited by it."""
    world = parts("ab", "cd")
    world.run()
    for names in ("ab", "cd"):
        for name in names:
            assert world.members(name) == set(names), world[name].reasons
            assert world[name].took_s < AT_ONCE_S
    world.check_that_groups_agree()


@pytest.mark.parametrize("name", ["a", "c"])
def test_one_whose_part_has_lost_finds_that_out_at_once_and_goes_to_load_the_state(name: str) -> None:
    """As a leader, whom those that it calls refuse, and as one that asks for a place."""
    rest = "".join(sorted(set("abc") - {name}))
    world = parts(rest, name, **{name: {"is_other_part_better": True}})
    world.run()
    assert world.members(name) == set()
    (reason,) = world[name].reasons
    assert "another part of the run goes on" in reason
    assert world[name].took_s < AT_ONCE_S
    for other in rest:
        assert world.members(other) == set(rest), world[other].reasons
        assert world[other].took_s < AT_ONCE_S


def test_those_who_wait_with_a_leader_whose_part_has_lost_hear_of_it() -> None:
    """a leads b, which expects nobody else; c refuses a."""
    lost = {"is_other_part_better": True}
    world = parts("c", "ab", a=lost, b=lost | {"knows": "a"})
    world.run()
    for name in "ab":
        assert world.members(name) == set()
        (reason,) = world[name].reasons
        assert "another part of the run goes on" in reason
        assert world[name].took_s < AT_ONCE_S


def test_a_stranger_begins_no_round_here() -> None:
    """It calls and asks in vain; the training loop is not disturbed."""
    world = parts("ad", "bc", a={"begins_s": None}, d={"begins_s": None})
    world.run()
    assert world.members("b") == world.members("c") == set("bc")
    assert [world[name].roster.num_calls for name in "ad"] == [0, 0]


def test_who_was_refused_asks_again_only_when_there_is_a_fresh_record() -> None:
    """b looks for a group all the time, and nobody else of its part is there."""
    world = parts("a", "b", a={"begins_s": None}, b={"attempts": 50})
    world.run(20.0)
    assert len(world["b"].reasons) == 50
    assert world["b"].roster.missing == [world.ids["a"]]
    assert world["b"].roster.num_refreshes == 50 + 1, "each attempt looks around; the refusal has it look once more"


def test_a_stranger_holds_no_place_ahead() -> None:
    """The group of the others stands without it, and its own without them."""
    ahead = {"holds_s": 2.0, "begins_s": 8.0}
    world = parts("abe", "cd", **dict.fromkeys("abcde", ahead))
    world.run()
    for names in ("abe", "cd"):
        for name in names:
            assert world.members(name) == set(names), world[name].reasons
            assert world[name].took_s < AT_ONCE_S


def test_who_has_just_loaded_a_state_is_no_stranger_though_its_record_still_says_so() -> None:
    """It is not expected, and comes by itself."""
    world = search(everybody("abc", a=ONE | {"knows": "b"}, b=ONE | {"knows": "a", "begins_s": 1.5}, c=ONE))
    world.run()
    for name in "abc":
        assert world.members(name) == set("abc"), world[name].reasons


# peers without a record


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_peer_of_which_there_is_no_record_calls_nobody_and_gets_no_place(name: str) -> None:
    """Whether it would lead the others or follow them; they look for its record once."""
    rest = "".join(sorted(set("abc") - {name}))
    of_rest: dict[str, dict[str, object]] = {
        other: {"knows": rest.replace(other, ""), "unread": name, "begins_s": 4.0} for other in rest
    }
    world = search(everybody("abc", **of_rest))
    calls: list[int] = []
    world.world.loop.call_at(3.9, lambda: calls.extend(world[other].roster.num_calls for other in rest))
    world.run()
    assert calls == [0, 0]
    for other in rest:
        assert world.members(other) == set(rest), world[other].reasons
        assert world[other].took_s < AT_ONCE_S
        assert world[other].roster.num_refreshes <= 10, "its own looks, and two a second at most"
    assert world.members(name) == set()


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_newcomer_whose_record_was_not_read_yet_is_in_the_group_of_the_same_step(name: str) -> None:
    """The others do not expect it; its record is there when they look again."""
    rest = "".join(sorted(set("abcd") - {name}))
    of_rest: dict[str, dict[str, object]] = {
        other: {"knows": rest.replace(other, ""), "unread": name, "appear": True} for other in rest
    }
    of_rest["d"]["begins_s"] = 3.0
    world = search(everybody("abcd", **of_rest))
    world.run()
    for other in "abcd":
        assert world.members(other) == set("abcd"), (other, world[other].reasons)


def test_one_that_spoilt_rounds_gets_no_place_and_leads_nobody() -> None:
    world = search(everybody("abcd", **{name: {"begins_s": 2.0} for name in "abcd"}))

    def refuse() -> None:
        for name in "bcd":
            matchmaker = world[name].matchmaker
            assert matchmaker is not None
            for _ in range(3):
                matchmaker.candidates.strike(world.ids["a"])

    world.world.loop.call_at(1.0, refuse)
    world.run()
    for name in "bcd":
        assert world.members(name) == set("bcd"), world[name].reasons
        assert world[name].took_s < AT_ONCE_S
    assert world.members("a") == set()
