"""Every command of the page on long runs is one that the program understands, and every file that it names is there."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.unit.contrib.commands import CONTRIB, ROOT, parsed

PAGE = (ROOT / "docs" / "how-to" / "run-for-a-month.md").read_text()
UNITS = {path.name.removesuffix(".service").rstrip("@") for path in (CONTRIB / "systemd").glob("*.service")}


def commands() -> list[str]:
    """The arguments of ``manyhands``, in code blocks and in sentences."""
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+ [^`\n]+)`", PAGE)
    found = [re.match(r"(?:sudo )?(?:/opt/manyhands/bin/)?manyhands (.+)", line) for line in lines]
    return [match[1] for match in found if match]


def test_the_page_has_commands() -> None:
    assert len(commands()) >= 5


@pytest.mark.parametrize("command", [command for command in commands() if " " in command])
def test_a_command_of_the_page_is_understood(command: str) -> None:
    parsed(shlex.split(command.replace("ADDRESS", "203.0.113.7:31337")))


def test_options_for_the_units_are_understood() -> None:
    settings = re.findall(r'^OPTIONS="(.*)"$', PAGE, re.MULTILINE)
    assert len(settings) == 3
    for command, options in zip(("first-peer", "monitor", "train"), settings, strict=True):
        parsed([command, *shlex.split(options)])


def test_files_units_and_folders_that_the_page_names_exist() -> None:
    for path in re.findall(r"\bcontrib/[\w./-]*\w", PAGE):
        assert (ROOT / path).exists(), path
    for unit in re.findall(r"(?:systemctl|journalctl) .*?\b(manyhands-[a-z-]+)", PAGE):
        assert unit in UNITS, unit
    for folder in re.findall(r"/var/(?:lib|log|cache)/(?:private/)?(manyhands-[a-z-]+)", PAGE):
        assert folder in {*UNITS, "manyhands-"}, folder
