"""What a leader may say of a round, and what is believed of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.commit.votes import checked
from manyhands.averaging.messages import Group, JoinResponse, Order, SpanResult, Verdict, Vote
from manyhands.base.errors import ProtocolViolation
from manyhands.base.identity import PeerId
from tests.unit.averaging.groups import group_of, peer

GROUP = group_of(3, weights=[1.0, 0.0, 2.5])
OTHERS = [
    group_of(2),
    group_of(3),
    msgspec.structs.replace(GROUP, group_id=b"another"),
    msgspec.structs.replace(GROUP, members=GROUP.members[::-1]),
]


def test_a_verdict_about_the_group_is_believed() -> None:
    assert checked(GROUP, Verdict(True, GROUP.manifest(b"digest"))).manifest == GROUP.manifest(b"digest")
    assert checked(GROUP, Verdict(True, None, "lost", [peer(1)])) == Verdict(True, None, "lost", [peer(1)])


@pytest.mark.parametrize("other", OTHERS)
def test_what_another_group_committed_is_not_believed(other: Group) -> None:
    with pytest.raises(ProtocolViolation, match="not about the group"):
        checked(GROUP, Verdict(True, other.manifest(b"digest")))


def test_nothing_is_committed_in_doubt() -> None:
    with pytest.raises(ProtocolViolation):
        checked(GROUP, Verdict(False, GROUP.manifest(b"digest")))


@pytest.mark.parametrize(
    "parts",
    [
        [SpanResult(5, 10, 0, [])],
        [SpanResult(0, 5, 0, [1]), SpanResult(6, 10, 0, [])],
        [SpanResult(0, 5, 3, [])],
        [SpanResult(0, 5, 0, [3])],
        [SpanResult(0, 5, 0, [1, 1])],
        [SpanResult(0, 0, 0, [1])],
    ],
)
def test_parts_that_cannot_be_are_not_believed(parts: list[SpanResult]) -> None:
    with pytest.raises(ProtocolViolation, match="not about the group"):
        checked(GROUP, Verdict(True, GROUP.manifest(b"digest", parts)))


@pytest.mark.parametrize(
    "order",
    [
        Order(1, [], 0, 10),
        Order(1, [0, 3], 0, 10),
        Order(1, [2, 0], 0, 10),
        Order(1, [0, 2], 10, 10),
        Order(1, [1], 0, 10),
        Order(1, [2], 0, 10),
        Order(0, [0, 2], 0, 10),
        Order(1, [0, 2], 0, 11),
        Order(1, [0], adopted=GROUP.manifest(b"digest")),
    ],
)
def test_orders_that_a_member_cannot_follow_are_refused(order: Order) -> None:
    with pytest.raises(ProtocolViolation):
        checked(GROUP, Verdict(False, order=order), Vote(b"group", b"", numel=10), 0)


def test_an_order_is_believed_in_answer_to_a_vote_only() -> None:
    order = Order(1, [0, 2], 0, 10)
    assert checked(GROUP, Verdict(False, order=order), Vote(b"group", b"", numel=10), 2).order == order
    with pytest.raises(ProtocolViolation):
        checked(GROUP, Verdict(False, order=order))


def test_only_members_are_blamed() -> None:
    assert checked(GROUP, Verdict(True, None, "", [PeerId("x"), peer(2)])).blamed == [peer(2)]


@given(st.text(max_size=600))
def test_the_reason_is_fit_for_a_log_line(reason: str) -> None:
    shown = checked(GROUP, Verdict(True, None, reason)).reason
    assert shown.isprintable()
    assert len(shown) <= 500


MESSAGES = st.one_of(
    st.builds(Vote, st.binary(max_size=64), st.binary(max_size=64), st.text(max_size=500)),
    st.builds(
        Verdict,
        st.booleans(),
        st.none() | st.builds(GROUP.manifest, st.binary(max_size=64)),
        st.text(max_size=50),
        st.lists(st.text(max_size=64).map(PeerId), max_size=3),
    ),
    st.builds(JoinResponse, st.none() | st.sampled_from(OTHERS), st.text(max_size=64).map(PeerId)),
)


@given(MESSAGES)
def test_messages_survive_the_wire(message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
