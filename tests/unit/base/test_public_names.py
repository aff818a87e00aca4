"""What `import manyhands` offers, and what it says where torch is not installed."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import manyhands
from manyhands.base import errors


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


def test_a_loop_without_checkpoints_does_not_import_their_packages() -> None:
    code = "import sys, manyhands; manyhands.Optimizer; print('safetensors' in sys.modules)"
    assert run_python(code).stdout == "False\n"


NEEDS_PACKAGES = {
    "from manyhands import Optimizer": "manyhands.Optimizer",
    "import manyhands; manyhands.Averager": "manyhands.Averager",
    "from manyhands import Checkpoints": "manyhands.Checkpoints",
    "import manyhands; manyhands.ProcessGroupOptimizer": "manyhands.ProcessGroupOptimizer",
    "import manyhands; manyhands.optim.Lamb": "manyhands.optim.Lamb",
}


@pytest.mark.parametrize("missing", ["torch", "numpy", "safetensors"])
def test_without_torch_one_line_says_what_to_install(missing: str) -> None:
    kept = {"numpy": {"manyhands.optim.Lamb"}, "safetensors": set(NEEDS_PACKAGES.values()) - {"manyhands.Checkpoints"}}
    tried = {statement: what for statement, what in NEEDS_PACKAGES.items() if what not in kept.get(missing, set())}
    code = (
        "import sys, traceback\n"
        f"sys.modules[{missing!r}] = None\n"
        f"for statement in {list(tried)!r}:\n"
        "    try:\n"
        "        exec(statement)\n"
        "    except Exception:\n"
        "        print(repr(traceback.format_exc()))\n"
    )
    said = [ast.literal_eval(line) for line in run_python(code).stdout.splitlines()]
    assert len(said) == len(tried)
    for what, text in zip(tried.values(), said, strict=True):
        assert f"{what} needs packages that are not installed; try: pip install '.[torch]' in " in text.splitlines()[-1]
        assert "ModuleNotFoundError" not in text


@pytest.mark.parametrize(
    ("module", "missing"),
    [("transformers", "transformers"), ("transformers", "accelerate"), ("accelerate", "accelerate")],
)
def test_without_their_libraries_adapters_say_what_to_install(module: str, missing: str) -> None:
    ran = run_python(f"import sys; sys.modules[{missing!r}] = None\nimport manyhands.training.{module}")
    says = f"manyhands.training.{module} needs packages that are not installed; try: pip install '.[albert]' in "
    assert says in ran.stderr.splitlines()[-1]
