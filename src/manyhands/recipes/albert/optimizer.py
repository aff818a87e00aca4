"""The optimizer of the ALBERT recipe: LAMB, with the settings of known collaborative ALBERT runs.

Peers with and without data build it here, so that all have equal settings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manyhands.optim.lamb import Lamb
from manyhands.optim.local_steps import LocalReplica, LocalSteps
from manyhands.optim.optimizer import Optimizer
from manyhands.optim.options import SchedulerMaker, made_scheduler
from manyhands.optim.process_group import ProcessGroupOptimizer
from manyhands.optim.step.replica import Replica
from manyhands.peer import Peer
from manyhands.recipes.albert.adoption import RunRecipe, facts_of
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.model import parameter_groups, warmup_linear
from manyhands.recipes.albert.packages import torch
from manyhands.recipes.albert.settings import TuningSettings
from manyhands.runtime.retrying import until_reached

BETAS = (0.9, 0.999)


def build_optimizer(model: torch.nn.Module, recipe: AlbertRecipe) -> Lamb:
    """LAMB over all parameters of the model; biases and LayerNorm weights do not decay.

    Source: Diskin et al., Distributed Deep Learning in Open Collaborations, arXiv:2106.10207; You et al., Large Batch
    Optimization for Deep Learning, arXiv:1904.00962.
    """
    groups = parameter_groups(model, recipe.weight_decay)
    return Lamb(
        groups,
        lr=recipe.learning_rate,
        betas=BETAS,
        eps=recipe.adam_epsilon,
        clamp_value=recipe.clamp_value,
        debias=True,
    )


def local_steps_of(recipe: AlbertRecipe) -> LocalSteps | None:
    """The local steps between two averages; None if the run has synchronous steps."""
    return LocalSteps() if recipe.local_steps else None


def build_replica(optimizer: torch.optim.Optimizer, run: RunRecipe) -> tuple[Replica, dict[str, str]]:
    """A replica of a run's state for a peer that makes no steps, and the facts of this recipe for the run manifest.

    Args:
        optimizer: from :func:`build_optimizer`.
    """
    local_steps = local_steps_of(run.recipe)
    facts = facts_of(run)
    scheduler = made_scheduler(_scheduler_of(run.recipe), optimizer)
    if local_steps is None:
        return Replica(optimizer, scheduler), facts
    replica = LocalReplica(optimizer, scheduler, local_steps)
    return replica, facts | local_steps.facts(replica.optimizer)


def join_run(
    model: torch.nn.Module, run: RunRecipe, peer: Peer, run_id: str, tuning: TuningSettings, **options: Any
) -> Optimizer:
    """Join or begin a run of this recipe with a model; retries while its peers cannot be reached.

    Args:
        tuning: times and speeds of this peer.
        options: of :class:`manyhands.Optimizer`, such as ``batch_size_per_step`` or ``auxiliary``.
    Raises:
        ManifestMismatch: the run trains something else.
    """

    def join() -> Optimizer:
        inner = build_optimizer(model, run.recipe)
        return Optimizer(inner, peer=peer, run_id=run_id, **_options(run, tuning), **options)

    return until_reached(join, lambda seconds: peer.sleep(seconds), f"joining run {run_id!r}")


def join_run_as_rank(
    model: torch.nn.Module, run: RunRecipe, peer: Peer | None, run_id: str, tuning: TuningSettings, **options: Any
) -> ProcessGroupOptimizer:
    """Like :func:`join_run`, for each rank of a peer that has several; ``peer`` is None on ranks other than 0."""
    return ProcessGroupOptimizer(
        build_optimizer(model, run.recipe), peer=peer, run_id=run_id, **_options(run, tuning), **options
    )


def _options(run: RunRecipe, tuning: TuningSettings) -> dict[str, Any]:
    recipe = run.recipe
    return {
        "target_batch_size": recipe.target_batch_size,
        "max_grad_norm": recipe.max_grad_norm,
        "scheduler": _scheduler_of(recipe),
        "local_steps": local_steps_of(recipe),
        "must_match": facts_of(run),
        "averaging": replace(tuning.averaging(), max_group_size=recipe.max_group_size, aggregate=recipe.aggregate),
        "progress": tuning.progress(),
    }


def _scheduler_of(recipe: AlbertRecipe) -> SchedulerMaker:
    schedule = warmup_linear(recipe.total_steps, recipe.warmup_steps)
    return lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, schedule)
