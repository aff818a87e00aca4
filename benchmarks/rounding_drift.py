"""Drift by rounding alone between peers that make the same steps in different ways.

    python benchmarks/rounding_drift.py [--steps 10000] [--optimizers adamw lamb sgd] [--dtypes float32 bfloat16]

One replica computes gradients of a small transformer, and several others make the same steps with them, with another
implementation of the optimizer (a loop, ``foreach``, ``fused``), another number of threads, or another precision in the
update. Prints the distance of each from the first after 10, 100, ... steps, as a fraction of the size of the
parameters. ``manyhands.optim.run.drift.bound_of`` must be well above it.

``one ulp`` moves each parameter by one unit in the last place in each step, up or down by chance: far more than any
machine does. The learning rate is constant, and there is no decay, which is the worst case.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence

import torch
from _command_line import Parser, json_path, positive_int, progress_of, run, write_json

from manyhands.optim.lamb import Lamb

Step = Callable[[list[torch.Tensor]], None]
OptimizerMaker = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
VOCABULARY, LENGTH, WIDTH = 64, 16, 32
RATES = {"adamw": 1e-3, "lamb": 2e-3, "sgd": 1e-2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        scores: torch.Tensor = self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return scores


def batch(generator: torch.Generator, rule: torch.Tensor) -> torch.Tensor:
    """Sequences in which each token makes another one likely."""
    drawn = [torch.randint(0, VOCABULARY, (8,), generator=generator)]
    for _ in range(LENGTH):
        drawn.append(torch.multinomial(rule[drawn[-1]], 1, generator=generator).squeeze(1))
    return torch.stack(drawn, dim=1)


def stepping(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], num_threads: int = 1) -> Step:
    def step(gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter)
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        optimizer.step()
        torch.set_num_threads(before)

    return step


def in_double(optimizer_of: OptimizerMaker, parameters: Sequence[torch.Tensor]) -> Step:
    """Compute the update in double precision, and round its result."""
    doubles = [torch.nn.Parameter(parameter.detach().double()) for parameter in parameters]
    optimizer = optimizer_of(doubles)

    @torch.no_grad()
    def step(gradients: list[torch.Tensor]) -> None:
        for double, parameter, gradient in zip(doubles, parameters, gradients, strict=True):
            double.copy_(parameter)
            double.grad = gradient.double()
        optimizer.step()
        for double, parameter in zip(doubles, parameters, strict=True):
            parameter.copy_(double)

    return step


def one_ulp(step: Step, parameters: list[torch.Tensor]) -> Step:
    generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def moved(gradients: list[torch.Tensor]) -> None:
        step(gradients)
        for parameter in parameters:
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            mantissa, exponent = torch.frexp(parameter.float())
            ulp = torch.ldexp(torch.full_like(mantissa, torch.finfo(parameter.dtype).eps / 2), exponent)
            parameter.copy_(parameter.float() + signs * ulp)

    return moved


def variants(name: str, base: Sequence[torch.Tensor], lr: float) -> dict[str, tuple[list[torch.Tensor], Step]]:
    """The variants; all others are compared with the first."""

    def replica() -> list[torch.Tensor]:
        return [torch.nn.Parameter(copy.deepcopy(parameter.detach())) for parameter in base]

    made: dict[str, tuple[list[torch.Tensor], Step]] = {}
    if name == "lamb":

        def lamb(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
            return Lamb(parameters, lr=lr, weight_decay=0.01)

        for label, threads in (("one thread", 1), ("two threads", 2)):
            parameters = replica()
            made[label] = (parameters, stepping(lamb(parameters), parameters, threads))
        optimizer_of = lamb
    else:
        kinds: dict[str, tuple[bool | None, bool | None]] = {
            "loop": (False, None), "foreach": (True, None), "fused": (None, True),
        }  # fmt: skip

        def plain(
            parameters: Sequence[torch.Tensor], foreach: bool | None = None, fused: bool | None = None
        ) -> torch.optim.Optimizer:
            if name == "sgd":
                return torch.optim.SGD(parameters, lr=lr, momentum=0.9, foreach=foreach, fused=fused)
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, foreach=foreach, fused=fused)

        for label, (foreach, fused) in kinds.items():
            parameters = replica()
            made[label] = (parameters, stepping(plain(parameters, foreach, fused), parameters))
        optimizer_of = plain
    parameters = replica()
    made["in double"] = (parameters, in_double(optimizer_of, parameters))
    parameters = replica()
    first = next(iter(made))
    optimizer = optimizer_of(parameters)
    made["one ulp"] = (parameters, one_ulp(stepping(optimizer, parameters), parameters))
    assert next(iter(made)) == first
    return made


@torch.no_grad()
def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    apart = torch.cat([(a.double() - b.double()).flatten() for a, b in zip(one, other, strict=True)]).norm()
    return float(apart / torch.cat([a.double().flatten() for a in one]).norm())


def measure(name: str, dtype: torch.dtype, num_steps: int) -> dict[str, dict[int, float]]:
    torch.manual_seed(0)
    model = Model()
    base = [torch.nn.Parameter(parameter.detach().to(dtype)) for parameter in model.parameters()]
    made = variants(name, base, RATES[name])
    reference = next(iter(made.values()))[0]
    generator = torch.Generator().manual_seed(0)
    rule = torch.rand(VOCABULARY, VOCABULARY, generator=generator) ** 8
    told: dict[str, dict[int, float]] = {label: {} for label in list(made)[1:]}
    marks = {10**power for power in range(1, 9)} | {num_steps}
    for number in range(1, num_steps + 1):
        with torch.no_grad():
            for shown, parameter in zip(model.parameters(), reference, strict=True):
                shown.copy_(parameter)
        tokens = batch(generator, rule)
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        for _, step in made.values():
            step([gradient.clone() for gradient in gradients])
        if number in marks:
            for label in told:
                told[label][number] = float(f"{distance(reference, made[label][0]):.2g}")
    return told


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=positive_int, default=10_000, help="default: 10000")
    parser.add_argument("--optimizers", nargs="+", default=list(RATES), choices=list(RATES), help="default: all")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=list(DTYPES))
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with progress_of(len(arguments.dtypes) * len(arguments.optimizers)) as steps:
        for dtype in arguments.dtypes:
            for name in arguments.optimizers:
                steps.begin(f"{name} in {dtype}")
                for how, apart in measure(name, DTYPES[dtype], arguments.steps).items():
                    results.append({"dtype": dtype, "optimizer": name, "how": how, "apart": apart})
                    print(json.dumps(results[-1]), flush=True)
    write_json(arguments.json, results)


if __name__ == "__main__":
    run(main)
