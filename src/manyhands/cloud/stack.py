"""The CloudFormation stack of an experiment: AWS creates its machines, replaces lost ones, and deletes all of them.

AWS does that by itself, also while this computer sleeps; this computer keeps no state. Credentials come from boto3's
own chain (environment, ~/.aws, single sign-on, the role of a machine); they are neither read nor stored.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import boto3
from botocore import exceptions as aws_errors
from botocore.config import Config

from manyhands.base.errors import ConfigError, Unavailable
from manyhands.base.text import reason_of
from manyhands.cloud.experiment import Experiment, NoAccount
from manyhands.runtime.exit_delay import delay_exit
from manyhands.runtime.interrupts import uninterrupted

EXPERIMENT_TAG = "manyhands:experiment"
ROLE_TAG = "manyhands:role"

UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
"""SSM parameter with the id of the newest official image of Ubuntu."""
DEEP_LEARNING = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
"""SSM parameter with the id of the newest official image of Ubuntu with NVIDIA's driver."""
EXTRA_DISK_GB = 20
"""Room for Python packages, data and checkpoints on top of the size of the image."""

CREATE_LIMIT_MIN = 15
"""AWS deletes a stack that is not complete by then."""
WAIT = {"Delay": 5, "MaxAttempts": 2 * CREATE_LIMIT_MIN * 60 // 5}
"""Polls a stack every 5 s, for twice as long as AWS itself waits."""

Described = Mapping[str, Any]
"""A stack, a machine or an image, as boto3 describes it."""


@contextmanager
def own_words() -> Iterator[None]:
    """Turn the errors of boto3 within the block into errors of one line.

    Raises:
        NoAccount: there are no credentials, or no region is configured.
        ConfigError: AWS refuses a request.
        Unavailable: AWS does not answer, or throttles for long.
    """
    try:
        yield
    except aws_errors.ClientError as error:
        code = error.response["Error"]["Code"]
        reason = reason_of(error)
        if code.startswith(("Throttling", "RequestLimitExceeded")):
            raise Unavailable(f"AWS throttles this account, try again in a minute: {reason}") from None
        if any(word in code for word in ("AuthFailure", "Expired", "Signature", "Token", "UnrecognizedClient")):
            reason += " ('aws configure' or 'aws sso login' stores new credentials; is the clock right?)"
        raise ConfigError(f"AWS refuses: {reason}") from None
    except (aws_errors.HTTPClientError, aws_errors.ConnectionError) as error:
        raise Unavailable(f"AWS does not answer: {reason_of(error)}") from None
    except aws_errors.BotoCoreError as error:
        raise NoAccount(
            f"no AWS account to use: {reason_of(error)} ('aws configure' or 'aws sso login' stores credentials, "
            "AWS_PROFILE chooses among them, --region names a region)"
        ) from None


class Region:
    """The stacks of all experiments in one region of an account. Its methods raise the errors of boto3 too.

    Args:
        tell: called with a line of text for the user at each event.
    """

    def __init__(self, name: str | None, tell: Callable[[str], None]) -> None:
        session = boto3.Session(region_name=name)
        # botocore itself waits and tries again when AWS throttles, up to about a minute in all
        config = Config(retries={"mode": "standard", "max_attempts": 8}, connect_timeout=10, read_timeout=60)
        self._client = functools.partial(session.client, config=config)
        self._ec2 = self._client("ec2")
        self._cloudformation = self._client("cloudformation")
        self._tell = tell
        self.name: str = self._ec2.meta.region_name
        session.get_partition_for_region(self.name)  # raises if no region can have this name

    # what an experiment needs

    def parameters(self, experiment: Experiment) -> dict[str, str]:
        """The parameters of the template that depend on the account.

        Raises:
            ConfigError: there is no default network, or an image does not fit.
        """
        vpcs = self._ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
        subnets = self._ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"]
        if not vpcs or not subnets:
            raise ConfigError(
                f"region {self.name} has no default VPC; 'aws ec2 create-default-vpc' makes one, or choose another "
                "region with --region"
            )
        cpu_image, cpu_disk_gb = self._image(experiment.cpu_image, UBUNTU)
        worker_image, worker_disk_gb = self._image(experiment.image, DEEP_LEARNING)
        return {
            "Vpc": vpcs[0]["VpcId"],
            "Subnets": ",".join(one["SubnetId"] for one in subnets),
            "CpuImage": cpu_image,
            "CpuDiskGb": cpu_disk_gb,
            "WorkerImage": worker_image,
            "WorkerDiskGb": worker_disk_gb,
        }

    def _image(self, image_id: str | None, newest: str) -> tuple[str, str]:
        """The id of an image, by default of the one that the SSM parameter names, and the size of a disk for it."""
        if image_id is None:
            image_id = str(self._client("ssm").get_parameter(Name=newest)["Parameter"]["Value"])
        images = self._ec2.describe_images(ImageIds=[image_id])["Images"]
        image: Described = images[0] if images else {}
        if image.get("Architecture") != "x86_64" or image.get("RootDeviceName") != "/dev/sda1":
            raise ConfigError(f"{image_id} is not an image of Ubuntu for x86-64 in {self.name}; name one that is")
        disks = {disk["DeviceName"]: disk.get("Ebs", {}) for disk in image["BlockDeviceMappings"]}
        return image_id, str(disks["/dev/sda1"]["VolumeSize"] + EXTRA_DISK_GB)

    def spot_prices(self, types: tuple[str, ...]) -> dict[str, float]:
        """The current spot price of each type in its cheapest zone, in US dollars per hour."""
        pages = self._ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=list(types), ProductDescriptions=["Linux/UNIX"], StartTime=datetime.now(timezone.utc)
        )
        prices: dict[str, float] = {}
        for one in (one for page in pages for one in page["SpotPriceHistory"]):
            price = float(one["SpotPrice"])
            prices[one["InstanceType"]] = min(price, prices.get(one["InstanceType"], price))
        return prices

    # look

    def find(self, experiment: str) -> Described:
        """The stack of an experiment.

        Raises:
            ConfigError: there is none; names the existing ones.
        """
        pages = self._cloudformation.get_paginator("describe_stacks").paginate()
        stacks: list[Described] = [one for page in pages for one in page["Stacks"]]
        by_experiment = {tags_of(one)[EXPERIMENT_TAG]: one for one in stacks if EXPERIMENT_TAG in tags_of(one)}
        if experiment not in by_experiment:
            raise ConfigError(
                f"there is no experiment {experiment} in {self.name}; experiments there: "
                f"{', '.join(sorted(by_experiment)) or 'none'}. --region looks in another region"
            )
        return by_experiment[experiment]

    def machines(self, experiment: str) -> list[Described]:
        """All machines of an experiment that are not gone, by role."""
        states = ["pending", "running", "stopping", "stopped", "shutting-down"]
        wanted = {f"tag:{EXPERIMENT_TAG}": [experiment], "instance-state-name": states}
        pages = self._ec2.get_paginator("describe_instances").paginate(
            Filters=[{"Name": name, "Values": values} for name, values in wanted.items()]
        )
        machines = [one for page in pages for reserved in page["Reservations"] for one in reserved["Instances"]]
        return sorted(machines, key=lambda one: (tags_of(one).get(ROLE_TAG, ""), one["InstanceId"]))

    def log_of(self, machine_id: str) -> str:
        """The console output of a machine; AWS shows it with a delay."""
        return str(self._ec2.get_console_output(InstanceId=machine_id, Latest=True).get("Output", ""))

    def why_machines_lack(self, stack: Described) -> str:
        """AWS's reason why it last could not start a machine of a stack; empty if it could start all."""
        groups = [f"{stack['StackName']}-{role}" for role in ("workers", "auxiliary")]
        for one in self._client("autoscaling").describe_scaling_activities(IncludeDeletedGroups=True)["Activities"]:
            is_ours = one["AutoScalingGroupName"] in groups and one["StartTime"] >= stack["CreationTime"]
            if is_ours and one["StatusCode"] == "Failed":  # the newest one is the first
                return reason_of(one["StatusMessage"])
        return ""

    # create and delete

    def create(self, experiment: Experiment, parameters: Mapping[str, str]) -> None:
        """Create the stack of an experiment, and wait until its machines run.

        If that fails, or at Ctrl-C, AWS deletes what it has created.

        Raises:
            ConfigError: the name is in use, or AWS could not create something.
        """
        self._tell("AWS creates the machines, which takes a few minutes. At Ctrl-C it deletes them.")
        stack_id = ""
        try:
            with uninterrupted():  # a stack whose id is not known could not be deleted
                stack_id = self._cloudformation.create_stack(
                    StackName=f"manyhands-{experiment.name}",
                    TemplateBody=experiment.template,
                    Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
                    Tags=[{"Key": EXPERIMENT_TAG, "Value": experiment.name}],
                    ClientRequestToken=uuid.uuid4().hex,  # botocore may send it twice
                    OnFailure="DELETE",
                    TimeoutInMinutes=CREATE_LIMIT_MIN,
                )["StackId"]
            self._cloudformation.get_waiter("stack_create_complete").wait(StackName=stack_id, WaiterConfig=WAIT)
        except self._cloudformation.exceptions.AlreadyExistsException:
            raise ConfigError(
                f"experiment {experiment.name} is in use in {self.name}: end it with manyhands aws down, or choose "
                "another --name"
            ) from None
        except BaseException as error:
            if stack_id and "DELETE_COMPLETE" not in str(error):
                self._tell("Deleting what AWS has created; 'manyhands aws down' waits until that is done, or retries.")
                with delay_exit(60.0):
                    self._cloudformation.delete_stack(StackName=stack_id)
            if isinstance(error, aws_errors.WaiterError):
                failure = self._failure_of(stack_id)
                raise ConfigError(f"AWS could not create the machines, and deletes them: {failure}") from None
            raise

    def delete(self, experiment: str) -> None:
        """Delete the stack of an experiment, and wait until nothing is left of it.

        Raises:
            ConfigError: there is none.
            Unavailable: something is left.
        """
        stack_id = self.find(experiment)["StackId"]
        self._tell("AWS ends the machines, which takes a few minutes. It continues if you do not wait.")
        self._cloudformation.delete_stack(StackName=stack_id)
        try:
            self._cloudformation.get_waiter("stack_delete_complete").wait(StackName=stack_id, WaiterConfig=WAIT)
        except aws_errors.WaiterError:
            raise Unavailable(f"AWS could not end all machines: {self._failure_of(stack_id)}") from None

    def _failure_of(self, stack_id: str) -> str:
        """The first failure of a stack, of which others may be consequences."""
        pages = self._cloudformation.get_paginator("describe_stack_events").paginate(StackName=stack_id)
        for event in reversed([event for page in pages for event in page["StackEvents"]]):
            reason = event.get("ResourceStatusReason", "")
            if event["ResourceStatus"].endswith("_FAILED") and "cancelled" not in reason:
                return f"{event['LogicalResourceId']}: {reason_of(reason)}"
        (stack,) = self._cloudformation.describe_stacks(StackName=stack_id)["Stacks"]
        return self.why_machines_lack(stack) or f"it took too long; the stack is in the state {stack['StackStatus']}"


def tags_of(described: Described) -> dict[str, str]:
    """The tags of a stack or of a machine."""
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags", [])}
