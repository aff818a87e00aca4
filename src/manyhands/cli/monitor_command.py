"""``manyhands monitor``: follow a run without training."""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console, RenderableType

from manyhands.access import SignedCharter
from manyhands.base.address import host_ports
from manyhands.base.errors import ConfigError
from manyhands.base.run_id import checked_run_id
from manyhands.base.text import shell_option
from manyhands.cli.charter_options import checked_charter, coordinate, run_id_of, wait
from manyhands.cli.keeping import Keeping, KeepingOptions
from manyhands.cli.leaving import skip_libraries_at_exit
from manyhands.cli.options import DEFAULT_RUN_ID, NetworkOptions, OutputOptions
from manyhands.cli.output.card import print_card
from manyhands.cli.output.live_view import LiveScreen, console_of
from manyhands.cli.output.logs import name_in_logs
from manyhands.cli.output.monitor_screen import card_of, screen_of
from manyhands.cli.run_look_up import LOOK_TIMEOUT_S, Scout
from manyhands.cli.taking_part import Start, meet_peers_here, monitor_folder, own_folder, with_peers_here
from manyhands.cli.ticket_command import print_tickets
from manyhands.cli.web_page import Playground, WebOptions, command_to_join, page_of
from manyhands.monitor import RunMonitor
from manyhands.monitor.curves import Curves, Sink, TensorBoardSink, TrackioSink, WandbMode, WandbSink
from manyhands.monitor.history import open_history
from manyhands.monitor.monitor import MAX_REFRESH_S, checked_refresh_s
from manyhands.monitor.monitor_events import Listening, MonitorEvent
from manyhands.monitor.picture import Point, RunPicture
from manyhands.monitor.web import MonitorSource
from manyhands.monitor.web.address import url_of
from manyhands.peer import Peer

logger = logging.getLogger(__name__)


@Parameter(name="*", group="Curves")
@dataclass(frozen=True, kw_only=True)
class CurveOptions:
    """Where to draw loss, alive peers, samples, performance, step, and the measurements of evaluators."""

    wandb_project: str | None = None
    """Draw the curves at wandb.ai, in this project; needs the extra manyhands[wandb]."""

    wandb_mode: WandbMode | None = None
    """Send the curves at once, keep them for "wandb sync", or neither; by default WANDB_MODE, else online."""

    tensorboard: Path | None = None
    """Write the curves into this folder, for TensorBoard; needs the extra manyhands[tensorboard]."""

    trackio: str | None = None
    """Draw the curves with Trackio, in this project; needs the extra manyhands[trackio]."""

    def __post_init__(self) -> None:
        if self.trackio is not None and not self.trackio.strip():
            raise ConfigError("--trackio is empty; name a project, for example --trackio my-albert")
        if self.wandb_project is not None and not self.wandb_project.strip():
            raise ConfigError("--wandb-project is empty; name a project, for example --wandb-project my-albert")
        if self.wandb_mode is not None and self.wandb_project is None:
            raise ConfigError("--wandb-mode says how curves get to wandb; name a project too: --wandb-project NAME")

    def sinks(self, run_id: str) -> dict[str, Sink]:
        """The sinks for the curves, not yet open.

        Raises:
            ConfigError: a package is not installed, or a folder cannot be written.
        """
        sinks: dict[str, Sink] = {}
        if self.wandb_project is not None:
            sinks["wandb"] = WandbSink(self.wandb_project, run_id, self.wandb_mode)
        name = f"{run_id}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if self.trackio is not None:
            sinks["Trackio"] = TrackioSink(self.trackio, run_id, name)
        if self.tensorboard is not None:
            sinks["TensorBoard"] = TensorBoardSink(self.tensorboard, name)
        return sinks


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """The run to watch, and the outputs of the monitor.

    Raises:
        ConfigError: values contradict each other, or are out of bounds.
    """

    run_id: Annotated[
        str | None,
        Parameter(
            help="Name of the run: 1 to 64 characters, without '.'; by default that of the charter or ticket, or the "
            "only one there, else albert."
        ),
    ] = None

    charter: Annotated[
        Path | None,
        Parameter(
            help="Charter of the run (manyhands run create), to publish it and to coordinate; by default "
            "the one that this state dir served last."
        ),
    ] = None

    refresh_period: float = MAX_REFRESH_S
    """Longest time between two refreshes in seconds; shorter before a global step."""

    plain: bool = False
    """Print log lines in a terminal too, where otherwise a live screen is drawn."""

    curves: CurveOptions = CurveOptions()
    keeping: KeepingOptions = KeepingOptions()
    web: WebOptions = WebOptions()

    playground: Annotated[bool, Parameter(group="Page")] = False
    """On the page, a box that fills a [MASK]; needs --web and --checkpoint-dir."""

    network: NetworkOptions = NetworkOptions()
    output: OutputOptions = OutputOptions()

    def __post_init__(self) -> None:
        checked_refresh_s(self.refresh_period)
        if self.playground and (self.web.web is None or self.keeping.checkpoint_dir is None):
            raise ConfigError(
                "--playground fills masks with a checkpoint on the page: give --web and --checkpoint-dir too"
            )

    def fill(self) -> Playground | None:
        """The model behind the box on the page; None without the box."""
        folder = self.keeping.checkpoint_dir
        return Playground(folder) if self.playground and folder is not None else None


def monitor(*, options: MonitorOptions = MonitorOptions()) -> None:
    """Welcome trainers and show how the run goes. Trains nothing, needs no GPU and no torch.

    Prints the exact command for the trainers. In a terminal, a live screen of the
    run follows as soon as somebody trains. Runs until Ctrl-C.
    """
    charter = checked_charter(options.charter, options.network)
    run_id, network = run_to_watch(options, charter)
    repo = options.keeping.check()
    sinks = options.curves.sinks(run_id)
    console = console_of(sys.stdout)  # now: some sinks replace standard output for a moment
    with ExitStack() as cleanup:
        bound = cleanup.enter_context(options.web.taken())
        emit = options.output.begin()
        history = cleanup.enter_context(closing(open_history(run_id, network.state_dir)))
        keeper = None
        if options.keeping.checkpoint_dir is not None:
            keeper = cleanup.enter_context(closing(Keeping(options.keeping, run_id, repo)))
        peer = cleanup.enter_context(started_peer(run_id, network, charter))
        tell_how_to_join(peer, run_id, network, charter)
        emit(Listening(peer.peer_id, peer.addresses))

        listeners: list[Callable[[MonitorEvent], object]] = [emit]
        on_event = partial(tell_all, listeners)
        watcher = RunMonitor(peer, run_id, on_event, refresh_s=options.refresh_period, history=history)
        cleanup.callback(print_summary, watcher)
        source = MonitorSource(watcher)
        cleanup.enter_context(page_of(source, bound, options.fill(), command_to_join(peer, run_id)))
        curves = cleanup.enter_context(drawn_curves(sinks))
        listeners += [source.add, curves.add]
        if keeper is not None:
            listeners.append(keeper.note)
        if not options.plain:
            page = [f"The page of the run: {url_of(bound)}"] if bound is not None else []
            drawing = Drawing(watcher, lambda: [*how_to_join(peer, network, charter), *page])
            cleanup.enter_context(screen_if_possible(console, drawing))

        peer.run(watcher.start(), 5.0, "starting the monitor")
        if keeper is not None:
            keeper.run(peer)
        while True:
            wait(peer, charter, 3600.0)


def run_to_watch(options: MonitorOptions, charter: SignedCharter | None) -> tuple[str, NetworkOptions]:
    """The name of the run, and the options to join it with.

    Raises:
        ConfigError: names contradict each other, or there are several runs.
        JoinFailed: none of the initial peers answers.
    """
    network = options.network
    if charter is not None and options.run_id not in (None, charter.run_id):
        raise ConfigError(
            f"the charter is of run {charter.run_id!r}, and --run-id is {options.run_id!r}; leave --run-id out"
        )
    run_id = charter.run_id if charter is not None else run_id_of(network, options.run_id)
    if run_id is None and network.initial_peers:
        with Scout(network.initial_peers) as scout:
            run_id = scout.only_run()
    run_id = checked_run_id(DEFAULT_RUN_ID if run_id is None else run_id)
    return run_id, with_peers_here(network, run_id, options.output)


@contextmanager
def started_peer(run_id: str, network: NetworkOptions, charter: SignedCharter | None) -> Iterator[Peer]:
    """The peer of a monitor, while the block runs. If it cannot start, a folder that was made for it is removed.

    Raises:
        ConfigError: the run is by invitation, and there is no ticket.
    """
    if not network.initial_peers and network.client_mode is None:
        network = replace(network, client_mode=False)  # others must be able to dial it, also peers that it knows
    if network.relay is None and not network.client_mode:
        network = replace(network, relay=True)
    folder = own_folder(monitor_folder(run_id), network)
    with Start() as start:
        if folder is not None and folder.is_new:
            start.removes(folder.path)
        with network.connect(own_dir=folder) as peer:
            meet_peers_here(peer, run_id, network)
            if charter is None:
                peer.run(peer.presence.check_run(run_id), LOOK_TIMEOUT_S, "looking for a charter")
            start.has_succeeded()
            yield peer


def tell_how_to_join(peer: Peer, run_id: str, network: NetworkOptions, charter: SignedCharter | None) -> None:
    """Log who this peer is, and how others join the run through it."""
    name_in_logs(run=run_id, peer=str(peer.peer_id))
    logger.info("Running a coordinator of run %s as peer %s", run_id, peer.peer_id)
    if peer.state_path is not None:
        logger.info("Its id and port are in %s: the next start has the same", peer.state_path)
    if charter is not None:
        coordinate(peer, charter, network)
    members = peer.presence.members.get(run_id)
    if members is None:
        welcome(run_id, peer, network.initial_peers or ())
    elif charter is None and members.charter.is_open:
        welcome(run_id, peer, network.initial_peers or (), members.charter.digest)


def tell_all(listeners: Sequence[Callable[[MonitorEvent], object]], event: MonitorEvent) -> None:
    """Pass an event of the monitor to all listeners."""
    for listener in listeners:
        listener(event)


@contextmanager
def drawn_curves(sinks: Mapping[str, Sink]) -> Iterator[Curves]:
    """The curves, while the block runs.

    The program then ends without waiting for their libraries: wandb's process ends with it.
    """
    curves = Curves(sinks)
    try:
        yield curves
    finally:
        curves.close()
        if sinks:
            skip_libraries_at_exit()


@contextmanager
def screen_if_possible(console: Console, drawing: Drawing) -> Iterator[None]:
    """Draw the run while the block runs, in a terminal that can be redrawn."""
    if not console.is_interactive:
        yield
        return
    logger.info("A live screen begins here as soon as somebody trains; --plain prints log lines instead")
    with LiveScreen(console, drawing):
        yield


class Drawing:
    """Draws the last picture of a run, for a :class:`manyhands.cli.output.live_view.LiveScreen`."""

    def __init__(self, watcher: RunMonitor, footer: Callable[[], list[str]]) -> None:
        self._watcher = watcher
        self._footer = footer
        self._picture: RunPicture | None = None
        self._points: list[Point] = []

    def __call__(self, width: int, height: int, log: Sequence[logging.LogRecord]) -> RenderableType | None:
        picture = self._watcher.picture
        if picture is None or not (picture.num_peers or picture.last):
            return None
        if picture is not self._picture:
            self._picture = picture
            self._points = self._watcher.history.points()
        return screen_of(picture, self._points, width, height, time.time(), log=log, footer=self._footer())


def print_summary(watcher: RunMonitor) -> None:
    """Print the summary of a run, if it has made a step."""
    picture = watcher.picture
    if picture is not None and picture.last is not None:
        print_card(card_of(picture, watcher.history.points()))


def welcome(run_id: str, peer: Peer, initial_peers: Sequence[str], charter: bytes = b"") -> None:
    """Log how others join the run through this peer, in all the ways that tutorials use.

    Args:
        charter: digest of the charter of the run, if it has one.
    """
    addresses = peer.addresses
    places = host_ports(addresses)
    for place in places:
        logger.info("Running DHT root at %s", place)
    if places:
        logger.info("To train with it, run this on any machine that can reach this one:")
    else:
        logger.info(
            "Others cannot join through this monitor, since it is in client mode; they can join through its peers:"
        )
    shown = addresses or initial_peers or ["ADDRESS-OF-ANY-OTHER-PEER"]
    named = shell_option("--run-id", run_id)
    print(f"\n    manyhands train {named} --initial-peers {' '.join(shown)}")  # noqa: T201
    if places:
        print(f"\n    --initial_peers {' '.join(addresses)}")  # noqa: T201
        print(f"    --initial_peers {' '.join(places)}")  # noqa: T201
        print_tickets(peer, run_id, charter=charter)
    sys.stdout.flush()


def how_to_join(peer: Peer, network: NetworkOptions, charter: SignedCharter | None) -> list[str]:
    """The shortest ways to join, and to see the ticket again, for the foot of the screen."""
    if charter is not None and not charter.is_open:
        return [f"To invite, in another terminal: manyhands invite --state-dir {network.state_dir} --uses 5"]
    places = host_ports(peer.addresses or network.initial_peers or ())
    if not places:
        return []
    return [
        f"To join: manyhands join {places[0]}",
        f"Ticket and QR code, in another terminal: manyhands ticket {places[0]}",
    ]
