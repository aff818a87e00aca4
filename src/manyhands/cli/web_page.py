"""``--web``: the page of the run, from any command that stays."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from manyhands.base.address import host_ports, parse_addresses
from manyhands.base.errors import ConfigError
from manyhands.checkpoints.checkpoint_dir import checkpoints_in, newest_checkpoint
from manyhands.cli.leaving import skip_libraries_at_exit
from manyhands.monitor import RunMonitor
from manyhands.monitor.history import open_history
from manyhands.monitor.web import Fill, Filled, Guess, MonitorSource, Source, bind
from manyhands.monitor.web.address import DEFAULT_ADDRESS
from manyhands.peer import Peer

if TYPE_CHECKING:
    from manyhands.recipes.albert.fill import MaskFiller

START_TIMEOUT_S = 5.0
MASK = "[MASK]"


@Parameter(name="*", group="Page")
@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """Where to show the run."""

    web: tuple[str, ...] | None = None
    """Show the run on a page at [HOST:PORT], 127.0.0.1:8080 if none is named; needs the extra manyhands[web]."""

    def __post_init__(self) -> None:
        if self.web is not None and len(self.web) > 1:
            raise ConfigError(f"--web is {' '.join(self.web)}; it takes one HOST:PORT, for example {DEFAULT_ADDRESS}")

    @property
    def address(self) -> str | None:
        """``HOST:PORT``; None without ``--web``."""
        if self.web is None:
            return None
        return self.web[0] if self.web else DEFAULT_ADDRESS

    @contextmanager
    def taken(self) -> Iterator[socket.socket | None]:
        """The address of the page, taken before anything else is started; None without ``--web``.

        Raises:
            ConfigError: it cannot be used, or a package is not installed.
        """
        if self.address is None:
            yield None
            return
        with bind(self.address) as bound:
            yield bound


def place_of(bound: socket.socket) -> str:
    """The address of a page as a value for ``--web``, with its actual port."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def page_of(source: Source, bound: socket.socket | None, fill: Fill | None = None, join: str = "") -> Iterator[None]:
    """Serve the page while the block runs, if an address was taken."""
    if bound is None:
        yield
        return
    from manyhands.monitor.web.server import PageServer  # its packages are an extra

    server = PageServer(source, bound, fill, join)
    server.start()
    try:
        yield
    finally:
        if not server.close():  # a model is computing: torch aborts the process if its thread is killed at the exit
            skip_libraries_at_exit()


@contextmanager
def page_beside(peer: Peer, run_id: str, bound: socket.socket | None, state_dir: Path | None) -> Iterator[None]:
    """Watch the run and serve its page while the block runs, for a peer that does something else.

    Args:
        state_dir: where to keep the history of the run; None keeps it in memory.
    Raises:
        ConfigError: the history there cannot be used.
    """
    if bound is None:
        yield
        return
    history = open_history(run_id, state_dir)  # closed with the peer
    watcher = RunMonitor(peer, run_id, lambda event: source.add(event), history=history, is_quiet=True)
    source = MonitorSource(watcher)
    peer.run(watcher.start(), START_TIMEOUT_S, "starting to watch the run")
    with page_of(source, bound, join=command_to_join(peer, run_id)):
        yield


def command_to_join(peer: Peer, run_id: str) -> str:
    """The command that joins the run through this peer; empty if others need a ticket, or cannot dial this peer."""
    places = [place for place in parse_addresses(peer.addresses) if not place.is_loopback]
    members = peer.presence.members.get(run_id)
    if not places or (members is not None and not members.charter.is_open):
        return ""
    return f"manyhands join {host_ports(places)[0]}"


class Playground:
    """Fills masks with the newest checkpoint in a folder. The model is kept until there is a newer one.

    For one call at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # so that it has a name, even if it was given as "."
        self._newest: tuple[Path, int] | None = None  # newest checkpoint when the model was loaded, and its time
        self._model: MaskFiller | None = None

    def __call__(self, text: str) -> Filled:
        """Fill each mask in a text.

        Raises:
            ConfigError: the text or the model cannot be used.
        """
        if MASK not in text:
            raise ConfigError(f"the text has no {MASK} for the model to fill")
        try:
            filled = self._load_newest().fill(text)
        except ConfigError as error:  # a page may be public, and must not show the path of the folder
            raise ConfigError(str(error).replace(str(self._folder), self._folder.name)) from error
        return Filled(filled.text, [[Guess(*guess) for guess in of_mask] for of_mask in filled.guesses])

    def _load_newest(self) -> MaskFiller:
        newest = checkpoints_in(self._folder)[0]
        version = (newest, newest.stat().st_mtime_ns)
        if self._model is None or version != self._newest:
            path = newest_checkpoint(self._folder)  # an older one, if the newest is damaged
            from manyhands.recipes.albert.fill import MaskFiller  # imports torch, which takes seconds

            self._model = None  # so that two models are never in memory
            self._model = MaskFiller(path)
            self._newest = version
        return self._model
