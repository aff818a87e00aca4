"""``manyhands aws``: run an experiment on machines of AWS."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.console import Console

from manyhands.base.errors import ConfigError, MissingExtra, Unavailable
from manyhands.cli.options import what_cannot_be_installed
from manyhands.cloud import Experiment, NoAccount

if TYPE_CHECKING:  # it imports boto3
    from manyhands.cloud.stack import Described, Region

Name = Annotated[str, Parameter(help="Name of the experiment.")]
RegionName = Annotated[str | None, Parameter(help="Region of AWS; by default that of your AWS configuration.")]
STATES = {"pending": "starting", "shutting-down": "ending", "stopping": "ending"}
"""The words for some states of a machine, where AWS's own are unclear."""

aws = App(name="aws", help="Run an experiment on machines of AWS, which cost money until manyhands aws down.")
console = Console(force_terminal=None if sys.stdout.isatty() else False)
"""Redraws lines only in a terminal. A notebook sets FORCE_COLOR, but shows the codes for it as text."""


@aws.command
def up(
    *train_options: Annotated[
        str, Parameter(help="After --: further options of manyhands train, for all workers: -- --model albert-large-v2")
    ],
    experiment: Annotated[Experiment | None, Parameter(name="*")] = None,
    region: RegionName = None,
    dry_run: Annotated[bool, Parameter(help="Print what AWS would be told to create, and create nothing.")] = False,
) -> None:
    """Have AWS start a coordinator and workers, and replace those that it takes back.

    The machines cost money until "manyhands aws down --name NAME" ends them. For
    example:

        manyhands aws up --name my-albert --workers 4 --dry-run
        manyhands aws up --name my-albert --workers 4 -- --model albert-large-v2
        manyhands aws status --name my-albert
        manyhands aws down --name my-albert

    Credentials are those of boto3: environment, ~/.aws, or single sign-on.
    """
    experiment = experiment or Experiment()
    parameters = experiment.parameters(train_options)
    _check_train_options(experiment, train_options)
    problem = what_cannot_be_installed("the machines", "--source") if experiment.source is None else ""
    if dry_run:
        _show_plan(experiment, parameters, region)
        if problem:
            say(f"Without --dry-run this is refused: {problem}")
        say("Nothing was created: a dry run.")
        return
    if problem:
        raise ConfigError(problem)
    with _there(region) as there:
        there.create(experiment, parameters | there.parameters(experiment))
        _show_machines(there, there.find(experiment.name))
        where = f"--name {experiment.name} --region {there.name}"
        say("AWS replaces lost machines. All cost money until you end them:\n")
        say(f"    manyhands aws status {where}\n    manyhands aws down {where}\n")


@aws.command
def status(
    *,
    name: Name,
    logs: Annotated[str | None, Parameter(help="Show what this machine wrote to its console.")] = None,
    region: RegionName = None,
) -> None:
    """List the machines of an experiment, or show what one of them wrote.

    AWS shows what a machine writes with a delay of a few minutes.
    """
    with _there(region) as there:
        stack = there.find(name)
        if logs is None:
            _show_machines(there, stack)
        else:
            say(there.log_of(logs) or f"{logs} has written nothing yet, or AWS does not show it yet.")


@aws.command
def down(*, name: Name, region: RegionName = None) -> None:
    """End all machines of an experiment, and wait until nothing of it is left."""
    with _there(region) as there:
        there.delete(name)
        say(f"Nothing of experiment {name} is left in {there.name}.")


def say(text: str) -> None:
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


@contextmanager
def _there(region: str | None) -> Iterator[Region]:
    """Yield the region. A terminal shows meanwhile that the command waits for AWS."""
    if importlib.util.find_spec("boto3") is None:
        raise MissingExtra("manyhands aws", "aws")
    from manyhands.cloud.stack import Region, own_words

    with console.status("waiting for AWS", spinner="line"), own_words():
        yield Region(region, say)


def _check_train_options(experiment: Experiment, train_options: Sequence[str]) -> None:
    """Check the options that each worker gets: with wrong ones, it would restart again and again, and cost money.

    The command line is that of a worker in the template.

    Raises:
        ConfigError: ``manyhands train`` refuses them.
    """
    from manyhands.cli.main import check_train  # it imports this module

    limit = experiment.bandwidth_mbit_s
    limits = [] if limit is None else ["--bandwidth-mbit-s", f"{limit:g}", "--max-upload-mbit-s", f"{limit:g}"]
    reach = ["--client-mode"] if experiment.client_mode else ["--listen", "31337", "--announce", "127.0.0.1:31337"]
    words = ["--run-id", experiment.name, "--start-new", "--checkpoint-dir", "checkpoints", *limits, *train_options]
    try:
        check_train(["train", *words, "--initial-peers", "127.0.0.1:31337", *reach])
    except ConfigError as error:
        raise ConfigError(f"after --: {error}") from None


def _show_plan(experiment: Experiment, parameters: dict[str, str], region: str | None) -> None:
    """Print the template and its parameters; those that depend on an account, and prices, only if there is one."""
    say(experiment.template)
    try:
        with _there(region) as there:
            parameters = parameters | there.parameters(experiment)
            prices = there.spot_prices(experiment.worker_types).items()
            note = f"Spot prices now, in USD per hour: {', '.join(f'{one} {price:.3f}' for one, price in prices)}"
    except (MissingExtra, NoAccount, Unavailable) as error:
        note = f"Parameters that depend on the account, and prices, are missing: {error}"
    say("\n".join(f"{key:<16} {value}" for key, value in parameters.items()) + f"\n\n{note}")


def _show_machines(there: Region, stack: Described) -> None:
    """Print the machines in 80 columns, what is missing, and how to join them."""
    from manyhands.cloud.stack import ROLE_TAG, tags_of

    parameters = {one["ParameterKey"]: one["ParameterValue"] for one in stack["Parameters"]}
    say(f"Stack {stack['StackName']} in {there.name}: {stack['StackStatus']}\n")
    say(f"{'machine':<20} {'role':<12}{'state':<9}{'type':<14}{'zone':<5}address")
    num_workers = 0
    coordinator = ""
    for one in there.machines(parameters["Name"]):
        role = tags_of(one).get(ROLE_TAG, "?")
        state = one["State"]["Name"]
        zone = one["Placement"]["AvailabilityZone"].removeprefix(there.name)
        address = one.get("PublicIpAddress") or one.get("PrivateIpAddress", "")
        machine_type = one.get("InstanceType", "")
        say(f"{one['InstanceId']:<20} {role:<12}{STATES.get(state, state):<9}{machine_type:<14}{zone:<5}{address}")
        if role == "worker" and state in ("pending", "running"):
            num_workers += 1
        if role == "coordinator" and state == "running":
            coordinator = address
    if num_workers < (wanted := int(parameters["Workers"])):
        reason = there.why_machines_lack(stack) or "it has given no reason yet"
        missing = f"\n{num_workers} of {wanted} workers are there, and AWS tries to start the others: {reason}"
        console.print(missing, markup=False, highlight=False, emoji=False)
    if coordinator:
        say("\nInstalling manyhands takes some minutes. Then others can join with:\n")
        say(f"    manyhands join {coordinator}:{parameters['Port']}\n")
    else:
        say("\nThe coordinator does not run, so new machines cannot join.")
