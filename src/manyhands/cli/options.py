"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from manyhands.base.errors import ConfigError
from manyhands.cli.event_file import EventWriter
from manyhands.cli.leaving import leave_on_eof
from manyhands.cli.logs import log_to_stdout
from manyhands.cli.open_files import raise_open_files_limit
from manyhands.peer import ALL_INTERFACES, Peer
from manyhands.recipes.albert.settings import TuningSettings
from manyhands.rpc import RpcConfig
from manyhands.state_dir import StateDir

DEFAULT_RUN_ID = "albert"
"""Of the tutorials: of a run that is begun without a name."""

Parameter(name="*", group="Tuning (each machine its own)")(TuningSettings)  # a part of TrainingSettings


@Parameter(name="*", group="Network")
@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """How to reach the other peers, and how to be reached."""

    initial_peers: tuple[str, ...] | None = None
    """Multiaddrs (or HOST:PORT) of any peers that are there already, or a ticket; one that answers is enough."""

    listen: tuple[str, ...] = ALL_INTERFACES
    """Where to accept connections; port 0 takes a free one. 31337 alone means all interfaces, with IPv4 and IPv6."""

    announce: tuple[str, ...] | None = None
    """What others shall dial instead of what this machine finds out by itself, for example a tunnel's address."""

    identity: Path | None = None
    """File with the private key, made when it does not exist; by default in --state-dir, else a new key each time."""

    state_dir: Path | None = None
    """Folder of this peer's own: keeps its private key and the addresses of other peers, to come back by them."""

    def __post_init__(self) -> None:
        given = {"--initial-peers": self.initial_peers, "--listen": self.listen, "--announce": self.announce}
        for option, addresses in given.items():
            if addresses is not None and not "".join(addresses).strip():
                raise ConfigError(
                    f"{option} is given without an address: a variable of the shell is probably unset; "
                    f"write {option} HOST:PORT or a multiaddr, or leave the option out"
                )

    def connect(self, *, must_join: bool = True, own_dir: StateDir | None = None) -> Peer:
        """A peer with these options; see :class:`manyhands.Peer`.

        Args:
            own_dir: takes the place of ``state_dir`` if that was not given.
        """
        raise_open_files_limit()
        return self._new_peer(must_join, self.state_dir or own_dir)

    def _new_peer(self, must_join: bool, state_dir: Path | StateDir | None) -> Peer:
        return Peer(
            self.initial_peers or (),
            listen=self.listen,
            announce=self.announce or (),
            identity=self.identity,
            state_dir=state_dir,
            must_join=must_join,
        )


@Parameter(name="*", group="Network")
@dataclass(frozen=True, kw_only=True)
class NetworkOptions(PeerOptions):
    """The same, for peers that do more than to welcome others."""

    client_mode: bool = False
    """Only dial out; for machines that nobody can dial, such as those behind a firewall."""

    max_upload_mbit_s: float | None = None
    """Send bulk data (averages, states) no faster than this many megabits per second in all; by default, no limit."""

    def _new_peer(self, must_join: bool, state_dir: Path | StateDir | None) -> Peer:
        return Peer(
            self.initial_peers or (),
            listen=self.listen,
            announce=self.announce or (),
            client_mode=self.client_mode,
            identity=self.identity,
            state_dir=state_dir,
            must_join=must_join,
            rpc_config=RpcConfig(max_upload_mbit_s=self.max_upload_mbit_s),
        )


@Parameter(name="*", group="Output")
@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What a command tells, and to whom."""

    events: Path | None = None
    """Append one JSON object for each event to this file, for other programs."""

    verbose: bool = False
    """Log in detail, with the origin of each line."""

    leave_on_eof: bool = False
    """Leave when standard input ends: for programs that start this one, so that it never outlives them."""

    def begin(self) -> EventWriter:
        """Log from now on; returns where the events go."""
        log_to_stdout(verbose=self.verbose)
        if self.leave_on_eof:
            leave_on_eof()
        return EventWriter(self.events)
