"""Starts machines where AWS has them: type after type, and zone after zone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.base.errors import ConfigError
from manyhands.cloud.account import NO_CAPACITY, QUOTA, Account, ClientError, Image, Subnet, code_of, own_words
from manyhands.cloud.machine import Machine, machine_of
from manyhands.cloud.plan import EXTRA_DISK_GB, Experiment, MachineGroup, MachineRole, groups_of

MAX_INITIAL_PEERS = 4
"""One that answers is enough; the script of a machine has little room."""


class Launcher:
    """Starts machines for an experiment: zone after zone, type after type."""

    def __init__(self, account: Account, experiment: Experiment) -> None:
        self.groups = groups_of(experiment)
        self.initial_peers: list[str] = []
        self._account = account
        self._experiment = experiment
        self._vpc_id = ""
        self._subnets: list[Subnet] = []
        self._zones: dict[str, set[str]] = {}
        self._images: dict[MachineRole, Image] = {}
        self._security_group = ""
        self._home_zone = ""

    def look_around(self) -> None:
        """Look for all that is needed before anything is created.

        Raises:
            ConfigError: the region lacks a type, an image or a network.
        """
        self._vpc_id, self._subnets = self._account.default_network()
        self._zones = self._account.zones_of(sorted({one for group in self.groups for one in group.types}))
        for group in self.groups:
            if not self.offered(group):
                raise ConfigError(
                    f"region {self._account.region} has no {' or '.join(group.types)} for the {group.role}; choose "
                    f"another --region, or other types with --{group.role}-type" + "s" * (group.role == "worker")
                )
            self._images[group.role] = self._account.image(group.image, group.image_parameter)

    def offered(self, group: MachineGroup) -> list[str]:
        """The types of a group that the region has."""
        own_zones = {subnet.zone for subnet in self._subnets}
        return [one for one in group.types if self._zones[one] & own_zones]

    def create_security_group(self) -> None:
        """Take the name of the experiment.

        Raises:
            ConfigError: it is taken.
        """
        experiment, name = self._experiment, self._experiment.security_group
        with own_words("creating the security group"):
            try:
                answer = self._account.ec2.create_security_group(
                    GroupName=name,
                    Description=f"Peers of manyhands experiment {experiment.name}",
                    VpcId=self._vpc_id,
                    TagSpecifications=[_specification("security-group", experiment.tags())],
                )
            except ClientError as error:
                if code_of(error) != "InvalidGroup.Duplicate":
                    raise
                raise ConfigError(
                    f"experiment {experiment.name} is in use: there is a security group {name}; choose another --name"
                ) from None
        self._security_group = str(answer["GroupId"])

    def open_port(self) -> None:
        """Let everybody reach the peers at their port."""
        permission = {
            "IpProtocol": "tcp",
            "FromPort": self._experiment.port,
            "ToPort": self._experiment.port,
            "IpRanges": [{"CidrIp": "0.0.0.0/0", "Description": "peers of the run"}],
        }
        with own_words("opening the port"):
            is_seen = self._account.ec2.get_waiter("security_group_exists")
            is_seen.wait(GroupIds=[self._security_group], WaiterConfig={"Delay": 5, "MaxAttempts": 6})
            self._account.ec2.authorize_security_group_ingress(GroupId=self._security_group, IpPermissions=[permission])

    def launch(self, group: MachineGroup, number: int) -> tuple[list[Machine], list[str]]:
        """Start up to this many machines of a group.

        Returns:
            The machines, and what AWS said of each type that it had too few of.
        Raises:
            ConfigError: AWS refuses for another reason than capacity or a quota.
        """
        started: list[Machine] = []
        problems: dict[str, str] = {}
        for one_type in self.offered(group):
            for subnet in self._places(one_type):
                got, code = self._launch_in(subnet, one_type, group, number - len(started))
                started += got
                if len(started) == number:
                    return started, []
                problems[one_type] = f"{one_type}: {code or 'too few'}"
                if code in QUOTA:
                    break  # it is the same in all zones
        return started, list(problems.values())

    def _launch_in(self, subnet: Subnet, one_type: str, group: MachineGroup, number: int) -> tuple[list[Machine], str]:
        """Start up to this many machines of one type in one zone; returns them, and the last refusal.

        AWS starts fewer than asked for where it lacks capacity, but none if all would exceed a quota: fewer are asked
        for then.
        """
        started: list[Machine] = []
        ask, refusal = number, ""
        while ask:
            got, code = self._try(group, one_type, subnet, ask)
            started += got
            refusal = code or refusal
            if code not in QUOTA and not (got and refusal):
                break
            ask = min(ask // 2 if code else ask, number - len(started))
        return started, refusal

    def _places(self, one_type: str) -> list[Subnet]:
        """The subnets whose zone has the type; first that of the coordinator, as traffic within a zone is free."""
        places = [subnet for subnet in self._subnets if subnet.zone in self._zones[one_type]]
        return sorted(places, key=lambda subnet: subnet.zone != self._home_zone)

    def _try(self, group: MachineGroup, one_type: str, subnet: Subnet, number: int) -> tuple[list[Machine], str]:
        image, tags = self._images[group.role], self._experiment.tags(group.role)
        tagged = ["instance", "volume"] + ["spot-instances-request"] * group.is_spot
        request: dict[str, Any] = {
            "ImageId": image.image_id,
            "InstanceType": one_type,
            "MinCount": 1,
            "MaxCount": number,
            "SubnetId": subnet.subnet_id,
            "SecurityGroupIds": [self._security_group],
            "UserData": group.user_data(self.initial_peers[:MAX_INITIAL_PEERS]),
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
            "BlockDeviceMappings": [
                {
                    "DeviceName": image.root_device,
                    "Ebs": {
                        "VolumeSize": image.size_gb + EXTRA_DISK_GB,
                        "VolumeType": "gp3",
                        "DeleteOnTermination": True,
                    },
                }
            ],
            "TagSpecifications": [_specification(kind, tags) for kind in tagged],
        }
        if group.is_spot:
            spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
        else:
            request["InstanceInitiatedShutdownBehavior"] = "terminate"
        with own_words(f"starting {one_type} in {subnet.zone}"):
            try:
                answer = self._account.ec2.run_instances(**request)
            except ClientError as error:
                if code_of(error) in NO_CAPACITY | QUOTA:
                    return [], code_of(error)
                raise
        if group.role == "coordinator":
            self._home_zone = subnet.zone
        return [machine_of(one, group.role) for one in answer["Instances"]], ""


def _specification(resource: str, tags: Mapping[str, str]) -> dict[str, Any]:
    return {"ResourceType": resource, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
