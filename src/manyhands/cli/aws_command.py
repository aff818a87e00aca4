"""``manyhands aws``: run an experiment on machines of AWS."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NamedTuple

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from manyhands.base.errors import ConfigError, MissingExtra, Unavailable
from manyhands.base.text import counted
from manyhands.cli.options import DEFAULT_RUN_ID, what_cannot_be_installed
from manyhands.cloud.plan import WORKER_TYPES, Experiment, NoAccount, checked_name, described, groups_of

if TYPE_CHECKING:  # they import boto3
    from manyhands.cloud.aws import Fleet
    from manyhands.cloud.machine import Machine

EXIT_OK, EXIT_COORDINATOR_GONE = 0, 1

Name = Annotated[str, Parameter(help="Name of the experiment, and of its run: letters, digits, - and _.")]
Region = Annotated[str | None, Parameter(help="Region of AWS; by default that of your AWS configuration.")]

aws = App(name="aws", help="Run an experiment on machines of AWS, which cost money until manyhands aws down.")


@aws.command
def up(
    *train_options: Annotated[
        str, Parameter(help="After --: further options of manyhands train, for all workers: -- --model albert-large-v2")
    ],
    name: Name = DEFAULT_RUN_ID,
    workers: Annotated[int, Parameter(help="Spot machines with a GPU that train.")] = 1,
    auxiliary: Annotated[
        int, Parameter(help="Machines on demand, without a GPU, that lend bandwidth and keep the state of the run.")
    ] = 0,
    client_mode: Annotated[bool, Parameter(help="Nobody can dial the workers; needs --auxiliary 1 or more.")] = False,
    worker_types: Annotated[
        tuple[str, ...], Parameter(help="Types of machines for workers; the first one that AWS has is taken.")
    ] = WORKER_TYPES,
    coordinator_type: Annotated[str, Parameter(help="Type of the coordinator.")] = Experiment.coordinator_type,
    auxiliary_type: Annotated[str, Parameter(help="Type of the auxiliary machines.")] = Experiment.auxiliary_type,
    bandwidth_mbit_s: Annotated[
        float | None,
        Parameter(
            name=["--bandwidth-mbit-s", "--bandwidth"],
            help="Shape the uplink of workers and auxiliary machines to this many megabits per second.",
        ),
    ] = None,
    port: Annotated[int, Parameter(help="TCP port of all peers.")] = Experiment.port,
    image: Annotated[
        str | None, Parameter(help="Image of the workers: Ubuntu with NVIDIA's driver; by default the newest of AWS.")
    ] = None,
    cpu_image: Annotated[
        str | None, Parameter(help="Image of the other machines; by default the newest Ubuntu 24.04.")
    ] = None,
    source: Annotated[
        str | None,
        Parameter(
            help="Address of manyhands for pip, git+https://... or that of a wheel; by default this version on PyPI."
        ),
    ] = None,
    region: Region = None,
    no_watch: Annotated[bool, Parameter(help="Return when the machines run; lost ones are not replaced.")] = False,
    dry_run: Annotated[bool, Parameter(help="List what would be created with all parameters, and create nothing.")] = (
        False
    ),
    scripts: Annotated[bool, Parameter(help="With --dry-run: show what the machines run at their first start.")] = (
        False
    ),
) -> int:
    """Start a coordinator and workers, and replace the machines that AWS takes back.

    The machines cost money until "manyhands aws down --name NAME" ends them, also
    after Ctrl-C. For example:

        manyhands aws up --name my-albert --workers 4 --dry-run
        manyhands aws up --name my-albert --workers 4 -- --model albert-large-v2
        manyhands aws status --name my-albert
        manyhands aws down --name my-albert

    Credentials are those of boto3: environment, ~/.aws, or single sign-on.
    """
    experiment = Experiment(
        name=name,
        workers=workers,
        auxiliary=auxiliary,
        client_mode=client_mode,
        worker_types=worker_types,
        coordinator_type=coordinator_type,
        auxiliary_type=auxiliary_type,
        port=port,
        image=image,
        cpu_image=cpu_image,
        bandwidth_mbit_s=bandwidth_mbit_s,
        source=source,
        train_options=train_options,
    )
    _check_train_options(experiment)
    if dry_run:
        _tell_plan(experiment, region, scripts=scripts)
        return EXIT_OK
    if source is None and (note := what_cannot_be_installed("the machines", "--source")):
        raise ConfigError(note)
    with _fleet(name, region, "looking around") as (fleet, screen):
        machines = fleet.up(experiment)
        try:
            screen.tell_started(fleet, machines, experiment)
            if no_watch:
                screen.say("Lost machines are not replaced.")
                return EXIT_OK
            screen.say("Replacing lost machines until Ctrl-C, which leaves the machines running.")
            fleet.watch()
        finally:
            screen.tell_how_to_end(fleet)
        return EXIT_COORDINATOR_GONE


@aws.command
def status(
    *,
    name: Name,
    logs: Annotated[str | None, Parameter(help="Show what this machine wrote to its console.")] = None,
    region: Region = None,
) -> None:
    """List the machines of an experiment, or show what one of them wrote.

    AWS shows what a machine writes with a delay of a few minutes.
    """
    checked_name(name)
    with _fleet(name, region, "asking AWS") as (fleet, screen):
        if logs is not None:
            screen.say(fleet.log_of(logs) or f"{logs} has written nothing yet, or AWS does not show it yet.")
            return
        machines = fleet.machines()
        if not machines:
            raise _not_there(fleet, "no machines")
        screen.console.print(_table(machines))


@aws.command
def down(*, name: Name, region: Region = None) -> None:
    """End all machines of an experiment, and check that nothing is left.

    Ends what has the tags of the experiment: machines, spot requests, disks and
    the security group. Waits until AWS lists none of them, for at most 10 minutes.
    """
    checked_name(name)
    with _fleet(name, region, "asking AWS") as (fleet, screen):
        if not fleet.down():
            raise _not_there(fleet, "nothing")
        screen.say(f"Nothing of experiment {name} is left in {fleet.region}.")


def _check_train_options(experiment: Experiment) -> None:
    """Raise ConfigError for options of which each worker would fail, for ever and for money."""
    from manyhands.cli.main import check_train  # it imports this module

    *_, workers = groups_of(experiment)
    peer = f"127.0.0.1:{experiment.port}"
    _, *words = shlex.split(workers.program.command([peer]).replace("$ANNOUNCE", peer))
    try:
        check_train(words)
    except ConfigError as error:
        raise ConfigError(f"after --: {error}") from None


def _not_there(fleet: Fleet, what: str) -> ConfigError:
    others = fleet.others()
    there = f"experiments there: {', '.join(others)}" if others else "no experiment has any there"
    return ConfigError(
        f"experiment {fleet.name} has {what} in {fleet.region}; {there}; other regions were not looked at (--region)"
    )


def _tell_plan(experiment: Experiment, region: str | None, *, scripts: bool) -> None:
    console = Console(soft_wrap=True)
    console.print(
        "\n".join(described(experiment, region or "the region of your AWS configuration", scripts=scripts)),
        markup=False,
        highlight=False,
    )
    try:
        with _fleet(experiment.name, region, "checking with AWS") as (fleet, _):
            verdict = f"AWS has all of it in {fleet.region}. {_priced(fleet.check(experiment))}"
    except (MissingExtra, NoAccount, Unavailable) as error:
        verdict = f"Not checked with AWS, and the price is not known: {error}"
    except ConfigError as error:
        raise ConfigError(f"without --dry-run this is refused: {error}") from None
    if experiment.source is None and (note := what_cannot_be_installed("the machines", "--source")):
        verdict += f"\nWithout --dry-run this is refused: {note}"
    console.print(f"\n{verdict}\nThis was a dry run: nothing was created.", markup=False, highlight=False)


def _priced(price: float | None) -> str:
    if price is None:
        return "The price per hour is not known."
    return f"About {price:.2f} USD per hour at the prices of now, without disks and traffic."


class Screen(NamedTuple):
    """Prints lines above a line that says what is going on."""

    console: Console

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def tell(self, event: str) -> None:
        self.say(f"{time.strftime('%b %d %H:%M:%S')} {event}")

    def tell_started(self, fleet: Fleet, machines: Iterable[Machine], experiment: Experiment) -> None:
        alive = [machine for machine in machines if machine.is_alive]
        self.console.print(_table(alive))
        coordinator = next(machine for machine in alive if machine.role == "coordinator")
        self.say(f"{counted(len(alive), 'machine')} run. {_priced(fleet.price_per_hour(alive))}")
        self.say("They install manyhands now, which takes several minutes. Then others can join with:")
        self.say(f"\n    manyhands join {coordinator.public_ip or coordinator.private_ip}:{experiment.port}\n")

    def tell_how_to_end(self, fleet: Fleet) -> None:
        self.say("The machines run, and cost money, until you end them:")
        self.say(f"\n    manyhands aws status --name {fleet.name} --region {fleet.region}\n    {fleet.down_command}\n")


@contextmanager
def _fleet(name: str, region: str | None, doing: str) -> Iterator[tuple[Fleet, Screen]]:
    from manyhands.cloud.account import Account
    from manyhands.cloud.aws import Fleet

    screen = Screen(Console())
    with screen.console.status(doing, spinner="line") as shown:
        yield Fleet(Account(region), name, screen.tell, show=shown.update), screen


def _table(machines: Iterable[Machine]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("machine", "role", "state", "type", "zone", "", "started", "address"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("machine", "address"))
    for one in machines:
        market = "spot" if one.is_spot else "on demand"
        started = one.launched_at.astimezone().strftime("%b %d %H:%M:%S")
        state = one.state if one.is_alive or not one.reason else f"{one.state}: {one.reason}"
        address = one.public_ip or one.private_ip
        table.add_row(one.machine_id, one.role, state, one.machine_type, one.zone, market, started, address)
    return table
