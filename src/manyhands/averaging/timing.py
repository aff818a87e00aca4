"""The times of a round: a few that are chosen, and all others derived from them. Pure.

=====================  ========================  ==================================================================
time                   is                        because
=====================  ========================  ==================================================================
``LOOK_S``             chosen                    how often whoever waits looks again: little beside an answer
``ANSWER_S``           chosen                    a live peer answers a call within this: several round trips of the
                                                 longest links, and a busy machine's pause
``SLOW_ANSWER_S``      chosen                    the same on the slowest links; soon after, missing heartbeats end
                                                 the connection in any case (8.5 s)
``KEPT_S``             chosen                    routers forget a connection that was unused for longer
---------------------  ------------------------  ------------------------------------------------------------------
asked after            ``ANSWER_S`` of silence   whoever is waited for is asked whether it is there, and again
                                                 after each answer
gone                   no answer                 within :func:`answer_time_s`
stuck with values      2 x ``ANSWER_S``          it answers and moves nothing: it had time for a second answer
stuck with means       4 x ``ANSWER_S``          it may wait for values of a stuck member, and must find that out
too slow               half of the round         then its pace is known, and there is time to go on without it
left                   2 x ``ANSWER_S``          whoever waits for a leader that stands still has asked it, and left
last vote, verdict     ``ANSWER_S``              what a message may take that is on its way
no name for a stream   2 x ``KEPT_S``            the side that dialled it does not use it again after ``KEPT_S``
after the round's end  ``ANSWER_S`` / 2          the least time for an exchange or for votes that are just due
=====================  ========================  ==================================================================

The rest is the user's: ``matchmaking_time_s``, ``averaging_timeout_s``, ``stream_timeout_s``, ``in_doubt_timeout_s``
(:class:`manyhands.averaging.config.AveragingConfig`).
"""

from __future__ import annotations

import math

from manyhands.averaging.messages import BLAMED, Group

LOOK_S = 0.3
ANSWER_S = 2.0
SLOW_ANSWER_S = 8.0
KEPT_S = 60.0

STUCK_WITH_VALUES_S = 2 * ANSWER_S
STUCK_WITH_MEANS_S = 4 * ANSWER_S
LEFT_S = 2 * ANSWER_S
LEAST_S = ANSWER_S / 2
UNNAMED_S = 2 * KEPT_S

QUEUED_BYTES = 16 * 1024
"""Bytes of a round that may be queued before an answer."""
ROUND_TRIPS = 4
"""Of a member for which nobody waits long: so many to open its stream."""


def answer_time_s(group: Group, rank: int, other: int, bytes_per_s: float = 0.0) -> float:
    """Timeout of an answer during a round, by the lowest known rate: what came, or the bandwidth of one of both."""
    rates = bytes_per_s, group.members[rank].bandwidth, group.members[other].bandwidth
    slowest = min((rate for rate in rates if rate not in (0, BLAMED)), default=math.inf)
    return min(max(ANSWER_S, QUEUED_BYTES / slowest), SLOW_ANSWER_S)


def hasty_s(rtt_s: float) -> float:
    """How long to wait for the stream of a member for which nobody waits long."""
    return min(max(ROUND_TRIPS * rtt_s, LOOK_S), ANSWER_S)
