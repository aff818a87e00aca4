"""``manyhands notebook``, and the notebooks as they are committed."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import nbformat
import pytest

from manyhands.base.address import Address
from manyhands.base.ticket import Ticket
from manyhands.cli.main import run
from manyhands.cli.notebook_command import CURVES, TEMPLATE, filled
from manyhands.version import __version__

EXAMPLES = Path(__file__).parents[3] / "examples" / "notebooks"
NOTEBOOKS = ["join.ipynb", "start_a_run.ipynb", "aws.ipynb"]
ADDRESSES = ["93.184.216.34:31337", "/dns4/x.tcp.ngrok.io/tcp/12345"]
BEGIN = ["notebook", "--run-id", "r", "--initial-peers", ADDRESSES[0]]
USAGE = 2


def values_in(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """The constants that are set in the code cells."""
    lines = [line for cell in notebook.cells if cell.cell_type == "code" for line in cell.source.splitlines()]
    named = [line.partition(" = ") for line in lines if line.partition(" = ")[0].isupper() and '= "' in line]
    return {name: ast.literal_eval(value.partition("  #")[0]) for name, _, value in named}


def test_all_notebooks_are_valid_and_without_outputs() -> None:
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


def test_the_notebook_command_fills_the_fields_in(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.fixture
def is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this package came from PyPI."""
    monkeypatch.setattr("manyhands.cli.options.own_checkout", lambda: None)


@pytest.mark.parametrize(
    ("urls", "extra"),
    [
        ([], "data"),  # a volunteer may fill the field in
        (["https://example.org/index.json"], "data"),
        (["https://example.org/index.json", "s3://bucket/index.json"], "s3"),
    ],
)
def test_the_notebook_installs_this_version_with_the_extra_for_the_data(
    urls: list[str], extra: str, is_installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*BEGIN, *(["--dataset-url", *urls] if urls else [])]) == 0
    notebook = nbformat.reads(capsys.readouterr().out, as_version=4)
    assert values_in(notebook)["REQUIREMENT"] == f"manyhands[{extra}]=={__version__}"


def test_a_checkout_cannot_be_installed_by_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BEGIN) == 0
    said = capsys.readouterr()
    assert "which volunteers cannot reach; name an address that pip can: --install 'manyhands[data] @ git" in said.err
    assert f"installs manyhands[data]=={__version__} from PyPI" in said.err
    nbformat.reads(said.out, as_version=4)


@pytest.mark.parametrize(
    ("addresses", "warned"),
    [
        (["192.168.1.5:31337"], "192.168.1.5 is not a public address: machines outside of your network cannot join"),
        (["/ip4/127.0.0.1/tcp/31337", "[fd00::1]:31337"], "127.0.0.1, fd00::1 is not a public address"),
        ([str(Ticket("r", [Address.parse("10.0.0.5:31337")]))], "10.0.0.5 is not a public address"),
        (["93.184.216.34:31337", "192.168.1.5:31337"], ""),
        (["example.org:31337"], ""),
    ],
)
def test_addresses_that_nobody_outside_can_dial_are_warned_of(
    addresses: list[str], warned: str, is_installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["notebook", "--run-id", "r", "--initial-peers", *addresses]) == 0
    said = capsys.readouterr()
    assert warned in said.err
    assert bool(said.err) is bool(warned)
    nbformat.reads(said.out, as_version=4)


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
def test_the_notebook_command_refuses_bad_input_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["notebook", *arguments]) == USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert not captured.out


@pytest.mark.parametrize(
    ("pasted", "peers"),
    [
        ("203.0.113.7:31337, [2001:db8::7]:31337", ["203.0.113.7:31337", "[2001:db8::7]:31337"]),
        ("    manyhands join mh1abc", ["mh1abc"]),
        ("--initial_peers /ip4/203.0.113.7/tcp/31337/p2p/12D3", ["/ip4/203.0.113.7/tcp/31337/p2p/12D3"]),
        ("manyhands train --run-id x --initial-peers /ip4/203.0.113.7/tcp/1", ["/ip4/203.0.113.7/tcp/1"]),
        ("ask the organizer", []),
    ],
)
def test_whole_commands_of_the_organizer_can_be_pasted(pasted: str, peers: list[str]) -> None:
    (cell,) = [
        cell for cell in nbformat.read(EXAMPLES / "join.ipynb", as_version=4).cells if "INITIAL_PEERS =" in cell.source
    ]
    lines = [line for line in cell.source.splitlines() if line.startswith(("words =", "peers ="))]
    values: dict[str, object] = {"INITIAL_PEERS": pasted}
    exec("\n".join(lines), values)
    assert values["peers"] == peers
