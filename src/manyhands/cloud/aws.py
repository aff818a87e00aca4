"""Starts the machines of an experiment in AWS, replaces lost ones, lists them and ends them.

Everything is found again by its tags, so nothing is kept on this machine. The security group is created first and
deleted last: its name is free only once per experiment, and AWS does not delete it while any machine uses it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from manyhands.base.errors import ConfigError, Timeout, Unavailable
from manyhands.base.text import counted
from manyhands.cloud.account import Account, ClientError, code_of, own_words
from manyhands.cloud.launcher import Launcher
from manyhands.cloud.machine import ENDED, Machine, counted_by_type, machine_of, tags_on
from manyhands.cloud.plan import (
    CREATOR,
    CREATOR_TAG,
    EXPERIMENT_TAG,
    Experiment,
    checked_name,
    tags_of,
)
from manyhands.runtime.exit_delay import delay_exit

WATCH_PERIOD_S = 45.0
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 600.0
LOOK_PERIOD_S = 5.0
UNSEEN_S = 300.0
"""A machine that AWS has just started may be missing in its lists for a while."""

CANNOT_END = ("InvalidInstanceID.NotFound", "OperationNotPermitted")
"""Gone already, or protected by its owner."""
STILL_USED = ("DependencyViolation", "InvalidGroup.InUse", "InvalidGroup.NotFound")


class Fleet:
    """The machines of one experiment.

    Attributes:
        region: where they are.
    Args:
        tell: receives a line for people at each event.
        show: receives what is going on, for a display that is drawn again and again.
        sleep: waits for seconds.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        account: Account,
        name: str,
        tell: Callable[[str], None],
        *,
        show: Callable[[str], None] = lambda text: None,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = checked_name(name)
        self.region = account.region
        self._account = account
        self._ec2 = account.ec2
        self._tell = tell
        self._show = show
        self._sleep = sleep
        self._now = now
        self._started: dict[str, tuple[str, float]] = {}  # machine -> its role, and when this process started it
        self._launcher: Launcher | None = None

    @property
    def down_command(self) -> str:
        """The command that ends everything."""
        return f"manyhands aws down --name {self.name} --region {self.region}"

    # what is there

    def machines(self) -> list[Machine]:
        """All machines that AWS still lists; ended ones stay in its lists for about an hour."""
        with own_words("listing machines"):
            pages = self._ec2.get_paginator("describe_instances").paginate(Filters=self._filters())
            found = [one for page in pages for reserved in page["Reservations"] for one in reserved["Instances"]]
        machines = [machine_of(one) for one in found if self._is_ours(one)]
        return sorted(machines, key=lambda machine: (machine.role, machine.launched_at, machine.machine_id))

    def remains(self) -> list[str]:
        """Everything of the experiment that is still there, in words."""
        lines = [f"{one.role} machine {one.machine_id} ({one.state})" for one in self.machines() if one.state != ENDED]
        lines += [f"spot request {request}" for request in self._spot_requests()]
        with own_words("listing disks"):
            volumes = self._ec2.describe_volumes(Filters=self._filters())["Volumes"]
        lines += [f"disk {one['VolumeId']}" for one in volumes if self._is_ours(one)]
        return lines + [f"security group {group}" for group in self._security_groups()]

    def log_of(self, machine_id: str) -> str:
        """What a machine wrote to its console; AWS shows it with a delay.

        Raises:
            ConfigError: the experiment has no such machine.
        """
        ids = [machine.machine_id for machine in self.machines()]
        if machine_id not in ids:
            there = f"it has {', '.join(ids)}" if ids else "it has none"
            raise ConfigError(f"experiment {self.name} has no machine {machine_id} in {self.region}; {there}")
        with own_words(f"reading the console of {machine_id}"):
            try:
                answer = self._ec2.get_console_output(InstanceId=machine_id, Latest=True)
            except ClientError as error:
                if code_of(error) != "UnsupportedOperation":  # older types keep only what was written at the start
                    raise
                answer = self._ec2.get_console_output(InstanceId=machine_id)
        return str(answer.get("Output", ""))

    def price_per_hour(self, machines: Iterable[Machine]) -> float | None:
        """What these machines cost together in US dollars, without disks and traffic; None if it cannot be found."""
        machines = list(machines)
        spot = self._account.spot_prices(sorted({one.machine_type for one in machines if one.is_spot}))
        on_demand = {
            one: self._account.on_demand_price(one)
            for one in sorted({machine.machine_type for machine in machines if not machine.is_spot})
        }
        prices = [
            spot.get((one.machine_type, one.zone)) if one.is_spot else on_demand[one.machine_type] for one in machines
        ]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def check(self, experiment: Experiment) -> float | None:
        """Look for all that :meth:`up` needs, and create nothing.

        Returns:
            The price per hour in US dollars at the first types that the region has; None if it cannot be found.
        Raises:
            ConfigError: :meth:`up` would fail.
        """
        self._check_unused()
        launcher = Launcher(self._account, experiment)
        launcher.look_around()
        total = 0.0
        for group in launcher.groups:
            one_type = launcher.offered(group)[0]
            spot = [price for (of, _), price in self._account.spot_prices([one_type]).items() if of == one_type]
            price = min(spot, default=None) if group.is_spot else self._account.on_demand_price(one_type)
            if price is None:
                return None
            total += group.number * price
        return total

    def others(self) -> list[str]:
        """Names of all experiments in this region that have machines."""
        filters = [{"Name": f"tag:{CREATOR_TAG}", "Values": [CREATOR]}]
        with own_words("listing experiments"):
            pages = self._ec2.get_paginator("describe_instances").paginate(Filters=filters)
            found = [one for page in pages for reserved in page["Reservations"] for one in reserved["Instances"]]
        return sorted({tags_on(one).get(EXPERIMENT_TAG, "") for one in found if one["State"]["Name"] != ENDED} - {""})

    # start

    def up(self, experiment: Experiment) -> list[Machine]:
        """Start everything, and wait until the machines run; if that fails, end all of it.

        Fewer workers than wanted are started if AWS has no more; :meth:`watch` then starts the others.

        Raises:
            ConfigError: the name is in use, or AWS refuses something.
            Timeout: the machines do not run in time.
        """
        self._check_unused()
        launcher = Launcher(self._account, experiment)
        launcher.look_around()
        launcher.create_security_group()  # fails if another process begins this experiment: end nothing of it then
        try:
            return self._start_all(launcher, experiment)
        except BaseException:
            self._clean_up()
            raise

    def _check_unused(self) -> None:
        if there := self.remains():
            raise ConfigError(
                f"experiment {self.name} is in use in {self.region}: {there[0]}"
                + (f" and {len(there) - 1} more" if len(there) > 1 else "")
                + f"; end it with: {self.down_command}, or choose another --name"
            )

    def _start_all(self, launcher: Launcher, experiment: Experiment) -> list[Machine]:
        launcher.open_port()
        self._tell(f"created security group {experiment.security_group}, open for TCP port {experiment.port}")
        for group in launcher.groups:
            self._show(f"starting {counted(group.number, group.role + ' machine')}")
            started, problems = launcher.launch(group, group.number)
            self._note(started)
            if not started or (len(started) < group.number and group.role != "worker"):
                raise ConfigError(
                    f"too few machines for {group.role}: {'; '.join(problems)}; try another --region or other types, "
                    "or ask for a higher quota under 'Service Quotas' of EC2"
                )
            self._tell(f"{group.role}: started {counted_by_type(started)}")
            if len(started) < group.number:
                missing = group.number - len(started)
                self._tell(f"{counted(missing, 'worker')} could not be started yet: {'; '.join(problems)}")
            if group.role != "worker":
                launcher.initial_peers += [f"{one.private_ip}:{experiment.port}" for one in started]
        self._launcher = launcher
        return self._wait_until_running()

    def _wait_until_running(self) -> list[Machine]:
        """Wait until all machines run; a spot worker may be lost meanwhile, another one may not."""
        deadline = self._now() + START_TIMEOUT_S
        while True:
            machines = [one for one in self.machines() if one.machine_id in self._started]
            if broken := [one for one in machines if not one.is_alive and one.role != "worker"]:
                raise ConfigError(f"the {broken[0].role} did not start: {broken[0].reason or broken[0].state}")
            self._show(f"{sum(one.state == 'running' for one in machines)} of {len(self._started)} machines run")
            if len(machines) == len(self._started) and all(one.state != "pending" for one in machines):
                return machines
            if self._now() >= deadline:
                raise Timeout("waiting until the machines run", START_TIMEOUT_S)
            self._sleep(LOOK_PERIOD_S)

    def _clean_up(self) -> None:
        """End everything after a failure or Ctrl-C; says so if that fails too."""
        self._tell("ending what was started; this takes about a minute")
        try:
            with delay_exit(END_TIMEOUT_S):
                self.down()
        except Exception as second:  # noqa: BLE001 (the first error is raised; this one costs money and is told)
            self._tell(f"not everything is ended, and what is left costs money: {second}. Run: {self.down_command}")
        else:
            self._tell("nothing is left")

    # keep

    def watch(self) -> None:
        """Replace lost workers and auxiliary machines every 45 s, until the coordinator is gone.

        Call :meth:`up` before. Failures of the network are told, and tried again.

        Raises:
            ConfigError: the credentials are no longer valid.
        """
        problem = ""
        while True:
            self._sleep(WATCH_PERIOD_S)
            try:
                if not self.replace_lost():
                    self._tell(
                        "the coordinator is gone, so lost machines are no longer replaced; was the experiment taken "
                        f"down? What is left ends with: {self.down_command}"
                    )
                    return
            except Unavailable as error:
                if str(error) != problem:
                    self._tell(f"{error}; trying again")
                problem = str(error)
            else:
                problem = ""

    def replace_lost(self) -> bool:
        """Start as many machines as are missing; returns False, and starts none, if the coordinator is gone.

        Raises:
            Unavailable: AWS has no machine of any type, or does not answer.
        """
        launcher = self._launcher
        assert launcher is not None, "up() comes before watch()"
        machines = {one.machine_id: one for one in self.machines()}
        alive = Counter(one.role for one in machines.values() if one.is_alive)
        if not alive["coordinator"]:
            return False
        unseen = Counter(
            role
            for machine_id, (role, started_at) in self._started.items()
            if machine_id not in machines and self._now() - started_at < UNSEEN_S
        )
        groups = [one for one in launcher.groups if one.role != "coordinator"]
        there = ", ".join(f"{alive[one.role]} of {counted(one.number, _noun(one.role))}" for one in groups)
        self._show(f"{there} alive; Ctrl-C leaves the machines running")
        lacking = []
        for group in groups:
            missing = group.number - alive[group.role] - unseen[group.role]
            if missing <= 0:
                continue
            started, problems = launcher.launch(group, missing)
            self._note(started)
            if started:
                self._tell(f"{counted(missing, _noun(group.role))} missing: started {counted_by_type(started)}")
            if len(started) < missing:
                lacking.append(f"{counted(missing - len(started), _noun(group.role))} missing: {'; '.join(problems)}")
        if lacking:
            raise Unavailable(", ".join(lacking))
        return True

    def _note(self, started: Iterable[Machine]) -> None:
        self._started |= {one.machine_id: (one.role, self._now()) for one in started}

    # end

    def down(self) -> bool:
        """End everything that has the tags of the experiment, and wait until nothing is left.

        Returns:
            Whether there was anything; machines that ended a short time ago count.
        Raises:
            Timeout: something is left; the message lists it.
        """
        deadline = self._now() + END_TIMEOUT_S
        told: list[str] = []
        is_known = False
        while True:
            try:
                is_known |= self._end_once()
                left = self.remains()
                is_known |= bool(left)
            except Unavailable as error:  # as long as machines may run, a bad network is no reason to give up
                left = [f"unknown ({error})"]
            if not left:
                return is_known
            if left != told:
                self._tell("still there: " + ", ".join(left[:4]) + (f" and {len(left) - 4} more" * (len(left) > 4)))
                told = left
            if self._now() >= deadline:
                raise Timeout(f"ending experiment {self.name}; still there: {', '.join(left)}", END_TIMEOUT_S)
            self._show(f"ending: {counted(len(left), 'resource')} left")
            self._sleep(LOOK_PERIOD_S)

    def _end_once(self) -> bool:
        """Ask AWS to end all that is there; what it refuses now is asked again. Returns whether there was anything."""
        if requests := self._spot_requests():
            with own_words("cancelling spot requests"):
                self._ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=requests)
        machines = self.machines()
        seen = {one.machine_id: one.state for one in machines}
        doomed = [one for one, state in seen.items() if state not in (ENDED, "shutting-down")]
        doomed += [one for one in self._started if one not in seen]
        self._terminate(doomed)
        if any(state != ENDED for state in seen.values()):
            return True
        groups = self._security_groups()
        for group in groups:
            with own_words("deleting the security group"):
                try:
                    self._ec2.delete_security_group(GroupId=group)
                except ClientError as error:
                    if code_of(error) not in STILL_USED:
                        raise
        return bool(requests or machines or groups)

    def _terminate(self, machine_ids: Sequence[str]) -> None:
        """End machines. AWS ends none of a list if it refuses one, so a refused list is ended one by one."""
        if not machine_ids:
            return
        with own_words("ending machines"):
            try:
                self._ec2.terminate_instances(InstanceIds=list(machine_ids))
            except ClientError as error:
                if code_of(error) not in CANNOT_END:
                    raise
                for one in machine_ids if len(machine_ids) > 1 else ():
                    self._terminate([one])

    def _security_groups(self) -> list[str]:
        with own_words("listing security groups"):
            groups = self._ec2.describe_security_groups(Filters=self._filters())["SecurityGroups"]
        return [str(one["GroupId"]) for one in groups if self._is_ours(one)]

    def _spot_requests(self) -> list[str]:
        filters = [*self._filters(), {"Name": "state", "Values": ["open", "active"]}]
        with own_words("listing spot requests"):
            requests = self._ec2.describe_spot_instance_requests(Filters=filters)["SpotInstanceRequests"]
        return [
            str(one["SpotInstanceRequestId"])
            for one in requests
            if self._is_ours(one) and one["State"] in ("open", "active")
        ]

    def _filters(self) -> list[dict[str, Any]]:
        return [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags_of(self.name).items()]

    def _is_ours(self, described: Mapping[str, Any]) -> bool:
        """Whether it has exactly our tags, whatever the filters of AWS let through."""
        return tags_of(self.name).items() <= tags_on(described).items()


def _noun(role: str) -> str:
    return "worker" if role == "worker" else f"{role} machine"
