"""Peers without a record, and one that spoilt rounds, come to no group."""

from __future__ import annotations

import pytest

from tests.simulation.groups import AT_ONCE_S, everybody, search


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
