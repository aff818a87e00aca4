"""What `import manyhands` offers, and what it says where torch is not installed."""

from __future__ import annotations

import importlib
import subprocess
import sys
import traceback
from collections.abc import Iterator
from unittest.mock import patch

import pytest

import manyhands
from manyhands.base import errors
from tests.sweeps import few_of


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_dir_offers_every_public_name_and_each_can_be_had() -> None:
    names = dir(manyhands)
    assert [name for name in names if not name.startswith("_")] == sorted(set(manyhands.__all__) - {"__version__"})
    for name in ("Optimizer", "Checkpoints", "Averager", "Peer", "AveragingConfig", "ProgressConfig", "optim"):
        assert name in names
        assert getattr(manyhands, name) is not None
    assert "Lamb" in dir(manyhands.optim)
    assert manyhands.optim.Lamb.__name__ == "Lamb"
    with pytest.raises(AttributeError, match="has no attribute 'Optimiser'"):
        manyhands.Optimiser  # noqa: B018


def test_all_errors_are_public_names() -> None:
    tree = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert tree <= set(dir(manyhands))
    assert all(getattr(manyhands, name) is getattr(errors, name) for name in tree)


def test_a_coordinator_has_its_configs_and_errors_without_torch() -> None:
    code = (
        "import sys, manyhands\n"
        "manyhands.Peer, manyhands.AveragingConfig(), manyhands.ProgressConfig(), manyhands.RoundAborted\n"
        "manyhands.optim, dir(manyhands), dir(manyhands.optim)\n"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    assert run_python(code).stdout == "[]\n"


@pytest.fixture
def nothing_imported() -> Iterator[None]:
    """As in a new process, but for the libraries that others use: torch takes seconds there."""
    gone = ("manyhands", "safetensors", "transformers", "accelerate")
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
            del sys.modules[name]
        yield


@pytest.mark.long
@pytest.mark.usefixtures("nothing_imported")
def test_a_loop_without_checkpoints_does_not_import_their_packages() -> None:
    importlib.import_module("manyhands").Optimizer  # noqa: B018
    assert "manyhands.optim.optimizer" in sys.modules
    assert "safetensors" not in sys.modules


NEEDS_PACKAGES = {
    "from manyhands import Optimizer": "manyhands.Optimizer",
    "import manyhands; manyhands.Averager": "manyhands.Averager",
    "from manyhands import Checkpoints": "manyhands.Checkpoints",
    "import manyhands; manyhands.ProcessGroupOptimizer": "manyhands.ProcessGroupOptimizer",
    "import manyhands; manyhands.optim.Lamb": "manyhands.optim.Lamb",
}


@pytest.mark.usefixtures("nothing_imported")
@pytest.mark.parametrize("missing", few_of(["torch", "numpy", "safetensors"], 1, pytest.mark.long))
def test_without_torch_one_line_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"numpy": {"manyhands.optim.Lamb"}, "safetensors": set(NEEDS_PACKAGES.values()) - {"manyhands.Checkpoints"}}
    tried = {statement: what for statement, what in NEEDS_PACKAGES.items() if what not in kept.get(missing, set())}
    monkeypatch.setitem(sys.modules, missing, None)
    for statement, what in tried.items():
        with pytest.raises(Exception, match="needs packages") as raised:
            exec(statement, {})
        assert f"{what} needs packages that are not installed; try: pip install '.[torch]' in " in str(raised.value)
        assert "ModuleNotFoundError" not in "".join(traceback.format_exception(raised.value))


def what_to_install(module: str) -> str:
    return f"manyhands.training.{module} needs packages that are not installed; try: pip install '.[albert]' in "


@pytest.mark.usefixtures("nothing_imported")
@pytest.mark.parametrize("module", ["transformers", "accelerate"])
def test_without_their_libraries_adapters_say_what_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Exception, match="needs packages") as raised:
        importlib.import_module(f"manyhands.training.{module}")
    assert what_to_install(module) in str(raised.value)


@pytest.mark.long
def test_without_accelerate_the_adapter_of_transformers_says_what_to_install() -> None:
    ran = run_python("import sys; sys.modules['accelerate'] = None\nimport manyhands.training.transformers")
    assert what_to_install("transformers") in ran.stderr.splitlines()[-1]
