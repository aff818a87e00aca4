"""Reducers that lie are found out by the other members, in the same exchange; honest ones never are."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.allreduce.checks import LEAVES_OUT, NO_MEANS, OTHER_VALUES, Norms, SpanCheck, Told
from manyhands.averaging.codecs import (
    BF16,
    FP16,
    INT4,
    INT8,
    NONE,
    Chosen,
    Codec,
    Plan,
    Sparse,
    Uncompared,
    Unscaled,
    Unsent,
    kernels,
    plan_of,
)
from manyhands.averaging.memory import Memory
from manyhands.averaging.messages import Group
from manyhands.base.errors import PeerLost
from manyhands.testing.lies import lie_about_means
from tests.liars import forget_values
from tests.memory_transport import MemoryStream
from tests.smaller import smaller
from tests.sweeps import few_of
from tests.unit.averaging.groups import group_of, peer

CODECS = [NONE, FP16, BF16, INT8, INT4]
OF_EACH = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
LIAR = 1
Change = Callable[[Butterfly], None]


@dataclass
class World:
    """A group whose members exchange their values again and again."""

    group: Group
    plan: Plan
    sizes: dict[str, float] = field(default_factory=dict)

    def exchange(
        self,
        vectors: Sequence[torch.Tensor],
        *,
        changes: dict[int, Change] | None = None,
        in_place: Collection[int] = (),
        cut: Collection[tuple[int, int, int]] = (),
    ) -> list[Butterfly]:
        """The members' exchange once it has ended.

        Args:
            changes: by rank, what a member does that others do not.
            cut: pairs of ranks whose stream breaks once the first has sent so many bytes to the second.
        """

        async def run() -> list[Butterfly]:
            butterflies = []
            for rank, vector in enumerate(vectors):
                own_N = vector.clone()
                averaged_N = own_N if rank in in_place else torch.empty_like(own_N)
                with smaller(**{"span_numel": 1} | self.sizes):
                    butterfly = Butterfly(
                        self.group, rank, own_N, self.plan,
                        members=range(len(vectors)), averaged_N=averaged_N, memory=Memory(),
                        unsent=Unsent(self.plan) if self.plan.passes_on else None, is_measured=True,
                    )  # fmt: skip
                if changes and rank in changes:
                    changes[rank](butterfly)
                butterflies.append(butterfly)
            ends: list[dict[int, Awaitable[MemoryStream]]] = [{} for _ in vectors]
            for one, other in itertools.combinations(range(len(vectors)), 2):
                if other in butterflies[one].partners:
                    limits = {(by, to): num for by, to, num in cut}
                    here = Breaking(peer(one), peer(other), limits.get((one, other)))
                    there = Breaking(peer(other), peer(one), limits.get((other, one)))
                    here.other, there.other = there, here
                    ends[one][other], ends[other][one] = opened(here), opened(there)
            runs = (butterfly.run(streams) for butterfly, streams in zip(butterflies, ends, strict=True))
            await asyncio.gather(*runs)
            return butterflies

        return asyncio.run(asyncio.wait_for(run(), 60.0))


class Breaking(MemoryStream):
    def __init__(self, owner: object, remote: object, breaks_after: int | None) -> None:
        super().__init__(owner, remote)  # type: ignore[arg-type]
        self._left = breaks_after

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        if self._left is not None:
            self._left -= sum(memoryview(buffer).nbytes for buffer in buffers)
            if self._left < 0:
                self.abort()
                raise PeerLost(self.remote, "cut")
        await super().send(*buffers)


async def opened(stream: MemoryStream) -> MemoryStream:
    return stream


def clipped(group: Group, scales: Sequence[float]) -> Group:
    members = [
        msgspec.structs.replace(member, scale=scale) for member, scale in zip(group.members, scales, strict=True)
    ]
    return msgspec.structs.replace(group, members=members)


def randn(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def complaints(ended: Sequence[Butterfly]) -> list[tuple[int, int, str]]:
    """Who complains of whom, and why."""
    return [
        (rank, fault.about, fault.reason)
        for rank, butterfly in enumerate(ended)
        for fault in butterfly.faults.values()
        if fault.is_violation
    ]


# honest reducers


def gradient_like(rng: random.Random, numel: int, kind: str, rank: int, common: torch.Tensor) -> torch.Tensor:
    """Values of one of the kinds that members have."""
    own = randn(numel, rng.randrange(1 << 30))
    match kind:
        case "zeros":
            return torch.zeros(numel)
        case "cancel":  # the mean is nearly 0
            return common if rank % 2 else -common
        case "alike":
            return common + 0.01 * own
        case "rare":  # most are 0, as in embeddings
            return torch.where(randn(numel, rng.randrange(1 << 30)) > 2.0, own, 0.0)
        case "heavy":
            return own**3 * 1e-3
        case "signs":
            return own.sign() * 1e-4
        case "tiny":
            return own * 10.0 ** rng.choice([-12, -18, -20, -23, -30, -42])
        case "huge":
            return own * 1e30
        case "shifted":
            return own * 1e-3 + 1.0
    return own + common


KINDS = ["zeros", "cancel", "alike", "rare", "heavy", "signs", "tiny", "huge", "shifted", "plain"]


@OF_EACH
@pytest.mark.parametrize("seed", [2, *few_of([0, 1, 3], 0, pytest.mark.long), *few_of(range(4, 24), 0)])
def test_honest_reducers_are_never_complained_of(codec: Codec, seed: int) -> None:
    """Whatever the values are, whoever is clipped, absent from some chunks, or cannot be dialled."""
    rng = random.Random(f"{codec.name} {seed}")
    num_members = rng.randint(2, 16)
    shapes: list[Sequence[int]] = [(rng.choice([3, 70]), rng.randint(1, 300)), (rng.randint(1, 3000),)]
    if rng.random() < 0.7:
        shapes += [Unscaled((64, rng.randint(1, 80))), Uncompared((rng.randint(1, 300),)), Chosen((rng.randint(1, 9),))]
        rng.shuffle(shapes)
    plan = plan_of(shapes, codec)
    weights = [rng.choice([0.0, 1.0, rng.uniform(0.1, 9.0)]) for _ in range(num_members)]
    weights[0] = 1.0
    clients = [rank for rank in range(1, num_members) if rng.random() < 0.2]
    sizes = {"span_numel": rng.choice([1, 100, 2000]), "chunk_numel": rng.choice([300, 1000, 1 << 20])}
    group = group_of(num_members, weights=weights, clients=clients)
    group = clipped(group, [rng.choice([1.0, 1.0, rng.uniform(0.01, 1.0)]) for _ in weights])
    world = World(group, plan, sizes)
    for _ in range(3):
        common, kind = randn(plan.numel, rng.randrange(1 << 30)), rng.choice(KINDS)
        vectors = [gradient_like(rng, plan.numel, kind, rank, common) for rank in range(num_members)]
        in_place = [rank for rank in range(num_members) if rng.random() < 0.5]
        cut = []
        if rng.random() < 0.3 and num_members > 2:
            one, other = rng.sample(range(num_members), 2)
            cut = [(one, other, rng.choice([20, 1000, 5000]))]
        ended = world.exchange(vectors, in_place=in_place, cut=cut)
        assert not complaints(ended), (kind, num_members)
        if not cut:
            assert all(butterfly.is_whole for butterfly in ended)
            assert all(torch.equal(butterfly.averaged_N, ended[0].averaged_N) for butterfly in ended)


@pytest.mark.parametrize("codec", [NONE, FP16, INT8], ids=lambda codec: codec.name)
def test_honest_reducers_of_large_chunks_are_not_complained_of(codec: Codec) -> None:
    """Where the kernels average, and pieces of means lie in several chunks."""
    kernels.prepare(kernels.MIN_NUMEL, "auto")
    plan = plan_of([(1000, 1024), (99,)], codec)
    group = group_of(3, weights=[1.0, 2.0, 3.0])
    vectors = [randn(plan.numel, rank) for rank in range(3)]
    ended = World(group, plan, sizes={"chunk_numel": 100_000}).exchange(vectors, in_place=[0])
    assert not complaints(ended)
    assert all(torch.equal(butterfly.averaged_N, ended[0].averaged_N) for butterfly in ended)


# liars


def lies(
    codec: Codec,
    change: Callable[[torch.Tensor], torch.Tensor],
    tell: Callable[[Told], Told] | None = None,
    num_members: int = 4,
    without: int | None = None,
) -> list[tuple[int, int, str]]:
    plan = plan_of([(80, 80), (13,)], codec)
    vectors = [randn(plan.numel, rank) for rank in range(num_members)]

    def lie(butterfly: Butterfly) -> None:
        lie_about_means(butterfly, change, tell, without=without)

    ended = World(group_of(num_members), plan).exchange(vectors, changes={LIAR: lie}, in_place=[0])
    said = complaints(ended)
    assert all(about == LIAR for _, about, _ in said)
    for by, _, _ in said:
        assert not ended[by].is_whole, "it must not vote for these means"
    return said


@OF_EACH
@pytest.mark.parametrize("factor", [-1.0, -1000.0, -0.01, 2.5, 1000.0])
def test_all_find_a_mean_that_points_uphill_or_is_too_long(codec: Codec, factor: float) -> None:
    said = lies(codec, lambda mean: factor * mean)
    assert {by for by, _, _ in said} == {0, 2, 3}
    assert all(NO_MEANS in reason for *_, reason in said)


@OF_EACH
def test_random_values_in_place_of_the_mean_are_found(codec: Codec) -> None:
    said = lies(codec, lambda mean: randn(len(mean), 77))
    assert {by for by, _, _ in said} == {0, 2, 3}


@OF_EACH
def test_a_member_finds_that_its_values_are_not_in_the_mean(codec: Codec) -> None:
    """Its reducer has nothing to tell of it, or names it as absent although it has its values."""

    def forget(told: Told) -> Told:
        return Told(told.norms, [0.0 if rank == 2 else product for rank, product in enumerate(told.products)])

    said = lies(codec, lambda mean: mean, forget, without=2)
    assert [(by, OTHER_VALUES in reason) for by, _, reason in said] == [(2, True)]


def test_a_member_finds_that_it_is_called_absent() -> None:
    plan = plan_of([(80, 80)], NONE)
    changes = {LIAR: lambda butterfly: forget_values(butterfly, 2)}
    ended = World(group_of(4), plan).exchange([randn(plan.numel, rank) for rank in range(4)], changes=changes)
    assert [(by, about, LEAVES_OUT in reason) for by, about, reason in complaints(ended)] == [(2, LIAR, True)]


@OF_EACH
@pytest.mark.parametrize("is_of_norm", [False, True])
def test_a_member_finds_that_its_reducer_tells_wrong_numbers_of_it(codec: Codec, is_of_norm: bool) -> None:
    def wrong(told: Told) -> Told:
        norms, products = list(told.norms), list(told.products)
        (norms if is_of_norm else products)[3] *= 1.5 if is_of_norm else 0.5
        return Told(norms, products)

    said = lies(codec, lambda mean: mean, wrong)
    assert [(by, OTHER_VALUES in reason) for by, _, reason in said] == [(3, True)]


def test_to_tell_the_numbers_of_the_true_mean_wrongs_all_members() -> None:
    def right(told: Told) -> Told:
        return Told(told.norms, [-product for product in told.products])

    said = lies(INT8, lambda mean: -mean, right)
    assert [(by, OTHER_VALUES in reason) for by, _, reason in said] == [(0, True), (2, True), (3, True)]


def test_a_reducer_cannot_make_up_for_a_lie_with_its_own_product() -> None:
    """Its own values would have to be larger than it says."""

    def make_up(told: Told) -> Told:
        others = sum(product for rank, product in enumerate(told.products) if rank != LIAR)
        return Told(told.norms, [1e3 - others if rank == LIAR else one for rank, one in enumerate(told.products)])

    said = lies(NONE, lambda mean: -mean, make_up)
    assert [(by, NO_MEANS in reason) for by, _, reason in said] == [(0, True), (2, True), (3, True)]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("is_of_norm", [False, True])
def test_records_with_numbers_that_cannot_be_are_refused(number: float, is_of_norm: bool) -> None:
    def wrong(told: Told) -> Told:
        norms, products = list(told.norms), list(told.products)
        (norms if is_of_norm else products)[LIAR] = number
        return Told(norms, products)

    said = lies(NONE, lambda mean: mean, wrong)
    is_possible = is_of_norm and number == float("inf")  # of values that are not finite
    assert {by for by, _, _ in said} == (set() if is_possible else {0, 2, 3})


def test_contributions_that_are_passed_on_need_no_products() -> None:
    plan = plan_of([(80, 80)], Sparse(top=8, chunk=64))
    world = World(group_of(3), plan)
    ended = world.exchange([randn(plan.numel, rank) for rank in range(3)])
    assert not complaints(ended)
    assert Norms(plan, 3).told().products == []


# what the checks rely on


@OF_EACH
@pytest.mark.parametrize("seed", few_of(range(40), 8))
def test_no_codec_makes_a_larger_error_than_it_says(codec: Codec, seed: int) -> None:
    rng = random.Random(seed)
    numel = rng.choice([1, 2, 31, 32, 33, 216, 432, 65_536])
    kind = rng.choice(["heavy", "signs", "rare", "shifted", "plain", "levels", "huge"])
    values = gradient_like(rng, numel, kind, 0, torch.zeros(numel))
    if kind == "levels":  # the worst for int4: just between two levels
        values = torch.where(torch.arange(numel) % 32 == 0, 1.0, rng.choice([1, -1]) * 0.0626)
    plan = plan_of([(1, numel)], codec) if numel > 4096 else None
    encoded, decoded = torch.empty(codec.num_bytes(numel), dtype=torch.uint8), torch.empty(numel)
    codec.encode(values, encoded)
    codec.decode(encoded, decoded)
    assert (decoded - values).double().norm() <= codec.error * values.double().norm()
    assert plan is None or plan.error == codec.error


@given(
    st.lists(st.floats(min_value=0.0, width=32), min_size=4, max_size=4),
    st.lists(st.floats(), min_size=4, max_size=4),
    st.lists(st.sets(st.integers(0, 3), min_size=1).map(lambda present: present | {1}), min_size=2, max_size=2),
)
def test_whatever_a_record_tells_is_judged(norms: list[float], products: list[float], presents: list[set[int]]) -> None:
    plan = plan_of([(8,)], NONE)
    check = SpanCheck(plan, 1, [1.0, 2.0, 3.0, 0.5], [1.0, 1.0, 0.5, 1.0], 2, 0.0)
    check.add(0, 0, torch.ones(4), torch.ones(4))
    check.add(1, 4, torch.ones(4), torch.ones(4))
    assert check.fault([sorted(present) for present in presents], Told(norms, products)) in ("", NO_MEANS, OTHER_VALUES)
