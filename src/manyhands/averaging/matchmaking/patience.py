"""How long a peer waits for whom before its round. Pure.

======================  ========================  ====================================================================
who waits               for whom                  how long, and why
======================  ========================  ====================================================================
a peer                  the leader that it asks   its *patience*; then it asks the next one
a leader                members                   its patience from when half of them have asked, as most of them wait
                                                  since then, and one that asks early changes nothing; at least a
                                                  quarter of it from when it leads itself, as some may be in mid-batch
a leader                members, at most          as long as those that have asked wait: they would go elsewhere; and
                                                  for half of its time for the round: the other half is for the values
a leader                guests, all together      as long as a step takes; a tenth of that after a round that waited in
                                                  vain for one; at most as long as for members
a leader                clients that it cannot    a dial: by then they could have come to it
                        call
a peer that was asked   its own training loop     as long as each that has asked waits
a member that has       that loop, before it      its patience, and a moment at least: one that does not wait has
asked in vain           counts as away            nobody else sent away
======================  ========================  ====================================================================

*Patience* is the matchmaking time. Each recent troubled round halves it, and so does each failed attempt at this round,
so that peers that never come cost less and less. But members may finish the batch in which a call finds them, if it
takes them as long as most others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.averaging.attendees import Attendees
from manyhands.averaging.messages import Member
from manyhands.averaging.timing import DIAL_S
from manyhands.base.identity import PeerId

MAX_HALVINGS = 4
"""Patience is at least a sixteenth of the matchmaking time."""
BATCH_MARGIN = 1.25
"""A batch may take this factor longer than it usually does."""
LEAST_SHARE = 0.25
"""The share of its patience that a leader has for the others at least, however early they came."""
GUEST_SHARE = 0.1
"""The share of a step's time for which guests are waited for, after one was waited for in vain."""


def patience_s(full_s: float, num_troubled: int, num_failed: int = 0, batch_s: float = 0.0) -> float:
    """Seconds for which a peer waits for a member, or for a leader.

    Args:
        full_s: the same in the first attempt after calm rounds.
        num_troubled: recent rounds with trouble.
        num_failed: attempts at this round that failed.
        batch_s: in which most peers here compute a batch.
    """
    halved_s = full_s * 0.5 ** min(num_troubled + num_failed, MAX_HALVINGS)
    return max(halved_s, min(BATCH_MARGIN * batch_s, full_s))


@dataclass(frozen=True)
class Wait:
    """The wait of a peer that has asked for a place, from one instant until another."""

    member: Member
    since: float
    until: float


@dataclass(frozen=True)
class LeaderWaits:
    """Until when a leader waits for the peers of each kind that have not come."""

    members: float
    guests: float
    far: float


def leader_waits(
    who: Attendees,
    waits: Mapping[PeerId, Wait],
    patience_s: float,
    *,
    stepped_at: float,
    led_at: float,
    ends_at: float,
) -> LeaderWaits:
    """Until when a leader waits for the others; all times are instants of one clock.

    Args:
        waits: of the peers that have asked it for a place.
        patience_s: of the leader.
        stepped_at: when the last step was made.
        led_at: when it began to lead.
        ends_at: the end of its time for the round.
    """
    heeded = [wait for peer_id, wait in waits.items() if who.heeds(peer_id)]
    most_came_at = min(half_came_at(who, waits), led_at)
    gives_up_at = max((wait.until for wait in heeded), default=math.inf)
    members = max(min(most_came_at + patience_s, gives_up_at), led_at + LEAST_SHARE * patience_s)
    members = min(members, (led_at + ends_at) / 2)
    guests_s = max(led_at - stepped_at, 0.0) * (1.0 if who.waits_for_guests else GUEST_SHARE)
    return LeaderWaits(members, min(led_at + guests_s, members), led_at + DIAL_S)


def half_came_at(who: Attendees, waits: Mapping[PeerId, Wait]) -> float:
    """When half of the members had asked; the first one where there is no roster. Infinite if they have not."""
    times = sorted(wait.since for peer_id, wait in waits.items() if who.heeds(peer_id))
    half = 1 if who.is_open else (len(who.members) + 1) // 2
    return times[half - 1] if 0 < half <= len(times) else math.inf
