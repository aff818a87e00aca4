"""Messages between DHT nodes.

==========  ==================================================  ====================================================
method      request                                             response
==========  ==================================================  ====================================================
dht.ping    whether any peer has dialled the caller             empty
dht.find    a point, perhaps a key, owners, where to read on,   contacts nearest to the point, a page of the records
            how many records
dht.store   records with their ages                             the outcome for each
dht.topics  a kind of keys                                      the topics that have keys of this kind
==========  ==================================================  ====================================================

All lists are bounded, so that the largest message fits into a frame.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from manyhands.dht.config import MAX_CONTACTS, MAX_FOUND_RECORDS, MAX_NAMED, MAX_STORED_RECORDS
from manyhands.dht.ids import ID_BYTES
from manyhands.dht.records import MAX_KEY_LENGTH, MAX_SUBKEY_LENGTH, AgedRecord
from manyhands.dht.routing import Contact
from manyhands.rpc.method import Method

MAX_TOPICS = 256
MAX_OWNER_LENGTH = 64


class PingRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Checks that a DHT node answers.

    Attributes:
        was_reached: False if the caller listens but no peer has dialled it since it began; the receiver then tries.
    """

    was_reached: bool = True


class PingResponse(msgspec.Struct, frozen=True):
    """The empty answer to a ping."""


class FindRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Asks for the contacts near a point, and for the records of a key.

    Attributes:
        target: the point, 32 bytes.
        key: the key of the wanted records; None for contacts only.
        wants_contacts: False if the reader knows the holders of the key.
        wants_records: False if the digest of the records is enough.
        after: return only records whose subkeys follow this one, which ended the last page.
        owners: return only the records of these owners, or the digest of them; None for all.
        most: return at most so many records, and say how many there are.
    """

    target: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    key: Annotated[str, msgspec.Meta(max_length=MAX_KEY_LENGTH)] | None = None
    wants_contacts: bool = True
    wants_records: bool = True
    after: Annotated[str, msgspec.Meta(max_length=MAX_SUBKEY_LENGTH)] | None = None
    owners: (
        Annotated[list[Annotated[str, msgspec.Meta(max_length=MAX_OWNER_LENGTH)]], msgspec.Meta(max_length=MAX_NAMED)]
        | None
    ) = None
    most: Annotated[int, msgspec.Meta(ge=1, le=MAX_FOUND_RECORDS)] | None = None


class FindResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contacts near a point and the records of a key that a node knows.

    Attributes:
        contacts: those nearest to the point, at most ``k``.
        records: those held under the key, in the order of their subkeys; as many as fit.
        digest: the digest of the records, if the caller wants only that; see
            :func:`manyhands.dht.records.digest_of_records`.
        is_responsible: whether the answering node believes that it is among the nearest to the point.
        is_more: whether it holds records after these.
        num_held: number of records of the key that it holds, if the caller has said how many it wants; else 0.
    """

    contacts: Annotated[list[Contact], msgspec.Meta(max_length=MAX_CONTACTS)]
    records: Annotated[list[AgedRecord], msgspec.Meta(max_length=MAX_FOUND_RECORDS)] = []
    digest: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    is_responsible: bool = True
    is_more: bool = False
    num_held: Annotated[int, msgspec.Meta(ge=0)] = 0


class StoreRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Asks a node to store records.

    Attributes:
        records: the records to store.
    """

    records: Annotated[list[AgedRecord], msgspec.Meta(max_length=MAX_STORED_RECORDS)]


class StoreOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of storing one record.

    Attributes:
        is_stored: whether the holder has it now.
        code: a value of :class:`manyhands.dht.records.Reason`, or one of a later version.
        later: the record that made this one stale. A writer then issues its own again, with a higher sequence number;
            a holder that sent its copy stores the later record.
        is_responsible: whether the holder believes that it is among the nearest to the key.
    """

    is_stored: bool
    code: Annotated[str, msgspec.Meta(max_length=64)]
    later: AgedRecord | None = None
    is_responsible: bool = True


class StoreResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcomes of a store request.

    Attributes:
        outcomes: one for each record, in order.
    """

    outcomes: Annotated[list[StoreOutcome], msgspec.Meta(max_length=MAX_STORED_RECORDS)]


class TopicsRequest(msgspec.Struct, frozen=True):
    """Asks for the topics that a node knows. A key is ``TOPIC.KIND``.

    Attributes:
        kind: the part after the first dot of the keys.
    """

    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_LENGTH)]


class TopicsResponse(msgspec.Struct, frozen=True):
    """The topics of which the node holds records or has declared a schema; at most :data:`MAX_TOPICS`."""

    topics: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_LENGTH)]], msgspec.Meta(max_length=MAX_TOPICS)
    ]


TOO_MANY_REQUESTS = "too_many_requests"
"""Code of a refusal: the caller exceeds the request rate and may retry later."""

PING = Method("dht.ping", PingRequest, PingResponse)
FIND = Method("dht.find", FindRequest, FindResponse)
STORE = Method("dht.store", StoreRequest, StoreResponse)
TOPICS = Method("dht.topics", TopicsRequest, TopicsResponse)
