"""Reads the charters of a run that its coordinators publish in the DHT."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from manyhands.access.charter import SignedCharter
from manyhands.access.messages import CHARTER_KIND, CHARTER_RECORDS, CharterRecord, charter_key
from manyhands.base.errors import PeerError
from manyhands.base.identity import PeerId
from manyhands.base.run_id import is_run_id
from manyhands.dht import DhtNode

logger = logging.getLogger(__name__)


class Published(NamedTuple):
    """A valid charter, and the record of the peer that published it."""

    peer_id: PeerId
    charter: SignedCharter
    record: CharterRecord


MAX_RUNS = 64
"""Runs whose charters are read, if no name is given."""


async def charted_runs(dht: DhtNode) -> list[str]:
    """Names of runs with charters, as some peers know them."""
    return sorted(filter(is_run_id, await dht.topics(CHARTER_KIND)))[:MAX_RUNS]


async def read_charters(dht: DhtNode, run_id: str, *, quickly: bool = False) -> list[Published]:
    """The charters of a run; forged and unreadable ones are skipped.

    Raises:
        Unavailable: the DHT does not answer.
    """
    dht.declare(charter_key(run_id), CHARTER_RECORDS)
    published = []
    for subkey, stored in (await dht.get(charter_key(run_id), quickly=quickly)).items():
        if stored.owner != subkey:
            continue
        try:
            record = CHARTER_RECORDS.decode(stored.raw)
            charter = SignedCharter.from_bytes(record.charter, subkey)
        except (msgspec.DecodeError, PeerError) as error:
            logger.debug("the charter that peer %s publishes does not count: %s", subkey, error)
            continue
        if charter.run_id == run_id:
            published.append(Published(PeerId(subkey), charter, record))
    return published
