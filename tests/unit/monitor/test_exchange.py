"""What a monitor believes of what other coordinators tell."""

from __future__ import annotations

import random

import msgspec
import pytest

from manyhands.base.identity import PeerId
from manyhands.monitor.credit import CreditedStep
from manyhands.monitor.exchange import MAX_ASKED, CoordinatorRecord, HistoryResponse, Told, chosen, merged
from manyhands.monitor.picture import Point
from manyhands.optim.metrics import packed


def step(number: int, samples: int, origin: str) -> CreditedStep:
    return CreditedStep(number, b"lineage!", 0, packed({b"a" * 8: samples}), origin)


def told(origin: str, *samples: int) -> Told:
    points = [Point(time=1.0, step=number) for number in range(len(samples))]
    return Told(points, [step(number, n, origin) for number, n in enumerate(samples)], origin=origin)


def test_one_coordinator_is_believed_and_named() -> None:
    found = merged([told("one", 5, 6)])
    assert found is not None
    assert [(entry.step, entry.origin) for entry in found.steps] == [(0, "one"), (1, "one")]
    assert found.origin == "one"
    assert merged([]) is None


def test_of_several_a_majority_must_tell_the_same() -> None:
    found = merged([told("one", 5, 6, 7), told("two", 5, 6), told("liar", 5, 999, 999, 999)])
    assert found is not None
    assert sorted(found.steps, key=lambda entry: entry.step)[:2] == [step(0, 5, "one"), step(1, 6, "one")]
    assert len(found.steps) == 2
    assert merged([told("one", 5), told("two", 6)]).steps == []  # type: ignore[union-attr]


def test_a_monitor_that_came_later_has_no_say_in_what_was_before() -> None:
    whole = told("one", 5, 6, 7)
    later = Told(steps=[step(2, 7, "two")], origin="two")
    found = merged([whole, later, Told(origin="three")])
    assert found is not None
    assert [(entry.step, entry.origin) for entry in found.steps] == [(0, "one"), (1, "one"), (2, "one")]


def test_those_that_claim_to_be_oldest_do_not_take_all_seats() -> None:
    def coordinators(name: str, network: str, number: int, since: float) -> dict[PeerId, CoordinatorRecord]:
        return {
            PeerId(f"{name} {place}"): CoordinatorRecord([f"/ip4/{network.format(place)}/tcp/1"], since)
            for place in range(number)
        }

    honest = coordinators("honest", "45.{}.1.1", 5, 1000.0)
    in_one_place = coordinators("liar", "46.1.1.{}", 50, 0.0)
    asked = chosen(honest | in_one_place, random.Random(1))
    assert len(asked) == MAX_ASKED
    assert sum(peer_id in honest for peer_id in asked) == MAX_ASKED - 1
    everywhere = coordinators("liar", "46.{}.1.1", 5, 0.0)
    counts = [
        sum(peer_id in honest for peer_id in chosen(honest | everywhere, random.Random(seed))) for seed in range(100)
    ]
    assert sum(count >= 2 for count in counts) > 70
    assert chosen(honest, random.Random(1))[0] == "honest 0"
    assert chosen({}, random.Random(1)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"points": [[1.0, 1, float("nan"), None, 1, 1.0, 1, None, None]]},
        {"points": [[1.0, -1, None, None, 1, 1.0, 1, None, None]]},
        {"steps": [[1, b"x" * 9, b""]]},
        {"events": [[1.0, "no such kind", "text", 1, "", ""]]},
        {"events": [[1.0, "joined", "x" * 1001, 1, "", ""]]},
        {"peers": [["id", "a\x1b[2Jb"]]},
        {"points": [[1.0, 1, None, None, 1, 1.0, 1, None, None]] * 2001},
    ],
)
def test_a_hostile_answer_does_not_decode(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=HistoryResponse)
