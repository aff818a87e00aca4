"""A coordinator of a run: signs and renews leases, counts the uses of invitations, and publishes bans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from manyhands.access.authorizer import Authorizer, Invited, Open
from manyhands.access.charter import SignedCharter
from manyhands.access.config import AccessConfig
from manyhands.access.lease import Lease, Role, SignedLease
from manyhands.access.ledger import Ledger
from manyhands.access.messages import (
    BANNED,
    CHARTER_RECORDS,
    MAX_BANS,
    RECORD_TTL_S,
    CharterRecord,
    LeaseRequest,
    LeaseResponse,
    ManageRequest,
    ManageResponse,
    RunMethods,
    charter_key,
)
from manyhands.base.address import MAX_ADDRESSES, Address
from manyhands.base.errors import ConfigError, ManyhandsError, PeerError, Refused, Unavailable
from manyhands.base.identity import PeerId, public_key_of
from manyhands.base.twin import Twin
from manyhands.dht import DhtNode
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

PUBLISH_PERIOD_S = 300.0
"""Seconds after which this peer's record is published again although it has not changed."""

BANS_PERIOD_S = 2.0
"""Seconds between two reads of the file that ``manyhands ban`` writes."""

TWIN_PERIOD_S = 5.0
"""Seconds between two reads of this peer's own record, which shows whether another process has replaced it."""

OWN_ROLE: Role = "trainer"


class Coordinator:
    """Serves the charter of a run on one endpoint, and gives leases if the charter names this peer.

    Args:
        authorizer: decides on leases; by default, the charter and invitations do.
        ledger: state that survives a restart.
        began_at: when this process began, by the wall clock.
    Raises:
        ConfigError: the state dir belongs to another charter.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dht: DhtNode,
        charter: SignedCharter,
        ledger: Ledger,
        *,
        authorizer: Authorizer | None = None,
        wall_clock: Callable[[], float] = time.time,
        config: AccessConfig | None = None,
        began_at: float = 0.0,
    ) -> None:
        ledger.keep_charter(charter)
        self._endpoint = endpoint
        self._dht = dht
        self._charter = charter
        self._ledger = ledger
        self._wall_clock = wall_clock
        self._config = config or AccessConfig()
        self._methods = RunMethods(charter.run_id)
        self._tasks = TaskOwner("coordinator")
        self._saving = asyncio.Lock()
        own_id = endpoint.peer_id
        self._began_at = began_at
        self._loop = asyncio.get_running_loop()
        self._twin = Twin(own_id, self._began_at, self._loop.time(), "gives no leases and publishes no bans any more")
        self.is_delegated = own_id in charter.coordinators
        invited = Open() if charter.is_open else Invited(charter, own_id, ledger, wall_clock)
        self._authorizer: Authorizer = authorizer or invited

    async def start(self) -> None:
        """Publish the charter, and serve leases."""
        self._dht.declare(charter_key(self._charter.run_id), CHARTER_RECORDS)
        if self.is_delegated:
            self._endpoint.handle(self._methods.lease, self._on_lease)
            self._endpoint.handle(self._methods.manage, self._on_manage)
        await self._publish()
        self._tasks.spawn(self._publish_forever(), name="publishing the charter")

    async def close(self) -> None:
        """Stop serving; published records stay for a day."""
        self._endpoint.unhandle(self._methods.lease)
        self._endpoint.unhandle(self._methods.manage)
        await self._tasks.close()

    def own_lease(self) -> SignedLease:
        """Return a lease for the coordinator itself, signed by itself."""
        return self._signed(self._endpoint.peer_id, OWN_ROLE)

    # leases

    async def _on_lease(self, remote: PeerId, request: LeaseRequest) -> LeaseResponse:
        self._check_caller(remote, request)
        role = self._renewed_role(remote, request) or await self._authorizer.authorize(remote, request.credential)
        signed = self._signed(remote, role)
        if self._charter.is_open:  # every peer gets one, so leases are not counted
            return LeaseResponse(signed.signed.encoded())
        self._ledger.enter(signed.lease)
        await self._save()
        logger.info("Peer %s got a lease as %s for %g h", remote, role, self._config.lease_s / 3600)
        return LeaseResponse(signed.signed.encoded())

    def _check_caller(self, remote: PeerId, request: LeaseRequest) -> None:
        if self._twin.is_older:
            raise Refused(remote, "not_here", "this coordinator is a copy of another one; ask the other one")
        if request.charter != self._charter.digest:
            raise Refused(
                remote, "other_charter", f"run {self._charter.run_id!r} has another charter here; ask for a new ticket"
            )
        ahead_s = request.wall_time - self._wall_clock()
        if not abs(ahead_s) <= self._config.max_clock_skew_s:
            raise Refused(
                remote,
                "clock",
                f"the clock of this machine is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the "
                f"coordinator's, and {self._config.max_clock_skew_s:g} s are allowed; set the clocks by the network "
                "(timedatectl set-ntp true)",
            )
        if remote in self._ledger.bans.banned_at:
            raise Refused(remote, BANNED, f"this peer was banned from run {self._charter.run_id!r}; ask its owner")

    def _renewed_role(self, remote: PeerId, request: LeaseRequest) -> Role | None:
        """Return the role of the valid lease that a peer already has, from any coordinator; None if it has none."""
        if not request.lease:
            return None
        try:
            held = SignedLease.from_bytes(request.lease, self._charter, remote)
        except PeerError as error:
            logger.debug("the lease of peer %s is not renewed: %s", remote, error)
            return None
        config = self._config
        counts = held.counts(self._wall_clock(), skew_s=config.max_clock_skew_s, grace_s=config.grace_s)
        return held.lease.role if counts else None

    def _signed(self, peer_id: PeerId, role: Role) -> SignedLease:
        now = self._wall_clock()
        lease = Lease(self._charter.digest, peer_id, role, now, now + self._config.lease_s)
        return SignedLease.sign(self._endpoint.identity, lease)

    async def _save(self) -> None:
        async with self._saving:  # one write at a time: a later one has all entries
            try:
                write = self._ledger.to_save(self._wall_clock())
                await asyncio.get_running_loop().run_in_executor(None, write)
            except OSError as error:
                logger.warning("Cannot write the coordinator's files: %s. It gives no leases until that works", error)
                raise Unavailable(f"the coordinator cannot write its files: {error.strerror}") from error

    # calls of the owner

    async def _on_manage(self, remote: PeerId, request: ManageRequest) -> ManageResponse:
        if remote not in self._charter.coordinators or request.charter != self._charter.digest:
            raise Refused(remote, "not_the_owner", "only the owner of the run and its coordinators may ask this")
        for text in request.ban:
            try:
                public_key_of(PeerId(text))
            except ConfigError as error:
                raise Refused(remote, "no_peer_id", str(error)) from error
        if request.ban:
            for text in request.ban:
                try:
                    self._ledger.ban(PeerId(text), self._wall_clock())
                except ConfigError as error:
                    raise Refused(remote, "too_many_bans", str(error)) from error
                logger.warning("Peer %s is banned at the request of %s", text, remote)
            await self._publish()
        return ManageResponse(self._ledger.members())

    # published records

    async def _publish_forever(self) -> None:
        loop = self._loop
        told = self._to_tell()
        published_at = loop.time()
        looked_at = published_at
        has_failed = False
        while True:
            await asyncio.sleep(BANS_PERIOD_S)
            try:
                self._ledger.read_bans()
                to_tell = self._to_tell()
                is_news = to_tell != told
                if loop.time() >= looked_at + TWIN_PERIOD_S:
                    looked_at = loop.time()
                    is_news |= await self._is_replaced()
                if self._twin.is_older and not self._twin.is_to_be_told(loop.time()):
                    return
                if not is_news and loop.time() < published_at + PUBLISH_PERIOD_S:
                    continue
                await self._publish()
                for peer_id in to_tell[0].keys() - told[0].keys():
                    logger.warning("Peer %s is banned from run %s", peer_id, self._charter.run_id)
                told = to_tell
                published_at = loop.time()
                has_failed = False
            except ManyhandsError as error:
                if not has_failed:
                    logger.warning("The charter and the bans were not published: %s; trying again", error)
                has_failed = True

    def _to_tell(self) -> tuple[dict[str, float], list[Address]]:
        """Return the parts of the record that may change: bans and addresses."""
        return dict(self._ledger.bans.banned_at), self._endpoint.addresses

    async def _is_replaced(self) -> bool:
        """Whether the record under this peer's id is of another process: a copy, or this peer before its restart."""
        try:
            own_id = self._endpoint.peer_id
            stored = (await self._dht.get(charter_key(self._charter.run_id), owners=[own_id])).get(own_id)
        except ManyhandsError as error:
            logger.debug("the records of the charter were not read: %s", error)
            return False
        if stored is None:
            return False
        record: CharterRecord = CHARTER_RECORDS.decode(stored.raw)
        now = self._loop.time()
        was_older = self._twin.is_older
        self._twin.seen(record.began_at, now + min(stored.remaining_s - RECORD_TTL_S, 0.0), now)
        if self._twin.is_older and not was_older:
            logger.error(
                "If you have not copied the folder of this coordinator, somebody else has its key, and can give leases "
                "and ban peers: in that case create a charter of run %s that names another coordinator",
                self._charter.run_id,
            )
        return record.began_at != self._began_at

    async def _publish(self) -> None:
        record = CharterRecord(
            self._charter.signed.encoded(),
            [str(address) for address in self._endpoint.addresses[:MAX_ADDRESSES]],
            list(self._ledger.bans.banned_at)[:MAX_BANS],
            self._began_at,
        )
        value = msgspec.to_builtins(record, builtin_types=(bytes,))
        await self._dht.store(charter_key(self._charter.run_id), value, RECORD_TTL_S, subkey=self._endpoint.peer_id)
        if self.is_delegated:
            self._keep_on_disk()

    def _keep_on_disk(self) -> None:
        try:
            self._ledger.note_addresses([str(address) for address in self._endpoint.addresses])
        except OSError as error:
            logger.warning("Cannot save the addresses of this coordinator: %s; trying again", error)
