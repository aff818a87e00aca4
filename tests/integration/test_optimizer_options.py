"""Every option of the optimizer reaches the part that it configures."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.averaging.allreduce.bandwidth import RoundBandwidth
from manyhands.averaging.allreduce.streams import PartnerStreams
from manyhands.averaging.matchmaking.matchmaker import Matchmaker
from manyhands.averaging.rounds import RoundRunner
from manyhands.base.errors import ManifestMismatch, Timeout
from manyhands.optim import ProgressConfig
from manyhands.optim.run.progress import ProgressReader, View
from manyhands.optim.run.tracker import ProgressTracker
from tests.trainers import new_model, peers

OTHER_AVERAGING = AveragingConfig(
    matchmaking_time_s=2.5, averaging_timeout_s=11.0,
    codec="fp16", bandwidth_mbit_s=80.0, max_group_size=40,
    aggregate="mean",
)  # fmt: skip
OTHER_PROGRESS = ProgressConfig(min_refresh_s=0.3, max_refresh_s=4.0, ttl_s=12.0)
PARTS_OF_A_ROUND = (RoundRunner, Matchmaker, PartnerStreams)


def make(peer: manyhands.Peer, **options: Any) -> manyhands.Optimizer:
    inner = torch.optim.AdamW(new_model().parameters(), lr=0.01)
    return manyhands.Optimizer(inner, peer=peer, run_id="options", **{"target_batch_size": 64, **options})


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[type, dict[str, Any]]:
    """By class, the arguments with which the parts of an optimizer are made."""
    given: dict[type, dict[str, Any]] = {}

    def note(part: Any) -> None:
        init, signature = part.__init__, inspect.signature(part)

        def init_and_note(self: Any, *args: Any, **options: Any) -> None:
            given[part] = signature.bind(*args, **options).arguments
            init(self, *args, **options)

        monkeypatch.setattr(part, "__init__", init_and_note)

    for part in (*PARTS_OF_A_ROUND, RoundBandwidth, ProgressTracker):
        note(part)
    return given


def test_each_field_of_the_configs_differs_from_its_default() -> None:
    """Else the tests below would not see that it is lost."""
    for other, default in ((OTHER_AVERAGING, AveragingConfig()), (OTHER_PROGRESS, ProgressConfig())):
        for field in dataclasses.fields(other):
            assert getattr(other, field.name) != getattr(default, field.name), field.name


def test_averaging_reaches_all_parts_of_a_round(given: dict[type, dict[str, Any]]) -> None:
    with peers(1) as (peer,):
        optimizer = make(peer, averaging=OTHER_AVERAGING)
        for part in PARTS_OF_A_ROUND:
            assert given[part]["config"] == OTHER_AVERAGING, part
        assert optimizer.manifest.codec == "fp16"
        assert given[RoundBandwidth]["declared"] == 10_000_000


def test_the_times_reach_all_parts_of_a_round(given: dict[type, dict[str, Any]]) -> None:
    with peers(1) as (peer,):
        make(peer, matchmaking_time_s=2.0, averaging_timeout_s=9.0)
        for part in PARTS_OF_A_ROUND:
            config = given[part]["config"]
            assert (config.matchmaking_time_s, config.averaging_timeout_s) == (2.0, 9.0), part


def test_progress_reaches_the_tracker(given: dict[type, dict[str, Any]]) -> None:
    with peers(2) as (peer, other):
        optimizer = make(peer, progress=OTHER_PROGRESS)  # kept: one that is garbage-collected says goodbye
        assert given[ProgressTracker]["config"] == OTHER_PROGRESS
        reader = ProgressReader(other.endpoint, other.dht, "options")

        async def read() -> None:
            while peer.peer_id not in reader.records():
                await reader.refresh()
            assert reader.records()[peer.peer_id].ttl_s == 12.0

        other.run(read(), 20.0, "reading")
        optimizer.close()


def test_the_target_reaches_the_tracker(given: dict[type, dict[str, Any]]) -> None:
    with peers(1) as (peer,):
        make(peer, target_batch_size=48)
        assert given[ProgressTracker]["target_batch_size"] == 48


@pytest.mark.parametrize("local_steps", [None, manyhands.LocalSteps(fragments=4)])
def test_a_batch_larger_than_the_target_is_warned_of_with_and_without_fragments(
    local_steps: manyhands.LocalSteps | None, caplog: pytest.LogCaptureFixture
) -> None:
    with peers(1) as (peer,):
        optimizer = make(peer, local_steps=local_steps)
        for batch_size, num_warnings in ((64, 0), (65, 1), (66, 1)):
            loss = sum(parameter.sum() for group in optimizer.param_groups for parameter in group["params"])
            assert isinstance(loss, torch.Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(batch_size=batch_size)
            assert caplog.text.count("is larger than target_batch_size=64") == num_warnings


def test_auxiliary_peers_are_seen_and_count_for_no_trainer() -> None:
    """They once published nothing; but those who cannot be dialled must know where to dial them."""
    with peers(2) as (one, two):
        trainer = make(one)
        helper = make(two, auxiliary=True)
        helper.step()
        assert helper.num_peers == 1

        async def read() -> None:
            reader = ProgressReader(one.endpoint, one.dht, "options")
            await reader.refresh()
            assert reader.records()[two.peer_id].is_auxiliary
            assert not reader.trainers()
            view = View(reader.observed(), reader.records()[two.peer_id].position)
            assert list(view.expected) == [two.peer_id]

        one.run(read(), 5.0, "reading")
        assert trainer.num_peers == 1


def test_peers_with_another_max_grad_norm_or_must_match_are_refused() -> None:
    with peers(2) as (one, two):
        first = make(one, max_grad_norm=1.0, must_match={"tokenizer": "abc"})
        with pytest.raises(ManifestMismatch, match=r"max_grad_norm is 2.0 here, 1.0 in the run"):
            make(two, max_grad_norm=2.0, must_match={"tokenizer": "abc"})
        with pytest.raises(ManifestMismatch, match="tokenizer is xyz here, abc in the run"):
            make(two, max_grad_norm=1.0, must_match={"tokenizer": "xyz"})
        assert make(two, max_grad_norm=1, must_match={"tokenizer": "abc"}, offload=True).num_peers >= 1
        first.close()


def test_a_delayed_step_leaves_the_training_thread_alone() -> None:
    """On real threads: the update hangs until the training thread has gone on with other batches."""
    may_step = threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert may_step.wait(120)
            return super().step(closure)

    model = new_model()
    with peers(1) as (peer,):
        optimizer = manyhands.Optimizer(
            Slow(model.parameters(), lr=0.1), peer=peer, run_id="slow", target_batch_size=4, batch_size_per_step=4,
            delay="optimizer",
        )  # fmt: skip
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(5):
            model(torch.ones(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.global_step == 0
        assert optimizer.samples_accumulated == 20
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        may_step.set()
        optimizer.settle()
        assert optimizer.global_step == 1
        assert not torch.equal(next(model.parameters()), before[0])
        optimizer.step(batch_size=0)
        optimizer.settle()
        counts = optimizer.statistics
        assert (optimizer.global_step, counts.samples_used, counts.samples_dropped) == (2, 20, 0)


@pytest.mark.parametrize("delay", [None, "optimizer", "gradients"])
def test_a_network_thread_that_is_held_up_in_mid_step_neither_loses_samples_nor_hangs_the_run(
    delay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model()
    with peers(1) as (peer,):
        optimizer = manyhands.Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), peer=peer, run_id="held", target_batch_size=4,
            batch_size_per_step=4, delay=delay,
        )  # fmt: skip

        def train() -> None:
            model(torch.ones(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.settle()

        run = peer.run

        def held_up(coro: Any, timeout_s: float, phase: str) -> Any:
            if phase not in ("moving on", "beginning a step"):
                return run(coro, timeout_s, phase)
            coro.close()
            raise Timeout(phase, timeout_s)

        monkeypatch.setattr(peer, "run", held_up)
        is_raised = delay is not None  # else the step is made, and the loop goes on with a warning
        with pytest.raises(Timeout) if is_raised else nullcontext():
            train()
        counts = optimizer.statistics
        assert optimizer.global_step == (not is_raised)
        assert counts.samples_used + optimizer.samples_accumulated == counts.samples_computed == 4
        monkeypatch.setattr(peer, "run", run)
        for _ in range(3):
            train()
        assert counts.samples_used >= 12
        assert optimizer.global_step >= 3
        assert counts.samples_dropped == 0
