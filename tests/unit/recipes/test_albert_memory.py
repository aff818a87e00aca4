from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from manyhands.base.errors import ConfigError
from manyhands.cli.main import run
from manyhands.recipes.albert import memory
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.memory import LIBRARY_BYTES, THREAD_BYTES, available_bytes, check_memory, num_parameters
from manyhands.recipes.albert.model import build_model


def test_the_parameters_are_those_of_the_model(recipe: AlbertRecipe) -> None:
    model = build_model(recipe, 555)
    assert num_parameters(recipe, 555) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("command", ["train", "fill . [MASK]", "data prepare", "demo"])
def test_a_limit_of_the_shell_is_named_before_torch_is_loaded(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")
    (tmp_path / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (500_000_000, 500_000_000))
    assert run(command.split()) == 2
    errors = capsys.readouterr().err
    assert "a limit of the shell leaves 0.5 GB; raise it before the start: ulimit -v unlimited" in errors
    assert errors.count("\n") == 1


def test_the_address_space_of_the_model_counts_too(recipe: AlbertRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    used = psutil.Process().memory_info().vms + os.cpu_count() * THREAD_BYTES + LIBRARY_BYTES
    large = AlbertRecipe(hidden_size=4096, intermediate_size=16384)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 50)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 1e9, used + 1e9))
    check_memory("run", recipe, 555)
    with pytest.raises(ConfigError, match="PyTorch and the model need about"):
        check_memory("run", large, 30_000)


def test_a_small_model_fits_and_a_huge_one_is_refused_with_what_it_needs(recipe: AlbertRecipe) -> None:
    assert available_bytes() > 0
    check_memory("run", recipe, 555)
    huge = AlbertRecipe(hidden_size=1 << 18, intermediate_size=1 << 20)
    message = r"too little memory for the model of run 'run': its \d+\.\d million parameters need about \d+\.\d GB"
    with pytest.raises(ConfigError, match=message):
        check_memory("run", huge, 30_000)
