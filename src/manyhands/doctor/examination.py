"""Runs all checks: each initial peer, this machine, and the swarm."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from manyhands.access.charters import has_charter_records, read_charters
from manyhands.averaging.messages import readable_addresses
from manyhands.averaging.peer_records import PeerRecord
from manyhands.base.address import Address, public_host
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, PeerError, Unavailable
from manyhands.base.identity import Identity, PeerId
from manyhands.dht import DhtConfig
from manyhands.dht.reachability import can_find
from manyhands.doctor import findings
from manyhands.doctor.checks import Check, Finding, Kind, Report, report_of
from manyhands.doctor.probe import OnCheck, Probe, Probed
from manyhands.optim.run.run_records import Run, find_runs, nobody_is_in
from manyhands.peer import ALL_INTERFACES, Presence
from manyhands.reach.messages import DIAL_BACK, MAX_DIALLED, DialBackRequest
from manyhands.rpc.announce import dialable_addresses
from manyhands.rpc.ways import Way
from manyhands.transport import Listener, Stream, TlsTransport

MAX_INITIAL_PEERS = 16

DIAL_BACK_TIMEOUT_S = 5.5
"""Longest wait in seconds for the answer to a dial-back: the peer takes 4 s at most, and the call the rest."""

SWARM_TIMEOUT_S = 5.0

MAX_MET = 16
"""The most peers of the run that the doctor connects to; those in client mode come first."""

CONNECT_TIMEOUT_S = 5.0
"""Seconds to connect to one peer of the run: half for its own addresses, half for relays."""

PUNCH_TIMEOUT_S = 3.0
"""Time in which a relayed connection is replaced by a direct one, if that is possible: one attempt."""

POLL_S = 0.05

ALL_S = 14.0
"""Seconds from the start of the examination after which peers that are not connected count as not reached."""

DHT_CONFIG = DhtConfig(join_timeout_s=4.0, lookup_timeout_s=4.0, request_timeout_s=2.0)


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Options of an examination.

    Attributes:
        initial_peers: as given to a peer.
        listen, announce, client_mode: likewise.
        run_id: the run that the peer should join; None to list the runs.
        digest: the beginning of the fingerprint of the run's settings, from a ticket; may be empty.
        charter: digest of the run's charter, from a ticket; empty for that of the initial peers, if they have one.
    Raises:
        ConfigError: there are no initial peers, or too many.
    """

    initial_peers: Sequence[Address]
    listen: Sequence[Address] = tuple(map(Address.parse_listen, ALL_INTERFACES))
    announce: Sequence[Address] = ()
    client_mode: bool = False
    run_id: str | None = None
    digest: bytes = b""
    charter: bytes = b""

    def __post_init__(self) -> None:
        if not self.initial_peers:
            raise ConfigError(
                "no initial peer is given (or a variable of the shell is unset); give the addresses that your peer was "
                "started with: manyhands doctor HOST:PORT"
            )
        if len(set(self.initial_peers)) > MAX_INITIAL_PEERS:
            raise ConfigError(
                f"{len(self.initial_peers)} initial peers are given, and at most {MAX_INITIAL_PEERS} can be examined "
                "at once; give fewer"
            )

    async def run(
        self,
        identity: Identity,
        *,
        on_check: OnCheck = lambda check: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> Report:
        """Run all checks; takes 15 s at most.

        The doctor's own peer is in client mode, so no peer adds it to its routing table, and it does not introduce the
        examined peers to each other.

        Args:
            on_check: called with each check once it is done.
            wall_clock: seconds since 1970.
        """
        transport = TlsTransport(identity)
        presence = Presence(transport, client_mode=True, wall_clock=wall_clock, dht_config=DHT_CONFIG)
        examiner = _Examiner(self, transport, presence, on_check, wall_clock)
        try:
            return await examiner.run()
        finally:
            await examiner.close()
            await presence.stop()


class _Examiner:
    def __init__(
        self,
        examination: Examination,
        transport: TlsTransport,
        presence: Presence,
        on_check: OnCheck,
        wall_clock: Callable[[], float],
    ) -> None:
        self._examination = examination
        self._transport = transport
        self._presence = presence
        self._on_check = on_check
        self._wall_clock = wall_clock
        self._listeners: list[Listener] = []
        self._checks: list[Check] = []
        self._began = asyncio.get_running_loop().time()

    async def run(self) -> Report:
        loop = asyncio.get_running_loop()
        await self._listen()
        addresses = dict.fromkeys(self._examination.initial_peers)
        probed = await asyncio.gather(*(self._probe(address) for address in addresses))
        self._checks += [check for peer in probed for check in peer.checks]
        by_peer: dict[PeerId, Probed] = {}  # each peer once, even if it has several of the addresses
        for peer in probed:
            if peer.peer_id is not None:
                by_peer.setdefault(peer.peer_id, peer)
        joined = list(by_peer.values())
        self._compare_clocks(joined)
        outside = self._presence.endpoint.outside
        has_ip6 = bool(outside.public_ip6())
        seen_at = list(dict.fromkeys(host for peer in joined if (host := public_host(peer.seen_host))))
        self._note("router", findings.router(outside.router, outside.hosts, seen_at, has_ip6=has_ip6))
        await asyncio.gather(self._join(joined), self._look_at_pairs(joined), *map(self._be_dialled, joined))
        return report_of(self._checks, self._presence.peer_id, loop.time() - self._began)

    async def close(self) -> None:
        for listener in self._listeners:
            await listener.close()

    def _note(self, kind: Kind, finding: Finding, about: Probed | None = None, began: float | None = None) -> None:
        now = asyncio.get_running_loop().time()
        seconds = round(now - (began if began is not None else now), 3)
        address, peer_id = (str(about.address), about.peer_id) if about is not None else (None, None)
        check = Check(kind, finding.ok, finding.detail, finding.advice, address, peer_id, seconds)
        self._checks.append(check)
        self._on_check(check)

    async def _probe(self, address: Address) -> Probed:
        endpoint = self._presence.endpoint
        return await Probe(address, self._transport, endpoint, self._on_check, self._wall_clock).run()

    # this machine

    async def _listen(self) -> None:
        """Open listeners for the dial-backs; only the initial peers learn of them."""
        if self._examination.client_mode:
            return

        async def hang_up(stream: Stream) -> None:
            """Do nothing: a dial-back ends after the handshake."""

        for address in self._examination.listen:
            try:
                self._listeners.append(await self._transport.listen(address, hang_up))
            except ConfigError as error:
                self._note("listen", findings.cannot_listen(error))
        if bound := self._bound():
            self._note("listen", findings.listens(bound))

    def _bound(self) -> list[Address]:
        return [address for listener in self._listeners for address in listener.addresses]

    def _compare_clocks(self, joined: Sequence[Probed]) -> None:
        """Compare this machine's clock with each peer's; with three clocks, the deviating one is identified."""
        limit_s = DHT_CONFIG.max_clock_skew_s
        offsets = {peer.peer_id: peer.clock_offset_s for peer in joined if peer.clock_offset_s is not None}
        for peer in joined:
            if peer.clock_offset_s is None:
                self._note("clock", findings.no_clock(peer.examine_error), peer)
                continue
            others = [abs(offset_s) for peer_id, offset_s in offsets.items() if peer_id != peer.peer_id]
            others_agree = statistics.median_low(others) <= limit_s if others else None
            self._note("clock", findings.clock(peer.clock_offset_s, peer.clock_error_s, limit_s, others_agree), peer)

    async def _be_dialled(self, peer: Probed) -> None:
        """Ask a peer to dial this machine."""
        began = asyncio.get_running_loop().time()
        if self._examination.client_mode:
            self._note("dial_back", findings.not_tried("--client-mode: nobody needs to dial this machine"), peer)
            return
        bound = self._bound()
        addresses = self._addresses_for(peer, bound) if bound else []
        if not addresses:
            self._note("dial_back", findings.nothing_to_dial(bound), peer)
            return
        assert peer.peer_id is not None
        request = DialBackRequest([str(address) for address in addresses])
        try:
            response = await self._presence.endpoint.call(peer.peer_id, DIAL_BACK, request, DIAL_BACK_TIMEOUT_S)
        except (Unavailable, PeerError) as error:
            self._note("dial_back", findings.no_dial_back(error), peer, began)
            return
        finding = findings.dialled_back(
            list(zip(addresses, response.outcomes, strict=False)),
            are_announced=bool(self._examination.announce),
            port_was_chosen=all(address.port for address in self._examination.listen),
            listens_with={address.protocol for address in bound},
        )
        self._note("dial_back", finding, peer, began)

    def _addresses_for(self, peer: Probed, bound: Sequence[Address]) -> list[Address]:
        """Return addresses for a peer to dial: those announced, else those that a peer here would announce itself."""
        if self._examination.announce:
            return list(self._examination.announce)[:MAX_DIALLED]
        is_local = Address.of(peer.dialled_host, 1).is_loopback
        addresses = [address for address in dialable_addresses(bound) if is_local or not address.is_loopback]
        if peer.seen_host and not Address.of(peer.seen_host, 1).is_loopback:  # a loopback address comes from a tunnel
            observed = [Address.of(peer.seen_host, address.port) for address in addresses]
            addresses = observed[:1] + addresses
        return list(dict.fromkeys(addresses))[:MAX_DIALLED]

    # the swarm

    async def _join(self, joined: Sequence[Probed]) -> None:
        began = asyncio.get_running_loop().time()
        if not joined:
            self._note("peers", findings.not_tried("no initial peer can be joined"))
            return
        addresses = [peer.address.with_peer(peer.peer_id) for peer in joined if peer.peer_id is not None]
        try:
            async with time_limit(SWARM_TIMEOUT_S, "joining the swarm"):
                await self._presence.dht.join(addresses)
        except (Unavailable, PeerError) as error:
            self._note("peers", findings.no_peers_seen(error), None, began)
            return
        seen = {contact.peer_id for contact in self._presence.dht.contacts()} | {peer.peer_id for peer in joined}
        finding = findings.peers_seen(len(seen), len(joined), is_part=len(seen) >= DHT_CONFIG.k)
        self._note("peers", finding, None, began)
        await self._look_for_run({peer.peer_id for peer in joined if peer.peer_id is not None})

    async def _look_for_run(self, joined: Collection[PeerId]) -> None:
        began = asyncio.get_running_loop().time()
        run: Run | None = None
        try:
            async with time_limit(SWARM_TIMEOUT_S, "looking which runs are there"):
                finding, run = await self._found_run(joined)
        except (Unavailable, PeerError) as error:
            finding = findings.no_runs_seen(error)
        self._note("run", finding, None, began)
        await self._meet(run)

    async def _found_run(self, joined: Collection[PeerId]) -> tuple[Finding, Run | None]:
        """The finding about the run, and the run if its peers can be seen; without a name, the first one."""
        dht = self._presence.dht
        run_id = self._examination.run_id
        if run_id is None:
            runs = await find_runs(dht)
            return findings.runs_seen(runs), next(iter(runs), None)
        wanted = self._examination.charter
        named = await read_charters(dht, run_id, publishers=joined, digest=wanted)
        charter = named[0].charter if named else None
        if wanted and charter is None:
            return findings.charter_not_there(run_id, has_another=await has_charter_records(dht, run_id)), None
        if charter is not None and not charter.is_open:
            return findings.is_by_invitation(run_id, has_ticket=bool(wanted)), None
        digest = self._examination.digest or (charter.charter.manifest if charter is not None else b"")
        runs = await find_runs(dht, run_id, {run_id: digest})
        run = next((run for run in runs if run.run_id == run_id), None)
        if run is None:
            return findings.run_not_there(nobody_is_in(run_id, dht.num_known_peers, runs)), None
        return findings.run_is_there(run, is_expected=bool(digest)), run

    async def _meet(self, run: Run | None) -> None:
        """Connect to peers of a run, and find out how: as a peer on this machine would that nobody can dial."""
        began = asyncio.get_running_loop().time()
        if run is None:
            self._note("ways", findings.not_tried("no run whose peers can be seen"))
            return
        others = [(peer_id, record) for peer_id, record in run.peers.items() if peer_id != self._presence.peer_id]
        others.sort(key=lambda other: not other[1].is_client)
        met = others[:MAX_MET]
        ways = await asyncio.gather(*(self._way_to(peer_id, record) for peer_id, record in met))
        endpoint = self._presence.endpoint
        finding = findings.ways(
            run.run_id,
            [
                findings.Met(
                    peer_id,
                    way,
                    record.is_client,
                    way is None or endpoint.carries_bulk(peer_id),
                    endpoint.obstacle_to(peer_id),
                )
                for (peer_id, record), way in zip(met, ways, strict=True)
            ],
            num_peers=len(others),
            is_place_known=endpoint.outside.is_known,
        )
        self._note("ways", finding, None, began)

    async def _way_to(self, peer_id: PeerId, record: PeerRecord) -> Way | None:
        """How this machine is connected to another peer in the end; None if it is not."""
        loop = asyncio.get_running_loop()
        endpoint = self._presence.endpoint
        endpoint.learn(peer_id, readable_addresses(record.addresses))
        over_at = self._began + ALL_S
        try:
            await endpoint.call_on(peer_id, max(min(CONNECT_TIMEOUT_S, over_at - loop.time()), 0.0))
        except (Unavailable, PeerError):
            return None
        until = min(loop.time() + PUNCH_TIMEOUT_S, over_at)
        while endpoint.outside.is_known and loop.time() < until:
            way = endpoint.way_to(peer_id)
            if way is None or way.relay is None:
                break
            await asyncio.sleep(POLL_S)  # no event tells
        return endpoint.way_to(peer_id)

    async def _look_at_pairs(self, joined: Sequence[Probed]) -> None:
        """Check in a ring that each initial peer finds the next; this shows any split, whichever peers are in it."""
        began = asyncio.get_running_loop().time()
        if len(joined) < 2:
            is_alone = len(set(self._examination.initial_peers)) == 1
            because = "there is one only" if is_alone else "fewer than two can be joined"
            self._note("coordinators", findings.not_tried(because))
            return
        pairs = list(itertools.pairwise([*joined, joined[0]]))
        if len(joined) == 2:  # the second pair is the first one again
            pairs = pairs[:1]
        sights = await asyncio.gather(*(self._see_each_other(first, second) for first, second in pairs))
        for (first, second), (first_sees, second_sees) in zip(pairs, sights, strict=True):
            if not (first_sees and second_sees):
                finding = findings.do_not_see(
                    first.address, second.address, first_sees=first_sees, second_sees=second_sees
                )
                self._note("coordinators", finding, None, began)
        if all(itertools.chain.from_iterable(sights)):
            self._note("coordinators", findings.all_see_each_other(len(joined)), None, began)

    async def _see_each_other(self, first: Probed, second: Probed) -> tuple[bool, bool]:
        return await asyncio.gather(self._sees(first, second), self._sees(second, first))

    async def _sees(self, first: Probed, second: Probed) -> bool:
        assert first.peer_id is not None
        assert second.peer_id is not None
        timeout_s = DHT_CONFIG.lookup_timeout_s
        return await can_find(self._presence.endpoint, DHT_CONFIG, first.peer_id, second.peer_id, timeout_s)
