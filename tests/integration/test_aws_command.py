"""``manyhands aws`` as a user types it, with moto's server in place of AWS."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from manyhands.cli.main import run
from manyhands.cloud import stack
from tests.integration.clouds import IMAGES, REGION, UBUNTU, instances, role_of
from tests.process.commands import running
from tests.waiting import wait_until

UP = ("aws", "up", "--name", "x", *IMAGES, "--source", "https://example.org/manyhands.whl")
NOW = datetime.now(timezone.utc)
MODELS = "moto.cloudformation.models"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # its import takes seconds, which each worker of `make test` would spend

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without credentials and without a configured region."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def ec2(server: str, nobody: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A user with an empty account, and a client of it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setattr("botocore.waiter.time.sleep", lambda seconds: None)  # between two looks at a stack
    client = boto3.client("ec2")
    yield client
    monkeypatch.undo()
    cloudformation = boto3.client(
        "cloudformation", REGION, endpoint_url=server, aws_access_key_id="testing", aws_secret_access_key="testing"
    )
    for one in cloudformation.describe_stacks()["Stacks"]:
        cloudformation.delete_stack(StackName=one["StackId"])
    for one in (client, cloudformation):
        one.close()


def refusal(code: str) -> Any:
    """A call that AWS refuses."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ClientError({"Error": {"Code": code, "Message": "as told"}}, "DescribeStacks")

    return refuse


def states(ec2: Any) -> list[str]:
    """The states of all machines that are not gone."""
    return [one["State"]["Name"] for one in instances(ec2) if one["State"]["Name"] != "terminated"]


def test_aws_up_creates_an_experiment_and_aws_down_deletes_all_of_it(
    ec2: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """In ``make test`` although it takes 4 s: it is the first here, so it imports moto, and tries all commands."""
    assert run([*UP, "--workers", "2", "--auxiliary", "1", "--", "--model", "albert-large-v2"]) == 0
    said = capsys.readouterr().out
    machines = instances(ec2, "running")
    assert sorted(role_of(one) for one in machines) == ["auxiliary", "coordinator", "worker", "worker"]
    assert all(one["InstanceId"] in said for one in machines)
    (coordinator,) = (one for one in machines if role_of(one) == "coordinator")
    assert f"manyhands join {coordinator['PublicIpAddress']}:31337" in said
    assert f"manyhands aws down --name x --region {REGION}" in said
    assert "The run is open: anybody who knows an address can take part" in said

    assert run(list(UP)) == 2
    refused = capsys.readouterr()
    assert "already exists" in refused.err
    assert len(refused.err.splitlines()) == 1
    assert states(ec2) == ["running"] * 4, "the one in use is left alone"

    assert run(["aws", "status", "--name", "x"]) == 0
    said = capsys.readouterr().out
    assert "Stack manyhands-x in us-east-1: CREATE_COMPLETE" in said
    assert said.count("running") == 4
    assert f"manyhands join {coordinator['PublicIpAddress']}:31337" in said
    assert run(["aws", "status", "--name", "x", "--logs", coordinator["InstanceId"]]) == 0
    assert "Linux version" in capsys.readouterr().out

    assert run(["aws", "down", "--name", "x"]) == 0
    assert "Nothing of experiment x is left in us-east-1." in capsys.readouterr().out
    assert states(ec2) == []
    assert {one["GroupName"] for one in ec2.describe_security_groups()["SecurityGroups"]} == {"default"}
    assert ec2.describe_launch_templates()["LaunchTemplates"] == []
    assert run(["aws", "status", "--name", "x"]) == 2
    assert "there is no experiment x in us-east-1; experiments there: none" in capsys.readouterr().err


def test_a_mistyped_name_or_region_ends_nothing_and_says_so(ec2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(list(UP)) == 0
    capsys.readouterr()
    for name in ("mistyped", "*", "X"):
        assert run(["aws", "down", "--name", name]) == 2
        said = capsys.readouterr()
        assert said.err == (
            f"manyhands: there is no experiment {name} in us-east-1; experiments there: x. --region looks in another "
            "region\n"
        )
        assert not said.out
    assert run(["aws", "down", "--name", "x", "--region", "eu-west-1"]) == 2
    assert "there is no experiment x in eu-west-1; experiments there: none" in capsys.readouterr().err
    assert states(ec2) == ["running"] * 2


def test_a_stack_of_somebody_else_is_not_taken_for_an_experiment(ec2: Any) -> None:
    cloudformation = boto3.client("cloudformation")
    template = '{"Resources": {"Group": {"Type": "AWS::EC2::SecurityGroup", "Properties": {"GroupDescription": "x"}}}}'
    cloudformation.create_stack(StackName="manyhands-website", TemplateBody=template)
    assert run(["aws", "down", "--name", "website"]) == 2
    assert len(cloudformation.describe_stacks()["Stacks"]) == 1
    cloudformation.close()


# what AWS does when it cannot create something; the fake always can


def fails(*events: tuple[str, str, str], status: str = "DELETE_COMPLETE") -> Any:
    """A creation that ends like this."""

    from moto.cloudformation.models import Event

    def create_resources(self: Any) -> None:
        for resource, event, reason in events:
            self.events.append(
                Event(self.stack_id, self.name, resource, resource, "AWS::Some::Thing", event, reason, None)
            )
        self.status = status

    return create_resources


NO_QUOTA = (
    'Resource handler returned message: "Group did not stabilize. {current/minSize/maxSize} group size = {0/1/4}. \n'
    'Failed Scaling Activity: Max spot instance count exceeded"'
)


def test_a_failed_creation_says_the_first_reason_in_one_line(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = fails(
        ("Coordinator", "CREATE_FAILED", "Resource creation cancelled"),
        ("WorkerGroup", "CREATE_FAILED", NO_QUOTA),
        ("AuxiliaryGroup", "CREATE_FAILED", "later"),
    )
    monkeypatch.setattr(f"{MODELS}.Stack.create_resources", failed)
    assert run(list(UP)) == 2
    said = capsys.readouterr()
    assert said.err.startswith("manyhands: AWS could not create the machines, and deletes them: WorkerGroup: Resource")
    assert "Max spot instance count exceeded" in said.err
    assert len(said.err.splitlines()) == 1


def activity(group: str, code: str, message: str, at: datetime = NOW) -> dict[str, Any]:
    return {"AutoScalingGroupName": group, "StatusCode": code, "StatusMessage": message, "StartTime": at}


def has_activities(monkeypatch: pytest.MonkeyPatch, *activities: dict[str, Any]) -> None:
    """What the groups of the account did, the newest first. The fake has none."""
    make = boto3.Session.client

    def client(self: boto3.Session, service: str, **options: Any) -> Any:
        made = make(self, service, **options)
        if service == "autoscaling":
            made.describe_scaling_activities = lambda **_: {"Activities": activities}
        return made

    monkeypatch.setattr(boto3.Session, "client", client)


def test_a_creation_that_takes_too_long_names_what_aws_lacks(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = NOW.replace(year=NOW.year + 1)
    has_activities(
        monkeypatch,
        activity("of-somebody-else", "Failed", "not mine", later),
        activity("manyhands-x-workers", "Successful", "", later),
        activity("manyhands-x-workers", "Failed", "no Spot capacity\navailable", later),
    )
    monkeypatch.setattr(
        f"{MODELS}.Stack.create_resources", fails(("WorkerGroup", "CREATE_FAILED", "Resource creation cancelled"))
    )
    assert run(list(UP)) == 2
    assert capsys.readouterr().err == (
        "manyhands: AWS could not create the machines, and deletes them: no Spot capacity available\n"
    )


@pytest.mark.long
def test_a_creation_that_never_ends_is_deleted(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{MODELS}.Stack.create_resources", fails(status="CREATE_IN_PROGRESS"))
    assert run(list(UP)) == 2
    said = capsys.readouterr()
    assert "it took too long; the stack is in the state DELETE_COMPLETE" in said.err
    assert "Deleting what AWS has created" in said.out
    assert run(["aws", "status", "--name", "x"]) == 2


def test_credentials_that_expire_meanwhile_are_told_with_what_to_do(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = boto3.Session.client

    def client(self: boto3.Session, service: str, **options: Any) -> Any:
        made = make(self, service, **options)
        if service == "cloudformation":
            made.describe_stacks = made.delete_stack = refusal("ExpiredToken")
        return made

    monkeypatch.setattr(boto3.Session, "client", client)
    assert run(list(UP)) == 2
    said = capsys.readouterr()
    assert "'manyhands aws down' waits until that is done, or retries" in said.out
    assert "ExpiredToken" in said.err
    assert len(said.err.splitlines()) == 1


def test_down_says_what_could_not_be_deleted(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(UP)) == 0
    delete = fails(("SecurityGroup", "DELETE_FAILED", "has a dependent object"), status="DELETE_FAILED")
    with monkeypatch.context() as patch:
        patch.setattr(f"{MODELS}.CloudFormationBackend.delete_stack", lambda self, one: delete(self.get_stack(one)))
        assert run(["aws", "down", "--name", "x"]) == 1
    assert "AWS could not end all machines: SecurityGroup: has a dependent object" in capsys.readouterr().err
    assert run(["aws", "down", "--name", "x"]) == 0
    assert states(ec2) == []


def test_a_lost_worker_is_replaced_without_this_machine(ec2: Any) -> None:
    assert run([*UP, "--workers", "2"]) == 0
    lost = next(one["InstanceId"] for one in instances(ec2, "running") if role_of(one) == "worker")
    ec2.terminate_instances(InstanceIds=[lost])
    workers = [one["InstanceId"] for one in instances(ec2, "running") if role_of(one) == "worker"]
    assert len(workers) == 2
    assert lost not in workers


def test_status_fits_80_columns_and_says_what_is_missing(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*UP, "--workers", "3", "--auxiliary", "1", "--worker-types", "g4dn.12xlarge"]) == 0
    (coordinator,) = (one["InstanceId"] for one in instances(ec2, "running") if role_of(one) == "coordinator")
    autoscaling = boto3.client("autoscaling")
    autoscaling.set_desired_capacity(AutoScalingGroupName="manyhands-x-workers", DesiredCapacity=2)
    autoscaling.close()
    has_activities(
        monkeypatch,
        activity("manyhands-x-workers", "Failed", "There is no Spot capacity available that matches your request.",
                 NOW.replace(year=NOW.year + 1)),
    )  # fmt: skip
    capsys.readouterr()
    assert run(["aws", "status", "--name", "x"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "AWS tries to start the workers that are missing: There is no Spot" in " ".join(said.split())
    (line,) = [line for line in said.splitlines() if coordinator in line]
    assert line.split()[:5] == [coordinator, "coordinator", "running", "t3.small", "a"]
    ec2.terminate_instances(InstanceIds=[coordinator])
    assert run(["aws", "status", "--name", "x"]) == 0
    assert "The coordinator does not run, so new machines cannot join." in capsys.readouterr().out


def test_status_has_a_blank_between_columns_and_80_columns_also_for_long_machine_types(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*UP, "--workers", "1", "--coordinator-type", "m6idn.16xlarge"]) == 0
    capsys.readouterr()
    assert run(["aws", "status", "--name", "x"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    (line,) = [line for line in said.splitlines() if " coordinator " in line]
    assert line.split()[1:5] == ["coordinator", "running", "m6idn.16xlarge", "a"]
    assert len(line.split()) == 6


# dry runs


def test_a_dry_run_prints_the_template_and_asks_nobody(nobody: None, capsys: pytest.CaptureFixture[str]) -> None:
    earlier = ("--bandwidth", "50", "--scripts", "--no-watch")
    assert run([*UP, "--workers", "4", "--worker-types", "g5.xlarge", *earlier, "--dry-run", "--", "--seed", "7"]) == 0
    said = capsys.readouterr()
    for part in ("AWSTemplateFormatVersion", "manyhands: installing", '[{"InstanceType": "g5.xlarge"}]',
                 "Workers          4\n", "BandwidthMbitS   50\n", "TrainOptions     --seed 7\n",
                 f"WorkerImage      {UBUNTU}\n", "The run is open: anybody who knows an address"):  # fmt: skip
        assert part in said.out
    assert said.out.endswith("Nothing was created: a dry run.\n")
    assert said.err.count("does nothing here") == 2, "options of earlier versions"


def test_a_dry_run_of_a_checkout_needs_no_address_for_pip(nobody: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["aws", "up", "--dry-run"]) == 0
    assert "Name             albert\n" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["https://me:secret@host/", "--dataset-url=s3://data/?signature=secret"])
def test_a_password_in_an_address_is_told_of_with_who_can_read_it(
    nobody: None, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert run([*UP, "--dry-run", "--", *(["--dataset-url", option] if "=" not in option else [option])]) == 0
    assert "holds a password or a signature" in capsys.readouterr().out


# wrong input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--region", "us-east-1", *UP[-2:]], "no AWS account to use: Unable to locate credentials"),
        (["status", "--name", "x", "--region", "us-east-1"], "no AWS account to use: Unable to locate credentials"),
        (["down", "--name", "x", "--region", "us-east-1"], "no AWS account to use: Unable to locate credentials"),
        (["up", *UP[-2:]], "You must specify a region."),
        (["up", "--name", "my_albert"], "use 1 to 64 letters, digits and -, for example my-albert"),
        (["up", "--name", "x" * 65], "use 1 to 64 letters"),
        (["up", "--name", "$(rm)"], "use 1 to 64 letters"),
        (["up", "--port", "22"], 'Invalid value "22" for --port. Must be >= 1024.'),
        (["up", "--bandwidth-mbit-s", "0"], 'Invalid value "0.0" for --bandwidth-mbit-s. Must be >= 1.'),
        (["up", "--client-mode"], "add --auxiliary 1"),
        (["up"], "which the machines cannot reach; name an address that pip can: --source git+https://"),
        (["up", "--workers", "0"], 'Invalid value "0" for --workers. Must be >= 1.'),
        ([*UP[1:], "--", "--modle", "x"], "Unknown option: --modle. Did you mean --model?"),
        ([*UP[1:], "--dry-run", "--", "--modle", "x"], "Unknown option: --modle"),
        ([*UP[1:], "--", "albert-large-v2"], "train cannot use 'albert-large-v2'"),
        ([*UP[1:], "--", "--model"], 'Command "train" parameter --model requires an argument'),
        ([*UP[1:], "--", "--batch-size", "many"], "--batch-size is 'many'; it must be a whole number"),
        ([*UP[1:], "--", "--batch-size", "0"], "batch_size is 0"),
        ([*UP[1:], "--", "--max-steps", "0"], "max_steps is 0"),
        ([*UP[1:], "--", "--model", "large"], "--model large: no such model"),
        ([*UP[1:], "--", "--help"], "--help and --version start no trainer"),
        ([*UP[1:], "--", "--run_id=y"], "Parameter --run_id specified multiple times"),
        ([*UP[1:], "--", "--tunnel", "ngrok"], "leave one out"),
        ([*UP[1:], "--", "--client-mode"], "leave one out"),
        (["down"], "--name"),
    ],
)
def test_aws_commands_refuse_wrong_input_in_one_line(
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


def test_refusals_of_aws_are_told_in_one_line(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stack.Region, "find", refusal("AccessDenied"))
    assert run(["aws", "down", "--name", "x"]) == 2
    assert capsys.readouterr().err == (
        "manyhands: AWS refuses: An error occurred (AccessDenied) when calling the DescribeStacks operation: as told\n"
    )


def test_without_network_the_exit_code_says_that_it_may_succeed_later(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)  # between attempts
    assert run(["aws", "status", "--name", "x"]) == 1
    assert "AWS does not answer: Could not connect" in capsys.readouterr().err


def test_without_boto3_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules.update(boto3=None, botocore=None);"
        "from manyhands.cli.main import run; sys.exit(run(['aws', 'down', '--name', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "manyhands aws needs packages that are not installed; try: pip install" in done.stderr
    assert "[aws]" in done.stderr


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_during_up_deletes_what_was_created_and_says_so(
    ec2: Any, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moto.cloudformation.models import Stack

    create = Stack.create_resources

    def create_slowly(self: Stack) -> None:
        create(self)
        self.status = "CREATE_IN_PROGRESS"

    monkeypatch.setattr(Stack, "create_resources", create_slowly)
    with running(*UP) as command:
        command.wait_for("AWS creates the machines")
        wait_until(lambda: bool(states(ec2)))
        if number == signal.SIGINT:
            command.interrupt()
        else:
            command.terminate()
        assert command.wait() == 130
        assert "Deleting what AWS has created; 'manyhands aws down' waits" in command.output
        assert "very-secret" not in command.output
    assert states(ec2) == []
