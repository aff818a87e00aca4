"""Who gets a place in a group, and what the others are told."""

from __future__ import annotations

import pytest

from manyhands.averaging.matchmaking.admission import check_ahead
from manyhands.averaging.messages import Position
from manyhands.base.errors import Refused
from tests.unit.averaging.groups import peer


@pytest.mark.parametrize(
    ("here", "asking", "says"),
    [
        (Position(7, b""), Position(6, b""), "the run is at step 7, not 6"),
        (Position(81, b"", "5x5 0"), Position(40, b""), "the run is at round 81 of the grid, not at step 40"),
        (Position(81, b"", "5x5 0"), Position(80, b"", "5x5 4"), "81 of the grid, not at round 80 of the grid"),
    ],
)
def test_a_peer_that_is_behind_is_told_so_in_steps_or_in_rounds_of_the_grid(
    here: Position, asking: Position, says: str
) -> None:
    with pytest.raises(Refused, match=says):
        check_ahead(peer(0), here, asking)
    check_ahead(peer(0), asking, here)
