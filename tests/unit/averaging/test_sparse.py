"""The sparse codec, and how its contributions are passed on instead of a mean."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from manyhands.averaging.allreduce.butterfly import Butterfly, InvalidContribution
from manyhands.averaging.allreduce.checks import LEAVES_OUT, Told
from manyhands.averaging.allreduce.means import MeansRecords
from manyhands.averaging.codecs import (
    NONE,
    BadEncoding,
    Gathered,
    NotFinite,
    Plan,
    Segment,
    Sparse,
    Unsent,
)
from manyhands.averaging.codecs.plan import codec_named, codec_of_code
from manyhands.base.errors import ConfigError
from tests.unit.averaging.groups import butterfly_of, group_of, plan_in, sent


def encoded_by(codec: Sparse, values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, out)
    return out


def decoded_by(codec: Sparse, encoded: torch.Tensor, numel: int) -> torch.Tensor:
    values = torch.empty(numel)
    codec.decode(encoded, values)
    return values


def test_each_kept_value_takes_14_bits_beside_a_table_of_two_magnitudes() -> None:
    codec = Sparse()
    assert codec.num_bytes(4096) == 64 * 14 // 8 + 2 * 2
    assert codec.num_bytes(10 * 4096) == 10 * codec.num_bytes(4096)
    assert 4 * 4096 / codec.num_bytes(4096) > 140


@pytest.mark.parametrize("numel", [1, 63, 4096, 4097, 3 * 4096 + 100])
@pytest.mark.parametrize("codec", [Sparse(), Sparse(top=3, chunk=100, bits=1), Sparse(top=100, chunk=256, bits=4)])
def test_the_largest_values_come_back_with_their_signs(codec: Sparse, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    got = decoded_by(codec, encoded_by(codec, values), numel)
    for start in range(0, numel, codec.chunk):
        chunk, ours = values[start : start + codec.chunk], got[start : start + codec.chunk]
        num_kept = codec.num_kept(len(chunk))
        kept = chunk.abs().topk(num_kept).indices
        assert set(ours.nonzero().flatten().tolist()) == set(kept.tolist())
        assert torch.equal(ours[kept].sign(), chunk[kept].sign())
        assert ours[kept].abs().max() <= chunk.abs().max() * 1.004
        assert ours[kept].abs().min() >= chunk.abs()[kept].min() * 0.996


def test_more_bits_of_the_sparse_codec_give_smaller_errors() -> None:
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    codecs = [Sparse(bits=bits) for bits in (1, 2, 3, 4)]
    kept = decoded_by(codecs[0], encoded_by(codecs[0], values), values.numel()) != 0
    errors = [
        float(
            (decoded_by(codec, encoded_by(codec, values), values.numel()) - values)[kept].norm() / values[kept].norm()
        )
        for codec in codecs
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 0.1


# what was not sent


def test_all_of_a_change_is_sent_in_the_end() -> None:
    """Each round sends 160 values of 10,000, and the change is in the first."""
    unsent = Unsent(Plan([Segment(0, 10_000, Sparse(decay=1.0))]))
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(10_000, generator=generator)
    total = sent(unsent, change)
    unsent.commit()
    assert (total != 0).sum() <= 160
    for _ in range(200):
        total += sent(unsent, torch.zeros(10_000))
        unsent.commit()
    assert (total - change).norm() < 0.01 * change.norm()


def test_values_that_were_not_sent_decay() -> None:
    unsent = Unsent(Plan([Segment(0, 4096, Sparse(top=1, decay=0.5))]))
    values = torch.zeros(4096)
    values[0], values[1] = 8.0, 4.0
    sent(unsent, values)
    unsent.commit()
    assert sent(unsent, torch.zeros(4096))[1] == 2.0


def test_an_aborted_round_changes_nothing_of_what_was_not_sent() -> None:
    plan = Plan([Segment(0, 8192, Sparse())])
    unsent, undisturbed = Unsent(plan), Unsent(plan)
    for seed in range(5):
        values = torch.randn(8192, generator=torch.Generator().manual_seed(seed))
        sent(unsent, 100 * values)
        unsent.abort()
        assert torch.equal(sent(unsent, values), sent(undisturbed, values))
        unsent.commit()
        undisturbed.commit()


def test_chunks_that_were_not_encoded_in_a_round_keep_what_was_not_sent() -> None:
    plan = Plan([Segment(0, 3 * 4096, Sparse(decay=1.0))])
    unsent, undisturbed = Unsent(plan), Unsent(plan)
    values = torch.randn(3 * 4096, generator=torch.Generator().manual_seed(3))
    for one in (unsent, undisturbed):
        sent(one, values)
        one.commit()
    sent(unsent, values[:4096])
    unsent.commit()
    assert torch.equal(sent(unsent, values[4096:], 4096), sent(undisturbed, values)[4096:])


def test_bad_values_leave_what_was_not_sent_as_it_was() -> None:
    plan = Plan([Segment(0, 4096, Sparse())])
    unsent, undisturbed = Unsent(plan), Unsent(plan)
    values = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    with pytest.raises(NotFinite):
        sent(unsent, values.log())
    unsent.commit()
    assert torch.equal(sent(unsent, values), sent(undisturbed, values))


# what cannot be


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    values = torch.ones(5000)
    values[4999] = value
    with pytest.raises(NotFinite):
        encoded_by(Sparse(), values)


@pytest.mark.parametrize("how", ["index", "table", "negative", "length"])
def test_bytes_that_no_encoder_writes_are_refused(how: str) -> None:
    codec = Sparse(top=4, chunk=100)
    encoded = encoded_by(codec, torch.randn(100))
    if how == "index":
        encoded[4:] = 0xFF  # 127 of 100
    elif how == "table":
        encoded[:4] = 0xFF
    elif how == "negative":
        encoded[:2] = torch.tensor([-1.0], dtype=torch.bfloat16).view(torch.uint8)
    else:
        encoded = encoded[:-1]
    with pytest.raises(BadEncoding):
        decoded_by(codec, encoded, 100)


@pytest.mark.parametrize(
    "options",
    [
        {"top": 0}, {"top": 5000}, {"chunk": 1}, {"bits": 0}, {"bits": 5}, {"decay": 0.0}, {"decay": 1.5},
        {"top": 2.5}, {"top": "64"}, {"chunk": 512.5}, {"bits": 1.5}, {"decay": "0.9"}, {"decay": math.nan},
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_used_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="for example"):
        Sparse(**options)


def test_the_name_of_a_sparse_codec_has_its_settings() -> None:
    codec = codec_named(Sparse(top=7, chunk=512, bits=3, decay=0.9).setting)
    assert isinstance(codec, Sparse)
    assert (codec.top, codec.chunk, codec.bits, codec.decay) == (7, 512, 3, 0.9)
    assert isinstance(codec_of_code(6, codec.setting), Sparse)
    with pytest.raises(BadEncoding):
        codec_of_code(6, "int8")
    with pytest.raises(ConfigError, match=r"sparse-64-4096-2-0\.95"):
        codec_named("sparse-many")


def test_contributions_are_added_in_the_order_of_ranks_and_one_may_be_missing() -> None:
    codec = Sparse(top=8, chunk=64)
    plan = Plan([Segment(0, 200, codec)])
    weights = [1.0, 0.0, 2.0, 5.0]
    gathered = Gathered(plan, weights, [1.0] * len(weights))
    encoded = torch.empty(gathered.num_bytes(0, 200), dtype=torch.uint8)
    values = {rank: torch.randn(200, generator=torch.Generator().manual_seed(rank)) for rank in (0, 2, 3)}
    sent = {rank: encoded_by(codec, one) for rank, one in values.items()}
    plain = {rank: decoded_by(codec, one, 200) for rank, one in sent.items()}
    mean = torch.empty(200)
    gathered.fill(encoded, sent)
    gathered.decode(encoded, 0, mean)
    torch.testing.assert_close(mean, (plain[0] + 2 * plain[2] + 5 * plain[3]) / 8)
    gathered.fill(encoded, {0: sent[0], 3: sent[3]})
    gathered.decode(encoded, 0, mean)
    torch.testing.assert_close(mean, (plain[0] + 5 * plain[3]) / 6)
    gathered.fill(encoded, {})
    with pytest.raises(BadEncoding):
        gathered.decode(encoded, 0, mean)


def test_a_tensor_that_is_not_averaged_is_that_of_the_largest_contributor() -> None:
    plan = Plan([Segment(0, 128, Sparse(top=8, chunk=64)), Segment(128, 131, NONE, is_chosen=True)])
    gathered, mean = Gathered(plan, [1.0, 0.0, 2.0, 5.0], [1.0] * 4), torch.empty(plan.numel)
    encoded, sent = torch.empty(gathered.num_bytes(0, plan.numel), dtype=torch.uint8), dict[int, torch.Tensor]()
    for rank in (0, 2, 3):
        sent[rank] = torch.empty(plan.num_bytes(0, plan.numel), dtype=torch.uint8)
        plan.encode(torch.full((plan.numel,), 10.0 * rank), 0, sent[rank])
    for present, largest in (([0, 2, 3], 3), ([0, 2], 2)):
        gathered.fill(encoded, {rank: sent[rank] for rank in present})
        gathered.decode(encoded, 0, mean)
        assert mean[-3:].tolist() == [10.0 * largest] * 3


def passed_on(change: str) -> Butterfly:
    """A member receives the means of another one's span, in which its own values may have been changed."""
    codec, numel = Sparse(top=4, chunk=64), 256
    plan = plan_in(codec, numel)

    async def receive() -> Butterfly:
        values_N = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        butterfly = butterfly_of(group_of(2), 0, values_N, plan)
        gathered = Gathered(plan, [1.0, 1.0], [1.0, 1.0])
        (sent,) = [bytes(part) for part in list(butterfly._encoded_values(1))]  # noqa: SLF001 (a step of the exchange)
        (chunk,), rooms = butterfly.partition.chunks[1], butterfly._rooms_for_encoded(1, None)  # noqa: SLF001
        room = next(rooms)
        own = torch.tensor(list(sent), dtype=torch.uint8)
        if change == "altered":
            own[4] ^= 1
        elif change == "too early":
            butterfly._own_encoded.clear()  # noqa: SLF001
        means = torch.empty(gathered.num_bytes(chunk.start, chunk.stop), dtype=torch.uint8)
        other = encoded_by(codec, torch.ones(chunk.stop - chunk.start))
        gathered.fill(means, {1: other} if change == "left out" else {0: own, 1: other})
        room[:] = bytes(means.tolist())
        assert not list(rooms), "one chunk"
        return butterfly

    return asyncio.run(receive())


def test_values_cannot_come_back_before_they_were_sent() -> None:
    with pytest.raises(InvalidContribution, match="are not those that this peer sent"):
        passed_on("too early")


def test_own_values_may_come_back() -> None:
    passed_on("")


def test_a_reducer_that_alters_what_it_passes_on_is_found_out() -> None:
    with pytest.raises(InvalidContribution, match="are not those that this peer sent"):
        passed_on("altered")


@pytest.mark.parametrize(("told", "reason"), [([0, 1], "are not of the members in its record"), ([1], LEAVES_OUT)])
def test_a_record_names_those_whose_values_were_passed_on(told: list[int], reason: str) -> None:
    """A reducer that has lost a member sends it no record: here nobody was lost, so its values must be there."""
    butterfly = passed_on("left out")
    with pytest.raises(InvalidContribution, match=reason):
        butterfly._read_record(MeansRecords(2, [0, 1]).encode([told], Told([], [])), 1)  # noqa: SLF001
