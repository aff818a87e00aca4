"""The peers that should come to the next round, the order in which they lead, and the patience for each. Pure.

===================  =====================================  ======================================================
                     members                                guests
===================  =====================================  ======================================================
who they are         of the run's roster; all, if none of   all others that have a record at this position and
                     them is here, or there is no roster    are connected to this peer, but those that are barred
lead                 first                                  after all members
are waited for       for the matchmaking time; less after   all together for as long as a step takes; for a tenth
                     troubled rounds and failed attempts,   of that after a round that waited in vain for one
                     but for a batch of most members
can call this peer   yes                                    only where no member is here
===================  =====================================  ======================================================

The roster (:mod:`manyhands.averaging.roster`) is the same on all peers at one position. In a grid, and among averagers
outside an optimizer, no peer knows all rounds, and there is none: the lowest peer id leads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster
from manyhands.base.identity import PeerId


class Meeting(Protocol):
    """Where, and with whom, a peer averages next; the optimizer and the averager implement it."""

    def position(self) -> Position:
        """This peer's position in the run."""

    def expected(self) -> Mapping[PeerId, bool]:
        """The other peers at this position that should come to the next round, and whether each is in client mode."""

    def roster(self) -> Roster | None:
        """The members of the run at this position; None where peers do not share one."""

    def batch_s(self) -> float:
        """Seconds in which most peers here compute a batch, and come to the round; 0 if they compute none."""

    def report_missing(self, peer_id: PeerId) -> None:
        """A peer did not come; it is expected again only after a fresh record."""

    def call_to_round(self) -> None:
        """Another peer has begun a round at this position; the training loop should come as soon as it can."""


@dataclass(frozen=True)
class Attendees:
    """The peers of the next round, as this peer knows them now.

    Attributes:
        position: of the round.
        order: peers that could lead, the first one first, whether or not they are here.
        hosts: those that can be dialled now, perhaps with this peer.
        members, guests: the others that should come.
        far: clients among them that are not connected to this peer, so that it cannot call them.
        waits_for_guests: whether guests are waited for as long as a step takes.
        is_open: there is no member, so that anybody can call this peer to the round.
        is_barred: this peer gets no place.
        num_troubled: recent rounds with trouble, each of which halves the patience for members.
        batch_s: the least patience for members: in this time most peers finish the batch that they compute.
    """

    position: Position
    order: tuple[PeerId, ...]
    hosts: frozenset[PeerId]
    members: frozenset[PeerId]
    guests: frozenset[PeerId] = frozenset()
    far: frozenset[PeerId] = frozenset()
    waits_for_guests: bool = True
    num_troubled: int = 0
    batch_s: float = 0.0
    is_open: bool = True
    is_barred: bool = False

    @property
    def leaders(self) -> list[PeerId]:
        """The hosts, the one that should lead first."""
        return sorted(self.hosts, key=self.rank)

    def rank(self, peer_id: PeerId) -> tuple[int, PeerId]:
        """Of several leaders the one with the lowest rank leads; unknown ones come last."""
        return (self.order.index(peer_id) if peer_id in self.order else len(self.order)), peer_id

    def heeds(self, peer_id: PeerId) -> bool:
        """Whether a peer can call this one to the round."""
        return peer_id in self.members or self.is_open


def attendees_of(
    own_id: PeerId,
    position: Position,
    expected: Mapping[PeerId, bool],
    roster: Roster | None,
    connected: Collection[PeerId],
    *,
    is_client: bool,
    batch_s: float = 0.0,
) -> Attendees:
    """The attendees of the next round.

    Args:
        expected: the others, and whether each is in client mode.
        connected: the others that are connected to this peer.
        batch_s: seconds in which most of them finish a batch.
    """
    others = frozenset(expected)
    hosts = frozenset(peer_id for peer_id in others if not expected[peer_id]) | (set() if is_client else {own_id})
    far = others - hosts - frozenset(connected)
    if roster is not None and roster.members:
        hosts -= {peer_id for peer_id in others if roster.barred_rounds(peer_id)}
        order, members = tuple(roster.leaders()), roster.members & others
        if members or own_id in roster.members:
            waits, num_troubled = roster.waits_for_guests, roster.num_troubled
            is_barred = roster.barred_rounds(own_id) > 0
            guests = frozenset(one for one in connected if one not in members and not roster.barred_rounds(one))
            return Attendees(
                position, order, hosts, members, guests, far, waits, num_troubled, batch_s, False, is_barred
            )
        return Attendees(position, order, hosts, others, far=far, batch_s=batch_s)
    return Attendees(position, (), hosts, others, far=far, batch_s=batch_s)
