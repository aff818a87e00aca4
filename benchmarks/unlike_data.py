"""How often the limit of norms meets honest peers, by how alike their data are.

    python benchmarks/unlike_data.py [--steps 600] [--seeds 1] [--spreads 6]

Eight peers train a small classifier of ten clusters in one process, without a network. In each step the limits of the
library (:mod:`manyhands.averaging.round.limits`) are applied to the norms of their gradients. Where the clusters do
not overlap, the model soon fits all samples but a few. A peer that is refused is away for 100 steps, then 200, and so
on. ``--spreads 0`` is the rule of before, under which each norm over the limit was a strike.

Printed for each case: contributions of honest peers that were left out, in percent, and how often honest peers were
refused; with a liar, which sends -100 times its gradient, also how often it did so before it was first refused.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from manyhands.averaging.matchmaking.candidates import GOOD_ROUNDS, STRIKES
from manyhands.averaging.round import limits

NUM_CLASSES = 10
NUM_INPUTS = 32
BATCH = 64
AWAY_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who has which samples.

    Attributes:
        apart: distance of the clusters; at 2 they do not overlap, at 0.5 they do.
        optimizer: SGD has momentum.
        num_labels: of each peer; the samples of two peers with two labels have none in common.
        has_rare: only the last peer has samples of the last class.
        comes_at: the step at which the last peer comes.
        has_liar: the first peer lies.
    """

    apart: float = 2.0
    optimizer: str = "SGD"
    num_peers: int = 8
    num_labels: int = NUM_CLASSES
    has_rare: bool = False
    comes_at: int = 0
    has_liar: bool = False


CASES = [
    Case(apart=0.5),
    Case(apart=0.5, has_rare=True),
    Case(apart=0.5, has_rare=True, comes_at=300),
    Case(apart=0.5, has_liar=True),
    Case(optimizer="Adam"),
    Case(),
    Case(num_peers=4),
    Case(num_labels=2),
    Case(has_rare=True),
    Case(has_rare=True, comes_at=300),
    Case(has_rare=True, comes_at=300, optimizer="Adam"),
    Case(has_liar=True, optimizer="Adam"),
    Case(has_liar=True),
    Case(has_liar=True, num_peers=4),
]


def run(case: Case, num_steps: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    centers = case.apart * torch.randn(NUM_CLASSES, NUM_INPUTS, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(NUM_INPUTS, 64), torch.nn.ReLU(), torch.nn.Linear(64, NUM_CLASSES))
    parameters = list(model.parameters())
    optimizer = (
        torch.optim.Adam(parameters, lr=3e-3)
        if case.optimizer == "Adam"
        else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    )
    peers = range(case.num_peers)
    last = case.num_peers - 1
    strikes, refused, back_at = [0.0] * len(peers), [0] * len(peers), [0] * len(peers)
    back_at[last] = case.comes_at
    num_honest = num_left_out = num_lies = 0

    def gradient(peer: int) -> torch.Tensor:
        labels = (peer * case.num_labels + torch.randint(case.num_labels, (BATCH,), generator=generator)) % NUM_CLASSES
        if case.has_rare:
            is_rare = torch.full((BATCH,), peer == last)
            labels = torch.where(is_rare, NUM_CLASSES - 1, labels % (NUM_CLASSES - 1))
        inputs = centers[labels] + torch.randn(BATCH, NUM_INPUTS, generator=generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        flat = torch.cat([one.flatten() for one in torch.autograd.grad(loss, parameters)])
        return -100.0 * flat if case.has_liar and peer == 0 else flat

    for step in range(num_steps):
        here = [peer for peer in peers if back_at[peer] <= step]
        gradients = [gradient(peer) for peer in here]
        norms = [float(one.norm()) for one in gradients]
        found, struck = limits.witnessed([norms], [float(BATCH)] * len(here), limits.OPEN_LIMITS)
        for rank, peer in enumerate(here):
            is_liar = case.has_liar and peer == 0
            num_lies += is_liar and not refused[0]
            num_honest += not is_liar
            num_left_out += rank in found and not is_liar
            strikes[peer] = max(0.0, strikes[peer] + (rank in struck) - (rank not in found) / GOOD_ROUNDS)
            if strikes[peer] > STRIKES - 1:
                strikes[peer], back_at[peer], refused[peer] = (
                    0.0,
                    step + AWAY_STEPS * 2 ** refused[peer],
                    refused[peer] + 1,
                )
        mean = torch.stack([one for rank, one in enumerate(gradients) if rank not in found]).mean(dim=0)
        for parameter, part in zip(parameters, mean.split([one.numel() for one in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    liar = f", liar refused after {num_lies} lies" if case.has_liar else ""
    return f"left out {100 * num_left_out / num_honest:4.1f}%, refused {sum(refused[case.has_liar :]):2d}{liar}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--spreads", type=float, default=limits.SPREADS)
    arguments = parser.parse_args()
    limits.SPREADS = arguments.spreads
    torch.set_num_threads(1)
    for case in CASES:
        told = ", ".join(f"{name}={value}" for name, value in vars(case).items() if value != getattr(Case, name))
        for seed in range(arguments.seeds):
            print(f"{run(case, arguments.steps, seed)}  {told or 'all alike'}", flush=True)


if __name__ == "__main__":
    main()
