"""Which branch a peer believes in, by what the others say."""

from __future__ import annotations

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.run.branches import (
    OUTVOTED_S,
    Belief,
    BranchChoice,
    believed_by_a_newcomer,
    held_by_most,
    voter_of,
)
from manyhands.optim.run.progress import ProgressRecord

ANN, BOB, CAROL, DAVE, EVE = (PeerId(name) for name in ("ann", "bob", "carol", "dave", "eve"))


def at(step: int, lineage: bytes = b"run", host: str = "192.168.0.1") -> ProgressRecord:
    addresses = [f"/ip4/{host}/tcp/1"] if host else []
    position = Position(step, lineage + b" %d" % step if step else b"")
    return ProgressRecord(position, 0, 1.0, 8 * step, not host, addresses, 30.0)


def member_of(*met: PeerId, step: int = 10) -> Belief:
    belief = Belief()
    for number in range(max(step - 5, 0), step + 1):
        belief.been_at.append(at(number).position)
    belief.record_step(met)
    return belief


def test_one_that_is_ahead_alone_is_doubted() -> None:
    belief = member_of(ANN, BOB)
    for step in (11, 60):
        others = {ANN: at(10), BOB: at(10), EVE: at(step, b"eve")}
        assert belief.doubted(at(10), others) == {EVE}
    assert member_of(ANN, BOB, EVE).doubted(at(10), {ANN: at(10), BOB: at(10), EVE: at(11, b"eve")}) == {EVE}


def test_most_of_those_whom_it_has_met_are_followed() -> None:
    belief = member_of(ANN, BOB)
    assert belief.doubted(at(10), {ANN: at(11), BOB: at(11)}) == frozenset()
    assert belief.doubted(at(10), {ANN: at(11), BOB: at(11), EVE: at(60, b"eve")}) == {EVE}
    assert belief.doubted(at(10), {ANN: at(31), BOB: at(30), EVE: at(32, b"eve")}) == {ANN, EVE}, "the lowest at first"
    assert belief.doubted(at(10), {ANN: at(11), BOB: at(10)}) == {ANN}, "the other record is perhaps late"


def test_those_who_have_gone_do_not_vote() -> None:
    assert member_of(ANN, BOB).doubted(at(10), {ANN: at(12)}) == frozenset()


def test_a_newcomer_follows_most_of_those_who_have_learnt_something() -> None:
    records = {ANN: at(10), BOB: at(10), CAROL: at(11), DAVE: at(0), EVE: at(60, b"eve")}
    assert believed_by_a_newcomer(records).keys() == {ANN, BOB, DAVE}
    assert Belief().doubted(at(0), {ANN: at(3), DAVE: at(0)}) == frozenset(), (
        "one that has learnt nothing does not vote"
    )


def test_one_that_watches_believes_what_more_than_half_hold() -> None:
    liar, ten, eleven = at(10**6, b"eve"), at(10).position, at(11).position
    assert held_by_most({ANN: at(10), EVE: liar}) == ten
    assert held_by_most({ANN: at(10), BOB: at(10), CAROL: at(0), EVE: liar}) == ten
    assert held_by_most({ANN: at(10), BOB: at(11), CAROL: at(11), EVE: liar}) == eleven
    assert held_by_most({ANN: at(10), BOB: at(11)}) == ten, "the other record is perhaps late"
    assert held_by_most({ANN: at(3), BOB: at(11), CAROL: at(11)}) == eleven
    assert held_by_most({ANN: at(0), BOB: at(0)}) == at(0).position
    assert held_by_most({ANN: at(10, host=""), EVE: liar}) == liar.position, "of those that can be dialled"


def test_one_network_has_one_vote() -> None:
    sybils = {PeerId(f"eve {number}"): at(60, b"eve", f"45.1.1.{number}") for number in range(20)}
    honest = {ANN: at(10, host="45.2.1.1"), BOB: at(10, host="45.3.1.1")}
    assert Belief().doubted(at(0), honest | sybils) == sybils.keys()
    assert voter_of(EVE, at(1, host="45.1.1.7").addresses) == "45.1.1.0/24"
    assert voter_of(EVE, at(1).addresses) == EVE, "in a private network each is one"


def test_peers_without_an_address_vote_only_among_themselves() -> None:
    clients = {PeerId(f"eve {number}"): at(60, b"eve", "") for number in range(20)}
    assert Belief().doubted(at(0), {ANN: at(10), **clients}) == clients.keys()
    assert Belief().doubted(at(0), clients) == frozenset()


def test_parts_that_have_never_met_come_together_on_the_higher_branch() -> None:
    lower, higher = member_of(BOB), member_of(DAVE)
    assert lower.doubted(at(10), {BOB: at(10), CAROL: at(12, b"other"), DAVE: at(12, b"other")}) == frozenset()
    others = {ANN: at(10), BOB: at(10), DAVE: at(12, b"other")}
    assert higher.doubted(at(12, b"other"), others) == frozenset()
    assert higher.other_majority(at(12, b"other"), others, 1e9) is None, "half is not most"


def test_a_smaller_part_that_is_ahead_goes_back_after_a_while() -> None:
    belief = member_of(ANN, BOB, CAROL, DAVE)
    own = at(12, b"other")
    others = {ANN: at(11), BOB: at(11), CAROL: at(11), DAVE: at(12, b"other")}
    assert belief.other_majority(own, others, 100.0) is None
    assert belief.other_majority(own, others, 99.0 + OUTVOTED_S) is None
    assert belief.other_majority(own, others, 100.0 + OUTVOTED_S) == at(11).position
    assert belief.other_majority(own, others | {ANN: own}, 101.0 + OUTVOTED_S) is None
    assert belief.other_majority(own, others, 102.0 + OUTVOTED_S) is None, "it begins anew"


def test_those_who_lag_behind_are_not_elsewhere() -> None:
    belief = member_of(ANN, BOB)
    assert belief.other_majority(at(10), {ANN: at(8), BOB: at(9)}, 1e9) is None


def test_a_peer_does_not_go_back_to_where_it_has_been() -> None:
    """However long the others stay there: it may make steps without them, as with ``allow_solo``."""
    choice = BranchChoice(EVE, at(5), lambda _: True)
    choice.belief.record_step([ANN, BOB])
    for step in range(5, 20):
        others = at(min(step, 9))
        choice.look(at(step), {ANN: others, BOB: others}, now=OUTVOTED_S * step)
        assert choice.leading(()).position == at(step).position
