"""What a peer asks another about itself, to find out why something does not work.

===============  ==================  ================================================================
method           request             response
===============  ==================  ================================================================
reach.examine    nothing             my clock, where I see you, how many peers I know, my software
reach.dial_back  some addresses      for each whether I found you there, over a connection of its own
===============  ==================  ================================================================
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from manyhands.rpc.method import Method

MAX_DIALLED = 4
"""Addresses that one request may name."""

MAX_TEXT = 500  # characters of a detail for people

MAX_WALL_TIME_S = 1e11  # the year 5138; a number that cannot be a clock is not even decoded

NOT_ALLOWED = "not_allowed"
"""The code of an address that a peer does not dial for this caller."""

BAD_ADDRESS = "bad_address"
"""The code of an address that cannot be read."""


class ExamineRequest(msgspec.Struct, frozen=True):
    """What do you see of me, and of the swarm?"""


class ExamineResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one peer sees.

    Attributes:
        wall_time_s: its clock as it answers, in seconds since 1970.
        host: the IP address that the caller is seen at; empty if that is not known.
        num_known_peers: in its routing table.
        agent: its software and version, for people.
    """

    wall_time_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WALL_TIME_S)]
    host: Annotated[str, msgspec.Meta(max_length=64)] = ""
    num_known_peers: Annotated[int, msgspec.Meta(ge=0)] = 0
    agent: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""


class DialBackRequest(msgspec.Struct, frozen=True):
    """Can you dial me there? Multiaddrs; a peer id in them is not looked at: it must be the caller's."""

    addresses: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=400)]], msgspec.Meta(min_length=1, max_length=MAX_DIALLED)
    ]


class DialOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one address.

    Attributes:
        code: empty if the caller was found there; else the name of a :class:`manyhands.base.errors.DialReason` in small
            letters, :data:`NOT_ALLOWED`, :data:`BAD_ADDRESS`, or one that a later version knows.
        detail: more about it, for people.
    """

    address: Annotated[str, msgspec.Meta(max_length=400)]
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""
    detail: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""


class DialBackResponse(msgspec.Struct, frozen=True):
    """One outcome for each address of the request, in its order."""

    outcomes: Annotated[list[DialOutcome], msgspec.Meta(max_length=MAX_DIALLED)]


EXAMINE = Method("reach.examine", ExamineRequest, ExamineResponse)
DIAL_BACK = Method("reach.dial_back", DialBackRequest, DialBackResponse)
