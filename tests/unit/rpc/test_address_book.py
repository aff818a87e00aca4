"""Addresses: the best first, and hearsay never pushes out what is known."""

from __future__ import annotations

import random

import pytest

from manyhands.base.address import MAX_ADDRESSES, Address
from manyhands.base.errors import Unavailable
from manyhands.rpc.address_book import AddressBook, AddressSource
from manyhands.rpc.backoff import FIRST_S, MOST_S, Backoff
from tests.network import identity_of

PEER = identity_of(1).peer_id


def address(number: int) -> Address:
    return Address.of(f"192.0.2.{number}", 31337, PEER)


def test_addresses_that_worked_come_before_announced_ones_and_hearsay_comes_last() -> None:
    book = AddressBook(10)
    book.learn(PEER, [address(1)], AddressSource.HEARSAY)
    book.learn(PEER, [address(2), address(3)], AddressSource.ANNOUNCED)
    book.learn(PEER, [address(3)], AddressSource.WORKED)
    book.learn(PEER, [address(4)], AddressSource.HEARSAY)
    assert book.addresses_of(PEER) == [address(3), address(2), address(4), address(1)]


def test_others_are_told_what_a_peer_announced_and_nothing_that_worked_here_only() -> None:
    book = AddressBook(10)
    home, loopback = Address.of("192.168.0.2", 31337, PEER), Address.of("127.0.0.1", 31337, PEER)
    assert book.addresses_to_tell(PEER) == []
    book.learn(PEER, [address(4)], AddressSource.HEARSAY)
    assert book.addresses_to_tell(PEER) == [address(4)], "others told it, who told what they were told"
    book.learn(PEER, [home], AddressSource.WORKED)
    assert book.addresses_to_tell(PEER) == [address(4)]
    book.announced(PEER, [address(1), loopback])
    assert book.addresses_to_tell(PEER) == [address(1)]
    book.failed(PEER)
    assert book.addresses_to_tell(PEER) == [address(1)]
    assert home in book.addresses_of(PEER)
    book.announced(PEER, [loopback])
    assert book.addresses_to_tell(PEER) == [loopback], "there is no other"


def test_a_liar_pushes_out_no_address_that_works() -> None:
    book = AddressBook(10)
    book.learn(PEER, [address(1)], AddressSource.WORKED)
    book.learn(PEER, [address(2)], AddressSource.ANNOUNCED)
    for number in range(100):
        book.learn(PEER, [address(100 + number)], AddressSource.HEARSAY)
    assert book.addresses_of(PEER)[:2] == [address(1), address(2)]
    assert len(book.addresses_of(PEER)) == MAX_ADDRESSES


def test_hearsay_of_many_peers_pushes_out_no_peer_that_was_reached() -> None:
    book = AddressBook(4)
    book.learn(PEER, [address(1)], AddressSource.WORKED)
    for number in range(100, 120):
        book.learn(identity_of(number).peer_id, [Address.of("192.0.2.9", 1)], AddressSource.HEARSAY)
    assert book.addresses_of(PEER) == [address(1)]
    num_known = sum(bool(book.addresses_of(identity_of(number).peer_id)) for number in range(100, 120))
    assert num_known == 3


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_peer_that_is_often_elsewhere_is_found_at_its_last_address(has_failed: bool) -> None:
    book = AddressBook(4)
    for number in range(1, 20):
        if has_failed:
            book.failed(PEER)
        assert book.learn(PEER, [address(number)], AddressSource.ANNOUNCED)
        assert address(number) in book.addresses_of(PEER)
        if has_failed:
            assert book.addresses_of(PEER)[0] == address(number)
        book.learn(PEER, [address(number)], AddressSource.WORKED)


def test_learning_known_addresses_is_no_news() -> None:
    book = AddressBook(10)
    assert book.learn(PEER, [address(1)], AddressSource.HEARSAY)
    assert not book.learn(PEER, [address(1)], AddressSource.HEARSAY)
    assert not book.learn(PEER, [], AddressSource.HEARSAY)


def test_the_least_recently_learnt_peer_is_forgotten() -> None:
    book = AddressBook(2)
    peers = [identity_of(number).peer_id for number in range(3)]
    for peer_id in (peers[0], peers[1], peers[0], peers[2]):
        book.learn(peer_id, [Address.of("192.0.2.9", 1)], AddressSource.HEARSAY)
    assert [bool(book.addresses_of(peer_id)) for peer_id in peers] == [True, False, True]


def test_the_wait_after_a_failure_doubles_up_to_a_bound_and_has_jitter() -> None:
    backoff, now, waits = Backoff(random.Random(1)), 0.0, []
    backoff.check(PEER, now)
    for _ in range(12):
        backoff.failed(PEER, now, "connection refused")
        with pytest.raises(Unavailable, match=r"last dial failed \(connection refused\), .* due in .* s"):
            backoff.check(PEER, now)
        begun = now
        while True:
            now += 0.01
            try:
                backoff.check(PEER, now)
            except Unavailable:
                continue
            break
        waits.append(now - begun)
    assert all(FIRST_S * 2**n / 2 <= wait + 0.01 and wait <= FIRST_S * 2**n + 0.01 for n, wait in enumerate(waits[:5]))
    assert all(wait + 0.01 >= MOST_S / 2 and wait <= MOST_S + 0.01 for wait in waits[6:])
    assert len({round(wait, 2) for wait in waits[6:]}) > 1
    backoff.forget(PEER)
    backoff.check(PEER, now)


def test_a_peer_that_is_back_has_those_dialled_at_once_that_were_lost_with_it() -> None:
    """And only those: who was gone long before is not back for it."""
    long_gone, cut_off, back = (identity_of(number).peer_id for number in range(3))
    backoff = Backoff(random.Random(1))
    backoff.failed(long_gone, 0.0, "connection refused")
    for now in (100.0, 110.0, 120.0, 130.0, 140.0):
        backoff.failed(long_gone, now, "connection refused")
        backoff.failed(back, now, "no answer")
        backoff.failed(cut_off, now + 3.0, "no answer")
    backoff.connected(back, 143.5)
    backoff.check(back, 143.5)
    backoff.check(cut_off, 143.5)
    with pytest.raises(Unavailable):
        backoff.check(long_gone, 143.5)
    backoff.failed(cut_off, 144.0, "no answer")
    with pytest.raises(Unavailable, match=r"the next one is due in (7|8|9|1\d)"):
        backoff.check(cut_off, 144.0)


def test_a_peer_that_was_never_out_of_reach_says_nothing_of_the_others() -> None:
    other, lost = (identity_of(number).peer_id for number in range(2))
    backoff = Backoff(random.Random(1))
    backoff.failed(lost, 0.0, "no answer")
    backoff.connected(other, 0.0)
    with pytest.raises(Unavailable):
        backoff.check(lost, 0.0)
