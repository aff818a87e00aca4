"""How often one may ask."""

from __future__ import annotations

from manyhands.base.identity import PeerId
from manyhands.base.rate import BURST_S, MIN_SENDERS
from manyhands.dht.config import DhtConfig
from manyhands.dht.rate_limit import MAX_CHECKS_PER_S, RateLimit
from tests.traced import traced_memory

ALICE, BOB = PeerId("alice"), PeerId("bob")


def num_allowed(limit: RateLimit, peer_id: PeerId, host: str, num: int, now: float) -> int:
    return sum(limit.broken_by(peer_id, host, now) is None for _ in range(num))


def test_a_rate_limit_allows_a_burst_and_then_its_rate() -> None:
    limit = RateLimit(DhtConfig(max_requests_per_s_of_peer=8))
    assert num_allowed(limit, ALICE, "", 100, 1000.0) == 8 * BURST_S
    assert num_allowed(limit, ALICE, "", 100, 1000.0625) == 0
    assert num_allowed(limit, ALICE, "", 100, 1001.0625) == 8
    assert num_allowed(limit, BOB, "", 100, 1001.0625) == 8 * BURST_S, "each has its own"
    assert num_allowed(limit, ALICE, "", 1000, 2000.0) == 8 * BURST_S, "no more after a long pause"


def test_a_machine_with_many_keys_has_one_limit() -> None:
    limit = RateLimit(DhtConfig(max_requests_per_s_of_peer=8, max_requests_per_s_of_host=16))
    peers = [PeerId(f"peer-{number}") for number in range(20)]
    assert sum(num_allowed(limit, peer, "10.0.0.1", 8, 0.0) for peer in peers) == 16 * BURST_S
    assert limit.broken_by(PeerId("another"), "10.0.0.1", 0.0) == 16
    assert limit.broken_by(PeerId("another"), "10.0.0.2", 0.0) is None


def test_a_rate_below_one_in_five_seconds_still_allows_a_burst_of_one() -> None:
    limit = RateLimit(DhtConfig(max_requests_per_s_of_peer=0.1))
    assert num_allowed(limit, ALICE, "", 10, 0.0) == 1
    assert num_allowed(limit, ALICE, "", 10, 9.0) == 0
    assert num_allowed(limit, ALICE, "", 10, 10.0) == 1


def test_forged_records_count_as_many_requests_and_are_forgotten_in_the_end() -> None:
    limit = RateLimit(DhtConfig(max_requests_per_s_of_peer=8, max_requests_per_s_of_host=80))
    limit.charge_forged(ALICE, "10.0.0.1", 12, 0.0)  # 15 s' worth of a peer's requests, and 1.5 s' of the machine's
    assert num_allowed(limit, ALICE, "10.0.0.1", 1, 9.0) == 0
    assert num_allowed(limit, ALICE, "10.0.0.1", 1, 10.5) == 1
    assert num_allowed(limit, BOB, "10.0.0.1", 10, 10.5) == 10, "others of that machine are still heard"
    for _ in range(100):
        limit.charge_forged(ALICE, "", 12, 20.0)
    assert num_allowed(limit, ALICE, "", 1, 80.0) == 0
    assert num_allowed(limit, ALICE, "", 1, 81.0) == 1


def test_quiet_senders_are_forgotten() -> None:
    limit = RateLimit(DhtConfig())
    with traced_memory() as num_held:
        for number in range(10_000):
            limit.broken_by(PeerId(f"peer-{number}"), f"host-{number}", float(number))
        assert num_held() < MIN_SENDERS * 1000


def test_a_network_gets_a_limited_number_of_checks_of_the_records_of_a_key() -> None:
    limit, at_once = RateLimit(DhtConfig()), int(MAX_CHECKS_PER_S * BURST_S)
    assert limit.may_check("10.0.0.0/24", "key", at_once, 0.0)
    assert not limit.may_check("10.0.0.0/24", "key", 1, 0.0)
    assert limit.may_check("10.0.0.0/24", "another key", 1, 0.0)
    assert limit.may_check("10.0.1.0/24", "key", 1, 0.0)
    assert limit.may_check("10.0.0.0/24", "key", 12, 1.0)
