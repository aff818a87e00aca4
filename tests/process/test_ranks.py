"""Jobs of two ranks with DistributedDataParallel, each of which is one peer."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import manyhands
from manyhands.optim import ranks
from tests.process.jobs import NUM_RANKS, Job, job, say
from tests.schedule_free import ScheduleFreeAdamW
from tests.smaller import make_smaller
from tests.sweeps import few_of
from tests.trainers import AVERAGING, FAST, LISTEN, Trainer, new_model, peers

pytestmark = pytest.mark.process

Batch = tuple[torch.Tensor, torch.Tensor]
BATCH_SIZE = 4
ENDS_S = 15.0
"""A rank ends so soon after another one has, on a busy machine."""


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def random_batch(*seed: int, size: int = BATCH_SIZE) -> Batch:
    generator = torch.Generator().manual_seed(hash(seed))
    return torch.randn(size, 5, generator=generator), torch.randn(size, 3, generator=generator)


def values_of(model: torch.nn.Module) -> list[float]:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


def digest_of(model: torch.nn.Module) -> str:
    return hashlib.sha256(repr(values_of(model)).encode()).hexdigest()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@contextmanager
def the_peer(rank: int, *initial_peers: str, **options: Any) -> Iterator[manyhands.Peer | None]:
    make_smaller(span_numel=1)  # in this process; all members reduce
    with manyhands.Peer(initial_peers, listen=LISTEN, **options) if rank == 0 else nullcontext() as peer:
        yield peer


def optimizer_of(
    model: torch.nn.Module, peer: manyhands.Peer | None, run_id: str, target: int, **options: Any
) -> manyhands.ProcessGroupOptimizer:
    given = {"averaging": AVERAGING, "progress": FAST} | options
    return manyhands.ProcessGroupOptimizer(
        adamw(model.parameters()), peer=peer, run_id=run_id, target_batch_size=target, **given
    )


def step_until(optimizer: manyhands.ProcessGroupOptimizer, condition: Callable[[], object]) -> None:
    """All ranks see the same figures, so they end it together."""
    for _ in range(4000):
        if condition():
            return
        optimizer.step(batch_size=0)
        threading.Event().wait(0.01)
    pytest.fail(f"it did not come about: {optimizer.statistics} at step {optimizer.global_step}")


# the steps of one process

NUM_STEPS = 4
SHARES = [[2, 3], [4]]
"""Sizes of the batches that each rank of each of two peers has in a step."""
WHOLE = NUM_RANKS * sum(map(sum, SHARES))
SETTINGS: dict[str, Any] = {"max_grad_norm": 0.5, "batch_size_per_step": None}


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=NUM_STEPS)


def batches_of(step: int, number: int, rank: int) -> list[Batch]:
    return [random_batch(step, number, rank, index, size=size) for index, size in enumerate(SHARES[number])]


def train_a_share(rank: int, number: str, *initial_peers: str) -> None:
    model = DistributedDataParallel(new_model())
    with the_peer(rank, *initial_peers) as peer:
        optimizer = optimizer_of(model, peer, "equal", WHOLE, scheduler=schedule_of, **SETTINGS)
        step_until(optimizer, lambda: optimizer.num_peers == len(SHARES))
        for step in range(NUM_STEPS):
            for batch in batches_of(step, int(number), rank):
                loss_of(model, batch).backward()
                optimizer.step(batch_size=len(batch[0]))
                optimizer.zero_grad()
            step_until(optimizer, lambda step=step: optimizer.global_step > step)  # type: ignore[misc]
            say(digest=digest_of(model), rate=optimizer.param_groups[0]["lr"])
        counts = optimizer.statistics
        say(values=values_of(model), used=counts.samples_used, dropped=counts.samples_dropped)
        optimizer.wait_for_others()


@pytest.mark.long
def test_two_jobs_make_the_steps_of_one_process_with_the_whole_batch(tmp_path: Path) -> None:
    alone = new_model()
    optimizer = adamw(alone.parameters())
    schedule = schedule_of(optimizer)
    rates = []
    for step in range(NUM_STEPS):
        shares = [batches_of(step, number, rank) for number in range(len(SHARES)) for rank in range(NUM_RANKS)]
        inputs, targets = zip(*[batch for share in shares for batch in share], strict=True)
        loss_of(alone, (torch.cat(inputs), torch.cat(targets))).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), SETTINGS["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])

    with (
        peers(1) as (coordinator,),
        job(train_a_share, tmp_path, "0", *coordinator.addresses) as first,
        job(train_a_share, tmp_path, "1", *coordinator.addresses) as second,
    ):
        for step in range(NUM_STEPS):
            said = first.hear() + second.hear()
            assert len({ours["digest"] for ours in said}) == 1, f"the ranks differ after step {step}"
            assert [ours["rate"] for ours in said] == pytest.approx([rates[step]] * 4)
        for number, both in enumerate((first, second)):
            for ours in both.hear():
                torch.testing.assert_close(ours["values"], values_of(alone), rtol=1e-5, atol=1e-5)
                assert ours["used"] == NUM_STEPS * NUM_RANKS * sum(SHARES[number]), "of all ranks"
                assert ours["dropped"] == 0
        assert first.wait() + second.wait() == [0] * 4


# a state that is loaded


def load_and_train(rank: int) -> None:
    model = DistributedDataParallel(new_model(seed=1))
    with the_peer(rank) as peer:
        optimizer = optimizer_of(model, peer, "loading", 40, batch_size_per_step=BATCH_SIZE)
        say(addresses=peer.addresses if peer is not None else [], digest=digest_of(model))
        step_until(optimizer, lambda: optimizer.statistics.states_loaded)
        say(digest=digest_of(model), step=optimizer.global_step)
        while optimizer.global_step < 2:
            loss_of(model, random_batch(rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(0.01)
        optimizer.wait_for_others()
        say(digest=digest_of(model), step=optimizer.global_step)


@pytest.mark.long
def test_a_state_loaded_by_rank_0_reaches_all_and_they_train_with_peers_of_one_process(tmp_path: Path) -> None:
    with job(load_and_train, tmp_path) as both:
        before = both.hear()
        with manyhands.Peer(before[0]["addresses"], listen=LISTEN) as peer:
            trainer = Trainer(peer, "loading", 40, make=lambda model: adamw(model.parameters()), start_new=True)
            initial = digest_of(trainer.model)
            for ours, theirs in zip(both.hear(), before, strict=True):
                assert ours == {"digest": initial, "step": 0}, "the parameters of the peer whose user says so"
                assert theirs["digest"] != initial
            trainer.train_until(2)
            assert trainer.optimizer.statistics.rounds_committed == 2
            trainer.optimizer.wait_for_others()
            assert [ours["step"] for ours in both.hear()] == [2, 2]
            assert both.wait() == [0, 0]


# what does not fit


def be_refused(rank: int, *initial_peers: str) -> None:
    said = []

    def refused(function: Callable[[], object]) -> None:
        try:
            function()
        except manyhands.ManyhandsError as error:
            said.append(f"{type(error).__name__}: {error}")

    with the_peer(rank, *initial_peers) as peer:
        model = new_model()
        refused(lambda: optimizer_of(model, None, "shapes", 8))
        refused(lambda: optimizer_of(new_model(width=8 + rank), peer, "shapes", 8))
        refused(lambda: optimizer_of(new_model(width=9), peer, "shapes", 8))
        optimizer = optimizer_of(model, peer, "other", 8)
        refused(optimizer.step)
        refused(lambda: optimizer.step(batch_size=4, weight=3.0 if rank else None))
        refused(optimizer.settle if rank else optimizer.state_digest)
        loss_of(model, random_batch(0)).backward()
        optimizer.step(batch_size=4)
        say(refused=said, step=optimizer.global_step)


@pytest.mark.long
def test_an_error_of_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    with peers(1) as (peer,):
        other = Trainer(peer, "shapes", 8)
        with job(be_refused, tmp_path, *peer.addresses) as both:
            for rank, said in enumerate(both.hear()):
                start = "ConfigError: rank 0 failed: " if rank else ""
                expected = [
                    "ConfigError: on rank 0: it needs a peer",
                    "ConfigError: rank 1 has other parameters",
                    f"{start or 'ManifestMismatch: '}this peer does not fit run 'shapes'",
                    f"{start or 'ConfigError: '}step() needs to know how many samples",
                    f"{start or 'ConfigError: '}weight was given on 1 of 2 ranks",
                    "ConfigError: all ranks must make the same calls; here: rank 0 state_digest, rank 1",
                ]
                assert [text[: len(start)] for text, start in zip(said["refused"], expected, strict=True)] == expected
                assert said["step"] == 1, "and what is right goes on"
            assert both.wait() == [0, 0]
        other.optimizer.close()


# ends


def train_for_ever(rank: int, target: str, *initial_peers: str) -> None:
    logging.basicConfig(level="INFO")
    model = new_model()  # without DDP, which would notice as well that a rank is gone
    with the_peer(rank, *initial_peers) as peer:
        optimizer = optimizer_of(
            model, peer, "ends", int(target), batch_size_per_step=BATCH_SIZE,
            averaging=None, matchmaking_time_s=100.0, averaging_timeout_s=200.0,
        )  # fmt: skip
        say(begins=True)
        while True:
            loss_of(model, random_batch(rank)).backward()
            optimizer.step()
            optimizer.zero_grad()


def assert_it_ends(both: Job, rank: int, text: str) -> None:
    assert both.ranks[rank].wait(ENDS_S) not in (0, None)
    assert text in both.ranks[rank].output


@pytest.mark.long
@pytest.mark.parametrize("victim", few_of(range(NUM_RANKS)))
def test_when_a_rank_is_killed_the_other_one_ends(tmp_path: Path, victim: int) -> None:
    with peers(1) as (peer,), job(train_for_ever, tmp_path, "1000000", *peer.addresses) as both:
        both.hear()
        both.ranks[victim].kill()
        assert_it_ends(both, 1 - victim, "RankLost: ")


@pytest.mark.long
def test_ctrl_c_on_rank_0_in_a_round_ends_all_ranks(tmp_path: Path) -> None:
    """With a peer that is expected in the round, and does not come."""
    with peers(1) as (peer,):
        trainer = Trainer(peer, "ends", 40, make=lambda model: adamw(model.parameters()))
        with job(train_for_ever, tmp_path, "40", *peer.addresses) as both:
            both.ranks[0].wait_for("Beginning global optimizer step")
            both.ranks[0].interrupt()
            assert_it_ends(both, 0, "KeyboardInterrupt")
            assert_it_ends(both, 1, "RankLost: rank 0 failed: KeyboardInterrupt()")
        assert trainer.optimizer.global_step == 0


# other options


def use_options(rank: int, folder: str) -> None:
    with the_peer(rank) as peer:
        # a loss that overflows on one rank
        model = DistributedDataParallel(new_model(), gradient_as_bucket_view=True)
        optimizer = optimizer_of(model, peer, "scaled", 16, batch_size_per_step=BATCH_SIZE)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for scale in (1.0, 1e38 if rank else 1.0, 1.0):
            scaler.scale(loss_of(model, random_batch(rank)) * scale).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        counts = optimizer.statistics
        say(scale=scaler.get_scale(), used=counts.samples_used, dropped=counts.samples_dropped, digest=digest_of(model))

        # a checkpoint, which rank 0 alone saves
        if rank == 0:
            state = optimizer.state_dict()
            torch.save({"optimizer": state, "model": model.module.state_dict()}, Path(folder) / "checkpoint")
        torch.distributed.barrier()
        checkpoint = torch.load(Path(folder) / "checkpoint")
        model = DistributedDataParallel(new_model(seed=5))
        if rank == 0:
            model.module.load_state_dict(checkpoint["model"])
        optimizer.close()
        optimizer = optimizer_of(model, peer, "loaded", 16)
        optimizer.load_state_dict(checkpoint["optimizer"])
        say(digest=digest_of(model), step=optimizer.global_step)
        optimizer.close()

        # with copies on the host, in the background, and batches of different sizes
        model = DistributedDataParallel(new_model())
        optimizer = optimizer_of(model, peer, "delayed", 20, delay="gradients")
        while optimizer.global_step < 3:
            loss_of(model, random_batch(rank)).backward()
            optimizer.step(batch_size=BATCH_SIZE + rank)
            optimizer.zero_grad()
        optimizer.settle()
        counts = optimizer.statistics
        assert counts.samples_computed == counts.samples_used + optimizer.samples_accumulated
        say(digest=digest_of(model), computed=counts.samples_computed, step=optimizer.global_step)
        optimizer.close()


@pytest.mark.long
def test_ranks_agree_with_scaled_losses_checkpoints_and_steps_in_the_background(tmp_path: Path) -> None:
    with job(use_options, tmp_path, str(tmp_path)) as both:
        scaled = both.hear()
        digest = scaled[0]["digest"]
        assert scaled == [{"scale": 512.0, "used": 16, "dropped": 8, "digest": digest}] * 2
        assert both.hear() == [{"digest": digest, "step": 1}] * 2
        first, second = both.hear()
        assert first == second
        assert first["step"] >= 3
        assert first["computed"] % (2 * BATCH_SIZE + 1) == 0, "the sum over the ranks"
        assert both.wait() == [0, 0]


def wait_long(rank: int) -> None:
    ranks.RANK_S = 4.0

    def come_late(group: ranks.Ranks) -> str:
        if rank != 0:
            threading.Event().wait(2 * ranks.RANK_S)
            return "late"
        return str(group.gather([1.0]))

    torch.distributed.barrier()
    try:
        say(outcome=come_late(ranks.Ranks()))
    except manyhands.ManyhandsError as error:
        say(outcome=type(error).__name__)


@pytest.mark.long
def test_a_rank_waits_for_another_one_up_to_a_limit(tmp_path: Path) -> None:
    with job(wait_long, tmp_path) as both:
        assert [said["outcome"] for said in both.hear()] == ["RankLost", "late"]
        assert both.wait() == [0, 0]


def be_as_with_torchrun(rank: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ |= {name: str(value) for name, value in place.items()}


def prepare(rank: int) -> None:
    from accelerate import Accelerator

    be_as_with_torchrun(rank)
    accelerator = Accelerator(cpu=True)
    with the_peer(rank) as peer:
        plain = new_model(seed=rank)
        optimizer = optimizer_of(plain, peer, "accelerate", 16, batch_size_per_step=BATCH_SIZE)
        model, prepared = accelerator.prepare(plain, optimizer)
        for _ in range(4):
            accelerator.backward(loss_of(model, random_batch(rank)))
            prepared.step()
            prepared.zero_grad()
        say(model=type(model).__name__, step=optimizer.global_step, digest=digest_of(plain))


@pytest.mark.long
def test_accelerate_prepares_the_optimizer_of_several_ranks(tmp_path: Path) -> None:
    with job(prepare, tmp_path) as both:
        first, second = both.hear()
        assert first == second
        assert (first["model"], first["step"]) == ("DistributedDataParallel", 2)
        assert both.wait() == [0, 0]


def train_and_evaluate(rank: int) -> None:
    model = DistributedDataParallel(new_model())
    with the_peer(rank) as peer:
        optimizer: Any = manyhands.ProcessGroupOptimizer(
            ScheduleFreeAdamW(model.parameters()), peer=peer, run_id="free", target_batch_size=2 * BATCH_SIZE,
            batch_size_per_step=BATCH_SIZE, averaging=AVERAGING, progress=FAST,
        )  # fmt: skip
        for number in range(3):
            optimizer.train()
            loss_of(model, random_batch(rank, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = digest_of(model)
        optimizer.eval()
        evaluated, mode = digest_of(model), optimizer.param_groups[0]["train_mode"]
        optimizer.train()
        say(trained=trained, evaluated=evaluated, mode=mode, again=digest_of(model), steps=optimizer.num_steps())


@pytest.mark.long
def test_all_ranks_have_the_weights_to_evaluate_and_then_those_to_train(tmp_path: Path) -> None:
    with job(train_and_evaluate, tmp_path) as both:
        first, second = both.hear()
        assert first == second
        assert first["trained"] == first["again"] != first["evaluated"]
        assert first["mode"] is False
        assert first["steps"] == 3
        assert both.wait() == [0, 0]


class Regression(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner = new_model(seed=rank)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.inner, (inputs, labels))}


def collaborate(rank: int, folder: str) -> None:
    import transformers

    from manyhands.training.transformers import CollaborativeCallback

    be_as_with_torchrun(rank)
    inputs, labels = random_batch(7, size=30)
    dataset = [{"inputs": one, "labels": other} for one, other in zip(inputs, labels, strict=True)]
    arguments = transformers.TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=BATCH_SIZE, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], save_steps=2, disable_tqdm=True, average_tokens_across_devices=True,
    )  # fmt: skip
    trainer = transformers.Trainer(Regression(rank), arguments, train_dataset=dataset)
    with the_peer(rank) as peer:
        callback = CollaborativeCallback(trainer, peer=peer, run_id="ranks", target_batch_size=16)
        trainer.add_callback(callback)
        trainer.train()
        seed = trainer.accelerator.dataloader_config.data_seed
        facts = {"step": trainer.state.global_step, "samples": callback.optimizer.statistics.samples_used, "seed": seed}
        say(**facts, digest=digest_of(trainer.model), loss=trainer.state.log_history[-1]["train_loss"])


@pytest.mark.long
def test_a_transformers_trainer_with_several_ranks_is_one_peer(tmp_path: Path) -> None:
    with job(collaborate, tmp_path, str(tmp_path / "output")) as both:
        first, second = both.hear()
        assert {first.pop("loss") < 3, second.pop("loss") < 3} == {True}, "not doubled for two ranks"
        assert first == second
        assert (first["step"], first["samples"]) == (3, 3 * 16)
        assert both.wait() == [0, 0]
        assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["checkpoint-2", "checkpoint-3"]
