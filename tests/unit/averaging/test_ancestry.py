"""Branches of a run are told apart by the steps behind a state."""

from __future__ import annotations

import hashlib

from manyhands.averaging.state.ancestry import MAX_ANCESTRY_BYTES, MAX_STEPS, descends_from, extended, root_of


def lineage(step: int, branch: str = "") -> bytes:
    return hashlib.sha256(f"{branch}{step}".encode()).digest()


def ancestry_of(num_steps: int, branch: str = "", parted_at: int = 0) -> bytes:
    ancestry = b""
    for step in range(1, num_steps + 1):
        ancestry = extended(ancestry, lineage(step, branch if step > parted_at else ""))
    return ancestry


def test_a_state_goes_on_from_each_step_before_it() -> None:
    ancestry = ancestry_of(9)
    assert all(descends_from(ancestry, 9, step, root_of(ancestry), lineage(step)) for step in range(1, 10))


def test_a_state_goes_on_from_no_step_of_another_branch() -> None:
    ancestry = ancestry_of(9, "other", parted_at=4)
    root = root_of(ancestry_of(9))
    assert [descends_from(ancestry, 9, step, root, lineage(step)) for step in range(1, 10)] == [True] * 4 + [False] * 5


def test_another_beginning_is_another_branch_also_where_the_step_is_not_known() -> None:
    assert not descends_from(ancestry_of(3, "anew"), 3, 9, root_of(ancestry_of(9)), lineage(9))
    assert not descends_from(ancestry_of(3), 3, 0, b"", b""), "the checkpoint of a run that no step is known of"


def test_an_ancestry_keeps_the_first_step_and_the_last_ones() -> None:
    num_steps = MAX_STEPS + 10
    ancestry = ancestry_of(num_steps)
    assert len(ancestry) == MAX_ANCESTRY_BYTES
    root = root_of(ancestry)
    assert root == root_of(ancestry_of(1))
    oldest = num_steps - MAX_STEPS + 2
    assert not descends_from(ancestry, num_steps, oldest, root, lineage(oldest, "other"))
    assert descends_from(ancestry, num_steps, oldest, root, lineage(oldest))
    assert descends_from(ancestry, num_steps, oldest - 1, root, lineage(oldest - 1, "other")), "too long ago"
