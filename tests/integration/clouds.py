"""A fake AWS (moto, in this process) that can refuse, and a clock that does not wait."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlencode

import boto3
from botocore.awsrequest import AWSResponse
from moto import mock_aws

from manyhands.cloud.account import Account
from manyhands.cloud.aws import Fleet
from manyhands.cloud.plan import Experiment

REGION = "us-east-1"
UBUNTU = "ami-1e749f67"
"""An image of Ubuntu that the fake knows."""

Parameters = dict[str, list[str]]
Handler = Callable[[str, Parameters], AWSResponse | None]


class _Raw(io.BytesIO):
    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()


def _answer(url: str, status: int, body: str) -> AWSResponse:
    return AWSResponse(url, status, {"content-type": "text/xml"}, _Raw(body.encode()))


class Clock:
    """Stands in for ``time``: a sleep takes no time, and lets things happen."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events: list[Callable[[], None]] = []  # each happens in one sleep

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < 3600, "it waits for ever"
        if self.events:
            self.events.pop(0)()


class Cloud:
    """An account in a fake AWS.

    Attributes:
        told: what people were told.
        calls: the operations that AWS was asked for, with their parameters.
    """

    def __init__(self) -> None:
        self.account, self.ec2 = _clients()
        _clouds[:] = [self]
        self.clock = Clock()
        self.told: list[str] = []
        self.calls: list[tuple[str, Parameters]] = []
        self._handlers: dict[str, list[Handler]] = {}

    def fleet(self, name: str = "x") -> Fleet:
        return Fleet(self.account, name, self.told.append, sleep=self.clock.sleep, now=self.clock.now)

    def refuse(
        self, operation: str, code: str, *, times: int = 10**6, status: int = 400,
        when: Callable[[Parameters], bool] = lambda parameters: True,
    ) -> None:  # fmt: skip
        """From now on, AWS refuses an operation."""
        left = [times]

        def handler(url: str, parameters: Parameters) -> AWSResponse | None:
            if not left[0] or not when(parameters):
                return None
            left[0] -= 1
            error = f"<Error><Code>{code}</Code><Message>as told</Message></Error>"
            return _answer(url, status, f"<Response><Errors>{error}</Errors><RequestID>r</RequestID></Response>")

        self._handlers.setdefault(operation, []).append(handler)

    def before(self, operation: str, act: Callable[[], None]) -> None:
        """Call ``act`` when AWS is asked for an operation."""
        self._handlers.setdefault(operation, []).append(lambda url, parameters: act())

    def states(self) -> dict[str, str]:
        """The states of all machines in the account."""
        return {one["InstanceId"]: one["State"]["Name"] for one in self.instances()}

    def instances(self) -> list[dict[str, Any]]:
        reservations = self.ec2.describe_instances()["Reservations"]
        return [one for reserved in reservations for one in reserved["Instances"]]

    def workers(self) -> list[str]:
        """Ids of the running spot machines."""
        return [
            one["InstanceId"]
            for one in self.instances()
            if one.get("InstanceLifecycle") == "spot" and one["State"]["Name"] == "running"
        ]

    def check_nothing_left(self) -> None:
        assert set(self.states().values()) <= {"terminated"}
        groups = self.ec2.describe_security_groups()["SecurityGroups"]
        assert [group["GroupName"] for group in groups if group["GroupName"] != "default"] == []
        assert self.ec2.describe_volumes()["Volumes"] == []

    def asked_for(self, operation: str) -> list[Parameters]:
        return [parameters for name, parameters in self.calls if name == operation]

    def answer(self, request: Any) -> AWSResponse | None:
        """The answer to a request, if it is not that of moto."""
        parameters = parse_qs(request.body.decode() if isinstance(request.body, bytes) else request.body)
        (operation,) = parameters["Action"]
        self.calls.append((operation, parameters))
        if operation == "RunInstances":  # moto starts as many as must be, AWS as many as may be
            request.body = urlencode(parameters | {"MinCount": parameters["MaxCount"]}, doseq=True).encode()
        answers = (handler(request.url, parameters) for handler in self._handlers.get(operation, []))
        answer = next((answer for answer in answers if answer is not None), None)
        if answer is not None:
            request.url = "https://elsewhere.invalid/"  # else moto does it all the same
        return answer


_clouds: list[Cloud] = []


@functools.cache
def _clients() -> tuple[Account, Any]:
    """The account under test, and a client of somebody else, who is never refused anything; they take long to make."""
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    session = boto3.Session(region_name=REGION, **keys)
    other = session.client("ec2")
    events = session.events._emitter
    events.register_first("before-send.ec2", lambda request, **_: _clouds[0].answer(request))
    events.register_first("before-send.ssm.GetParameter", _parameter)
    return Account(REGION, session), other


def _parameter(request: Any, **_: Any) -> AWSResponse:
    """AWS's own parameters, of which the fake has not all."""
    name = json.loads(request.body)["Name"]
    assert name.endswith("/ami-id")
    return _answer(request.url, 200, json.dumps({"Parameter": {"Name": name, "Value": UBUNTU}}))


@contextmanager
def fake_aws() -> Iterator[Cloud]:
    with mock_aws():
        yield Cloud()


def experiment(**options: Any) -> Experiment:
    return Experiment(**{"name": "x", "workers": 2} | options)
