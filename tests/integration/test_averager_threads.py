"""``manyhands.Averager`` with real peers and threads: Ctrl-C, two threads at once, a peer that is closed."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.base.errors import ConfigError
from tests.phases import around_connects, on_phase
from tests.trainers import Trainer, in_threads, peers

CONFIG = AveragingConfig(matchmaking_time_s=5.0, averaging_timeout_s=20.0)


def test_two_threads_average_and_ctrl_c_ends_a_step() -> None:
    tensors = [torch.zeros(3), torch.ones(3)]
    with peers(2) as (first, second):
        averager = manyhands.Averager([tensors[0]], peer=first, run_id="ctrl-c", averaging=CONFIG)
        with averager, manyhands.Averager([tensors[1]], peer=second, run_id="ctrl-c", averaging=CONFIG) as other:
            began = time.monotonic()
            interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
            interrupt.start()
            with pytest.raises(KeyboardInterrupt):
                averager.step(timeout_s=20.0)
            interrupt.join()
            assert time.monotonic() - began < 15.0
            assert torch.equal(tensors[0], torch.zeros(3))

            results: list[manyhands.RoundResult] = []
            for _ in range(2):  # the call of the step that was ended may be in the way of the next one, once
                results.clear()
                in_threads([lambda: results.append(averager.step()), lambda: results.append(other.step())])
                if any(result.committed for result in results):
                    break
            assert all(result.committed for result in results), results
    assert torch.equal(tensors[0], torch.full((3,), 0.5))
    assert torch.equal(tensors[1], tensors[0])


def test_one_step_at_a_time_and_closing_the_peer_ends_it() -> None:
    with peers(2) as (first, second):
        averager = manyhands.Averager([torch.zeros(3)], peer=first, run_id="closing", averaging=CONFIG)
        other = manyhands.Averager([torch.zeros(3)], peer=second, run_id="closing", averaging=CONFIG)
        results: list[manyhands.RoundResult] = []
        stepping = threading.Thread(target=lambda: results.append(averager.step(timeout_s=20.0)))
        has_begun = threading.Event()
        on_phase(first.peer_id, lambda phase: has_begun.set())
        stepping.start()
        assert has_begun.wait(120)
        with pytest.raises(manyhands.ManyhandsError, match="step\\(\\) is running in another thread"):
            averager.step()
        time.sleep(0.2)  # it is somewhere in matchmaking
        first.close()
        stepping.join(15.0)
        assert not stepping.is_alive()
        assert [result.reason for result in results] == ["this averager is closed"]
        averager.close()
        with pytest.raises(manyhands.ManyhandsError, match="this averager is closed"):
            averager.step()
        other.close()


def test_closing_the_peer_in_an_exchange_ends_the_step_as_closing_the_averager_does() -> None:
    """The step need not have ended when the network thread does."""
    with peers(2) as (first, second):
        averager = manyhands.Averager([torch.zeros(3)], peer=first, run_id="closing", averaging=CONFIG)
        other = manyhands.Averager([torch.zeros(3)], peer=second, run_id="closing", averaging=CONFIG)
        in_exchange = threading.Event()

        async def connect_slowly(*_: Any) -> Any:
            in_exchange.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.Event().wait()  # what it does takes longer than the peer's close()

        around_connects(first.peer_id, connect_slowly)
        results: list[manyhands.RoundResult] = []

        def close() -> None:
            assert in_exchange.wait(120)
            first.close()

        in_threads(
            [
                lambda: results.append(averager.step(timeout_s=20.0)),
                close,
                lambda: results.append(other.step(timeout_s=20.0)),
            ]
        )
        assert {result.committed for result in results} == {False}
        assert "this averager is closed" in [result.reason for result in results]
        assert not averager.wait_for_others()
        for call in (averager.step, averager.load_state_from_peers):
            with pytest.raises(ConfigError, match="this averager is closed; make another one"):
                call()
        averager.close()
        other.close()


def test_a_garbage_collected_averager_leaves_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "manyhands.averaging")
    with peers(1) as (peer,):
        for _ in range(3):
            averager = manyhands.Averager([torch.zeros(3)], peer=peer, run_id="lost", averaging=CONFIG)
            del averager
            gc.collect()
        manyhands.Averager([torch.zeros(3)], peer=peer, run_id="lost", averaging=CONFIG).close()
    assert caplog.text.count("The Averager of run 'lost' is gone without close(): this peer leaves the run") == 3


def test_an_averager_and_an_optimizer_work_on_one_peer_and_two_optimizers_are_refused() -> None:
    """Each makes its rounds; a second optimizer on one peer is one error in words."""
    with peers(2) as both:
        trainers = [Trainer(peer, "training", 64, seed=number) for number, peer in enumerate(both)]
        tensors = [torch.zeros(3), torch.ones(3)]
        averagers = [
            manyhands.Averager([tensor], peer=peer, run_id="beside", averaging=CONFIG)
            for tensor, peer in zip(tensors, both, strict=True)
        ]
        results: list[manyhands.RoundResult] = []
        in_threads(
            [
                *(lambda trainer=trainer: trainer.train_until(2) for trainer in trainers),  # type: ignore[misc]
                *(lambda each=each: results.append(each.step()) for each in averagers),  # type: ignore[misc]
            ]
        )
        assert [len(result.group) for result in results] == [2, 2], results
        assert torch.equal(tensors[0], torch.full((3,), 0.5))
        with pytest.raises(ConfigError, match="this peer has an Optimizer already; close"):
            Trainer(both[0], "another", 64)
