"""Options that several commands share."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from manyhands.base.address import parse_listen_addresses
from manyhands.base.errors import ConfigError, own_checkout
from manyhands.cli.leaving import at_exit, leave_on_eof
from manyhands.cli.open_files import raise_open_files_limit
from manyhands.cli.output.event_file import EventWriter
from manyhands.cli.output.logs import log_to
from manyhands.cli.public_address import AnnouncedCheck, announce_public, map_port
from manyhands.peer import ALL_INTERFACES, BeforeJoining, Peer
from manyhands.recipes.albert.settings import TuningSettings
from manyhands.rpc import RpcConfig
from manyhands.state_dir import StateDir
from manyhands.tunnels import NgrokTunnel, TunnelKeeper

Count = Annotated[int, Parameter(validator=Number(gte=1))]
"""A whole number of at least 1."""

DEFAULT_RUN_ID = "albert"
"""Name of a run that is begun without a name, as in the tutorials."""

RELAY_MBIT_S = 100.0
"""Default of ``--relay-mbit-s``."""

Parameter(name="*", group="Tuning (each machine its own)")(TuningSettings)  # nested in TrainingSettings


@Parameter(name="*", group="Network")
@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """How to reach other peers, and how to be reached."""

    initial_peers: tuple[str, ...] | None = None
    """Bootstrap peers: multiaddrs or HOST:PORT of any running peers, or a ticket. One that answers is enough."""

    listen: tuple[str, ...] = ALL_INTERFACES
    """Where to accept connections. 31337 is that port on all interfaces, with IPv4 and IPv6; 0 takes a free one."""

    announce: tuple[str, ...] | None = None
    """Addresses that others dial, in place of those that this machine detects; for example that of a tunnel."""

    tunnel: Literal["ngrok"] | None = None
    """Open a tunnel to this machine and announce its address; needs manyhands[ngrok] and NGROK_AUTHTOKEN."""

    port_mapping: Annotated[bool, Parameter(negative="--no-port-mapping")] = True
    """Unless --announce or --tunnel is given: ask the router to map the port to this machine (UPnP, NAT-PMP)."""

    infer_address: Annotated[bool, Parameter(negative="--no-infer-address")] = True
    """Without --initial-peers and --announce: find this machine's public address, from its cloud, its router, a service
    on the internet, or the peers that dial it. --no-infer-address asks nobody, and maps no port."""

    relay: Annotated[bool | None, Parameter(negative="--no-relay")] = None
    """Forward averages and states, encrypted, between peers that cannot dial each other; on by default for
    coordinators and first peers."""

    relay_mbit_s: float | None = None
    """Forward at most this many megabits per second in all; 100 by default."""

    identity: Path | None = None
    """File with the private key, created if missing; by default in the folder of this peer if it has one, else new."""

    state_dir: Path | None = None
    """Folder of this peer alone. Keeps its private key, its port and addresses of other peers for the next start."""

    def __post_init__(self) -> None:
        given = {"--initial-peers": self.initial_peers, "--listen": self.listen, "--announce": self.announce}
        for option, addresses in given.items():
            if addresses is not None and not "".join(addresses).strip():
                raise ConfigError(
                    f"{option} is given without an address: a variable of the shell is probably unset; "
                    f"write {option} HOST:PORT or a multiaddr, or leave the option out"
                )
        if self.tunnel is not None and self.announce is not None:
            raise ConfigError(
                f"--tunnel {self.tunnel} announces the address of the tunnel, and --announce gives another; "
                "leave one out"
            )
        if self.relay_mbit_s is not None and self.relay is False:
            raise ConfigError("--relay-mbit-s says how fast to forward, and --no-relay forwards nothing; leave one out")
        if self.relay_mbit_s is not None and not self.relay_mbit_s > 0:
            raise ConfigError(
                f"--relay-mbit-s is {self.relay_mbit_s:g}; it must be above 0, or write --no-relay to forward nothing"
            )
        self.keeper()  # checks its package and its token

    def keeper(self) -> TunnelKeeper | None:
        """The tunnel to open, if one is wanted.

        Raises:
            ConfigError: its package or its token is missing.
        """
        return TunnelKeeper(NgrokTunnel()) if self.tunnel is not None else None

    def _before_joining(self) -> BeforeJoining | None:
        if (keeper := self.keeper()) is not None:
            return keeper.start
        return AnnouncedCheck(self.announce) if self.announce else None

    def connect(self, *, must_join: bool = True, own_dir: StateDir | None = None) -> Peer:
        """Start a peer with these options; see :class:`manyhands.Peer`.

        Args:
            own_dir: used if ``state_dir`` was not given.
        """
        raise_open_files_limit()
        peer = self._new_peer(must_join, self.state_dir or own_dir)
        if self.infer_address and self._is_first(peer) and not self.announce and self.tunnel is None:
            found = announce_public(peer, maps_port=self.port_mapping)
            if found is not None:
                at_exit(found.release)
        elif self.port_mapping and self.infer_address and not self.announce and self.tunnel is None:
            map_port(peer, at_exit)
        return peer

    def rpc_config(self, *, relays: bool, max_upload_mbit_s: float | None = None) -> RpcConfig:
        """The limits of bulk streams.

        Args:
            relays: whether this peer forwards if no option says so.
        """
        has_limit = self.relay_mbit_s is not None
        is_relay = self.relay if self.relay is not None else relays or has_limit
        relay_mbit_s = (self.relay_mbit_s or RELAY_MBIT_S) if is_relay else None
        return RpcConfig(max_upload_mbit_s=max_upload_mbit_s, relay_mbit_s=relay_mbit_s)

    def _is_first(self, peer: Peer) -> bool:
        """Whether others are to join through this peer."""
        return not self.initial_peers

    def _new_peer(self, must_join: bool, state_dir: Path | StateDir | None) -> Peer:
        return Peer(
            self.initial_peers or (),
            listen=self.listen,
            announce=self.announce or (),
            client_mode=False,  # it is there to be dialled
            identity=self.identity,
            state_dir=state_dir,
            must_join=must_join,
            before_joining=self._before_joining(),
            rpc_config=self.rpc_config(relays=True),
        )


@Parameter(name="*", group="Network")
@dataclass(frozen=True, kw_only=True)
class NetworkOptions(PeerOptions):
    """Network options of peers that do more than welcome others."""

    client_mode: Annotated[bool | None, Parameter(negative="--no-client-mode")] = None
    """Only dial out, for a machine that others cannot dial; --no-client-mode listens in any case. By default the peer
    finds out which of the two it needs."""

    max_upload_mbit_s: float | None = None
    """Send bulk data (averages, states) no faster than this many megabits per second in all; by default, no limit."""

    def _is_first(self, peer: Peer) -> bool:
        has_met_others = peer.dht.num_known_peers > 0 and self.client_mode is not False
        return super()._is_first(peer) and not has_met_others

    def __post_init__(self) -> None:
        if self.tunnel is not None and self.client_mode:
            raise ConfigError(
                f"--tunnel {self.tunnel} lets others dial this machine, and --client-mode says that they cannot; "
                "leave one out"
            )
        if self.announce is not None and self.client_mode:
            raise ConfigError(
                "--announce names the address at which others dial this machine, and --client-mode says that they "
                "cannot; leave one out"
            )
        super().__post_init__()
        if self.client_mode and (self.relay or self.relay_mbit_s is not None):
            raise ConfigError(
                "--relay forwards between peers that dial this one, and --client-mode says that they cannot; leave "
                "one out"
            )
        if self.client_mode and any(address.port for address in parse_listen_addresses(self.listen)):
            raise ConfigError(
                "--listen names a port for others to dial, and --client-mode only dials out; leave one out"
            )

    def _new_peer(self, must_join: bool, state_dir: Path | StateDir | None) -> Peer:
        return Peer(
            self.initial_peers or (),
            listen=self.listen,
            announce=self.announce or (),
            client_mode=self.client_mode,
            identity=self.identity,
            state_dir=state_dir,
            must_join=must_join,
            before_joining=self._before_joining(),
            rpc_config=self.rpc_config(relays=False, max_upload_mbit_s=self.max_upload_mbit_s),
        )


@Parameter(name="*", group="Output")
@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where to log, and what."""

    events: Path | None = None
    """Append one JSON object for each event to this file, for other programs."""

    log_file: Path | None = None
    """Append the log to this file as well; opened anew when it has been moved away."""

    log_json: bool = False
    """Append JSON objects to --log-file: time, level, logger, message, run and peer."""

    verbose: bool = False
    """Log in detail, with the origin of each line."""

    leave_on_eof: bool = False
    """Exit when standard input ends, so that this process never outlives the program that started it."""

    def __post_init__(self) -> None:
        if self.log_json and self.log_file is None:
            raise ConfigError(
                "--log-json is about the lines of a log file; name one, for example --log-file manyhands.log --log-json"
            )

    def begin(self) -> EventWriter:
        """Start logging; returns the writer for events.

        Raises:
            ConfigError: a file cannot be written.
        """
        self.begin_log()
        if self.leave_on_eof:
            leave_on_eof()
        return EventWriter(self.events)

    def begin_log(self) -> None:
        """Start logging alone, before :meth:`begin`.

        Raises:
            ConfigError: the log file cannot be written.
        """
        log_to(self.log_file, is_json=self.log_json, verbose=self.verbose)


def what_cannot_be_installed(by: str, option: str, package: str = "") -> str:
    """The reason why other machines cannot install this manyhands; empty if they can.

    Args:
        by: the other machines, as the reason names them.
        option: the option that names another address for pip.
        package: goes before the address in the example.
    """
    checkout = own_checkout()
    if checkout is None:
        return ""
    address = f"{package}git+https://HOST/REPOSITORY.git@BRANCH"
    return (
        f"this manyhands is the checkout {checkout}, which {by} cannot reach; name an address that pip can: "
        f"{option} {shlex.quote(address)}, or that of a wheel"
    )
