"""The members of a run with a charter, as seen by one of its peers, and this peer's own lease."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Set

import msgspec

from manyhands.access.charter import SignedCharter
from manyhands.access.charters import Published, read_charters
from manyhands.access.config import AccessConfig
from manyhands.access.invitation import SignedInvitation
from manyhands.access.kept import KeptLease
from manyhands.access.lease import Lease, SignedLease
from manyhands.access.messages import (
    BANNED,
    CHARTER_KIND,
    LEASE_RECORD_TTL_S,
    LEASE_RECORDS,
    LEASES_KIND,
    NO_LEASE,
    LeaseRequest,
    RunMethods,
    Shown,
    leases_key,
)
from manyhands.base.address import Address
from manyhands.base.errors import (
    BadSignature,
    ConfigError,
    ManyhandsError,
    PeerError,
    ProtocolViolation,
    Refused,
    Unavailable,
)
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode, StoredValue
from manyhands.dht.records import Record
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
MAX_LEASES = 16_384
"""Leases of other peers that are kept; the one that was learned longest ago is dropped first."""

MAX_LOOKED_UP = 512
"""Peers that store records here whose leases are looked up at once."""

LOOK_UP_PERIOD_S = 1.0
"""Least seconds between two lookups of unknown peers' leases, however many records others publish."""

OBSERVED_KIND = "heldout"
"""Kind of the records that observers publish: held-out losses."""


class Members:
    """Checks which peers may take part in a run: the :class:`manyhands.rpc.gate_protocol.Gate` of the run.

    Lives on the network thread. :meth:`watch` makes it the gate; :meth:`enter` also gets this peer a lease.

    Args:
        charter: the charter of the run.
        kept: the file with the charter and this peer's own lease, so that a restart needs no coordinator.
        own_lease: on a coordinator, returns a new lease for this peer, signed by itself.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dht: DhtNode,
        charter: SignedCharter,
        *,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        config: AccessConfig | None = None,
        kept: KeptLease | None = None,
        own_lease: Callable[[], SignedLease] | None = None,
    ) -> None:
        self.charter = charter
        self._endpoint = endpoint
        self._dht = dht
        self._wall_clock = wall_clock
        self._rng = rng or random.Random()
        self._config = config or AccessConfig()
        self._kept = kept
        self._sign_own = own_lease
        self._methods = RunMethods(charter.run_id)
        self._own: SignedLease | None = None
        self._leases: dict[PeerId, SignedLease] = {}
        self._banned: dict[PeerId, PeerId] = {}  # peer -> coordinator that banned it
        self._met: dict[PeerId, bytes] = {}  # peer -> signature of the own lease that it has seen
        self._refused: OrderedDict[PeerId, int] = OrderedDict()  # peer -> sequence of its lease, which is not valid
        self._strangers: set[PeerId] = set()  # without a lease; they have stored records here since the last lookup
        self._look_up_again_at = -math.inf  # loop time
        self._looking_up = asyncio.Lock()
        self._missed_at = -math.inf  # loop time when the last attempt to reach a coordinator failed
        self._is_away_told = False  # it was logged that no coordinator answers
        self._is_ban_told = False  # it was logged that this peer is banned
        self._tasks = TaskOwner("members")

    # start and end

    async def watch(self) -> None:
        """Become the gate of the run, and read the bans."""
        run_id = self.charter.run_id
        gates = self._endpoint.gates
        if run_id in gates:
            raise ConfigError(f"this peer has joined run {run_id!r} with a charter already; leave it first")
        gates[run_id] = self
        self._dht.filters[run_id] = self.only_members
        self._dht.declare(leases_key(run_id), LEASE_RECORDS)
        if not self.charter.is_open:
            self._dht.members[run_id] = self
            self._dht.recount(run_id)
        self._endpoint.handle(self._methods.show, self._on_show)
        self._endpoint.on_lost.append(self._on_lost)
        try:
            await self._look()
        except Unavailable as error:
            logger.warning("Cannot read the bans of run %s yet: %s; trying again", run_id, error)
        self._tasks.spawn(self._keep_up(), name="leases and bans")

    async def enter(self, credential: bytes = b"") -> None:
        """Get a lease, if the run requires one, and publish it.

        Args:
            credential: sent to the coordinators, such as the token of a ticket.
        Raises:
            ConfigError: this peer is banned, or a coordinator refused it; says what to do.
            Unavailable: no coordinator answers.
        """
        self.check_own()
        if self.charter.is_open:
            return
        if self._sign_own is not None:
            self._own = self._sign_own()
        else:
            self._own = self._kept.lease(self.charter, self._endpoint.peer_id) if self._kept is not None else None
            if self._own is None or not self._counts(self._own):
                await self._get_lease(credential)
        await self._publish()

    async def _get_lease(self, credential: bytes) -> None:
        try:
            await self._renew(credential)
        except Refused as refusal:
            raise ConfigError(f"run {self.charter.run_id!r}: {refusal.message}") from refusal
        except Unavailable as error:
            self._missed_at = asyncio.get_running_loop().time()
            if self._own is None or not self._counts(self._own):
                raise
            self._tell_away(error)  # this peer has its old lease while no coordinator is online

    async def close(self) -> None:
        """Stop being the gate. May be called twice."""
        await self._tasks.close()
        if self._endpoint.gates.get(self.charter.run_id) is self:
            del self._endpoint.gates[self.charter.run_id], self._dht.filters[self.charter.run_id]
            self._dht.members.pop(self.charter.run_id, None)
            self._endpoint.unhandle(self._methods.show)
            self._endpoint.on_lost.remove(self._on_lost)

    # the gate

    def check(self, peer_id: PeerId, *, for_observers: bool = False) -> None:
        """Raise ``Refused`` if a peer may not make a call. In a run by invitation only peers with a lease may."""
        run_id = self.charter.run_id
        if (by := self._banned.get(peer_id)) is not None:
            raise Refused(peer_id, BANNED, f"peer {peer_id} was banned from run {run_id!r} by {by}")
        if self.charter.is_open:
            return
        lease = self.lease_of(peer_id)
        if lease is None:
            raise Refused(
                peer_id,
                NO_LEASE,
                f"run {run_id!r} is by invitation, and peer {peer_id} has no valid lease here; join with a ticket of "
                "its coordinator (manyhands invite)",
            )
        if not (lease.takes_part or for_observers):
            raise Refused(peer_id, "observer", f"peer {peer_id} may only look at run {run_id!r}: its role is observer")

    def is_banned(self, peer_id: PeerId) -> bool:
        """Whether a peer is banned from the run."""
        return peer_id in self._banned

    def check_own(self) -> None:
        """Raise ``ConfigError`` if this peer is banned."""
        if (by := self._banned.get(self._endpoint.peer_id)) is not None:
            raise ConfigError(f"this peer was banned from run {self.charter.run_id!r} by {by}; ask its owner")

    def lease_of(self, peer_id: PeerId) -> Lease | None:
        """Return the lease of a peer, if it is known and valid, and the peer is not banned."""
        held = self._own if peer_id == self._endpoint.peer_id else self._leases.get(peer_id)
        if held is None or peer_id in self._banned or not self._counts(held):
            return None
        return held.lease

    def _counts(self, held: SignedLease) -> bool:
        config = self._config
        grace_s = config.grace_s if self._are_coordinators_away() else 0.0
        return held.counts(self._wall_clock(), skew_s=config.max_clock_skew_s, grace_s=grace_s)

    def _are_coordinators_away(self) -> bool:
        """Whether no coordinator has answered lately, so that expired leases stay valid for a day.

        Each peer renews at half the lifetime of its lease. So when the first lease expires without a coordinator,
        every peer has already tried.
        """
        return asyncio.get_running_loop().time() - self._missed_at < 2 * self._config.retry_s

    async def meet(self, peer_id: PeerId, timeout_s: float) -> None:
        """Exchange leases with a peer, unless that was done; raises as :meth:`.gate_protocol.Gate.meet`."""
        if self.charter.is_open or peer_id in self._banned:
            return  # check() decides
        if self._own is None:
            raise Unavailable(f"this peer has no lease of run {self.charter.run_id!r}: it joined only to look at it")
        own = self._own.signed
        if self.lease_of(peer_id) is not None and self._met.get(peer_id) == own.signature:
            return
        request = Shown(self.charter.digest, own.encoded())
        shown = await self._endpoint.call(peer_id, self._methods.show, request, min(timeout_s, CALL_TIMEOUT_S))
        self._take_in(peer_id, shown)
        self._met[peer_id] = own.signature

    def forget_meeting(self, peer_id: PeerId) -> bool:
        """Forget the exchange of leases with a peer; return whether there was one."""
        return self._met.pop(peer_id, None) is not None

    def _on_lost(self, peer_id: PeerId) -> None:
        self._met.pop(peer_id, None)  # after a reconnect it may be another process

    def _on_show(self, remote: PeerId, request: Shown) -> Shown:
        try:
            self._take_in(remote, request)
        except (ProtocolViolation, BadSignature) as error:
            raise Refused(remote, "bad_lease", str(error)) from error
        if self._own is None:
            return Shown(self.charter.digest)
        self._met[remote] = self._own.signed.signature
        return Shown(self.charter.digest, self._own.signed.encoded())

    def _take_in(self, remote: PeerId, shown: Shown) -> None:
        if shown.charter != self.charter.digest:
            raise Refused(remote, "other_charter", f"run {self.charter.run_id!r} has another charter here")
        if shown.lease:
            self._learn(remote, shown.lease)

    def _learn(self, peer_id: PeerId, raw: bytes) -> None:
        """Verify a lease, and keep it if it expires later than the known one.

        Raises:
            ProtocolViolation, BadSignature: it is not valid.
        """
        known = self._leases.get(peer_id)
        if known is not None and known.signed.encoded() == raw:
            return
        held = SignedLease.from_bytes(raw, self.charter, peer_id)
        if known is None or held.lease.expires_at > known.lease.expires_at:
            self._leases.pop(peer_id, None)
            self._leases[peer_id] = held
            if len(self._leases) > MAX_LEASES:
                del self._leases[next(iter(self._leases))]

    # records

    def only_members(self, key: str, found: dict[str, StoredValue]) -> dict[str, StoredValue]:
        """Filter the records of a key of this run: only those of members are returned."""
        kind = key.partition(".")[2]
        if kind in (CHARTER_KIND, LEASES_KIND):
            return found
        if self.charter.is_open:
            return {subkey: stored for subkey, stored in found.items() if stored.owner not in self._banned}
        own_id = self._endpoint.peer_id
        return {
            subkey: stored
            for subkey, stored in found.items()
            if stored.owner and (stored.owner == own_id or self._is_believed(PeerId(stored.owner), kind))
        }

    def known(self) -> Collection[str]:
        """Return the ids of this peer, of those that may sign leases, and of those with a known lease."""
        return _Known(self)

    def is_member(self, peer_id: PeerId) -> bool:
        """Whether a peer is known to be a member, or may sign leases."""
        is_trusted = peer_id == self._endpoint.peer_id or peer_id in self.charter.coordinators
        return is_trusted or self.lease_of(peer_id) is not None

    def member_ids(self) -> list[PeerId]:
        """Return the peers for which :meth:`is_member` holds."""
        trusted = dict.fromkeys([self._endpoint.peer_id, *self.charter.coordinators])
        return [*trusted, *(peer_id for peer_id in self._leases if peer_id not in trusted and self.is_member(peer_id))]

    async def introduce(self, holder: PeerId) -> bool:
        """Show a holder of this peer's records its lease, if the two have not met; return whether that was done."""
        if self._own is None or self._met.get(holder) == self._own.signed.signature:
            return False
        try:
            await self.meet(holder, CALL_TIMEOUT_S)
        except (Unavailable, PeerError) as error:
            logger.debug("peer %s was not shown the lease of this one: %s", holder, error)
            return False
        return True

    def takes(self, record: Record) -> bool:
        """Whether a record that is to be held here is a member's; a record that is a lease is learned."""
        owner = PeerId(record.owner)
        if record.key == leases_key(self.charter.run_id) and owner != self._endpoint.peer_id:
            self._learn_published(owner, record.value, record.sequence)
        is_member = self.is_member(owner)
        if not is_member:
            self._strangers.add(owner)
        return is_member

    def _is_believed(self, owner: PeerId, kind: str) -> bool:
        lease = self.lease_of(owner)
        return lease is not None and (lease.takes_part or kind == OBSERVED_KIND)

    def _without_lease(self, peer_ids: Set[PeerId]) -> set[PeerId]:
        others = peer_ids - self._banned.keys() - {self._endpoint.peer_id}
        return {peer_id for peer_id in others if self.lease_of(peer_id) is None}

    async def look_up(self, peer_ids: Set[PeerId]) -> bool:
        """Read the leases of these peers, of some that store records here, and of members whose leases end soon.

        No others are read, however many strangers publish, and each is verified once.

        Returns:
            Whether one of these peers is known to be a member now.
        """
        loop = asyncio.get_running_loop()
        async with self._looking_up:  # what another reader looks up now may be enough
            wanted = self._without_lease(peer_ids)
            if wanted and loop.time() >= self._look_up_again_at:
                await self._look_up_leases(wanted)
                self._look_up_again_at = loop.time() + LOOK_UP_PERIOD_S
            return any(self.lease_of(peer_id) is not None for peer_id in peer_ids)

    async def _look_up_leases(self, wanted: set[PeerId]) -> None:
        strangers = sorted(self._without_lease(self._strangers) - wanted)
        self._strangers.clear()
        wanted = wanted | set(self._rng.sample(strangers, min(len(strangers), MAX_LOOKED_UP))) | self._ending_soon()
        published = await self._dht.get(leases_key(self.charter.run_id), owners=wanted)
        for owner, stored in published.items():
            self._learn_published(PeerId(owner), stored.raw, stored.sequence)
            await asyncio.sleep(0)

    def _ending_soon(self) -> set[PeerId]:
        """Return members whose leases are in their second half: these have been renewed, or soon will be."""
        now = self._wall_clock()
        return {
            peer_id
            for peer_id, held in self._leases.items()
            if now > (held.lease.issued_at + held.lease.expires_at) / 2 and peer_id not in self._banned
        }

    def _learn_published(self, peer_id: PeerId, raw: bytes, sequence: int) -> None:
        if self._refused.get(peer_id) == sequence:
            return
        try:
            self._learn(peer_id, LEASE_RECORDS.decode(raw))
        except (msgspec.DecodeError, PeerError) as error:
            self._refused[peer_id] = sequence
            if len(self._refused) > MAX_LEASES:
                self._refused.popitem(last=False)
            logger.debug("ignored the lease that peer %s publishes: %s", peer_id, error)

    # this peer's own lease

    async def _renew(self, credential: bytes = b"") -> None:
        """Get a new lease from any coordinator, in exchange for the old one or the credential.

        Raises:
            Refused: a coordinator has refused for good.
            Unavailable: no coordinator gives a lease now.
        """
        lease = self._own.signed.encoded() if self._own is not None else b""
        failures = []
        for coordinator in self._coordinators(credential):
            request = LeaseRequest(self.charter.digest, self._wall_clock(), credential, lease)
            try:
                response = await self._endpoint.call(coordinator, self._methods.lease, request, CALL_TIMEOUT_S)
                held = SignedLease.from_bytes(response.lease, self.charter, self._endpoint.peer_id)
            except Refused as refusal:
                if refusal.code not in ("unknown_method", "busy", "not_here"):
                    raise
                failures.append(f"{coordinator}: {refusal.message}")
            except (Unavailable, PeerError) as error:
                failures.append(f"{coordinator}: {error}")
            else:
                self._own = held
                if self._kept is not None:
                    self._kept.write(self.charter, held)
                return
        raise Unavailable(f"no coordinator of run {self.charter.run_id!r} gives a lease: {'; '.join(failures)}")

    def _coordinators(self, credential: bytes) -> list[PeerId]:
        """Return the coordinators in the order to ask them; the one that redeems the invitation is first."""
        coordinators = [peer_id for peer_id in self.charter.coordinators if peer_id != self._endpoint.peer_id]
        self._rng.shuffle(coordinators)
        try:
            first = SignedInvitation.from_bytes(credential, self.charter, "").invitation.coordinator
        except PeerError:  # the credential is not an invitation
            return coordinators
        return sorted(coordinators, key=lambda peer_id: peer_id != first)

    async def _publish(self) -> None:
        if self._own is not None:
            value = self._own.signed.encoded()
            ttl_s = LEASE_RECORD_TTL_S
            await self._dht.store(leases_key(self.charter.run_id), value, ttl_s, subkey=self._endpoint.peer_id)

    # background task

    async def _keep_up(self) -> None:
        loop = asyncio.get_running_loop()
        config = self._config
        published = self._own
        published_at = loop.time()
        tried_at = -math.inf
        while True:
            await asyncio.sleep(config.look_period_s)
            try:
                await self._look(quickly=True)
                self._tell_ban()
                self._dht.recount(self.charter.run_id)
                if self._strangers:
                    await self.look_up(set(self._strangers))
                if self._is_renewal_due() and loop.time() >= tried_at + config.retry_s:
                    tried_at = loop.time()
                    await self._renew_again()
                if published is not self._own or loop.time() >= published_at + LEASE_RECORD_TTL_S / 3:
                    await self._publish()
                    published = self._own
                    published_at = loop.time()
            except ManyhandsError as error:
                logger.warning("Cannot update the members of run %s: %s; trying again", self.charter.run_id, error)

    async def _look(self, *, quickly: bool = False) -> None:
        """Read what the coordinators publish: their addresses and bans."""
        run_id = self.charter.run_id
        coordinators = self.charter.coordinators
        for entry in await read_charters(self._dht, run_id, publishers=coordinators, quickly=quickly):
            if entry.charter.digest == self.charter.digest:
                self._note(entry)

    def _tell_ban(self) -> None:
        if self._endpoint.peer_id in self._banned and not self._is_ban_told:
            self._is_ban_told = True
            logger.error(
                "This peer was banned from run %s by %s: no member averages with it any more; ask the owner of the run",
                self.charter.run_id, self._banned[self._endpoint.peer_id],
            )  # fmt: skip

    def _note(self, entry: Published) -> None:
        bans = map(PeerId, set(entry.record.bans).difference(self.charter.coordinators))
        self._banned |= dict.fromkeys(bans, entry.peer_id)
        self._endpoint.learn(entry.peer_id, readable(entry.record.addresses))

    def _is_renewal_due(self) -> bool:
        if self._own is None or self._own.lease.peer_id in self._banned:
            return False
        lease = self._own.lease
        return self._wall_clock() >= (lease.issued_at + lease.expires_at) / 2

    async def _renew_again(self) -> None:
        if self._sign_own is not None:
            self._own = self._sign_own()
            return
        try:
            await self._renew()
        except Unavailable as error:
            self._missed_at = asyncio.get_running_loop().time()
            self._tell_away(error)
        except Refused as refusal:
            logger.warning(
                "The lease of this peer in run %s is not renewed, so it takes part until that has expired: %s",
                self.charter.run_id, refusal.message,
            )  # fmt: skip
        else:
            if self._is_away_told:
                logger.info("A coordinator of run %s answers again", self.charter.run_id)
            self._is_away_told = False

    def _tell_away(self, error: Unavailable) -> None:
        if self._is_away_told or self._own is None:
            return
        self._is_away_told = True
        left_h = (self._own.lease.expires_at + self._config.grace_s - self._wall_clock()) / 3600
        logger.warning(
            "No coordinator of run %s answers. Training goes on, for at most %.0f h, but no new peer can join. Start a "
            "coordinator of the run again (%s)",
            self.charter.run_id, max(left_h, 0.0), error,
        )  # fmt: skip


class _Known(Collection[str]):
    """The ids of a run's members, found when they are asked for."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def __contains__(self, peer_id: object) -> bool:
        return isinstance(peer_id, str) and self._members.is_member(PeerId(peer_id))

    def __iter__(self) -> Iterator[str]:
        return iter(self._members.member_ids())

    def __len__(self) -> int:
        return len(self._members.member_ids())


def readable(texts: list[str]) -> list[Address]:
    """Return the addresses of a coordinator that can be parsed; newer versions may publish other kinds."""
    addresses = []
    for text in texts:
        try:
            addresses.append(Address.parse(text))
        except ConfigError:
            logger.debug("ignored an address that cannot be read: %s", text)
    return addresses
