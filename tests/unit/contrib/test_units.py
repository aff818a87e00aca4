"""The units of systemd: what they run is understood, and they are started again when that helps."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from manyhands.cli.entry import EXIT_INTERRUPTED
from tests.unit.contrib.commands import CONTRIB, parsed

UNITS = ("first-peer", "coordinator", "trainer")
PROGRAM = "/opt/manyhands/bin/manyhands"
VALUES = {
    "%i": "my-run",
    "${STATE_DIRECTORY}": "/var/lib/state",
    "${LOGS_DIRECTORY}": "/var/log/logs",
    "$INITIAL_PEERS": "203.0.113.7:31337 203.0.113.8:31337",
    "$OPTIONS": "--verbose",
}


def path_of(unit: str) -> Path:
    return CONTRIB / "systemd" / f"manyhands-{unit}{'' if unit == 'first-peer' else '@'}.service"


def read(unit: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",), strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign] # the case of names counts
    parser.read_string(path_of(unit).read_text().replace("\\\n", " "))
    return parser


def command_of(unit: str) -> list[str]:
    line = read(unit)["Service"]["ExecStart"]
    for name, value in VALUES.items():
        line = line.replace(name, value)
    for setting in read(unit)["Service"].get("Environment", "").split():
        name, _, value = setting.partition("=")
        line = line.replace(f"${{{name}}}", value)
    assert not re.search(r"[$%]", line), "nothing is left to be replaced"
    program, *words = shlex.split(line)
    assert program == PROGRAM
    return words


@pytest.mark.parametrize(
    ("unit", "name"), [("first-peer", "first_peer"), ("coordinator", "monitor"), ("trainer", "train")]
)
def test_the_command_line_accepts_the_command_of_each_unit(unit: str, name: str) -> None:
    command, arguments = parsed(command_of(unit))
    assert command == name
    assert arguments.get("run_id", "my-run") == "my-run"
    output = arguments["output"]
    assert output.log_file == Path(f"/var/log/logs/{unit}.log")
    assert output.log_json
    assert output.verbose, "the options of this machine are the last"


def test_a_trainer_keeps_its_checkpoints_and_its_identity_and_dials_all_coordinators() -> None:
    _, arguments = parsed(command_of("trainer"))
    assert arguments["training"].checkpoint_dir == Path("/var/lib/state")
    assert arguments["network"].initial_peers == ("203.0.113.7:31337", "203.0.113.8:31337")


def test_a_coordinator_keeps_its_identity_and_its_port_and_shows_its_page_to_this_machine_alone() -> None:
    words = command_of("coordinator")
    for unit in ("coordinator", "first-peer"):
        _, arguments = parsed(command_of(unit))
        assert arguments["network"].state_dir == Path("/var/lib/state")
        assert arguments["network"].listen == ("31337",)
    assert words[words.index("--web") + 1] == "127.0.0.1:8080"


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_started_again_until_it_works(unit: str) -> None:
    parser = read(unit)
    service = parser["Service"]
    assert service["Restart"] == "on-failure"
    assert parser["Unit"]["StartLimitIntervalSec"] == "0", "never given up"
    assert service["SuccessExitStatus"] == str(EXIT_INTERRUPTED), "a stop is no failure"
    # Exit code 2 also means that no initial peer answered: a machine that starts before its network must try again.
    assert "RestartPreventExitStatus" not in service
    assert int(service["RestartSec"]) >= 10
    assert int(service["TimeoutStopSec"]) >= 60, "it may be saving"
    assert "HUP" in service["ExecReload"]
    assert parser["Install"]["WantedBy"] == "multi-user.target"
    assert "network-online.target" in parser["Unit"]["After"]


@pytest.mark.parametrize("unit", UNITS)
def test_units_are_sandboxed(unit: str) -> None:
    service = read(unit)["Service"]
    for option in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictSUIDSGID"):
        assert service[option] == "yes", option
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert service["StateDirectory"] == service["LogsDirectory"]
    assert service["StateDirectory"].split("/")[0] == f"manyhands-{unit}"
    assert service["StateDirectoryMode"] == "0700", "it has the private key"


@pytest.mark.parametrize("unit", ["coordinator", "trainer"])
def test_libraries_may_write_into_their_home_and_into_the_working_directory(unit: str) -> None:
    service = read(unit)["Service"]
    assert service["Environment"].split()[0] == f"HOME=%C/{service['CacheDirectory']}"
    assert service["WorkingDirectory"] == f"%S/{service['StateDirectory']}"


def test_a_trainer_sees_the_gpu_and_may_compile() -> None:
    service = read("trainer")["Service"]
    for option in ("PrivateDevices", "ProtectClock", "DevicePolicy", "MemoryDenyWriteExecute"):
        assert option not in service, option


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit(unit: str, tmp_path: Path) -> None:
    path = tmp_path / path_of(unit).name.replace("@", "@my-run")
    path.write_text(path_of(unit).read_text().replace(PROGRAM, "/bin/true"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(path)], check=False, timeout=60, capture_output=True, text=True
    )
    complaints = [line for line in verified.stderr.splitlines() if path.name in line]
    assert not complaints, "\n".join(complaints)


def test_rotation_moves_all_files_that_the_units_write_and_says_so_to_them() -> None:
    text = (CONTRIB / "systemd" / "logrotate.conf").read_text()
    rules = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    head, body = "\n".join(rules).split("{")
    patterns = head.split()
    for unit in UNITS:
        logs = read(unit)["Service"]["LogsDirectory"].replace("%i", "my-run")
        for word in command_of(unit):
            if word.startswith("/var/log/logs/"):
                written = Path("/var/log") / logs / Path(word).name
                assert any(written.match(pattern) for pattern in patterns), written
    assert "nocreate" in body
    assert "copytruncate" not in body
    assert re.search(r"postrotate\n\s+systemctl reload 'manyhands-\*.service' \|\| true\n\s+endscript", body)
