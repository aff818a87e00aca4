from __future__ import annotations

import pytest
import torch
import transformers

from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.corpus import load_documents
from manyhands.recipes.albert.samples import Samples, make_samples
from manyhands.recipes.albert.tokenizer import train_tokenizer


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
