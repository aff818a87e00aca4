"""``manyhands monitor``"""

from __future__ import annotations

import logging
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from manyhands.base.address import Address, parse_addresses
from manyhands.base.errors import ConfigError
from manyhands.base.run_id import checked_run_id
from manyhands.cli.options import NetworkOptions, OutputOptions
from manyhands.cli.ticket_command import print_ticket
from manyhands.monitor import RunMonitor
from manyhands.monitor.curves import Curves as CurveWriters
from manyhands.monitor.curves import Sink, TensorBoardSink, WandbMode, WandbSink
from manyhands.monitor.events import Listening
from manyhands.monitor.monitor import MAX_REFRESH_S, checked_refresh_s

logger = logging.getLogger(__name__)


@Parameter(name="*", group="Curves")
@dataclass(frozen=True, kw_only=True)
class CurveOptions:
    """Where loss, alive peers, samples, performance and step are drawn, and what evaluators measure."""

    wandb_project: str | None = None
    """Draw the curves at wandb.ai, in this project; needs the extra manyhands[wandb]."""

    wandb_mode: WandbMode | None = None
    """Send them at once, keep them for "wandb sync", or neither; by default what WANDB_MODE says, else online."""

    tensorboard: Path | None = None
    """Write the curves into this folder, for TensorBoard; needs the extra manyhands[tensorboard]."""

    def __post_init__(self) -> None:
        if self.wandb_project is not None and not self.wandb_project.strip():
            raise ConfigError("--wandb-project is empty; name a project, for example --wandb-project my-albert")
        if self.wandb_mode is not None and self.wandb_project is None:
            raise ConfigError("--wandb-mode says how curves get to wandb; name a project too: --wandb-project NAME")

    def sinks(self, run_id: str) -> dict[str, Sink]:
        """What draws them; nothing has begun yet.

        Raises:
            ConfigError: a package is not installed, or a folder cannot be written.
        """
        sinks: dict[str, Sink] = {}
        if self.wandb_project is not None:
            sinks["wandb"] = WandbSink(self.wandb_project, run_id, self.wandb_mode)
        if self.tensorboard is not None:
            name = f"{run_id}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            sinks["TensorBoard"] = TensorBoardSink(self.tensorboard, name)
        return sinks


def monitor(
    *,
    run_id: Annotated[str, Parameter(help="Name of the run: 1 to 64 characters, without '.'.")] = "albert",
    refresh_period: Annotated[
        float, Parameter(help="Seconds between two looks at the run, at most; fewer shortly before a global step.")
    ] = MAX_REFRESH_S,
    curves: CurveOptions | None = None,
    network: NetworkOptions | None = None,
    output: OutputOptions | None = None,
) -> None:
    """Welcome trainers and show how the run goes; trains nothing, needs no GPU and no torch.

    Prints the exact command for the trainers. Stays until Ctrl-C.
    """
    network, output = network or NetworkOptions(), output or OutputOptions()
    checked_run_id(run_id)
    checked_refresh_s(refresh_period)
    sinks = (curves or CurveOptions()).sinks(run_id)
    emit = output.begin()
    with network.connect() as peer:
        logger.info("Running a coordinator of run %s as peer %s", run_id, peer.peer_id)
        welcome(run_id, peer.addresses, network.initial_peers or ())
        emit(Listening(peer.peer_id, peer.addresses))
        drawn = CurveWriters(sinks)

        def on_event(event: msgspec.Struct) -> None:
            emit(event)
            drawn.add(event)

        try:
            watcher = RunMonitor(peer, run_id, on_event, refresh_s=refresh_period)
            peer.run(watcher.start(), 5.0, "starting the monitor")
            while True:  # a wait without a bound cannot be interrupted on every platform
                threading.Event().wait(3600.0)
        finally:
            drawn.close()


def welcome(run_id: str, addresses: Sequence[str], initial_peers: Sequence[str]) -> None:
    """Print how others join the run through this peer, in all the ways that tutorials have."""
    places = parse_addresses(addresses)
    for place in places:
        logger.info("Running DHT root at %s", _host_port(place))
    if places:
        logger.info("To train with it, run this on any machine that can reach this one:")
    else:
        logger.info(
            "Others cannot join through this monitor, as it is in client mode; they join through its own peers:"
        )
    shown = addresses or initial_peers or ["ADDRESS-OF-ANY-OTHER-PEER"]
    print(f"\n    manyhands train --run-id {shlex.quote(run_id)} --initial-peers {' '.join(shown)}")  # noqa: T201
    if places:
        print(f"\n    --initial_peers {' '.join(addresses)}")  # noqa: T201
        print(f"    --initial_peers {' '.join(map(_host_port, places))}")  # noqa: T201
        print_ticket(run_id, addresses)
    sys.stdout.flush()


def _host_port(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.port}"
