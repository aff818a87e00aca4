"""``manyhands plan`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from manyhands.cli.main import run
from manyhands.planning.model import CODECS_OF

EXAMPLE = ["plan", "--peers", "40", "--mbit", "50", "--samples-per-s", "20", "--target-batch-size", "4096", "--params"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run([*EXAMPLE, *arguments, "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize(
    ("text", "number"),
    [("18M", 18_000_000), ("1.5B", 1_500_000_000), ("110000", 110_000), ("2.5k", 2500), ("18m", 18_000_000)],
)
def test_numbers_of_parameters_are_read_as_people_write_them(
    text: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = planned(capsys, text)
    assert answer["run"] == {
        "params": number, "peers": 40, "mbit": 50.0, "samples_per_s": 20.0, "target_batch_size": 4096, "rtt_ms": 50.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value"),
    [("--params", "0"), ("--params", "18X"), ("--params", "-1"), ("--peers", "0"), ("--mbit", "0"), ("--mbit", "nan"),
     ("--samples-per-s", "0"), ("--target-batch-size", "4k"), ("--rtt-ms", "-1")],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused_in_one_line(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = dict(zip(EXAMPLE[1:-1:2], EXAMPLE[2:-1:2], strict=True)) | {"--params": "18M", option: value}
    assert run(["plan", *(word for pair in given.items() for word in pair)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "for example" in said.err or "must be" in said.err


def test_the_json_has_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    answer = planned(capsys, "18M")
    assert run([*EXAMPLE, "18M"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    steps, choice = answer["steps"], answer["choice"]
    assert isinstance(steps, list)
    assert isinstance(choice, dict)
    assert [(step["steps"], step["codec"]) for step in steps] == [
        (kind, codec) for kind, codecs in CODECS_OF.items() for codec in codecs
    ]
    for step in steps:
        assert f"{step['target_for_little']}" in shown
        assert f"{step['averaging_share']:.1%}" in shown
    assert choice["why"] in shown
    for argument in choice["arguments"]:
        assert f"{argument}," in shown


@pytest.mark.parametrize("params", ["110000", "18M", "1.5B"])
def test_the_table_fits_80_columns(params: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*EXAMPLE, params]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_the_help_says_whose_samples_are_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Samples that ONE peer computes in a second" in shown
    assert "manyhands plan --params 18M --peers 40" in shown


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'transformers']));"
        f"from manyhands.cli.main import run; sys.exit(run({[*EXAMPLE, '18M']!r}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
