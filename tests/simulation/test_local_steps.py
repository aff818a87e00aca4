"""Local steps in virtual time: several peers against one process that computes what they should hold."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from manyhands.averaging.round.exchange import Exchange
from manyhands.base.errors import ManifestMismatch
from manyhands.optim import local_steps
from manyhands.optim.local_steps import KEPT_SHARE, LocalReplica, LocalSteps, nesterov
from tests.simulation.swarm_of_trainers import Member, Swarm, assert_equal_parameters, cut, together
from tests.simulation.test_late_samples import BATCH_SIZE as MARKED_BATCH
from tests.simulation.test_late_samples import Marked, chance, freeze_with_waiting, lack_means_of_the_third_round
from tests.simulation.test_late_samples import start as start_marked
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_FEATURES = 6


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def batches_of(seed: int, number: int, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, NUM_FEATURES, generator=generator), torch.randn(size, 3, generator=generator))
        for _ in range(number)
    ]


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def plain_averaging(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)  # type: ignore[arg-type]


def expected(
    shards: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], num_local: int, steps: LocalSteps
) -> torch.nn.Module:
    """The agreed model after all batches, ``num_local`` of each shard at a time, each peer with AdamW of its own."""
    agreed, peers = new_model(), [new_model() for _ in shards]
    inner = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in peers]
    outer = steps.make_outer(agreed.parameters())
    for start in range(0, len(shards[0]), num_local):
        for shard, model, optimizer in zip(shards, peers, inner, strict=True):
            model.load_state_dict(agreed.state_dict())
            for batch in shard[start : start + num_local]:
                optimizer.zero_grad()
                loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        for position, parameter in enumerate(agreed.parameters()):
            own = [list(model.parameters())[position].detach() for model in peers]
            parameter.grad = parameter.detach() - torch.stack(own).mean(0)
        outer.step()
    return agreed


@pytest.mark.parametrize("steps", [LocalSteps(nesterov), LocalSteps(outer=plain_averaging)], ids=["nesterov", "plain"])
def test_peers_hold_what_one_process_computes(steps: LocalSteps) -> None:
    num_local, shards = 3, [batches_of(seed, 9) for seed in range(2)]

    def train(member: Member) -> None:
        for number, batch in enumerate(shards[int(member.name[-1])], 1):
            member.step(loss_of(member.model, batch))
            member.check_samples()
            if number % num_local == 0:
                member.wait_for(number // num_local)

    swarm = Swarm()
    for number in range(2):
        swarm.start(
            f"peer{number}", new_model, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), train,
            target_batch_size=2 * num_local * 4, batch_size_per_step=4, local_steps=steps,
        )  # fmt: skip
    swarm.world.run(200.0)
    want = expected(shards, num_local, steps)
    for member in swarm.members.values():
        assert member.optimizer.statistics.samples_used == 36
        for ours, theirs in zip(member.model.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1


# algebra


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained_on(splits: Sequence[int], **options: Any) -> torch.nn.Module:
    """The model after three steps of eight samples each, divided over so many peers like this."""
    batches = [cut(batch, splits) for batch in batches_of(3, 3, sum(splits))]

    def train(member: Member) -> None:
        together(len(splits), member)
        number = int(member.name[-1])
        for step, parts in enumerate(batches, 1):
            member.step(loss_of(member.model, parts[number]), batch_size=splits[number])  # type: ignore[arg-type]
            member.wait_for(step)
            member.check_samples()
        assert member.optimizer.statistics.samples_used == 3 * splits[number]

    swarm = Swarm(seed=2)
    for number in range(len(splits)):
        swarm.start(f"peer{number}", new_model, sgd, train, target_batch_size=sum(splits), **options)
    swarm.run()
    models = [member.model for member in swarm.members.values()]
    for model in models[1:]:
        assert_equal_parameters(model, models[0], tolerance=0.0)
    return models[0]


PLAIN = LocalSteps(outer=plain_averaging)


@pytest.mark.parametrize("splits", [(4, 4), (5, 3), (1, 2, 5)], ids=str)
def test_one_inner_step_of_sgd_and_plain_averaging_is_the_synchronous_step(splits: tuple[int, ...]) -> None:
    """However the samples are divided over peers; several inner steps are another computation."""
    local = trained_on(splits, local_steps=PLAIN)
    assert_equal_parameters(local, trained_on((4, 4)), tolerance=1e-6)


@pytest.mark.parametrize("splits", [(6, 2), (2, 2, 4)], ids=str)
def test_equal_samples_in_other_splits_give_the_equal_outer_step(splits: tuple[int, ...]) -> None:
    """Also with momentum."""
    assert_equal_parameters(
        trained_on(splits, local_steps=LocalSteps(nesterov)),
        trained_on((4, 4), local_steps=LocalSteps(nesterov)),
        tolerance=1e-6,
    )


def test_fragments_without_inner_steps_between_them_equal_one_whole_synchronisation() -> None:
    shards, samples = [batches_of(seed, 3) for seed in range(2)], (8, 4)

    def model_with(num_fragments: int) -> torch.nn.Module:
        def train(member: Member) -> None:
            together(2, member)
            number = int(member.name[-1])
            for period, batch in enumerate(shards[number]):
                member.step(loss_of(member.model, batch), batch_size=samples[number])
                member.wait_for(period * num_fragments + 1)
                for fragment in range(1, num_fragments):
                    member.step(loss_of(member.model, batch), batch_size=samples[number], weight=0.0)
                    member.wait_for(period * num_fragments + fragment + 1)
                member.check_samples()

        swarm, steps = Swarm(seed=4), LocalSteps(nesterov, fragments=num_fragments)
        for name in ("peer0", "peer1"):
            target = num_fragments * sum(samples)
            swarm.start(name, new_model, adam, train, target_batch_size=target, local_steps=steps)
        swarm.run()
        assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1
        return swarm.members["peer0"].model

    whole = model_with(1)
    assert_equal_parameters(model_with(3), whole, tolerance=1e-6)
    assert not torch.equal(next(whole.parameters()), next(new_model().parameters()))


# runs


def train_until(global_step: int, batch_s: Callable[[str], float] = lambda name: 0.5) -> Callable[[Member], None]:
    def train(member: Member) -> None:
        together(2, member)
        batches = batches_of(int(member.name[-1]), 400)
        for batch in itertools.cycle(batches):
            if member.optimizer.global_step >= global_step:
                break
            member.step(loss_of(member.model, batch), batch_s(member.name))
            member.check_samples()
        member.optimizer.settle()

    return train


def assert_all_agree(swarm: Swarm) -> None:
    by_step: dict[int, set[str]] = {}
    for member in swarm.members.values():
        by_step.setdefault(member.optimizer.global_step, set()).add(member.optimizer.state_digest())
        member.check_samples()
    assert all(len(digests) == 1 for digests in by_step.values()), by_step
    assert max(by_step) - min(by_step) <= 1


def start_all(swarm: Swarm, names: Sequence[str], train: Callable[[Member], None], **options: Any) -> None:
    options = {"target_batch_size": 48, "batch_size_per_step": 4, "local_steps": LocalSteps(nesterov), **options}
    for name in names:
        swarm.start(name, new_model, adam, train, **options)


@pytest.mark.parametrize(
    "steps",
    few_of(
        [LocalSteps(nesterov, overlap_steps=2), LocalSteps(nesterov), LocalSteps(nesterov, fragments=2)],
        1,
        pytest.mark.long,
    ),
    ids=["overlap", "whole", "fragments"],
)
def test_unequal_peers_have_the_same_learning_rate_after_each_outer_step(steps: LocalSteps) -> None:
    rates: dict[str, dict[int, float]] = {}
    inner_steps: dict[str, int] = {}

    def train(member: Member) -> None:
        together(2, member)
        mine = rates.setdefault(member.name, {})
        number, batch_s = int(member.name[-1]), {"peer0": 0.25, "peer1": 2.0}[member.name]
        for batch in batches_of(number, 400):
            member.step(loss_of(member.model, batch), batch_s)
            mine[member.optimizer.global_step] = member.optimizer.param_groups[0]["lr"]
            inner_steps[member.name] = inner_steps.get(member.name, 0) + 1
            if member.optimizer.global_step >= 6:
                break
        member.optimizer.settle()

    def halving(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)

    swarm = Swarm(seed=6)
    start_all(swarm, ["peer0", "peer1"], train, local_steps=steps, scheduler=halving)
    swarm.run()
    assert inner_steps["peer0"] > 5 * inner_steps["peer1"]
    common = rates["peer0"].keys() & rates["peer1"].keys()
    assert len(common) >= 5
    for step in common:
        periods = step // steps.fragments
        is_under_way = steps.overlap_steps > 0  # the next step may be made in the background already
        allowed = {0.01 * 0.5**periods, *([0.01 * 0.5 ** (periods + 1)] if is_under_way else [])}
        assert {rates["peer0"][step], rates["peer1"][step]} <= allowed, step
    assert_all_agree(swarm)


@pytest.mark.parametrize("overlap_steps", few_of([2, 50], 1, pytest.mark.long))
def test_with_an_overlap_training_goes_on_and_the_average_is_merged_half_way(
    overlap_steps: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More steps than there are from one average to the next are cut, which is said."""
    merged: list[float] = []
    follow = LocalReplica.follow

    def noted(self: LocalReplica, fragment: int, kept_share: float = 0.0) -> None:
        own, agreed = self._fragments[fragment].own[0], self._fragments[fragment].agreed[0].detach()
        want = kept_share * own.detach() + (1 - kept_share) * agreed
        follow(self, fragment, kept_share)
        torch.testing.assert_close(own.detach(), want)
        merged.append(kept_share)

    monkeypatch.setattr(LocalReplica, "follow", noted)
    swarm = Swarm(seed=7)
    swarm.world.network.default_link.latency_s = 0.15
    start_all(
        swarm, ["peer0", "peer1"], train_until(8), local_steps=LocalSteps(nesterov, overlap_steps=overlap_steps),
        target_batch_size=40,
    )  # fmt: skip
    swarm.run()
    assert set(merged) <= {0.0, KEPT_SHARE}
    assert merged.count(KEPT_SHARE) >= len(merged) / 2
    assert_all_agree(swarm)
    for member in swarm.members.values():
        assert member.optimizer.statistics.samples_dropped == 0
    lines = [record.message for record in caplog.records if "overlap_steps" in record.message]
    assert len(lines) == (2 if overlap_steps == 50 else 0), lines
    assert all(line.startswith("overlap_steps=50 is cut to ") for line in lines)


@pytest.mark.parametrize("num_peers", [1, 2])
def test_many_inner_steps_are_named_where_a_peer_averages_with_others(
    num_peers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_steps, "MANY_STEPS", 4)

    def train(member: Member) -> None:
        together(num_peers, member)
        for batch in batches_of(int(member.name[-1]), 40):
            member.step(loss_of(member.model, batch))

    swarm = Swarm(seed=8)
    start_all(swarm, [f"peer{number}" for number in range(num_peers)], train)
    swarm.run()
    for member in swarm.members.values():
        assert member.optimizer.global_step >= 3
    lines = [record.message for record in caplog.records if "inner steps from one average" in record.message]
    assert len(lines) == (2 if num_peers == 2 else 0), lines


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (None, "local_steps is not set here, outer SGD"),
        (LocalSteps(outer=plain_averaging), r"local_steps is outer SGD\(lr=1.0\), 1 fragment, overlap_steps=0 here"),
        (LocalSteps(nesterov, overlap_steps=3), "1 fragment, overlap_steps=3 here, outer SGD"),
        (LocalSteps(nesterov, fragments=2), "2 fragments, overlap_steps=0 here"),
    ],
    ids=["none", "outer", "overlap", "fragments"],
)
def test_a_peer_with_other_local_steps_or_none_is_refused_with_the_difference(
    mine: LocalSteps | None, message: str
) -> None:
    swarm = Swarm(seed=8)
    start_all(swarm, ["peer0"], lambda member: member.peer.sleep(60.0))
    start_all(swarm, ["peer1"], lambda member: None, begins_s=5.0, local_steps=mine)
    with pytest.raises(ManifestMismatch, match=message):
        swarm.run()


def test_a_peer_without_local_steps_tells_one_with_them_what_is_missing() -> None:
    swarm = Swarm(seed=8)
    start_all(swarm, ["peer0"], lambda member: member.peer.sleep(60.0), local_steps=None)
    start_all(swarm, ["peer1"], lambda member: None, begins_s=5.0)
    with pytest.raises(ManifestMismatch, match="local_steps"):
        swarm.run()


@pytest.mark.parametrize("helper", few_of(["ordinary", "auxiliary"], 1, pytest.mark.long))
@pytest.mark.parametrize("steps", few_of([LocalSteps(nesterov, fragments=2, overlap_steps=1), LocalSteps(nesterov)]))
def test_two_peers_in_client_mode_train_with_one_that_can_be_dialled(helper: str, steps: LocalSteps) -> None:
    swarm = Swarm(seed=9)
    swarm.start_coordinator()
    options: dict[str, Any] = {"target_batch_size": 48, "local_steps": steps}
    clients = {"peer0", "peer1"}

    def help_out(member: Member) -> None:
        while not clients <= swarm.done:
            member.peer.sleep(0.2)
            member.optimizer.step()
        member.optimizer.settle()

    if helper == "ordinary":
        swarm.start("peer2", new_model, adam, train_until(8), batch_size_per_step=4, **options)
    else:
        swarm.start("peer2", new_model, adam, help_out, auxiliary=True, **options)
    for name in sorted(clients):
        swarm.start(name, new_model, adam, train_until(8), client_mode=True, batch_size_per_step=4, **options)
    swarm.run()
    assert_all_agree(swarm)
    for name in clients:
        counts = swarm.members[name].optimizer.statistics
        assert (counts.samples_dropped, counts.steps_alone) == (0, 0)
        assert counts.rounds_committed >= 7
        last_round = swarm.members[name].optimizer.last_round
        assert last_round is not None
        assert len(last_round.members) == 3


@pytest.mark.parametrize(
    "steps",
    few_of([LocalSteps(nesterov, fragments=4, overlap_steps=2), LocalSteps(nesterov)], 1, pytest.mark.long),
    ids=["fragments", "whole"],
)
def test_a_peer_eight_times_slower_takes_part_in_each_step(steps: LocalSteps) -> None:
    """With fragments it makes less than one inner step from one of them to the next."""
    swarm = Swarm(seed=10)
    paces = {"peer0": 0.5, "peer1": 0.5, "peer2": 4.0}
    start_all(swarm, list(paces), train_until(16, paces.__getitem__), local_steps=steps, target_batch_size=96)
    swarm.run(1200.0)
    assert_all_agree(swarm)
    slow = swarm.members["peer2"].optimizer.statistics
    assert slow.samples_used >= slow.samples_computed - 8
    for member in swarm.members.values():
        assert member.optimizer.statistics.samples_dropped == 0
        assert member.optimizer.statistics.rounds_committed >= 14
        assert member.optimizer.statistics.states_loaded <= 1


@pytest.mark.long
def test_a_peer_forty_times_faster_than_the_others_counts_in_each_step() -> None:
    """It goes up to forty times as far from the outer parameters, which is no fault."""
    swarm = Swarm(seed=11)
    paces = {"peer0": 0.1, "peer1": 4.0, "peer2": 4.0, "peer3": 4.0}
    start_all(swarm, list(paces), train_until(8, paces.__getitem__), local_steps=LocalSteps(), target_batch_size=688)
    swarm.run(1200.0)
    assert_all_agree(swarm)
    for member in swarm.members.values():
        assert member.optimizer.statistics.samples_dropped == 0
        assert member.optimizer.statistics.rounds_committed >= 7


def test_buffers_travel_with_each_step() -> None:
    def with_norm() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

    means: dict[str, torch.Tensor] = {}
    before: dict[str, torch.Tensor] = {}

    def train(member: Member) -> None:
        together(2, member)
        norm: Any = member.model[1]  # type: ignore[index]
        batches = batches_of(int(member.name[-1]), 2)
        loss = [loss_of(member.model, batch) for batch in batches][-1]
        before[member.name] = norm.running_mean.clone()
        member.step(loss)
        member.wait_for(1)
        means[member.name] = norm.running_mean.clone()

    swarm = Swarm(seed=11)
    for name in ("peer0", "peer1"):
        model = with_norm()
        swarm.start(
            name, lambda model=model: model, adam, train,  # type: ignore[misc]
            target_batch_size=8, batch_size_per_step=4, local_steps=LocalSteps(nesterov),
            buffers=list(model.named_buffers()),
        )  # fmt: skip
    swarm.run()
    assert not torch.equal(before["peer0"], before["peer1"])
    torch.testing.assert_close(means["peer0"], (before["peer0"] + before["peer1"]) / 2)
    assert torch.equal(means["peer0"], means["peer1"])
    assert_all_agree(swarm)


# faults


@pytest.mark.parametrize("num_batches", few_of([14, 1, 5, 10]))
def test_a_peer_that_misses_a_round_brings_its_inner_steps_to_the_next(num_batches: int) -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm = Swarm(seed=41)
    marked = Marked(swarm)
    start_marked(marked, 80.0, local_steps=PLAIN)
    freeze_with_waiting(marked, num_batches)
    swarm.run()
    counts = marked.check()
    assert sum(one.samples_dropped for one in counts.values()) == 0
    assert counts["p3"].states_loaded == 1
    assert counts["p3"].samples_carried >= num_batches * MARKED_BATCH
    assert counts["p3"].samples_used >= 8 * MARKED_BATCH
    assert_all_agree(swarm)


def test_so_does_one_that_lacks_the_means_of_its_round_which_the_others_have_kept() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    marked = lack_means_of_the_third_round(local_steps=PLAIN)
    counts = marked.check()
    assert (counts["p3"].rounds_aborted, counts["p3"].states_loaded) == (0, 0)
    assert sum(one.samples_dropped for one in counts.values()) == 0
    assert_all_agree(marked.swarm)


@pytest.mark.long
@pytest.mark.parametrize("seed", few_of(range(12)))
def test_after_any_faults_no_inner_step_has_counted_twice(seed: int) -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm = Swarm(seed=seed)
    marked = Marked(swarm)
    start_marked(marked, 160.0, local_steps=PLAIN)
    swarm.world.schedule(*chance(seed))
    swarm.run()
    counts = marked.check().values()
    assert all(one.samples_carried or one.samples_dropped for one in counts if one.states_loaded)
    assert sum(one.samples_dropped for one in counts) <= 0.1 * sum(one.samples_computed for one in counts)


def test_a_failed_round_changes_neither_the_agreed_nor_the_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm = Swarm(seed=12)
    num_failed = 0

    def values(replica: LocalReplica) -> torch.Tensor:
        own = [parameter.detach().reshape(-1) for parameter in replica.model_parameters]
        return torch.cat([replica.flat_parameters(), *own])

    after_inner: dict[LocalReplica, torch.Tensor] = {}
    step_inner = LocalReplica.step_inner

    def noted(self: LocalReplica, grad_scale: float) -> None:
        step_inner(self, grad_scale)
        after_inner[self] = values(self)

    monkeypatch.setattr(LocalReplica, "step_inner", noted)

    def train(member: Member) -> None:
        nonlocal num_failed
        together(2, member)
        first = next(member.model.parameters())
        for batch in batches_of(int(member.name[-1]), 120):
            aborted = member.optimizer.statistics.rounds_aborted
            member.step(loss_of(member.model, batch))
            if member.optimizer.statistics.rounds_aborted > aborted:
                num_failed += 1
                (replica,) = [one for one in after_inner if one.model_parameters[0] is first]
                assert torch.equal(values(replica), after_inner[replica])
            member.check_samples()

    run: Any = Exchange.run
    network, is_cut = swarm.world.network, False

    def heal() -> None:
        network.unblock("peer0", "peer1")
        network.unblock("peer1", "peer0")

    async def cut_off(self: Any) -> Any:
        """The network is cut as the values of a step go out."""
        nonlocal is_cut
        if swarm.members["peer0"].optimizer.global_step == 3 and not is_cut:
            is_cut = True
            network.block("peer0", "peer1")
            network.block("peer1", "peer0")
            swarm.world.loop.call_outside(swarm.world.loop.time() + 20.0, heal)
        return await run(self)

    monkeypatch.setattr(Exchange, "run", cut_off)
    start_all(swarm, ["peer0", "peer1"], train)
    swarm.run()
    assert num_failed >= 2
    assert_all_agree(swarm)
    for member in swarm.members.values():
        counts = member.optimizer.statistics
        assert counts.rounds_aborted
        assert counts.samples_dropped == 0
        assert counts.rounds_committed >= 6


def test_a_newcomer_between_two_fragments_holds_what_the_others_hold() -> None:
    swarm = Swarm(seed=13)
    joined: list[int] = []

    def join_late(member: Member) -> None:
        joined.append(member.optimizer.global_step)
        own = [parameter.detach().clone() for parameter in member.model.parameters()]
        with member.optimizer.agreed_parameters():
            for before, agreed in zip(own, member.model.parameters(), strict=True):
                assert torch.equal(before, agreed), "its pseudo-gradient is zero"
        assert member.optimizer.state_digest() in digests_at.get(joined[0], set())
        train_until(14)(member)

    digests_at: dict[int, set[str]] = {}

    def train(member: Member) -> None:
        together(2, member)
        for batch in batches_of(int(member.name[-1]), 400):
            member.step(loss_of(member.model, batch))
            digests_at.setdefault(member.optimizer.global_step, set()).add(member.optimizer.state_digest())
            if member.optimizer.global_step >= 14:
                break

    steps = LocalSteps(nesterov, fragments=4)
    start_all(swarm, ["peer0", "peer1"], train, local_steps=steps)
    start_all(swarm, ["peer2"], join_late, local_steps=steps, begins_s=12.3)
    swarm.run()
    assert joined[0] % 4, "between two fragments"
    assert all(len(digests) == 1 for digests in digests_at.values())
    assert_all_agree(swarm)
