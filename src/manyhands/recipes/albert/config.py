"""The settings of the ALBERT recipe. Imports no torch: the command line is generated from here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from manyhands.averaging.config import CLIP, check_aggregate
from manyhands.base.errors import ConfigError

NUM_PAIR_TOKENS = 3
"""Special tokens around a pair of segments: ``[CLS] A [SEP] B [SEP]``."""

OWN_SETTINGS = ("text", "dataset_path", "dataset_url", "cache_dir", "cache_mb", "tokenizer", "batch_size", "seed")
"""Settings that each peer of a run may choose itself."""


@dataclass(frozen=True, kw_only=True)
class AlbertRecipe:
    """A small ALBERT, trained by masked language modelling and sentence-order prediction.

    All peers of a run need the same values, except for :data:`OWN_SETTINGS`.

    Raises:
        ConfigError: a value is out of bounds.
    Source: Lan et al., ALBERT, arXiv:1909.11942. Small by default: about 1.5 million parameters.
    """

    target_batch_size: int = 256
    """Samples of one global step, from all peers together. Use 4096 for long runs with many peers."""

    text: tuple[Path, ...] = ()
    """UTF-8 text files to train on; by default, where a run is begun, the English documentation of Python."""

    dataset_path: Path | None = None
    """Folder with samples of manyhands data prepare; by default data/albert_tokenized_wikitext, if it
    exists and the run trains on it."""

    dataset_url: tuple[str, ...] = ()
    """Addresses of the index.json of shards, fetched while training, or of an archive; several are mirrors."""

    cache_dir: Path | None = None
    """Cache folder for downloaded data; by default ~/.cache/manyhands/data."""

    cache_mb: int = 4_000
    """Largest size of the cache in megabytes. Two shards are always kept."""

    tokenizer: Path | None = None
    """Folder with the tokenizer that the samples were made with; by default the folder tokenizer beside them."""

    vocab_size: int = 4096
    """Most tokens in the vocabulary; a short text gives fewer."""

    seq_length: int = 64
    """Tokens in one sample, special tokens included."""

    embedding_size: int = 128
    """Width of the token embeddings."""

    hidden_size: int = 256
    """Width of the hidden layers."""

    num_hidden_layers: int = 4
    """Number of times that the one shared layer is applied."""

    num_attention_heads: int = 4
    """Attention heads; they divide hidden_size."""

    intermediate_size: int = 1024
    """Width of the feed-forward part of a layer."""

    batch_size: int = 8
    """Samples in one local step of this peer."""

    learning_rate: float = 0.01
    """Learning rate of LAMB after the warm-up. Use 0.00176 for long runs with a target batch size of 4096."""

    weight_decay: float = 0.01
    """Decoupled weight decay; biases and LayerNorm weights have none."""

    adam_epsilon: float = 1e-6
    """Epsilon of Adam, added to the root of the second moment."""

    clamp_value: float = 10_000.0
    """Upper bound of a tensor's norm in the trust ratio of LAMB."""

    max_grad_norm: float = 1.0
    """Norm to which the averaged gradient is clipped, over all parameters; with local steps that of each batch."""

    warmup_steps: int = 6
    """Global steps until the learning rate is reached."""

    total_steps: int = 10_000
    """Global steps until the learning rate has fallen to zero."""

    local_steps: bool = False
    """For slow links: each peer trains by itself, and all average once in target_batch_size samples of the run."""

    max_group_size: int = 256
    """A run with more peers than this averages in a grid of groups."""

    aggregate: str = CLIP
    """How the peers' gradients become one: clip, mean, or centered_clip, for runs of strangers."""

    mask_probability: float = 0.15
    """Share of the tokens of each sample that are masked, but at least one token."""

    num_heldout: int = 64
    """Samples kept out of training, on which the held-out loss is measured."""

    seed: int = 0
    """Seed of the initial parameters and, with the peer id, of the order of the data; each peer may have its own."""

    @property
    def shards_url(self) -> tuple[str, ...]:
        """The addresses of shards to fetch while training; none if the samples are in a folder, as an archive's are."""
        return self.dataset_url if self.dataset_path is None else ()

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_rates()

    def _check_sizes(self) -> None:
        _at_least("vocab_size", self.vocab_size, 512)  # the 256 bytes, the special tokens and some words
        _at_least("seq_length", self.seq_length, 16)
        _at_least("cache_mb", self.cache_mb, 1)
        _at_least("max_group_size", self.max_group_size, 2)
        check_aggregate(self.aggregate)
        for name in ("embedding_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "batch_size", "num_heldout", "target_batch_size"):  # fmt: skip
            _at_least(name, getattr(self, name), 1)
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size is {self.hidden_size}; it must be a multiple of num_attention_heads, "
                f"for example {self.num_attention_heads * 64}"
            )

    def _check_rates(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate is {self.learning_rate}; it must be above 0 and finite, for example 0.01")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay is {self.weight_decay}; it must be 0 or more and finite, for example 0.01")
        for name in ("adam_epsilon", "clamp_value", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                default = AlbertRecipe.__dataclass_fields__[name].default
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0, for example {default}")
        if not 0 < self.mask_probability <= 0.5:
            raise ConfigError(
                f"mask_probability is {self.mask_probability}; it must be above 0 and at most 0.5, for example 0.15"
            )
        _at_least("warmup_steps", self.warmup_steps, 0)
        if self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"total_steps is {self.total_steps}; it must be above warmup_steps ({self.warmup_steps}), "
                f"for example {self.warmup_steps + 1000}"
            )


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        default = AlbertRecipe.__dataclass_fields__[name].default
        raise ConfigError(f"{name} is {value}; it must be at least {minimum}, for example {default}")
