"""Messages with which a peer asks another one how that one sees it, and where it has reached others.

===============  ==================  ================================================================
method           request             response
===============  ==================  ================================================================
reach.examine    nothing             clock, the caller's IP address, number of known peers, software
reach.dial_back  some addresses      for each whether the caller was found there, over a new connection
reach.reached    some peers          for each the IP address at which the asked peer has dialled it
===============  ==================  ================================================================
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from manyhands.base.address import AddressText
from manyhands.base.identity import PeerId
from manyhands.rpc.method import Method

MAX_DIALLED = 4
"""Most addresses in one request."""

MAX_ASKED_ABOUT = 64
"""Most peers in one request."""

ASK_TIMEOUT_S = 5.5
"""Seconds to wait for one answer; a peer that dials back takes 3 s at most."""

MAX_TEXT = 500  # characters of a detail for people

MAX_WALL_TIME_S = 1e11  # the year 5138; larger numbers do not decode

NOT_ALLOWED = "not_allowed"
"""Code for an address that the peer does not dial for this caller."""

BAD_ADDRESS = "bad_address"
"""Code for an address that cannot be read."""


class ExamineRequest(msgspec.Struct, frozen=True):
    """Asks how a peer sees the caller and the swarm."""


class ExamineResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The view of one peer.

    Attributes:
        wall_time_s: its clock when it answers, in seconds since 1970.
        host: the IP address of the caller as seen there; empty if unknown.
        num_known_peers: in its routing table.
        agent: its software and version, for people.
    """

    wall_time_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WALL_TIME_S)]
    host: Annotated[str, msgspec.Meta(max_length=64)] = ""
    num_known_peers: Annotated[int, msgspec.Meta(ge=0)] = 0
    agent: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""


class DialBackRequest(msgspec.Struct, frozen=True):
    """Asks a peer to dial the caller at some multiaddrs; a peer id in them is ignored and replaced by the caller's."""

    addresses: Annotated[list[AddressText], msgspec.Meta(min_length=1, max_length=MAX_DIALLED)]


class DialOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome for one address.

    Attributes:
        code: empty if the caller was found there; else the name of a :class:`manyhands.base.errors.DialReason` in lower
            case, :data:`NOT_ALLOWED`, :data:`BAD_ADDRESS`, or a code of a later version.
        detail: more about it, for people.
    """

    address: AddressText
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""
    detail: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""


class DialBackResponse(msgspec.Struct, frozen=True):
    """One outcome for each address of the request, in order."""

    outcomes: Annotated[list[DialOutcome], msgspec.Meta(max_length=MAX_DIALLED)]


class ReachedRequest(msgspec.Struct, frozen=True):
    """Asks where a peer has reached others."""

    peers: Annotated[
        list[Annotated[PeerId, msgspec.Meta(max_length=64)]], msgspec.Meta(min_length=1, max_length=MAX_ASKED_ABOUT)
    ]


class ReachedResponse(msgspec.Struct, frozen=True):
    """One IP address for each peer of the request, in order; empty if it was not dialled with success lately."""

    hosts: Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=MAX_ASKED_ABOUT)]


EXAMINE = Method("reach.examine", ExamineRequest, ExamineResponse)
DIAL_BACK = Method("reach.dial_back", DialBackRequest, DialBackResponse)
REACHED = Method("reach.reached", ReachedRequest, ReachedResponse)
