"""A tokenizer trained on the corpus: identical text gives the identical tokenizer on every machine.

The model is byte-level BPE over lower-cased text. ALBERT's own is SentencePiece unigram, but of the trainers in
``tokenizers`` 0.23, unigram and those with a ``##`` prefix (WordPiece too) gave another vocabulary in each process,
byte-level BPE always the same. It knows every byte, so that no text is unknown to it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.packages import tokenizers, transformers

SPECIAL_TOKENS = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
"""In the order of their ids, which are those of the published ALBERT vocabularies."""

PAD_ID, UNKNOWN_ID, CLS_ID, SEP_ID, MASK_ID = range(len(SPECIAL_TOKENS))

_FILE = "tokenizer.json"


def train_tokenizer(documents: Iterable[Iterable[str]], vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Train a tokenizer; the result depends on the text and ``vocab_size`` alone.

    Args:
        documents: sentences of each document.
        vocab_size: tokens at most, special tokens included; a short text gives fewer.
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
        special_tokens=[("[CLS]", CLS_ID), ("[SEP]", SEP_ID)],
    )
    return _wrapped(backend)


def tokenizer_digest(tokenizer: transformers.PreTrainedTokenizerFast) -> str:
    """SHA-256 of everything that decides how text becomes token ids, in hex; equal digests mean equal ids."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    for per_call in ("padding", "truncation"):
        description.pop(per_call, None)
    return hashlib.sha256(json.dumps(description, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def save_tokenizer(tokenizer: transformers.PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the tokenizer for other processes, readable by ``transformers.AutoTokenizer`` as well.

    Each file appears whole or not at all, ``tokenizer.json`` last, so that a reader at the same time never sees half a
    file and several writers of the same tokenizer do no harm.

    Raises:
        ConfigError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory) as staging:
            tokenizer.save_pretrained(staging)
            for file in sorted(Path(staging).iterdir(), key=lambda file: file.name == _FILE):
                file.replace(directory / file.name)
    except OSError as error:
        raise ConfigError(f"tokenizer directory {directory}: {error.strerror}; name one that can be written") from error


def load_tokenizer(directory: Path) -> transformers.PreTrainedTokenizerFast:
    """Read what :func:`save_tokenizer` wrote.

    Raises:
        ConfigError: there is no tokenizer in the directory, or it cannot be read.
    """
    path = directory / _FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tokenizer file {path}: {error.strerror}; save a tokenizer there first") from error
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises nothing more precise
        raise ConfigError(
            f"tokenizer file {path} holds no tokenizer ({error}); delete it and save a new one"
        ) from error
    if [backend.token_to_id(token) for token in SPECIAL_TOKENS] != list(range(len(SPECIAL_TOKENS))):
        raise ConfigError(f"tokenizer file {path}: ids 0 to 4 must be {', '.join(SPECIAL_TOKENS)}; save a new one")
    return _wrapped(backend)


def _wrapped(backend: tokenizers.Tokenizer) -> transformers.PreTrainedTokenizerFast:
    pad, unknown, cls, sep, mask = SPECIAL_TOKENS
    typed: Callable[..., transformers.PreTrainedTokenizerFast] = transformers.PreTrainedTokenizerFast
    return typed(
        tokenizer_object=backend,
        pad_token=pad,
        unk_token=unknown,
        cls_token=cls,
        sep_token=sep,
        mask_token=mask,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
