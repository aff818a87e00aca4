"""The scripts of the machines, as moto makes them from the template, run with fakes of what they install."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.clouds import SOURCE, run, scripts_of, set_up, words_of

MAX_USER_DATA_BYTES = 16 * 1024
MAX_PARAMETER_BYTES = 4096
OPTIONS = ("--text", "my book.txt", "$(rm)", "${HOME}", "it's")
SHAPED_CLIENTS = ("--workers", "3", "--auxiliary", "2", "--client-mode", "--bandwidth-mbit-s", "100")
SHAPED = ("--auxiliary", "1", "--bandwidth-mbit-s", "2.5", "--", *OPTIONS)


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")


def test_each_script_is_one_that_bash_can_read_and_aws_takes() -> None:
    scripts = scripts_of(*SHAPED)
    assert sorted(scripts) == ["auxiliary", "coordinator", "worker"]
    for script in scripts.values():
        assert len(script.encode()) + MAX_PARAMETER_BYTES < MAX_USER_DATA_BYTES
        assert script.startswith("#!/bin/bash\n"), "cloud-init runs it as a script"
        assert "very-secret" not in script
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("public", "announced"),
    [
        ("echo 203.0.113.7", ["/ip4/203.0.113.7/tcp/31337", "/ip4/172.31.0.9/tcp/31337"]),
        ("exit 22", ["/ip4/172.31.0.9/tcp/31337"]),
    ],
)
def test_a_peer_announces_the_addresses_that_its_machine_has(public: str, announced: list[str], tmp_path: Path) -> None:
    words = words_of(scripts_of()["coordinator"], tmp_path, public=public)
    assert words == [
        *("monitor", "--run-id", "x", "--state-dir", "state", "--listen", "31337", "--announce"), *announced
    ]  # fmt: skip


def test_the_boot_script_installs_and_starts_the_peer(tmp_path: Path) -> None:
    done = set_up(scripts_of(*SHAPED_CLIENTS)["auxiliary"], tmp_path)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "manyhands: installing"
    assert lines[-2:] == ["systemctl enable --now manyhands", "manyhands: the peer is started"]
    assert any("torch --index-url https://download.pytorch.org/whl/cpu" in line for line in lines), "the small wheel"
    unit = (tmp_path / "etc/systemd/system/manyhands.service").read_text()
    for line in unit.splitlines():
        if line.startswith("ExecStart"):
            assert os.access(line.partition("=")[2].lstrip("+"), os.X_OK)
    shaped = run(str(tmp_path / "opt/manyhands/bin/shape"), tmp_path).stdout
    assert shaped == "tc qdisc replace dev ens5 root tbf rate 100mbit burst 125000 latency 400ms\n"


@pytest.mark.parametrize(("options", "limit"), [(SHAPED, "rate 2.5mbit burst 65536 "), ((), "")])
def test_the_uplink_is_shaped_exactly_if_a_bandwidth_is_given(
    options: tuple[str, ...], limit: str, tmp_path: Path
) -> None:
    """A burst is never smaller than what the kernel sends at once."""
    words = words_of(scripts_of(*options)["worker"], tmp_path)
    assert limit in (shaped := run(str(tmp_path / "opt/manyhands/bin/shape"), tmp_path).stdout)
    assert bool(shaped) == bool(limit) == ("--max-upload-mbit-s" in words) == ("--bandwidth-mbit-s" in words)


def test_a_machine_that_cannot_install_says_so_after_some_attempts(tmp_path: Path) -> None:
    done = set_up(scripts_of()["coordinator"], tmp_path, pip='echo "no such package"; exit 1')
    assert done.returncode == 1
    assert done.stdout.count("no such package") == 5
    assert done.stdout.splitlines()[-1] == "manyhands: setting this machine up failed; see the lines above"


def test_words_of_the_user_reach_the_trainer_as_they_are(tmp_path: Path) -> None:
    script = scripts_of(*SHAPED)["worker"]
    words = words_of(script, tmp_path)
    assert words[words.index("--text") :][: len(OPTIONS) + 2] == [*OPTIONS, "--initial-peers", "coordinator:31337"]
    assert (
        run(f"{script.splitlines()[1]}; echo $PACKAGE", tmp_path).stdout
        == f"manyhands[s3,tensorboard,web] @ {SOURCE}\n"
    )


def test_workers_in_client_mode_announce_nothing(tmp_path: Path) -> None:
    scripts = scripts_of(*SHAPED_CLIENTS)
    words = {role: words_of(script, tmp_path / role) for role, script in scripts.items()}
    assert "--client-mode" in words["worker"]
    assert not {"--listen", "--announce"} & set(words["worker"])
    assert {"--auxiliary", "--listen", "--announce", "--max-upload-mbit-s"} <= set(words["auxiliary"])
    assert not run(str(tmp_path / "coordinator/opt/manyhands/bin/shape"), tmp_path / "coordinator").stdout


def test_the_command_line_accepts_what_the_machines_run(tmp_path: Path) -> None:
    """The command line takes what the machines are told to run."""
    from manyhands.cli.main import app

    for number, options in enumerate([SHAPED_CLIENTS, SHAPED]):
        for role, script in scripts_of(*options).items():
            words = words_of(script, tmp_path / str(number) / role, public="echo 203.0.113.7")
            app.parse_args(words, exit_on_error=False, print_error=False)
