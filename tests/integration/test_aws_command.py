"""``manyhands aws`` as a user types it, with moto's server in place of AWS."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from manyhands.cli.main import run
from tests.integration.clouds import REGION, UBUNTU
from tests.process.commands import running

IMAGES = ("--image", UBUNTU, "--cpu-image", UBUNTU)
UP = ("aws", "up", "--name", "x", *IMAGES, "--source", "https://example.org/manyhands.whl")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without credentials and without a configured region."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def ec2(server: str, nobody: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A user with an empty account, and a client of it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("manyhands.cloud.aws.LOOK_PERIOD_S", 0.01)
    client = boto3.client("ec2")
    yield client
    run(["aws", "down", "--name", "x"])
    client.close()


def running_machines(ec2: Any) -> list[dict[str, Any]]:
    found = ec2.describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])
    return [one for reserved in found["Reservations"] for one in reserved["Instances"]]


def test_an_experiment_from_up_to_down(ec2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*UP, "--workers", "2", "--no-watch", "--", "--model", "albert-large-v2"]) == 0
    said = capsys.readouterr().out
    machines = running_machines(ec2)
    (coordinator,) = (one for one in machines if "InstanceLifecycle" not in one)
    assert len(machines) == 3
    assert all(one["InstanceId"] in said for one in machines)
    assert f"manyhands join {coordinator['PublicIpAddress']}:31337" in said
    assert "The price per hour is not known." in said
    assert f"manyhands aws down --name x --region {REGION}" in said

    assert run(list(UP)) == 2
    refused = capsys.readouterr()
    assert "experiment x is in use in us-east-1" in refused.err
    assert "manyhands aws down --name x --region us-east-1" in refused.err
    assert len(refused.err.splitlines()) == 1

    assert run(["aws", "status", "--name", "x"]) == 0
    assert capsys.readouterr().out.count("running") == 3
    assert run(["aws", "status", "--name", "x", "--logs", coordinator["InstanceId"]]) == 0
    assert "Linux version" in capsys.readouterr().out

    assert run(["aws", "down", "--name", "x"]) == 0
    assert "Nothing of experiment x is left in us-east-1." in capsys.readouterr().out
    assert running_machines(ec2) == []
    assert run(["aws", "down", "--name", "x"]) == 0
    assert run(["aws", "status", "--name", "mistyped"]) == 2
    assert "experiment mistyped has no machines in us-east-1" in capsys.readouterr().err


def test_a_mistyped_name_or_region_ends_nothing_and_says_so(ec2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*UP, "--no-watch"]) == 0
    capsys.readouterr()
    assert run(["aws", "down", "--name", "mistyped"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "manyhands: experiment mistyped has nothing in us-east-1; experiments there: x; other regions were not looked "
        "at (--region)\n"
    )
    assert not said.out
    assert run(["aws", "down", "--name", "x", "--region", "eu-west-1"]) == 2
    assert "has nothing in eu-west-1; no experiment has any there; other regions" in capsys.readouterr().err
    assert len(running_machines(ec2)) == 2


def test_a_dry_run_creates_nothing(ec2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*UP, "--workers", "4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "4 worker machines" in said
    assert "AWS has all of it in us-east-1." in said
    assert running_machines(ec2) == []


def test_a_dry_run_of_what_would_be_refused_says_so_and_is_no_success(
    ec2: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*UP, "--dry-run", "--worker-types", "g99.xlarge"]) == 2
    said = capsys.readouterr()
    assert "Experiment x in the region of your AWS configuration" in said.out
    assert "AWS has all of it" not in said.out
    assert said.err == (
        "manyhands: without --dry-run this is refused: region us-east-1 has no g99.xlarge for the worker; choose "
        "another --region, or other types with --worker-types\n"
    )
    assert run([*UP, "--no-watch"]) == 0
    capsys.readouterr()
    assert run([*UP, "--dry-run"]) == 2
    assert "without --dry-run this is refused: experiment x is in use in us-east-1" in capsys.readouterr().err
    assert run([*UP, "--dry-run", "--region", "mars-north-1"]) == 2
    assert "AWS has no region 'mars-north-1'" in capsys.readouterr().err


def test_a_dry_run_needs_no_account(nobody: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["aws", "up", "--dry-run", "--workers", "4"]) == 0
    said = capsys.readouterr().out
    assert "Experiment albert in the region of your AWS configuration" in said
    assert "4 worker machines, one-time spot" in said
    assert "Not checked with AWS, and the price is not known: no AWS region is configured" in said
    assert run([*UP, "--dry-run", "--region", REGION]) == 0
    assert "Not checked with AWS, and the price is not known: no AWS credentials to use" in capsys.readouterr().out


def test_a_dry_run_needs_no_network(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        patch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)  # between attempts
        assert run([*UP, "--dry-run"]) == 0
    assert "Not checked with AWS, and the price is not known: AWS does not answer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--region", "us-east-1", *UP[-2:]], "no AWS credentials to use"),
        (["status", "--name", "x", "--region", "us-east-1"], "no AWS credentials to use"),
        (["down", "--name", "x", "--region", "us-east-1"], "no AWS credentials to use"),
        (["up", *UP[-2:]], "no AWS region is configured; name one: --region us-east-1"),
        (["up", "--region", "mars-north-1", *UP[-2:]], "AWS has no region 'mars-north-1'"),
        (["up", "--client-mode"], "add --auxiliary 1"),
        (["up"], "which the machines cannot reach; name an address that pip can: --source git+https://"),
        (["up", "--workers", "0"], "--workers is 0"),
        ([*UP[1:], "--", "--modle", "x"], "after --: Unknown option: --modle. Did you mean --model?"),
        ([*UP[1:], "--dry-run", "--", "--modle", "x"], "after --: Unknown option: --modle"),
        ([*UP[1:], "--", "albert-large-v2"], "after --: train cannot use 'albert-large-v2'"),
        ([*UP[1:], "--", "--model"], "after --: train needs --model VALUE"),
        ([*UP[1:], "--", "--batch-size", "many"], "after --: --batch-size is 'many'; it must be a whole number"),
        ([*UP[1:], "--", "--batch-size", "0"], "after --: batch_size is 0"),
        ([*UP[1:], "--", "--max-steps", "0"], "after --: max_steps is 0"),
        ([*UP[1:], "--", "--model", "large"], "after --: --model large: no such model"),
        ([*UP[1:], "--", "--help"], "after --: --help and --version start no trainer"),
        (["down"], "--name"),
        (["down", "--name", "*"], "'*' cannot name an experiment"),
        (["status", "--name", "x?"], "'x?' cannot name an experiment"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], message: str, nobody: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["aws", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not said.out


def test_an_unknown_profile_is_one_line(
    nobody: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    assert run(["aws", "down", "--name", "x", "--region", REGION]) == 2
    assert "nobodys" in capsys.readouterr().err


def test_without_boto3_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules.update(boto3=None, botocore=None);"
        "from manyhands.cli.main import run; sys.exit(run(['aws', 'down', '--name', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "manyhands aws needs packages that are not installed; try: pip install" in done.stderr
    assert "[aws]" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_leaves_the_machines_running_and_says_how_to_end_them(ec2: Any, number: signal.Signals) -> None:
    with running(*UP) as command:
        command.wait_for("Replacing lost machines until Ctrl-C")
        if number == signal.SIGINT:
            command.interrupt()
        else:
            command.terminate()
        assert command.wait() == 130
        assert f"manyhands aws down --name x --region {REGION}" in command.output.splitlines()[-2]
        assert "very-secret" not in command.output
    assert len(running_machines(ec2)) == 2
