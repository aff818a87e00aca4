"""``manyhands aws``: run an experiment on machines of AWS."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.base.urls import has_secret
from manyhands.cli.options import DEFAULT_RUN_ID, what_cannot_be_installed
from manyhands.version import __version__

if TYPE_CHECKING:  # it imports boto3
    from manyhands.cloud.stack import Region

TEMPLATE = Path(__file__).parents[1] / "cloud" / "template.yaml"
TYPES = "[{InstanceType: g4dn.xlarge}]"
"""The text of the template that the worker types replace: a parameter cannot be a list of structures."""
WORKER_TYPES = ("g4dn.xlarge", "g5.xlarge", "g6.xlarge", "g4dn.2xlarge", "g5.2xlarge", "g6.2xlarge")
OPEN = "The run is open: anybody who knows an address can take part, download the model, and send wrong gradients."

RegionName = Annotated[str | None, Parameter(help="Region of AWS; by default that of your AWS configuration.")]

aws = App(name="aws", help="Run an experiment on machines of AWS, which cost money until manyhands aws down.")
console = Console(
    markup=False, highlight=False, emoji=False, soft_wrap=True, force_terminal=None if sys.stdout.isatty() else False
)
"""Redraws lines only in a terminal. A notebook sets FORCE_COLOR, but shows the codes for it as text."""


@aws.command
def up(
    *train_options: str,
    name: str = DEFAULT_RUN_ID,
    workers: Annotated[int, Parameter(validator=Number(gte=1, lte=200))] = 1,
    auxiliary: Annotated[int, Parameter(validator=Number(gte=0, lte=200))] = 0,
    client_mode: bool = False,
    worker_types: tuple[str, ...] = WORKER_TYPES,
    coordinator_type: str = "t3.small",
    auxiliary_type: str = "m6i.large",
    bandwidth_mbit_s: Annotated[float | None, Parameter(validator=Number(gte=1))] = None,
    port: Annotated[int, Parameter(validator=Number(gte=1024, lte=65_535))] = 31337,
    image: str | None = None,
    cpu_image: str | None = None,
    source: str | None = None,
    region: RegionName = None,
    dry_run: bool = False,
) -> None:
    """Have AWS start a coordinator and workers, and replace those that it takes back.

    The machines cost money until "manyhands aws down --name NAME" ends them. The
    run is open: anybody who knows an address of it can take part. For example:

        manyhands aws up --name my-albert --workers 4 --dry-run
        manyhands aws up --name my-albert --workers 4 -- --model albert-large-v2
        manyhands aws status --name my-albert
        manyhands aws down --name my-albert

    Credentials are those of boto3: environment, ~/.aws, or single sign-on.

    Args:
        train_options: After --: further options of manyhands train, for all workers: -- --model albert-large-v2
        name: Name of the experiment, and of its run: letters, digits and -.
        workers: Spot machines with a GPU that train.
        auxiliary: Machines on demand, without a GPU, that lend bandwidth and keep the state of the run.
        client_mode: Workers only dial out, and accept no connections; needs --auxiliary 1 or more.
        worker_types: Machine types of the workers; AWS picks cheap ones among those that it has free.
        coordinator_type: Type of the coordinator.
        auxiliary_type: Type of the auxiliary machines.
        bandwidth_mbit_s: Shape the uplink of workers and auxiliary machines to this many megabits per second.
        port: TCP port of all peers.
        image: Image of the workers: Ubuntu with NVIDIA's driver; by default the newest of AWS.
        cpu_image: Image of the other machines; by default the newest Ubuntu 24.04.
        source: Where pip gets manyhands: git+https://... or the address of a wheel; by default this version on PyPI.
        dry_run: Print what AWS would be told to create, and create nothing.
    """
    from manyhands.cli.main import check_train  # it imports this module

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}", name, re.ASCII):
        raise ConfigError(f"--name {name!r}: use 1 to 64 letters, digits and -, for example my-albert")
    if client_mode and not auxiliary:
        raise ConfigError("workers in client mode need a peer that can be dialled: add --auxiliary 1")
    peer = f"127.0.0.1:{port}"
    reach = ["--client-mode"] if client_mode else ["--listen", str(port), "--announce", peer]
    own = ["--run-id", name, "--start-new", "--checkpoint-dir", "checkpoints"]
    # workers with options that are refused would start again and again
    check_train(["train", *own, *train_options, "--initial-peers", peer, *reach])

    if any(map(has_secret, re.findall(r"[\w.+-]+://\S+", " ".join([*train_options, source or ""])))):
        console.print("An option holds a password or a signature: whoever may describe the machines can read it.\n")
    types = json.dumps([{"InstanceType": one} for one in dict.fromkeys(worker_types)])
    template = TEMPLATE.read_text(encoding="utf-8").replace(TYPES, types)
    parameters = {
        "Name": name,
        "Port": str(port),
        "CoordinatorType": coordinator_type,
        "Auxiliary": str(auxiliary),
        "AuxiliaryType": auxiliary_type,
        "Workers": str(workers),
        "WorkerImage": image or "",
        "CpuImage": cpu_image or "",
        "ClientMode": str(client_mode).lower(),
        "BandwidthMbitS": f"{bandwidth_mbit_s or 0:g}",
        "Package": shlex.quote(f"=={__version__}" if source is None else f" @ {source}"),
        "TrainOptions": shlex.join(train_options),
    }
    if dry_run:
        console.print(template)
        console.print("\n".join(f"{key:<16} {value}" for key, value in parameters.items()))
        console.print(f"\n{OPEN}\nNothing was created: a dry run.")
        return
    if source is None and (problem := what_cannot_be_installed("the machines", "--source")):
        raise ConfigError(problem)
    with _there(region) as there:
        there.create(name, template, parameters)
        _show_machines(there, name)
        console.print(f"{OPEN}\nAWS replaces lost machines. All cost money until you end them:\n")
        for command in ("status", "down"):
            console.print(f"    manyhands aws {command} --name {name} --region {there.name}")


@aws.command
def status(*, name: str, logs: str | None = None, region: RegionName = None) -> None:
    """List the machines of an experiment, or show what one of them wrote.

    AWS shows what a machine writes with a delay of a few minutes.

    Args:
        name: Name of the experiment.
        logs: Show what this machine wrote to its console.
    """
    with _there(region) as there:
        if logs is None:
            _show_machines(there, name)
        else:
            console.print(there.log_of(logs) or f"{logs} has written nothing yet, or AWS does not show it yet.")


@aws.command
def down(*, name: str, region: RegionName = None) -> None:
    """End all machines of an experiment, and wait until nothing of it is left.

    Args:
        name: Name of the experiment.
    """
    with _there(region) as there:
        there.delete(name)
        console.print(f"Nothing of experiment {name} is left in {there.name}.")


@contextmanager
def _there(region: str | None) -> Iterator[Region]:
    """Yield the region. A terminal shows meanwhile that the command waits for AWS."""
    if importlib.util.find_spec("boto3") is None:
        raise MissingExtra("manyhands aws", "aws")
    from manyhands.cloud.stack import Region, own_words

    with console.status("waiting for AWS", spinner="line"), own_words():
        yield Region(region, console.print)


def _show_machines(there: Region, name: str) -> None:
    """Print the machines in 80 columns, what is missing, and how to join them."""
    stack = there.find(name)
    parameters = {one["ParameterKey"]: one["ParameterValue"] for one in stack["Parameters"]}
    console.print(f"Stack {stack['StackName']} in {there.name}: {stack['StackStatus']}\n")
    rows = [("machine", "role", "state", "type", "zone", "address")]
    for role, one in there.machines(name):
        zone = one["Placement"]["AvailabilityZone"].removeprefix(there.name)
        address = one.get("PublicIpAddress") or one.get("PrivateIpAddress", "")
        rows.append((one["InstanceId"], role, one["State"]["Name"], one["InstanceType"], zone, address))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    console.print("\n".join(" ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
    running = [(row[1], row[-1]) for row in rows if row[2] in ("pending", "running")]
    if sum(role == "worker" for role, _ in running) < int(parameters["Workers"]):
        reason = there.why_machines_lack(stack) or "it has given no reason yet"
        console.print(f"\nAWS tries to start the workers that are missing: {reason}", soft_wrap=False)
    if "coordinator" in (address_of := dict(reversed(running))):
        console.print("\nInstalling manyhands takes some minutes. Then others can join with:\n")
        console.print(f"    manyhands join {address_of['coordinator']}:{parameters['Port']}\n")
    else:
        console.print("\nThe coordinator does not run, so new machines cannot join.")
