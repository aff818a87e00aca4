"""Whatever the peers of a run know of each other, whoever dies or comes late: a group, or a reason in words, soon."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from manyhands.averaging.messages import CALL, JOIN, Group, JoinRequest, JoinResponse, Position
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.errors import Refused, RoundAborted
from manyhands.base.identity import PeerId
from manyhands.testing import World, at, between
from tests.simulation.groups import AT_ONCE_S, CONFIG, ROUND_S, START, Search, Seeker, everybody, search
from tests.simulation.rounds import start_rounds
from tests.sweeps import few_of

NOTICED_S = 8.5
"""Heartbeats show so soon that a machine is gone."""
DIAL_S = 6.0
"""What a dial to a machine that is gone takes, and a little."""


def test_peers_that_know_each_other_are_one_group_at_once() -> None:
    world = search(everybody("abcdefgh", h={"is_client": True}))
    world.run()
    for name in "abcdefgh":
        assert world.members(name) == set("abcdefgh")
        assert world[name].took_s < AT_ONCE_S
    world.check_that_groups_agree()


@pytest.mark.parametrize("ahead_s", [-0.3, -0.03, 0.0, 0.03, 0.3])
def test_of_two_would_be_leaders_the_lower_leads_those_that_it_knows_and_nobody_waits_long(ahead_s: float) -> None:
    """c and d do not know of a, nor a of them; b knows all. As at the start of a run; the rest is in the next group."""
    world = search(
        [
            Seeker("a", "b", 2.0 + ahead_s),
            Seeker("b", "acd", 2.0),
            Seeker("c", "bd", 2.0),
            Seeker("d", "bc", 2.0),
        ]
    )
    world.run()
    assert world.members("a") == world.members("b") >= set("ab")
    for name in "abcd":
        assert world.members(name) or "the run is at step 1, not 0" in world[name].reasons[0]
        assert world[name].took_s < 2 * AT_ONCE_S
    world.check_that_groups_agree()


@pytest.mark.parametrize("seed", few_of(range(6), 2))
def test_two_leaders_with_followers_settle_without_a_timer(seed: int) -> None:
    """a leads d, b leads c; they hear of each other only when b is called."""
    world = search(
        [Seeker("a", "bd", 2.0), Seeker("b", "c", 1.0), Seeker("c", "b", 1.9), Seeker("d", "a", 1.0)], seed=seed
    )
    world.run()
    for name in "abcd":
        assert world[name].took_s < 2.0, "nobody waits for a timer"
    world.check_that_groups_agree()
    assert all(world.members(name) or world[name].reasons for name in "abcd")


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_others_are_one_group_after_a_leader_that_promised_places_dies(name: str) -> None:
    """It has accepted those who came, and is killed before it closes the group; d is late, so all wait for it."""
    world = search(everybody("abcd", d={"begins_s": 3.0}))
    world.world.schedule(at(2.0).kill(name))
    world.run()
    rest = set("abcd") - {name}
    for other in rest:
        assert world.members(other) == rest, world[other].reasons
    assert world["d"].took_s < AT_ONCE_S, "the others wait for d, and then for nothing"
    world.check_that_groups_agree()


def test_the_others_are_one_group_after_the_machine_of_a_leader_is_gone() -> None:
    world = search(everybody("abcd", d={"begins_s": 3.0}))
    world.world.schedule(at(2.0).crash("a"))
    world.run()
    for other in "bcd":
        assert world.members(other) == set("bcd"), world[other].reasons
        assert world[other].took_s < NOTICED_S + DIAL_S
    world.check_that_groups_agree()


def test_peers_that_learn_at_different_times_that_the_leader_is_dead_form_one_group() -> None:
    """c hears of it 0.3 s before b does, which follows a until then; the two are 1 ms apart."""
    world = search(everybody("abcd", d={"begins_s": 4.0}))
    world.world.schedule(at(2.0).kill("a"))
    for source, destination, latency_s in (("a", "b", 0.3), ("b", "a", 0.3), ("b", "c", 0.0005), ("c", "b", 0.0005)):
        link = world.world.network.link(source, destination)
        link.latency_s, link.jitter_s = latency_s, 0.0
    world.run()
    for name in "bcd":
        assert world.members(name) == set("bcd"), world[name].reasons
        assert world[name].reasons == []


def test_the_others_are_one_group_after_three_leaders_die_in_turn() -> None:
    world = search(everybody("abcdef", f={"begins_s": 4.0}))
    world.world.schedule(at(2.0).kill("a"), at(2.5).kill("b"), at(3.0).kill("c"))
    world.run()
    for other in "def":
        assert world.members(other) == set("def"), world[other].reasons
    assert world["f"].took_s < AT_ONCE_S


def test_peers_in_a_round_that_may_fail_are_waited_for() -> None:
    """b and c do not know of a, and are in a round of their own when it leads; without them it would go on alone."""
    world = search(
        [
            Seeker("a", "bcd", 1.2),
            Seeker("b", "c", 1.0, attempts=2, failures=1),
            Seeker("c", "b", 1.0, attempts=2, failures=1),
            Seeker("d", "a", 1.2),
        ]
    )
    world.run()
    for name in "abcd":
        assert world.members(name) == set("abcd"), (name, world[name].reasons)
        assert world[name].took_s < 2.0
    world.check_that_groups_agree()


def test_members_of_a_committed_round_tell_others_that_the_run_is_ahead() -> None:
    """Nobody makes a second branch from the position that it comes from."""
    world = search(
        [Seeker("a", "bcd", 1.2), Seeker("b", "c", 1.0), Seeker("c", "b", 1.0), Seeker("d", "a", 1.2)],
    )
    world.run()
    assert world.members("b") == world.members("c") == set("bc")
    for name in "ad":
        assert world.members(name) == set()
        assert world[name].took_s < 2.0
        assert any("the run is at step 1, not 0" in reason for reason in world[name].reasons), world[name].reasons


def test_a_peer_that_is_late_but_in_time_is_in_the_group() -> None:
    world = search(everybody("abc", c={"begins_s": 9.0}))
    world.run()
    for name in "abc":
        assert world.members(name) == set("abc")
    assert world["a"].took_s == pytest.approx(8.0, abs=0.5)  # from 1 s, when it began, until the last one came at 9 s


def test_a_peer_that_comes_too_late_is_told_so_at_once() -> None:
    """The others have gone on with the round; and when it is over, to the next position."""
    world = search(everybody("abc", c={"begins_s": 16.2}))
    world.run()
    assert world.members("a") == world.members("b") == set("ab")
    assert world["a"].took_s == pytest.approx(CONFIG.matchmaking_time_s, abs=0.5)
    assert world.members("c") == set()
    assert world["c"].took_s < AT_ONCE_S
    assert any("the run is at step 1, not 0" in reason for reason in world["c"].reasons), world["c"].reasons


def test_the_last_place_of_a_full_group_is_the_leaders_own() -> None:
    """It comes after the others, and they wait for it."""
    in_a_row = {"position": Position(0, b"start", "3x3 0")}
    changes = dict.fromkeys("bc", in_a_row) | {"a": in_a_row | {"begins_s": 3.0}}
    world = search(everybody("abc", **changes), config=replace(CONFIG, max_group_size=3))
    world.run()
    for name in "abc":
        assert world.members(name) == set("abc"), world[name].reasons
    assert world["a"].took_s < AT_ONCE_S


@pytest.mark.parametrize("leader_s", [1.0, 1.5])
def test_a_full_group_does_not_wait_for_peers_that_find_no_place_in_it(leader_s: float) -> None:
    """Four are expected, and the group has three places. The leader comes first, or last of the three."""
    in_a_row = {"position": Position(0, b"start", "3x3 0")}
    changes = {name: in_a_row | {"begins_s": begins_s} for name, begins_s in zip("bcd", (1.1, 1.2, 1.7), strict=True)}
    changes["a"] = in_a_row | {"begins_s": leader_s}
    world = search(everybody("abcd", **changes), config=replace(CONFIG, max_group_size=3))
    world.run()
    for name in "abc":
        assert world.members(name) == set("abc"), world[name].reasons
        assert world[name].took_s < AT_ONCE_S
    assert world.members("d") == set()
    assert world["d"].took_s < AT_ONCE_S, "it hears that it is too late"


@pytest.mark.parametrize("first_s", [1.0, 0.9])
def test_a_leader_that_does_not_begin_is_waited_for_as_long_as_anybody_and_once(first_s: float) -> None:
    """a lives and answers, but takes no part. They begin within half a second, and are patient for 1.5 s."""
    begins = dict(zip("bcdef", (first_s, 1.5, 1.1, 1.3, 1.4), strict=True))
    changes = {name: {"begins_s": at_s, "gather_s": 1.5} for name, at_s in begins.items()}
    world = search(everybody("abcdef", a={"begins_s": None}, **changes))
    world.run()
    for name, began_s in begins.items():
        assert world.members(name) == set("bcdef"), world[name].reasons
        assert world[name].reasons == []
        assert began_s + world[name].took_s < first_s + 1.5 + AT_ONCE_S


def test_a_leader_whose_round_failed_has_as_long_as_before_its_first_round_to_come_again() -> None:
    """b came to the first round after a, and comes to the second one 0.9 s before it: after a pause, but in time."""
    changes: dict[str, dict[str, object]] = {
        "a": {"begins_s": 1.0, "pause_s": 0.9},
        "b": {"begins_s": 1.1},
    }
    for change in changes.values():
        change |= {"failures": 1, "attempts": 2, "gather_s": 1.0}
    world = search(everybody("ab", **changes))
    world.run()
    for name in "ab":
        assert world.members(name) == set("ab"), world[name].reasons
        assert world[name].reasons == ["the round failed"]


@pytest.mark.parametrize("haste_s", [0.2, 0.6, 1.5])
def test_an_impatient_peer_does_not_make_others_go_on_without_a_late_leader(haste_s: float) -> None:
    """b goes on soon, and leads for as long again; the others are patient for 6 s, and a comes 2 s after them."""
    changes = {name: {"gather_s": 6.0} for name in "cd"} | {"b": {"gather_s": haste_s}, "a": {"begins_s": 3.0}}
    world = search(everybody("abcd", **changes))
    world.run()
    for name in "acd":
        assert world.members(name) >= set("acd"), world[name].reasons
        assert world[name].reasons == []
    assert world["a"].took_s < 6.0, "nobody waits longer than the others are patient"
    world.check_that_groups_agree()


def test_an_impatient_peer_gives_up_a_leader_for_itself_alone() -> None:
    """b, of which they do not know, asks before them, and goes at once; a has time until 7 s, and comes at 5 s."""
    changes: dict[str, dict[str, object]] = {
        "a": {"begins_s": 5.0, "knows": "cd"},
        "b": {"gather_s": 0.01},
        "c": {"gather_s": 6.0, "begins_s": 3.5, "knows": "ad"},
        "d": {"gather_s": 6.0, "begins_s": 3.5, "knows": "ac"},
    }
    world = search(everybody("abcd", **changes))
    world.run()
    for name in "acd":
        assert world.members(name) == set("acd"), world[name].reasons
        assert world[name].reasons == []


def test_a_leader_that_does_not_come_is_given_up_with_the_most_patient_one() -> None:
    """b goes after 2 s, and leads those who come to it a second later."""
    changes: dict[str, dict[str, object]] = {name: {"gather_s": 3.0} for name in "cd"}
    world = search(everybody("abcd", a={"begins_s": None}, b={"gather_s": 2.0}, **changes))
    world.run()
    for name in "bcd":
        assert world.members(name) == set("bcd"), world[name].reasons
        assert world[name].reasons == []


@pytest.mark.parametrize("code", ["barred", "full"])
def test_a_leader_that_refuses_everybody_is_not_followed(code: str) -> None:
    """a has the lowest id; neither was anybody to blame nor is its group full."""
    world = search(everybody("abcd"))

    def refuse() -> None:
        async def refused(remote: PeerId, request: JoinRequest) -> JoinResponse:
            raise Refused(world.ids["a"], code, "no place")

        run = RunEndpoint(world["a"].meeting.endpoint, "run")
        run.unhandle(JOIN)
        run.handle(JOIN, refused)

    world.world.loop.call_at(0.8, refuse)
    world.run()
    for name in "bcd":
        assert world.members(name) == set("bcd"), world[name].reasons


@pytest.mark.parametrize("seed", few_of([4, 7, 0, 1, 2, 3, 5, 6]))
def test_after_a_cut_between_two_peers_all_are_one_group_within_about_as_long(seed: int) -> None:
    """Each of the two has waited for the other in vain, and neither may be kept out for long by that."""
    world = World(seed)
    names = ["p0", "p1", "p2", "p3"]
    for source in names:
        for destination in set(names) - {source}:
            world.network.link(source, destination).latency_s = 0.02
    cut_s, healed_s = 10.0, 20.0
    lowest = min(names, key=lambda name: world.identity(name).peer_id)
    world.schedule(between(cut_s, healed_s).cut(lowest, min(set(names) - {lowest})))
    commits = start_rounds(world, names)
    world.run(healed_s + (healed_s - cut_s))
    assert {num_members for _, num_members in commits.times.values()} == {len(names)}
    assert min(time for time, _ in commits.times.values()) > healed_s + (healed_s - cut_s) / 2


@pytest.mark.parametrize("comes_ms", few_of(range(2400, 2800, 40), 3))
def test_a_leader_that_begins_as_it_is_given_up_is_in_the_group_or_hears_that_it_is_late(comes_ms: int) -> None:
    """The others are patient until 2.5 s; whatever they find, they agree, and nobody waits for a second time."""
    for begins_ms in range(comes_ms, comes_ms + 40, 4):
        changes = {name: {"gather_s": 1.5} for name in "bcd"}
        world = search(everybody("abcd", a={"begins_s": begins_ms / 1000}, **changes), seed=begins_ms)
        world.run()
        world.check_that_groups_agree()
        for name in "bcd":
            assert world.members(name) >= set("bcd"), (begins_ms, name, world[name].reasons)
            assert world[name].took_s < 1.5 + AT_ONCE_S
        assert "a" in world.members("b") or any("the run is at step 1" in reason for reason in world["a"].reasons)
        assert world["a"].took_s < ROUND_S + AT_ONCE_S, "it waits for the end of their round"


@pytest.mark.parametrize("first", ["b", "c", "d"])
@pytest.mark.parametrize("patience_s", [1.5, None])
def test_a_peer_that_was_refused_a_moment_before_the_leader_begins_is_in_its_group(
    first: str, patience_s: float | None
) -> None:
    """It has waited since 1.0 s, the other two since 1.2 s, and all three are patient for 1.5 s."""
    changes = {name: {"gather_s": 1.5, "begins_s": 1.0 if name == first else 1.2} for name in "bcd"}
    world = search(everybody("abcd", a={"begins_s": 2.65, "gather_s": patience_s}, **changes))
    world.run()
    for name in "abcd":
        assert world.members(name) == set("abcd"), (name, world[name].reasons)
        assert world[name].took_s < 1.5 + AT_ONCE_S / 2, "nobody waits for a second time"


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_peer_of_another_step_hears_where_the_run_is(name: str) -> None:
    ahead = {"position": Position(7, b"later")}
    world = search(everybody("abc", **{other: ahead for other in "abc" if other != name}))
    world.run()
    assert any("the run is at step 7, not 0" in reason for reason in world[name].reasons), world[name].reasons
    assert world[name].took_s < AT_ONCE_S
    for other in set("abc") - {name}:
        assert world.members(other) == set("abc") - {name}, world[other].reasons


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_peer_of_another_manifest_is_refused_in_words_and_waited_for_by_nobody(name: str) -> None:
    world = search(everybody("abc", **{name: {"fingerprint": b"other"}}))
    world.run()
    rest = set("abc") - {name}
    for other in rest:
        assert world.members(other) == rest, world[other].reasons
        assert world[other].took_s < AT_ONCE_S
    assert any("the model or the settings differ" in reason for reason in world[name].reasons), world[name].reasons
    assert world[name].took_s < AT_ONCE_S


@pytest.mark.parametrize("run_members", ["", "dfg"])
@pytest.mark.parametrize("seed", few_of(range(12), 2))
def test_peers_with_different_views_of_the_swarm_all_find_a_group_or_a_reason(seed: int, run_members: str) -> None:
    """Each knows its neighbours in a ring, and some others. All find a group or a reason, none waits for a timer."""
    rng = random.Random(seed)
    names = "abcdefgh"
    order = rng.sample(names, len(names))
    knows = {
        name: {order[index - 1], order[(index + 1) % len(order)], *rng.sample(names, 2)} - {name}
        for index, name in enumerate(order)
    }
    world = search(
        [
            Seeker(name, sorted(knows[name]), rng.uniform(1.0, 1.5), attempts=6, run_members=run_members)
            for name in names
        ],
        seed=seed,
    )
    world.run()
    world.check_that_groups_agree()
    for name in names:
        assert world.members(name) or world[name].reasons
        assert world[name].took_s < 4.0, (name, world[name].reasons)
    largest = max(len(world.members(name)) for name in names)
    assert largest >= (2 if run_members else 3), "the others come to the next one"


@pytest.mark.parametrize("client", ["", "c"])
def test_one_of_the_peers_whose_values_are_in_the_state_leads(client: str) -> None:
    """a and b have the lowest ids and call the others, but are new."""
    world = search(
        everybody("abcde", **{name: {"run_members": "cde", "is_client": name == client} for name in "abcde"})
    )
    world.run()
    for name in "abcde":
        assert world.members(name) == set("abcde"), world[name].reasons
        assert world[name].took_s < AT_ONCE_S
        assert world[name].group.leader == world.ids["d" if client else "c"]  # type: ignore[union-attr]
    world.check_that_groups_agree()


@pytest.mark.parametrize("gone", [["b", "c"], ["c"]])
def test_other_peers_lead_if_no_peer_whose_values_are_in_the_state_can(gone: list[str]) -> None:
    """c is a client in one case."""
    changes = {name: {"run_members": "bc"} for name in "ade"} | {
        name: {"run_members": "bc", "begins_s": None} for name in gone
    }
    world = search(everybody("abcde", **{"b": {"run_members": "bc", "is_client": True}, **changes}))
    for name in gone:
        world.world.schedule(at(0.9).kill(name))
    world.run()
    rest = set("abcde") - set(gone)
    for name in rest:
        assert world.members(name) == rest, world[name].reasons
        assert world[name].took_s < DIAL_S
        assert world[name].group.leader == world.ids["a"]  # type: ignore[union-attr]


@pytest.mark.parametrize(("run_members", "num_calls"), [("", 1), ("c", 0), ("b", 0)])
def test_a_newcomer_calls_nobody_to_a_round_that_others_can_lead(run_members: str, num_calls: int) -> None:
    """c asks b for a place or calls it, and b has not read yet that the step is due."""
    world = search(everybody("bc", b={"begins_s": None, "run_members": run_members}, c={"run_members": run_members}))
    world.run(5.0)
    assert min(world["b"].meeting.num_calls, 1) == num_calls


def test_a_peer_that_does_not_answer_the_leader_is_not_waited_for_because_of_a_fresh_record() -> None:
    """d is alive, but serves no calls of this run; c comes 0.3 s later."""
    world = search(everybody("abcd", c={"begins_s": 1.3}, d={"begins_s": None}))

    def deaf() -> None:
        run = RunEndpoint(world["d"].meeting.endpoint, "run")
        run.unhandle(CALL)
        run.unhandle(JOIN)

    def publish() -> None:
        world["a"].meeting.missing.remove(world.ids["d"])

    world.world.loop.call_at(0.8, deaf)
    world.world.loop.call_at(1.25, publish)
    world.run()
    for name in "abc":
        assert world.members(name) == set("abc"), world[name].reasons
    assert world["c"].took_s < AT_ONCE_S / 2


def test_a_swarm_of_clients_only_gives_up_at_once_with_the_reason() -> None:
    world = search(everybody("abc", a={"is_client": True}, b={"is_client": True}, c={"is_client": True}))
    world.run()
    for name in "abc":
        (reason,) = world[name].reasons
        assert reason == (
            "none of the 3 peers can be dialled: all are in client mode; at least one must accept connections"
        )
        assert world[name].took_s == 0.0


def test_one_host_is_enough_for_clients() -> None:
    clients = {name: {"is_client": True} for name in "abd"}
    world = search(everybody("abcd", **clients))
    world.run()
    for name in "abcd":
        assert world.members(name) == set("abcd")
        assert world[name].took_s < AT_ONCE_S


@pytest.mark.parametrize("name", ["a", "c"])
@pytest.mark.parametrize("is_client", [False, True])
def test_a_peer_that_nobody_can_reach_says_so_and_holds_nobody_up(name: str, is_client: bool) -> None:
    """A firewall drops what it sends and what is sent to it."""
    world = search(everybody("abcde", **{name: {"is_client": is_client}}))
    rest = set("abcde") - {name}
    world.world.schedule(between(0.1, 110.0).partition({name}, rest))
    world.run()
    for other in rest:
        assert world.members(other) == rest, world[other].reasons
        assert world[other].took_s < DIAL_S, "nobody can ask a client where it is, but it is connected to nobody"
    (reason,) = world[name].reasons
    assert "can be reached" in reason or "expected peers" in reason
    assert world[name].took_s < DIAL_S


def test_a_client_that_comes_late_is_waited_for_as_long_as_it_is_connected_to_the_leader() -> None:
    """It may still compute."""
    world = search(everybody("abcd", d={"is_client": True, "begins_s": 9.0, "guest_of": "a"}))
    world.run()
    for name in "abcd":
        assert world.members(name) == set("abcd"), world[name].reasons
    assert world["a"].took_s == pytest.approx(8.0, abs=0.5)  # from 1 s, when it began, until the last one came at 9 s


def test_a_peer_that_expects_only_a_client_that_is_gone_gives_up_soon() -> None:
    world = search(everybody("ab", b={"is_client": True, "begins_s": None}))
    world.run()
    (reason,) = world["a"].reasons
    assert reason == "no other peer can be reached"
    assert world["a"].took_s < DIAL_S


def test_a_peer_at_a_closed_port_is_left_out_at_once() -> None:
    world = search(everybody("abc"))
    world.world.schedule(at(0.9).kill("b"))
    world.run()
    for name in "ac":
        assert world.members(name) == set("ac")
        assert world[name].took_s < AT_ONCE_S


def test_a_liar_that_says_that_the_run_went_on_stops_the_others_only_for_seconds() -> None:
    """No record shows the later position, so there is nothing to catch up with."""
    config = replace(CONFIG, matchmaking_time_s=2.0)
    liar = {"position": Position(7, b"made up"), "begins_s": None}
    world = search(everybody("abc", a=liar, b={"attempts": 40}, c={"attempts": 40}), config=config)
    world.run()
    for name in "bc":
        assert world.members(name) == {"b", "c"}, world[name].reasons
        assert all("the run is at step 7" in reason for reason in world[name].reasons)
    assert world["b"].group is not None
    assert len(world["b"].reasons) < 25


@pytest.mark.parametrize("first_ms", few_of(range(1840, 1960, 40)))
def test_a_peer_called_to_another_group_as_its_own_closes_is_in_only_one_of_them(first_ms: int) -> None:
    """b waits for d, which comes at 2.0 s; about then a calls c, which waits with b. Nobody leaves a closed group."""
    for ahead_ms in range(first_ms, first_ms + 40, 2):
        world = search(
            [
                Seeker("a", "c", ahead_ms / 1000),
                Seeker("b", "cd", 1.0),
                Seeker("c", "bd", 1.0),
                Seeker("d", "bc", 2.0),
            ],
            seed=ahead_ms,
        )
        world.run()
        for name in "abcd":
            for other in world.members(name):
                assert world.members(other) == world.members(name), f"{other} is not in the group that {name} has"
        assert world["d"].took_s < 2 * AT_ONCE_S, "b calls c again after a second"


def test_a_peer_called_away_before_its_leader_reaches_the_position_is_not_in_two_groups() -> None:
    """b is in a round with x, after which c and d wait for it; a calls c about when that round ends."""
    there = Position(1, b"after the round")
    waits = {name: {"begins_s": 1.2, "position": there, "knows": knows} for name, knows in (("c", "bd"), ("d", "bc"))}
    for ahead_ms in range(1460, 1520, 4):
        calls = {"begins_s": ahead_ms / 1000, "position": there, "knows": "c"}
        rounds = {"b": {"knows": "x"}, "x": {"knows": "b"}}
        world = search(everybody("abcdx", a=calls, **waits, **rounds), seed=ahead_ms)
        next_groups: list[Group] = []
        world.world.loop.call_at(1.4, lead_next_round, world, next_groups)
        world.run(40.0)
        for led in next_groups:  # none if c has told that the run went on
            if led.rank_of(world.ids["c"]) is not None:
                assert world["c"].group == led, f"called at {ahead_ms} ms, c is in two groups"


def lead_next_round(world: Search, groups: list[Group]) -> None:
    """Have b look for its next group, with c and d, as soon as it has made its first round."""
    leader, loop = world["b"], world.world.loop
    if leader.meeting.at == START:
        loop.call_later(0.002, lead_next_round, world, groups)
        return

    async def find() -> None:
        assert leader.matchmaker is not None
        with suppress(RoundAborted):
            groups.append(await leader.matchmaker.find_group(1.0, 0))

    leader.meeting.others = {world.ids[name]: False for name in "cd"}
    leader.finding = loop.create_task(find())
