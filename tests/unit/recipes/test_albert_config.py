from __future__ import annotations

import subprocess
import sys

import pytest

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.recipes.albert.config import AlbertRecipe


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1, for example 8"),
        ({"num_heldout": 0}, "num_heldout is 0"),
        ({"vocab_size": 300}, "vocab_size is 300; it must be at least 512, for example 4096"),
        ({"seq_length": 8}, "seq_length is 8; it must be at least 16, for example 64"),
        ({"hidden_size": 100, "num_attention_heads": 3}, "hidden_size is 100; it must be a multiple of num_att"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; it must be 0 or more"),
        ({"mask_probability": 0.6}, "mask_probability is 0.6; it must be above 0 and at most 0.5"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"total_steps": 5, "warmup_steps": 5}, r"total_steps is 5; it must be above warmup_steps \(5\), for example"),
    ],
)
def test_a_bad_value_is_refused_with_the_rule_and_an_example(values, message):
    with pytest.raises(ConfigError, match=message):
        AlbertRecipe(**values)


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_config_and_corpus_import_no_heavy_package():
    code = (
        "import sys, manyhands.recipes.albert.config, manyhands.recipes.albert.data.corpus\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'numpy') if name in sys.modules])"
    )
    assert run_python(code) == "[]"


IMPORT_WITHOUT_ONE_PACKAGE = """
import importlib, sys
from manyhands.base.errors import MissingExtra
sys.modules[{missing!r}] = None
for module in ("data.tokenizer", "data.samples", "batches", "model"):
    try:
        importlib.import_module("manyhands.recipes.albert." + module)
    except MissingExtra as error:
        print(error)
"""


@pytest.mark.parametrize("missing", ["torch", "tokenizers", pytest.param("transformers", marks=pytest.mark.long)])
def test_a_missing_package_is_named_with_the_extra_to_install(missing):
    lines = run_python(IMPORT_WITHOUT_ONE_PACKAGE.format(missing=missing)).splitlines()
    assert lines == [str(MissingExtra("the ALBERT recipe", "albert"))] * 4
