"""Which samples may count in the step after the one that was made without them."""

from __future__ import annotations

import pytest

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.state.state import Origin
from manyhands.optim.step.staleness import reason_to_drop

ME, OTHER = PeerId("me"), PeerId("other")
BEFORE, AFTER = Position(5, b"before"), Position(6, b"after")
IN_DOUBT, TOO_LATE, ELSEWHERE = "may have made the step with them", "2 steps late", "other parameters"


@pytest.mark.parametrize(
    ("since_step", "was_in_group", "origin", "reason"),
    [
        (5, False, Origin(BEFORE), ""),
        (5, False, Origin(BEFORE, [ME]), ""),  # it has brought nothing from there: these are others of its samples
        (5, True, Origin(BEFORE, [OTHER]), ""),
        (5, True, Origin(BEFORE, [OTHER, ME]), IN_DOUBT),
        (5, True, Origin(BEFORE, None), IN_DOUBT),
        (4, False, Origin(BEFORE, [OTHER]), TOO_LATE),
        (5, False, None, ELSEWHERE),
        (5, False, Origin(Position(5, b"another branch"), [OTHER]), ELSEWHERE),
        (5, False, Origin(AFTER, [OTHER]), ELSEWHERE),
    ],
)
def test_what_is_dropped_and_why(since_step: int, was_in_group: bool, origin: Origin | None, reason: str) -> None:
    said = reason_to_drop(ME, since_step, was_in_group=was_in_group, before=BEFORE, after=AFTER, origin=origin)
    assert reason in said
    assert bool(said) == bool(reason)
