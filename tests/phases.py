"""Tells a test when a member enters a phase of its round."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from typing import Any

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.messages import Group, Vote
from manyhands.averaging.round.driver import RoundDriver
from manyhands.averaging.round.exchange import Contribution, Exchange
from manyhands.averaging.round.round_machine import Action, Event, Exchanged
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


def before_voting(runner: RoundRunner, wait: Callable[[], Awaitable[object]]) -> None:
    """Await ``wait`` after each exchange of a peer, before it votes."""

    def change(driver: RoundDriver) -> None:
        take_part = driver._exchange

        async def take_part_and_wait(exchange: Exchange) -> None:
            run = exchange.run

            async def run_and_wait() -> Vote:
                vote = await run()
                await wait()
                return vote

            exchange.run = run_and_wait  # type: ignore[method-assign]
            await take_part(exchange)

        driver._exchange = take_part_and_wait  # type: ignore[method-assign]

    on_driver(runner, change)


def change_butterflies(runner: RoundRunner, change: Callable[[Butterfly], None]) -> None:
    """Do something to each all-reduce of a peer before it begins."""

    def change_driver(driver: RoundDriver) -> None:
        butterfly_of = driver._contribution.butterfly

        async def changed(*arguments: Any, **options: Any) -> Butterfly:
            butterfly = await butterfly_of(*arguments, **options)
            change(butterfly)
            return butterfly

        driver._contribution.butterfly = changed  # type: ignore[method-assign]

    on_driver(runner, change_driver)


def change_first_vote(runner: RoundRunner, change: Callable[[Contribution, Vote], None]) -> None:
    """Do something to what a peer holds, and to its vote, after its first exchange."""

    def change_driver(driver: RoundDriver) -> None:
        contribution, vote_of = driver._contribution, driver._contribution.vote

        def changed(*arguments: Any) -> Vote:
            vote = vote_of(*arguments)
            if vote.exchange == 0:
                change(contribution, vote)
            return vote

        contribution.vote = changed  # type: ignore[method-assign,assignment]

    on_driver(runner, change_driver)


def on_phase(runner: RoundRunner, notify: Callable[[Phase], None]) -> None:
    """Call ``notify`` whenever a peer enters a phase of its round."""
    find_group = runner._find_group
    round_over = runner.matchmaker.round_over

    async def find(weight: float, gather_s: float | None) -> Group:
        notify(Phase.JOINING)
        group = await find_group(weight, gather_s)
        notify(Phase.FORMED)
        return group

    def watch(driver: RoundDriver) -> None:
        on = driver.machine.on

        def tell(event: Event, now: float) -> list[Action]:
            if isinstance(event, Exchanged):  # also if the others have committed without its vote
                notify(Phase.VOTING)
            return on(event, now)

        driver.machine.on = tell  # type: ignore[method-assign]

    def note(*arguments: Any, **options: Any) -> None:
        notify(Phase.CONCLUDED)
        round_over(*arguments, **options)

    runner._find_group = find  # type: ignore[method-assign]
    on_driver(runner, watch)
    runner.matchmaker.round_over = note  # type: ignore[method-assign]
