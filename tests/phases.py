"""Tells a test when a member enters a phase of its round."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from manyhands.averaging.messages import Group
from manyhands.averaging.round.driver import RoundDriver
from manyhands.averaging.round.machine import Action
from manyhands.averaging.rounds import RoundRunner


class Phase(enum.Enum):
    """Of a member's round."""

    JOINING = "joining"
    FORMED = "formed"
    VOTING = "before commit"
    CONCLUDED = "after commit"


def on_driver(runner: RoundRunner, change: Callable[[RoundDriver], None]) -> None:
    """Call ``change`` with the driver of each round before it begins."""
    begin = runner._answers.begin

    def begin_changed(driver: RoundDriver) -> None:
        change(driver)
        begin(driver)

    runner._answers.begin = begin_changed  # type: ignore[method-assign]


def on_phase(runner: RoundRunner, notify: Callable[[Phase], None]) -> None:
    """Call ``notify`` whenever a peer enters a phase of its round."""
    find_group = runner._find_group
    candidates = runner.matchmaker.candidates
    note_round = candidates.note_round

    async def find(weight: float, gather_s: float | None) -> Group:
        notify(Phase.JOINING)
        group = await find_group(weight, gather_s)
        notify(Phase.FORMED)
        return group

    def watch(driver: RoundDriver) -> None:
        exchanged = driver.machine._exchanged

        def tell(*arguments: Any) -> list[Action]:
            notify(Phase.VOTING)
            return exchanged(*arguments)

        driver.machine._exchanged = tell  # type: ignore[method-assign]

    def note(*arguments: Any, **options: Any) -> None:
        notify(Phase.CONCLUDED)
        note_round(*arguments, **options)

    runner._find_group = find  # type: ignore[method-assign]
    on_driver(runner, watch)
    candidates.note_round = note  # type: ignore[method-assign]
