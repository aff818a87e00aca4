"""An averager that begins late takes over the tensors of the others."""

from __future__ import annotations

import asyncio

import pytest
import torch

import manyhands
from manyhands.base.errors import ConfigError, Unavailable
from manyhands.testing.blocking import run_blocking
from tests.averagers import close_all, join, sim_peers, step_all


def tensors_of(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(300, 100, generator=generator),
        torch.randn(50, 40, generator=generator).t(),  # not contiguous
        torch.randn(7, generator=generator).double(),
    ]


async def have_published(averagers: list[manyhands.Averager]) -> None:
    """Wait until the others know where they are after a step."""
    assert all(await asyncio.gather(*(run_blocking(averager.wait_for_others) for averager in averagers)))


async def load(averager: manyhands.Averager) -> manyhands.LoadedState:
    return await run_blocking(averager.load_state_from_peers)


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_newcomer_takes_over_what_the_others_hold_and_averages_with_them(kind: str) -> None:
    async with sim_peers(3, kind=kind) as (*peers, late):
        lists = [tensors_of(seed) for seed in range(2)]
        averagers = [await join(peer, tensors) for peer, tensors in zip(peers, lists, strict=True)]
        for _ in range(2):
            assert all(result.committed for result in await step_all(averagers))
        await have_published(averagers)
        own = tensors_of(2)
        newcomer = await join(late, own)
        loaded = await load(newcomer)
        assert loaded.global_step == 2
        assert set(loaded.donors) <= {peer.peer_id for peer in peers}
        assert loaded.num_bytes > sum(tensor.numel() * tensor.itemsize for tensor in own) - 64
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(own, lists[0], strict=True))
        results = await step_all([*averagers, newcomer])
        assert {len(result.group) for result in results} == {3}
        await close_all([*averagers, newcomer])


async def test_peers_that_were_in_no_round_are_passed_over() -> None:
    async with sim_peers(8) as (*peers, late):
        mean = [torch.zeros(9000)]
        averagers = [
            await join(peer, tensors) for peer, tensors in zip(peers, (mean, [torch.ones(9000)]), strict=False)
        ]
        await step_all(averagers)
        await have_published(averagers)
        averagers += [await join(peer, [torch.full((9000,), 5.0)]) for peer in peers[2:]]
        averagers.append(newcomer := await join(late, own := [torch.full((9000,), 7.0)]))
        assert set((await load(newcomer)).donors) <= {peer.peer_id for peer in peers[:2]}
        assert torch.equal(own[0], mean[0])
        await close_all(averagers)


async def test_a_peer_without_others_keeps_its_values() -> None:
    async with sim_peers(1) as (peer,):
        averager = await join(peer, own := [torch.ones(3)])
        with pytest.raises(Unavailable, match="no other peer that averages under run id 'averages'"):
            await load(averager)
        assert own[0].tolist() == [1.0, 1.0, 1.0]
        await close_all([averager])
        with pytest.raises(ConfigError, match="closed"):
            await load(averager)


async def test_values_that_are_not_finite_are_not_taken_over() -> None:
    async with sim_peers(2) as (one, other):
        donor = await join(one, [torch.tensor([1.0, float("nan")])])
        newcomer = await join(other, own := [torch.zeros(2)])
        with pytest.raises(Unavailable, match=f"peer {one.peer_id} have values that are not finite"):
            await load(newcomer)
        assert own[0].tolist() == [0.0, 0.0]
        await close_all([donor, newcomer])


async def test_averagers_of_one_peer_hand_out_their_own_tensors() -> None:
    async with sim_peers(2) as (one, other):
        donors = [await join(one, [torch.full((2,), value)], run_id=f"run{value:.0f}") for value in (1.0, 2.0)]
        for value in (1.0, 2.0):
            newcomer = await join(other, own := [torch.zeros(2)], run_id=f"run{value:.0f}")
            await load(newcomer)
            assert own[0].tolist() == [value, value]
            await close_all([newcomer])
        await close_all(donors)


async def test_a_donor_whose_tensor_was_resized_says_so() -> None:
    async with sim_peers(2) as (one, other):
        donor = await join(one, tensors := [torch.ones(10)])
        newcomer = await join(other, [torch.zeros(10)])
        tensors[0].resize_(0)
        with pytest.raises(Unavailable, match=f"{one.peer_id}: refused .*tensor 0 was"):
            await load(newcomer)
        await close_all([donor, newcomer])
