from __future__ import annotations

import json
import os
import subprocess
import sys

from manyhands.recipes.albert.tokenizer import (
    SPECIAL_TOKENS,
    tokenizer_digest,
    train_tokenizer,
)

TRAIN_ELSEWHERE = """
import json, sys
from manyhands.recipes.albert.tokenizer import tokenizer_digest, train_tokenizer
print(tokenizer_digest(train_tokenizer(json.load(sys.stdin), 600)))
"""


def test_other_processes_train_the_identical_tokenizer(documents, tokenizer):
    settings = [
        {"PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        {"PYTHONHASHSEED": "2", "RAYON_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "true"},
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN_ELSEWHERE],
            env=os.environ | setting,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for setting in settings
    ]
    digests = [process.communicate(json.dumps(documents))[0].strip() for process in processes]
    assert digests == [tokenizer_digest(tokenizer)] * 2


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
