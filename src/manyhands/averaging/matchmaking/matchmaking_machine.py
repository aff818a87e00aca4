"""One peer's search for the group of its next round, as a state machine. Pure.

All peers know who should lead (:mod:`manyhands.averaging.attendees`). A peer whose step is due asks that leader for a
place, or leads itself. If it cannot get a place there, it asks the next leader. Events come in with
:meth:`Matchmaking.on`, actions come out:

=========  ================================================  =========  ==============================================
state      event                                             next       actions
=========  ================================================  =========  ==============================================
idle       the step is due here, and another peer leads      asking     ask it; refer all that have asked here to it
idle       the step is due here, and this peer leads         leading    call the others
idle       another peer asks for a place, or calls           idle       call the training loop, and the others
idle       a peer that asked has waited for all its time     idle       refuse it, and do not call it from here
asking     the leader's group has formed with this peer      grouped    begin the round
asking     the leader cannot be reached, refuses, or its     asking or  ask the next leader, or lead
           time is over                                      leading
asking     the asked leader follows a leader itself          asking     ask that one, once; if it gave no place before,
                                                                        ask the next one in order
asking     another peer asks for a place                     asking     refer it to the asked leader
asking     a peer calls that comes after the asked leader    asking     check whether the asked leader still answers
leading    another peer asks for a place                     leading    note it
leading    a called peer does not come                       leading    do not wait for it
leading    all that are waited for are here, the group is    grouped    close the group with those that came
           full (in a grid), or the patience is over
asking,    a leader calls that has refused this peer, as     as below   do not pass it over any more: its loop has come
leading    its training loop was away
leading    a peer calls that comes before this one in the    asking     ask it; refer all that have asked here to it
           order of leaders, or a called peer follows it
leading    nobody came, and the others follow a leader       asking     ask it, as they can reach it
asking,    the asked leader, or at least half of the         idle       the attempt ends: this peer is behind, and
leading    members when called, say that the run went on                looks for the others (not in a grid)
any        no leader is left, this peer is at another        idle       the attempt ends; all that ask are refused
           position, or its search is cancelled
grouped    the round is over, and committed                  grouped    none, until this peer is at the next position
grouped    the round is over, and did not commit             idle       its leader is passed over in the next attempt
=========  ================================================  =========  ==============================================

A leader that was passed over is not asked again at this position, until all have been, or until it calls after its
training loop has come.

The driver (:class:`.matchmaker.Matchmaker`) raises the events:

===================  =================================================================================================
event                raised by
===================  =================================================================================================
:class:`Due`         ``find_group``, which the round runner calls when the optimizer or averager begins a round
:class:`Ended`       ``find_group``, when it is cancelled before a group was found
:class:`Asked`       a ``JOIN`` call of another peer
:class:`Withdrew`    the end of a ``JOIN`` call that was not answered yet; a broken connection
:class:`Formed`      the answer to this peer's ``JOIN`` call: a group
:class:`SentOn`      the answer to this peer's ``JOIN`` call: another leader
:class:`Failed`      a ``JOIN`` call that failed, was refused or brought a wrong group; a failed ping of a ``Check``
:class:`Called`      a ``CALL`` call of another peer
:class:`Follows`     the answer to this peer's ``CALL`` call
:class:`CallFailed`  a ``CALL`` call that failed or was refused; a dial to a possible leader that failed
:class:`RoundOver`   ``round_over``, from the round runner; ``find_group``, when it is cancelled after a group was found
:class:`Looked`      a timer, while others wait for what this peer does: every ``LOOK_S``, at ``wake_at``, and after
                     each other event
===================  =================================================================================================
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypeAlias

from manyhands.averaging.attendees import Attendees
from manyhands.averaging.matchmaking.patience import Wait, half_came_at, leader_waits, patience_s
from manyhands.averaging.messages import Late, Member, Position
from manyhands.averaging.timing import MOMENT_S
from manyhands.base.identity import PeerId

# codes of refusals
BEHIND = "behind"  # the asked peer has made steps that the asking one has not
OTHER_MANIFEST = "other_manifest"  # the asking peer has another model or other settings
OTHER_POSITION = "other_position"  # the asking peer is at another position in the run
BARRED = "barred"  # the asking peer was at fault in rounds, and gets no place in the next ones
BUSY = "busy"  # the asked peer would lead, but its training loop did not come to the round
FULL = "full"  # all places of the group are taken
GONE = "gone"  # not sent: the peer cannot be reached
LATE = "late"  # not sent: no answer in time

LOOP_AWAY = "the peer that was to lead can be reached, but its training loop did not come to the round"
MAX_REDIRECTS = 8
SHOWN_REFUSALS = 3


class Stage(enum.Enum):
    """The stages of one peer's search for a group."""

    IDLE = "idle"
    ASKING = "asking"
    LEADING = "leading"
    GROUPED = "grouped"


# events


@dataclass(frozen=True)
class Due:
    """This peer's own step is due: look for a group."""

    member: Member
    patience_s: float  # how long to wait for the others, in the first attempt after a calm round


@dataclass(frozen=True)
class Ended:
    """This peer's search was cancelled before it found a group."""


@dataclass(frozen=True)
class Asked:
    """Another peer asks for a place in the group that this one leads."""

    member: Member
    patience_s: float  # how long that peer waits for this peer's own training loop


@dataclass(frozen=True)
class Withdrew:
    """A peer that has asked for a place no longer waits for it, or is gone."""

    peer_id: PeerId


@dataclass(frozen=True)
class Formed:
    """The asked leader's group has formed with this peer."""


@dataclass(frozen=True)
class SentOn:
    """The asked leader follows another one itself."""

    to: PeerId


@dataclass(frozen=True)
class Failed:
    """The asked leader gives no place."""

    leader: PeerId
    code: str
    reason: str


@dataclass(frozen=True)
class Called:
    """Another peer calls this one to the round that it leads."""

    by: PeerId


@dataclass(frozen=True)
class Follows:
    """A peer that was called will ask for a place, or says which leader it follows."""

    peer_id: PeerId
    leader: PeerId | None = None


@dataclass(frozen=True)
class CallFailed:
    """A peer that was called does not come."""

    peer_id: PeerId
    code: str
    reason: str


@dataclass(frozen=True)
class RoundOver:
    """The round that was found is over."""

    leader: PeerId
    is_committed: bool  # and this peer has the result


@dataclass(frozen=True)
class Looked:
    """A little time has passed; the attendees may have changed."""


Event: TypeAlias = (
    Due | Ended | Asked | Withdrew | Formed | SentOn | Failed | Called | Follows | CallFailed | RoundOver | Looked
)


# actions


@dataclass(frozen=True)
class Ask:
    """Ask a leader for a place, in place of the one that was asked before."""

    leader: PeerId
    patience_s: float


@dataclass(frozen=True)
class Check:
    """Check that the asked leader still answers; :class:`Failed` follows if not."""

    leader: PeerId


@dataclass(frozen=True)
class Call:
    """Call a peer to the round."""

    peer_id: PeerId


@dataclass(frozen=True)
class CallLoop:
    """Call this peer's own training loop."""


@dataclass(frozen=True)
class SendOn:
    """Answer peers that have asked here: this peer follows another leader."""

    peers: tuple[PeerId, ...]
    leader: PeerId


@dataclass(frozen=True)
class Refuse:
    """Answer peers that have asked here: they get no place."""

    peers: tuple[PeerId, ...]
    code: str
    reason: str


@dataclass(frozen=True)
class Close:
    """The group has formed, and this peer leads it: send it to all members."""

    members: tuple[Member, ...]
    late: Late
    missing: frozenset[PeerId]  # members that were waited for in vain


@dataclass(frozen=True)
class Missing:
    """A peer cannot be reached, or cannot take part: do not expect it before its next record."""

    peer_id: PeerId


@dataclass(frozen=True)
class Abort:
    """The attempt ends without a group."""

    reason: str
    blamed: tuple[PeerId, ...] = ()
    is_nobody_there: bool = False


Action: TypeAlias = Ask | Check | Call | CallLoop | SendOn | Refuse | Close | Missing | Abort


def where_the_run_is(here: Position, asked: Position) -> str:
    """The reason for which a peer is refused that asks for a round which this peer has left behind."""
    if here.group_key or asked.group_key:
        return f"the run is at {name_of(here)}, not at {name_of(asked)}"
    return f"the run is at {name_of(here)}, not {asked.step}"


def name_of(position: Position) -> str:
    """A position in words: in a grid it has the number of a round."""
    return f"round {position.step} of the grid" if position.group_key else f"step {position.step}"


class Matchmaking:
    """The search of one peer, from position to position.

    Args:
        now: seconds, of any clock that does not go back; also in :meth:`on`.
        max_group_size: places in a group of a grid; other groups have no limit.

    Attributes:
        leader: the peer that this one has asked, or whose group it is in; None if there is none.
        wake_at: when :class:`Looked` is due at the latest.
    """

    def __init__(self, own_id: PeerId, now: float, max_group_size: float = math.inf) -> None:
        self.own_id = own_id
        self._max_group_size = max_group_size
        self.stage = Stage.IDLE
        self.leader: PeerId | None = None
        self.wake_at = math.inf
        self._own: Member | None = None
        self._full_s = 0.0  # patience in the first attempt after calm rounds
        self._stepped_at = now
        self._begin_anew(None)

    def _begin_anew(self, position: Position | None) -> None:
        """Forget what happened at the former position."""
        self._position = position
        self._waits: dict[PeerId, Wait] = {}  # peers that ask for a place
        self._led_at = math.inf
        self._passed_over: set[PeerId] = set()
        self._has_lost_time = False
        self._num_in_vain = 0  # attempts to which nobody came
        self._ahead: set[PeerId] = set()  # peers that said that the run went on
        self._caller: PeerId | None = None
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._tried: set[PeerId] = set()  # leaders that gave no place
        self._were_busy: set[PeerId] = set()  # those of them whose training loop had not come
        self._refusals: list[str] = []
        self._sent_to: set[PeerId] = set()  # leaders that this peer asks because they called, or others follow them
        self._followed: dict[PeerId, PeerId] = {}  # the leaders of others that were called
        self._elsewhere: set[PeerId] = set()  # peers that do not come
        self._called_at: dict[PeerId, float] = {}

    @property
    def follows(self) -> PeerId | None:
        """The leader of this peer, which may be itself; None if it has none now."""
        return self.own_id if self.stage is Stage.LEADING else self.leader

    @property
    def is_wanted(self) -> bool:
        """Whether :class:`Looked` should come: others wait for what this peer does."""
        return self.stage is Stage.LEADING or bool(self._waits)

    def on(self, event: Event, now: float, who: Attendees) -> list[Action]:
        """Take an event in; returns what to do. ``who`` is what is known of the attendees now."""
        actions = self._moved(who) if who.position != self._position else []
        match event:
            case Due(member, full_s):
                self._own = member
                self._full_s = full_s
                self._begin_attempt()
                actions += self._seek(now, who)
            case Ended():
                if self.stage is Stage.ASKING and self.leader is not None:
                    self._passed_over.add(self.leader)  # this leader has used up the peer's time
                    self._has_lost_time = True
                actions += self._end()
            case Asked():
                actions += self._asked(event, now, who)
            case Withdrew(peer_id):
                actions += self._withdrew(peer_id, now, who)
            case Formed() if self.stage is Stage.ASKING:
                self.stage, self._own = Stage.GROUPED, None
            case SentOn(to) if self.stage is Stage.ASKING:
                actions += self._sent_on(to, now, who)
            case Failed() if self.stage is Stage.ASKING and event.leader == self.leader:
                actions += self._failed(event, now, who)
            case Called(by):
                actions += self._called(by, now, who)
            case Follows(peer_id, leader):
                actions += self._heard(peer_id, leader, now, who)
            case CallFailed():
                actions += self._call_failed(event, now, who)
            case RoundOver(leader, is_committed):
                actions += self._round_over(leader, is_committed, now)
            case Looked():
                actions += self._gather(now, who)
        return actions

    # this peer's own search

    def _moved(self, who: Attendees) -> list[Action]:
        """Begin anew at another position; peers that asked at the former one are behind."""
        actions: list[Action] = []
        if self._waits and self._position is not None:
            actions.append(Refuse(tuple(self._waits), BEHIND, where_the_run_is(who.position, self._position)))
        if self._own is not None:
            actions.append(Abort("this peer has gone to another position meanwhile"))
        self.stage = Stage.IDLE
        self.leader = None
        self._own = None
        self._begin_anew(who.position)
        return actions

    def _seek(self, now: float, who: Attendees) -> list[Action]:
        """Ask the first leader that is left, or lead."""
        left = [leader for leader in who.leaders if leader not in self._tried]
        if self._passed_over.issuperset(left):
            self._passed_over.clear()  # all have failed: perhaps they can lead now
        leader = next((leader for leader in left if leader not in self._passed_over), None)
        leader = self._better(leader, who)
        if leader is None:
            return self._abort(self._why_nobody_leads(who), tuple(sorted(self._tried)))
        return self._lead(now, who) if leader == self.own_id else self._ask(leader, who)

    def _better(self, leader: PeerId | None, who: Attendees) -> PeerId | None:
        """Prefer the peer that has called, which may be unknown here, if it comes before ``leader`` in the order."""
        caller = self._caller
        if caller is None or caller in self._tried:
            return leader
        return caller if leader is None or self._leads_before(caller, leader, who) else leader

    def _why_nobody_leads(self, who: Attendees) -> str:
        if self._tried or who.hosts:
            return self._unless_busy("no peer that could lead a group can be reached from here")
        num = len(who.members | who.guests) + 1
        if num == 1:
            return "this peer cannot be dialled, and no other peer can be reached"
        return f"none of the {num} peers can be dialled: all are in client mode; at least one must accept connections"

    def _ask(self, leader: PeerId, who: Attendees) -> list[Action]:
        self.stage, self.leader = Stage.ASKING, leader
        others = tuple(self._waits)
        self._waits = {}
        actions: list[Action] = [Ask(leader, self._patience(who))]
        if others:
            actions.append(SendOn(others, leader))
        return actions

    def _lead(self, now: float, who: Attendees) -> list[Action]:
        self.stage, self.leader = Stage.LEADING, None
        self._led_at = now
        return self._gather(now, who)

    def _patience(self, who: Attendees) -> float:
        num_failed = self._num_in_vain + (0 if who.is_open else len(self._passed_over))
        return patience_s(self._full_s, who.num_troubled, num_failed, who.batch_s)

    def _abort(self, reason: str, blamed: tuple[PeerId, ...] = (), *, is_nobody_there: bool = False) -> list[Action]:
        return [*self._end(BUSY, reason), Abort(reason, blamed, is_nobody_there)]

    def _went_on(self, reason: str) -> list[Action]:
        return [*self._end(BEHIND, reason), Abort(f"the run went on without this peer: {reason}")]

    def _end(self, code: str = BUSY, reason: str = "the leader's own attempt has ended") -> list[Action]:
        """End this peer's own search, and refuse all that have asked here: they go elsewhere."""
        if self.stage in (Stage.ASKING, Stage.LEADING):
            self.stage, self.leader = Stage.IDLE, None
        self._own = None
        others = tuple(self._waits)
        self._waits = {}
        self._elsewhere.update(others)
        return [Refuse(others, code, reason)] if others else []

    def _sent_on(self, to: PeerId, now: float, who: Attendees) -> list[Action]:
        by = self.leader
        assert by is not None
        if to == self.own_id:
            return self._lead(now, who)
        if to in self._tried:
            self._tried.add(by)
            return self._seek(now, who)
        if not self._may_be_sent_to(to):
            return self._abort(f"the others follow peer {to}, which gives this one no place", (to,))
        self._passed_over.discard(to)
        return self._follow(to, who)

    def _may_be_sent_to(self, leader: PeerId) -> bool:
        """Whether this peer asks a leader out of turn, as others say: once each, and not endlessly many."""
        return leader not in self._sent_to and len(self._sent_to) < MAX_REDIRECTS

    def _follow(self, leader: PeerId, who: Attendees) -> list[Action]:
        self._sent_to.add(leader)
        return self._ask(leader, who)

    def _failed(self, failed: Failed, now: float, who: Attendees) -> list[Action]:
        leader, reason = failed.leader, failed.reason
        self._tried.add(leader)
        if failed.code == BUSY:
            self._were_busy.add(leader)
        self._refusals.append(reason)
        if failed.code not in (GONE, OTHER_POSITION):  # these peers may still call this one
            self._passed_over.add(leader)
        if failed.code == BEHIND and not who.position.group_key:  # in a grid only the leader's group is ahead
            return self._went_on(reason)
        if (failed.code == BARRED and who.is_barred) or (failed.code == FULL and who.position.group_key):
            return self._abort(reason)
        self._has_lost_time = self._has_lost_time or failed.code in (LATE, BUSY)
        absent: list[Action] = [Missing(leader)] if failed.code in (GONE, BUSY, OTHER_MANIFEST) else []
        return absent + self._seek(now, who)

    def _round_over(self, leader: PeerId, is_committed: bool, now: float) -> list[Action]:
        if is_committed:  # this peer stays grouped until it is at the next position
            self._stepped_at = now
            return []
        self.stage, self.leader = Stage.IDLE, None
        self._passed_over.add(leader)
        self._has_lost_time = True
        self._waits = {peer_id: replace(wait, since=now) for peer_id, wait in self._waits.items()}
        return []

    # others that ask

    def _asked(self, asked: Asked, now: float, who: Attendees) -> list[Action]:
        peer_id = asked.member.peer_id
        if self.stage is Stage.ASKING:
            assert self.leader is not None
            return [SendOn((peer_id,), self.leader)]
        if peer_id not in self._waits and self._is_full(who):
            reason = f"the group has its {self._max_group_size:.0f} members; try the next round"
            return [Refuse((peer_id,), FULL, reason)]
        self._elsewhere.discard(peer_id)
        since = self._waits[peer_id].since if peer_id in self._waits else now
        self._waits[peer_id] = Wait(asked.member, since, now + asked.patience_s)
        is_call = self.stage is Stage.IDLE and who.heeds(peer_id)
        return [*([CallLoop()] if is_call else []), *self._gather(now, who)]

    def _is_full(self, who: Attendees) -> bool:
        return bool(who.position.group_key) and len(self._waits) + 1 >= self._max_group_size  # one place is this peer's

    def _withdrew(self, peer_id: PeerId, now: float, who: Attendees) -> list[Action]:
        for noted in (self._waits, self._called_at):
            noted.pop(peer_id, None)
        return self._gather(now, who)

    def _gather(self, now: float, who: Attendees) -> list[Action]:
        """Call the others, and close the group once all that are waited for are here, or their time is over."""
        self.wake_at = math.inf
        if self.stage is Stage.IDLE:
            return self._wait_for_loop(now, who)
        if self.stage is not Stage.LEADING:
            return []
        if self._is_full(who):
            return self._close(frozenset(), frozenset(), who)
        away = self._waits.keys() | self._elsewhere | self._ahead
        members, guests = who.members - away, who.guests - away
        until = leader_waits(who, self._waits, self._patience(who), stepped_at=self._stepped_at, led_at=self._led_at)
        if now >= until.far:
            members, guests = members - who.far, guests - who.far
        if (members and now < until.members) or (guests and now < until.guests):
            self.wake_at = until.members if members else until.guests
            if (members | guests) & who.far:
                self.wake_at = min(self.wake_at, until.far)
            return self._call_all(now, who)
        return self._close(members, guests, who)

    def _wait_for_loop(self, now: float, who: Attendees) -> list[Action]:
        """Wait for this peer's training loop: refuse each peer that has asked once its own time is over."""
        over = tuple(peer_id for peer_id, wait in self._waits.items() if now >= wait.until)
        for peer_id in over:
            del self._waits[peer_id]
        self._elsewhere.update(over)
        self.wake_at = min((wait.until for wait in self._waits.values()), default=math.inf)
        calls = self._call_all(now, who, self._elsewhere) if half_came_at(who, self._waits) < math.inf else []
        return [*([Refuse(over, BUSY, LOOP_AWAY)] if over else []), *calls]

    def _call_all(self, now: float, who: Attendees, without: Collection[PeerId] = ()) -> list[Action]:
        due = sorted((who.members | who.guests) - self._waits.keys() - who.far.union(without))
        return [call for peer_id in due for call in self._call(peer_id, now)]

    def _call(self, peer_id: PeerId, now: float) -> list[Action]:
        if now < self._called_at.get(peer_id, -math.inf) + MOMENT_S:
            return []  # after that it is called again: it may have been in a round, or followed another leader
        self._called_at[peer_id] = now
        return [Call(peer_id)]

    def _close(self, members: frozenset[PeerId], guests: frozenset[PeerId], who: Attendees) -> list[Action]:
        if not self._waits:
            return self._nobody_came(members, who)
        assert self._own is not None
        late = Late.GUESTS if guests and who.waits_for_guests else Late.NOBODY
        late = Late.MEMBERS if members or self._has_lost_time else late
        group = [self._own, *(wait.member for wait in self._waits.values())]
        self.stage = Stage.GROUPED
        self.leader = self.own_id
        self._own = None
        self._waits = {}
        return [Close(tuple(sorted(group, key=lambda member: member.peer_id)), late, members)]

    def _nobody_came(self, members: frozenset[PeerId], who: Attendees) -> list[Action]:
        followed = sorted(set(self._followed.values()), key=who.rank)
        for leader in followed:
            if self._may_be_sent_to(leader) and leader != self.own_id:
                return self._follow(leader, who)
        if members:
            number = len(members)
            reason = f"none of the {number} expected peers came" if number > 1 else "the expected peer did not come"
            absent: list[Action] = [Missing(peer_id) for peer_id in sorted(members)]
            self._has_lost_time = True
            self._num_in_vain += 1
            return absent + self._abort(self._with_refusals(reason), tuple(sorted(members)))
        return self._abort(self._unless_busy("no other peer can be reached"), is_nobody_there=True)

    def _unless_busy(self, unreachable: str) -> str:
        """Why nobody is there: what leaders have answered, if one was reached, and else that none can be reached."""
        return self._with_refusals("" if self._were_busy else unreachable)

    def _with_refusals(self, reason: str) -> str:
        reasons = filter(None, [reason, *self._refusals])
        return "; ".join(list(dict.fromkeys(reasons))[: 1 + SHOWN_REFUSALS])

    # calls

    def _called(self, by: PeerId, now: float, who: Attendees) -> list[Action]:
        if by in self._were_busy:  # its training loop has come: until then it calls no peer that it has refused
            for noted in (self._were_busy, self._tried, self._passed_over):
                noted.discard(by)
        if self.stage in (Stage.GROUPED, Stage.IDLE):
            if not who.heeds(by):
                return []
            self._caller = by
            return [CallLoop()] if self.stage is Stage.IDLE else []
        if self.stage is Stage.LEADING:
            if not self._leads_before(by, self.own_id, who):
                return []
            return self._follow(by, who)
        leader = self.leader
        assert leader is not None
        # a leader that comes before the asked one calls the asked one, too
        return [Check(leader)] if by != leader and who.heeds(by) and who.rank(leader) < who.rank(by) else []

    def _leads_before(self, one: PeerId, other: PeerId, who: Attendees) -> bool:
        is_before = who.rank(one) < who.rank(other) and one not in self._passed_over
        return is_before and self._may_be_sent_to(one)

    def _heard(self, peer_id: PeerId, leader: PeerId | None, now: float, who: Attendees) -> list[Action]:
        self._elsewhere.discard(peer_id)
        self._followed.pop(peer_id, None)
        if leader in (None, self.own_id):
            return []
        assert leader is not None
        can_move = self.stage is Stage.LEADING and (leader == peer_id or leader not in self._tried)
        if can_move and self._leads_before(leader, self.own_id, who):
            return self._follow(leader, who)
        self._followed[peer_id] = leader
        if who.rank(leader) < who.rank(self.own_id):
            if leader == peer_id or leader not in self._tried:  # else its followers find out what is wrong with it
                self._elsewhere.add(peer_id)
            return self._gather(now, who)
        is_known = leader in self._waits or leader in who.members or leader in who.guests
        calls: list[Action] = []
        if self.stage is Stage.LEADING and not is_known:
            calls = self._call(leader, now)  # that leader should come, too
        return calls + self._gather(now, who)

    def _call_failed(self, failed: CallFailed, now: float, who: Attendees) -> list[Action]:
        peer_id, absent = failed.peer_id, list[Action]()
        if failed.code in (GONE, OTHER_MANIFEST):
            absent.append(Missing(peer_id))
            if failed.code == OTHER_MANIFEST:
                self._refusals.append(failed.reason)
        elif failed.code == BEHIND:
            self._ahead.add(peer_id)
            are_many = 2 * len(self._ahead & who.members) >= len(who.members) > 0
            if are_many and self.stage is Stage.LEADING and not who.position.group_key:
                return self._went_on(failed.reason)
        if failed.code != LATE:
            self._elsewhere.add(peer_id)
        return absent + self._gather(now, who)
