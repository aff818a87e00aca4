"""What one member counts for at most, and whose values are too large; all members compute the same."""

from __future__ import annotations

import math
import random

import pytest

from manyhands.averaging.round.limits import MemberLimits, capped_weights, limited, outsized, usual_norm
from manyhands.base.errors import ConfigError
from tests.unit.averaging.groups import group_of

LIMITS = MemberLimits()


@pytest.mark.parametrize(
    ("weights", "capped"),
    [
        ([], []),
        ([0.0, 0.0], [0.0, 0.0]),
        ([5.0], [5.0]),
        ([1.0, 2.0**52], [1.0, 2.0**52]),  # of two, neither is the usual one
        ([10.0, 2.0**52, 12.0], [10.0, 36.0, 12.0]),
        ([0.0, 10.0, 2.0**52, 12.0], [0.0, 10.0, 36.0, 12.0]),
        ([30.0, 1.0, 10.0], [30.0, 1.0, 10.0]),
        ([8.0, 8.0, 8.0, 8.0, 24.0], [8.0, 8.0, 8.0, 8.0, 32.0 / 3]),
        ([1.0] * 16 + [2.0**52], [1.0] * 16 + [3.0]),
    ],
)
def test_weights_count_for_three_times_the_median_and_a_quarter_of_all(
    weights: list[float], capped: list[float]
) -> None:
    assert capped_weights(weights, LIMITS) == pytest.approx(capped)


def test_capped_weights_are_within_the_limits_and_small_weights_stay() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        weights = [
            rng.choice([0.0, 1.0, rng.uniform(0.0, 100.0), 2.0 ** rng.uniform(-20, 52)])
            for _ in range(rng.randint(1, 12))
        ]
        limits = MemberLimits(max_weight_share=rng.choice([0.25, 0.3, 0.5, 1.0]))
        capped = capped_weights(weights, limits)
        given = [weight for weight in capped if weight > 0]
        cap = max(capped)
        assert capped == [min(weight, cap) for weight in weights]
        if len(given) * limits.max_weight_share > 1:
            assert cap <= limits.max_weight_share * math.fsum(given) * (1 + 1e-9)
        assert capped_weights(weights, limits) == capped


def test_a_group_within_the_limits_is_as_it_was() -> None:
    group = group_of(3, weights=[3.0, 4.0, 5.0])
    assert limited(group, LIMITS) == group


def test_a_norm_over_ten_times_the_median_is_too_large() -> None:
    assert outsized([1.0, 1.2, 10.0, 0.9], [4.0] * 4, LIMITS) == set()
    assert outsized([1.0, 1.2, 12.0, 0.9], [4.0] * 4, LIMITS) == {2}
    assert outsized([1.0, math.inf, 1.0], [4.0] * 3, LIMITS) == {1}
    assert outsized([1.0, math.inf, 1.0], [4.0, 0.0, 4.0], LIMITS) == set(), "it has given no values"


def test_nobody_is_judged_where_there_is_no_majority_to_judge_by() -> None:
    assert outsized([1.0, math.inf], [1.0, 1.0], LIMITS) == set()
    assert outsized([0.0, 0.0, 1.0], [1.0] * 3, LIMITS) == set()
    assert outsized([math.inf, math.inf, 1.0], [1.0] * 3, LIMITS) == set()


def test_one_sample_beside_large_batches_is_not_too_large() -> None:
    """Its norm is that of noise: up to the root of the others' batch size larger."""
    assert outsized([1.0, 1.0, math.sqrt(1000.0)], [1000.0, 1000.0, 1.0], LIMITS) == set()
    assert outsized([1.0, 1.0, 400.0], [1000.0, 1000.0, 1.0], LIMITS) == {2}


def test_a_member_whose_values_never_came_says_nothing_about_those_of_others() -> None:
    assert outsized([50.0, 0.0, 2.5], [1.0] * 3, LIMITS) == set(), "two are left, and neither has a majority"
    assert outsized([50.0, 0.0, 2.5, 2.5], [1.0] * 4, LIMITS) == {0}


def test_means_that_cancelled_are_compared_with_what_went_into_them() -> None:
    norms, weights = [0.01, 1.0, 0.01, 11.0], [1.0] * 4
    assert outsized(norms, weights, LIMITS) == {3}
    assert outsized([0.01, 1.0, 0.01], weights[:3], LIMITS) == {1}
    assert outsized(norms, weights, LIMITS, at_least=1.0) == {3}
    assert outsized(norms[:3], weights[:3], LIMITS, at_least=1.0) == set()
    assert outsized([math.inf, 1.0, 0.01], weights[:3], LIMITS, at_least=1.0) == {0}
    assert usual_norm([0.01, math.inf, 3.0, 0.0], [1.0, 0.0, 1.0, 1.0]) == pytest.approx(1.505)
    assert usual_norm([0.0], [1.0]) == 0.0


def test_norms_may_grow_with_the_weight_in_local_steps() -> None:
    local = MemberLimits(norm_grows=True)
    assert outsized([40.0, 1.0, 1.0], [40.0, 1.0, 1.0], LIMITS) == {0}
    assert outsized([400.0, 1.0, 1.0], [40.0, 1.0, 1.0], local) == set()
    assert outsized([401.0, 1.0, 1.0], [40.0, 1.0, 1.0], local) == {0}
    assert outsized([11.0, 1.0, 1.0], [1.0, 1.0, 1.0], local) == {0}
    assert outsized([31.0, 1.0, 1.0], [0.1, 1.0, 1.0], local) == set(), "one batch has more noise than ten"


def test_norms_are_compared_with_those_before_where_means_may_cancel() -> None:
    norms = [0.01, 0.2, 0.0001, 100.0]
    assert outsized(norms, [1.0] * 4, LIMITS) == {3}
    assert outsized(norms, [1.0] * 4, LIMITS, at_least=0.5) == {3}
    assert outsized([math.inf, math.inf, 1.0], [1.0] * 3, LIMITS) == set(), "most have nothing to compare with"


@pytest.mark.parametrize(
    "fields",
    [{"max_weight_ratio": 0.5}, {"max_norm_ratio": math.nan}, {"max_weight_share": 0.0}, {"max_weight_share": 2.0}],
)
def test_limits_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="for example"):
        MemberLimits(**fields)
