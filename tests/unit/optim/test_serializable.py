from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.optim.serializable import is_serializable, merged, serializable_part

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_values_travel_unchanged(value: Any) -> None:
    assert is_serializable(value)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(serializable_part(value))) == value


@given(PLAIN)
def test_merging_the_serializable_part_of_plain_values_restores_them(value: Any) -> None:
    assert merged(value, serializable_part(value)) == value


@given(PLAIN, PLAIN)
def test_nothing_that_is_sent_changes_the_structure(own: Any, sent: Any) -> None:
    result = merged(own, sent)
    assert type(result) is type(own) or {type(result), type(own)} == {int, float}
    if isinstance(own, dict):
        assert result.keys() == own.keys()
    if isinstance(own, list):
        assert len(result) == len(own)


@pytest.mark.parametrize(
    ("own", "sent", "expected"),
    [
        (1, 2, 2),
        (1.0, 2, 2),
        (True, 2, True),
        (1, True, 1),
        (False, True, True),
        ("a", "b", "b"),
        (1, "b", 1),
        (1, None, 1),
        (None, 1, None),
        ((0.9, 0.999), [0.8, 0.99], (0.8, 0.99)),
        ([1, 2], [3], [1, 2]),
        ({"last_epoch": 0, "step": 1}, {"last_epoch": 5, "optimizer": 3}, {"last_epoch": 5, "step": 1}),
        ([{"a": 1}, {"a": 2}], [{"a": 3}, 7], [{"a": 3}, {"a": 2}]),
    ],
)
def test_merging_takes_sent_values_of_the_same_kind_only(own: Any, sent: Any, expected: Any) -> None:
    result = merged(own, sent)
    assert result == expected
    assert type(result) is type(expected)


def test_parts_that_are_not_serializable_keep_their_own_values() -> None:
    function, tensor, counter = test_merging_takes_sent_values_of_the_same_kind_only, torch.ones(2), Counter([3])
    own = {"functions": [function], "tensor": tensor, "milestones": counter, "last_epoch": 1, 7: "not a name"}
    sent = serializable_part(own)
    assert sent == {"functions": [None], "tensor": None, "milestones": None, "last_epoch": 1}
    assert not is_serializable(own)
    result = merged(own, sent | {"last_epoch": 4})
    assert result["functions"] == [function]
    assert result["tensor"] is tensor
    assert result["milestones"] is counter
    assert result["last_epoch"] == 4
