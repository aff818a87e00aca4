"""One trainer on several GPUs: the processes that ``torchrun`` starts are together one peer.

Rank 0 is the peer, and does all that a trainer of one process does. The other ranks compute gradients on samples of
their own, and make the same steps as rank 0.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from manyhands.base.text import counted
from manyhands.recipes.albert.adoption import RunRecipe
from manyhands.recipes.albert.batches import Batch, Batches
from manyhands.recipes.albert.compute import SMALLER_BATCH, Compute
from manyhands.recipes.albert.data.tokenizer import tokenizer_from_json
from manyhands.recipes.albert.model import build_model, loss_of
from manyhands.recipes.albert.optimizer import join_run_as_rank
from manyhands.recipes.albert.packages import torch, transformers
from manyhands.recipes.albert.settings import TrainingSettings
from manyhands.recipes.albert.source import position_in, samples_for


@dataclass(frozen=True)
class Task:
    """The values that rank 0 sends to the other ranks once, so that they build the same model and samples.

    Attributes:
        tokenizer: as JSON.
        order: seeds the order of the samples; each rank has its own.
        state_path: the peer's folder.
    """

    run_id: str
    run: RunRecipe
    tokenizer: str
    order: str
    state_path: Path | None


class LossModule(torch.nn.Module):
    """Returns the loss of a batch from ``forward``, as ``DistributedDataParallel`` requires."""

    def __init__(self, model: transformers.AlbertForPreTraining) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        return loss_of(self.model, batch)


def begin(task: Task | None) -> Task:
    """Join the process group; ``task`` is given on rank 0 and returned on all ranks."""
    distributed.init_process_group()
    tasks = [task]
    distributed.broadcast_object_list(tasks, src=0)
    assert tasks[0] is not None
    return tasks[0]


def together(loss_module: LossModule, device: torch.device) -> torch.nn.Module:
    """Wrap the module so that gradients are averaged over the ranks; all ranks get the parameters of rank 0."""
    return DistributedDataParallel(loss_module, device_ids=[device.index] if device.type == "cuda" else None)


def compute_along(settings: TrainingSettings) -> None:
    """Run a rank other than 0, until rank 0 ends."""
    _compute_to_the_end(settings)
    gc.collect()  # so that no object holds the process group any more
    distributed.destroy_process_group()  # a thread of gloo that outlives the interpreter aborts the process


def _compute_to_the_end(settings: TrainingSettings) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    compute = Compute(settings.device, settings.precision)
    task = begin(None)
    recipe = task.run.recipe
    rank = distributed.get_rank()
    order = f"{task.order} rank {rank}"
    position = position_in(task.state_path, rank)
    samples = samples_for(task.run_id, recipe, tokenizer_from_json(task.tokenizer), order, position)
    model = compute.on_device(build_model(recipe, task.run.vocab_size, samples.vocabulary))
    num_batches = settings.gradient_accumulation_steps
    optimizer = join_run_as_rank(
        model, task.run, None, task.run_id, settings.tuning,
        batch_size_per_step=recipe.batch_size * num_batches, delay=settings.delay,
    )  # fmt: skip
    loss_module = together(LossModule(model), compute.device)
    batches = Batches(samples, recipe, order)
    while settings.max_steps is None or optimizer.global_step < settings.max_steps:
        for _ in range(num_batches):
            with compute.fitting(f"a batch of {counted(recipe.batch_size, 'sample')}", SMALLER_BATCH):
                with compute.autocast():
                    loss = loss_module(next(batches))
                compute.scaler.scale(loss / num_batches).backward()
        compute.scaler.step(optimizer)
        compute.scaler.update()
        optimizer.zero_grad()
    optimizer.wait_for_others(settings.linger_s)  # a collective call: rank 0 makes it too
    optimizer.state_digest()
