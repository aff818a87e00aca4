"""``manyhands monitor``"""

from __future__ import annotations

import logging
import shlex
import sys
import threading
from typing import Annotated

from cyclopts import Parameter

from manyhands.base.run_id import checked_run_id
from manyhands.cli.options import NetworkOptions, OutputOptions
from manyhands.cli.ticket_command import print_ticket
from manyhands.monitor import RunMonitor
from manyhands.monitor.events import Listening

logger = logging.getLogger(__name__)


def monitor(
    *,
    run_id: Annotated[str, Parameter(help="Name of the run: 1 to 64 characters, without '.'.")],
    network: NetworkOptions | None = None,
    output: OutputOptions | None = None,
) -> None:
    """Welcome trainers and show how the run goes; trains nothing, needs no GPU and no torch.

    Prints the exact command for the trainers. Stays until Ctrl-C.
    """
    network, output = network or NetworkOptions(), output or OutputOptions()
    checked_run_id(run_id)
    emit = output.begin()
    with network.connect() as peer:
        logger.info("Running a coordinator of run %s as peer %s", run_id, peer.peer_id)
        if peer.addresses:
            logger.info("To train with it, run this on any machine that can reach this one:")
        else:
            logger.info(
                "Others cannot join through this monitor, as it is in client mode; they join through its own peers:"
            )
        addresses = peer.addresses or network.initial_peers or ["ADDRESS-OF-ANY-OTHER-PEER"]
        print(f"\n    manyhands train --run-id {shlex.quote(run_id)} --initial-peers {' '.join(addresses)}")  # noqa: T201
        if peer.addresses:
            print_ticket(run_id, peer.addresses)
        sys.stdout.flush()
        emit(Listening(peer.peer_id, peer.addresses))
        peer.run(RunMonitor(peer, run_id, emit).start(), 5.0, "starting the monitor")
        while True:  # a wait without a bound cannot be interrupted on every platform
            threading.Event().wait(3600.0)
