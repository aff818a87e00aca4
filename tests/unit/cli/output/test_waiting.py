"""What a command says while somebody waits."""

from __future__ import annotations

import pytest

from manyhands.cli.output.waiting import shown


@pytest.mark.parametrize("text", ["looking for run [/x]", "dialling [::1]:31337"])
def test_it_is_shown_as_it_is_in_a_terminal_only(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook; rich takes it for a terminal
    with shown(text):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with shown(text):
        pass
    said = capsys.readouterr()
    assert text in said.err
    assert not said.out
