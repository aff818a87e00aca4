from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.data.tokenizer import (
    SPECIAL_TOKENS,
    tokenizer_digest,
    tokenizer_from_json,
    tokenizer_json,
    train_tokenizer,
    wrapped,
)
from manyhands.recipes.albert.data.tokenizer_file import (
    backend_from_json,
    digest_of_json,
    read_tokenizer,
    vocabulary_of,
)

TRAIN_ELSEWHERE = """
import json, sys
from manyhands.recipes.albert.data.tokenizer import tokenizer_digest, train_tokenizer
print(tokenizer_digest(train_tokenizer(json.load(sys.stdin), 600)))
"""


@pytest.mark.long
def test_another_process_trains_the_identical_tokenizer(documents, tokenizer):
    """With another order of hashes, and other threads."""
    is_parallel = os.environ.get("TOKENIZERS_PARALLELISM") != "false"
    other = {"PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": str(not is_parallel).lower()}
    trained = subprocess.run(
        [sys.executable, "-c", TRAIN_ELSEWHERE],
        env=os.environ | other,
        input=json.dumps(documents),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert trained.stdout.strip() == tokenizer_digest(tokenizer)


def test_special_tokens_have_the_ids_of_published_albert_vocabularies(tokenizer, recipe):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id) == (0, 1, 4)
    assert len(tokenizer) == recipe.vocab_size


def test_any_text_survives_lower_cased(tokenizer):
    text = "The Élan of 他来了 👋 is unknown to nobody"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert 1 not in ids
    assert tokenizer.decode(ids).strip() == text.lower()


def test_a_pair_is_wrapped_as_albert_expects(tokenizer):
    pair = tokenizer("the class", "a function")
    tokens = tokenizer.convert_ids_to_tokens(pair["input_ids"])
    assert tokens[0] == "[CLS]"
    assert tokens[-1] == "[SEP]"
    end_of_first = tokens.index("[SEP]")
    assert pair["token_type_ids"] == [0] * (end_of_first + 1) + [1] * (len(tokens) - end_of_first - 1)


def test_the_digest_tells_texts_apart_and_ignores_how_the_tokenizer_was_called(documents, tokenizer, recipe):
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "much longer text"], padding=True, truncation=True, max_length=4)
    assert tokenizer_digest(tokenizer) == before
    assert tokenizer_digest(train_tokenizer(documents[:-1], recipe.vocab_size)) != before


@pytest.mark.parametrize("kind", ["bert", "albert"])
@pytest.mark.parametrize("are_registered", [True, False])
def test_a_file_and_what_transformers_makes_of_it_have_one_digest(kind, are_registered, request):
    folder = request.getfixturevalue(f"{kind}_tokenizer")
    description = json.loads((folder / "tokenizer.json").read_text())
    if not are_registered:
        description["added_tokens"] = []
    here = backend_from_json(json.dumps(description))
    made = tokenizer_from_json(json.dumps(description))
    assert tokenizer_digest(made) == digest_of_json(here.to_str())
    assert tokenizer_digest(tokenizer_from_json(tokenizer_json(made))) == tokenizer_digest(made), "what peers hand out"


def test_the_special_tokens_of_each_kind_have_their_roles(bert_tokenizer, albert_tokenizer):
    for folder, ids in ((bert_tokenizer, (0, 100, 101, 102, 103)), (albert_tokenizer, (0, 1, 2, 3, 4))):
        tokenizer = wrapped(read_tokenizer(folder))
        named = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert (*named, tokenizer.mask_token_id) == ids
        vocabulary = vocabulary_of(tokenizer.backend_tokenizer)
        assert vocabulary.special == frozenset(ids)
        assert vocabulary.size == len(tokenizer)


def test_a_tokenizer_without_the_tokens_that_albert_needs_is_refused(tmp_path, bert_tokenizer):
    text = (bert_tokenizer / "tokenizer.json").read_text().replace("[MASK]", "[MARK]")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be used: it has no \[MASK\]; ALBERT needs it"):
        read_tokenizer(tmp_path)
