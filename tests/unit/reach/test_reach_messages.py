"""What the calls about reachability carry, and what is not even decoded."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.reach.messages import MAX_DIALLED, DialBackRequest, DialBackResponse, DialOutcome, ExamineResponse

TEXTS = st.text(max_size=60)
MESSAGES = st.one_of(
    st.builds(ExamineResponse, st.floats(0, 1e10), TEXTS, st.integers(0, 2**40), TEXTS),
    st.builds(DialBackRequest, st.lists(TEXTS, min_size=1, max_size=MAX_DIALLED)),
    st.builds(DialBackResponse, st.lists(st.builds(DialOutcome, TEXTS, TEXTS, TEXTS), max_size=MAX_DIALLED)),
)


@given(MESSAGES)
def test_messages_survive_the_wire(message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        ExamineResponse(-1.0),
        ExamineResponse(1e12),
        ExamineResponse(math.inf),
        ExamineResponse(math.nan),
        ExamineResponse(0.0, "x" * 65),
        ExamineResponse(0.0, "", -1),
        ExamineResponse(0.0, "", 0, "x" * 501),
        DialBackRequest([]),
        DialBackRequest(["x"] * (MAX_DIALLED + 1)),
        DialBackRequest(["x" * 401]),
        DialBackResponse([DialOutcome("x")] * (MAX_DIALLED + 1)),
        DialBackResponse([DialOutcome("x", "c" * 65)]),
        DialBackResponse([DialOutcome("x", "c", "d" * 501)]),
    ],
)
def test_answers_out_of_bounds_are_not_even_decoded(message: msgspec.Struct) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
