"""Where peers stand in the grid, as far as one of them knows."""

from __future__ import annotations

import random
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.averaging.grid.seats import MAX_ROUNDS_AGO, NO_SEAT, Layout, Seat, Step, group_of, next_step
from tests.sweeps import few_of

MAX_GROUP_SIZE = 4


def names(number: int) -> list[str]:
    return [f"peer {index:03}" for index in range(number)]


def steps_of(said: dict[str, Seat], leading_round: int, max_group_size: int = MAX_GROUP_SIZE) -> dict[str, Step]:
    """What each peer does next, if all know all."""
    rng = random.Random(1)
    return {
        peer: next_step(
            peer,
            own,
            {other: its for other, its in said.items() if other != peer},
            max_group_size,
            leading_round,
            rng,
        )
        for peer, own in said.items()
    }


def after(step: Step, number: int) -> Seat:
    return Seat(step.layout, step.own_cell(number), number)


@settings(max_examples=30)
@given(st.integers(5, 40), st.integers(0, 50))
def test_peers_with_the_same_records_expect_exactly_their_group(num_peers: int, leading_round: int) -> None:
    """In the step in which a grid is laid out, and in the next one."""
    said = dict.fromkeys(names(num_peers), Seat(round_number=leading_round))
    for _ in range(2):
        steps = steps_of(said, max(its.round_number for its in said.values()))
        assert len({(step.layout, step.first_round) for step in steps.values()}) == 1
        assert len({step.cell for step in steps.values()}) == num_peers
        step = next(iter(steps.values()))
        for number in range(step.first_round, step.end):
            groups = defaultdict(set)
            for peer, its in steps.items():
                groups[its.key(number)].add(peer)
            for peer, its in steps.items():
                mates = {other for other in said if other != peer and its.is_mate(other, said[other], number)}
                assert mates == groups[its.key(number)] - {peer}
                assert len(mates) < MAX_GROUP_SIZE
        said = {peer: after(its, its.end) for peer, its in steps.items()}


def test_the_round_of_a_peer_is_extrapolated_from_any_round_that_it_has_published() -> None:
    steps = steps_of(dict.fromkeys(names(16), NO_SEAT), 0)
    here, other = steps["peer 000"], steps["peer 001"]
    for published in range(here.first_round, here.end):
        said = after(other, published)
        for number in range(published, here.end):
            is_mate = other.key(number) == here.key(number)
            assert here.is_mate("peer 001", said, number) == is_mate
            assert not here.is_mate("peer 001", after(other, number + 1), number), "it is further already"


def test_a_newcomer_joins_the_step_that_has_just_begun_and_takes_a_free_cell() -> None:
    layout = Layout((4, 4))
    step = Step(6, layout, 3)
    said = {peer: Seat(layout, cell, 6) for cell, peer in enumerate(names(15))}
    said["peer 000"] = Seat(layout, Step(6, layout, 0).own_cell(7), 7)
    new = next_step("peer 999", NO_SEAT, said, MAX_GROUP_SIZE, 7, random.Random(1))
    assert (new.first_round, new.layout, new.cell) == (6, layout, 15)
    done = next_step("peer 003", after(step, step.end), said, MAX_GROUP_SIZE, 8, random.Random(1))
    assert done.first_round == 8, "who has made the step begins the next one"


@pytest.mark.parametrize("seed", few_of(range(8), 2))
def test_a_newcomer_never_takes_the_cell_of_one_that_has_one(seed: int) -> None:
    """Nor if its id is the lower one: the other could not know in time that it has to move."""
    layout, rng = Layout((4, 4)), random.Random(seed)
    free = rng.randrange(16)
    said = {peer: Seat(layout, cell, 6) for cell, peer in enumerate(names(16)) if cell != free}
    for newcomer in ("a newcomer", "the newcomer"):
        assert next_step(newcomer, NO_SEAT, said, MAX_GROUP_SIZE, 6, rng).cell == free


def test_of_two_peers_in_one_cell_the_higher_id_moves() -> None:
    layout = Layout((3, 2))
    said = {peer: Seat(layout, cell, 4) for peer, cell in zip(names(5), [0, 1, 2, 2, 4], strict=True)}
    steps = steps_of(said, 4)
    assert [steps[peer].cell for peer in names(5)][:3] == [0, 1, 2]
    assert steps["peer 003"].cell in (3, 5)
    assert steps["peer 004"].cell == 4


def test_a_peer_that_was_away_for_long_takes_a_new_cell() -> None:
    layout = Layout((3, 2))
    others = {peer: Seat(layout, cell, 2 * MAX_ROUNDS_AGO) for cell, peer in enumerate(names(5))}
    step = next_step("late", Seat(layout, 0), others, MAX_GROUP_SIZE, 2 * MAX_ROUNDS_AGO, random.Random(1))
    assert step.cell == 5
    assert not step.is_mate("silent", Seat(layout, 0), step.first_round)


def test_a_swarm_that_shrinks_becomes_one_group_again() -> None:
    layout = Layout((3, 2))
    said = {peer: Seat(layout, cell, 4) for cell, peer in enumerate(names(3))}
    assert {step.layout.sides for step in steps_of(said, 4).values()} == {()}


def test_one_peer_that_names_another_grid_does_not_change_the_layout() -> None:
    layout = Layout((4, 4))
    said = {peer: Seat(layout, cell, 4) for cell, peer in enumerate(names(15))}
    said["liar"] = Seat(Layout((4096, 256)), 77, 4)
    for peer, step in steps_of(said, 4).items():
        assert step.layout == layout, peer


@given(st.integers(5, 24), st.integers(0, 9), st.data())
def test_views_that_differ_never_put_more_into_one_group_than_the_grid_has_room_for(
    num_peers: int, num_unknown: int, data: st.DataObject
) -> None:
    """Nor does anybody stand outside: at the next step all go by one layout again."""
    peers = names(num_peers)
    rng, steps = random.Random(data.draw(st.integers(0, 99))), {}
    for peer in peers:
        known = [other for other in peers if other != peer]
        for _ in range(min(num_unknown, num_peers - 2)):
            known.remove(rng.choice(known))
        steps[peer] = next_step(peer, NO_SEAT, dict.fromkeys(known, NO_SEAT), MAX_GROUP_SIZE, 0, rng)
    said = {peer: after(step, step.end) for peer, step in steps.items()}
    again = steps_of(said, max(its.round_number for its in said.values()))
    assert len({step.layout for step in again.values()}) == 1


@pytest.mark.parametrize("seat", [{"cell": 1}, {"layout": {"sides": [3, 2]}, "cell": 6}, {"cell": -1}])
def test_seats_outside_the_grid_are_not_decoded(seat: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(seat, Seat)


def test_the_key_of_a_group_is_its_layout_and_its_place() -> None:
    layout = Layout((3, 2))
    assert Step(0, layout, 5).key(0) == f"3x2 {group_of(layout, 5, 0)}"
