"""Whole peers over real sockets: the collaboration makes the steps that one process would make."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import manyhands
from manyhands.averaging.peer_records import PeerRecords
from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, ManifestMismatch
from manyhands.base.identity import Identity
from manyhands.peer import Presence
from tests.inside import OpenAverager
from tests.trainers import AVERAGING, BATCH_SIZE, FAST, LISTEN, Trainer, in_threads, new_model, peers

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def sample_batches(num_steps: int, sizes: list[int]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(17)
    return [
        [(torch.randn(size, 5, generator=generator), torch.randn(size, 3, generator=generator)) for size in sizes]
        for _ in range(num_steps)
    ]


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def step_until(optimizer: manyhands.Optimizer, global_step: int) -> None:
    """Take part in rounds, without more samples, until the run has reached ``global_step``."""
    for _ in range(2000):
        if optimizer.global_step >= global_step:
            return
        optimizer.step(batch_size=0)
        threading.Event().wait(0.01)
    pytest.fail(f"global step {global_step} was not reached")


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    ],
    ids=["SGD", "AdamW"],
)
def test_unequal_peers_make_the_steps_of_one_process_with_the_whole_batch(make_optimizer: MakeOptimizer) -> None:
    num_steps = 5
    shares = [[2, 5], [1], [4, 3, 6]]  # the batches of each of three peers in each global step
    sizes = [size for share in shares for size in share]
    steps = sample_batches(num_steps, sizes)

    alone = new_model()
    optimizer = make_optimizer(list(alone.parameters()))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4)
    for batches in steps:
        loss_of(alone, (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    models = [new_model() for _ in shares]
    digests: list[str] = ["", "", ""]

    def train(index: int, peer: manyhands.Peer, barrier: threading.Barrier) -> None:
        first = sum(len(share) for share in shares[:index])
        collaborative = manyhands.Optimizer(
            make_optimizer(list(models[index].parameters())),
            peer=peer,
            run_id="equivalence",
            target_batch_size=sum(sizes),
            scheduler=lambda inner: torch.optim.lr_scheduler.LinearLR(inner, 0.1, 1.0, total_iters=4),
            averaging=AVERAGING,
            progress=FAST,
        )
        barrier.wait(120)
        for step, batches in enumerate(steps):
            for inputs, targets in batches[first : first + len(shares[index])]:
                loss_of(models[index], (inputs, targets)).backward()
                collaborative.step(batch_size=len(inputs))
                collaborative.zero_grad()
            step_until(collaborative, step + 1)
        digests[index] = collaborative.state_digest()
        assert collaborative.statistics.samples_used == num_steps * sum(shares[index])
        assert collaborative.statistics.samples_dropped == 0
        barrier.wait(120)

    with peers(3) as swarm:
        barrier = threading.Barrier(3)
        in_threads([lambda i=i, peer=peer: train(i, peer, barrier) for i, peer in enumerate(swarm)])

    for model in models:
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert digests[0] == digests[1] == digests[2] != ""


def test_a_newcomer_loads_the_state_and_contributes() -> None:
    batches = sample_batches(1, [4] * 40)[0]

    def make(peer: manyhands.Peer, model: torch.nn.Module) -> manyhands.Optimizer:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        return manyhands.Optimizer(
            inner, peer=peer, run_id="newcomer", target_batch_size=8, averaging=AVERAGING, progress=FAST
        )

    with peers(2) as (first, second):
        old_model, new = new_model(0), new_model(1)
        old = make(first, old_model)
        for batch in batches[:6]:
            loss_of(old_model, batch).backward()
            old.step(batch_size=4)
            old.zero_grad()
        assert old.global_step == 3
        assert old.statistics.steps_alone == 3
        newcomer = make(second, new)
        step_until(newcomer, 3)  # it may have read a record from before the last step
        assert newcomer.state_digest() == old.state_digest()

        def contribute(optimizer: manyhands.Optimizer, model: torch.nn.Module) -> None:
            loss_of(model, batches[7]).backward()
            optimizer.step(batch_size=4)
            step_until(optimizer, 4)

        in_threads([lambda: contribute(old, old_model), lambda: contribute(newcomer, new)])
        assert newcomer.statistics.samples_used == 4
        assert newcomer.state_digest() == old.state_digest()


@pytest.mark.parametrize("is_lower", [False, True])
def test_a_newcomer_whose_announced_name_resolves_for_nobody_else_costs_no_step(tmp_path: Path, is_lower: bool) -> None:
    keys = [tmp_path / name for name in ("one", "other")]
    keys.sort(key=lambda key: Identity.load_or_create(key).peer_id, reverse=is_lower)

    async def hide(presence: Presence) -> None:
        presence.endpoint.announce([Address.parse("/dns4/no-such-host.invalid/tcp/31337")])

    with manyhands.Peer(listen=LISTEN, identity=keys[0]) as first:
        trainer = Trainer(first, "names", 2 * BATCH_SIZE)
        trainer.train_until(1)
        with manyhands.Peer(first.addresses, listen=LISTEN, identity=keys[1], before_joining=hide) as second:
            trainers = [trainer, Trainer(second, "names", 2 * BATCH_SIZE)]
            in_threads([lambda one=one: one.train_until(6) for one in trainers])
            counts = trainers[1].optimizer.statistics
    assert counts.rounds_aborted == 0
    assert counts.rounds_committed >= 3


def test_peers_that_start_with_other_parameters_take_those_of_the_peer_that_began_the_run() -> None:
    with peers(2) as swarm:
        models = {peer.peer_id: new_model(seed) for seed, peer in enumerate(swarm)}
        optimizers = [
            manyhands.Optimizer(
                torch.optim.SGD(models[peer.peer_id].parameters(), lr=0.1),
                peer=peer,
                run_id="start",
                target_batch_size=100,
                progress=FAST,
            )
            for peer in swarm
        ]
        first = new_model(0)
        for _ in range(200):
            for optimizer in optimizers:
                optimizer.step(batch_size=0)
            if optimizers[0].state_digest() == optimizers[1].state_digest():
                break
            threading.Event().wait(0.01)
        for model in models.values():
            for ours, theirs in zip(model.parameters(), first.parameters(), strict=True):
                assert torch.equal(ours, theirs)


def test_another_model_is_refused_with_both_shapes() -> None:
    with peers(2) as (first, second):
        inner = torch.optim.SGD(new_model().named_parameters(), lr=0.1)
        optimizer = manyhands.Optimizer(inner, peer=first, run_id="shapes", target_batch_size=8)
        wider = torch.optim.SGD(new_model(width=9).named_parameters(), lr=0.1)
        with pytest.raises(ManifestMismatch, match=r"tensor 0\.weight has shape \[9, 5\] here, \[8, 5\] in the run"):
            manyhands.Optimizer(wider, peer=second, run_id="shapes", target_batch_size=8)
        same = torch.optim.SGD(new_model().named_parameters(), lr=0.1)
        with pytest.raises(ManifestMismatch, match="target_batch_size is 9 here, 8 in the run"):
            manyhands.Optimizer(same, peer=second, run_id="shapes", target_batch_size=9)
        optimizer.close()


def test_bad_arguments_are_named() -> None:
    with peers(1) as (peer,):
        inner = torch.optim.SGD(new_model().parameters(), lr=0.1)
        for bad in ("", "my.run", "x" * 65):
            with pytest.raises(ConfigError, match="run_id"):
                manyhands.Optimizer(inner, peer=peer, run_id=bad, target_batch_size=8)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"target_batch_size": 0}, "target_batch_size=0 must be at least 1"),
            ({"auxiliary": "no"}, "auxiliary='no' must be True or False"),
            ({"allow_solo": 1}, "allow_solo=1 must be True or False"),
            ({"offload": "cpu"}, "offload='cpu' must be True, False or None"),
            ({"start_new": "no"}, "start_new='no' must be True, False or None"),
            ({"averaging": {"codec": "int8"}}, r"averaging=.* must be made by manyhands\.AveragingConfig"),
            ({"progress": {}}, r"progress={} must be made by manyhands\.ProgressConfig"),
            ({"must_match": {"version": 3}}, "must_match={'version': 3} must be a dict of texts"),
            ({"must_match": ["tokenizer"]}, r"must_match=\['tokenizer'\] must be a dict of texts"),
            ({"local_steps": True}, r"local_steps=True must be made by manyhands\.LocalSteps"),
        ]
        for named, says in wrong:
            with pytest.raises(ConfigError, match=says):
                manyhands.Optimizer(inner, peer=peer, run_id="run", **{"target_batch_size": 8} | named)
        optimizer = manyhands.Optimizer(inner, peer=peer, run_id="run", target_batch_size=8)
        with pytest.raises(ConfigError, match="batch_size_per_step=32"):
            optimizer.step()
        again = torch.optim.SGD(new_model().parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=r"this peer has an Optimizer already; close\(\) that one first"):
            manyhands.Optimizer(again, peer=peer, run_id="other", target_batch_size=8)
        optimizer.close()
        manyhands.Optimizer(again, peer=peer, run_id="other", target_batch_size=8)


@pytest.mark.parametrize("delay", [None, "gradients"])
def test_an_optimizer_may_be_closed_after_its_peer_and_then_says_so(delay: str | None) -> None:
    """As where the ``finally`` of a loop is outside of the peer's ``with`` block."""
    with peers(1) as (peer,):
        trainer = Trainer(peer, "late", 8, delay=delay)
        trainer.train_until(1)
        trainer.optimizer.settle()
    trainer.optimizer.close()
    trainer.optimizer.close()
    assert trainer.optimizer.state_dict()["manyhands"]["step"] == trainer.optimizer.global_step
    with pytest.raises(ConfigError, match="the peer is closed; make another one"):
        trainer.train_until(100)


async def read_by(records: PeerRecords) -> set[str]:
    """The other peers whose records one of its kind reads."""
    await records.refresh()
    return set(records.observed())


def test_averagers_of_the_same_run_id_are_no_trainers_and_trainers_no_averagers() -> None:
    """Their records are of one kind; each side reads only those of its own."""
    with peers(3) as (one, *others):
        trainer = Trainer(one, "shared", 8)
        trainer.train_until(1)
        tensors = [torch.full((3,), float(number)) for number in range(2)]
        averagers = [
            OpenAverager([tensor], peer=peer, run_id="shared") for tensor, peer in zip(tensors, others, strict=True)
        ]
        results: list[manyhands.RoundResult] = []
        in_threads([lambda a=averager: results.append(a.step(timeout_s=10.0)) for averager in averagers])
        trainer.train_until(2)
        ids = [peer.peer_id for peer in others]
        assert one.run(read_by(trainer.optimizer.collaboration.tracker), 5.0, "reading the records") == set()
        for averager, peer, other_id in zip(averagers, others, reversed(ids), strict=True):
            assert peer.run(read_by(averager.averager_loop.tracker), 5.0, "reading the records") == {other_id}
        for result in results:
            assert result.committed, result.reason
            assert set(result.group) == set(ids)
        assert torch.equal(tensors[0], torch.full((3,), 0.5))
        for averager in averagers:
            averager.close()


def test_optimizers_averagers_and_peers_refuse_to_be_copied_or_pickled() -> None:
    """A copy of an optimizer would have the groups and the state, and no run."""
    with peers(1) as (peer,):
        trainer = Trainer(peer, "copied", 8)
        averager = manyhands.Averager([torch.zeros(3)], peer=peer, run_id="averaged")
        for one, instead in (
            (trainer.optimizer, r"state_dict\(\) has its state"),
            (averager, "make one in each process"),
            (peer, "make one in each process"),
        ):
            says = f"a manyhands.{type(one).__name__} cannot be copied or pickled.*{instead}"
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(ConfigError, match=says):
                    copied(one)
        averager.close()
        trainer.train_until(1)


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"local_steps": manyhands.LocalSteps()}])
def test_a_batch_without_any_gradient_is_refused(options: dict[str, Any]) -> None:
    """Its samples would count in full, and its gradient of zero would halve that of another peer."""
    with peers(1) as (peer,):
        trainer = Trainer(peer, "replaced", 8, **options)
        trainer.train_until(1)
        trainer.optimizer.step(weight=0.0)  # a batch without items has no gradient, and counts for nothing
        before = copy.copy(trainer.optimizer.statistics)
        trainer.model.load_state_dict(trainer.model.state_dict(), assign=True)
        with pytest.raises(ConfigError, match=r"has a gradient.* not counted.* zero_grad\(\) between .*assign=True"):
            trainer.train_batch()
        assert trainer.optimizer.statistics == before


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_a_compiled_model_fits_a_plain_one() -> None:
    """torch.compile and wrappers of the model put words of their own into the names."""

    def make(model: torch.nn.Module, wrap: Callable[[torch.nn.Module], Any]) -> tuple[Any, torch.optim.Optimizer]:
        wrapped = wrap(model)
        return wrapped, torch.optim.AdamW(wrapped.named_parameters(), lr=0.01)

    class Wrapper(torch.nn.Module):  # as DistributedDataParallel and DataParallel
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    def model_of(seed: int) -> torch.nn.Sequential:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))

    def compiled(model: torch.nn.Module) -> Any:
        return torch.compile(model, backend="eager")

    def compile_inside(model: torch.nn.Module) -> torch.nn.Module:
        assert isinstance(model, torch.nn.Sequential)
        model[2] = compiled(model[2])
        return model

    wraps: list[Callable[[torch.nn.Module], Any]] = [
        compiled,
        lambda model: model,
        lambda model: Wrapper(compiled(model)),
        lambda model: compiled(Wrapper(model)),
        compile_inside,
    ]
    with peers(len(wraps) + 2) as swarm:
        optimizers, digests = [], set()
        for number, (peer, wrap) in enumerate(zip(swarm, wraps, strict=False)):
            model, inner = make(model_of(number), wrap)
            optimizer = manyhands.Optimizer(
                inner, peer=peer, run_id="compiled", target_batch_size=4, buffers=model.named_buffers(),
                averaging=AVERAGING, progress=FAST,
            )  # fmt: skip
            if number == 0:
                model(torch.randn(4, 5)).square().mean().backward()
                optimizer.step(batch_size=4)
            optimizers.append(optimizer)  # else it would leave the run
            assert optimizer.global_step == 1
            digests.add(optimizer.state_digest())
            assert [spec.name for spec in optimizer.manifest.tensors][-1] == "2.bias"
        assert len(digests) == 1, "each has loaded the first one's state"
        for onlooker, wrap in ((swarm[-2], wraps[0]), (swarm[-1], wraps[1])):
            evaluated = wrap(model_of(7))
            manyhands.load_state_from_peers(onlooker, "compiled", into=evaluated)
            for value, own in zip(evaluated.state_dict().values(), model.state_dict().values(), strict=True):
                assert torch.equal(value, own)


def test_the_optimizer_is_a_torch_optimizer_with_fixed_parameters() -> None:
    with peers(1) as (peer,):
        inner = torch.optim.SGD(new_model().parameters(), lr=0.1)
        optimizer = manyhands.Optimizer(inner, peer=peer, run_id="torch", target_batch_size=8)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is inner.param_groups
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        with pytest.raises(ConfigError, match="the parameters of a run are fixed"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def test_a_grad_scaler_and_accelerate_accept_the_optimizer() -> None:
    with peers(1) as (peer,):
        model = new_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = manyhands.Optimizer(inner, peer=peer, run_id="amp", target_batch_size=4, batch_size_per_step=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(model, sample_batches(1, [4])[0][0])).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.global_step == 1

        accelerator = Accelerator(cpu=True)
        model, prepared = accelerator.prepare(model, optimizer)
        accelerator.backward(loss_of(model, sample_batches(1, [4])[0][0]))
        prepared.step()
        prepared.zero_grad()
        assert optimizer.global_step == 2


def test_a_gradient_that_is_not_finite_never_counts() -> None:
    with peers(1) as (peer,):
        model = new_model()
        optimizer = manyhands.Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), peer=peer, run_id="nan", target_batch_size=8
        )
        next(model.parameters()).grad = torch.full((8, 5), float("nan"))
        optimizer.step(batch_size=8)
        assert optimizer.global_step == 0
        assert optimizer.samples_accumulated == 0
        assert optimizer.statistics.samples_dropped == 8


@pytest.mark.parametrize("found_inf", [0.0, 1.0], ids=["not finite", "overflow"])
def test_batches_that_are_never_finite_are_told_of_without_a_flood(
    found_inf: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "manyhands.optim")
    with peers(1) as (peer,):
        trainer = Trainer(peer, "nan", 10**6)
        next(trainer.model.parameters()).grad = torch.full((8, 5), float("nan"))
        trainer.optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
        for _ in range(100):
            trainer.optimizer.step()
        told = [text for text in caplog.messages if "dropped" in text]
        assert 1 < len(told) < 10, told
        assert "64 such batches so far" in told[-1]
        assert trainer.optimizer.statistics.samples_dropped == 400


def test_short_batches_far_from_the_target_do_not_each_wake_the_network_thread() -> None:
    """Two threads are woken for each question, which costs more than a small model's gradients."""
    num_batches, period_s = 60, 0.01
    asked: list[str] = []
    with peers(1) as (peer,):
        ask = peer.run
        trainer = Trainer(peer, "lull", 10**6)

        def run(coro: Any, timeout_s: float, phase: str) -> Any:
            asked.append(phase)
            return ask(coro, timeout_s, phase)

        peer.run = run  # type: ignore[method-assign]
        for _ in range(num_batches):
            trainer.train_batch()
            time.sleep(period_s)
        assert 0 < asked.count("deciding") < num_batches / 2
        assert trainer.optimizer.statistics.samples_computed == num_batches * BATCH_SIZE
        next(trainer.model.parameters()).grad = torch.zeros(8, 5)
        trainer.optimizer.step(batch_size=10**6)
        while trainer.optimizer.global_step == 0:  # for a lull at most
            time.sleep(period_s)
            trainer.optimizer.step(batch_size=0)
        assert trainer.optimizer.statistics.samples_used == num_batches * BATCH_SIZE + 10**6


def test_a_state_that_lacks_something_says_what_and_loads_nothing() -> None:
    with peers(1) as (peer,):
        model = new_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = manyhands.Optimizer(inner, peer=peer, run_id="state", target_batch_size=4, batch_size_per_step=4)
        whole = optimizer.state_dict()
        halved = {**whole, "manyhands": {name: whole["manyhands"][name] for name in ("step", "scheduler")}}
        before = optimizer.state_digest()
        for state, says in (
            ({}, "no 'state' and no 'param_groups'"),
            (model.state_dict(), "no 'state' and no 'param_groups'"),
            ({"state": {}}, "no 'param_groups'"),
            (halved, "no 'manyhands.lineage' and no 'manyhands.lineage_samples'"),
        ):
            with pytest.raises(ConfigError, match=says):
                optimizer.load_state_dict(state)
            assert optimizer.state_digest() == before
        optimizer.load_state_dict(inner.state_dict())


def test_a_model_with_batch_norm_is_told_once_that_its_statistics_do_not_travel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with peers(1) as (peer,):
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        optimizer = manyhands.Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), peer=peer, run_id="norm", target_batch_size=4,
            batch_size_per_step=4,
        )  # fmt: skip
        assert sum("running mean and variance are not shared" in text for text in caplog.messages) == 1
        for _ in range(3):
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert sum("running mean and variance are not shared" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_batch_size": 10**6},
        {"delay": "optimizer"},
        {"delay": "gradients"},
        {"local_steps": manyhands.LocalSteps()},
    ],
    ids=["steps", "far from the target", "delayed steps", "delayed gradients", "local steps"],
)
@pytest.mark.parametrize("set_to_none", [None, True, False], ids=["forgotten", "to none", "in place"])
def test_a_forgotten_zero_grad_is_told_once(
    set_to_none: bool | None, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with peers(1) as (peer,):
        model = new_model()
        optimizer = manyhands.Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.001), peer=peer, run_id="kept", batch_size_per_step=4,
            **{"target_batch_size": 8} | options,
        )  # fmt: skip
        for _ in range(8):
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            if set_to_none is not None:
                optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.settle()
        num_told = sum("each optimizer.step()\n    optimizer.zero_grad()" in text for text in caplog.messages)
        assert num_told == (set_to_none is None)


def test_a_closure_that_removes_its_gradients_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with peers(1) as (peer,):
        model = new_model()
        optimizer = manyhands.Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.001), peer=peer, run_id="kept", batch_size_per_step=4,
            target_batch_size=8,
        )  # fmt: skip

        def closure() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = model(torch.randn(4, 5)).square().mean()
            loss.backward()
            return loss

        for _ in range(6):
            optimizer.step(closure)
        assert not any("zero_grad" in text for text in caplog.messages)
