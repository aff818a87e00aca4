"""Machines come, are replaced and go, in a fake AWS; refusals leave nothing behind."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from manyhands.base.errors import ConfigError, Timeout, Unavailable
from manyhands.cloud.account import _dollars
from manyhands.cloud.aws import WATCH_PERIOD_S
from manyhands.cloud.plan import CREATOR_TAG, EXPERIMENT_TAG, ROLE_TAG
from tests.integration.clouds import Cloud, experiment, fake_aws


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with fake_aws() as cloud:
        yield cloud


def test_up_starts_all_that_was_asked_for_and_down_leaves_nothing(cloud: Cloud) -> None:
    fleet = cloud.fleet()
    machines = fleet.up(experiment(auxiliary=1, client_mode=True))
    assert [(one.role, one.is_spot, one.machine_type) for one in machines] == [
        ("auxiliary", False, "m6i.large"),
        ("coordinator", False, "t3.small"),
        ("worker", True, "g4dn.xlarge"),
        ("worker", True, "g4dn.xlarge"),
    ]
    assert {one.state for one in machines} == {"running"}
    assert len({one.zone for one in machines}) == 1, "traffic between zones costs money"
    (group,) = cloud.ec2.describe_security_groups(GroupNames=["manyhands-x"])["SecurityGroups"]
    (port,) = group["IpPermissions"]
    assert (port["IpProtocol"], port["FromPort"], port["ToPort"]) == ("tcp", 31337, 31337)
    tags = {tag["Key"]: tag["Value"] for one in cloud.instances() for tag in one["Tags"]}
    assert {EXPERIMENT_TAG, CREATOR_TAG, ROLE_TAG} <= tags.keys()
    assert not cloud.fleet("y").down(), "there was nothing"
    assert cloud.fleet().down()  # as another process, which knows the tags alone
    cloud.check_nothing_left()


def test_machines_are_asked_for_as_planned(cloud: Cloud) -> None:
    cloud.fleet().up(experiment(auxiliary=1))
    coordinator, auxiliary, workers = cloud.asked_for("RunInstances")
    assert workers["InstanceMarketOptions.MarketType"] == ["spot"]
    assert workers["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == ["one-time"]
    assert "InstanceMarketOptions.MarketType" not in coordinator | auxiliary
    for request in (coordinator, auxiliary, workers):
        assert request["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == ["true"]
        assert request["MetadataOptions.HttpTokens"] == ["required"]
        assert request["ClientToken"], "a request that is sent twice starts machines once"
    by_role = {one["Tags"][-1]["Value"]: one["PrivateIpAddress"] for one in cloud.instances()}
    script = base64.b64decode(workers["UserData"][0]).decode()
    assert f"--initial-peers {by_role['coordinator']}:31337 {by_role['auxiliary']}:31337" in script


def test_other_experiments_and_machines_are_left_alone(cloud: Cloud) -> None:
    cloud.fleet("x").up(experiment())
    cloud.fleet("X").up(experiment(name="X"))
    cloud.ec2.run_instances(ImageId=cloud.instances()[0]["ImageId"], MinCount=1, MaxCount=1)
    cloud.fleet("x").down()
    states = list(cloud.states().values())
    assert (states.count("terminated"), states.count("running")) == (3, 4)
    assert len(cloud.fleet("X").machines()) == 3
    assert cloud.fleet("x").others() == ["X"]


def test_a_name_in_use_is_refused_and_nothing_of_it_is_ended(cloud: Cloud) -> None:
    cloud.fleet().up(experiment())
    with pytest.raises(ConfigError, match=r"experiment x is in use .* manyhands aws down --name x"):
        cloud.fleet().up(experiment())
    assert list(cloud.states().values()) == ["running"] * 3


def test_two_that_begin_at_once_do_not_end_each_other(cloud: Cloud) -> None:
    """The other one has taken the name after this one looked."""
    other, done = cloud.fleet(), list[bool]()

    def begin() -> None:
        if not done:
            done.append(True)
            other.up(experiment())

    cloud.before("CreateSecurityGroup", begin)
    with pytest.raises(ConfigError, match="experiment x is in use: there is a security group"):
        cloud.fleet().up(experiment())
    assert list(cloud.states().values()) == ["running"] * 3


def test_lost_workers_are_replaced_until_the_coordinator_is_gone(cloud: Cloud) -> None:
    fleet = cloud.fleet()
    coordinator = next(one.machine_id for one in fleet.up(experiment()) if one.role == "coordinator")
    first = cloud.workers()

    def take_back() -> None:
        cloud.ec2.terminate_instances(InstanceIds=first[:1])

    def check() -> None:
        assert len(cloud.workers()) == 2
        assert first[1] in cloud.workers()

    cloud.clock.events = [
        take_back, check, check, lambda: cloud.ec2.terminate_instances(InstanceIds=[coordinator, *cloud.workers()])
    ]  # fmt: skip
    started_s = cloud.clock.now_s
    fleet.watch()
    assert cloud.clock.now_s - started_s == 4 * WATCH_PERIOD_S
    assert 30 <= WATCH_PERIOD_S <= 60
    assert (
        next(line for line in cloud.told if "missing" in line)
        == "1 worker missing: started 1 x g4dn.xlarge in us-east-1a"
    )
    assert "the coordinator is gone" in cloud.told[-1]
    assert cloud.told[-1].endswith("manyhands aws down --name x --region us-east-1")
    assert "running" not in cloud.states().values(), "down in another terminal is not undone"


def test_a_lost_auxiliary_machine_is_replaced_even_if_no_worker_can_be(cloud: Cloud) -> None:
    """Workers that nobody can dial train no longer without one."""
    fleet = cloud.fleet()
    (auxiliary,) = (one for one in fleet.up(experiment(auxiliary=1, client_mode=True)) if one.role == "auxiliary")
    cloud.refuse("RunInstances", "InsufficientInstanceCapacity", when=lambda p: "InstanceMarketOptions.MarketType" in p)
    cloud.ec2.terminate_instances(InstanceIds=[auxiliary.machine_id, cloud.workers()[0]])
    told = len(cloud.told)
    with pytest.raises(Unavailable, match=r"^1 worker missing: "):
        fleet.replace_lost()
    assert cloud.told[told:] == ["1 auxiliary machine missing: started 1 x m6i.large in us-east-1a"]
    alive = [one for one in fleet.machines() if one.role == "auxiliary" and one.is_alive]
    assert [one.machine_id == auxiliary.machine_id for one in alive] == [False]
    with pytest.raises(Unavailable):
        fleet.replace_lost()
    assert sum(one.role == "auxiliary" and one.is_alive for one in fleet.machines()) == 1


def test_watching_goes_on_when_aws_does_not_answer_or_has_no_machines(cloud: Cloud) -> None:
    fleet = cloud.fleet()
    fleet.up(experiment())
    cloud.ec2.terminate_instances(InstanceIds=cloud.workers())
    cloud.refuse("RunInstances", "InsufficientInstanceCapacity", times=60)
    told = len(cloud.told)

    def check() -> None:
        if len(cloud.workers()) == 2:
            raise KeyboardInterrupt

    cloud.clock.events = [check] * 9
    with pytest.raises(KeyboardInterrupt):
        fleet.watch()
    lines = cloud.told[told:]
    assert "2 workers missing: g4dn.xlarge: InsufficientInstanceCapacity" in lines[0]
    assert "2 workers missing: started" in lines[-1]
    assert list(cloud.states().values()).count("running") == 3, "Ctrl-C leaves the machines running"


def test_a_machine_that_aws_does_not_list_yet_is_not_started_twice(cloud: Cloud) -> None:
    fleet = cloud.fleet()
    fleet.up(experiment())
    unlisted = {one.machine_id for one in fleet.machines() if one.role == "worker"}
    listed = fleet.machines
    fleet.machines = lambda: [one for one in listed() if one.machine_id not in unlisted]  # type: ignore[method-assign]
    assert fleet.replace_lost()
    assert len(cloud.workers()) == 2
    cloud.clock.sleep(301)
    assert fleet.replace_lost()
    assert len(cloud.workers()) == 4, "after five minutes they count as lost"


def types_asked(cloud: Cloud) -> list[str]:
    return [request["InstanceType"][0] for request in cloud.asked_for("RunInstances")]


def test_another_type_is_taken_where_one_has_no_capacity(cloud: Cloud) -> None:
    cloud.refuse("RunInstances", "InsufficientInstanceCapacity", when=lambda p: p["InstanceType"] == ["g4dn.xlarge"])
    machines = cloud.fleet().up(experiment(worker_types=("g4dn.xlarge", "g5.xlarge")))
    assert [one.machine_type for one in machines if one.role == "worker"] == ["g5.xlarge"] * 2
    zones = [request["SubnetId"][0] for request in cloud.asked_for("RunInstances")]
    assert len(set(zones)) > 2, "all zones are tried before another type"
    assert types_asked(cloud).count("g4dn.xlarge") > 2


def test_a_quota_that_leaves_room_for_some_workers_gives_these(cloud: Cloud) -> None:
    cloud.refuse(
        "RunInstances", "MaxSpotInstanceCountExceeded", when=lambda p: len(cloud.workers()) + int(p["MaxCount"][0]) > 3
    )
    machines = cloud.fleet().up(experiment(workers=5, worker_types=("g4dn.xlarge",)))
    assert sum(one.role == "worker" for one in machines) == 3
    assert any("could not be started yet: g4dn.xlarge: MaxSpotInstanceCountExceeded" in line for line in cloud.told)


@pytest.mark.parametrize("code", ["InsufficientInstanceCapacity", "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded"])
def test_without_any_worker_everything_is_ended_again(cloud: Cloud, code: str) -> None:
    cloud.refuse("RunInstances", code, when=lambda p: "InstanceMarketOptions.MarketType" in p)
    with pytest.raises(ConfigError, match=f"too few machines for worker: g4dn.xlarge: {code}; g5.xlarge: {code}"):
        cloud.fleet().up(experiment(worker_types=("g4dn.xlarge", "g5.xlarge")))
    cloud.check_nothing_left()
    assert cloud.told[-1] == "nothing is left"


@pytest.mark.parametrize(
    ("operation", "nth"),
    [("AuthorizeSecurityGroupIngress", 1), ("RunInstances", 1), ("RunInstances", 2), ("RunInstances", 3)],
)
def test_a_failure_in_the_middle_leaves_nothing(cloud: Cloud, operation: str, nth: int) -> None:
    asked = []

    def is_due(_: object) -> bool:
        asked.append(1)
        return len(asked) == nth

    cloud.refuse(operation, "UnauthorizedOperation", status=403, when=is_due)
    with pytest.raises(ConfigError, match=f"these credentials do not permit {operation}"):
        cloud.fleet().up(experiment(auxiliary=1))
    cloud.check_nothing_left()


def test_ctrl_c_while_machines_start_leaves_nothing(cloud: Cloud) -> None:
    asked = []

    def interrupt() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt

    cloud.before("RunInstances", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cloud.fleet().up(experiment())
    assert len(cloud.states()) == 1
    cloud.check_nothing_left()


def test_a_coordinator_that_does_not_start_ends_everything(cloud: Cloud) -> None:
    def lose() -> None:
        if len(cloud.instances()) == 3:
            (one,) = (i["InstanceId"] for i in cloud.instances() if "InstanceLifecycle" not in i)
            cloud.ec2.terminate_instances(InstanceIds=[one])

    cloud.before("DescribeInstances", lose)
    with pytest.raises(ConfigError, match="the coordinator did not start"):
        cloud.fleet().up(experiment())
    cloud.check_nothing_left()


def test_a_clean_up_that_fails_says_that_it_costs_money(cloud: Cloud) -> None:
    cloud.refuse("RunInstances", "Unknown", when=lambda p: "InstanceMarketOptions.MarketType" in p)
    cloud.refuse("TerminateInstances", "UnauthorizedOperation", status=403)
    with pytest.raises(ConfigError, match="Unknown: as told"):
        cloud.fleet().up(experiment())
    assert "what is left costs money" in cloud.told[-1]
    assert "manyhands aws down --name x --region us-east-1" in cloud.told[-1]


def test_throttling_is_waited_out(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time.sleep", waits.append)
    cloud.refuse("RunInstances", "RequestLimitExceeded", status=503, times=3)
    assert len(cloud.fleet().up(experiment())) == 3
    assert len(waits) == 3
    cloud.refuse("DescribeInstances", "RequestLimitExceeded", status=503)
    with pytest.raises(Unavailable, match=r"AWS throttles this account .* try again in a minute"):
        cloud.fleet().machines()
    assert sum(waits) < 200


def test_down_goes_on_until_aws_has_ended_all_and_says_what_remains(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.cloud.aws.END_TIMEOUT_S", 60.0)
    cloud.fleet().up(experiment())
    cloud.refuse("DeleteSecurityGroup", "DependencyViolation", times=4)
    cloud.fleet().down()
    cloud.check_nothing_left()
    assert any("still there: security group sg-" in line for line in cloud.told)
    assert cloud.fleet().down(), "once more does no harm: AWS lists ended machines for a while"

    cloud.fleet().up(experiment())
    cloud.refuse("DeleteSecurityGroup", "DependencyViolation")
    before_s = cloud.clock.now_s
    with pytest.raises(Timeout, match=r"timed out after 60 s ending experiment x; still there: security group sg-"):
        cloud.fleet().down()
    assert 60 <= cloud.clock.now_s - before_s < 80


def test_a_machine_that_cannot_be_ended_does_not_save_the_others(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.cloud.aws.END_TIMEOUT_S", 60.0)
    machines = cloud.fleet().up(experiment())
    kept = machines[0].machine_id
    cloud.refuse("TerminateInstances", "OperationNotPermitted", when=lambda p: [kept] in p.values())
    with pytest.raises(Timeout, match=kept):
        cloud.fleet().down()
    assert [one for one, state in cloud.states().items() if state != "terminated"] == [kept]


def test_open_spot_requests_are_cancelled(cloud: Cloud) -> None:
    image = cloud.ec2.describe_images()["Images"][0]["ImageId"]
    tags = [{"Key": key, "Value": value} for key, value in experiment().tags("worker").items()]
    cloud.ec2.request_spot_instances(
        InstanceCount=1,
        LaunchSpecification={"ImageId": image, "InstanceType": "g4dn.xlarge"},
        TagSpecifications=[{"ResourceType": "spot-instances-request", "Tags": tags}],
    )
    assert any("spot request" in line for line in cloud.fleet().remains())
    cloud.fleet().down()
    assert cloud.asked_for("CancelSpotInstanceRequests")
    assert cloud.fleet().remains() == []


def test_a_region_without_the_types_is_named_before_anything_is_created(cloud: Cloud) -> None:
    with pytest.raises(
        ConfigError, match=r"region us-east-1 has no g99.xlarge for the worker; choose another --region"
    ):
        cloud.fleet().up(experiment(worker_types=("g99.xlarge",)))
    with pytest.raises(ConfigError, match=r"other types with --coordinator-type$"):
        cloud.fleet().up(experiment(coordinator_type="t99.small"))
    assert not cloud.asked_for("CreateSecurityGroup")


def test_images_that_do_not_fit_are_refused_before_anything_is_created(cloud: Cloud) -> None:
    windows = next(one for one in cloud.ec2.describe_images()["Images"] if one.get("Platform") == "windows")
    with pytest.raises(ConfigError, match="is not for Linux on x86-64"):
        cloud.fleet().up(experiment(image=windows["ImageId"]))
    with pytest.raises(ConfigError, match="ami-0000"):
        cloud.fleet().up(experiment(cpu_image="ami-0000"))
    assert not cloud.asked_for("CreateSecurityGroup")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("AuthFailure", "AWS refuses the credentials"),
        ("ExpiredToken", "AWS refuses the credentials"),
        ("UnauthorizedOperation", "these credentials do not permit DescribeInstances"),
    ],
)
def test_refused_credentials_are_one_line(cloud: Cloud, code: str, message: str) -> None:
    cloud.refuse("DescribeInstances", code, status=401)
    with pytest.raises(ConfigError, match=message) as caught:
        cloud.fleet().up(experiment())
    assert "\n" not in str(caught.value)
    assert not cloud.asked_for("CreateSecurityGroup")


def test_a_network_without_default_vpc_is_explained(cloud: Cloud) -> None:
    (vpc,) = cloud.ec2.describe_vpcs()["Vpcs"]
    for subnet in cloud.ec2.describe_subnets()["Subnets"]:
        cloud.ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    cloud.ec2.delete_vpc(VpcId=vpc["VpcId"])
    with pytest.raises(ConfigError, match="region us-east-1 has no default VPC"):
        cloud.fleet().up(experiment())


def test_prices_are_told_where_they_are_known(cloud: Cloud) -> None:
    fleet = cloud.fleet()
    machines = fleet.up(experiment())
    assert fleet.price_per_hour(machines) is None, "the fake has no price list of machines on demand"
    workers = [one for one in machines if one.is_spot]
    assert fleet.price_per_hour(workers) == pytest.approx(2 * 0.00001)
    assert cloud.fleet("y").check(experiment(name="y")) is None
    assert len(cloud.asked_for("RunInstances")) == 2, "a check starts nothing"


def test_the_price_is_read_from_a_product_of_the_price_list() -> None:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": "0.0208000000"}}
    product = {"terms": {"OnDemand": {"A.B": {"priceDimensions": {"A.B.C": dimension}}}}}
    assert _dollars(product) == pytest.approx(0.0208)


def test_the_console_of_a_machine_is_shown(cloud: Cloud) -> None:
    machine_id = cloud.fleet().up(experiment())[0].machine_id
    assert "Linux version" in cloud.fleet().log_of(machine_id)
    with pytest.raises(ConfigError, match=f"has no machine i-0 in us-east-1; it has .*{machine_id}"):
        cloud.fleet().log_of("i-0")
    cloud.refuse("GetConsoleOutput", "UnsupportedOperation", when=lambda p: "Latest" in p)
    assert "Linux version" in cloud.fleet().log_of(machine_id)
