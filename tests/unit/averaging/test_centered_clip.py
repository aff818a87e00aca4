"""Centered clipping: close to the mean of honest members, and moved little by a minority of others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.allreduce.centered_clip import centered_clip
from manyhands.averaging.config import AveragingConfig
from manyhands.base.errors import ConfigError

NUMEL = 2000


def honest(num_members: int, noise: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One direction that all have in common, and noise of the same size."""
    generator = torch.Generator().manual_seed(num_members)
    common = torch.randn(NUMEL, generator=generator, dtype=dtype)
    return common + noise * torch.randn(num_members, NUMEL, generator=generator, dtype=dtype)


@given(st.integers(3, 9), st.sampled_from([torch.float32, torch.float64]))
def test_equal_values_come_out_bit_for_bit(num_members: int, dtype: torch.dtype) -> None:
    values = honest(1, dtype=dtype).expand(num_members, -1).contiguous()
    assert torch.equal(centered_clip(values, [3.0, *[1.0] * (num_members - 1)]), values[0])


@pytest.mark.parametrize("num_members", [3, 4, 8, 16])
def test_without_liars_it_is_close_to_the_mean(num_members: int) -> None:
    values = honest(num_members)
    mean = values.mean(dim=0)
    off = (centered_clip(values, [1.0] * num_members) - mean).norm()
    assert off < 0.02 * (values - mean).norm(dim=1).mean()


def test_weights_count_up_to_the_median() -> None:
    values, weights, capped = honest(5, noise=0.5), [1.0, 2.0, 30.0, 2.0, 1.0], [1.0, 2.0, 2.0, 2.0, 1.0]
    mean = (values * torch.tensor(capped)[:, None]).sum(dim=0) / sum(capped)
    plain = (values.mean(dim=0) - mean).norm()
    assert (centered_clip(values, weights) - mean).norm() < 0.2 * plain


@pytest.mark.parametrize("factor", [-1.0, -10.0, 1e6, 1e38, 3.4e38])
@pytest.mark.parametrize(("num_members", "num_liars"), [(4, 1), (8, 1), (8, 3), (16, 3), (16, 7)])
def test_a_minority_moves_it_little_more_than_honest_members_differ(
    num_members: int, num_liars: int, factor: float
) -> None:
    values = honest(num_members)
    mean = values[num_liars:].mean(dim=0)
    values[:num_liars] = factor * (mean.sign() if factor > 1e9 else mean)
    differ = (values[num_liars:] - mean).norm(dim=1).mean()
    clipped = centered_clip(values, [1.0] * num_members)
    assert (clipped - mean).norm() < 1.5 * differ
    if 5 * num_liars <= 2 * num_members:  # of a larger minority, it only keeps the length down
        assert torch.cosine_similarity(clipped, mean, dim=0) > 0.5


def test_where_most_are_the_same_the_others_do_not_count() -> None:
    values = torch.zeros(5, 8)
    values[:2] = torch.randn(2, 8)
    assert torch.equal(centered_clip(values, [1.0] * 5), torch.zeros(8))


def test_a_sparse_codec_cannot_be_combined_with_it() -> None:
    with pytest.raises(ConfigError, match="leave out sparse, or take aggregate='clip'"):
        AveragingConfig(aggregate="centered_clip", codec="sparse-1-2-3-0.5")
