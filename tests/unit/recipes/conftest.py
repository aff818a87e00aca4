from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.corpus import load_documents
from manyhands.recipes.albert.data.samples import Samples, make_samples
from manyhands.recipes.albert.data.tokenizer import SPECIAL_TOKENS, train_tokenizer
from tests.unit.recipes.texts import WORDS


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models: more threads only get in each other's way
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def python_documents() -> list[list[str]]:
    return load_documents()


@pytest.fixture(scope="session")
def documents(python_documents: list[list[str]]) -> list[list[str]]:
    return python_documents[:20]


@pytest.fixture(scope="session")
def recipe() -> AlbertRecipe:
    return AlbertRecipe(
        vocab_size=600,
        seq_length=32,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        batch_size=6,
        num_heldout=40,
    )


@pytest.fixture(scope="session")
def tokenizer(documents: list[list[str]], recipe: AlbertRecipe) -> transformers.PreTrainedTokenizerFast:
    return train_tokenizer(documents, recipe.vocab_size)


@pytest.fixture(scope="session")
def samples(
    documents: list[list[str]], tokenizer: transformers.PreTrainedTokenizerFast, recipe: AlbertRecipe
) -> Samples:
    return make_samples(documents, tokenizer, recipe)


@pytest.fixture(scope="session")
def bert_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer as BERT's is: WordPiece, and special tokens with other names and ids than ALBERT's."""
    words = ["[PAD]", *(f"[unused{number}]" for number in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [prefix + chr(letter) for letter in range(33, 127) for prefix in ("", "##")]
    words += [f"{syllable}{letter}" for syllable in ("th", "##er", "##in", "mod", "pe", "ha") for letter in "abcdefghi"]
    words += [f"[unused{number}]" for number in range(99, 300)]
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 102), ("[CLS]", 101))
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    folder = tmp_path_factory.mktemp("bert")
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def albert_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer as the published ones of ALBERT are: SentencePiece unigram, [MASK] takes a space."""
    pieces = [(token, 0.0) for token in SPECIAL_TOKENS]
    pieces += [(prefix + chr(letter), -9.0) for letter in range(33, 127) for prefix in ("", "\u2581")]
    pieces += [(f"\u2581{word}", -3.0 - rank / 7) for rank, word in enumerate(WORDS.split())]
    pieces += [(f"\u2581{word[:2]}", -6.0 - rank / 7) for rank, word in enumerate(WORDS.split())]
    pieces += [(f"{number:02}", -7.0) for number in range(100)] + [(f"<extra{number}>", -30.0) for number in range(200)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(list(dict(pieces).items()), unk_id=1))
    normalizers = tokenizers.normalizers
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Metaspace()]
    )
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens([*SPECIAL_TOKENS[:4], tokenizers.AddedToken("[MASK]", lstrip=True, special=True)])
    backend.enable_truncation(512)  # as their files have it
    folder = tmp_path_factory.mktemp("albert")
    backend.save(str(folder / "tokenizer.json"))
    return folder
