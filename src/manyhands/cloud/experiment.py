"""The machines of one experiment in AWS, as a CloudFormation template and its parameters. Imports no boto3."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.base.errors import ConfigError
from manyhands.version import __version__

TRAIN_EXTRAS = "s3,tensorboard,web"
"""The extras that an option of ``manyhands train`` can need. Without one, a worker would restart again and again."""

WORKER_TYPES = ("g4dn.xlarge", "g5.xlarge", "g6.xlarge", "g4dn.2xlarge", "g5.2xlarge", "g6.2xlarge")
TEMPLATE = Path(__file__).with_name("template.yaml")
TYPES = "[{InstanceType: g4dn.xlarge}]"
"""The text of the template that the worker types replace: a parameter cannot be a list of structures."""


class NoAccount(ConfigError):
    """No AWS account can be used: credentials or a region are missing."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The machines to start. Each experiment is one run of the same name.

    Raises:
        ConfigError: a value is out of bounds.
    """

    name: str = "albert"
    """Name of the experiment, and of its run: letters, digits and -."""

    workers: int = 1
    """Spot machines with a GPU that train."""

    auxiliary: int = 0
    """Machines on demand, without a GPU, that lend bandwidth and keep the state of the run."""

    client_mode: bool = False
    """Workers only dial out, and accept no connections; needs --auxiliary 1 or more."""

    worker_types: tuple[str, ...] = WORKER_TYPES
    """Machine types of the workers; AWS picks cheap ones among those that it has free."""

    coordinator_type: str = "t3.small"
    """Type of the coordinator."""

    auxiliary_type: str = "m6i.large"
    """Type of the auxiliary machines."""

    bandwidth_mbit_s: float | None = None
    """Shape the uplink of workers and auxiliary machines to this many megabits per second."""

    port: int = 31337
    """TCP port of all peers."""

    image: str | None = None
    """Image of the workers: Ubuntu with NVIDIA's driver; by default the newest of AWS."""

    cpu_image: str | None = None
    """Image of the other machines; by default the newest Ubuntu 24.04."""

    source: str | None = None
    """Where pip gets manyhands: git+https://... or the address of a wheel; by default this version on PyPI."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}", self.name, re.ASCII):
            raise ConfigError(
                f"--name {self.name!r} cannot name an experiment; use 1 to 64 letters, digits and -, for example "
                "my-albert"
            )
        for option, value, low, high in (
            ("--workers", self.workers, 1, 200),
            ("--auxiliary", self.auxiliary, 0, 200),
            ("--port", self.port, 1024, 65_535),
            ("--bandwidth-mbit-s", self.bandwidth_mbit_s, 1, 100_000),
        ):
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{option} is {value}; it must be from {low} to {high}")
        if self.client_mode and not self.auxiliary:
            raise ConfigError(
                "workers in client mode cannot be dialled, so they need a peer that can: add --auxiliary 1, or leave "
                "out --client-mode"
            )

    @property
    def template(self) -> str:
        """The template of the stack, with the types of the workers."""
        types = json.dumps([{"InstanceType": one} for one in dict.fromkeys(self.worker_types)])
        return TEMPLATE.read_text(encoding="utf-8").replace(TYPES, types)

    def parameters(self, train_options: Sequence[str]) -> dict[str, str]:
        """The parameters of the template that do not depend on the account.

        Args:
            train_options: further options of ``manyhands train`` for all workers.
        """
        return {
            "Name": self.name,
            "Port": str(self.port),
            "CoordinatorType": self.coordinator_type,
            "Auxiliary": str(self.auxiliary),
            "AuxiliaryType": self.auxiliary_type,
            "Workers": str(self.workers),
            "ClientMode": str(self.client_mode).lower(),
            "BandwidthMbitS": f"{self.bandwidth_mbit_s or 0:g}",
            "MonitorPackage": self._requirement("manyhands"),
            "TrainPackage": self._requirement(f"manyhands[{TRAIN_EXTRAS}]"),
            "TrainOptions": shlex.join(train_options),
        }

    def _requirement(self, package: str) -> str:
        """The requirement for pip, quoted for a shell: this version, or the one at ``source``."""
        return shlex.quote(f"{package}=={__version__}" if self.source is None else f"{package} @ {self.source}")
