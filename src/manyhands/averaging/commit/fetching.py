"""Fetches the means that a member lacks when its round has committed, and serves them to others.

::

    lacks some of them    holds the result
    ------------------    ----------------
    group, digest    ──>
                     <──  whether it was averaged again, digest of each piece
    which pieces     ──>
                     <──  those pieces

The digests of the pieces are checked against the one that the ballot committed, and each piece against its own digest,
so any member may send them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from manyhands.averaging.allreduce.means import Means, digest_of, digest_of_all
from manyhands.averaging.commit.recovery import Recovery
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.memory import bytes_of
from manyhands.averaging.messages import Digest, Group, RoundManifest
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit, while_moving
from manyhands.base.errors import PeerError, ProtocolViolation, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready
from manyhands.rpc.frames import UNREADABLE
from manyhands.runtime.executor import run_to_end
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

MEANS_KIND = "averaging.means"
OPENING_S = 2.0
"""Time to reach a holder before the next one is asked."""
STALLED_S = 3.0
"""A holder that sends nothing for this long is given up: there are others."""
DIGEST_BYTES = 32  # of BLAKE3


class MeansHeader(msgspec.Struct):
    """Opens a stream to a member that may hold a result."""

    group_id: Digest
    digest: Digest


make_ready(MeansHeader)


class Fetching:
    """Serves the results of one peer's last round, and fetches what it lacks."""

    def __init__(self, endpoint: RunEndpoint, config: AveragingConfig) -> None:
        self._endpoint = endpoint
        self._config = config
        self._group: Group | None = None
        self._recovery: Recovery | None = None
        self._kept: dict[bytes, Means] = {}  # by digest
        self._forgetting: asyncio.TimerHandle | None = None
        self._serving: set[PeerId] = set()
        endpoint.accept_bulk(MEANS_KIND, self._on_stream)

    def close(self) -> None:
        self._endpoint.refuse_bulk(MEANS_KIND)
        self._forget()

    @contextmanager
    def of(self, group: Group, recovery: Recovery) -> Iterator[None]:
        """Serve this round's results within the block, and afterwards those that are kept."""
        self._forget()
        self._group, self._recovery = group, recovery
        try:
            yield
        finally:
            self._recovery = None

    async def keep(self, means: Means, digest: bytes) -> None:
        """Copy a result for members that may still fetch it: the vector itself belongs to the caller."""
        self._kept[digest] = await run_to_end(means.copy)
        self._forgetting = asyncio.get_running_loop().call_later(self._config.averaging_timeout_s, self._forget)

    def _forget(self) -> None:
        self._kept.clear()
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None

    async def fetch(
        self, group: Group, manifest: RoundManifest, recovery: Recovery, doubtful: Sequence[PeerId], timeout_s: float
    ) -> Means | None:
        """Fetch the parts of the committed result that this member lacks; None if no member sends them.

        Args:
            doubtful: members that are asked last.
            timeout_s: of all attempts together.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        for peer_id in self._holders(group, doubtful):
            left_s = deadline - loop.time()
            if left_s <= 0:
                break
            try:
                async with time_limit(left_s, f"fetching means from peer {peer_id}"):
                    means = await self._fetch_from(peer_id, group, manifest, recovery, left_s)
            except (Unavailable, PeerError) as error:
                logger.info("the means that this peer lacks do not come: %s", error)
                continue
            recovery.complete(manifest.digest, means)
            return means
        return None

    def _holders(self, group: Group, doubtful: Sequence[PeerId]) -> list[PeerId]:
        """Members to ask, beginning with the next rank, so that not all ask the same one."""
        rank = group.rank_of(self._endpoint.peer_id)
        assert rank is not None
        others = [*group.members[rank + 1 :], *group.members[:rank]]
        dialable = [member.peer_id for member in others if not member.is_client]
        return sorted(dialable, key=lambda peer_id: (peer_id in doubtful, not self._endpoint.is_connected(peer_id)))

    async def _fetch_from(
        self, peer_id: PeerId, group: Group, manifest: RoundManifest, recovery: Recovery, timeout_s: float
    ) -> Means:
        header = msgspec.msgpack.encode(MeansHeader(group.group_id, manifest.digest))
        stream = await self._endpoint.open_bulk(peer_id, MEANS_KIND, header, min(OPENING_S, timeout_s))
        try:
            return await while_moving(
                self._receive(stream, manifest, recovery),
                lambda: stream.bytes_received,
                at_least=1,
                within_s=STALLED_S,
                phase=f"waiting for the means that peer {peer_id} holds",
            )
        finally:
            self._endpoint.release(stream)

    async def _receive(self, stream: Stream, manifest: RoundManifest, recovery: Recovery) -> Means:
        kind = bytearray(1)
        await stream.receive_into(memoryview(kind))
        means = recovery.incomplete(is_again=bool(kind[0]))
        if means is None:
            raise ProtocolViolation(stream.remote, "a result of a kind that cannot be")
        table = bytearray(DIGEST_BYTES * len(means.pieces))
        await _receive_all(stream, memoryview(table))
        digests = [bytes(table[at : at + DIGEST_BYTES]) for at in range(0, len(table), DIGEST_BYTES)]
        if digest_of_all(means.is_again, digests) != manifest.digest:
            raise ProtocolViolation(stream.remote, "the digests are not those of what was committed")
        own = await run_to_end(means.digests)
        wanted = [mine != committed for mine, committed in zip(own, digests, strict=True)]
        await stream.send(bytes(wanted))
        for piece, digest, is_wanted in zip(means.pieces, digests, wanted, strict=True):
            if is_wanted:
                await _receive_all(stream, bytes_of(piece))
                if await run_to_end(digest_of, piece) != digest:
                    raise ProtocolViolation(stream.remote, "means that are not what was committed")
        await run_to_end(means.decode)
        return means

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        try:
            request = msgspec.msgpack.decode(header, type=MeansHeader)
        except UNREADABLE as error:
            raise ProtocolViolation(remote, "a stream header that cannot be read") from error
        means = self._means_for(remote, request)
        if means is None or remote in self._serving:
            return
        self._serving.add(remote)
        try:
            async with time_limit(self._config.averaging_timeout_s, f"sending means to peer {remote}"):
                await self._send(stream, means)
                await stream.wait_closed()  # by the other end, when all is there
        finally:
            self._serving.remove(remote)

    def _means_for(self, remote: PeerId, request: MeansHeader) -> Means | None:
        group, digest = self._group, request.digest
        if group is None or group.group_id != request.group_id or group.rank_of(remote) is None:
            return None
        held = self._recovery.means_of(digest) if self._recovery is not None else None
        return held or self._kept.get(digest)

    async def _send(self, stream: Stream, means: Means) -> None:
        digests = await run_to_end(means.digests)
        await stream.send(bytes([means.is_again]), *digests)
        wanted = bytearray(len(means.pieces))
        await _receive_all(stream, memoryview(wanted))
        for piece, is_wanted in zip(means.pieces, wanted, strict=True):
            if is_wanted and piece.numel():
                await stream.send(bytes_of(piece))


async def _receive_all(stream: Stream, view: memoryview) -> None:
    if view.nbytes:
        await stream.receive_into(view)
