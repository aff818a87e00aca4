"""``manyhands notebook``, and the notebooks as they are committed."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import nbformat
import pytest

from manyhands.cli.main import run
from manyhands.cli.notebook_command import CURVES, TEMPLATE, filled

EXAMPLES = Path(__file__).parents[3] / "examples" / "notebooks"
NOTEBOOKS = ["join.ipynb", "start_a_run.ipynb", "aws.ipynb"]
ADDRESSES = ["203.0.113.7:31337", "/dns4/x.tcp.ngrok.io/tcp/12345"]
USAGE = 2


def values_in(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """The constants that are set in the code cells."""
    lines = [line for cell in notebook.cells if cell.cell_type == "code" for line in cell.source.splitlines()]
    named = [line.partition(" = ") for line in lines if line.partition(" = ")[0].isupper() and '= "' in line]
    return {name: ast.literal_eval(value.partition("  #")[0]) for name, _, value in named}


def test_all_are_here_valid_and_without_outputs() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir()) == sorted(NOTEBOOKS)
    for name in NOTEBOOKS:
        notebook = nbformat.read(EXAMPLES / name, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert not cell.outputs
                assert cell.execution_count is None
                assert len(cell.source.splitlines()) <= 40


def test_the_example_is_the_template_of_the_command() -> None:
    text = TEMPLATE.read_text()
    assert (EXAMPLES / "join.ipynb").read_text() == text
    assert filled(text, {}) == text
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert len(code) == 2
    assert "".join(code[1]["source"]).count("@param") == 1
    assert text.count(CURVES) == 1


def test_it_fills_the_fields_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["notebook", "--run-id", "my-run", "--initial-peers", *ADDRESSES,
                "--dataset-url", "https://example.org/index.json", "--curves-url", "https://example.org/curves",
                "--install", 'git+https://example.org/"odd"']) == 0  # fmt: skip
    notebook = nbformat.reads(capsys.readouterr().out, as_version=4)
    nbformat.validate(notebook)
    values = values_in(notebook)
    assert values["INITIAL_PEERS"] == " ".join(ADDRESSES)
    assert values["RUN_ID"] == "my-run"
    assert values["DATASET_URL"] == "https://example.org/index.json"
    assert values["REQUIREMENT"] == 'git+https://example.org/"odd"'
    assert any("[here they are](https://example.org/curves)" in cell.source for cell in notebook.cells)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run-id", "r"], "--initial-peers"),
        (["--run-id", "r", "--initial-peers", "nonsense"], "cannot read address 'nonsense'"),
        (["--run-id", "my.run", "--initial-peers", ADDRESSES[0]], "has a '.'"),
        (["--run-id", "r", "--initial-peers", ADDRESSES[0], "--dataset-url", "/home/me/data"], "volunteers can open"),
        (["--run-id", "r", "--initial-peers", ADDRESSES[0], "--curves-url", "https://x) [y](http://z"], "can open"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["notebook", *arguments]) == USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert not captured.out
