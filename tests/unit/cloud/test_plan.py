"""What would be started, and what the machines run; nothing here calls AWS."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from manyhands.base.errors import ConfigError
from manyhands.cloud.plan import MAX_USER_DATA_BYTES, Experiment, described, groups_of
from manyhands.cloud.user_data import MIN_BURST_BYTES, TRAIN_EXTRAS, Program, shaping, user_data
from manyhands.version import __version__

EXPERIMENTS = [
    Experiment(name="x"),
    Experiment(name="x", workers=3, auxiliary=2, client_mode=True, bandwidth_mbit_s=100),
    Experiment(name="x", source="git+https://example.org/it's.git", train_options=("--text", "my book.txt", "$(rm)")),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "*"}, "'*' cannot name an experiment"),
        ({"name": ""}, "cannot name an experiment"),
        ({"name": "a?"}, "cannot name an experiment"),
        ({"name": "a\n"}, "cannot name an experiment"),
        ({"name": "x" * 65}, "1 to 64 letters"),
        ({"workers": 0}, "--workers is 0; it must be from 1"),
        ({"workers": 10**6}, "--workers is 1000000"),
        ({"auxiliary": -1}, "--auxiliary is -1"),
        ({"client_mode": True}, "add --auxiliary 1, or leave out --client-mode"),
        ({"port": 22}, "--port is 22; it must be from 1024"),
        ({"bandwidth_mbit_s": 0}, "--bandwidth-mbit-s is 0"),
        ({"bandwidth_mbit_s": float("nan")}, "--bandwidth-mbit-s is nan"),
        ({"worker_types": ()}, "--worker-types names no type"),
        ({"worker_types": ("T4",)}, "'T4' is not a type of machine"),
        ({"image": "ubuntu"}, "--image 'ubuntu' is not an image"),
        ({"cpu_image": "ubuntu"}, "--cpu-image 'ubuntu' is not an image"),
        ({"train_options": ("--run_id=y",)}, "--run-id is set by manyhands aws"),
        ({"train_options": ("--tunnel", "ngrok")}, "--tunnel is set by manyhands aws"),
        ({"train_options": ("--text", "x" * 20_000)}, "AWS takes 16384"),
    ],
)
def test_wrong_values_are_refused_with_a_value_that_works(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        Experiment(**{"name": "x"} | options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_each_script_is_one_that_bash_can_read_and_aws_takes(experiment: Experiment) -> None:
    for group in groups_of(experiment):
        script = group.user_data(["172.31.255.255:31337"] * 4)
        assert len(script.encode()) < MAX_USER_DATA_BYTES
        assert script.startswith("#!/bin/bash\n"), "cloud-init runs it as a script"
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def take_part(script: str, folder: Path, public: str) -> list[str]:
    """Run the start of a peer from a machine's script, with fakes; returns the words of the command."""
    start = script.partition("<<'END-OF-SCRIPT'\n")[2].partition("END-OF-SCRIPT\n")[0]
    answers = f"case $* in *token) echo t;; *public-ipv4) {public};; *local-ipv4) echo 172.31.0.9;; esac"
    for name, body in {"curl": answers, "manyhands": 'printf "%s\\n" "$@"'}.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    start = start.replace("/opt/manyhands/bin", str(folder))
    done = subprocess.run(["bash", "-c", start], text=True, stdout=subprocess.PIPE, check=True, env=dict(os.environ))
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("public", "announced"),
    [
        ("echo 203.0.113.7", ["/ip4/203.0.113.7/tcp/31337", "/ip4/172.31.0.9/tcp/31337"]),
        ("exit 22", ["/ip4/172.31.0.9/tcp/31337"]),
    ],
)
def test_a_peer_announces_the_addresses_that_its_machine_has(public: str, announced: list[str], tmp_path: Path) -> None:
    coordinator = groups_of(EXPERIMENTS[0])[0]
    words = take_part(coordinator.user_data([]), tmp_path, public)
    assert words == [
        *("monitor", "--run-id", "x", "--state-dir", "state", "--listen", "31337", "--announce"), *announced
    ]  # fmt: skip


def set_up(script: str, folder: Path, *, pip: str) -> subprocess.CompletedProcess[str]:
    """Run a machine's script in a folder, with fakes of all that it installs; the pauses are left out."""
    for name in ("fakes", "etc/systemd/system", "opt/manyhands/bin", "root"):
        (folder / name).mkdir(parents=True)
    for path in [*(folder / "fakes" / name for name in ("apt-get", "useradd", "systemctl", "python3", "sleep")),
                 folder / "opt/manyhands/bin/pip"]:  # fmt: skip
        path.write_text(f"#!/bin/bash\n{pip if path.name == 'pip' else ''}\necho {path.name} $*\n")
        path.chmod(0o755)
    for place in ("/opt/manyhands", "/etc/systemd", "/root"):
        script = script.replace(place, f"{folder}{place}")
    environment = os.environ | {"PATH": f"{folder / 'fakes'}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", script], text=True, stdout=subprocess.PIPE, check=False, env=environment)


def test_a_machine_is_set_up(tmp_path: Path) -> None:
    auxiliary = groups_of(EXPERIMENTS[1])[1]
    done = set_up(auxiliary.user_data([]), tmp_path, pip="")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "manyhands: installing"
    assert lines[-2:] == ["systemctl enable --now manyhands", "manyhands: the peer is started"]
    unit = (tmp_path / "etc/systemd/system/manyhands.service").read_text()
    for line in unit.splitlines():
        if line.startswith("ExecStart"):
            assert os.access(line.partition("=")[2].lstrip("+"), os.X_OK)
    assert "tc qdisc replace" in (tmp_path / "opt/manyhands/bin/shape").read_text()


def test_a_machine_that_cannot_install_says_so_after_some_attempts(tmp_path: Path) -> None:
    done = set_up(groups_of(EXPERIMENTS[0])[0].user_data([]), tmp_path, pip='echo "no such package"; exit 1')
    assert done.returncode == 1
    assert done.stdout.count("no such package") == 5
    assert done.stdout.splitlines()[-1] == "manyhands: setting this machine up failed; see the lines above"


def test_words_of_the_user_reach_the_trainer_as_they_are(tmp_path: Path) -> None:
    worker = groups_of(EXPERIMENTS[2])[-1]
    words = take_part(worker.user_data(["172.31.0.1:31337"]), tmp_path, "exit 22")
    assert words[words.index("--text") :][:5] == [
        "--text",
        "my book.txt",
        "$(rm)",
        "--initial-peers",
        "172.31.0.1:31337",
    ]
    assert f"'manyhands[{TRAIN_EXTRAS}] @ git+https://example.org/it'\"'\"'s.git'" in worker.user_data([])


def test_what_a_worker_installs_has_all_that_the_options_of_train_import() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def packages_of(names: str) -> set[str]:
        found = set()
        for requirement in (one for name in names.split(",") for one in extras[name]):
            own = requirement.partition("manyhands[")[2].rstrip("]")
            found |= packages_of(own) if own else {re.split("[><=; ]", requirement)[0].lower()}
        return found

    options = {
        "--dataset-url https://example.org/index.json": {"torch", "transformers", "aiohttp", "fsspec"},
        "--dataset-url s3://bucket/index.json": {"s3fs"},
        "--tensorboard curves": {"tensorboardx"},
        "--web": {"starlette", "uvicorn", "prometheus_client"},
    }
    for words, imported in options.items():
        worker = groups_of(Experiment(name="x", auxiliary=1, train_options=tuple(words.split())))[-1]
        installed = worker.program.requirement
        assert installed == f"manyhands[{TRAIN_EXTRAS}]=={__version__}"
        assert imported <= packages_of(installed.partition("[")[2].partition("]")[0])


def test_workers_in_client_mode_are_shaped_and_announce_nothing() -> None:
    coordinator, auxiliary, worker = groups_of(EXPERIMENTS[1])
    command = worker.program.command(["a:1", "b:1"])
    assert "--client-mode" in command
    assert "--listen" not in command
    assert "--announce" not in command
    for group in (auxiliary, worker):
        assert "--bandwidth-mbit-s 100 --max-upload-mbit-s 100" in group.program.command([])
        assert "tbf rate 100000kbit" in group.user_data([])
    assert "tc qdisc" not in coordinator.user_data([])
    assert "--auxiliary" in auxiliary.program.command([])
    assert "whl/cpu" in auxiliary.user_data([]), "without a GPU, PyTorch's small wheel is enough"
    assert "whl/cpu" not in worker.user_data([])


def test_a_burst_is_never_smaller_than_what_the_kernel_sends_at_once() -> None:
    assert f"burst {MIN_BURST_BYTES} " in shaping(1)
    assert "burst 1250000 " in shaping(1000)


def test_the_options_exist() -> None:
    """The command line takes what the machines are told to run."""
    from manyhands.cli.main import app

    for experiment in EXPERIMENTS[:2]:
        for group in groups_of(experiment):
            words = group.program.command(["203.0.113.7:31337"]).replace("$ANNOUNCE", "/ip4/203.0.113.7/tcp/31337")
            app.parse_args(words.split()[1:], exit_on_error=False, print_error=False)


def test_a_dry_run_lists_each_resource() -> None:
    text = "\n".join(described(EXPERIMENTS[1], "us-east-1"))
    for part in ("Security group manyhands-x", "1 coordinator machine, on demand", "2 auxiliary machines, on demand",
                 "3 worker machines, one-time spot", "g4dn.xlarge, else g5.xlarge", "TCP 31337", "100 Mbit/s",
                 "manyhands:experiment=x", "manyhands:role=worker", "COORDINATOR:31337 AUXILIARY:31337"):  # fmt: skip
        assert part in text
    assert "#!/bin/bash" not in text
    assert "#!/bin/bash" in "\n".join(described(EXPERIMENTS[1], "us-east-1", scripts=True))


def test_no_script_holds_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    assert "very-secret" not in user_data(Program(("train",), 31337), [])
