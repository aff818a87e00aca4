"""The fault matrix of a round: whoever dies, whenever, the others commit in their bound, and nobody disagrees.

If it is the leader, the others abort, and commit in the round that they form again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from manyhands.averaging.rounds import CommittedRound
from manyhands.averaging.timing import TWO_DIALS_S
from manyhands.base.errors import RoundAborted
from manyhands.testing import links, stream
from tests.simulation.round_faults import (
    BOUND_S,
    CONFIG,
    LINK_MBIT_S,
    PHASES,
    ROLES,
    START_S,
    RoundWorld,
    random_departure,
)
from tests.sweeps import few_of

WITHIN_S = 1.0
"""Of virtual time, from a death in a formed group to the commit."""
AGAIN_S = 2.0
"""The same from the death of the leader: the others find out, form again, and average everything again."""
FORMING_S = 6.0
"""The same before the group has formed: who is expected is waited for."""
SILENT_S = 13.0
"""From a freeze, a crash or a cut to the commit."""
GONE_S = 10.0
"""From the begin of a round to its end, when too many of those who should be in it are in another one."""
TOO_SLOW_S = 18.0
"""From the begin of a round to the commit without one that is too slow for it: half of its time, and what follows."""
OVERDUE_S = 26.0
"""The same without a reducer that answers and sends no means: two thirds of the round's time, and what follows."""
SIZES = (4, 8)
TWO_ROLES = few_of(["reducer", "leader", "sender", "client"], 2, pytest.mark.long)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("manyhands")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def with_fault(num_peers: int, role: str, phase: str, fault: str, seed: int = 0) -> tuple[RoundWorld, str]:
    """A world in which a member has a fault when it comes to a phase; it has run to its end."""
    world = RoundWorld(num_peers, seed, max_attempts=2 if role == "leader" else 1)
    victim = world.name_of(role)
    world.start(first=victim if phase == "joining" else "")
    world.when(victim, phase, lambda: getattr(world.world, fault)(victim))
    world.run()
    assert world.fault_s is not None, "the phase was never reached"
    return world, victim


def assert_all_hold_it(world: RoundWorld, names: list[str], within_s: float) -> None:
    for name in names:
        assert world.outcomes[name].held is not None, (name, world.outcomes[name])
    assert world.fault_s is not None
    assert world.last_s(names) - world.fault_s < within_s


@pytest.mark.parametrize("num_peers", few_of(SIZES))
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("phase", PHASES)
def test_all_others_commit_when_a_member_is_killed(phase: str, role: str, num_peers: int) -> None:
    world, victim = with_fault(num_peers, role, phase, "kill")
    is_forming = phase in ("before", "joining")
    within_s = FORMING_S if is_forming else AGAIN_S if role == "leader" else WITHIN_S
    assert_all_hold_it(world, world.survivors([victim]), within_s)


@pytest.mark.parametrize("num_peers", few_of([5, 4, 8]))
@pytest.mark.parametrize("role", TWO_ROLES)
@pytest.mark.parametrize("phase", PHASES)
def test_all_others_commit_and_blame_nobody_else_when_a_member_leaves(phase: str, role: str, num_peers: int) -> None:
    world = RoundWorld(num_peers, max_attempts=2 if role == "leader" else 1)
    victim = world.name_of(role)
    world.start(first=victim if phase == "joining" else "")
    world.when(victim, phase, lambda: world.leave(victim))
    world.run()
    assert_only_it_is_missed(world, victim, FORMING_S if phase in ("before", "joining") else AGAIN_S)


@pytest.mark.parametrize("seed", few_of(range(200), 4))
def test_the_leader_leaves_at_any_moment_and_all_others_commit_together(seed: int) -> None:
    world = random_departure(seed)
    assert_only_it_is_missed(world, world.victim, 2 * AGAIN_S)


def assert_only_it_is_missed(world: RoundWorld, victim: str, within_s: float) -> None:
    others = world.survivors([victim])
    assert_all_hold_it(world, others, within_s)
    for name in others:
        assert world.blamed[name] <= {world.ids[victim]}
        manifest = world.outcomes[name].held.manifest  # type: ignore[union-attr]
        assert {world.ids[other] for other in others} <= set(manifest.members)


@pytest.mark.parametrize("role", TWO_ROLES)
@pytest.mark.parametrize("phase", PHASES)
def test_all_others_commit_when_a_member_freezes(phase: str, role: str) -> None:
    world, victim = with_fault(4, role, phase, "freeze")
    assert_all_hold_it(world, world.survivors([victim]), SILENT_S)


@pytest.mark.parametrize("role", few_of(ROLES))
@pytest.mark.parametrize("phase", PHASES[2:])
def test_all_others_commit_when_a_member_loses_its_power(phase: str, role: str) -> None:
    world, victim = with_fault(4, role, phase, "crash")
    assert_all_hold_it(world, world.survivors([victim]), SILENT_S)


@pytest.mark.parametrize("role", TWO_ROLES)
@pytest.mark.parametrize("phase", ["first chunk sent", "half sent", "before commit"])
def test_a_member_that_thaws_after_20_s_ends_its_round(phase: str, role: str) -> None:
    world = RoundWorld(4, max_attempts=2 if role == "leader" else 1)
    victim = world.name_of(role)
    world.start()

    def freeze() -> None:
        world.world.freeze(victim)
        world.world.loop.call_outside(world.world.loop.now + 20.0, world.world.thaw, victim)

    world.when(victim, phase, freeze)
    world.run()
    assert_all_hold_it(world, world.survivors([victim]), SILENT_S)
    result = world.outcomes[victim].result
    assert result is not None, "it hangs"


@pytest.mark.parametrize("role", TWO_ROLES)
@pytest.mark.parametrize("phase", ["first chunk sent", "half sent", "reducing"])
def test_a_round_commits_though_the_streams_between_two_members_are_reset(phase: str, role: str) -> None:
    """All connections between two members are reset at once, while both live."""
    world = RoundWorld(4, max_attempts=2 if role == "leader" else 1)
    victim = world.name_of(role)
    other = world.name_of("reducer" if role != "reducer" else "leader")
    world.start()
    world.when(victim, phase, lambda: world.world.network.reset(victim, other))
    world.run()
    held = [name for name in world.names if world.outcomes[name].held]
    assert len(held) >= 3
    assert all(isinstance(outcome.result, CommittedRound) for outcome in world.outcomes.values())
    assert world.last_s(world.names) - START_S < TWO_DIALS_S + WITHIN_S


@pytest.mark.parametrize("numel", few_of([100, 60_000]))
@pytest.mark.parametrize("gone", list(itertools.combinations(ROLES, 2)), ids="-".join)
def test_two_members_whose_others_have_left_for_another_group_abort_soon(gone: tuple[str, str], numel: int) -> None:
    """They were called by another leader while the answer of this one was on its way; they live, and answer calls.

    A short vector has one owner: a member that exchanges nothing with the coordinator is missed by nobody else.
    """
    world = RoundWorld(4, numel=numel)
    for role in gone:
        world.when(world.name_of(role), "formed", leave)
    world.start()
    world.run()
    assert world.fault_s is not None
    for name in world.names:
        assert isinstance(world.outcomes[name].result, RoundAborted), "two are not more than half"
    assert world.last_s(world.names) - world.fault_s < GONE_S


def leave() -> None:
    raise RoundAborted("this peer has gone elsewhere")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("is_outward", [False, True])
def test_all_others_commit_when_a_member_is_cut_off_in_one_direction(role: str, is_outward: bool) -> None:
    """Nothing reaches a member any more, or nothing comes from it; the others commit."""
    world = RoundWorld(4, max_attempts=2 if role == "leader" else 1)
    victim = world.name_of(role)
    others = world.survivors([victim])
    pairs = [(victim, other) if is_outward else (other, victim) for other in others]
    world.start()
    world.when(victim, "half sent", lambda: world.world.block(pairs))
    world.run(3 * BOUND_S)
    assert_all_hold_it(world, others, SILENT_S)


@pytest.mark.parametrize("phase", PHASES[2:7])
@pytest.mark.parametrize("num_peers", few_of(SIZES))
def test_a_split_in_halves_commits_on_neither_side_unless_it_had_before(phase: str, num_peers: int) -> None:
    world = RoundWorld(num_peers)
    left = world.names[: num_peers // 2]
    pairs = [(a, b) for a in left for b in world.survivors(left)]
    world.start()
    world.when(world.names[0], phase, lambda: world.world.block([*pairs, *((b, a) for a, b in pairs)]))
    world.run(3 * BOUND_S)
    assert all(outcome.result is not None for outcome in world.outcomes.values()), "somebody hangs"
    assert world.fault_s is not None
    assert world.last_s(world.names) - world.fault_s < BOUND_S


@pytest.mark.parametrize("phase", PHASES[3:7])
@pytest.mark.parametrize("role", TWO_ROLES)
def test_the_larger_part_of_three_to_one_commits(phase: str, role: str) -> None:
    world = RoundWorld(4, max_attempts=2 if role == "leader" else 1)
    victim = world.name_of(role)
    others = world.survivors([victim])
    pairs = [(victim, other) for other in others]
    world.start()
    world.when(victim, phase, lambda: world.world.block([*pairs, *((b, a) for a, b in pairs)]))
    world.run(3 * BOUND_S)
    assert_all_hold_it(world, others, SILENT_S)
    assert world.outcomes[victim].result is not None, "it hangs"


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
def test_clocks_that_differ_by_a_minute_change_nothing(skew_s: float) -> None:
    world = RoundWorld(4)
    world.start()
    world.world.move_clock(world.names[1], skew_s)
    world.when(world.names[0], "half sent", lambda: world.world.move_clock(world.names[2], -skew_s))
    world.run()
    assert_all_hold_it(world, world.names, WITHIN_S)


@pytest.mark.parametrize("seed", few_of(range(24), 2))
def test_all_others_commit_when_two_members_fail_at_once(seed: int) -> None:
    """Of eight, two die in phases of their own: the leader and the next rank, in a third of the cases."""
    world = RoundWorld(8, seed)
    rng = world.world.rng("two faults")
    victims = world.names[:2] if seed % 3 == 0 else rng.sample(world.names, 2)
    world.max_attempts = 3 if world.names[0] in victims else 1  # only the death of the leader costs an attempt
    world.start()
    for victim in victims:
        fault = rng.choice(["kill", "kill", "freeze", "crash"])
        world.when(
            victim, rng.choice(PHASES[2:7]), lambda fault=fault, victim=victim: getattr(world.world, fault)(victim)
        )
    world.run(3 * BOUND_S)
    assert_all_hold_it(world, world.survivors(victims), 2 * SILENT_S)


def test_survivors_end_their_round_when_one_reducer_after_the_other_dies() -> None:
    """One more goes each time the others begin to reduce its span again, until there is no majority."""
    world = RoundWorld(8)
    world.start()
    for number, victim in enumerate(world.names[1:6]):
        world.when(world.names[0], "half sent", lambda victim=victim: world.world.kill(victim)) if number == 0 else None
        if number:
            world.world.loop.call_outside(START_S + 0.25 + 0.1 * number, world.world.kill, victim)
    world.run()
    for name in world.survivors(world.names[1:6]):
        result = world.outcomes[name].result
        assert isinstance(result, (RoundAborted, CommittedRound)), "it hangs"


def test_a_slow_but_steady_peer_is_waited_for() -> None:
    """It sends twenty times slower than the others: the round takes as long as it needs, and all have its values."""
    world = RoundWorld(4, numel=600_000)
    slow = world.name_of("sender")
    world.slow[slow] = 5.0
    world.start()
    world.run()
    for name in world.names:
        held = world.outcomes[name].held
        assert held is not None
        assert held.manifest.parts == []
        assert held.blamed == ()
    assert world.last_s(world.names) - START_S > 3.5, "or it was not slow"


def test_a_silent_peer_is_dropped_within_seconds_and_blamed() -> None:
    world, victim = with_fault(4, "sender", "first chunk sent", "freeze")
    for name in world.survivors([victim]):
        held = world.outcomes[name].held
        assert held is not None
        assert held.blamed == (world.ids[victim],)
        assert world.ids[victim] in held.reason
        assert world.outcomes[name].time - START_S < TWO_DIALS_S + WITHIN_S


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("what", ["send", "reduce"])
def test_a_member_that_answers_but_gets_nothing_done_is_left_out_in_time_and_blamed(what: str, role: str) -> None:
    """Not those who owe means since they wait for it themselves."""
    world = RoundWorld(4)
    stuck = world.name_of(role)
    world.stuck[stuck] = what
    world.start()
    world.run()
    owes_means = role in ("leader", "reducer")
    reason = "is too slow for the time that this round has" if what == "send" else "answers, but sent no means for"
    within_s = OVERDUE_S if owes_means else TOO_SLOW_S
    for name in world.survivors([stuck]):
        held = world.outcomes[name].held
        assert held is not None, (name, world.outcomes[name])
        if what == "reduce" and not owes_means:
            assert held.blamed == ()
            continue
        assert held.blamed == (world.ids[stuck],), held.reason
        assert f"peer {world.ids[stuck]} {reason}" in held.reason
        assert world.outcomes[name].time - START_S < within_s
    assert world.outcomes[stuck].result is not None, "it hangs"


@pytest.mark.parametrize("num_peers", SIZES)
@pytest.mark.parametrize("role", ["leader", "reducer"])
def test_a_reducer_that_sends_different_means_is_left_out_and_blamed(role: str, num_peers: int) -> None:
    """Half of the others get other means than the rest, so no result had a majority, and nobody was blamed."""
    world = RoundWorld(num_peers)
    liar = world.name_of(role)
    world.stuck[liar] = "unlike"
    world.start()
    world.run()
    for name in world.survivors([liar]):
        held = world.outcomes[name].held
        assert held is not None, (name, world.outcomes[name])
        assert held.blamed == (world.ids[liar],), held.reason
        assert f"peer {world.ids[liar]} sent different members different means" in held.reason
        assert [held.manifest.members[rank] for rank in held.manifest.left_out] == [world.ids[liar]]
        assert world.outcomes[name].time - START_S < WITHIN_S


def test_a_reducer_that_waits_for_a_slow_peer_is_not_stuck() -> None:
    """The others get no means for most of the round: they ask those who owe them, and these get on."""
    world = RoundWorld(4, 1, numel=600_000, chunk_numel=300_000)
    slow = world.name_of("sender")
    world.slow[slow] = 1.0
    world.start()
    world.run()
    for name in world.names:
        held = world.outcomes[name].held
        assert held is not None
        assert held.manifest.parts == []
        assert held.blamed == ()
    assert world.last_s(world.names) - START_S > 15.0, "or it was not slow"


@pytest.mark.long
def test_a_slow_member_that_reduces_little_does_not_blame_members_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has all values for its small span soon, and gets no means: the others have not got its own values yet."""
    monkeypatch.setattr(links, "TURN_BYTES", 1400)
    monkeypatch.setattr(stream, "TURN_BYTES", 1400)
    world = RoundWorld(8, numel=500_000, chunk_numel=300_000)
    slow = world.name_of("reducer")
    world.slow[slow], world.believes[slow] = 16.0 / 20.0, 0.5 * LINK_MBIT_S
    world.start()
    world.run()
    for name in world.names:
        held = world.outcomes[name].held
        assert held is not None, (name, world.outcomes[name])
        assert held.blamed == (), held.reason
    assert 20.0 < world.last_s(world.names) - START_S < 25.0


@pytest.mark.parametrize("role", few_of(ROLES, 1, pytest.mark.long))
def test_a_member_that_is_too_slow_for_the_round_is_left_out_in_time(role: str) -> None:
    """At its pace it would need twice the time: the others find out after half of it, and commit."""
    world = RoundWorld(4, numel=2_000_000)
    slow = world.name_of(role)
    world.slow[slow] = 1.0
    world.start()
    world.run()
    for name in world.survivors([slow]):
        held = world.outcomes[name].held
        assert held is not None, (name, world.outcomes[name])
        assert held.blamed == (world.ids[slow],)
        assert (
            f"{world.ids[slow]} is too slow for the time that this round has: at its pace it would need" in held.reason
        )
        assert world.outcomes[name].time - START_S < TOO_SLOW_S
    assert world.outcomes[slow].result is not None, "it hangs"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kbit_s", [20, 100])
def test_a_busy_member_on_a_very_slow_link_is_not_taken_for_silent(
    kbit_s: int, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packets of all its streams take turns: a call takes seconds beside a round."""
    monkeypatch.setattr(links, "TURN_BYTES", 1400)
    monkeypatch.setattr(stream, "TURN_BYTES", 1400)
    world = RoundWorld(4, numel=8_000, config=replace(CONFIG, averaging_timeout_s=120.0))
    slow = world.name_of(role)
    world.slow[slow] = kbit_s / 1000
    world.start()
    world.run(140.0)
    for name in world.names:
        held = world.outcomes[name].held
        assert held is not None, (name, world.outcomes[name])
        assert held.manifest.parts == []
        assert held.blamed == ()


def test_the_round_ends_at_its_bound_whatever_happens() -> None:
    assert CONFIG.averaging_timeout_s < BOUND_S
