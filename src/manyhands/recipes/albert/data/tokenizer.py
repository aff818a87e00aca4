"""A tokenizer trained on the corpus: identical text gives the identical tokenizer on every machine.

The model is byte-level BPE over lower-cased text, so it can encode any text. ALBERT's own is SentencePiece unigram. But
in ``tokenizers`` 0.23 the trainers of unigram and of models with a ``##`` prefix (such as WordPiece) gave another
vocabulary in each process, and only byte-level BPE always gave the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from manyhands.recipes.albert.data.tokenizer_file import backend_from_json, digest_of_json, special_tokens
from manyhands.recipes.albert.packages import tokenizers, transformers

SPECIAL_TOKENS = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens in the order of their ids, which are those of the published ALBERT vocabularies."""


def train_tokenizer(documents: Iterable[Iterable[str]], vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Train a tokenizer; the result depends only on the text and ``vocab_size``.

    Args:
        documents: sentences of each document.
        vocab_size: largest number of tokens, special tokens included; a short text gives fewer.
    """
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Lowercase()]
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((sentence for document in documents for sentence in document), trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return wrapped(backend)


def tokenizer_digest(tokenizer: transformers.PreTrainedTokenizerFast) -> str:
    """SHA-256 of everything that determines the token ids of a text, in hex; equal digests mean equal ids."""
    return digest_of_json(tokenizer_json(tokenizer))


def tokenizer_json(tokenizer: transformers.PreTrainedTokenizerFast) -> str:
    """The tokenizer as JSON, for :func:`tokenizer_from_json`."""
    text: str = tokenizer.backend_tokenizer.to_str()
    return text


def tokenizer_from_json(text: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer from JSON, from another peer or published.

    Raises:
        ValueError: it cannot be read, or ALBERT cannot use it.
    """
    return wrapped(backend_from_json(text))


def wrapped(backend: tokenizers.Tokenizer) -> transformers.PreTrainedTokenizerFast:
    """Wrap a tokenizer for transformers, which must be told the roles of the special tokens."""
    typed: Callable[..., transformers.PreTrainedTokenizerFast] = transformers.PreTrainedTokenizerFast
    return typed(
        tokenizer_object=backend,
        **special_tokens(backend),
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
