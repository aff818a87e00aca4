"""Jobs of two ranks over which FSDP2 has split the model. Each job is one peer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import manyhands
from manyhands.optim.step import shards
from tests.process.jobs import NUM_RANKS, job, say
from tests.process.test_ranks import (
    BATCH_SIZE,
    NUM_STEPS,
    SETTINGS,
    adamw,
    loss_of,
    optimizer_of,
    random_batch,
    schedule_of,
    step_until,
    the_peer,
    values_of,
)  # fmt: skip
from tests.sweeps import few_of
from tests.trainers import AVERAGING, FAST, Trainer, new_model, peers

pytestmark = [pytest.mark.process, pytest.mark.long]

SHARES = [3, 5]
"""Sizes of the batches in a step: of each rank of the job, and of the peer that has one process."""
WHOLE = NUM_RANKS * SHARES[0] + SHARES[1]


def split(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Split a model: one parameter along its second dimension, and others into unequal parts."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    options |= {"shard_placement_fn": lambda parameter: Shard(1) if parameter.shape == (3, 8) else None}
    fully_shard(model[0], mesh=mesh, **options)  # type: ignore[index]
    fully_shard(model, mesh=mesh, **options)
    return model


def whole_values(model: torch.nn.Module) -> list[float]:
    """All values of the model; all ranks must call this."""
    return torch.cat([parameter.full_tensor().reshape(-1) for parameter in model.parameters()]).tolist()  # type: ignore[operator]


# the steps of one process


def batch_of(step: int, owner: int, share: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_batch(step, owner, size=share)


def train_a_share(rank: int, *initial_peers: str) -> None:
    model = split(new_model())
    with the_peer(rank, *initial_peers) as peer:
        optimizer = optimizer_of(model, peer, "equal", WHOLE, scheduler=schedule_of, **SETTINGS)
        step_until(optimizer, lambda: optimizer.num_peers == 2)
        for step in range(NUM_STEPS):
            for part in torch.split(torch.arange(SHARES[0]), 2):  # two micro-batches of unlike sizes
                inputs, targets = batch_of(step, rank, SHARES[0])
                loss_of(model, (inputs[part], targets[part])).backward()
                optimizer.step(batch_size=len(part))
                optimizer.zero_grad()
            step_until(optimizer, lambda step=step: optimizer.global_step > step)  # type: ignore[misc]
        digest = optimizer.state_digest()
        counts = optimizer.statistics
        say(values=whole_values(model), digest=digest, used=counts.samples_used, states=counts.states_loaded)
        optimizer.wait_for_others()


def test_peers_with_and_without_shards_make_the_steps_of_one_process(tmp_path: Path) -> None:
    alone = new_model()
    plain = adamw(alone.parameters())
    schedule = schedule_of(plain)
    for step in range(NUM_STEPS):
        batches = [batch_of(step, owner, share) for owner, share in enumerate([SHARES[0], *SHARES])]
        inputs, targets = zip(*batches, strict=True)
        loss_of(alone, (torch.cat(inputs), torch.cat(targets))).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), SETTINGS["max_grad_norm"])
        plain.step()
        plain.zero_grad()
        schedule.step()

    with peers(1) as (peer,):

        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            return adamw(model.parameters())

        settings = {name: value for name, value in SETTINGS.items() if name == "max_grad_norm"}
        trainer = Trainer(peer, "equal", WHOLE, make=make, scheduler=schedule_of, **settings)
        with job(train_a_share, tmp_path, *peer.addresses) as both:
            for step in range(NUM_STEPS):
                while trainer.optimizer.num_peers < 2:
                    trainer.optimizer.step(batch_size=0)
                    threading.Event().wait(0.01)
                loss_of(trainer.model, batch_of(step, 2, SHARES[1])).backward()
                trainer.optimizer.step(batch_size=SHARES[1])
                trainer.optimizer.zero_grad()
                while trainer.optimizer.global_step == step:
                    trainer.optimizer.step(batch_size=0)
                    threading.Event().wait(0.01)
            said = both.hear()
            for ours in said:
                torch.testing.assert_close(ours["values"], values_of(alone), rtol=1e-5, atol=1e-5)
                assert ours["values"] == values_of(trainer.model), "both peers step on the host, with the same values"
                assert ours["used"] == NUM_STEPS * NUM_RANKS * SHARES[0], "of all ranks"
                assert ours["digest"] == trainer.optimizer.state_digest()
            trainer.optimizer.wait_for_others()
            assert both.wait() == [0, 0]


# a newcomer, and the end


def join_late(rank: int, *initial_peers: str) -> None:
    model = split(new_model(seed=1))
    with the_peer(rank, *initial_peers) as peer:
        optimizer = optimizer_of(model, peer, "late", 2 * BATCH_SIZE, batch_size_per_step=BATCH_SIZE)
        states, step = optimizer.statistics.states_loaded, optimizer.global_step
        say(values=whole_values(model), states=states, step=step)
        train(model, optimizer, rank)


def train(model: torch.nn.Module, optimizer: manyhands.ProcessGroupOptimizer, rank: int) -> None:
    """Train until the process is killed."""
    while True:
        loss_of(model, random_batch(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step=optimizer.global_step)


@pytest.mark.parametrize("victim", few_of(range(NUM_RANKS)))
def test_a_newcomer_with_shards_loads_the_state_and_when_a_rank_is_killed_its_peer_ends_and_the_others_go_on(
    tmp_path: Path, victim: int
) -> None:
    with peers(1) as (peer,):
        trainer = Trainer(peer, "late", 2 * BATCH_SIZE, make=lambda model: adamw(model.parameters()))
        trainer.train_until(3)
        with job(join_late, tmp_path, *peer.addresses) as both:
            expected = {"values": values_of(trainer.model), "states": 1, "step": trainer.optimizer.global_step}
            assert both.hear() == [expected] * 2
            met = trainer.optimizer.statistics.rounds_committed
            while trainer.optimizer.statistics.rounds_committed < met + 2:
                trainer.train_batch()
                both.hear()
            both.ranks[victim].kill()
            assert both.ranks[1 - victim].wait() != 0
            last = both.ranks[1 - victim].output.strip().splitlines()[-1]
            assert "RankLost: " in last or "Connection" in last, "our error, or that of FSDP2's own messages"
            trainer.train_until(trainer.optimizer.global_step + 2)


# other options


def use_options(rank: int, folder: str) -> None:
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with the_peer(rank) as peer:
        # a loss that overflows on one rank
        model = split(new_model())
        optimizer = optimizer_of(model, peer, "scaled", 16, batch_size_per_step=BATCH_SIZE)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for scale in (1.0, 1e38 if rank else 1.0, 1.0):
            scaler.scale(loss_of(model, random_batch(rank)) * scale).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        counts, trained = optimizer.statistics, whole_values(model)
        say(scale=scaler.get_scale(), used=counts.samples_used, dropped=counts.samples_dropped, values=trained)

        # a gradient that is not finite on one rank
        (loss_of(model, random_batch(rank)) * (float("inf") if rank else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        say(dropped=optimizer.statistics.samples_dropped, waiting=optimizer.samples_accumulated)

        # a checkpoint
        state = {"model": get_model_state_dict(model, options=whole), "optimizer": optimizer.state_dict()}
        if rank == 0:
            torch.save(state, Path(folder) / "checkpoint")
        optimizer.close()
        model = split(new_model(seed=5))
        optimizer = optimizer_of(model, peer, "loaded", 16)
        state = torch.load(Path(folder) / "checkpoint") if rank == 0 else {"model": {}, "optimizer": {}}
        set_model_state_dict(
            model, state["model"], options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        optimizer.load_state_dict(state["optimizer"])
        say(values=whole_values(model), step=optimizer.global_step)

        # a step after a forward pass that has left the outer module whole
        inputs, _ = random_batch(9)
        loss_of(model, random_batch(rank)).backward()
        with torch.no_grad():
            model(inputs)
        optimizer.step(batch_size=8)
        values = whole_values(model)
        with torch.no_grad():
            outputs = model(inputs).tolist()
        say(values=values, step=optimizer.global_step, outputs=outputs)
        optimizer.close()

        # in the background, with a model in half precision
        model = split(new_model().bfloat16())
        optimizer = optimizer_of(model, peer, "delayed", 16, delay="gradients")
        while optimizer.global_step < 3:
            inputs, targets = random_batch(rank)
            loss_of(model, (inputs.bfloat16(), targets.bfloat16())).backward()
            optimizer.step(batch_size=BATCH_SIZE)
            optimizer.zero_grad()
        optimizer.settle()
        counts = optimizer.statistics
        assert counts.samples_computed == counts.samples_used + optimizer.samples_accumulated
        say(values=whole_values(model), computed=counts.samples_computed, step=optimizer.global_step)
        optimizer.close()


def test_shards_work_with_scaled_losses_checkpoints_half_precision_and_steps_in_the_background(tmp_path: Path) -> None:
    with job(use_options, tmp_path, str(tmp_path)) as both:
        scaled = both.hear()
        values = scaled[0]["values"]
        assert scaled == [{"scale": 512.0, "used": 16, "dropped": 8, "values": values}] * 2
        assert both.hear() == [{"dropped": 16, "waiting": 0}] * 2
        assert both.hear() == [{"values": values, "step": 1}] * 2
        stepped, same = both.hear()
        assert stepped == same
        assert stepped["step"] == 2
        assert stepped["values"] != values
        model = new_model()
        torch.nn.utils.vector_to_parameters(torch.tensor(stepped["values"]), model.parameters())
        torch.testing.assert_close(stepped["outputs"], model(random_batch(9)[0]).tolist())
        first, second = both.hear()
        assert first == second
        assert first["step"] >= 3
        assert both.wait() == [0, 0]


# what does not fit


def be_refused(rank: int) -> None:
    logging.basicConfig(level="WARNING")
    said = []

    def refused(function: Callable[[], object]) -> None:
        try:
            function()
        except manyhands.ManyhandsError as error:
            said.append(f"{type(error).__name__}: {error}".splitlines()[0])

    with the_peer(rank) as peer:
        model = split(new_model())
        used = adamw(model.parameters())
        loss_of(model, random_batch(0)).backward()
        used.step()
        used.zero_grad()

        def of(model: torch.nn.Module, /, **options: Any) -> manyhands.ProcessGroupOptimizer:
            options |= {"batch_size_per_step": BATCH_SIZE, "averaging": AVERAGING, "progress": FAST}
            return manyhands.ProcessGroupOptimizer(
                adamw(model.parameters()), peer=peer, run_id="shards", target_batch_size=8, **options
            )

        refused(lambda: manyhands.ProcessGroupOptimizer(used, peer=peer, run_id="shards", target_batch_size=8))
        hybrid = init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("replicate", "shard"))
        part = new_model()
        fully_shard(part[0], mesh=init_device_mesh("cpu", (NUM_RANKS,)))  # type: ignore[index]
        refused(lambda: of(part))
        refused(lambda: of(fully_shard(new_model(), mesh=hybrid)))
        refused(lambda: of(model, local_steps=manyhands.LocalSteps()))
        refused(lambda: of(model, offload=False))
        refused(lambda: of(model, model=model))
        optimizer = of(model)
        refused(lambda: of(model))
        if rank == 0:
            refused(lambda: manyhands.Optimizer(used, peer=peer, run_id="shards", target_batch_size=8))
            refused(lambda: manyhands.Checkpoints("unused", optimizer.leader, model))
            with torch.no_grad():
                next(model.parameters()).mul_(1.0)
            refused(optimizer.leader.state_dict)
        for _ in range(3):
            loss_of(model, random_batch(rank)).backward()
            optimizer.step()
        say(refused=said, step=optimizer.global_step)


def test_options_that_do_not_work_with_shards_are_refused_with_what_to_write(tmp_path: Path) -> None:
    with job(be_refused, tmp_path) as both:
        for rank, said in enumerate(both.hear()):
            failed = "ConfigError: rank 0 failed: " if rank else "ConfigError: "
            expected = [
                "ConfigError: on rank 0: the optimizer has a state, which is split over the ranks",
                "ConfigError: on rank 0: parameter 2 is whole on each rank, while other parameters are split",
                "ConfigError: on rank 0: parameter 0 is on a mesh of 2 dimensions (HSDP, ",
                f"{failed}local_steps does not work with FSDP2",
                f"{failed}offload=False does not work with FSDP2",
                f"{failed}model does not work with FSDP2",
                f"{failed}parameter 0 is trained in run 'shards' by another Optimizer already",
                "ConfigError: parameter 0 is a DTensor; an ordinary tensor is needed, whole on this machine; with",
                "ConfigError: the model is split over the ranks (FSDP2), and Checkpoints saves on rank 0 alone",
                "ConfigError: FSDP2 has split the parameters over the ranks, so all ranks must take part: call",
            ][: 7 if rank else None]
            assert [text[: len(start)] for text, start in zip(said["refused"], expected, strict=True)] == expected
            assert said["step"] == 3, "and what is right goes on"
        assert both.wait() == [0, 0]
        assert both.ranks[0].output.count("The gradients of earlier batches are still in .grad") == 1


def run_out_of_memory_within_a_gather(rank: int) -> None:
    with the_peer(rank) as peer:
        model = split(new_model())
        optimizer = optimizer_of(model, peer, "memory", NUM_RANKS * BATCH_SIZE, **SETTINGS)
        if rank == 0:
            gathered = shards.Shards._to_rank_0  # noqa: SLF001 (a failure in the midst of a gather)

            def fail(self: shards.Shards, index: int, *rest: Any) -> None:
                if index == 1:
                    raise MemoryError("no room for the second parameter")
                gathered(self, index, *rest)

            shards.Shards._to_rank_0 = fail  # type: ignore[method-assign]  # noqa: SLF001
        errors = []
        for _ in range(2):
            try:
                loss_of(model, random_batch(rank)).backward()
                optimizer.step(batch_size=BATCH_SIZE)
            except (MemoryError, manyhands.ManyhandsError) as error:
                errors.append(type(error).__name__)
        say(errors=errors)


def test_a_rank_that_fails_within_a_gather_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    with job(run_out_of_memory_within_a_gather, tmp_path) as both:
        assert [said["errors"] for said in both.hear()] == [["MemoryError", "RankLost"], ["RankLost", "RankLost"]]
