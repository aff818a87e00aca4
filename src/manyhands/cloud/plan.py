"""Describes the machines of an experiment in AWS. Pure: calls nothing, and imports no boto3."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from manyhands.base.errors import ConfigError
from manyhands.base.text import counted
from manyhands.cloud.user_data import Program, user_data

MachineRole = Literal["coordinator", "auxiliary", "worker"]

EXPERIMENT_TAG, CREATOR_TAG, ROLE_TAG = "manyhands:experiment", "manyhands:created-by", "manyhands:role"
CREATOR = "manyhands aws up"

UBUNTU_PARAMETER = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
DEEP_LEARNING_PARAMETER = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
"""SSM parameters with the newest official images. The second one has NVIDIA's driver."""

WORKER_TYPES = ("g4dn.xlarge", "g5.xlarge", "g6.xlarge", "g4dn.2xlarge", "g5.2xlarge", "g6.2xlarge")
EXTRA_DISK_GB = 20
"""Room for Python packages, data and checkpoints on top of the size of the image."""

MAX_WORKERS = 200
MAX_USER_DATA_BYTES = 16 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
_TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+", re.ASCII)
_IMAGE = re.compile(r"ami-[0-9a-f]+", re.ASCII)
_OURS = (
    "--run-id", "--initial-peers", "--listen", "--announce", "--tunnel", "--client-mode", "--auxiliary", "--start-new"
)  # fmt: skip


class NoAccount(ConfigError):
    """No account of AWS can be asked: credentials or a region are missing."""


def checked_name(name: str) -> str:
    """Return the name of an experiment if it follows the rule.

    It becomes part of filters in which AWS reads ``*`` and ``?`` as wildcards: "down --name '*'" must not end
    everything.

    Raises:
        ConfigError: it has other characters than letters, digits, - and _, or is too long.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r} cannot name an experiment; use 1 to 64 letters, digits, - and _, for example my-albert"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What to start; each experiment is one run of the same name.

    Attributes:
        source: address of the package for pip, in place of the one on PyPI.
        bandwidth_mbit_s: the uplink of workers and auxiliary peers is shaped to it.
        train_options: further options of ``manyhands train`` for all workers.
    Raises:
        ConfigError: a value is out of bounds.
    """

    name: str
    workers: int = 1
    auxiliary: int = 0
    client_mode: bool = False
    worker_types: tuple[str, ...] = WORKER_TYPES
    coordinator_type: str = "t3.small"
    auxiliary_type: str = "m6i.large"
    port: int = 31337
    image: str | None = None
    cpu_image: str | None = None
    bandwidth_mbit_s: float | None = None
    source: str | None = None
    train_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checked_name(self.name)
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"--workers is {self.workers}; it must be from 1 to {MAX_WORKERS}, for example 4")
        if not 0 <= self.auxiliary <= MAX_WORKERS:
            raise ConfigError(f"--auxiliary is {self.auxiliary}; it must be from 0 to {MAX_WORKERS}, for example 1")
        if self.client_mode and not self.auxiliary:
            raise ConfigError(
                "workers in client mode cannot be dialled, so they need a peer that can: add --auxiliary 1, or leave "
                "out --client-mode"
            )
        if not 1024 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be from 1024 to 65535, for example 31337")
        if self.bandwidth_mbit_s is not None and not 1 <= self.bandwidth_mbit_s <= 100_000:
            raise ConfigError(
                f"--bandwidth-mbit-s is {self.bandwidth_mbit_s:g}; it must be from 1 to 100000, for example 100"
            )
        if not self.worker_types:
            raise ConfigError("--worker-types names no type; for example: --worker-types g4dn.xlarge g5.xlarge")
        for one in (*self.worker_types, self.coordinator_type, self.auxiliary_type):
            if not _TYPE.fullmatch(one):
                raise ConfigError(f"{one!r} is not a type of machine of AWS; for example: g4dn.xlarge")
        for option, image in (("--image", self.image), ("--cpu-image", self.cpu_image)):
            if image is not None and not _IMAGE.fullmatch(image):
                raise ConfigError(
                    f"{option} {image!r} is not an image of AWS; for example: {option} ami-0abcdef1234567890"
                )
        for word in self.train_options:
            if (option := word.partition("=")[0].replace("_", "-")) in _OURS:
                raise ConfigError(f"{option} is set by manyhands aws; leave it out after --")
        for group in groups_of(self):
            if (size := len(group.user_data([]).encode())) > MAX_USER_DATA_BYTES - 512:  # room for addresses
                raise ConfigError(
                    f"the options after -- make a start script of {size} bytes; AWS takes {MAX_USER_DATA_BYTES}"
                )

    @property
    def security_group(self) -> str:
        """Name of the security group; two experiments of one name cannot have one each."""
        return f"manyhands-{self.name}"

    def tags(self, role: MachineRole | None = None) -> dict[str, str]:
        """The tags of each resource; those of machines and their disks have the role too."""
        tags = tags_of(self.name) | {"Name": self.security_group if role is None else f"{self.name}-{role}"}
        return tags if role is None else tags | {ROLE_TAG: role}


def tags_of(name: str) -> dict[str, str]:
    """The tags by which everything of an experiment is found again."""
    return {EXPERIMENT_TAG: name, CREATOR_TAG: CREATOR}


class MachineGroup(NamedTuple):
    """Machines of one role, which are started alike.

    Attributes:
        types: the first one that AWS has is taken.
        image: id of an image; None is the newest one, of ``image_parameter``.
    """

    role: MachineRole
    number: int
    types: tuple[str, ...]
    is_spot: bool
    image: str | None
    image_parameter: str
    program: Program

    def user_data(self, initial_peers: Sequence[str]) -> str:
        """The script that a machine runs at its first start, for peers at HOST:PORT."""
        return user_data(self.program, initial_peers)


def groups_of(experiment: Experiment) -> list[MachineGroup]:
    """The groups of machines, in the order in which they are started."""
    port, name = experiment.port, experiment.name
    ubuntu = (experiment.cpu_image, UBUNTU_PARAMETER)
    coordinator = Program(
        ("monitor", "--run-id", name, "--state-dir", "state"), port, source=experiment.source, needs_torch=False
    )
    groups = [MachineGroup("coordinator", 1, (experiment.coordinator_type,), False, *ubuntu, coordinator)]
    shaping = experiment.bandwidth_mbit_s
    limits = () if shaping is None else ("--bandwidth-mbit-s", f"{shaping:g}", "--max-upload-mbit-s", f"{shaping:g}")
    if experiment.auxiliary:
        helper = Program(
            ("train", "--auxiliary", "--run-id", name, "--checkpoint-dir", "checkpoints", *limits),
            port, source=experiment.source, upload_mbit_s=shaping, has_gpu=False,
        )  # fmt: skip
        groups.append(
            MachineGroup("auxiliary", experiment.auxiliary, (experiment.auxiliary_type,), False, *ubuntu, helper)
        )
    worker = Program(
        ("train", "--run-id", name, "--start-new", "--checkpoint-dir", "checkpoints", *limits,
         *(["--client-mode"] if experiment.client_mode else []), *experiment.train_options),
        None if experiment.client_mode else port, source=experiment.source, upload_mbit_s=shaping,
    )  # fmt: skip
    types = tuple(dict.fromkeys(experiment.worker_types))
    groups.append(
        MachineGroup("worker", experiment.workers, types, True, experiment.image, DEEP_LEARNING_PARAMETER, worker)
    )
    return groups


def described(experiment: Experiment, region: str, *, scripts: bool = False) -> Iterator[str]:
    """The lines of a dry run: each resource with its parameters.

    Args:
        scripts: add what each machine runs at its first start.
    """
    yield f"Experiment {experiment.name} in {region}"
    yield ""
    yield f"Security group {experiment.security_group}, in the default VPC"
    yield f"    lets in    TCP {experiment.port} from everywhere (0.0.0.0/0), and nothing else"
    yield f"    tags       {_tags(experiment.tags())}"
    for group in groups_of(experiment):
        yield ""
        kind = "one-time spot, ended when AWS takes it back" if group.is_spot else "on demand"
        yield f"{counted(group.number, group.role + ' machine')}, {kind}"
        yield f"    type       {', else '.join(group.types)}"
        yield f"    image      {group.image or 'the newest of ' + group.image_parameter}"
        yield f"    disk       that of the image and {EXTRA_DISK_GB} GB more, gp3, deleted with the machine"
        yield f"    tags       {_tags(experiment.tags(group.role))}" + (", also on spot requests" * group.is_spot)
        if group.program.upload_mbit_s is not None:
            yield f"    uplink     shaped to {group.program.upload_mbit_s:g} Mbit/s"
        yield f"    installs   {group.program.requirement}"
        first_peers = [] if group.role == "coordinator" else ["COORDINATOR:" + str(experiment.port)]
        if group.role == "worker" and experiment.auxiliary:
            first_peers.append(f"AUXILIARY:{experiment.port}")
        yield f"    runs       {group.program.command(first_peers)}"
        if scripts:
            yield "    script"
            yield from (f"        {line}".rstrip() for line in group.user_data(first_peers).splitlines())


def _tags(tags: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in tags.items())
