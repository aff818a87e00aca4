"""The agreed parameters of a run with local steps, and what this peer's own steps have changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import manyhands
from manyhands.averaging.codecs.sparse import Sparse
from manyhands.averaging.messages import Position, RoundManifest
from manyhands.averaging.state.content import Origin, sealed
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId
from manyhands.optim import local_steps
from manyhands.optim.extra_tensors import ExtraTensors
from manyhands.optim.local_steps import KEPT_SHARE, SPARSE_RATE, InnerSteps, LocalReplica, LocalSteps, nesterov
from manyhands.optim.options import Options, made_scheduler
from manyhands.optim.run.step_rounds import Averaged
from manyhands.optim.state.catching_up import MissedStep
from manyhands.optim.state.state import INNER
from manyhands.optim.step.global_step import GlobalStep, SampleCounter
from manyhands.optim.step.replica import trained_of

ME, OTHER = PeerId("me"), PeerId("other")
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


class Trainer:
    """One peer without a network: its parameters, and what it counts."""

    def __init__(
        self, make: MakeOptimizer = sgd, steps: LocalSteps | None = None, *, dtype: torch.dtype = torch.float32,
        start: float = 1.0, frozen: float = 0.0, extra: dict[str, torch.Tensor] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.model = [
            torch.nn.Parameter(torch.full((4,), start, dtype=dtype)),
            torch.nn.Parameter(torch.full((1,), frozen), requires_grad=False),
            torch.nn.Parameter(torch.full((2, 2), start, dtype=dtype)),
        ]
        self.trained = [self.model[0], self.model[2]]
        tensors = ExtraTensors(list((extra or {}).items()))
        inner = make(self.model)
        schedule = made_scheduler(options.pop("scheduler", None), inner)
        self.replica = LocalReplica(inner, schedule, steps or LocalSteps(outer=plain), extra=tensors, **options)
        self.inner = InnerSteps(self.replica)
        self.samples = SampleCounter(ME, self.replica, self.inner)

    def batch(self, gradient: float = 1.0, samples: int = 4, scale: float = 1.0, *, is_overflow: bool = False) -> None:
        for parameter in self.trained:
            parameter.grad = torch.full_like(parameter, gradient)
        self.samples.add(samples, None, scale, self.replica.position.step, is_overflow=is_overflow)

    def begin(self) -> GlobalStep:
        return GlobalStep(self.replica, self.samples.freeze())

    def make(self, step: GlobalStep, mean: float | None = None, *, is_left_out: bool = False) -> None:
        """The group makes a step, with this mean or else this peer's own pseudo-gradient."""
        mean_N = step.contribution.mean_N.clone()
        if mean is not None:
            mean_N.fill_(mean)
            self.replica.step_parameters[1].views(mean_N).shares.fill_(1.0)
        weights = [0.0 if is_left_out else step.contribution.weight, 4.0]
        manifest = RoundManifest(bytes(32), step.left_from, 1, [ME, OTHER], weights, [0, 0], bytes(32))
        shares, lineage = manifest.contributors(), bytes([step.left_from.step])
        step.outcome = Averaged(mean_N, lineage, 8, manifest, shares=shares, is_left_out=is_left_out)
        step.advance()
        self.samples.end(step)

    @property
    def agreed(self) -> list[float]:
        """The first value of each agreed parameter that is trained."""
        return [parameter.reshape(-1)[0].item() for parameter in trained_of(self.replica.optimizer)]

    @property
    def own(self) -> list[float]:
        return [parameter.reshape(-1)[0].item() for parameter in self.trained]

    def check_samples(self) -> None:
        counts = self.samples.statistics
        assert counts.samples_used + counts.samples_dropped + self.samples.waiting == counts.samples_computed


# bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 0}, "fragments=0 must be at least 1; for example 4"),
        ({"overlap_steps": -1}, "overlap_steps=-1 must be at least 0; for example 5"),
        ({"fragments": 2.5}, "fragments=2.5 must be a whole number; for example 4"),
        ({"fragments": "2"}, "fragments='2' must be a whole number; for example 4"),
        ({"overlap_steps": 1.5}, "overlap_steps=1.5 must be a whole number; for example 5"),
        ({"overlap_steps": float("nan")}, "overlap_steps=nan must be a whole number; for example 5"),
        ({"outer": "sgd"}, "outer is of type str and must be a function of one argument, the param.*; for example lam"),
        ({"outer": sgd([torch.zeros(1)])}, "outer is of type SGD and must be a function .*; for example lambda params"),
        ({"outer": lambda: None}, "outer is of type function and must be a function of one argument, the parameters"),
        ({"outer": torch.optim.SGD}, r"outer=SGD is a class, whose own lr would be .*optim.SGD\(params, lr=1.0\)"),
        ({"sparse": True}, r"sparse=True must be made by manyhands.Sparse; for example Sparse\(top=64\)"),
        ({"sparse": Sparse}, "sparse=<class .*> must be made by manyhands.Sparse"),
    ],
)
def test_values_that_cannot_be_used_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        LocalSteps(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", [True, 25, LocalSteps])
def test_a_local_steps_argument_of_another_type_is_refused(given: Any) -> None:
    options: dict[str, Any] = {"peer": None, "run_id": "run", "target_batch_size": 64, "local_steps": given}
    with pytest.raises(ConfigError, match=r"local_steps=.* must be made by manyhands\.LocalSteps; for example Local"):
        manyhands.Optimizer(sgd([torch.nn.Parameter(torch.zeros(1))]), **options)


def test_an_outer_that_makes_no_optimizer_of_the_parameters_is_refused() -> None:
    others = [torch.nn.Parameter(torch.ones(2))]
    for outer in (lambda _: None, lambda _: plain(others), lambda params: plain(params[0]["params"][:1])):
        with pytest.raises(
            ConfigError, match=r"outer made [^\n]*, which is not an optimizer of the given .*for example lam"
        ):
            Trainer(steps=LocalSteps(outer=outer))


def test_more_fragments_than_trained_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fragments=3 is above the number of trained tensors; for example 2, or few"):
        Trainer(steps=LocalSteps(nesterov, fragments=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": "gradients"}, r"delay='gradients' is for synchronous steps; .* LocalSteps\(overlap_steps=5\) inst"),
        ({"target_batch_size": 8}, "target_batch_size=8 is below one batch of 32 samples: .* target_batch_size=3200"),
        ({"num_fragments": 100}, "target_batch_size=64 is below the number of fragments, 100: .*; for example 10000"),
    ],
)
def test_options_that_do_not_go_with_local_steps_are_refused(options: dict[str, Any], message: str) -> None:
    given = {
        "run_id": "run", "target_batch_size": 64, "batch_size_per_step": 32,
        "max_grad_norm": None, "delay": None, "offload": None, "auxiliary": False, "num_fragments": 1,
    }  # fmt: skip
    Options(**given)
    with pytest.raises(ConfigError, match=message):
        Options(**(given | options))


# fragments


def fragments_of(sizes: list[int], num_fragments: int) -> list[list[int]]:
    """The tensors, by number, that each step of a period changes."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    replica = LocalReplica(sgd(parameters), None, LocalSteps(fragments=num_fragments))
    number_of = {id(parameter): number for number, parameter in enumerate(trained_of(replica.optimizer))}
    fragments = []
    for step in range(num_fragments):
        replica.position = Position(step, b"")
        fragments.append([number_of[id(parameter)] for parameter in replica.step_parameters[0]])
    return fragments


def test_fragments_are_about_equal_and_have_each_tensor_once() -> None:
    sizes = [700, 10, 300, 10, 400, 10, 300, 10, 256, 4]
    for num_fragments in (1, 2, 3, 5):
        members = fragments_of(sizes, num_fragments)
        assert sorted(index for fragment in members for index in fragment) == list(range(len(sizes)))
        totals = [sum(sizes[index] for index in fragment) for fragment in members]
        assert max(totals) <= max(1.1 * sum(sizes) / num_fragments, 700), (num_fragments, totals)
        assert all(fragment == sorted(fragment) for fragment in members)


def test_no_fragment_is_empty_even_where_tensors_are() -> None:
    assert all(fragments_of([5, 0, 0, 0], 4))
    assert all(fragments_of([0, 0, 0], 3))


def test_the_facts_of_a_run_name_what_its_peers_must_share() -> None:
    outer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.7, momentum=0.9, nesterov=True)
    facts = LocalSteps(nesterov, fragments=2, overlap_steps=5).facts(outer)
    assert facts == {"local_steps": "outer SGD(lr=0.7, momentum=0.9, nesterov=True), 2 fragments, overlap_steps=5"}


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        (LocalSteps(), 1.0),
        (LocalSteps(sparse=Sparse()), SPARSE_RATE),
        (LocalSteps(outer=plain, sparse=Sparse()), 1.0),
    ],
)
def test_the_outer_rate_is_one_and_larger_for_sparse_changes_unless_the_user_says_otherwise(
    steps: LocalSteps, rate: float
) -> None:
    assert steps.make_outer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"] == rate


# pseudo-gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offload", [False, True])
def test_a_pseudo_gradient_is_what_the_inner_steps_have_changed(dtype: torch.dtype, offload: bool) -> None:
    trainer = Trainer(dtype=dtype, offload=offload)
    trainer.batch(gradient=1.0)
    trainer.batch(gradient=0.5)
    assert trainer.own == [0.25, 0.25]
    assert trainer.agreed == [1.0, 1.0]
    step = trainer.begin()
    mean_N = step.contribution.mean_N
    assert mean_N.dtype == torch.float32
    assert mean_N.tolist() == [0.75] * 8 + [1.0, 1.0]
    assert (step.contribution.samples, step.contribution.weight) == (8, 8.0)
    trainer.make(step, mean=0.5)
    assert trainer.agreed == trainer.own == [0.5, 0.5]
    assert trainer.replica.pseudo_gradient(None)[:8].tolist() == [0.0] * 8
    assert trainer.samples.statistics.samples_used == 8


def test_each_step_changes_one_fragment_and_the_weights_add_up_to_the_samples() -> None:
    trainer = Trainer(steps=LocalSteps(outer=plain, fragments=2))
    weights, samples = [], 0
    for number in range(6):
        trainer.batch(samples=number + 1)
        samples += number + 1
        step = trainer.begin()
        weights.append(step.contribution.weight)
        changed = trainer.replica.part
        trainer.make(step)
        assert trainer.own[changed] == trainer.agreed[changed]
        assert trainer.own[1 - changed] != trainer.agreed[1 - changed]
    assert weights == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5], "each batch counts by a half in the step of each fragment"
    assert sum(weights) + 6 / 2 == samples


def test_no_weight_is_left_over_when_fragments_divide_it_badly() -> None:
    trainer = Trainer(steps=LocalSteps(outer=plain))
    trainer.replica.num_fragments = 49  # 1 / 49 * 49 is not 1
    trainer.inner = InnerSteps(trainer.replica)
    trainer.samples = SampleCounter(ME, trainer.replica, trainer.inner)
    trainer.batch(samples=1)
    trainer.make(trainer.begin())
    trainer.replica.position = Position(0, b"")  # it is the turn of the same fragment
    assert trainer.begin().contribution.weight == 0.0


def test_further_inner_steps_are_merged_half_way() -> None:
    trainer = Trainer(steps=LocalSteps(outer=plain, overlap_steps=5))
    trainer.batch(1.0)
    step = trainer.begin()
    trainer.batch(1.0)  # own: 0.0
    trainer.make(step, mean=0.25)
    assert trainer.agreed == [0.75, 0.75]
    assert trainer.own == [(1 - KEPT_SHARE) * 0.75] * 2
    after = trainer.begin().contribution
    assert (after.samples, after.weight) == (4, 4.0), "of the batch that came later"


def test_a_failed_round_changes_nothing_and_all_counts_in_the_next_attempt() -> None:
    trainer = Trainer()
    trainer.batch(1.0)
    step = trainer.begin()
    trainer.samples.end(step)
    assert trainer.own == [0.5, 0.5]
    trainer.batch(0.5)
    assert trainer.own == [0.25, 0.25]
    again = trainer.begin().contribution
    assert (again.samples, again.weight, again.mean_N[0].item()) == (8, 8.0, 0.75)


def test_inner_steps_that_the_group_left_out_are_carried_as_a_stale_pseudo_gradient() -> None:
    trainer = Trainer()
    trainer.batch(1.0)
    trainer.make(trainer.begin(), mean=0.25, is_left_out=True)
    assert trainer.agreed == [0.75, 0.75]
    assert trainer.own == [0.25, 0.25], "as far from the agreed ones as before"
    assert trainer.samples.statistics.samples_carried == 4
    trainer.batch(0.25)
    later = trainer.begin().contribution
    assert (later.samples, later.weight, later.mean_N[0].item()) == (8, 8.0, 0.625)


def test_inner_steps_left_out_during_an_overlap_are_merged_half_way_and_count_in_the_next_step() -> None:
    trainer = Trainer(steps=LocalSteps(outer=plain, overlap_steps=2))
    trainer.batch(1.0)
    step = trainer.begin()
    trainer.batch(0.5)  # own: 0.25
    trainer.make(step, mean=0.25, is_left_out=True)
    assert trainer.own == [(0.25 + 0.75) / 2] * 2
    counts = trainer.samples.statistics
    assert (counts.samples_carried, counts.samples_dropped, trainer.samples.waiting) == (4, 0, 8)
    later = trainer.begin().contribution
    assert (later.samples, later.weight, later.mean_N[0].item()) == (8, 8.0, 0.25)


def test_inner_steps_that_were_left_out_twice_are_dropped() -> None:
    trainer = Trainer()
    for _ in range(2):
        trainer.batch(1.0)
        trainer.make(trainer.begin(), mean=0.25, is_left_out=True)
        trainer.check_samples()
    assert trainer.samples.statistics.samples_dropped == 8
    assert trainer.own == trainer.agreed == [0.5, 0.5]


class FailsOnce(torch.optim.SGD):
    """Raises in its first step."""

    has_failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("not today")
        return super().step(closure)


def test_an_outer_step_that_raises_drops_the_inner_steps_of_its_own_fragment_only() -> None:
    trainer = Trainer(steps=LocalSteps(outer=lambda params: FailsOnce(params, lr=1.0), fragments=2))
    trainer.batch(1.0)
    step = trainer.begin()
    with pytest.raises(RuntimeError, match="not today"):
        trainer.make(step)
    trainer.samples.end(step)
    trainer.check_samples()
    assert trainer.own == [1.0, 0.5]
    trainer.make(trainer.begin())
    assert trainer.begin().contribution.weight == 2.0, "the other fragment still has what the batch has changed"


# values that are not finite


@pytest.mark.parametrize("offload", [False, True])
def test_own_parameters_that_are_not_finite_are_left_out_and_named(
    offload: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(adam, offload=offload)
    trainer.batch(1.0)
    with torch.no_grad():
        trainer.replica.own[0][1] = float("nan")
    step = trainer.begin()
    assert "Dropped 4 samples: the parameters of this peer are not finite any more" in caplog.text
    assert "look at its learning rate" in caplog.text
    assert step.contribution.weight == 0
    assert step.contribution.mean_N[:8].tolist() == [0.0] * 8
    trainer.make(step, mean=0.5)
    assert trainer.own == trainer.agreed == [0.5, 0.5]
    trainer.batch(1.0)
    assert trainer.own == pytest.approx([0.4, 0.4], abs=0.01), "it trains on, with new statistics"
    trainer.check_samples()


def test_a_peer_whose_gradients_are_not_finite_since_its_parameters_are_not_goes_on_from_the_agreed_ones() -> None:
    """Else all its batches are dropped, and one that trains alone never reaches the target."""
    trainer = Trainer(adam)
    trainer.batch(1.0)
    with torch.no_grad():
        trainer.trained[0].fill_(float("inf"))
    trainer.batch(float("nan"))
    assert trainer.own == [1.0, 1.0]
    assert trainer.samples.statistics.samples_dropped == 8
    trainer.batch(1.0)
    assert trainer.samples.waiting == 4
    trainer.check_samples()


@pytest.mark.parametrize("gradient", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_makes_no_inner_step(gradient: float) -> None:
    trainer = Trainer()
    trainer.batch(1.0)
    trainer.batch(gradient)
    assert trainer.own == [0.5, 0.5]
    assert trainer.samples.statistics.samples_dropped == 4


def test_a_mean_that_is_not_finite_is_refused_and_the_peer_goes_back_to_the_agreed_parameters() -> None:
    trainer = Trainer()
    trainer.batch(1.0)
    trainer.make(trainer.begin(), mean=float("nan"))
    assert trainer.own == trainer.agreed == [1.0, 1.0]
    assert trainer.samples.statistics.samples_dropped == 4
    assert trainer.replica.position.step == 1


def test_parameters_that_cease_to_be_finite_during_an_overlap_are_left_out_after_it() -> None:
    """The contribution that is out was finite, and counts."""
    trainer = Trainer(adam, LocalSteps(outer=plain, overlap_steps=2))
    trainer.batch(1.0)
    step = trainer.begin()
    trainer.batch(1.0)
    with torch.no_grad():
        trainer.trained[0].fill_(float("nan"))
    trainer.batch(float("nan"))
    assert trainer.samples.waiting == 4, "what came after the contribution waits for its end"
    trainer.make(step, mean=0.5)
    counts = trainer.samples.statistics
    assert (counts.samples_used, counts.samples_dropped) == (4, 4)
    assert trainer.begin().contribution.weight == 0
    assert (counts.samples_used, counts.samples_dropped) == (4, 8)
    assert trainer.own == trainer.agreed == [0.5, 0.5]


# inner steps


def test_an_overflow_of_a_grad_scaler_skips_one_inner_step() -> None:
    trainer = Trainer()
    trainer.batch(256.0, scale=256.0)
    trainer.batch(256.0, scale=256.0, is_overflow=True)
    trainer.batch(128.0, scale=256.0)
    assert trainer.own == [0.25, 0.25]
    counts = trainer.samples.statistics
    assert (counts.samples_dropped, trainer.samples.waiting) == (4, 8)


def test_each_batch_is_clipped_by_itself() -> None:
    trainer = Trainer(max_grad_norm=1.0)
    trainer.batch(10.0)
    trainer.batch(0.01)
    assert trainer.own == pytest.approx([1 - 0.5 / 8**0.5 - 0.005] * 2)
    step = trainer.begin()
    trainer.make(step, mean=100.0)
    assert trainer.agreed == [-99.0, -99.0], "the average is not clipped"


def test_with_offload_the_model_may_be_of_half_precision() -> None:
    """Small inner steps add up on the host, and in the pseudo-gradient."""
    trainer = Trainer(dtype=torch.bfloat16, offload=True)
    for _ in range(8):
        trainer.batch(2.0**-11)
    assert trainer.begin().contribution.mean_N[0].item() == 2.0**-9
    assert trainer.trained[0].dtype == torch.bfloat16
    assert torch.equal(trainer.trained[0], trainer.replica.own[0].bfloat16())


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_schedule_moves_once_in_a_period_however_many_inner_steps_are_made(fragments: int) -> None:
    trainer = Trainer(steps=LocalSteps(outer=plain, fragments=fragments), scheduler=lambda inner: StepLR(inner, 1, 0.5))
    rates = []
    for number in range(4):
        for _ in range(number):  # in the first step none at all
            trainer.batch(0.1)
        trainer.make(trainer.begin())
        rates.append(trainer.replica.inner.param_groups[0]["lr"])
    assert rates == ([0.25, 0.125, 0.0625, 0.03125] if fragments == 1 else [0.5, 0.25, 0.25, 0.125])
    trainer.replica.check_options(is_stepping=False)


def test_an_inner_optimizer_that_raises_leaves_no_sample_unaccounted() -> None:
    trainer = Trainer(lambda params: FailsOnce(params, lr=0.5))
    with pytest.raises(RuntimeError, match="not today"):
        trainer.batch(1.0)
    trainer.check_samples()
    trainer.batch(1.0)
    trainer.check_samples()
    assert trainer.samples.waiting == 4


# what is said of the number of inner steps


@pytest.mark.parametrize(("fragments", "most", "period"), [(1, 2, 4), (2, 4, 8)])
def test_an_overlap_above_half_of_the_inner_steps_of_a_parameter_is_cut_and_that_is_said_once(
    fragments: int, most: int, period: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With fragments, one average at a time is the narrower limit: here four inner steps."""
    trainer = Trainer(steps=LocalSteps(outer=plain, overlap_steps=10, fragments=fragments))
    for _ in range(4):
        trainer.batch(0.1)
    for _ in range(3):
        step = trainer.begin()
        for number in range(most):
            assert not trainer.inner.must_wait, number
            trainer.batch(0.1)
        assert trainer.inner.must_wait
        trainer.make(step)
        for _ in range(4 - most):
            trainer.batch(0.1)
    (line,) = [record.message for record in caplog.records if "overlap" in record.message]
    assert line.startswith(f"overlap_steps=10 is cut to {most}: at most half of the {period} inner steps from one")


def test_a_failed_round_does_not_make_the_overlap_look_too_long(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(steps=LocalSteps(outer=plain, overlap_steps=2))
    for _ in range(2):
        for _ in range(5):
            trainer.batch(0.1)
        trainer.make(trainer.begin())
    for _ in range(5):
        trainer.batch(0.1)
    trainer.samples.end(trainer.begin())
    trainer.batch(0.1)
    trainer.begin()
    assert not caplog.records
    for number in range(2):
        assert not trainer.inner.must_wait, number
        trainer.batch(0.1)
    assert trainer.inner.must_wait


@pytest.mark.parametrize("fragments", [1, 2])
def test_very_many_inner_steps_are_named_once(fragments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_steps, "MANY_STEPS", 4)
    trainer = Trainer(steps=LocalSteps(outer=plain, fragments=fragments))
    advice = []
    for num_steps in (4 // fragments, 6 // fragments, 6 // fragments):
        for _ in range(num_steps):
            trainer.batch(0.1)
        trainer.make(trainer.begin())
        advice.append(trainer.inner.advice())
    assert advice[0] == advice[2] == ""
    assert advice[1] == (
        "This peer made 6 inner steps from one average to the next, more than the 4 that DiLoCo chose. Its perplexity "
        "was 2.9% higher with 1000 than with 50 (arXiv:2311.08105). A smaller target_batch_size makes them fewer"
    )


# states of other peers


def test_a_newcomer_gets_agreed_parameters_outer_momentum_and_inner_statistics() -> None:
    named = {"norm.running.mean": torch.zeros(3), "inner.0.exp_avg": torch.zeros(2)}
    donor = Trainer(adam, LocalSteps(nesterov), frozen=2.0, extra=copy.deepcopy(named))
    donor.batch(1.0)
    donor.make(donor.begin())
    donor.batch(1.0)
    donor.replica.extra.agreed[0].fill_(5.0)
    donor.replica.extra.agreed[1].fill_(6.0)
    newcomer = Trainer(adam, LocalSteps(nesterov), start=7.0, extra=named)
    newcomer.replica.restore(donor.replica.capture())
    assert newcomer.agreed == newcomer.own == donor.agreed
    assert newcomer.model[1].item() == 2.0, "frozen parameters come too"
    assert (named["norm.running.mean"][0].item(), named["inner.0.exp_avg"][0].item()) == (5.0, 6.0)
    for index in (0, 2):
        theirs = donor.replica.inner.state[donor.model[index]]
        ours = newcomer.replica.inner.state[newcomer.model[index]]
        assert ours["step"] == 2
        assert all(torch.equal(ours[name], theirs[name]) for name in ("exp_avg", "exp_avg_sq"))
    outer = newcomer.replica.optimizer.state_dict()["state"]
    assert torch.equal(outer[0]["momentum_buffer"], donor.replica.optimizer.state_dict()["state"][0]["momentum_buffer"])
    contribution = newcomer.begin().contribution
    assert contribution.weight == 0
    assert contribution.mean_N[:8].tolist() == [0.0] * 8
    assert digest_of(newcomer) == digest_of(donor)


def digest_of(trainer: Trainer) -> bytes:
    return sealed(trainer.replica.capture_agreed()).header.digest


def test_the_digest_has_no_inner_part_and_does_not_change_with_inner_steps() -> None:
    trainer = Trainer(adam, LocalSteps(nesterov))
    trainer.batch(1.0)
    trainer.make(trainer.begin())
    before = digest_of(trainer)
    trainer.batch(1.0)
    assert digest_of(trainer) == before
    assert not any(INNER in spec.name for spec in trainer.replica.capture_agreed().header.tensors)
    assert any(INNER in spec.name for spec in trainer.replica.capture().header.tensors)


@pytest.mark.parametrize("offload", [False, True])
def test_a_newcomer_may_have_a_model_of_less_precision_than_the_donor(offload: bool) -> None:
    donor = Trainer(adam)
    donor.batch(1.0)
    donor.make(donor.begin())
    newcomer = Trainer(adam, dtype=torch.bfloat16, offload=offload, start=7.0)
    newcomer.replica.restore(donor.replica.capture())
    assert newcomer.agreed == donor.agreed
    assert newcomer.own == pytest.approx(donor.agreed, rel=1e-2)
    assert newcomer.trained[0].dtype == torch.bfloat16
    assert len(newcomer.replica.inner.state) == 2


BY = pytest.mark.parametrize("by_means", [False, True], ids=["by a state", "by its means"])
"""How a peer makes a step that it has missed."""


def make_up_for(trainer: Trainer, donor: Trainer, mean: float, *, by_means: bool) -> None:
    """Have a peer make the step with this mean that the donor has made from the same position."""
    before = trainer.replica.position
    if by_means:
        layout = trainer.replica.step_parameters[1]
        mean_N = torch.full((layout.numel,), mean)
        layout.views(mean_N).shares.fill_(1.0)
        manifest = RoundManifest(bytes(32), before, 0, [OTHER], [4.0], [0], bytes(32))
        trainer.replica.replay(MissedStep(manifest, mean_N))
    else:
        donor.replica.origin = Origin(before, [OTHER])
        trainer.replica.restore(donor.replica.capture())
    trainer.samples.load(before)


@BY
@pytest.mark.parametrize("make", [sgd, adam])
def test_a_peer_that_makes_up_for_a_missed_step_keeps_what_its_own_steps_have_changed(
    make: MakeOptimizer, by_means: bool
) -> None:
    donor, trainer = Trainer(make), Trainer(make)
    trainer.batch(1.0)
    own = trainer.own[0]
    donor.batch(1.0)
    donor.make(donor.begin(), mean=0.25)
    make_up_for(trainer, donor, 0.25, by_means=by_means)
    assert trainer.agreed == [0.75, 0.75]
    assert trainer.own == pytest.approx([own - 0.25] * 2)
    counts = trainer.samples.statistics
    assert (counts.samples_carried, trainer.samples.waiting) == (4, 4)
    contribution = trainer.begin().contribution
    assert (contribution.weight, contribution.mean_N[0].item()) == (4.0, pytest.approx(1 - own))


@BY
@pytest.mark.parametrize("offload", [False, True])
def test_a_peer_without_steps_of_its_own_has_the_agreed_parameters_after_a_missed_step(
    offload: bool, by_means: bool
) -> None:
    donor, trainer = Trainer(), Trainer(dtype=torch.bfloat16, offload=offload)
    donor.batch(1.0)
    donor.make(donor.begin(), mean=0.25)
    make_up_for(trainer, donor, 0.25, by_means=by_means)
    assert trainer.agreed == trainer.own == [0.75, 0.75]


@BY
def test_a_missed_step_costs_nothing_of_the_fragments_that_it_does_not_change(by_means: bool) -> None:
    """Also where no batch waits: what is behind the other fragments was counted before."""
    steps = LocalSteps(outer=plain, fragments=2)
    donor, trainer = Trainer(steps=steps), Trainer(steps=steps)
    trainer.batch(1.0)
    for one in (donor, trainer):
        one.make(one.begin(), mean=0.25)
    donor.make(donor.begin(), mean=0.5)
    make_up_for(trainer, donor, 0.5, by_means=by_means)
    assert trainer.samples.waiting == 0
    assert trainer.own == [0.75, 0.0], "0.5 of its own in the second fragment"
    step = trainer.begin()
    assert step.contribution.weight == 0.0
    trainer.make(step, mean=0.0)
    assert trainer.begin().contribution.weight == 4.0 / 2


def test_nobody_asks_for_the_means_of_sparse_changes() -> None:
    assert Trainer().replica.can_replay
    assert not Trainer(steps=LocalSteps(outer=plain, sparse=Sparse(top=64))).replica.can_replay


def test_the_state_of_another_branch_ends_what_its_own_steps_have_changed() -> None:
    donor, trainer = Trainer(), Trainer()
    donor.make(donor.begin(), mean=0.25)
    donor.replica.origin = Origin(Position(0, b"another"), [OTHER])
    before = trainer.replica.position
    trainer.batch(1.0)
    trainer.replica.restore(donor.replica.capture())
    trainer.samples.load(before)
    assert trainer.own == trainer.agreed == [0.75, 0.75]
    assert trainer.samples.statistics.samples_dropped == 4
    assert trainer.begin().contribution.weight == 0


@pytest.mark.parametrize("offload", [False, True])
def test_the_model_shows_the_agreed_parameters_for_a_while_and_gets_its_own_back(offload: bool) -> None:
    trainer = Trainer(dtype=torch.bfloat16, offload=offload)
    trainer.batch(1.0)

    def look() -> None:
        with trainer.replica.agreed_in_model():
            assert trainer.own == [1.0, 1.0]
            raise KeyError

    with pytest.raises(KeyError):
        look()
    assert trainer.own == [0.5, 0.5]
    assert trainer.begin().contribution.mean_N[0].item() == 0.5


# checkpoints


@pytest.mark.parametrize(
    ("dtype", "offload"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_a_checkpoint_in_mid_period_goes_on_from_the_agreed_parameters(dtype: torch.dtype, offload: bool) -> None:
    one = Trainer(adam, LocalSteps(nesterov), dtype=dtype, offload=offload, frozen=2.0)
    one.batch(1.0)
    one.make(one.begin(), mean=1 / 3)
    one.batch(1.0)
    state, place = copy.deepcopy((one.replica.inner.state_dict(), one.replica.place()))
    two = Trainer(adam, LocalSteps(nesterov), dtype=dtype, offload=offload, start=9.0)
    with torch.no_grad():
        for ours, theirs in zip(two.model, one.model, strict=True):
            ours.copy_(theirs)
    two.replica.load(state, place)
    two.samples.drop_waiting("a checkpoint was loaded")
    assert digest_of(two) == digest_of(one), "parameters, momentum and frozen ones"
    assert two.replica.position == one.replica.position
    assert two.own == pytest.approx(one.agreed, rel=1e-2 if dtype == torch.bfloat16 else 0)
    assert two.begin().contribution.weight == 0
    two.samples.end(two.begin())
    assert two.replica.inner.state_dict()["state"][0]["step"] == 2
    one.samples.drop_waiting("the same")
    for trainer in (one, two):
        trainer.batch(1.0)
        trainer.make(trainer.begin())
    assert one.agreed == two.agreed


def test_a_checkpoint_right_after_a_step_holds_the_parameters_once() -> None:
    trainer = Trainer(adam)
    trainer.batch(1.0)
    trainer.make(trainer.begin())
    assert local_steps.AGREED not in trainer.replica.place()
    trainer.batch(1.0)
    assert set(trainer.replica.place()[local_steps.AGREED]) == {"0", "1"}


def test_the_checkpoint_of_a_synchronous_run_begins_local_steps_from_its_model() -> None:
    trainer = Trainer(adam, LocalSteps(nesterov))
    trainer.batch(1.0)
    trainer.make(trainer.begin())
    plain_state = adam(trainer.model).state_dict()
    with torch.no_grad():
        trainer.trained[0].fill_(3.0)
    trainer.replica.load(plain_state, None)
    assert trainer.agreed[0] == 3.0
    assert not trainer.replica.optimizer.state, "the outer momentum begins anew"
