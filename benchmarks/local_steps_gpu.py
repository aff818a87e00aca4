"""Local steps of a GPT of 1.9 million parameters with 20 tokens for each parameter, many arms at a time on a GPU.

    python benchmarks/local_steps_gpu.py [--batches 64,16] [--steps N] [--seconds S] [--tokens FILE] [--json FILE]

The GPT is the larger one of local_steps.py (2 layers of 256, samples of 32 tokens). So are its rules: four peers, an
average each 30 batches, AdamW with warm-up and a cosine, gradients clipped to 1, text of this machine of which no
sample comes twice, all arms with the same samples in the same order from the same initial values. Each inner rate and
each outer optimizer is an arm. All arms of one kind, with their four peers, are one stack of models, as one such model
is far too small to keep a GPU busy. The products are in TF32. Kinds of arms:

  one                one process, which steps with the batches of all four peers
  plain, nesterov    the outer optimizer SGD(lr=1), or Nesterov with lr 0.7 and momentum 0.9
  mild, 1.4, 2       Nesterov with lr 0.28 and momentum 0.5; SGD with lr 1.4, and 2
  norm               plain, but the mean of each tensor gets the mean of the peers' norms, except embeddings
  ...-falling        the outer rate falls to 0.3 (of 1.4: to 0.7) in the last 30% of the averages
  one-muon, muon     Muon as the inner optimizer of the matrices

--tokens is a file of ``torch.save`` with int16 tensors ``train`` and ``held`` of token ids, [samples, 32], which may be
packed with xz; by default they are made from the text of this machine, which takes minutes. --seconds ends the last
stack that began before. Rows: the arm, its inner rate and batch of a peer, ``heldout_loss`` in nats for each predicted
token, ``clipped`` the share of inner steps whose gradient was clipped, ``cosine`` of two peers' changes and ``ratio``
of the norm of the mean change to the mean of the norms (means over all averages), and seconds of the stack.

--check trains a small model for two averages in stacks, and one by one as local_steps.py does, on the CPU, and prints
the largest difference. Without a GPU the rest needs --steps, and works at the speed of the CPU.
"""

from __future__ import annotations

import argparse
import io
import lzma
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _command_line import Parser, json_path, positive, positive_int, run, skip, write_json
from _local_arms import MuonBySamples, Rule, Seen, inner_step, is_embedding, train_apart
from _local_tasks import (
    LENGTH,
    MAX_GRAD_NORM,
    SIZES,
    VOCABULARY,
    BySamples,
    joined,
    new_model,
    rate_factor,
    samples,
)
from torch.nn import functional

PEERS = 4
H = 30
HEADS = 4
NUM_TOKENS = 38_000_000  # 20 for each parameter
EPS = 1e-8
BETAS = (0.9, 0.99)
DECAY = 0.01
RATES = (0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3)
OUTER = {
    "plain": Rule(),
    "nesterov": Rule(0.7, 0.9),
    "mild": Rule(0.28, 0.5),
    "1.4": Rule(1.4),
    "2": Rule(2.0),
    "norm": Rule(restores_norm=True),
    "1.4-falling": Rule(1.4, falls_to=0.7),
    "nesterov-falling": Rule(0.7, 0.9, falls_to=0.3),
}

Tensors = dict[str, torch.Tensor]
"""Parameters, or their like, of all models of a stack: each [models, ...]."""


@dataclass(frozen=True)
class Arm:
    """One way to train; ``rule`` is None for one process."""

    name: str
    rate: float
    rule: Rule | None = None
    muon: bool = False


def loss_of(params: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """The loss of each model, [models], as ``GPT2LMHeadModel`` computes it without dropout.

    Args:
        ids: token ids of each model, [models, samples, LENGTH].
    """
    num, batch, length = ids.shape
    embeddings = params["transformer.wte.weight"]
    num_ids, width = embeddings.shape[1:]
    offsets = num_ids * torch.arange(num, device=ids.device).view(num, 1, 1)
    x = embeddings.reshape(-1, width).index_select(0, (ids + offsets).flatten()).view(num, batch, length, width)
    x = (x + params["transformer.wpe.weight"][:, None, :length]).view(num, batch * length, width)

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        scaled = functional.layer_norm(values, (width,))
        return scaled * params[f"{name}.weight"][:, None] + params[f"{name}.bias"][:, None]

    def linear(values: torch.Tensor, name: str) -> torch.Tensor:
        return torch.baddbmm(params[f"{name}.bias"][:, None], values, params[f"{name}.weight"])

    layer = 0
    while (at := f"transformer.h.{layer}") + ".ln_1.weight" in params:
        parts = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").chunk(3, dim=-1)
        query, key, value = (part.reshape(num * batch, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(seen.transpose(1, 2).reshape(num, batch * length, width), f"{at}.attn.c_proj")
        inner = functional.gelu(linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate="tanh")
        x = x + linear(inner, f"{at}.mlp.c_proj")
        layer += 1
    x = norm(x, "transformer.ln_f").view(num, batch, length, width)[:, :, :-1].reshape(num, -1, width)
    logits = torch.bmm(x, embeddings.transpose(1, 2))
    losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, :, 1:].flatten(), reduction="none")
    means: torch.Tensor = losses.view(num, -1).mean(1)
    return means


def per_model(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One number for each model, [models], in a shape that broadcasts over parameters."""
    return values.view(-1, *(1,) * (like.ndim - 1))


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """As in _local_arms.py, for [models, rows, columns]."""
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.transpose(1, 2)
    values = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = values @ values.transpose(1, 2)
        values = 3.4445 * values + (-4.7750 * square + 2.0315 * square @ square) @ values
    nearest: torch.Tensor = values if matrices.shape[1] <= matrices.shape[2] else values.transpose(1, 2)
    return nearest


class Stack:
    """Arms of one kind, trained side by side: all of one process, or all of peers; all with Muon, or none.

    Args:
        initial: the values from which all models begin.
        batch: samples of a batch of one peer.
        ids: of training, in the order in which they come, [samples, LENGTH]: those of the peers in turn.
    """

    def __init__(self, arms: Sequence[Arm], initial: Tensors, batch: int, steps: int, ids: torch.Tensor) -> None:
        self.arms, self.steps, self._ids, self._device = arms, steps, ids, ids.device
        self._peers = 1 if arms[0].rule is None else PEERS
        self._batch = batch * PEERS // self._peers
        self._has_muon = arms[0].muon
        num = len(arms) * self._peers
        self.params = {
            name: value.to(self._device).unsqueeze(0).repeat(num, *(1,) * value.ndim).requires_grad_()
            for name, value in initial.items()
        }
        self.agreed = {name: value.detach()[:: self._peers].clone() for name, value in self.params.items()}
        self._outer_momenta = {name: torch.zeros_like(value) for name, value in self.agreed.items()}
        self._means = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self._squares = {name: torch.zeros_like(value) for name, value in self.params.items()}
        rates = [arm.rate for arm in arms for _ in range(self._peers)]
        self._rates = torch.tensor(rates, device=self._device)
        factors = [rate_factor(step, steps) for step in range(steps)]
        self._factors = torch.tensor(factors, device=self._device)
        self._step = torch.zeros((), dtype=torch.long, device=self._device)
        self._clipped = torch.zeros(num, device=self._device)
        self._cosines = torch.zeros(len(arms), device=self._device)
        self._ratios = torch.zeros(len(arms), device=self._device)
        self._num_averages = 0

    def train(self, is_in_time: Callable[[], bool] = lambda: True) -> bool:
        """Make all steps; returns whether there was time for them."""
        step = self._captured() if self._device.type == "cuda" else self._inner_step
        for number in range(1, self.steps + 1):
            step()
            if number % H == 0:
                if self._peers > 1:
                    self._average(number // H)
                if not is_in_time():
                    return False
        return True

    def _captured(self) -> Callable[[], object]:
        """The inner step as a CUDA graph, with everything as it was before the warm-up that capturing needs."""
        changed = [
            self._step, self._clipped,
            *(value for held in (self.params, self._means, self._squares) for value in held.values()),
        ]  # fmt: skip
        before = [value.detach().clone() for value in changed]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._inner_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._inner_step()
        with torch.no_grad():
            for value, old in zip(changed, before, strict=True):
                value.copy_(old)
        return graph.replay

    def _inner_step(self) -> None:
        num_ids = self._peers * self._batch
        rows = self._step * num_ids + torch.arange(num_ids, device=self._device)
        ids = self._ids[rows].long().view(self._peers, self._batch, LENGTH).repeat(len(self.arms), 1, 1)
        names = list(self.params)
        grads = torch.autograd.grad(loss_of(self.params, ids).sum(), list(self.params.values()))
        with torch.no_grad():
            norms = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
            self._clipped += norms > MAX_GRAD_NORM
            factor = (MAX_GRAD_NORM / (norms + 1e-6)).clamp(max=1.0)
            rates = self._rates * self._factors.index_select(0, self._step.view(1))
            self._step += 1
            for name, grad in zip(names, grads, strict=True):
                grad.mul_(per_model(factor, grad))
                self._update(name, grad, per_model(rates, grad))

    def _update(self, name: str, grad: torch.Tensor, rate: torch.Tensor) -> None:
        value, mean = self.params[name], self._means[name]
        if self._has_muon and grad.ndim == 3 and not is_embedding(name):
            mean.lerp_(grad, 0.05)
            change = orthogonal(grad.lerp(mean, 0.95))
            value.mul_(1 - DECAY * rate).sub_(change * (0.2 * max(grad.shape[1:]) ** 0.5 * rate))
            return
        square = self._squares[name]
        mean.lerp_(grad, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
        unbiased = [1 - beta ** self._step.double() for beta in BETAS]
        size = (square / unbiased[1].float()).sqrt_().add_(EPS)
        value.mul_(1 - DECAY * rate).sub_((mean / size).mul_(rate / unbiased[0].float()))

    @torch.no_grad()
    def _average(self, number: int) -> None:
        rules = [arm.rule or Rule() for arm in self.arms]
        of_all = self.steps // H
        rates = torch.tensor([rule.rate_at(number, of_all) for rule in rules], device=self._device)
        momenta = torch.tensor([rule.momentum for rule in rules], device=self._device)
        restores = torch.tensor([rule.restores_norm for rule in rules], device=self._device)
        products = torch.zeros(len(self.arms), PEERS, PEERS, device=self._device)
        mean_squares = torch.zeros(len(self.arms), device=self._device)
        for name, agreed in self.agreed.items():
            own = self.params[name]
            changes = (agreed.unsqueeze(1) - own.view(len(self.arms), PEERS, *own.shape[1:])).flatten(2)
            mean = changes.mean(1)
            products += changes @ changes.transpose(1, 2)
            mean_squares += mean.square().sum(1)
            if not is_embedding(name):
                wanted = changes.norm(dim=2).mean(1) / mean.norm(dim=1).clamp(min=1e-12)
                mean *= torch.where(restores, wanted, 1.0).unsqueeze(1)
            change = mean.view_as(agreed)
            momentum = self._outer_momenta[name].mul_(per_model(momenta, agreed)).add_(change)
            agreed.sub_(per_model(rates, agreed) * (change + per_model(momenta, agreed) * momentum))
            own.view(len(self.arms), PEERS, *own.shape[1:]).copy_(
                agreed.unsqueeze(1).expand(-1, PEERS, *agreed.shape[1:])
            )
        norms = products.diagonal(dim1=1, dim2=2).sqrt()
        cosines = products / (norms.unsqueeze(1) * norms.unsqueeze(2))
        self._cosines += (cosines.sum((1, 2)) - PEERS) / (PEERS * (PEERS - 1))
        self._ratios += mean_squares.sqrt() / norms.mean(1)
        self._num_averages += 1

    @torch.no_grad()
    def rows(self, held: torch.Tensor, batch: int, seconds: float) -> list[dict[str, Any]]:
        """A row of figures for each arm."""
        agreed = self.agreed if self._peers > 1 else {name: value.detach() for name, value in self.params.items()}
        losses = torch.zeros(len(self.arms), dtype=torch.float64)
        for part in torch.split(held.long(), 64):
            of_part = loss_of(agreed, part.to(self._device).expand(len(self.arms), -1, -1))
            losses += of_part.double().cpu() * len(part) / len(held)
        return [
            {
                "arm": arm.name, "batch": batch, "rate": arm.rate, "steps": self.steps,
                "heldout_loss": round(float(losses[index]), 5),
                "clipped": round(float(self._clipped.view(-1, self._peers)[index].mean()) / self.steps, 4),
                **({
                    "cosine": round(float(self._cosines[index]) / self._num_averages, 4),
                    "ratio": round(float(self._ratios[index]) / self._num_averages, 4),
                } if self._num_averages else {}),
                "stack_s": round(seconds, 1),
            }
            for index, arm in enumerate(self.arms)
        ]  # fmt: skip


def stacks(steps: int) -> list[tuple[list[Arm], int]]:
    """The arms, in stacks, each with its steps; the most telling first."""
    ones = [Arm("one", rate) for rate in RATES]
    few = RATES[1:4]
    peers = [Arm(name, rate, OUTER[name]) for name in ("plain", "nesterov") for rate in RATES[1:]]
    others = [
        Arm(name, rate, rule) for name, rule in OUTER.items() if name not in ("plain", "nesterov") for rate in few
    ]
    muons = [Arm("muon", rate, Rule(), muon=True) for rate in few]
    return [
        (ones, steps),
        (peers, steps),
        ([Arm("one", rate) for rate in few], steps // 2),
        (others, steps),
        ([Arm("one-muon", rate, muon=True) for rate in few], steps),
        (muons, steps),
    ]


def tokens_of(path: Path | None, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of training and held out, each [samples, LENGTH]."""
    if path is None:
        return samples("machine", num_tokens)
    content = path.read_bytes()
    if path.suffix == ".xz":
        content = lzma.decompress(content)
    read = torch.load(io.BytesIO(content), weights_only=True)
    return read["train"], read["held"]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--batches", type=sizes, default=[64, 16], help="samples of a batch of one peer")
    parser.add_argument("--steps", type=steps_of, help="batches of each peer; default: 20 tokens for each parameter")
    parser.add_argument("--seconds", type=positive, help="begin no stack after so many")
    parser.add_argument("--tokens", type=Path, help="token ids, made before")
    parser.add_argument("--json", type=json_path)
    parser.add_argument("--check", action="store_true", help="compare a small stack with the loop of local_steps.py")
    arguments = parser.parse_args()
    if arguments.check:
        print(f"largest difference of a parameter: {check():.1e}")
        return
    if not (torch.cuda.is_available() or arguments.steps):
        skip("torch finds no NVIDIA GPU here; with --steps a CPU does a few")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    per_step = [PEERS * batch for batch in arguments.batches]
    steps = [arguments.steps or NUM_TOKENS // LENGTH // num // (2 * H) * 2 * H for num in per_step]
    needed = max(number * num for number, num in zip(steps, per_step, strict=True))
    train, held = tokens_of(arguments.tokens, needed * LENGTH)
    if len(train) < needed:
        raise SystemExit(f"--tokens: it has {len(train)} training samples, and {needed} are needed")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1))
    ids = train[order].to(device, torch.int16)
    initial = dict(new_model("gpt", SIZES["full"], 1).named_parameters())
    print(f"{device}, {sum(value.numel() for value in initial.values()):,} parameters, {len(ids) * LENGTH:,} tokens")
    rows: list[dict[str, Any]] = []

    def is_in_time() -> bool:
        return arguments.seconds is None or time.monotonic() - began < arguments.seconds

    for number in range(len(stacks(0))):  # the most telling ones of all sizes first
        for batch, of_batch in zip(arguments.batches, steps, strict=True):
            arms, num_steps = stacks(of_batch)[number]
            since = time.monotonic()
            stack = Stack(arms, {name: value.detach() for name, value in initial.items()}, batch, num_steps, ids)
            if not is_in_time() or not stack.train(is_in_time):
                print(f"no time was left for {arms[0].name} with batches of {batch}", flush=True)
                continue
            rows += (new := stack.rows(held, batch, time.monotonic() - since))
            for row in new:
                print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
            del stack
            write_json(arguments.json, rows)


def check() -> float:
    """Train the smaller GPT for two averages with random samples, in stacks and as local_steps.py does.

    Returns the largest difference between two values that should be equal.
    """
    size, batch, steps, rate = SIZES["quick"], 1, 2 * H, 2e-3
    ids = torch.randint(VOCABULARY, (steps * PEERS * batch, LENGTH), generator=torch.Generator().manual_seed(1))
    initial = {name: value.detach() for name, value in new_model("gpt", size, 1).named_parameters()}
    largest = 0.0

    def compare(arms: list[Arm], models: list[torch.nn.Module]) -> None:
        nonlocal largest
        stack = Stack(arms, initial, batch, steps, ids.to(torch.int16))
        stack.train()
        values = stack.agreed if arms[0].rule is not None else stack.params
        for index, model in enumerate(models):
            for name, value in model.named_parameters():
                largest = max(largest, float((values[name][index] - value).detach().abs().max()))

    def batch_of(peer: int, step: int) -> dict[str, torch.Tensor]:
        its = ids[(step * PEERS + peer) * batch :][:batch]
        return {"input_ids": its, "labels": its}

    def model_of(arm: Arm) -> torch.nn.Module:
        def inner_of(model: torch.nn.Module) -> BySamples | MuonBySamples:
            return MuonBySamples(model, rate, steps) if arm.muon else BySamples(model.parameters(), rate, steps)

        if arm.rule is not None:
            return train_apart(arm.rule, H, steps, batch, lambda: new_model("gpt", size, 1), inner_of, batch_of)[0]
        model, seen = new_model("gpt", size, 1), Seen()
        inner = inner_of(model)
        for step in range(steps):
            inner_step(model, inner, joined([batch_of(peer, step) for peer in range(PEERS)]), seen)
        return model

    for arms in (
        [Arm(name, rate, OUTER[name]) for name in ("norm", "nesterov-falling")],
        [Arm("muon", rate, Rule(), muon=True)],
        [Arm("one", rate)],
        [Arm("one-muon", rate, muon=True)],
    ):
        compare(arms, [model_of(arm) for arm in arms])
    return largest


def steps_of(text: str) -> int:
    """Steps of which the half is a whole number of averages."""
    steps = positive_int(text)
    if steps % (2 * H):
        raise argparse.ArgumentTypeError(f"{text!r} is no multiple of {2 * H}")
    return steps


def sizes(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


if __name__ == "__main__":
    run(main)
