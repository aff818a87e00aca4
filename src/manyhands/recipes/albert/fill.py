"""Fills the masks in a text with a trained model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from manyhands.base.errors import ConfigError
from manyhands.base.text import reason_of
from manyhands.recipes.albert.packages import torch, transformers

NUM_GUESSES = 5


class TokenGuess(NamedTuple):
    """A token and its probability."""

    token: str
    probability: float


class FilledText(NamedTuple):
    """A text with the best guess in each mask, and the best guesses for each mask in order."""

    text: str
    guesses: list[list[TokenGuess]]


class MaskFiller:
    """A trained model that guesses masked tokens.

    Args:
        path: folder of a checkpoint, as ``save_pretrained`` writes it.
    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._model, self._tokenizer = _load(path)

    def fill(self, text: str) -> FilledText:
        """Guess the masked tokens of a text.

        Args:
            text: contains the tokenizer's mask token.
        Raises:
            ConfigError: the text is too long for the model.
        """
        model = self._model
        tokenizer = self._tokenizer
        encoded = tokenizer(text, return_tensors="pt")
        length = encoded["input_ids"].shape[1]
        longest = model.config.max_position_embeddings
        if length > longest:
            raise ConfigError(
                f"the text has {length} tokens, and this model reads {longest} at most; give a shorter one"
            )
        with torch.inference_mode():
            logits_BSV = model(**encoded).prediction_logits  # noqa: N806
        ids = encoded["input_ids"][0]
        places = (ids == tokenizer.mask_token_id).nonzero()[:, 0].tolist()
        probabilities_MV = logits_BSV[0, places].float().softmax(-1)  # noqa: N806
        probabilities_MV[:, tokenizer.all_special_ids] = 0.0
        best = torch.topk(probabilities_MV, NUM_GUESSES)
        guesses = [
            [TokenGuess(_shown(tokenizer, token), value) for token, value in zip(tokens, values, strict=True)]
            for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        parts = text.split(tokenizer.mask_token)
        filled = parts[0] + "".join(
            f"{of_mask[0].token}{part}" for of_mask, part in zip(guesses, parts[1:], strict=True)
        )
        return FilledText(filled, guesses)


def _shown(tokenizer: transformers.PreTrainedTokenizerBase, token: int) -> str:
    text = str(tokenizer.decode([token]))
    stripped = text.strip()
    return stripped if stripped and stripped.isprintable() else repr(text)  # the tokenizer may come from strangers


def _load(path: Path) -> tuple[transformers.AlbertForPreTraining, transformers.PreTrainedTokenizerBase]:
    try:
        kind = transformers.AutoConfig.from_pretrained(path, local_files_only=True).model_type
        if kind != "albert":
            raise ConfigError(f"{path} holds a model of type {kind!r}; this command needs one of type 'albert'")
        model = transformers.AlbertForPreTraining.from_pretrained(os.fspath(path), local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(os.fspath(path), local_files_only=True)
    except ConfigError:
        raise
    except Exception as error:
        reason = reason_of(error)
        raise ConfigError(f"checkpoint {path} cannot be loaded: {reason}") from error
    model.train(False)
    return model, tokenizer
