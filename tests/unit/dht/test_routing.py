from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.identity import PeerId
from manyhands.dht.ids import ID_BITS, distance, node_id
from manyhands.dht.routing import Contact, RoutingTable
from tests.unit.dht.examples import contact

OWN_ID = PeerId("me")
OWN = node_id(OWN_ID)
NUMBERS = st.integers(0, 60)


def bucket_of(peer_id: PeerId) -> int:
    return distance(node_id(peer_id), node_id(OWN_ID)).bit_length()


def same_bucket(num: int) -> list[Contact]:
    """Contacts of the farthest bucket, where half of all peers lie."""
    return [contact(number) for number in range(20 * num) if bucket_of(contact(number).peer_id) == ID_BITS][:num]


def validate(table: RoutingTable, k: int, max_failures: int, num_failures: Counter[PeerId]) -> None:
    """Args:
    num_failures: in a row, of each contact that was ever seen.
    """
    live = [contact.peer_id for contact in table.contacts()]
    waiting = [peer_id for peer_id in num_failures if table.is_waiting(peer_id)]
    assert len(table) == len(live) == len(set(live))
    num_live, num_waiting = Counter(map(bucket_of, live)), Counter(map(bucket_of, waiting))
    for index in num_live | num_waiting:
        assert table.num_in_bucket(index) == num_live[index] <= k
        assert num_waiting[index] <= k
        assert not num_waiting[index] or num_live[index] == k, "a replacement waits beside a free place"
    assert all(num_failures[peer_id] < max_failures for peer_id in live)
    assert not any(num_failures[peer_id] for peer_id in waiting)


@given(
    k=st.integers(1, 4),
    max_failures=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(["seen", "failed"]), NUMBERS), max_size=150),
    target=st.integers(0, 2**ID_BITS - 1),
    num=st.integers(0, 30),
)
def test_every_history_keeps_the_table_valid_and_nearest_agrees_with_sorting(
    k: int, max_failures: int, steps: list[tuple[str, int]], target: int, num: int
) -> None:
    table = RoutingTable(OWN_ID, k, max_failures)
    num_failures: Counter[PeerId] = Counter()
    for step, number in steps:
        peer_id = contact(number).peer_id
        if step == "seen":
            table.seen(contact(number))
            num_failures[peer_id] = 0
        else:
            table.failed(peer_id)
            num_failures[peer_id] += 1
        validate(table, k, max_failures, num_failures)
    failed = set(+num_failures)
    by_distance = sorted(table.contacts(), key=lambda contact: distance(node_id(contact.peer_id), target))
    assert table.nearest(target, num, with_failed=True) == by_distance[:num]
    assert table.holders(target, num, None) == [one.peer_id for one in by_distance[:num]]
    sound = [contact for contact in by_distance if contact.peer_id not in failed]
    assert table.nearest(target, num) == sound[:num]
    in_any_order = table.nearest(target, num, in_order=False)
    assert {one.peer_id for one in in_any_order} == {one.peer_id for one in sound[:num]}
    assert in_any_order[num - 1 :] == sound[num - 1 : num], "the farthest one is the last"
    everyone = sorted([one.peer_id for one in by_distance] + [OWN_ID], key=lambda peer: node_id(peer) ^ target)
    assert table.holders(target, num, "") == everyone[:num]


def test_a_full_bucket_keeps_its_old_contacts() -> None:
    table = RoutingTable(OWN_ID, k=2, max_failures=1)
    first, second, newcomer = same_bucket(3)
    for someone in (first, second, newcomer):
        table.seen(someone)
    assert table.contacts() == [first, second]


def test_the_newest_replacement_takes_the_place_of_a_contact_that_failed() -> None:
    table = RoutingTable(OWN_ID, k=2, max_failures=2)
    first, second, older, newer = same_bucket(4)
    for someone in (first, second, older, newer):
        table.seen(someone)
    table.failed(first.peer_id)
    assert first.peer_id in table, "one failure may be the network's"
    table.failed(first.peer_id)
    assert table.contacts() == [second, newer]


def test_an_answer_between_two_failures_clears_the_first() -> None:
    table = RoutingTable(OWN_ID, k=2, max_failures=2)
    table.seen(contact(1))
    table.failed(contact(1).peer_id)
    table.seen(contact(1))
    table.failed(contact(1).peer_id)
    assert contact(1).peer_id in table


def test_the_least_recently_seen_is_doubted_first() -> None:
    table = RoutingTable(OWN_ID, k=3, max_failures=2)
    first, second, third = same_bucket(3)
    for someone in (first, second, third, first):
        table.seen(someone)
    assert table.least_recently_seen() == [second]


def test_new_addresses_replace_old_ones() -> None:
    table = RoutingTable(OWN_ID, k=3, max_failures=2)
    table.seen(Contact(PeerId("x"), ["/ip4/10.0.0.1/tcp/1"]))
    table.seen(Contact(PeerId("x"), ["/ip4/10.0.0.1/tcp/2"]))
    assert table.contacts() == [Contact(PeerId("x"), ["/ip4/10.0.0.1/tcp/2"])]


def test_a_contact_that_is_heard_again_becomes_the_most_recent_unless_it_has_failed() -> None:
    first, second = same_bucket(2)
    table = RoutingTable(OWN_ID, k=2, max_failures=2)
    table.seen(first, 1.0)
    table.seen(second, 2.0)
    assert not table.is_heard_again(PeerId("nobody"), 2.0, 0.0, 3.0)
    assert not table.is_heard_again(first.peer_id, 2.0, 2.0, 3.0), "not heard for long: it may have other addresses"
    assert table.least_recently_seen() == [first]
    assert table.is_heard_again(first.peer_id, 1.0, 1.0, 3.0)
    assert table.least_recently_seen() == [first], "it was heard of just now"
    assert table.is_heard_again(first.peer_id, 2.0, 1.0, 3.0)
    assert table.heard_at(first.peer_id) == 3.0
    assert table.least_recently_seen() == [second]
    table.lost(first.peer_id)
    assert not table.is_heard_again(first.peer_id, 1.0, 1.0, 4.0)
    table.failed(second.peer_id)
    assert not table.is_heard_again(second.peer_id, 1.0, 1.0, 4.0)


def test_the_node_itself_is_never_in_its_table() -> None:
    table = RoutingTable(OWN_ID, k=3, max_failures=2)
    table.seen(Contact(OWN_ID, ["/ip4/10.0.0.1/tcp/1"]))
    table.failed(OWN_ID)
    assert OWN_ID not in table
    assert len(table) == 0


def test_the_table_counts_its_changes() -> None:
    table = RoutingTable(PeerId("own"), 3, max_failures=1)
    someone = contact(1)
    for act, num_changes in (
        (lambda: table.seen(someone), 1),
        (lambda: table.seen(someone), 1),
        (lambda: table.seen(Contact(someone.peer_id, ["/ip4/10.0.0.2/tcp/1"])), 1),
        (lambda: table.failed(someone.peer_id), 2),
        (lambda: table.failed(someone.peer_id), 2),
    ):
        act()
        assert table.num_changes == num_changes
        assert len(table) == len(table.nearest(0, 5)) == len(table.contacts())


def test_a_contact_that_fell_silent_is_no_holder_until_it_is_heard_of_again() -> None:
    table = RoutingTable(OWN_ID, 20, max_failures=2)
    for number in range(5):
        table.seen(contact(number))
    target = node_id(contact(2).peer_id)
    holders = table.holders(target, 20, "", with_silent=False)
    assert len(holders) == 6
    num_changes = table.num_changes
    for _ in range(2):
        table.lost(contact(2).peer_id)
        assert table.holders(target, 20, "", with_silent=False) == holders[1:]
        assert not table.is_sound(contact(2).peer_id)
        assert contact(2) in table.contacts(), "it may have had nothing to say"
    table.lost(PeerId("a stranger"))
    assert (table.num_changes, table.num_silences) == (num_changes, 1)
    table.seen(contact(2))
    assert table.holders(target, 20, "", with_silent=False) == holders
    assert table.is_sound(contact(2).peer_id)
    table.failed(contact(2).peer_id)
    assert not table.is_sound(contact(2).peer_id)


def test_a_contact_that_failed_is_named_to_nobody_until_it_is_seen_again() -> None:
    table = RoutingTable(OWN_ID, k=3, max_failures=3)
    table.seen(contact(1))
    table.failed(contact(1).peer_id)
    assert table.nearest(0, 5) == []
    assert table.nearest(0, 5, with_failed=True) == [contact(1)]
    table.seen(contact(1))
    assert table.nearest(0, 5) == [contact(1)]


def test_a_newcomer_takes_the_place_of_a_contact_that_failed() -> None:
    table = RoutingTable(OWN_ID, k=2, max_failures=2)
    first, second, newcomer = same_bucket(3)
    table.seen(first)
    table.seen(second)
    table.failed(second.peer_id)
    table.seen(newcomer)
    assert table.contacts() == [first, newcomer]


def test_the_table_tells_since_when_nothing_was_wrong_with_a_peer() -> None:
    table = RoutingTable(OWN_ID, k=1, max_failures=2)
    first, waiting = same_bucket(2)
    table.seen(first, 10.0)
    table.seen(waiting, 11.0)
    for someone, heard_at in ((first, 10.0), (waiting, 11.0)):
        assert table.heard_at(someone.peer_id) == heard_at
        assert table.is_heard_again(someone.peer_id, heard_at, heard_at, 20.0)
        assert not table.is_heard_again(someone.peer_id, heard_at + 1, heard_at + 1, 20.0)
        assert table.heard_at(someone.peer_id) == heard_at
    table.lost(first.peer_id)
    assert not table.is_heard_again(first.peer_id, 10.0, 10.0, 20.0)
    assert not table.is_heard_again(PeerId("a stranger"), 0.0, 0.0, 20.0)
