"""The optimizer of the ALBERT recipe: LAMB, with the settings that collaborative ALBERT training is known by."""

from __future__ import annotations

from manyhands.optim.lamb import Lamb
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.model import parameter_groups
from manyhands.recipes.albert.packages import torch

BETAS = (0.9, 0.999)
EPS = 1e-6
CLAMP_VALUE = 10_000.0
"""No tensor here is that long: the step of each is as long as the tensor itself, times the learning rate."""
MAX_GRAD_NORM = 1.0


def build_optimizer(model: torch.nn.Module, recipe: AlbertRecipe) -> Lamb:
    """LAMB over all parameters of the model; biases and LayerNorm weights do not decay.

    Source: Diskin et al., Distributed Deep Learning in Open Collaborations, arXiv:2106.10207; You et al., Large Batch
    Optimization for Deep Learning, arXiv:1904.00962.
    """
    groups = parameter_groups(model, recipe.weight_decay)
    return Lamb(groups, lr=recipe.learning_rate, betas=BETAS, eps=EPS, clamp_value=CLAMP_VALUE, debias=True)
