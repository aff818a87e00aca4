"""Tells a test when a member enters a phase of its round."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from manyhands.averaging.messages import Group, Verdict, Vote
from manyhands.averaging.rounds import RoundRunner


class Phase(enum.Enum):
    """Of a member's round."""

    JOINING = "joining"
    FORMED = "formed"
    VOTING = "before commit"
    CONCLUDED = "after commit"


def on_phase(runner: RoundRunner, notify: Callable[[Phase], None]) -> None:
    """Call ``notify`` whenever a peer enters a phase of its round."""
    find_group, conclude = runner._find_group, runner._agreement.conclude
    candidates = runner.matchmaker.candidates
    note_round = candidates.note_round

    async def find(weight: float, gather_s: float | None) -> Group:
        notify(Phase.JOINING)
        group = await find_group(weight, gather_s)
        notify(Phase.FORMED)
        return group

    async def vote(group: Group, vote: Vote, voting_s: float) -> Verdict:
        notify(Phase.VOTING)
        return await conclude(group, vote, voting_s)

    def note(*arguments: Any, **options: Any) -> None:
        notify(Phase.CONCLUDED)
        note_round(*arguments, **options)

    runner._find_group = find  # type: ignore[method-assign]
    runner._agreement.conclude = vote  # type: ignore[method-assign]
    candidates.note_round = note  # type: ignore[method-assign]
