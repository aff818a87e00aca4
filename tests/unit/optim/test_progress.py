from __future__ import annotations

import math
import random
import statistics
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.base.identity import PeerId
from manyhands.optim.config import ProgressConfig
from manyhands.optim.run.branches import leading_branch
from manyhands.optim.run.progress import (
    MAX_SHARE,
    Claim,
    Progress,
    branch_order,
    busy_s,
    crowd_factor,
    extrapolated_samples,
    is_news,
    next_refresh_s,
    sum_of_sample,
)

CONFIG = ProgressConfig(min_refresh_s=0.5, max_refresh_s=10.0)
HERE = Position(3, b"here")


def record(
    step: int = 3,
    lineage: bytes = b"here",
    samples: int = 0,
    speed: float = 0.0,
    lineage_samples: int = 0,
    is_client: bool = False,
    **more: Any,
) -> PeerRecord:
    position = Position(step, lineage)
    more |= {"samples": samples, "samples_per_second": speed, "lineage_samples": lineage_samples}
    return PeerRecord(position, is_client, [], **more)


def named(**records: PeerRecord) -> dict[PeerId, PeerRecord]:
    return {PeerId(name): record for name, record in records.items()}


@given(st.integers(0, 10_000), st.one_of(st.just(math.inf), st.floats(0, 1e9)))
def test_records_are_read_again_in_time_and_not_too_often(num_peers: int, eta_s: float) -> None:
    refresh_s = next_refresh_s(Progress(0, num_peers, 0.0, eta_s), CONFIG)
    assert CONFIG.min_refresh_s <= refresh_s <= CONFIG.max_refresh_s * crowd_factor(num_peers)
    assert refresh_s <= max(eta_s, CONFIG.min_refresh_s), "not after the target is reached"


def test_newcomers_bring_the_target_forward() -> None:
    progress = Progress(0, 3, 1.0, 8.0)
    assert next_refresh_s(progress, CONFIG) == 4.0, "three more peers may come"
    assert next_refresh_s(Progress(0, 100, 1.0, 12.0), CONFIG) == pytest.approx(10.0), "or a fifth more"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", -1),
        ("samples_per_second", math.nan),
        ("samples_per_second", math.inf),
        ("samples_per_second", -0.5),
        ("lineage_samples", -1),
        ("lineage_samples", 2**60),
        ("samples", 2**60),
        ("samples", 1.5),
        ("position", {"step": -1, "lineage": b""}),
        ("position", None),
        ("is_client", "yes"),
        ("addresses", [1]),
        ("ttl_s", math.inf),
        ("counted_s_ago", math.nan),
        ("counted_s_ago", -1.0),
    ],
)
def test_records_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    good = msgspec.to_builtins(record(), builtin_types=(bytes,))
    assert msgspec.convert(good, PeerRecord) == record()
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(good | {field: value}, PeerRecord)


# branches

RECORDS = st.builds(
    record,
    st.integers(0, 2),
    st.sampled_from([b"a", b"b"]),
    lineage_samples=st.integers(0, 2),
    is_client=st.booleans(),
    is_auxiliary=st.booleans(),
)
SWARMS = st.dictionaries(st.sampled_from([PeerId(name) for name in "abcdef"]), RECORDS, min_size=1)


@given(SWARMS)
def test_all_peers_agree_on_the_leading_branch(swarm: dict[PeerId, PeerRecord]) -> None:
    branches = set()
    for peer_id, own in swarm.items():
        others = {other: record for other, record in swarm.items() if other != peer_id}
        branches.add(leading_branch(others, peer_id, own))
    assert len(branches) <= 1


@given(SWARMS)
def test_a_branch_has_holders_and_this_peer_follows_others_only(swarm: dict[PeerId, PeerRecord]) -> None:
    for peer_id, own in swarm.items():
        others = {other: record for other, record in swarm.items() if other != peer_id}
        branch = leading_branch(others, peer_id, own)
        if branch.position != own.position:
            assert branch.holders
            assert all(others[holder].position == branch.position for holder in branch.holders)


def test_the_highest_step_then_samples_then_digest_wins() -> None:
    own = record(step=1, lineage=b"m", lineage_samples=50)
    for better in (
        record(step=2, lineage=b"a", lineage_samples=0),
        record(step=1, lineage=b"a", lineage_samples=51),
        record(step=1, lineage=b"n", lineage_samples=50),
    ):
        branch = leading_branch(named(other=better), PeerId("own"), own)
        assert branch.position == better.position
        assert branch.holders == ("other",)
        assert branch_order(better) > branch_order(own)
        assert leading_branch(named(own=own), PeerId("other"), better).position == better.position


def test_at_step_0_the_lowest_peer_id_wins_and_samples_do_not_matter() -> None:
    low, high = record(step=0, lineage=b"a"), record(step=0, lineage=b"z", lineage_samples=9)
    assert leading_branch(named(z=high), PeerId("a"), low).position == low.position
    assert leading_branch(named(a=low), PeerId("z"), high).position == low.position
    beyond = record(step=1, lineage=b"m")
    assert leading_branch(named(a=low, m=beyond), PeerId("z"), high).position == beyond.position


def test_at_step_0_the_highest_claim_wins_also_of_a_peer_that_nobody_can_dial() -> None:
    claims = {claim.name: record(step=0, lineage=claim.name.encode(), claim=claim) for claim in Claim}
    assert leading_branch(named(**claims), PeerId("A"), record(step=0)).position.lineage == b"TOLD"
    client = record(step=0, lineage=b"of the client", claim=Claim.JOINED, is_client=True)
    joins = record(step=0, lineage=b"of another one", claim=Claim.NEWCOMER)
    assert leading_branch(named(b=client), PeerId("a"), joins).position == client.position
    both = named(b=record(step=0, lineage=b"b", claim=Claim.TOLD), c=record(step=0, lineage=b"c", claim=Claim.TOLD))
    assert leading_branch(both, PeerId("a"), joins).position.lineage == b"b"
    beyond = record(step=1, lineage=b"m")
    assert leading_branch(named(a=beyond), PeerId("b"), claims["TOLD"]).position == beyond.position
    assert branch_order(record(step=1, lineage=b"m", claim=Claim.TOLD)) == branch_order(beyond)


def test_a_branch_of_peers_in_client_mode_counts_as_any_other() -> None:
    """Peers in client mode hand their state to one that can be dialled, so what they have learnt is not dropped."""
    client = record(step=9, is_client=True)
    behind = record(step=2)
    assert leading_branch(named(client=client), PeerId("own"), behind).position == client.position
    assert leading_branch(named(other=behind), PeerId("client"), client).position == client.position
    assert leading_branch(named(a=client, b=client), PeerId("own"), record(step=0, is_auxiliary=True)).holders == (
        "a", "b",
    )  # fmt: skip


def test_at_step_0_the_parameters_are_those_of_somebody_whom_all_can_dial() -> None:
    client = record(step=0, lineage=b"of the client", is_client=True)
    helper = record(step=0, lineage=b"of the helper", is_auxiliary=True)
    trainer = record(step=0, lineage=b"of the trainer")
    assert leading_branch(named(b=helper, c=trainer), PeerId("a"), client).position == trainer.position
    assert leading_branch(named(a=client, b=helper), PeerId("c"), trainer).position == trainer.position
    assert leading_branch(named(b=helper), PeerId("a"), client).position == helper.position
    other = record(step=0, lineage=b"of another client", is_client=True)
    assert leading_branch(named(b=other), PeerId("a"), client).position == client.position


# extrapolation


def test_samples_are_extrapolated_until_the_next_record_is_due() -> None:
    said = record(samples=10, speed=2.0)
    extrapolated = [extrapolated_samples(said, age_s) for age_s in (-1.0, 0.0, 0.5, 3.0, 10.0, 29.0)]
    assert extrapolated == [10, 10, 11, 16, 30, 30]
    late = msgspec.structs.replace(said, counted_s_ago=2.0)
    assert extrapolated_samples(late, 3.0) == 20


HUGE = st.floats(0, allow_infinity=False)


@given(HUGE, HUGE, HUGE, st.floats(allow_nan=False), st.integers(0, 2**53))
@example(0.0, 1.7e308, 1.7e308, 1.7e308, 0)
def test_samples_extrapolated_from_any_record_stay_in_bounds(
    speed: float, ago_s: float, ttl_s: float, age_s: float, samples: int
) -> None:
    said = msgspec.structs.replace(record(samples=samples, speed=speed), counted_s_ago=ago_s, ttl_s=ttl_s)
    assert samples <= extrapolated_samples(said, age_s) <= 2**53


@pytest.mark.parametrize(
    ("own", "is_far_news", "is_near_news"),
    [
        (record(samples=30, speed=2.0), False, False),  # exactly as the others predict
        (record(samples=20, speed=2.0), False, True),
        (record(samples=39, speed=2.0), False, True),
        (record(samples=41, speed=2.0), True, True),
        (record(samples=30, speed=2.5), True, True),
        (record(samples=30, speed=1.5), True, True),
        (record(samples=30, speed=2.3), False, False),
        (record(step=4, samples=30, speed=2.0), True, True),
        (record(lineage=b"there", samples=30, speed=2.0), True, True),
    ],
)
def test_a_record_is_news_only_where_the_others_could_not_extrapolate_it(
    own: PeerRecord, is_far_news: bool, is_near_news: bool
) -> None:
    published = record(samples=10 if own.samples != 30 else 30, speed=2.0)
    age_s = 10.0 if own.samples != 30 else 0.0
    assert is_news(published, age_s, own, 1000, 10, is_near=False) == is_far_news
    assert is_news(published, age_s, own, 1000, 10, is_near=True) == is_near_news


def test_a_first_speed_is_news() -> None:
    assert is_news(record(), 1.0, record(speed=0.5), 1000, 10, is_near=False)
    assert not is_news(record(), 1.0, record(), 1000, 10, is_near=False)


def test_other_parameters_at_the_same_position_are_news() -> None:
    """After they were loaded, the others need not take this peer for far off until the next step."""
    own = msgspec.structs.replace(record(), sketch=b"these")
    assert is_news(record(), 1.0, own, 1000, 10, is_near=False)
    assert not is_news(own, 1.0, own, 1000, 10, is_near=False)


# when a batch is over


@given(st.floats(0.1, 20.0), st.floats(0.0, 39.0), st.floats(0.0, 5.0))
def test_a_peer_is_busy_until_the_end_of_the_batch_that_it_computes(
    batch_s: float, elapsed_s: float, counted_s_ago: float
) -> None:
    said = record(samples=8, speed=1.0, counted_s_ago=counted_s_ago, batch_s=batch_s)
    said_at = 100.0
    instant = said_at + elapsed_s
    until = instant + busy_s(said, elapsed_s)
    assert instant <= until <= instant + batch_s * (1 + 1e-6)
    since_count_s = elapsed_s + counted_s_ago
    if since_count_s >= 2 * batch_s:
        assert until == instant, "one that says nothing for long is not relied on"
    else:
        num_batches = (until - said_at + counted_s_ago) / batch_s
        assert num_batches == pytest.approx(round(num_batches), abs=1e-6)


def test_a_peer_that_does_not_say_how_long_its_batches_take_is_not_busy() -> None:
    said = record(samples=8, speed=1.0)
    assert busy_s(said, 1.0) == 0.0


# a sample of the records


def speeds_of(num_peers: int, rng: random.Random) -> list[float]:
    """Log-normal, with a standard deviation of 0.7 times the mean."""
    sigma = math.sqrt(math.log(1 + 0.7**2))
    return [rng.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(num_peers)]


@pytest.mark.parametrize("num_read", [64, 256])
def test_the_error_of_an_estimate_falls_with_the_root_of_the_sample(num_read: int) -> None:
    rng = random.Random(num_read)
    errors = []
    for _ in range(300):
        speeds = speeds_of(2000, rng)
        sampled = rng.sample(speeds, num_read)
        errors.append(sum_of_sample(sampled, 2000 / num_read) / sum(speeds) - 1)
    root_mean_square = math.sqrt(sum(error**2 for error in errors) / len(errors))
    assert root_mean_square < 1.15 * 0.7 / math.sqrt(num_read)
    assert abs(statistics.mean(errors)) < 0.015, "nobody counts twice or not at all"


@given(st.lists(st.floats(1.0, MAX_SHARE), min_size=10, max_size=100), st.floats(0, 1e300), st.floats(1.01, 50.0))
def test_a_liar_in_a_sample_counts_for_a_few_peers_at_most(honest: list[float], lie: float, weight: float) -> None:
    most = MAX_SHARE * statistics.median([*honest, lie])
    with_lie = sum_of_sample([*honest, lie], weight)
    assert with_lie <= weight * (sum(honest) + most) * (1 + 1e-9)
    assert most <= MAX_SHARE * sorted(honest)[(len(honest) + 1) // 2], "one lie hardly moves the median"


@given(st.lists(st.integers(0, 2**53), max_size=50))
def test_records_of_all_peers_are_added_up_as_they_are(samples: list[int]) -> None:
    assert sum_of_sample(samples, None) == sum(samples)


def test_a_sampled_record_is_extrapolated_until_it_expires_as_later_ones_were_not_read() -> None:
    published = record(samples=10, speed=2.0, ttl_s=180.0)
    assert extrapolated_samples(published, 150.0) == 10 + 2 * 60
    assert extrapolated_samples(published, 150.0, is_sampled=True) == 10 + 2 * 150
