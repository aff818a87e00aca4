"""The ALBERT model, its loss, and its parameter groups and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from manyhands.recipes.albert.batches import IGNORED, Batch
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.tokenizer import SPECIAL_TOKENS
from manyhands.recipes.albert.data.tokenizer_file import Vocabulary
from manyhands.recipes.albert.packages import torch, transformers

PAD_ID, UNKNOWN_ID, CLS_ID, SEP_ID, MASK_ID = range(len(SPECIAL_TOKENS))
"""Token ids of ALBERT's published vocabularies, and of those that this recipe trains."""


def build_model(
    recipe: AlbertRecipe, vocab_size: int, vocabulary: Vocabulary | None = None
) -> transformers.AlbertForPreTraining:
    """A fresh model, float32, on the CPU, in training mode.

    Its parameters depend only on ``recipe`` and ``vocab_size``, the length of the tokenizer. Torch's global random
    state is not changed. As in ALBERT v2 there is no dropout, so the loss depends only on the parameters and the batch.

    Args:
        vocabulary: has the ids of the special tokens; by default they are ALBERT's.
    """
    config = transformers.AlbertConfig(
        vocab_size=vocab_size,
        embedding_size=recipe.embedding_size,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=recipe.seq_length,
        classifier_dropout_prob=0.0,
        pad_token_id=PAD_ID if vocabulary is None else vocabulary.pad,
        bos_token_id=CLS_ID if vocabulary is None else vocabulary.cls,
        eos_token_id=SEP_ID if vocabulary is None else vocabulary.sep,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed)
        model = transformers.AlbertForPreTraining(config)
    model.train()
    return model


class Computed(NamedTuple):
    """The outputs of a model for a batch.

    Attributes:
        loss: a scalar.
        token_scores_MV: for each masked token, in the order of the batch, a score for each token of the vocabulary.
        order_scores_B2: for each sample, a score for each of the two sentence orders.
    """

    loss: torch.Tensor
    token_scores_MV: torch.Tensor  # noqa: N815
    order_scores_B2: torch.Tensor  # noqa: N815


def compute(model: transformers.AlbertForPreTraining, batch: Batch) -> Computed:
    """Masked-language-modelling loss plus sentence-order loss, both cross-entropies in nats, and the scores.

    The loss is the mean over the masked tokens of each sample, then over the samples. So the loss of a batch is the
    mean of the losses of its parts weighted by their samples, however many tokens each has. A mean over all masked
    tokens would need weights that are known only after the masking.

    Only masked tokens are scored: with a vocabulary of 30,000, the scores of all tokens would need more memory than
    the model.
    """
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    labels_BS = batch.pop("labels")  # noqa: N806
    order_B = batch.pop("sentence_order_label")  # noqa: N806
    outputs = model.albert(**batch)
    is_masked_BS = labels_BS != IGNORED  # noqa: N806
    scores_MV = model.predictions(outputs.last_hidden_state[is_masked_BS])  # noqa: N806
    losses_M = torch.nn.functional.cross_entropy(  # noqa: N806
        scores_MV.to(model.dtype), labels_BS[is_masked_BS], reduction="none"
    )
    num_masked_B1 = is_masked_BS.sum(1, keepdim=True).clamp(min=1).to(losses_M.dtype)  # noqa: N806
    weights_M = num_masked_B1.reciprocal().expand_as(labels_BS)[is_masked_BS]  # noqa: N806
    order_scores_B2 = model.sop_classifier(outputs.pooler_output)  # noqa: N806
    order_loss = torch.nn.functional.cross_entropy(order_scores_B2.to(model.dtype), order_B)
    loss = (losses_M * weights_M).sum() / len(labels_BS) + order_loss
    return Computed(loss, scores_MV, order_scores_B2)


def loss_of(model: transformers.AlbertForPreTraining, batch: Batch) -> torch.Tensor:
    """The loss of :func:`compute`."""
    return compute(model, batch).loss


def heldout_loss(model: transformers.AlbertForPreTraining, batch: Batch) -> float:
    """:func:`loss_of` in evaluation mode, without gradients; the model's mode is restored."""
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            return loss_of(model, batch).item()
    finally:
        model.train(was_training)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for a torch optimizer: one with ``weight_decay``, and one of biases and LayerNorm weights without.

    Each parameter is in exactly one group, in the order of ``model.named_parameters()``.
    """
    exempt = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name == "bias" or isinstance(module, torch.nn.LayerNorm)
    }
    named = list(model.named_parameters())  # names, for error messages
    return [
        {"params": [(name, p) for name, p in named if id(p) not in exempt], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if id(p) in exempt], "weight_decay": 0.0},
    ]


def warmup_linear(total_steps: int, warmup_steps: int) -> Callable[[int], float]:
    """The factor on the learning rate by global step, for ``torch.optim.lr_scheduler.LambdaLR``.

    It rises linearly over the first ``warmup_steps`` steps, the first of which already moves the parameters, is 1 at
    the last of them, then falls linearly and is 0 from ``total_steps`` on.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (total_steps - step) / (total_steps - warmup_steps))

    return factor
