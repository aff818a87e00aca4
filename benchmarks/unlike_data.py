"""How often the limits of norms meet honest peers, by how alike their data are.

    python benchmarks/unlike_data.py [--steps 600] [--seeds 1] [--aggregate clip]

Eight peers train a small classifier of ten clusters in one process, without a network. In each step the limits of the
library (:mod:`manyhands.averaging.round.limits`) are applied to the norms of their gradients, and the rules of the
roster to those that are left out. Where the clusters do not overlap, the model soon fits all samples but a few.

Printed for each case: contributions of honest peers that were clipped, those that would be at 1.5 and 3 times the usual
norm, and those that were left out, in percent; the norms of honest peers as multiples of the usual one, in their first
tenth of the steps (the 99.9th percentile) and in all (the 99th and the largest); steps from which honest peers were
barred, in percent; and the loss in the last tenth of the steps. With a liar, which sends -100 times its gradient, also
the share of the steps from which that one was barred.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from manyhands.averaging.config import AGGREGATES, CLIP
from manyhands.averaging.roster import Attendance, Roster
from manyhands.averaging.round import limits
from manyhands.base.identity import PeerId

NUM_CLASSES = 10
NUM_INPUTS = 32
BATCH = 64


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
    Case(apart=0.5, optimizer="Adam"),
    Case(apart=0.5, num_labels=5),
    Case(apart=0.5, num_labels=2),
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


def run(case: Case, num_steps: int, seed: int, aggregate: str = CLIP) -> str:
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
    ids = [PeerId(f"peer {peer}") for peer in peers]
    roster = Roster()
    num_honest = num_left_out = num_barred = num_liar_barred = num_clipped = 0
    ratios: list[float] = []  # norms of honest peers, as multiples of the usual one
    num_early = 0  # of these in the first tenth of the steps
    losses: list[float] = []

    def gradient(peer: int) -> torch.Tensor:
        labels = (peer * case.num_labels + torch.randint(case.num_labels, (BATCH,), generator=generator)) % NUM_CLASSES
        if case.has_rare:
            is_rare = torch.full((BATCH,), peer == last)
            labels = torch.where(is_rare, NUM_CLASSES - 1, labels % (NUM_CLASSES - 1))
        inputs = centers[labels] + torch.randn(BATCH, NUM_INPUTS, generator=generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        losses.append(loss.item())
        flat = torch.cat([one.flatten() for one in torch.autograd.grad(loss, parameters)])
        return -100.0 * flat if case.has_liar and peer == 0 else flat

    for step in range(num_steps):
        due = [peer for peer in peers if peer != last or step >= case.comes_at]
        here = [peer for peer in due if not roster.barred_rounds(ids[peer])]
        gradients = [gradient(peer) for peer in here]
        norms = [float(one.norm()) for one in gradients]
        weights = [float(BATCH)] * len(here)
        members = {rank for rank, peer in enumerate(here) if ids[peer] in roster.members} or set(range(len(here)))
        usual = limits.usual_norm(norms, weights, members)
        scales = limits.clipping_scales(norms, weights, limits.OPEN_LIMITS, members)
        if aggregate != CLIP:
            scales = [1.0] * len(here)
        counted = [norm * scale for norm, scale in zip(norms, scales, strict=True)]
        found = limits.outsized(counted, weights, limits.OPEN_LIMITS, members)
        honest = [rank for rank, peer in enumerate(here) if not (case.has_liar and peer == 0)]
        ratios += [norms[rank] / usual for rank in honest]
        num_clipped += sum(scales[rank] < 1 for rank in honest)
        num_early = len(ratios) if step < num_steps // 10 else num_early
        for peer in due:
            if case.has_liar and peer == 0:
                num_liar_barred += peer not in here
                continue
            num_honest += 1
            num_barred += peer not in here
            num_left_out += peer in here and here.index(peer) in found
        leader = next(one for one in roster.leaders(ids) if one in {ids[peer] for peer in here})
        out = {ids[here[rank]] for rank in found}
        accused = {one: {leader} for one in out - {leader}}
        roster = roster.after(Attendance(leader, dict.fromkeys((ids[peer] for peer in here), True), (), out, accused))
        mean = torch.stack([scales[rank] * one for rank, one in enumerate(gradients) if rank not in found]).mean(dim=0)
        for parameter, part in zip(parameters, torch.split(mean, [one.numel() for one in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    liar = f", liar barred {100 * num_liar_barred / num_steps:4.1f}%" if case.has_liar else ""
    early, some = torch.tensor(ratios[:num_early]), torch.tensor(ratios)
    would = [100 * float((some > ratio).float().mean()) for ratio in (1.5, 3.0)]
    return (
        f"clipped {100 * num_clipped / num_honest:4.1f}% (at 1.5: {would[0]:4.1f}%, at 3: {would[1]:4.1f}%), "
        f"norms early {early.quantile(0.999):.2f}, all {some.quantile(0.99):.2f} and {some.max():.1f}, "
        f"left out {100 * num_left_out / num_honest:4.1f}%, barred {100 * num_barred / num_honest:4.1f}%{liar}, "
        f"loss {sum(losses[-len(losses) // 10 :]) / (len(losses) // 10):.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--aggregate", choices=AGGREGATES, default=CLIP)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        told = ", ".join(f"{name}={value}" for name, value in vars(case).items() if value != getattr(Case, name))
        for seed in range(arguments.seeds):
            print(f"{run(case, arguments.steps, seed, arguments.aggregate)}  {told or 'all alike'}", flush=True)


if __name__ == "__main__":
    main()
