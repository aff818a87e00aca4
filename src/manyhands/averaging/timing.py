"""The times of the engine: a few that are chosen, and all others derived from them. Pure, and without imports.

====================  ========================  ====================================================================
chosen                seconds                   because
====================  ========================  ====================================================================
``LOOK_S``            0.25                      how often whoever waits looks again: little beside an answer
``ANSWER_S``          2                         a live peer answers a call within this: several round trips of the
                                                longest links, and a busy machine's pause
``DIAL_S``            5                         a dial to a machine that is off the network fails within this
``SLOW_ANSWER_S``     8                         an answer on the slowest links; soon after, missing heartbeats end
                                                the connection in any case (8.5 s)
``LOG_S``             10                        a person who watches wants news about as often
``RECORD_S``          30                        a record lives: so long does the loss of a machine go unnoticed
``KEPT_S``            60                        routers forget a connection that was unused for longer
``SHUN_S``            600                       a peer that misbehaved, or cannot be reached, is passed over
``DAY_S``             86,400                    nothing that is asked for takes longer
--------------------  ------------------------  --------------------------------------------------------------------
in a round            is                        because
--------------------  ------------------------  --------------------------------------------------------------------
asked                 ``ANSWER_S`` of silence   a member that is waited for is asked whether it is there, and
                                                again after as long
gone                  no answer                 within :func:`.allreduce.bandwidth.answer_time_s`
stuck with values     2 x ``ANSWER_S``          it answers and moves nothing: it had time for a second answer
stuck with means      4 x ``ANSWER_S``          it may wait for values of a stuck member, and must find that out
too slow              half of the round         then its pace is known, and there is time to go on without it
left                  2 x ``ANSWER_S``          whoever waits for a leader that stands still has asked it, and left
last vote, verdict    ``ANSWER_S``              what a message may take that is on its way
no name for a stream  2 x ``KEPT_S``            the side that dialled it does not use it again after ``KEPT_S``
after the end         ``MOMENT_S``              the least time for an exchange or for votes that are just due
====================  ========================  ====================================================================

Other modules name what they wait for, and derive it from these. The rest is the user's: ``matchmaking_time_s``,
``averaging_timeout_s``, ``stream_timeout_s``, ``in_doubt_timeout_s``
(:class:`manyhands.averaging.config.AveragingConfig`). ``benchmarks/durations.py`` counts.
"""

from __future__ import annotations

LOOK_S = 0.25
ANSWER_S = 2.0
DIAL_S = 5.0
SLOW_ANSWER_S = 8.0
LOG_S = 10.0
RECORD_S = 30.0
KEPT_S = 60.0
SHUN_S = 600.0
DAY_S = 86_400.0

MOMENT_S = ANSWER_S / 2
"""What a record or a message takes that is on its way."""
REMIND_S = 2 * RECORD_S
"""How often a person is told again of what goes on."""
IDLE_S = 10 * RECORD_S
"""A peer that does nothing for so long is not waited for."""

STUCK_WITH_VALUES_S = 2 * ANSWER_S
STUCK_WITH_MEANS_S = 4 * ANSWER_S
LEFT_S = 2 * ANSWER_S
UNNAMED_S = 2 * KEPT_S
