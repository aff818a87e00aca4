"""What is credited, and what liars get."""

from __future__ import annotations

import random

import msgspec
import pytest

from manyhands.averaging.messages import Position, short_id
from manyhands.base.identity import PeerId
from manyhands.monitor import credit as credit_module
from manyhands.monitor.credit import PATIENCE_S, Credit, CreditedStep, Total, leaders_of
from manyhands.optim.metrics import (
    NUM_LISTING,
    NUM_STEPS,
    AccountRecord,
    RecentSteps,
    digest_of_step,
    packed,
    unpacked,
)
from tests.unit.monitor.published import ROSTER, Peers, after, start


def look(credit: Credit, peers: Peers, now: float = 0.0, **others: Peers) -> None:
    accounts, positions = dict(peers.accounts), dict(peers.positions)
    for more in others.values():
        accounts |= more.accounts
        positions |= more.positions
    credit.look(accounts, positions, now)


def samples_of(credit: Credit, name: str) -> int:
    return credit.total_of(PeerId(name)).samples


def lie(name: str, position: Position, shares: dict[str, int], before: bytes) -> AccountRecord:
    """The account of a peer that claims a list of its own for the step that led to a position."""
    lists = packed({short_id(PeerId(peer)): samples for peer, samples in shares.items()})
    steps = RecentSteps(PeerId(name))
    steps.add(
        Position(position.step - 1, before), position, {PeerId(peer): n for peer, n in shares.items()}, roster=ROSTER
    )
    (made,) = steps.listed()
    assert made.shares == lists
    return AccountRecord(step=position.step, steps=[made])


def test_the_credit_of_each_peer_is_the_sum_of_its_samples_in_committed_steps() -> None:
    rng, names = random.Random(1), ["a", "b", "c", "d", "e"]
    peers, credit = Peers(names), Credit()
    for number in range(40):
        peers.commit({name: rng.randrange(1, 2000) for name in names if name != names[number % 5]} | {"a": 3.0})
        for name in names:  # the one that was left out has loaded the state
            peers.positions[PeerId(name)] = peers.positions[PeerId("a")]
        if number % 6 == 5:
            look(credit, peers, number)
    look(credit, peers, 40.0)
    assert {PeerId(name): samples_of(credit, name) for name in names} == peers.used
    assert credit.num_samples == sum(peers.used.values())
    assert credit.newest_step == 40
    look(credit, peers, 41.0)
    assert credit.num_samples == sum(peers.used.values()), "each step counts once"


def test_a_step_counts_once_more_than_half_of_its_contributors_have_published_it() -> None:
    peers, credit = Peers("abcd"), Credit()
    peers.commit({"a": 8, "b": 8, "c": 8, "d": 8}, without="bcd")
    look(credit, peers)
    assert credit.num_samples == 0
    peers = Peers("abcd")
    peers.commit({"a": 8, "b": 8, "c": 8, "d": 8}, without="cd")
    look(credit, peers)
    assert credit.num_samples == 0, "two of four"
    peers = Peers("abcd")
    peers.commit({"a": 8, "b": 8, "c": 8, "d": 8}, without="d")
    look(credit, peers)
    assert credit.num_samples == 32
    assert samples_of(credit, "d") == 8, "the others say that it contributed"


def test_a_liar_gets_no_more_than_what_the_others_say() -> None:
    peers, credit = Peers("abc"), Credit()
    reached = peers.commit({"a": 8, "b": 8, "c": 8})
    accounts = peers.accounts | {PeerId("c"): lie("c", reached, {"a": 8, "b": 8, "c": 8000}, b"")}
    credit.look(accounts, peers.positions, 0.0)
    assert samples_of(credit, "c") == 8
    accounts = peers.accounts | {PeerId("c"): lie("c", reached, {"c": 8000}, b"")}
    credit.look(accounts, peers.positions, 1.0)
    assert samples_of(credit, "c") == 8


def test_a_liar_that_publishes_first_is_corrected() -> None:
    peers, credit = Peers("abc"), Credit()
    reached = peers.commit({"a": 8, "b": 8, "c": 8})
    credit.look({PeerId("c"): lie("c", reached, {"c": 8000}, b"")}, peers.positions, 0.0)
    credit.look(peers.accounts, peers.positions, 1.0)
    assert [samples_of(credit, name) for name in "abc"] == [8, 8, 8]


def test_a_liar_that_publishes_first_gets_nothing_in_a_run_of_two() -> None:
    peers, credit = Peers("ac"), Credit()
    reached = peers.commit({"a": 8, "c": 8}, without="c")
    liar = {PeerId("c"): lie("c", reached, {"c": 8000}, b"")}
    credit.look(liar, peers.positions, 0.0)
    credit.look(peers.accounts | liar, peers.positions, 1.0)
    assert credit.num_samples == 0


def test_a_liar_cannot_take_steps_that_only_other_monitors_have_seen() -> None:
    peers, liar, credit = Peers("ab"), Peers("c"), Credit()
    for _ in range(NUM_STEPS + 1):
        left = peers.positions[PeerId("a")]
        reached = peers.commit({"a": 8, "b": 8})
        liar.steps[PeerId("c")].add(left, reached, {PeerId("c"): 8000})
        if reached.step == 1:
            old = liar.steps[PeerId("c")].listed()
    look(credit, peers)
    credit.add_told([CreditedStep(1, old[0].after, 0, packed({short_id(PeerId("a")): 8}))])
    credit.look(peers.accounts | {PeerId("c"): AccountRecord(step=9, steps=old)}, peers.positions, 1.0)
    assert (samples_of(credit, "a"), samples_of(credit, "c")) == (8 + 8 * NUM_STEPS, 0)


def test_a_liar_cannot_take_the_step_that_another_peer_has_made_alone() -> None:
    for name in (f"liar {number}" for number in range(16)):  # whatever the order of the digests
        peers, credit = Peers(["a"]), Credit()
        reached = peers.commit({"a": 8})
        accounts = peers.accounts | {PeerId(name): lie(name, reached, {name: 8000}, b"")}
        credit.look(accounts, peers.positions | {PeerId(name): reached}, 0.0)
        assert (samples_of(credit, "a"), samples_of(credit, name)) == (8, 0)


def test_a_liar_that_is_one_step_ahead_of_all_others_alone_gets_nothing() -> None:
    peers, credit = Peers("abc"), Credit()
    for _ in range(3):
        reached = peers.commit({"a": 8, "b": 8, "c": 8})
    look(credit, peers)
    ahead = Peers("x")
    ahead.commit({"x": 10**9}, left=reached)
    look(credit, peers, 1.0, ahead=ahead)
    assert (credit.num_samples, credit.newest_step, samples_of(credit, "x")) == (72, 3, 0)


def test_three_false_ids_get_nothing_for_a_round_among_themselves() -> None:
    peers, credit = Peers("abcd"), Credit()
    reached = peers.commit({"a": 8, "b": 8, "c": 8, "d": 8})
    forged = {"x": 900, "y": 900, "z": 900}
    same_place = {PeerId(name): lie(name, reached, forged, b"") for name in forged}
    credit.look(peers.accounts | same_place, peers.positions | dict.fromkeys(same_place, reached), 0.0)
    assert credit.num_samples == 32, "at the true lineage"
    elsewhere = Peers("xyz")
    elsewhere.commit(forged, left=Position(10**6, b"far ahead"))
    credit.look(peers.accounts | elsewhere.accounts, peers.positions | elsewhere.positions, 1.0)
    assert credit.num_samples == 32, "a branch of their own, however far"
    assert samples_of(credit, "x") == 0


def test_groups_of_a_grid_are_credited_side_by_side_and_no_peer_twice() -> None:
    left, reached = start(), Position(1, b"the same after all groups of a grid")
    groups: list[dict[PeerId, float]] = [{PeerId(name): 8.0 for name in group} for group in ("abc", "def", "ga", "h")]
    accounts = {}
    for group in groups:
        for peer_id in group:
            steps = RecentSteps(peer_id)
            steps.add(left, reached, group, is_grid=True)
            accounts.setdefault(peer_id, AccountRecord(step=1, steps=steps.listed()))
    credit = Credit()
    credit.look(accounts, dict.fromkeys(accounts, reached), 0.0)
    assert {name: samples_of(credit, name) for name in "abcdefgh"} == dict.fromkeys("abcdef", 8) | {"g": 0, "h": 0}


def test_credit_follows_a_run_that_goes_on_from_an_earlier_checkpoint() -> None:
    peers, credit, checkpoint = Peers("ab"), Credit(), start()
    for number in range(6):
        reached = peers.commit({"a": 10, "b": 20})
        if number == 3:
            checkpoint = reached
    look(credit, peers)
    assert credit.num_samples == 180
    again = Peers("ab")
    again.positions = dict.fromkeys(again.positions, checkpoint)
    look(credit, again, 10.0)
    assert credit.num_samples == 180, "a read may be late"
    look(credit, again, 10.0 + PATIENCE_S)
    assert credit.num_samples == 120
    again.commit({"a": 1, "b": 1}, salt="another")
    look(credit, again, 80.0)
    assert credit.num_samples == 122


def test_the_steps_of_a_branch_are_taken_back_at_once_when_others_replace_them() -> None:
    peers, credit, checkpoint = Peers("ab"), Credit(), start()
    for number in range(6):
        reached = peers.commit({"a": 10, "b": 20})
        checkpoint = reached if number == 2 else checkpoint
    look(credit, peers)
    again = Peers("ab")
    again.positions = dict.fromkeys(again.positions, checkpoint)
    again.commit({"a": 1, "b": 1}, salt="another")
    look(credit, again, 1.0)
    assert credit.num_samples == 3 * 30 + 2
    assert credit.newest_step == 4


def test_of_two_branches_the_one_with_more_trainers_is_credited() -> None:
    many, few = Peers("abc"), Peers("xy")
    many.commit({"a": 8, "b": 8, "c": 8})
    for _ in range(3):
        few.commit({"x": 8, "y": 8})
    credit = Credit()
    look(credit, many, few=few)
    assert (samples_of(credit, "a"), samples_of(credit, "x")) == (8, 0)


def test_the_last_step_is_credited_after_all_trainers_have_left() -> None:
    peers, credit = Peers("ab"), Credit()
    peers.commit({"a": 8, "b": 8})
    look(credit, peers)
    peers.commit({"a": 8, "b": 8})
    credit.look(peers.accounts, {}, 1.0)
    assert credit.num_samples == 32


def test_a_list_under_the_digest_of_another_one_does_not_count() -> None:
    peers, credit = Peers("ab"), Credit()
    peers.commit({"a": 8, "b": 8})
    accounts = peers.accounts
    forged = packed({short_id(PeerId("a")): 8000, short_id(PeerId("b")): 8})
    (made,) = accounts[PeerId("a")].steps
    accounts[PeerId("a")] = AccountRecord(step=1, steps=[msgspec.structs.replace(made, shares=forged)])
    credit.look(accounts, peers.positions, 0.0)
    assert [samples_of(credit, name) for name in "ab"] == [8, 8]


def test_a_peer_that_is_named_twice_in_a_list_is_not_believed() -> None:
    twice = (short_id(PeerId("a")) + b"\0\0\1\0") * 2
    digest = digest_of_step(1, b"", b"lineage!", False, twice)
    record = AccountRecord(step=1, steps=[_made(twice, digest)])
    credit = Credit()
    credit.look({PeerId("a"): record}, {PeerId("a"): Position(1, b"lineage!")}, 0.0)
    assert credit.num_samples == 0


def _made(shares: bytes, digest: bytes):  # type: ignore[no-untyped-def]
    from manyhands.optim.metrics import CommittedStep

    return CommittedStep(1, b"", b"lineage!", False, digest, shares)


def test_only_some_members_of_a_large_round_publish_its_list_and_all_are_credited() -> None:
    names = [f"peer {number}" for number in range(200)]
    peers, credit = Peers(names), Credit()
    peers.commit(dict.fromkeys(names, 64))
    assert sum(bool(account.steps[-1].shares) for account in peers.accounts.values()) == NUM_LISTING
    look(credit, peers)
    assert credit.num_samples == 200 * 64
    assert max(len(msgspec.msgpack.encode(account)) for account in peers.accounts.values()) < 4096


def test_an_account_fits_into_a_record_of_the_dht_however_large_the_groups() -> None:
    names = [f"peer {number}" for number in range(1000)]
    steps, position = RecentSteps(PeerId("peer 1")), start()
    for number in range(30):
        reached = after(position, {}, str(number))
        steps.add(position, reached, dict.fromkeys(map(PeerId, names), 4e9))
        position = reached
    assert len(steps.listed()) == NUM_STEPS
    assert len(msgspec.msgpack.encode(AccountRecord(steps=steps.listed()))) < 60_000


def test_old_steps_become_final_and_stay_in_the_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit_module, "MAX_KEPT_SHARES", 10)
    peers, credit, settled = Peers("ab"), Credit(), []
    for number in range(12):
        peers.commit({"a": 1, "b": 2})
        settled += credit.look(peers.accounts, peers.positions, number).settled
    assert [step.step for step in settled] == list(range(1, 8))
    assert credit.total_of(PeerId("b")) == Total(24, 12)


def test_steps_told_by_other_monitors_only_fill_gaps() -> None:
    peers, credit = Peers("ab"), Credit()
    peers.commit({"a": 1, "b": 2})
    for _ in range(NUM_STEPS):
        peers.commit({"a": 1, "b": 2})
    look(credit, peers)
    assert credit.num_samples == 3 * NUM_STEPS
    told = [CreditedStep(step, b"x" * 8, 0, packed({b"a" * 8: 50})) for step in (1, 5, 99)]
    changes = credit.add_told([*told, CreditedStep(0, b"x" * 8, 0, b"broken")])
    assert [step.step for step in changes.put] == [1]
    assert credit.num_samples == 3 * NUM_STEPS + 50


@pytest.mark.parametrize("pattern", [[1], [1, 0, 0, 0], [3], [2, 0], [5, 1, 0, 2, 7, 3]])
def test_a_peer_that_averages_fragments_is_credited_whole_samples_without_loss(pattern: list[int]) -> None:
    own, num_fragments, num_steps = PeerId("a"), 4, 480
    steps, position, credited = RecentSteps(own, num_fragments), start(), 0
    made = [pattern[number % len(pattern)] for number in range(num_steps)] + [0] * (num_fragments - 1)
    for number in range(len(made)):
        weight = sum(made[max(number + 1 - num_fragments, 0) : number + 1]) / num_fragments
        reached = after(position, {}, str(number))
        steps.add(position, reached, {own: weight} if weight else {})
        position = reached
        credited += sum(unpacked(steps.listed()[-1].shares).values())
    assert abs(credited - sum(made)) <= 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "x" * 33},
        {"name": "a\nb"},
        {"name": "\u202eevil"},
        {"failure": "\x1b[2J"},
        {"failure": "x" * 201},
        {"learning_rate": float("nan")},
        {"bytes_sent": -1},
        {"samples_used": 2**60},
        {"steps": [[1, b"", b"short", False, b"d" * 16, b""]]},
        {"steps": [[1, b"", b"lineage!", False, b"d" * 16, b"x" * 13]]},
        {"steps": [[2, b"", b"lineage!", False, b"d" * 16], [2, b"", b"lineage!", False, b"d" * 16]]},
        {"steps": [[number, b"", b"lineage!", False, b"d" * 16] for number in range(9)]},
        {"steps": [[1, b"x" * 65, b"lineage!", False, b"d" * 16]]},
    ],
)
def test_a_hostile_account_does_not_decode(wrong: dict[str, object]) -> None:
    raw = msgspec.msgpack.encode({"name": "alice", "step": 3} | wrong)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=AccountRecord)


def test_lists_survive_packing() -> None:
    shares = {bytes([number] * 8): number * 1000 for number in range(50)}
    assert unpacked(packed(shares)) == shares


def test_the_leaderboard_adds_up_peers_of_one_name_and_ranks_equal_ones_alike() -> None:
    totals = {b"1" * 8: Total(10, 1), b"2" * 8: Total(20, 1), b"3" * 8: Total(30, 1), b"4" * 8: Total(5, 1)}
    names = {b"1" * 8: ("id1", "ann"), b"2" * 8: ("id2", "ann"), b"3" * 8: ("id3", "")}
    leaders = leaders_of(totals, names)
    assert [(row.rank, row.name, row.peer_ids, row.samples) for row in leaders] == [
        (1, "", ["id3"], 30),
        (1, "ann", ["id1", "id2"], 30),
        (3, "", [(b"4" * 8).hex()], 5),
    ]
    assert sum(row.share for row in leaders) == pytest.approx(1.0)
