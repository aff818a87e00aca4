"""The peers that should come to the next round, and the order in which they lead. Pure.

===================  =====================================  ======================================================
                     members                                guests
===================  =====================================  ======================================================
who they are         voters of the run's roster; all, if    all others that have a record at this position and
                     none is here, or there is no roster    are connected to this peer
lead                 first; those that were demoted lead    after all members
                     like guests
can call this peer   yes                                    only where no member is here
===================  =====================================  ======================================================

All of them have a record at this position, and are neither barred nor missing: a peer that did not come to the last
round, or whose connection broke, is not waited for until it publishes again. So a member that is gone costs one wait.
:mod:`manyhands.averaging.matchmaking.patience` says how long they are waited for.

The roster (:mod:`manyhands.averaging.roster`) is the same on all peers at one position. In a grid, and among averagers
outside an optimizer, no peer knows all rounds, so there is no roster: the lowest peer id leads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint


@dataclass(frozen=True)
class Attendees:
    """Where and with whom a peer averages next, as far as it knows now.

    Attributes:
        position: position of the next round.
        expected: the other peers at this position that should come, and whether each is in client mode.
        connected: the expected peers that are connected to this peer.
        is_client: whether this peer is in client mode.
        roster: the members of the run at this position; None where peers do not share one.
        batch_s: seconds in which most peers here compute a batch, and come to the round; 0 if they compute none.
    """

    own_id: PeerId
    position: Position
    expected: Mapping[PeerId, bool]
    connected: Collection[PeerId] = ()
    is_client: bool = False
    roster: Roster | None = None
    batch_s: float = 0.0

    @classmethod
    def of(
        cls,
        endpoint: Endpoint,
        position: Position,
        expected: Mapping[PeerId, bool],
        roster: Roster | None = None,
        batch_s: float = 0.0,
    ) -> Attendees:
        """The attendees as the peer with this endpoint knows them."""
        connected = frozenset(filter(endpoint.is_connected, expected))
        return cls(endpoint.peer_id, position, expected, connected, endpoint.client_mode, roster, batch_s)

    @cached_property
    def is_open(self) -> bool:
        """Whether no voter of the roster is here, so that all count as members, and anybody can call this peer."""
        known = self.roster.voters if self.roster is not None else frozenset()
        return self.own_id not in known and known.isdisjoint(self.expected)

    @cached_property
    def members(self) -> frozenset[PeerId]:
        """The others that count as members."""
        others = frozenset(self.expected)
        return others if self.is_open or self.roster is None else others & self.roster.voters

    @cached_property
    def guests(self) -> frozenset[PeerId]:
        """The others that are waited for beside the members: those connected to this peer."""
        return frozenset(self.connected) - self.members

    @cached_property
    def hosts(self) -> frozenset[PeerId]:
        """The peers that may lead, as they can be dialled; this peer may be one of them."""
        others = {one for one, is_client in self.expected.items() if not is_client}
        return frozenset(others if self.is_client else others | {self.own_id})

    @cached_property
    def far(self) -> frozenset[PeerId]:
        """Clients that are not connected to this peer, so that it cannot call them."""
        return frozenset(one for one, is_client in self.expected.items() if is_client and one not in self.connected)

    @property
    def is_barred(self) -> bool:
        """Whether this peer gets no place."""
        return self.roster is not None and not self.is_open and self.roster.barred_rounds(self.own_id) > 0

    @property
    def waits_for_guests(self) -> bool:
        """Whether guests are waited for as long as a step takes."""
        return self.is_open or self.roster is None or self.roster.waits_for_guests

    @property
    def num_troubled(self) -> int:
        """Number of recent rounds with trouble."""
        return 0 if self.is_open or self.roster is None else self.roster.num_troubled

    @property
    def leaders(self) -> list[PeerId]:
        """The hosts, the one that should lead first."""
        return sorted(self.hosts, key=self.rank)

    def rank(self, peer_id: PeerId) -> tuple[int, PeerId]:
        """Place of a peer in the order of leaders: the lowest leads. Peers that the roster does not know come last."""
        return self._places.get(peer_id, len(self._places)), peer_id

    @cached_property
    def _places(self) -> dict[PeerId, int]:
        """The places of all peers of the roster that could lead, whether or not they are here."""
        order = self.roster.leaders() if self.roster is not None and self.roster.members else []
        return {peer_id: place for place, peer_id in enumerate(order)}

    def heeds(self, peer_id: PeerId) -> bool:
        """Whether this peer comes to the round when that peer calls."""
        return peer_id in self.members or self.is_open
