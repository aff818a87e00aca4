"""An evaluator waits for its run, but not for a name that was mistyped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import manyhands
from manyhands.base.errors import RunNotFound
from manyhands.cli import run_to_follow
from manyhands.cli.run_to_follow import wait_for_run, wait_for_trainers
from manyhands.optim.run.run_records import declare_run

LISTEN = ["/ip4/127.0.0.1/tcp/0"]


class Waits(Exception):
    pass


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch) -> Iterator[manyhands.Peer]:
    """A peer beside one that knows the run ``albert``; it has no patience, and says when it would wait."""
    monkeypatch.setattr(run_to_follow, "PATIENCE_S", 0.0)
    with manyhands.Peer(listen=LISTEN) as other, manyhands.Peer(other.addresses, client_mode=True) as peer:

        async def declare() -> None:
            declare_run(other.dht, "albert")

        def wait(seconds: float) -> None:
            raise Waits

        other.run(declare(), 5.0, "declaring")
        monkeypatch.setattr(peer, "sleep", wait)
        yield peer


def test_a_run_that_nobody_knows_beside_others_is_a_mistake(evaluator: manyhands.Peer) -> None:
    with pytest.raises(RunNotFound, match=r"in run 'albrt'; runs here: 'albert'.*\. Check --run-id"):
        wait_for_run(evaluator, "albrt", {}, may_be_mistyped=True)


@pytest.mark.parametrize("run_id", ["albert", None])
def test_a_run_that_is_known_is_waited_for(evaluator: manyhands.Peer, run_id: str | None) -> None:
    with pytest.raises(Waits):
        wait_for_run(evaluator, run_id, {}, may_be_mistyped=True)


def test_a_monitor_may_be_the_first_of_its_run(evaluator: manyhands.Peer) -> None:
    with pytest.raises(Waits):
        wait_for_trainers(evaluator, "new")
