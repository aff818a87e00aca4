"""``manyhands.Averager``: exact, identical everywhere, all or nothing, and back in step after any absence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.averaging.messages import Verdict, Vote
from manyhands.averaging.peer_records import AVERAGING_KIND, peer_key
from manyhands.averaging.round.driver import RoundDriver
from manyhands.averaging.round.exchange import Contribution
from manyhands.base.errors import ConfigError, ManyhandsError, NothingToAverage
from manyhands.testing.blocking import SimPeer, run_blocking
from tests.averagers import RUN, close_all, join, sim_peers, step, step_all, weighted_mean
from tests.memory_transport import MemoryNetwork
from tests.network import PATIENCE_S, until
from tests.phases import around_rounds, change_first_vote

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-14}


def values_of(num_peers: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of a size between 1 and 2, so that relative errors mean something."""
    generator = torch.Generator().manual_seed(numel + num_peers)
    return [(1 + torch.rand(numel, generator=generator, dtype=torch.float64)).to(dtype) for _ in range(num_peers)]


def assert_mean(tensors: Sequence[torch.Tensor], expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    for tensor in tensors:
        assert tensor.dtype == dtype
        assert torch.equal(tensor, tensors[0]), "bit-identical everywhere"
        torch.testing.assert_close(tensor.double(), expected, rtol=TOLERANCE[dtype], atol=0.0)


@pytest.mark.parametrize(
    ("kind", "num_peers", "numel", "clients", "auxiliaries", "dtype"),
    [
        ("memory", 2, 0, (), (), torch.float32),
        ("memory", 2, 1, (), (), torch.float32),
        ("memory", 3, 7, (), (), torch.float32),
        ("tls", 2, 10_007, (), (), torch.float32),
        ("tls", 4, 33_333, (1, 3), (2,), torch.float32),
        ("memory", 5, 5_003, (4,), (0, 3), torch.float32),
        ("memory", 9, 9_001, (2, 5), (7,), torch.float32),
        *(("memory", 3, 4_099, (1,), (), dtype) for dtype in DTYPES if dtype != torch.float32),
    ],
)
async def test_all_hold_the_weighted_mean(
    kind: str,
    num_peers: int,
    numel: int,
    clients: tuple[int, ...],
    auxiliaries: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    values = values_of(num_peers, numel, dtype)
    tensors = [value.clone() for value in values]
    weights = [0.5 + 3 * number for number in range(num_peers)]
    async with sim_peers(num_peers, kind=kind, clients=clients) as peers:
        averagers = [await join(peer, [tensors[i]], auxiliary=i in auxiliaries) for i, peer in enumerate(peers)]
        results = await step_all(averagers, weights)
        await close_all(averagers)
    given = {peer.peer_id: weights[i] for i, peer in enumerate(peers) if i not in auxiliaries}
    for result in results:
        assert result.committed, result.reason
        assert result.reason == ""
        assert set(result.group) == {peer.peer_id for peer in peers}
        assert result.contributors == given
        assert result.round_id == results[0].round_id
        assert set(result.seconds) == {"matchmaking", "averaging", "vote"}
        assert all(0 <= seconds < 10 for seconds in result.seconds.values())
    contributing = [i for i in range(num_peers) if i not in auxiliaries]
    mean = weighted_mean([values[i] for i in contributing], [weights[i] for i in contributing])
    assert_mean(tensors, mean, dtype)


async def test_the_bytes_of_a_round_are_those_of_the_values() -> None:
    tensors = values_of(2, 100_000)
    async with sim_peers(2) as peers:
        averagers = [await join(peer, [tensors[i]]) for i, peer in enumerate(peers)]
        results = await step_all(averagers)
        await close_all(averagers)
    for result in results:
        assert 400_000 <= result.num_bytes_sent < 402_000  # half of the values, and half of the means
        assert 400_000 <= result.num_bytes_received < 402_000


@pytest.mark.long
async def test_peers_average_a_large_vector_over_tls() -> None:
    numel = 3_000_000
    values = values_of(2, numel)
    tensors = [value.clone() for value in values]
    async with sim_peers(2, kind="tls") as peers:
        config = AveragingConfig()
        averagers = [await join(peer, [tensors[i]], averaging=config) for i, peer in enumerate(peers)]
        results = await step_all(averagers, [1.0, 3.0], timeout_s=60.0)
        await close_all(averagers)
    assert all(result.committed for result in results), results
    assert_mean(tensors, weighted_mean(values, [1.0, 3.0]))


async def test_a_list_of_mixed_tensors_keeps_its_shapes_dtypes_and_strides() -> None:
    def tensors_of(number: int) -> list[torch.Tensor]:
        values = torch.arange(24.0).reshape(4, 6) + number
        return [
            torch.nn.Parameter(values.clone()),
            values.half().t(),
            values.double()[:, ::2],
            torch.tensor(float(number)),
            torch.empty(0, dtype=torch.bfloat16),
        ]

    lists = [tensors_of(number) for number in (0, 2)]
    async with sim_peers(2) as peers:
        averagers = [await join(peer, iter(lists[i])) for i, peer in enumerate(peers)]
        results = await step_all(averagers, [1.0, 1.0])
        await close_all(averagers)
    assert all(result.committed for result in results)
    for tensors in lists:
        for tensor, expected in zip(tensors, tensors_of(1), strict=True):
            assert torch.equal(tensor, expected)
            assert tensor.dtype == expected.dtype
            assert tensor.stride() == expected.stride()


async def test_averagers_hold_the_mean_in_each_of_several_rounds() -> None:
    tensors = [torch.zeros(5) for _ in range(3)]
    async with sim_peers(3) as peers:
        averagers = [await join(peer, [tensors[i]]) for i, peer in enumerate(peers)]
        ids = set()
        for number in range(5):
            for i, tensor in enumerate(tensors):
                tensor.fill_(float(number + i))
            results = await step_all(averagers)
            assert all(result.committed and len(result.group) == 3 for result in results), results
            assert_mean(tensors, torch.full((5,), number + 1.0).double())
            ids.add(results[0].round_id)
        await close_all(averagers)
    assert len(ids) == 5


async def test_a_peer_that_joins_late_takes_part_in_the_next_round() -> None:
    tensors = [torch.full((3,), float(i)) for i in range(3)]
    async with sim_peers(3) as peers:
        averagers = [await join(peer, [tensors[i]]) for i, peer in enumerate(peers[:2])]
        for _ in range(3):
            assert all(result.committed for result in await step_all(averagers))
        averagers.append(await join(peers[2], [tensors[2]]))
        assert await run_blocking(lambda: averagers[2].num_peers) == 3
        results = await step_all(averagers)
        await close_all(averagers)
    assert all(result.committed and len(result.group) == 3 for result in results), results
    assert_mean(tensors, torch.full((3,), (0.5 + 0.5 + 2) / 3).double())


async def test_a_peer_that_missed_rounds_takes_part_in_the_next_one() -> None:
    config = AveragingConfig(matchmaking_time_s=0.5, averaging_timeout_s=10.0)
    tensors = [torch.full((3,), float(i)) for i in range(3)]
    async with sim_peers(3) as peers:
        averagers = [await join(peer, [tensors[i]], averaging=config) for i, peer in enumerate(peers)]
        for _ in range(2):  # the third computes for long
            assert all(result.committed and len(result.group) == 2 for result in await step_all(averagers[:2]))
        results = await step_all(averagers)
        await close_all(averagers)
    assert all(result.committed and len(result.group) == 3 for result in results), results


async def test_a_member_that_dies_costs_nobody_the_round() -> None:
    values = values_of(4, 3_000_000)
    tensors = [value.clone() for value in values]
    async with sim_peers(4, kind="tls", chunk_numel=16_384) as peers:
        config = AveragingConfig(averaging_timeout_s=30.0)
        averagers = [await join(peer, [tensors[i]], averaging=config) for i, peer in enumerate(peers)]
        victim = peers[3].endpoint
        steps = [asyncio.ensure_future(step(averager, timeout_s=20.0)) for averager in averagers]
        sent_before = victim.bytes_sent
        await until(lambda: victim.bytes_sent > sent_before + 100_000, "its values are on the way")
        await victim.close()
        results = await asyncio.gather(*steps[:3])
        steps[3].cancel()
        await asyncio.wait([steps[3]])
        await close_all(averagers[:3])
    for result in results:
        assert result.committed, result.reason
        assert len(result.group) == 4
        assert result.seconds["matchmaking"] < 5.0
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors[:3])
    means = [weighted_mean(values[:number], [1.0] * number) for number in (3, 4)]
    closest = torch.stack([(tensors[0] - mean).abs() for mean in means]).min(dim=0).values
    assert closest.max() < 1e-5, "each value is the mean of who delivered it"
    assert torch.equal(tensors[3], values[3]), "the tensors of who died are untouched"


async def test_a_step_without_other_peers_commits_nothing_and_says_why() -> None:
    tensor = torch.ones(3)
    async with sim_peers(1) as peers:
        averager = await join(peers[0], [tensor])
        result = await step(averager, timeout_s=1.5)
        await close_all([averager])
    assert not result.committed
    assert result.reason == f"no other peer averages under run id '{RUN}'"
    assert result.group == () == tuple(result.contributors)
    assert torch.equal(tensor, torch.ones(3))


async def test_a_step_that_no_other_peer_joins_commits_nothing() -> None:
    tensors = [torch.ones(3), torch.zeros(3)]
    async with sim_peers(2) as peers:
        averagers = [await join(peer, [tensors[i]]) for i, peer in enumerate(peers)]
        for averager in averagers:  # one leads, the other follows
            result = await step(averager, timeout_s=1.0)
            assert not result.committed
            assert result.reason
        assert torch.equal(tensors[0], torch.ones(3))
        assert all(result.committed for result in await step_all(averagers)), "and then they do"
        await close_all(averagers)


async def test_a_leader_that_does_not_step_is_replaced() -> None:
    async with sim_peers(3) as peers:
        by_id = sorted(peers, key=lambda peer: peer.peer_id)
        averagers = [await join(peer, [torch.full((2,), float(i))]) for i, peer in enumerate(by_id)]
        results = await step_all(averagers[1:])
        await close_all(averagers)
    for result in results:
        assert result.committed, result.reason
        assert by_id[0].peer_id not in result.group


async def published(reader: SimPeer, peer: SimPeer) -> dict[str, Any]:
    """The record that a peer publishes for the others, as another one reads it."""
    records = await reader.dht.get(peer_key(RUN, AVERAGING_KIND))
    record: dict[str, Any] = records[peer.peer_id].value
    return record


async def test_a_liar_with_a_huge_round_number_does_not_stop_others() -> None:
    """A peer publishes the highest round number, or one that is not believed; the others average all the same."""
    tensors = [torch.full((3,), float(i)) for i in range(2)]
    async with sim_peers(3) as peers:
        averagers = [await join(peer, [tensors[i]]) for i, peer in enumerate(peers[:2])]
        liar = peers[2]
        honest = await published(liar, peers[0])
        for round_number in (2**48, 2**53 + 1, 2**53, 2**48 - 1):
            lie = honest | {"position": {"step": round_number, "lineage": b"lie"}}
            await liar.dht.store(peer_key(RUN, AVERAGING_KIND), lie, 30.0, subkey=liar.peer_id)
            for _ in range(2):
                results = await step_all(averagers)
                assert all(result.committed and len(result.group) == 2 for result in results), results
        await close_all(averagers)


async def test_two_parts_of_a_swarm_find_each_other() -> None:
    network = MemoryNetwork()
    async with sim_peers(2, network=network) as few, sim_peers(2, first=2, network=network) as many:
        tensors = [torch.full((3,), float(i)) for i in range(4)]
        averagers = [await join(peer, [tensors[i]]) for i, peer in enumerate([*few, *many])]
        parts = [averagers[:2], averagers[2:]]
        for part, num_rounds in zip(parts, (1, 3), strict=True):
            for _ in range(num_rounds):
                results = await step_all(part)
                assert all(result.committed and len(result.group) == 2 for result in results), results
        for peer in many:
            await peer.dht.join(few[0].endpoint.addresses)
        results = await step_all(averagers)
        await close_all(averagers)
    assert all(result.committed and len(result.group) == 4 for result in results), results
    assert_mean(tensors, torch.full((3,), 1.5).double())


async def test_a_member_of_weight_zero_gets_the_mean_and_all_zero_weights_are_an_error() -> None:
    tensors = [torch.full((3,), float(i)) for i in range(3)]
    tensors[1].fill_(float("nan"))  # must not travel
    async with sim_peers(3) as peers:
        averagers = [await join(peer, [tensors[i]]) for i, peer in enumerate(peers)]
        results = await step_all(averagers, [1.0, 0.0, 3.0])
        assert all(result.committed for result in results), results
        assert peers[1].peer_id in results[0].group
        assert peers[1].peer_id not in results[0].contributors
        assert_mean(tensors, torch.full((3,), 1.5).double())
        outcomes = await asyncio.gather(*(step(averager, 0.0) for averager in averagers), return_exceptions=True)
        await close_all(averagers)
    assert all(isinstance(outcome, NothingToAverage) for outcome in outcomes), outcomes
    assert_mean(tensors, torch.full((3,), 1.5).double())


async def test_an_averager_with_other_tensors_is_refused_when_it_is_made() -> None:
    async with sim_peers(2) as peers:
        averager = await join(peers[0], [torch.zeros(3), torch.zeros(2, dtype=torch.float16)])
        for others in ([torch.zeros(4)], [torch.zeros(3), torch.zeros(2)]):
            with pytest.raises(manyhands.ManyhandsError) as error:
                await join(peers[1], others)
            assert f"the tensors of peer {peers[0].peer_id} differ" in str(error.value)
            assert "float32[3] on cpu, float16[2] on cpu" in str(error.value)
        fitting = await join(peers[1], [torch.zeros(3), torch.zeros(2, dtype=torch.float16)])
        assert all(result.committed for result in await step_all([averager, fitting]))
        await close_all([averager, fitting])


async def test_a_step_says_when_only_others_with_other_tensors_are_there() -> None:
    async with sim_peers(2) as peers:
        averager = await join(peers[0], [torch.zeros(3)])
        other = await published(peers[1], peers[0]) | {"tensors": b"others", "summary": "two lists"}
        await peers[1].dht.store(peer_key(RUN, AVERAGING_KIND), other, 30.0, subkey=peers[1].peer_id)
        result = await step(averager, timeout_s=1.5)
        await close_all([averager])
    assert not result.committed
    assert result.reason.startswith(
        f"the tensors of peer {peers[1].peer_id} differ: it has two lists; here there are 1"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
async def test_tensors_on_a_gpu_stay_there() -> None:
    lists = [[torch.full((5_000,), float(i), device="cuda"), torch.ones(3, device="cuda").half()] for i in range(2)]
    async with sim_peers(2) as peers:
        averagers = [await join(peer, lists[i]) for i, peer in enumerate(peers)]
        assert all(result.committed for result in await step_all(averagers))
        await close_all(averagers)
    for first, second in lists:
        assert first.is_cuda
        assert second.is_cuda
        assert torch.equal(first.cpu(), torch.full((5_000,), 0.5))
        assert torch.equal(second.cpu(), torch.ones(3).half())


async def test_one_of_two_differing_averagers_that_begin_at_once_stays() -> None:
    async with sim_peers(2) as peers:
        outcomes = await asyncio.gather(
            *(join(peer, [torch.zeros(3 + i)]) for i, peer in enumerate(peers)), return_exceptions=True
        )
        stayed = [outcome for outcome in outcomes if isinstance(outcome, manyhands.Averager)]
        assert len(stayed) == 1, outcomes
        await close_all(stayed)


async def test_closing_ends_a_step_that_runs() -> None:
    tensor = torch.ones(3)
    async with sim_peers(2) as peers:
        averagers = [await join(peer, [tensor.clone()]) for peer in peers]
        stepping = asyncio.ensure_future(step(averagers[0], timeout_s=10.0))
        await asyncio.sleep(0)
        await run_blocking(averagers[0].close)
        result = await asyncio.wait_for(stepping, PATIENCE_S)
        assert not result.committed
        assert result.reason == "this averager is closed"
        with pytest.raises(manyhands.ManyhandsError, match="this averager is closed"):
            await step(averagers[0])
        await run_blocking(averagers[0].close)
        await close_all(averagers[1:])


async def test_a_peer_averages_once_under_a_run_id() -> None:
    async with sim_peers(1) as peers:
        averager = await join(peers[0], [torch.ones(3)])
        with pytest.raises(ConfigError, match="under run id 'averages' already"):
            await join(peers[0], [torch.ones(3)])
        await close_all([averager])
        await close_all([await join(peers[0], [torch.ones(3)])])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"auxiliary": "no"}, "auxiliary='no' must be True or False"),
        ({"averaging": {"codec": "int8"}}, "averaging=.* must be made by manyhands.AveragingConfig"),
        ({"averaging": None, "matchmaking_time_s": "5"}, "matchmaking_time_s='5' must be a finite number above 0"),
        ({"averaging": AveragingConfig(aggregate="centered_clip")}, "an Averager takes the mean, not aggregate="),
        ({"tensors": torch.nn.Linear(2, 2)}, r"tensors is of type Linear; give tensors, such as model\.parameters"),
    ],
)
async def test_arguments_of_a_wrong_kind_are_named(given: dict[str, Any], message: str) -> None:
    async with sim_peers(1) as peers:
        with pytest.raises(ConfigError, match=message):
            await join(peers[0], **{"tensors": [torch.ones(3)]} | given)
        await close_all([await join(peers[0], [torch.ones(3)])])


@pytest.fixture
async def pair() -> object:
    async with sim_peers(2) as peers:
        yield peers


async def test_bad_input_to_step_changes_nothing(pair: list[SimPeer]) -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    averagers = [await join(peer, [tensors[i]]) for i, peer in enumerate(pair)]
    for weight in (-1.0, float("nan"), float("inf"), -float("inf"), 2.0**33, "two", None):
        with pytest.raises(manyhands.ManyhandsError, match=r"weight=.* must be a number from 0 to 4294967296"):
            await step(averagers[0], weight)  # type: ignore[arg-type]
    for timeout_s in (0, -1.0, float("nan"), float("inf"), "5"):
        with pytest.raises(manyhands.ManyhandsError, match=r"timeout_s=.* must be more than 0"):
            await step(averagers[0], 1.0, timeout_s)  # type: ignore[arg-type]
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensors[0][1] = bad
        with pytest.raises(manyhands.ManyhandsError, match="tensor 0 has a value that is infinite or NaN"):
            await step(averagers[0])
    tensors[0][1] = 2.0
    assert pair[0].endpoint.bytes_sent < 100_000
    assert all(result.committed for result in await step_all(averagers))
    assert tensors[0].tolist() == [2.0, 3.0]
    await close_all(averagers)


def resize(tensor: torch.Tensor) -> None:
    tensor.resize_(7)


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def retype(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.half()


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("change", [resize, free, retype])
async def test_a_tensor_that_is_resized_or_freed_in_mid_round_is_not_written(
    pair: list[SimPeer], change: Callable[[torch.Tensor], None], is_before: bool
) -> None:
    lists = [[torch.ones(300), torch.full((5,), float(i))] for i in range(2)]
    averagers = [await join(peer, lists[i]) for i, peer in enumerate(pair)]

    async def change_in_it(_: RoundDriver, run: Callable[[], Awaitable[Verdict]]) -> Verdict:
        if is_before:
            change(lists[0][1])
        verdict = await run()
        if not is_before:
            change(lists[0][1])
        return verdict

    around_rounds(pair[0].peer_id, change_in_it)
    lists[1][0].fill_(3.0)
    outcomes = await asyncio.gather(*(step(averager) for averager in averagers), return_exceptions=True)
    assert isinstance(outcomes[0], manyhands.ManyhandsError), outcomes
    assert "tensor 1" in str(outcomes[0])
    assert torch.equal(lists[0][0], torch.ones(300)), "nothing is written, the others neither"
    assert isinstance(outcomes[1], manyhands.RoundResult)
    assert outcomes[1].committed, "the others have their round"
    with pytest.raises(ManyhandsError, match="tensor 1"):
        await step(averagers[0])
    await close_all(averagers)


def test_the_peers_are_counted_from_the_thread_of_the_user() -> None:
    with (
        manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as peer,
        manyhands.Averager([torch.zeros(2)], peer=peer, run_id="alone") as averager,
    ):
        assert averager.num_peers == 1


async def test_a_mistyped_run_id_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        return [message for record in caplog.records if "averages under run id" in (message := record.getMessage())]

    async with sim_peers(3) as peers:
        averagers = [await join(peer, [torch.zeros(3)]) for peer in peers[:2]]
        # a second averager of the same peers is no mistake
        averagers += [await join(peer, [torch.zeros(3)], run_id="second") for peer in peers[:2]]
        assert not warnings()
        averagers.append(await join(peers[2], [torch.zeros(3)], run_id="averagse"))
        (warning,) = warnings()
        assert "averages under run id 'averagse'; they average under 'averages', 'second'" in warning
        await close_all(averagers)
        caplog.clear()
        await close_all([await join(peers[2], [torch.zeros(3)], run_id="another")])
        assert not warnings(), "the others have left"


async def test_a_member_that_lacks_the_mean_keeps_its_values_and_learns_why() -> None:
    async with sim_peers(3) as peers:
        peers.sort(key=lambda peer: peer.peer_id)  # the last one does not lead
        tensors = [torch.full((50,), float(number)) for number in range(3)]
        averagers = [await join(peer, [tensor]) for peer, tensor in zip(peers, tensors, strict=True)]

        def lose(contribution: Contribution, vote: Vote) -> None:
            contribution.means, vote.digests = None, []

        change_first_vote(peers[2].peer_id, lose)
        *others, result = await step_all(averagers)
        assert not result.committed
        assert result.reason == "the others hold the mean, but this peer lost it on the way"
        assert [float(tensor.mean()) for tensor in tensors] == [1.0, 1.0, 2.0]
        for other in others:
            assert other.committed
            assert other.round_id == result.round_id
            assert other.contributors.keys() == {peer.peer_id for peer in peers}, "its values are in it"
        await close_all(averagers)
