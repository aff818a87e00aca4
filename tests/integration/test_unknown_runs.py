"""A run id that nobody knows is told before anything is begun."""

from __future__ import annotations

import logging

import pytest
import torch

from manyhands import Optimizer, Peer
from manyhands.base.errors import RunNotFound
from manyhands.optim.run.run_records import MAX_RUNS, Run, declare_run, find_runs, look_up_run

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def optimizer(peer: Peer, run_id: str, *, start_new: bool | None = None) -> Optimizer:
    model = torch.nn.Linear(3, 1)
    return Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), peer=peer, run_id=run_id, target_batch_size=8, start_new=start_new
    )


def runs_of(peer: Peer) -> list[Run]:
    return peer.run(find_runs(peer.dht), 5.0, "finding runs")


def test_an_unknown_run_is_refused_with_start_new_false_and_warned_of_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Peer(listen=LOOPBACK) as first, Peer(first.addresses, listen=LOOPBACK) as second:
        begun = optimizer(first, "runA", start_new=True)
        assert "none of them" not in caplog.text

        told = "joined 1 peer; none of them is in run 'runB'; runs here: 'runA' (1 peer)"
        with pytest.raises(RunNotFound, match="Check the run id; start_new=True begins a run") as error:
            optimizer(second, "runB", start_new=False)
        assert told in str(error.value)
        assert second.run(look_up_run(second.dht, "runB"), 5.0, "looking").manifest is None, "it left no trace"

        with caplog.at_level(logging.WARNING, "manyhands"):
            optimizer(second, "runB")
        assert told in caplog.text
        begun.close()


def test_a_run_that_is_there_is_joined_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with Peer(listen=LOOPBACK) as first, Peer(first.addresses, listen=LOOPBACK) as second:
        begun = optimizer(first, "runA", start_new=True)
        optimizer(second, "runA", start_new=False)
        assert "none of them" not in caplog.text
        begun.close()


def test_a_run_whose_monitor_is_there_may_be_begun(caplog: pytest.LogCaptureFixture) -> None:
    with Peer(listen=LOOPBACK) as monitor, Peer(monitor.addresses, listen=LOOPBACK) as trainer:

        async def declare() -> None:
            declare_run(monitor.dht, "runA")

        monitor.run(declare(), 5.0, "declaring")
        assert [(run.run_id, run.manifest, len(run.peers)) for run in runs_of(trainer)] == [("runA", None, 0)]
        optimizer(trainer, "runA", start_new=False)
        assert "none of them" not in caplog.text


def test_runs_and_their_peers_are_found_through_a_coordinator() -> None:
    with (
        Peer(listen=LOOPBACK) as coordinator,
        Peer(coordinator.addresses, listen=LOOPBACK) as first,
        Peer(coordinator.addresses, listen=LOOPBACK) as second,
        Peer(coordinator.addresses, client_mode=True) as scout,
    ):
        optimizer(second, "runB", start_new=True).close()
        trained = [optimizer(first, "runA", start_new=True), optimizer(second, "runA")]
        (run,) = [run for run in runs_of(scout) if run.manifest is not None]
        assert run.run_id == "runA"
        assert run.peers.keys() == set(run.signers) == {each.peer.peer_id for each in trained}


def test_a_run_is_found_by_its_name_among_many() -> None:
    with Peer(listen=LOOPBACK) as crowded, Peer(crowded.addresses, listen=LOOPBACK) as trainer:

        async def declare() -> None:
            for number in range(MAX_RUNS):
                declare_run(crowded.dht, f"a{number:03}")

        crowded.run(declare(), 5.0, "declaring")
        begun = optimizer(trainer, "zzz", start_new=True)
        with Peer(crowded.addresses, client_mode=True) as scout:
            runs = scout.run(find_runs(scout.dht, "zzz"), 20.0, "finding runs")
        assert runs[0].run_id == "zzz"
        assert runs[0].is_trained
        assert not any(run.is_trained for run in runs[1:])
        begun.close()
