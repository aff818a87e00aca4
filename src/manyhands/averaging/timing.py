"""All durations of the engine (``averaging`` and ``optim``), in seconds. Pure; imports nothing of the package.

A *look* is ``LOOK_S``, an *answer* is ``ANSWER_S``, and so on.

====================  =========  ===================================================================================
chosen                seconds    because
====================  =========  ===================================================================================
``YIELD_S``           0.0002     the copy of a state pauses between two parts, so that a waiting step gets the lock
``FAR_RTT_S``         0.01       round trips within one site are shorter; for longer ones ``auto`` chooses 8 bits
``SOON_S``            0.02       wait of a thread for the next piece of a stream, and period of polls for what is
                                 due at any moment
``LOOK_S``            0.25       period of all other polls: it adds little to the time of an answer
``ANSWER_S``          2          a live peer answers a call within it: several round trips of the longest links, and
                                 a pause of a busy machine
``DIAL_S``            5          after it, a dial to a machine that is off the network fails
``SLOW_ANSWER_S``     8          an answer on the slowest links; missing heartbeats end the connection soon after,
                                 in any case (8.5 s)
``LOG_S``             10         time between two messages for a person who watches
``RECORD_S``          30         lifetime of a record, by default: after it, the loss of a machine is noticed
``MINUTE_S``          60         routers forget a connection that was unused for longer; a person is reminded of a
                                 lasting fault about as often
``SHUN_S``            600        a peer that misbehaved, or cannot be reached, is passed over for this long
``RANK_S``            7,200      limit of the wait for a live rank: it may be evaluating, and rank 0 downloading
``DAY_S``             86,400     limit of all times that users and other peers ask for, and of a download
--------------------  ---------  -----------------------------------------------------------------------------------
derived               seconds    because
--------------------  ---------  -----------------------------------------------------------------------------------
``PUBLISH_S``         0.125      half a look. Least time between two records of an averager; a record has all changes
``BRIEF_S``           0.5        two looks. With less time left no attempt begins; limit for the withdrawal of a
                                 record; pause before a donor that was full is asked again
``MOMENT_S``          1          half an answer. By then a record or a message that was on its way has arrived; a
                                 training loop waits no longer for a read of the records
``LATE_ANSWER_S``     3          an answer and a moment. By then an averager has read the records, the others see a
                                 peer that has just come, and a member that lost its leader has asked the others
``TWO_ANSWERS_S``     4          meanwhile a silent peer could answer again, or another peer answer in its place
``FOUR_ANSWERS_S``    8          the same, where that peer itself waits ``TWO_ANSWERS_S`` for another one
``TWO_DIALS_S``       10         two dials, or one and what follows it, such as a read, another step, or the stream to
                                 another member of a round
``STALL_S``           20         four dials. After it, a transfer that moved less than 256 KiB, or a call to the
                                 network thread, is given up; a peer that is outvoted goes where the others are
``JOIN_S``            40         a record's lifetime and two dials. By then the link of a newcomer is up again, or a
                                 client with the state has connected to it
``TWO_MINUTES_S``     120        a stream that was unused for ``MINUTE_S`` stays unused; four lifetimes of a record
                                 without any other peer are no accident
``IDLE_S``            300        ten lifetimes of a record. A peer that did nothing for so long is not waited for
``METRICS_S``         600        twice ``IDLE_S``. Lifetime of metrics, for monitors that are started later
====================  =========  ===================================================================================

:mod:`.round.times` says how long a round waits for whom. The user sets the others: ``matchmaking_time_s`` and
``averaging_timeout_s`` (:class:`manyhands.averaging.config.AveragingConfig`), and how often an optimizer publishes and
reads (:class:`manyhands.optim.config.ProgressConfig`). ``benchmarks/durations.py`` counts all durations.
"""

from __future__ import annotations

YIELD_S = 0.0002
FAR_RTT_S = 0.01
SOON_S = 0.02
LOOK_S = 0.25
ANSWER_S = 2.0
DIAL_S = 5.0
SLOW_ANSWER_S = 8.0
LOG_S = 10.0
RECORD_S = 30.0
MINUTE_S = 60.0
SHUN_S = 600.0
RANK_S = 7200.0
DAY_S = 86_400.0

PUBLISH_S = LOOK_S / 2
BRIEF_S = 2 * LOOK_S
MOMENT_S = ANSWER_S / 2
LATE_ANSWER_S = ANSWER_S + MOMENT_S
TWO_ANSWERS_S = 2 * ANSWER_S
FOUR_ANSWERS_S = 4 * ANSWER_S
TWO_DIALS_S = 2 * DIAL_S
STALL_S = 4 * DIAL_S
JOIN_S = RECORD_S + TWO_DIALS_S
TWO_MINUTES_S = 2 * MINUTE_S
IDLE_S = 10 * RECORD_S
METRICS_S = 2 * IDLE_S
