"""The commands that machines of AWS run, on this machine."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.clouds import scripts_of, words_of
from tests.process.commands import Command, running

pytestmark = pytest.mark.process


def address_in(line: str) -> str:
    return line.split()[-1]


@pytest.mark.long
def test_an_auxiliary_machine_keeps_the_state_when_all_workers_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    options = ("--target-batch-size", "32", "--threads", "1", "--linger-s", "0")
    scripts = scripts_of("--auxiliary", "1", "--", *options)
    words = {role: words_of(script, tmp_path / role) for role, script in scripts.items()}
    with ExitStack() as machines:

        def start(role: str, coordinator: str = "") -> Command:
            """Run what a machine of this role runs, on a free port of this machine alone."""
            arguments = words[role][: words[role].index("--announce")]
            arguments[arguments.index("--listen") + 1] = "/ip4/127.0.0.1/tcp/0"
            arguments = [coordinator if word == "coordinator:31337" else word for word in arguments]
            return machines.enter_context(running(*arguments))

        coordinator = address_in(start("coordinator").wait_for("--initial-peers"))
        auxiliary = start("auxiliary", coordinator)
        auxiliary.wait_for("Others can join through this peer")
        lost = start("worker", coordinator)
        auxiliary.wait_for("Optimizer step: done! Step")
        lost.kill()
        line = start("worker", coordinator).wait_for("Received the state of step")
        assert int(line.split("of step ")[1].split()[0]) > 0
