"""How long a peer waits for whom before its round. Pure.

======================  ========================  ====================================================================
who waits               for whom                  how long, and why
======================  ========================  ====================================================================
a peer                  the leader that it asks   its *patience*, and at most a dial for the answer (:func:`ask_s`);
                                                  then it asks the next one
a leader                members                   its patience from when half of them had asked, or from when it led, if
                                                  that was earlier: so one that asks early changes nothing; at least a
                                                  quarter of it from when it led, as some may be in mid-batch
a leader                members, at most          until the last peer that has asked would go elsewhere, but for the
                                                  quarter above
a leader                guests, all together      as long as the step took; a tenth of that while one of the last 16
                                                  rounds was troubled, or waited in vain; at most as for members
a leader                clients that it cannot    a dial: by then they could have connected to it
                        call
a peer that was asked   its own training loop     for each peer that has asked, as long as that one waits
======================  ========================  ====================================================================

*Patience* is the matchmaking time. Each recent troubled round halves it, and so does each failed attempt at this round,
so that peers that never come cost less and less. But within the matchmaking time it is not shorter than a usual batch,
so that members can finish the batch in which a call finds them.
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
"""A batch may take up to this many times its usual time."""
LEAST_SHARE = 0.25
"""A leader waits for members for at least this share of its patience, from when it began to lead."""
GUEST_SHARE = 0.1
"""After recent trouble of any kind, guests are waited for during this share of the time of a step."""


def patience_s(full_s: float, num_troubled: int, num_failed: int = 0, batch_s: float = 0.0) -> float:
    """Seconds for which a peer waits for a member, or for a leader.

    Args:
        full_s: the patience in the first attempt after calm rounds.
        num_troubled: recent rounds with trouble.
        num_failed: attempts at this round that failed.
        batch_s: seconds in which most peers here compute a batch; 0 if they compute none.
    """
    halved_s = full_s * 0.5 ** min(num_troubled + num_failed, MAX_HALVINGS)
    return max(halved_s, min(BATCH_MARGIN * batch_s, full_s))


def ask_s(patience_s: float) -> float:
    """Seconds after which a leader that has not answered is passed over.

    A leader answers at the end of the patience that it is told. Its answer may take a dial longer, but no longer than
    the patience itself.
    """
    return patience_s + min(patience_s, DIAL_S)


@dataclass(frozen=True)
class Wait:
    """A peer that has asked for a place, and the instants since and until which it waits."""

    member: Member
    since: float
    until: float


@dataclass(frozen=True)
class LeaderWaits:
    """The instants until which a leader waits for the peers of each kind that have not come."""

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
) -> LeaderWaits:
    """The instants until which a leader waits for the others; all times are of one clock.

    Args:
        waits: the peers that have asked the leader for a place.
        patience_s: the leader's patience.
        stepped_at: when the last step was made.
        led_at: when it began to lead.
    """
    heeded = [wait for peer_id, wait in waits.items() if who.heeds(peer_id)]
    most_came_at = min(half_came_at(who, waits), led_at)
    gives_up_at = max((wait.until for wait in heeded), default=math.inf)
    members = max(min(most_came_at + patience_s, gives_up_at), led_at + LEAST_SHARE * patience_s)
    guests_s = max(led_at - stepped_at, 0.0) * (1.0 if who.waits_for_guests else GUEST_SHARE)
    return LeaderWaits(members, min(led_at + guests_s, members), led_at + DIAL_S)


def half_came_at(who: Attendees, waits: Mapping[PeerId, Wait]) -> float:
    """When half of the members had asked; without a roster, when the first peer had. Infinite if they have not."""
    times = sorted(wait.since for peer_id, wait in waits.items() if who.heeds(peer_id))
    half = 1 if who.is_open else (len(who.members) + 1) // 2
    return times[half - 1] if 0 < half <= len(times) else math.inf
