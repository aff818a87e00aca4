"""Reads the charters of a run that its coordinators publish in the DHT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from manyhands.access.charter import SignedCharter
from manyhands.access.messages import CHARTER_KIND, CHARTER_RECORDS, CharterRecord, charter_key
from manyhands.access.signed import decoded
from manyhands.base.errors import PeerError
from manyhands.base.identity import PeerId
from manyhands.base.run_id import is_run_id
from manyhands.dht import DhtNode, StoredValue

logger = logging.getLogger(__name__)


class Published(NamedTuple):
    """A valid charter, and the record of the peer that published it."""

    peer_id: PeerId
    charter: SignedCharter
    record: CharterRecord


MAX_RUNS = 64
"""Most runs that :func:`charted_runs` returns."""


async def charted_runs(dht: DhtNode) -> list[str]:
    """Return the names of runs with charters, as known to some peers."""
    return sorted(filter(is_run_id, await dht.topics(CHARTER_KIND)))[:MAX_RUNS]


async def has_charter_records(dht: DhtNode, run_id: str) -> bool:
    """Whether any peer has published a record under the charter key of this run, whether it is a charter or not."""
    return bool(await _read(dht, run_id))


async def read_charters(
    dht: DhtNode, run_id: str, *, publishers: Collection[str] = (), digest: bytes = b"", quickly: bool = False
) -> list[Published]:
    """Return the charters of a run that certain peers publish, or those with a certain digest.

    Without a digest no others are read: strangers can publish thousands of them.

    Args:
        publishers: the ids of these peers.
        digest: the digest; any peer may publish the charter.
    Raises:
        Unavailable: the DHT does not answer.
    """
    published = []
    found = await _read(dht, run_id, quickly=quickly, owners=None if digest else publishers)
    for subkey, stored in found.items():
        if stored.owner != subkey:
            continue
        await asyncio.sleep(0)  # let other tasks run: there may be thousands to decode
        try:
            record = CHARTER_RECORDS.decode(stored.raw)
            if digest and decoded(record.charter, subkey).digest != digest:
                continue
            charter = SignedCharter.from_bytes(record.charter, subkey)
        except (msgspec.DecodeError, PeerError) as error:
            logger.debug("ignored the charter that peer %s publishes: %s", subkey, error)
            continue
        if charter.run_id == run_id:
            published.append(Published(PeerId(subkey), charter, record))
    return published


async def _read(
    dht: DhtNode, run_id: str, *, quickly: bool = False, owners: Collection[str] | None = None
) -> dict[str, StoredValue]:
    dht.declare(charter_key(run_id), CHARTER_RECORDS)
    return await dht.get(charter_key(run_id), quickly=quickly, owners=owners)
