"""``manyhands first-peer``: a bootstrap peer that trains nothing."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
from cyclopts import Parameter

from manyhands.base.address import host_ports, parse_listen_addresses
from manyhands.base.errors import ConfigError, Timeout
from manyhands.base.text import amount_of, counted
from manyhands.cli.charter_options import checked_charter, coordinate, wait
from manyhands.cli.options import OutputOptions, PeerOptions
from manyhands.cli.output.event_file import EventWriter
from manyhands.cli.output.logs import name_in_logs
from manyhands.cli.taking_part import Start, own_folder
from manyhands.cli.ticket_command import print_tickets
from manyhands.cli.web_page import WebOptions, page_beside
from manyhands.monitor.monitor_events import Listening
from manyhands.peer import Peer

logger = logging.getLogger(__name__)

OWN_FOLDER = "manyhands.first-peer"
PERIOD_S = 30.0
CALL_TIMEOUT_S = 5.0


class StandingBy(msgspec.Struct, tag="standing_by"):
    """Event: the status of a first peer.

    Attributes:
        num_known_peers: nodes in its routing table, except those that have left. Peers in client mode are not nodes.
        num_connected_peers: connected peers, including those in client mode.
        memory_bytes: resident memory of this process.
    """

    num_known_peers: int
    num_connected_peers: int
    num_records: int
    memory_bytes: int


def first_peer(
    *,
    charter: Annotated[
        Path | None,
        Parameter(
            help="Charter of a run (manyhands run create), to publish it and to be its coordinator; "
            "by default the one that this state dir served last."
        ),
    ] = None,
    web: WebOptions = WebOptions(),
    network: PeerOptions = PeerOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Welcome peers of any run and hold records, without training.

    Needs a machine that the others can reach; no GPU, no torch. For example:

        manyhands first-peer --listen 31337

    Prints its addresses, which are the --initial-peers of everybody else, and its
    status every 30 s. Runs until Ctrl-C. It keeps its id and port for the next
    start, in ./manyhands.first-peer or --state-dir.

    Several coordinators: give each the addresses of the others as
    --initial-peers, and all addresses to everybody. Start them in any order: a
    first peer does not wait for the others, and dials them until they answer.
    """
    signed = checked_charter(charter, network)
    if web.web is not None and signed is None:
        raise ConfigError(
            "--web shows one run, and this first peer belongs to none: add --charter FILE, or start "
            "manyhands monitor --run-id NAME --web"
        )
    with ExitStack() as cleanup:
        bound = cleanup.enter_context(web.taken())
        emit = output.begin()
        folder = own_folder(OWN_FOLDER, network)
        start = cleanup.enter_context(Start())
        if folder is not None and folder.is_new:
            start.removes(folder.path)
        peer = cleanup.enter_context(network.connect(must_join=False, own_dir=folder))
        start.has_succeeded()
        name_in_logs(peer=str(peer.peer_id))
        logger.info("Running a first peer as peer %s", peer.peer_id)
        if peer.state_path is not None:
            logger.info("Its id and port are in %s: the next start has the same", peer.state_path)
        if changing := what_changes(network, has_state_dir=peer.state_path is not None):
            logger.warning("%s; peers that have the old address cannot find this peer then", changing)
        if signed is None or signed.is_open:
            logger.info("Others can join through this peer with:")
        else:
            logger.info("Only peers with a ticket can join. For bans from other machines, and for other coordinators:")
        print(f"\n    --initial-peers {' '.join(peer.addresses)}")  # noqa: T201
        print(f"    --initial-peers {' '.join(host_ports(peer.addresses))}", flush=True)  # noqa: T201
        if signed is None:
            print_tickets(peer, "")
        else:
            coordinate(peer, signed, network)
        emit(Listening(peer.peer_id, peer.addresses))
        if signed is not None:
            cleanup.enter_context(page_beside(peer, signed.run_id, bound, network.state_dir))
        while True:
            tell_standing(peer, emit)
            wait(peer, signed, PERIOD_S)


def what_changes(options: PeerOptions, *, has_state_dir: bool) -> str:
    """The parts of this peer's address that change at each start, and the options that keep them; empty if none do."""
    advice: dict[str, str] = {}
    if options.identity is None and not has_state_dir:
        advice["its id"] = "--state-dir (or --identity) keeps the id"
    if options.tunnel is not None:
        advice["its address"] = "a tunnel has another one each time"
    elif not has_state_dir and any(not address.port for address in parse_listen_addresses(options.listen)):
        advice["its port"] = "--state-dir, or --listen with a number above 0, keeps the port"
    if not advice:
        return ""
    verb = "change" if len(advice) > 1 else "changes"
    return f"{' and '.join(advice)} {verb} at each start ({', '.join(advice.values())})"


def tell_standing(peer: Peer, emit: EventWriter) -> None:
    """Log and emit the peer's status once, or log a timeout, after which the machine was asleep or is overloaded."""
    try:
        standing = standing_of(peer)
    except Timeout as error:
        logger.warning("%s; is this machine overloaded, or was it asleep?", error)
        return
    logger.info("%s", described(standing))
    emit(standing)


def standing_of(peer: Peer) -> StandingBy:
    """The peer's current status."""

    async def look() -> StandingBy:
        memory = psutil.Process().memory_info().rss
        return StandingBy(peer.dht.num_nodes, peer.endpoint.num_connected_peers, peer.dht.num_records, memory)

    return peer.run(look(), CALL_TIMEOUT_S, "looking how this peer stands")


def described(standing: StandingBy) -> str:
    """The status as a log line."""
    return (
        f"nodes in the table: {standing.num_known_peers}, peers connected: {standing.num_connected_peers}; "
        f"{counted(standing.num_records, 'record')} held, "
        f"{amount_of(standing.memory_bytes)} of memory"
    )
