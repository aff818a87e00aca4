"""The commands that machines of AWS run, on this machine."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from manyhands.cloud import Experiment, MachineGroup, groups_of
from tests.process.commands import Command, running

pytestmark = pytest.mark.process


def words_of(group: MachineGroup, first_peers: list[str]) -> list[str]:
    """The arguments of a machine's command, with a free port of this machine alone."""
    words = group.program.command(first_peers).removesuffix(" --announce $ANNOUNCE").split()[1:]
    words[words.index("--listen") + 1] = "/ip4/127.0.0.1/tcp/0"
    return words


def address_in(line: str) -> str:
    return line.split()[-1]


@pytest.mark.long
def test_an_auxiliary_machine_keeps_the_state_when_all_workers_are_lost() -> None:
    options = ("--target-batch-size", "32", "--threads", "1", "--linger-s", "0")
    experiment = Experiment(name="x", auxiliary=1, train_options=options)
    coordinator, auxiliary, worker = groups_of(experiment)
    with ExitStack() as machines:

        def start(group: MachineGroup, *first_peers: str) -> Command:
            return machines.enter_context(running(*words_of(group, list(first_peers))))

        first = address_in(start(coordinator).wait_for("--initial-peers"))
        helper = start(auxiliary, first)
        second = address_in(helper.wait_for("Others can join through this peer"))
        lost = start(worker, first, second)
        helper.wait_for("Optimizer step: done! Step")
        lost.kill()
        line = start(worker, first, second).wait_for("Received the state of step")
        assert int(line.split("of step ")[1].split()[0]) > 0
