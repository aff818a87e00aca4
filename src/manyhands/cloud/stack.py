"""The CloudFormation stack of an experiment: AWS creates its machines, replaces lost ones, and deletes all of them.

AWS does that by itself, also while this computer sleeps; this computer keeps no state. Credentials come from boto3's
own chain (environment, ~/.aws, single sign-on, the role of a machine); they are neither read nor stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3
from botocore import exceptions as aws_errors

from manyhands.base.errors import ConfigError, Unavailable
from manyhands.base.text import reason_of
from manyhands.runtime.exit_delay import delay_exit
from manyhands.runtime.interrupts import uninterrupted

EXPERIMENT_TAG = "manyhands:experiment"
ROLE_TAG = "manyhands:role"


@contextmanager
def own_words() -> Iterator[None]:
    """Turn the errors of boto3 within the block into errors of one line.

    Raises:
        ConfigError: AWS refuses a request, or there are no credentials or no region.
        Unavailable: AWS does not answer.
    """
    try:
        yield
    except aws_errors.ClientError as error:
        raise ConfigError(f"AWS refuses: {reason_of(error)}") from None
    except (aws_errors.HTTPClientError, aws_errors.ConnectionError) as error:
        raise Unavailable(f"AWS does not answer: {reason_of(error)}") from None
    except aws_errors.BotoCoreError as error:
        advice = "'aws configure' or 'aws sso login' stores credentials, --region names a region"
        raise ConfigError(f"no AWS account to use: {reason_of(error)} ({advice})") from None


class Region:
    """The stacks of all experiments in one region of an account. Its methods raise the errors of boto3 too.

    Args:
        tell: called with a line of text for the user at each event.
    """

    def __init__(self, name: str | None, tell: Callable[[str], None]) -> None:
        session = boto3.Session(region_name=name)
        self._ec2 = session.client("ec2")
        self._cloudformation = session.client("cloudformation")
        self._autoscaling = session.client("autoscaling")
        self._tell = tell
        self.name: str = self._ec2.meta.region_name

    def find(self, experiment: str) -> dict[str, Any]:
        """The stack of an experiment.

        Raises:
            ConfigError: there is none; names the existing ones.
        """
        pages = self._cloudformation.get_paginator("describe_stacks").paginate()
        described: list[dict[str, Any]] = [one for page in pages for one in page["Stacks"]]
        stacks = {tags_of(one).get(EXPERIMENT_TAG, ""): one for one in described}
        if experiment not in stacks:
            there = ", ".join(sorted(filter(None, stacks))) or "none"
            where = f"{self.name}; experiments there: {there}. --region looks in another region"
            raise ConfigError(f"there is no experiment {experiment} in {where}")
        return stacks[experiment]

    def machines(self, experiment: str) -> list[tuple[str, dict[str, Any]]]:
        """All machines of an experiment that are not gone, with their roles and by role."""
        states = ["pending", "running", "stopping", "stopped", "shutting-down"]
        wanted = {f"tag:{EXPERIMENT_TAG}": [experiment], "instance-state-name": states}
        pages = self._ec2.get_paginator("describe_instances").paginate(
            Filters=[{"Name": name, "Values": values} for name, values in wanted.items()]
        )
        machines = [one for page in pages for reserved in page["Reservations"] for one in reserved["Instances"]]
        return sorted(((tags_of(one)[ROLE_TAG], one) for one in machines), key=lambda pair: pair[0])

    def log_of(self, machine_id: str) -> str:
        """The console output of a machine; AWS shows it with a delay."""
        return str(self._ec2.get_console_output(InstanceId=machine_id, Latest=True).get("Output", ""))

    def why_machines_lack(self, stack: Mapping[str, Any]) -> str:
        """AWS's reason why it last could not start a machine of a stack; empty if it could start all."""
        groups = [f"{stack['StackName']}-{role}" for role in ("workers", "auxiliary")]
        for one in self._autoscaling.describe_scaling_activities(IncludeDeletedGroups=True)["Activities"]:
            is_ours = one["AutoScalingGroupName"] in groups and one["StartTime"] >= stack["CreationTime"]
            if is_ours and one["StatusCode"] == "Failed":  # the newest one is the first
                return reason_of(one["StatusMessage"])
        return ""

    def create(self, experiment: str, template: str, parameters: Mapping[str, str]) -> None:
        """Create the stack of an experiment, and wait until its machines run.

        If that fails, or at Ctrl-C, AWS deletes what it has created.

        Raises:
            ConfigError: AWS could not create something.
        """
        stack_id = ""
        try:
            with uninterrupted():  # a stack whose id is not known could not be deleted
                stack_id = self._cloudformation.create_stack(
                    StackName=f"manyhands-{experiment}",
                    TemplateBody=template,
                    Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
                    Tags=[{"Key": EXPERIMENT_TAG, "Value": experiment}],
                    OnFailure="DELETE",
                    TimeoutInMinutes=15,
                )["StackId"]
            self._tell("AWS creates the machines, which takes a few minutes. At Ctrl-C it deletes them.")
            self._cloudformation.get_waiter("stack_create_complete").wait(StackName=stack_id)
        except BaseException as error:
            if stack_id:
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
            self._cloudformation.get_waiter("stack_delete_complete").wait(StackName=stack_id)
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


def tags_of(described: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a stack or of a machine."""
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags", [])}
