"""One peer: its identity, its network thread, its connections and its part of the DHT."""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from manyhands.access import AccessConfig, Authorizer, Members, SignedCharter
from manyhands.access.charters import charted_runs, has_charter_records, read_charters
from manyhands.access.coordinator import Coordinator
from manyhands.access.run_joining import JoiningPeer, follow_open, join_by, serve_charter
from manyhands.base.address import Address, parse_addresses, parse_listen_addresses
from manyhands.base.arguments import check_flags
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, ManyhandsError, Timeout, Unavailable
from manyhands.base.from_hivemind import FromHivemind, with_advice
from manyhands.base.identity import Identity, PeerId
from manyhands.base.ticket import Ticket, split_tickets
from manyhands.dht import DhtConfig, DhtNode
from manyhands.reach import OwnMode, Reach
from manyhands.reach.clocks import check_clock
from manyhands.rpc import Endpoint, RpcConfig
from manyhands.rpc.announce import dialable_addresses
from manyhands.runtime import LoopThread, TaskOwner
from manyhands.state_dir import StateDir
from manyhands.transport import TlsTransport, Transport

T = TypeVar("T")
logger = logging.getLogger(__name__)

ALL_INTERFACES = ("0",)
"""A free port on all interfaces, with IPv4 and IPv6; with IPv4 alone where the machine has no IPv6."""
START_TIMEOUT_S = 15.0
BEFORE_JOINING_TIMEOUT_S = 12.0
CLOSE_TIMEOUT_S = 4.0
PART_CLOSE_TIMEOUT_S = 2.0
JOIN_RUN_TIMEOUT_S = 60.0
"""Covers the search for the charter, and calls to several coordinators that do not answer."""
DHT_TIMEOUT_S = 30.0
"""Covers a lookup and several requests after it, each with its own timeout."""
FIRST_SAVE_S = 10.0
SAVE_PERIOD_S = 60.0

_NO_FIRST_PEER = (
    "a peer in client mode cannot be the first one, since others could not join it; give it the address of "
    "a peer that accepts connections (--initial-peers, initial_peers=), or leave client mode out"
)


class Presence:
    """A peer in the swarm, on any event loop: an endpoint and a DHT node with a common lifetime.

    :class:`Peer` runs one on a thread of its own; simulations have many of them on one loop.

    Attributes:
        on_close: callbacks of the parts that depend on it, called in reverse order when it stops.
        leaving: held while one of these parts is closed; another one waits for it before it joins a run.
        members: by run id, the members of each run with a charter that this peer is in or looks at.
        coordinators: by run id, the coordinator of each run for which this peer signs leases.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        client_mode: bool = False,
        rng: random.Random | None = None,
        wall_clock: Callable[[], float] = time.time,
        rpc_config: RpcConfig | None = None,
        dht_config: DhtConfig | None = None,
        access_config: AccessConfig | None = None,
        state_dir: StateDir | None = None,
    ) -> None:
        self.peer_id: PeerId = transport.identity.peer_id
        self.members: dict[str, Members] = {}
        self.coordinators: dict[str, Coordinator] = {}
        self.rng = rng or random.Random()
        self.wall_clock = wall_clock
        self.began_at = wall_clock()
        """Start of this process's participation, in seconds since 1970."""
        self._access_config = access_config or AccessConfig()
        self.on_close: list[Callable[[], Awaitable[None]]] = []
        self.leaving = asyncio.Lock()
        self._named: Sequence[Address] = ()  # the peers that this one was told to join
        self._learnt: set[str] = set()  # runs without a ticket, whose charter came from the named peers
        self._learning = asyncio.Lock()
        self.endpoint = Endpoint(transport, client_mode=client_mode, config=rpc_config, rng=self.rng)
        self._state_dir = state_dir
        known_peers = state_dir.load_peers() if state_dir is not None else None
        self._knows_others = known_peers is not None and len(known_peers) > 0
        dht_config = dht_config or DhtConfig()
        self.dht = DhtNode(self.endpoint, dht_config, self.rng, wall_clock, known_peers)
        self._max_clock_skew_s = dht_config.max_clock_skew_s
        self.reach = Reach(self.endpoint, self.dht, wall_clock)
        self.own_mode = OwnMode(self.endpoint, self.dht)
        self.on_close.append(self.own_mode.close)
        self.run_steps: dict[str, int] = {}
        """By run id, the highest global step that was seen. Only runs whose state this peer lacks."""
        self._tasks = TaskOwner("presence")

    async def start(
        self,
        initial_peers: Sequence[Address],
        listen: Sequence[Address],
        announce: Sequence[Address] = (),
        *,
        must_join: bool = True,
        finds_mode: bool = False,
        before_joining: BeforeJoining | None = None,
    ) -> None:
        """Listen, and join the DHT.

        Args:
            finds_mode: enter client mode if no other peer can dial this one, unless this is the first one.
            before_joining: called when this peer listens, and before it joins the DHT.
        Raises:
            ConfigError: a port is taken, or a host is not of this machine.
            JoinFailed: neither an initial peer nor a peer known from an earlier start answered.
        """
        self._named = initial_peers
        await self._listen(listen, announce)
        if before_joining is not None:
            await before_joining(self)
        if finds_mode and self.knew_others:
            self.own_mode.start()
        await self.dht.join(initial_peers, must_join=must_join)
        if self._state_dir is not None:
            self._tasks.spawn(self._save_now_and_then(self._state_dir), name="writing the known peers down")

    @property
    def knew_others(self) -> bool:
        """Whether this peer was given initial peers, or knew others from an earlier start."""
        return bool(self._named) or self._knows_others

    async def _listen(self, listen: Sequence[Address], announce: Sequence[Address]) -> None:
        """Listen. If the first address has no port, take the port of the last start, which others may still dial."""
        if self._state_dir is None:
            await self.endpoint.listen(listen, announce)
            return
        takes_any_port = bool(listen) and not listen[0].port
        await self.endpoint.listen(listen, announce, last_port=self._state_dir.load_port() if takes_any_port else 0)
        bound = self.endpoint.bound_addresses
        if takes_any_port:
            self._state_dir.save_port(bound[0].port)
        here = [str(address.with_peer(self.endpoint.peer_id)) for address in dialable_addresses(bound)]
        self._state_dir.save_addresses(here)

    # runs with a charter

    async def join_run(self, ticket: Ticket, credential: bytes = b"", *, only_looks: bool = False) -> None:
        """Join a run with a charter; see :func:`manyhands.access.run_joining.join_by`."""
        self._keep(await join_by(ticket, self._as_joining_peer(), credential, only_looks=only_looks))

    async def serve_charter(self, charter: SignedCharter, authorizer: Authorizer | None = None) -> bool:
        """Publish a charter; returns whether this peer is one of its coordinators and signs leases."""
        coordinator, members = await serve_charter(charter, self._as_joining_peer(), authorizer)
        self.on_close.append(coordinator.close)
        self.coordinators[charter.run_id] = coordinator
        self._keep(members)
        return coordinator.is_delegated

    async def named_charters(self, run_id: str | None = None) -> list[SignedCharter]:
        """The charters that this peer's initial peers serve: those of one run, or by default of all runs.

        Other peers are not asked: anybody could publish a charter for a run that has none.
        """
        if not self._named:
            return []
        run_ids = [run_id] if run_id is not None else await charted_runs(self.dht)
        if not any(await asyncio.gather(*(has_charter_records(self.dht, name) for name in run_ids))):
            return []
        named = await self.named_peers()
        published = await asyncio.gather(*(read_charters(self.dht, name, publishers=named) for name in run_ids))
        return [entry.charter for entries in published for entry in entries]

    async def named_peers(self) -> set[PeerId]:
        """The initial peers, except those whose address has no peer id and cannot be dialled."""
        named = {address.peer_id for address in self._named if address.peer_id is not None}
        for address in self._named:
            if address.peer_id is None:
                with suppress(Unavailable):
                    named.add(await self.endpoint.connect(address))
        return named

    async def check_run(self, run_id: str) -> None:
        """Check this peer's clock, its ticket and the run's charter, before it takes part in the run.

        Raises:
            ConfigError: the clock is so wrong that others would refuse this peer's records; the ticket is for another
                run; or as for :meth:`learn_charter`.
        """
        contacts = [contact.peer_id for contact in self.dht.contacts()]
        await check_clock(self.endpoint, self.wall_clock, contacts, self._max_clock_skew_s)
        told = [name for name in self.members if name not in self._learnt]
        if told and run_id not in self.members:
            raise ConfigError(f"the ticket is for run {told[0]!r}, and run_id is {run_id!r}; use run_id={told[0]!r}")
        await self.learn_charter(run_id)

    async def learn_charter(self, run_id: str) -> None:
        """Apply the limits and bans of an open run from now on, if the named peers serve its charter.

        Raises:
            ConfigError: the run is by invitation and this peer has no ticket, the named peers have different charters,
                or this peer is banned.
        """
        async with self._learning:
            if run_id not in self.members:
                charters = {charter.digest: charter for charter in await self.named_charters(run_id)}
                if len(charters) > 1:
                    raise ConfigError(
                        f"the peers of run {run_id!r} that you named have {len(charters)} different charters; ask its "
                        "owner for a ticket, and use it in place of the addresses"
                    )
                for charter in charters.values():
                    self._keep(await follow_open(charter, self._as_joining_peer()))
                    self._learnt.add(run_id)
        self.check_own(run_id)

    def check_own(self, run_id: str) -> None:
        """Check that this peer may stay in a run.

        Raises:
            ConfigError: it is banned.
        """
        if (members := self.members.get(run_id)) is not None:
            members.check_own()

    def signed_manifests(self) -> dict[str, bytes]:
        """By run id, the fingerprint of the run manifest that the owner signed. Such a run accepts no other one."""
        charters = {run_id: members.charter.charter for run_id, members in self.members.items()}
        return {run_id: charter.manifest for run_id, charter in charters.items() if charter.manifest}

    def _keep(self, members: Members) -> None:
        self.members[members.charter.run_id] = members
        self.on_close.append(members.close)

    def _as_joining_peer(self) -> JoiningPeer:
        folder = self._state_dir.path if self._state_dir is not None else None
        return JoiningPeer(
            self.endpoint, self.dht, self.rng, self.wall_clock, folder, self._access_config, self.began_at
        )

    # saved state

    async def _save_now_and_then(self, state_dir: StateDir) -> None:
        wait_s = FIRST_SAVE_S
        while True:
            await asyncio.sleep(wait_s)
            await asyncio.get_running_loop().run_in_executor(
                None, state_dir.save_peers, self.dht.known_peers().to_json()
            )
            wait_s = SAVE_PERIOD_S

    async def _save_last(self) -> None:
        """Save on this thread: executor threads are gone when the interpreter exits."""
        if self._state_dir is not None and len(known := self.dht.known_peers()):
            self._state_dir.save_peers(known.to_json())

    async def stop(self) -> None:
        """Leave the swarm: close the parts, the DHT node and all connections, even if one of them fails or hangs."""
        parts = [*reversed(self.on_close), self._tasks.close, self._save_last, self.dht.close, self.endpoint.close]
        for close_part in parts:
            name = getattr(close_part, "__qualname__", repr(close_part))
            try:
                async with time_limit(PART_CLOSE_TIMEOUT_S, f"closing a part of this peer ({name})"):
                    await close_part()
            except Timeout as error:
                logger.warning("%s", error)
            except Exception:
                logger.exception("%s of this peer failed", name)


BeforeJoining = Callable[[Presence], Awaitable[None]]


class BlockingPeer(Protocol):
    """The part of a :class:`Peer` that blocking code, such as an optimizer, uses. Simulations implement it too."""

    peer_id: PeerId
    presence: Presence

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
        """Run a coroutine on the loop of the presence, and wait for its result."""

    def time(self) -> float:
        """Seconds of a monotonic clock."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


def check_peer(peer: object) -> None:
    """Check that an optimizer or averager was given a peer.

    Raises:
        ConfigError: it was not; the message shows calls that work.
    """
    if not hasattr(peer, "presence"):
        given = "None" if peer is None else f"of type {type(peer).__name__}"
        raise ConfigError(
            f"peer is {given}; it must be this machine's manyhands.Peer: peer=manyhands.Peer() begins a swarm, "
            "peer=manyhands.Peer(initial_peers=[ADDRESS]) joins one"
        )


def _check_only_dials(listen: Sequence[Address], announce: Sequence[Address]) -> None:
    if announce:
        raise ConfigError(
            f"announce={[str(address) for address in announce]} says where others dial this peer, and client_mode=True "
            "that they cannot; leave one out"
        )
    if ports := [address.port for address in listen if address.port]:
        raise ConfigError(
            f"port {ports[0]} is given to listen on, and a peer in client mode only dials out; leave one of the two "
            "out (--listen, listen=; --client-mode, client_mode=)"
        )


def _check_kinds(identity: object, state_dir: object, credential: object) -> None:
    if state_dir == "":
        raise ConfigError("state_dir is empty; name a folder, such as my-peer, or leave it out")
    for name, value, kinds in (
        ("identity", identity, (str, Path, Identity)),
        ("state_dir", state_dir, (str, Path, StateDir)),
        ("credential", credential, (str,)),
    ):
        if not isinstance(value, kinds) and (value is not None or name == "credential"):
            raise ConfigError(f"{name} is of type {type(value).__name__}; give a text, or leave it out")


class Peer(FromHivemind):
    """The connection of this machine to a swarm. Use it as a context manager, or call :meth:`close`.

    Args:
        initial_peers: multiaddrs or ``HOST:PORT`` of any running peers; without any, this is the first peer. A ticket
            works as well; with the ticket of a run by invitation, this peer becomes a member of the run.
        listen: where to accept connections; by default on all interfaces, on a free port. ``31337`` is that port on all
            interfaces. Both are with IPv4 and IPv6, or with IPv4 alone where the machine has no IPv6.
        announce: addresses that others dial, in place of those that this machine detects; for example of a tunnel.
        client_mode: dial out only; for machines that cannot be dialled, for example behind a firewall. It needs
            ``initial_peers``, or a ``state_dir`` with known peers. By default, a peer that has ``initial_peers``, but
            no ``announce`` and no ``before_joining``, finds out within 15 s whether others can dial it. False listens
            in any case.
        identity: a file with the private key, created if missing; by default the one in ``state_dir``, or a new
            identity each time.
        state_dir: a folder of this peer alone, created if missing. It keeps the identity, the port, if ``listen`` names
            none, and the addresses of other peers, which the next start also uses to join. An open ``StateDir`` is
            closed with this peer.
        must_join: False to start alone if none of the initial peers answers, and keep trying. Coordinators do so, as
            they would wait for each other otherwise.
        before_joining: called on the network thread once this peer listens and before it joins, for at most 12 s; for
            example to open a tunnel and announce its address.
        credential: sent to the coordinators of a run in place of the invitation in a ticket, for coordinators that
            ask a login service.
    Raises:
        ConfigError: an address, the identity file or the state dir cannot be used, the port is taken, or the
            coordinators of the ticket's run refuse this peer.
        JoinFailed: none of the initial peers answered; names each address with its own reason.
    """

    presence: Presence

    def __init__(
        self,
        initial_peers: Sequence[str | Address] = (),
        *,
        listen: Sequence[str | Address] = ALL_INTERFACES,
        announce: Sequence[str | Address] = (),
        client_mode: bool | None = None,
        identity: str | Path | Identity | None = None,
        state_dir: str | Path | StateDir | None = None,
        must_join: bool = True,
        before_joining: BeforeJoining | None = None,
        credential: str = "",
        rpc_config: RpcConfig | None = None,
        dht_config: DhtConfig | None = None,
        access_config: AccessConfig | None = None,
    ) -> None:
        initial_addresses, tickets = split_tickets(initial_peers)
        listen_addresses, announce_addresses = parse_listen_addresses(listen), parse_addresses(announce)
        check_flags(must_join=must_join)
        check_flags(may_be_none=True, client_mode=client_mode)
        if client_mode:
            _check_only_dials(listen_addresses, announce_addresses)
            listen_addresses = []
        elif not listen_addresses:
            raise ConfigError("listen is empty; leave it out to accept connections on a free port")
        _check_kinds(identity, state_dir, credential)
        may_be_client = client_mode is None and before_joining is None and not announce_addresses
        self._is_closed = False
        self._state_dir = StateDir(state_dir) if isinstance(state_dir, (str, Path)) else state_dir
        try:
            if client_mode and not initial_addresses:
                self._check_knows_others()
            self.identity = self._identity_of(identity)
        except BaseException:
            self._release_state_dir()
            raise
        self.peer_id: PeerId = self.identity.peer_id
        self._runtime = LoopThread(f"manyhands {self.peer_id[-6:]}")
        atexit.register(self.close)

        async def start() -> None:
            self.presence = Presence(
                TlsTransport(self.identity),
                client_mode=bool(client_mode),
                rpc_config=rpc_config,
                dht_config=dht_config,
                access_config=access_config,
                state_dir=self._state_dir,
            )
            await self.presence.start(
                initial_addresses,
                listen_addresses,
                announce_addresses,
                must_join=must_join,
                finds_mode=may_be_client and bool(listen_addresses),
                before_joining=before_joining,
            )

        before_s = BEFORE_JOINING_TIMEOUT_S if before_joining is not None else 0.0
        try:
            self.run(start(), START_TIMEOUT_S + before_s, "starting this peer")
            if client_mode and must_join and not initial_addresses and not self.dht.num_known_peers:
                raise ConfigError(f"no peer that was seen before answers, and {_NO_FIRST_PEER}")
            for ticket in tickets:
                if ticket.is_charted:
                    joining = self.presence.join_run(ticket, credential.encode())
                    self.run(joining, JOIN_RUN_TIMEOUT_S, f"joining run {ticket.run_id}")
        except BaseException:
            self.close()
            raise

    def _identity_of(self, given: str | Path | Identity | None) -> Identity:
        if isinstance(given, Identity):
            return given
        if given is None and self._state_dir is not None:
            given = self._state_dir.identity_path
        return Identity.load_or_create(given) if given is not None else Identity.generate()

    def _check_knows_others(self) -> None:
        if self._state_dir is None or not len(self._state_dir.load_peers()):
            raise ConfigError(_NO_FIRST_PEER)

    def _release_state_dir(self) -> None:
        if self._state_dir is not None:
            self._state_dir.close()

    @property
    def endpoint(self) -> Endpoint:
        """The connections of this peer, for use on the network thread only."""
        return self.presence.endpoint

    @property
    def dht(self) -> DhtNode:
        """The DHT node of this peer, for use on the network thread only."""
        return self.presence.dht

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs that others can dial, with this peer's id; empty in client mode.

        The loopback address is included only if there is no other.
        """
        addresses = self.endpoint.addresses
        return [str(a) for a in addresses if not a.is_loopback] or [str(a) for a in addresses]

    def announce(self, addresses: Sequence[str | Address] = ()) -> None:
        """Replace the announced addresses, for example after the address of this machine or of a tunnel has changed.

        Connected peers are told at once. The others find this one through them within a minute, as long as at least one
        connected peer can be dialled.

        Args:
            addresses: where others can dial this peer; by default, the addresses of this machine.
        Raises:
            ConfigError: an address cannot be read or dialled.
        """
        parsed = parse_addresses(addresses)

        async def announce() -> None:
            self.endpoint.announce(parsed)

        self.run(announce(), CLOSE_TIMEOUT_S, "announcing addresses")

    @property
    def state_path(self) -> Path | None:
        """The folder of ``state_dir``, in which this peer keeps what it needs after a restart; None without one."""
        return self._state_dir.path if self._state_dir is not None else None

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
        """Run a coroutine on the network thread and wait for its result.

        Raises:
            Timeout: ``timeout_s`` seconds are over; ``phase`` describes the operation.
        """
        return self._runtime.run(coro, timeout_s, phase)

    @with_advice(
        expiration_time="ttl_s=60, a duration in seconds,",
        return_future=": call it in a thread to go on meanwhile",
    )
    def store(
        self, key: str, value: Any, *, ttl_s: float, subkey: str | None = None, timeout_s: float = DHT_TIMEOUT_S
    ) -> int:
        """Publish a small value under a key of the DHT for all peers, and wait until it is stored.

        ::

            peer.store("my-run.notes", {"loss": 3.2}, ttl_s=600, subkey=peer.peer_id)

        Args:
            key: 1 to 256 characters.
            value: bool, int, float, str, bytes, or lists and dicts of them; at most 64 KiB. None deletes.
            ttl_s: lifetime in seconds; at most a day.
            subkey: a key has one value for each subkey. If the subkey is this peer's own id, only this peer can write
                the value; otherwise all peers can. By default the empty one.
        Returns:
            Number of peers that hold it now; 0 if no peer could be reached.
        Raises:
            ConfigError: an argument is out of bounds.
            Refused: all peers that could be reached refuse it.
            Timeout: ``timeout_s`` seconds are over.
        """
        return self.run(self.dht.store(key, value, ttl_s, subkey), timeout_s, f"storing key {key!r}")

    @with_advice(
        latest=": the latest value is read anyway",
        return_future=": call it in a thread to go on meanwhile",
    )
    def get(self, key: str, *, timeout_s: float = DHT_TIMEOUT_S) -> dict[str, Any]:
        """Read the values of a key of the DHT.

        Returns:
            The latest value of each subkey, as it was stored, except that tuples are lists; a value stored without a
            subkey is under ``""``. Empty if there is none, or no peer could be reached.
        Raises:
            ConfigError: the key is not 1 to 256 characters.
            Timeout: ``timeout_s`` seconds are over.
        """
        found = self.run(self.dht.get(key), timeout_s, f"reading key {key!r}")
        return {subkey: stored.value for subkey, stored in found.items()}

    def coordinate(self, charter: str | Path, *, authorizer: Authorizer | None = None) -> bool:
        """Publish the charter of a run; sign leases for its peers if it names this peer as a coordinator.

        Args:
            charter: the file that ``manyhands run create`` wrote.
            authorizer: decides on leases; by default peers with an invitation get one.
        Returns:
            Whether this peer is a coordinator.
        Raises:
            ConfigError: the file is not a charter, or the state dir is that of another charter's coordinator.
        """
        serving = self.presence.serve_charter(SignedCharter.load(charter), authorizer)
        return self.run(serving, JOIN_RUN_TIMEOUT_S, "publishing the charter")

    def time(self) -> float:
        """Seconds of this machine's monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait; Ctrl-C ends it."""
        time.sleep(seconds)

    def close(self) -> None:
        """Leave the swarm: say goodbye, close all connections, end the network thread. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        try:
            if hasattr(self, "presence"):
                self.run(self.presence.stop(), CLOSE_TIMEOUT_S, "closing this peer")
        except Timeout as error:
            logger.warning("%s; connections that are still open end with the network thread", error)
        except ManyhandsError as error:  # a forked child has this object, but not its thread
            logger.debug("%s", error)
        finally:
            self._runtime.close()
            self._release_state_dir()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Peer({self.peer_id})"
