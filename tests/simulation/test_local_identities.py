"""Local steps that must equal something simpler: one process, a plain loop, an earlier version.

That one inner step with plain averaging is the synchronous step is in ``test_local_steps.py``.
``python -m tests.simulation.test_local_identities`` writes the golden traces anew.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyhands.averaging import AveragingConfig
from manyhands.averaging.codecs import Sparse
from manyhands.optim.local_steps import LocalSteps, nesterov
from tests.simulation.local_loop import agreed_after_each
from tests.simulation.swarm_of_trainers import Member, Swarm, together

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import local_steps as benchmark
from _local_arms import Rule, train_apart
from _local_tasks import MAX_GRAD_NORM, SIZES, heldout_loss

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = Path(__file__).with_name("golden_local_steps.json")
H, NUM_BATCHES, BATCH = 4, 16, 4
OVERLAP = 2
TO_BE_DUE_S = 3.0
"""By then a step is due whose batches have all been computed. A batch that is computed before that counts in it."""
AVERAGING = AveragingConfig(matchmaking_time_s=10.0, averaging_timeout_s=40.0)
SPARSE = Sparse(top=64, chunk=1024)
SHOWN = 8  # values of each tensor in the fixture
MODES = {
    "plain": LocalSteps(),
    "nesterov": LocalSteps(nesterov),
    "fragments": LocalSteps(nesterov, fragments=2),
    "overlap": LocalSteps(nesterov, overlap_steps=OVERLAP),
    "sparse": LocalSteps(sparse=SPARSE),
}
Batch = tuple[torch.Tensor, torch.Tensor]
Trace = list[list[torch.Tensor]]


def new_model(width: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))


def new_wide_model() -> torch.nn.Module:
    """With more than the 4096 values below which all are sent."""
    return new_model(700)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def shard_of(seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(BATCH, 3, generator=generator), torch.randn(BATCH, 2, generator=generator))
        for _ in range(NUM_BATCHES)
    ]


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def trace_of(shards: Sequence[Sequence[Batch]], steps: LocalSteps) -> Trace:
    """The agreed parameters of a run after each average, which are equal on all peers."""
    per_average = H // steps.fragments
    traces: dict[str, dict[int, list[torch.Tensor]]] = {}

    num_done = {f"peer{number}": 0 for number in range(len(shards))}

    def note(member: Member) -> None:
        seen, step = traces.setdefault(member.name, {}), member.optimizer.global_step
        if step and step not in seen:
            with member.optimizer.agreed_parameters():
                seen[step] = [value.detach().clone() for value in member.model.parameters()]

    def train(member: Member) -> None:
        together(len(shards), member)
        for number, batch in enumerate(shards[int(member.name[-1])], 1):
            member.step(loss_of(member.model, batch))
            num_done[member.name] = number
            if steps.overlap_steps and number % per_average == 0:
                while min(num_done.values()) < number:
                    member.peer.sleep(0.05)
                member.peer.sleep(TO_BE_DUE_S)
            while number % per_average == 0 and member.optimizer.global_step < number // per_average:
                if steps.overlap_steps and member.optimizer.is_stepping:
                    break
                member.peer.sleep(0.05)
                member.optimizer.step(batch_size=0)
            note(member)
        member.optimizer.settle()
        note(member)
        assert member.optimizer.statistics.samples_used == BATCH * NUM_BATCHES

    swarm = Swarm(seed=3)
    if steps.overlap_steps:
        swarm.world.network.default_link.latency_s = 0.5  # a round takes longer than the batches of the overlap
    for number in range(len(shards)):
        swarm.start(
            f"peer{number}", new_model if steps.sparse is None else new_wide_model, adam, train, begins_s=float(number),
            target_batch_size=H * BATCH * len(shards), batch_size_per_step=BATCH, local_steps=steps,
            **({} if steps.sparse is None else {"averaging": AVERAGING}),
        )  # fmt: skip
    swarm.run()
    first, *others = traces.values()
    assert sorted(first) == [*range(1, NUM_BATCHES // per_average + 1)]
    for step, values in first.items():
        assert all(torch.equal(one, other) for its in others for one, other in zip(values, its[step], strict=True))
    return [first[step] for step in sorted(first)]


@functools.cache
def run_of_two(name: str) -> Trace:
    return trace_of([shard_of(seed) for seed in range(2)], MODES[name])


def looped(shards: Sequence[Sequence[Batch]], steps: LocalSteps) -> Trace:
    return agreed_after_each(
        shards, H, new_model if steps.sparse is None else new_wide_model, adam, loss_of,
        outer=steps.make_outer, fragments=steps.fragments, overlap=steps.overlap_steps, sparse=steps.sparse,
    )  # fmt: skip


def assert_equal(ours: Trace, theirs: Trace, tolerance: float = 0.0) -> None:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        for value, wanted in zip(one, other, strict=True):
            torch.testing.assert_close(
                value, wanted, atol=tolerance, rtol=0.0, msg=lambda text, number=number: f"average {number}: {text}"
            )


def test_one_peer_with_plain_averaging_is_one_process() -> None:
    shard, model = shard_of(0), new_model()
    optimizer, after_each = adam(model), []
    for number, batch in enumerate(shard, 1):
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number % H == 0:
            after_each.append([value.detach().clone() for value in model.parameters()])
    assert_equal(trace_of([shard], LocalSteps()), after_each, tolerance=2e-7)  # agreed - (agreed - own) is rounded


@pytest.mark.parametrize("steps", [MODES["plain"], MODES["nesterov"]], ids=["plain", "nesterov"])
@pytest.mark.parametrize("num_peers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_peers_with_the_same_data_are_one_peer(num_peers: int, steps: LocalSteps) -> None:
    one, more = trace_of([shard_of(0)], steps), trace_of([shard_of(0)] * num_peers, steps)
    assert_equal(more, one, tolerance=0.0 if num_peers == 2 else 5e-7)  # halves are exact; four quarters are rounded


@pytest.mark.parametrize("name", MODES)
def test_a_run_holds_bit_for_bit_what_a_plain_loop_computes(name: str) -> None:
    """Of two peers, as the order in which more are added up follows their ids."""
    assert_equal(run_of_two(name), looped([shard_of(seed) for seed in range(2)], MODES[name]))


@pytest.mark.parametrize("name", MODES)
def test_the_agreed_parameters_are_those_of_earlier_versions(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    assert_equal(shown(run_of_two(name)), [[*map(torch.tensor, values)] for values in golden], tolerance=1e-5)


TABLE = [  # not overlap: which batches a late average catches follows from the timing of the four peers
    mode
    for mode in benchmark.MODES
    if mode.overlap_steps == 0
    and 1 < mode.H < 64
    and not mode.is_plain_loop
    and "int" not in mode.codec
    and mode.shards == "iid"
]


@pytest.mark.long
@pytest.mark.parametrize("mode", TABLE, ids=lambda mode: f"{mode.name}-{mode.H}")
def test_a_plain_loop_gives_the_rows_of_the_benchmarks_table(mode: benchmark.Mode) -> None:
    """Two averages of the small GPT; four peers are added up in another order, which changes the last digits."""
    size = replace(SIZES["quick"], steps=2 * mode.H)
    training = benchmark.Training(benchmark.Case(size, "gpt", mode, seed=0))
    batches = [[training.shards.batch(peer, step) for step in range(size.steps)] for peer in range(benchmark.PEERS)]
    steps = mode.options(size.batch)["local_steps"]
    agreed = agreed_after_each(
        batches, mode.H, training.new_model, training.new_inner, lambda model, batch: model(**batch).loss,
        outer=steps.make_outer, fragments=steps.fragments, overlap=steps.overlap_steps, sparse=steps.sparse,
        max_grad_norm=MAX_GRAD_NORM,
    )[-1]  # fmt: skip
    model = training.new_model()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), agreed, strict=True):
            parameter.copy_(value)
    assert training.row()["heldout_loss"] == pytest.approx(heldout_loss("gpt", model, size), abs=1e-5)


ARMS = {
    "plain": Rule(),
    "1.4": Rule(1.4),
    "nesterov": Rule(0.7, 0.9),
    "sparse": Rule(1.4, sparse=Sparse()),
    "overlap": Rule(overlap=3),
    "overlap of all": Rule(overlap=H),
}


@pytest.mark.parametrize("rule", ARMS.values(), ids=ARMS)
def test_the_loop_that_compares_outer_steps_computes_what_the_plain_loop_does(rule: Rule) -> None:
    size = replace(SIZES["quick"], steps=3 * H, batch=1)
    training = benchmark.Training(benchmark.Case(size, "gpt", benchmark.Mode("arm", H, rule=rule), seed=0))
    batches = [[training.shards.batch(peer, step) for step in range(size.steps)] for peer in range(benchmark.PEERS)]
    wanted = agreed_after_each(
        batches, H, training.new_model, training.new_inner, lambda model, batch: model(**batch).loss,
        outer=lambda params: torch.optim.SGD(params, rule.rate, rule.momentum, nesterov=rule.momentum > 0),
        overlap=rule.overlap, sparse=rule.sparse, max_grad_norm=MAX_GRAD_NORM,
    )[-1]  # fmt: skip
    model, _ = train_apart(
        rule, H, size.steps, size.batch, training.new_model, training.new_inner, training.shards.batch
    )
    assert_equal([[value.detach() for value in model.parameters()]], [wanted])


def shown(trace: Trace) -> Trace:
    return [[value.flatten()[:SHOWN] for value in values] for values in trace]


def write_golden() -> None:
    torch.set_num_threads(1)
    lines = []
    for name in MODES:
        trace = [[[round(one, 7) for one in value.tolist()] for value in values] for values in shown(run_of_two(name))]
        lines.append(f'"{name}": {json.dumps(trace)}')
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write_golden()
