"""Requests to one node of the DHT, as another peer sends them: what it holds, and records for it to hold."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId
from manyhands.dht.config import MAX_STORED_RECORDS
from manyhands.dht.ids import id_to_bytes, key_id
from manyhands.dht.messages import FIND, STORE, TOO_MANY_REQUESTS, FindRequest, StoreOutcome, StoreRequest
from manyhands.dht.records import AgedRecord, Record
from manyhands.rpc import Endpoint


async def records_at(asker: Endpoint, holder: PeerId, key: str) -> dict[str, Record]:
    """Return the records of a key that a node shows, by subkey."""
    records: dict[str, Record] = {}
    request = FindRequest(id_to_bytes(key_id(key)), key, wants_contacts=False)
    while True:
        page = await asker.call(holder, FIND, request)
        records |= {aged.record.subkey: aged.record for aged in page.records}
        if not page.is_more:
            return records
        request = FindRequest(request.target, key, wants_contacts=False, after=page.records[-1].record.subkey)


async def store_at(writer: Endpoint, holder: PeerId, records: Sequence[Record]) -> list[StoreOutcome]:
    """Send records to a node; return the outcomes of those that exceeded none of its limits on requests."""
    outcomes: list[StoreOutcome] = []
    for start in range(0, len(records), MAX_STORED_RECORDS):
        batch = [AgedRecord(record, 0.0) for record in records[start : start + MAX_STORED_RECORDS]]
        try:
            outcomes += (await writer.call(holder, STORE, StoreRequest(batch))).outcomes
        except Refused as refusal:
            if refusal.code != TOO_MANY_REQUESTS:
                raise
    return outcomes
