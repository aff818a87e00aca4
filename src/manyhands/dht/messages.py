"""What DHT nodes say to each other.

==========  ==================================================  ====================================================
method      request                                             response
==========  ==================================================  ====================================================
dht.ping    whether anybody has dialled the asker               nothing: I am here, and a DHT node
dht.find    a point, perhaps a key and where to read on         contacts nearest to the point, a page of the records
dht.store   records with their ages                             for each what became of it
dht.topics  a kind of keys                                      the topics that have keys of this kind
==========  ==================================================  ====================================================

All lists are bounded, so that the largest message fits into a frame.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from manyhands.dht.config import MAX_CONTACTS, MAX_FOUND_RECORDS, MAX_STORED_RECORDS
from manyhands.dht.ids import ID_BYTES
from manyhands.dht.records import MAX_KEY_LENGTH, MAX_SUBKEY_LENGTH, AgedRecord
from manyhands.dht.routing import Contact
from manyhands.rpc.method import Method

MAX_TOPICS = 256


class PingRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Are you there?

    Attributes:
        was_reached: False of who listens, and was dialled by nobody since it began: please try.
    """

    was_reached: bool = True


class PingResponse(msgspec.Struct, frozen=True):
    """Yes."""


class Nearest(msgspec.Struct, frozen=True):
    """Who is nearest to a point as far as the asker knows; whoever knows the same need not say it.

    Attributes:
        num: how many they are, the asker among them if it is one.
        digest: :func:`manyhands.dht.ids.digest_of_distances` from the point to each.
    """

    num: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONTACTS)]
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]


class FindRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who is near a point, and what do you hold under a key?

    Attributes:
        target: the point, 32 bytes.
        key: whose records are wanted; None for contacts only.
        wants_contacts: False if the reader knows who holds the key.
        wants_records: False if the digest of the records will do.
        after: of the records those whose subkeys come after this one, to read on where the last page ended.
        nearest: no contacts are wanted of whoever knows the same.
    """

    target: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    key: Annotated[str, msgspec.Meta(max_length=MAX_KEY_LENGTH)] | None = None
    wants_contacts: bool = True
    wants_records: bool = True
    after: Annotated[str, msgspec.Meta(max_length=MAX_SUBKEY_LENGTH)] | None = None
    nearest: Nearest | None = None


class FindResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node knows of a point and a key.

    Attributes:
        contacts: those nearest to the point, at most ``k``; none if they are those that the asker said.
        records: those that are held under the key, in the order of their subkeys; as many as fit.
        digest: :func:`manyhands.dht.records.digest_of` these, sent in their place when they are not wanted.
        is_responsible: whether the asked node thinks that it is among the nearest to the point.
        is_more: whether records after these are held.
    """

    contacts: Annotated[list[Contact], msgspec.Meta(max_length=MAX_CONTACTS)]
    records: Annotated[list[AgedRecord], msgspec.Meta(max_length=MAX_FOUND_RECORDS)] = []
    digest: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    is_responsible: bool = True
    is_more: bool = False


class StoreRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Please hold these.

    Attributes:
        records: what to hold.
        nearest: to the key of these records, if they have one key; a writer that looked nobody up asks so whether it
            knows all that should hold them.
    """

    records: Annotated[list[AgedRecord], msgspec.Meta(max_length=MAX_STORED_RECORDS)]
    nearest: Nearest | None = None


class StoreOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one record.

    Attributes:
        is_stored: whether the holder has it now.
        code: a value of :class:`manyhands.dht.records.Reason`, or one that a later version knows.
        later: the record that made this one stale, for the writer to write above it and for other holders to learn.
        is_responsible: whether the holder thinks that it is among the nearest to the key.
    """

    is_stored: bool
    code: Annotated[str, msgspec.Meta(max_length=64)]
    later: AgedRecord | None = None
    is_responsible: bool = True


class StoreResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of the records of a request.

    Attributes:
        outcomes: one for each, in its order.
        knows_same: whether the holder knows of the same nearest peers as the writer.
    """

    outcomes: Annotated[list[StoreOutcome], msgspec.Meta(max_length=MAX_STORED_RECORDS)]
    knows_same: bool = False


class TopicsRequest(msgspec.Struct, frozen=True):
    """Which topics do you know? A key is made of both: ``TOPIC.KIND``.

    Attributes:
        kind: what comes after the first dot of the keys that are meant.
    """

    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_LENGTH)]


class TopicsResponse(msgspec.Struct, frozen=True):
    """The topics under whose keys the node holds records, or takes part itself; at most :data:`MAX_TOPICS`."""

    topics: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_LENGTH)]], msgspec.Meta(max_length=MAX_TOPICS)
    ]


TOO_MANY_REQUESTS = "too_many_requests"
"""The code of a refusal: the asker may come again, but not at once."""

PING = Method("dht.ping", PingRequest, PingResponse)
FIND = Method("dht.find", FindRequest, FindResponse)
STORE = Method("dht.store", StoreRequest, StoreResponse)
TOPICS = Method("dht.topics", TopicsRequest, TopicsResponse)
