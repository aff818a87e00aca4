"""What liars do to a small model, by attack and by how the members' values become one.

    python benchmarks/liars.py [--quick] [--attack TEXT] [--seeds N] [--json FILE]

Four, eight or 16 peers train a classifier of ten clusters that overlap, in one process. In each step the limits of the
library (:mod:`manyhands.averaging.round.limits`) and the rules of the roster are applied, as in a round of an open run:
weights are capped, values clipped, members left out, blamed and barred. One of four peers, one or three of eight, and
one, three, five or seven of 16 (with ``--quick`` only seven) lie from the first step on, in all steps:

flip x1, x9, x10,  the gradient times -1, -9, -10, -1000, which it says to the others
x1000
weight x100        the gradient times -1, with 100 times the samples
late weight x100   the same, but honest for the first half of the steps
norm lie           the gradient times -9, and the norm of the gradient
free rider         zeros
noise              random values, nine times as long as the gradient
label flip         the gradient of wrong labels
delayed            its gradient of 20 steps ago
copier             the gradient of another peer
false accuser      its gradient, but as a reducer it leaves another peer out of its span, as if that had sent nothing,
                   for two steps, then the next one
false complaint    its gradient, but all liars complain of one honest peer in their votes, for two steps, then of the
                   next one: where they are several, any leader leaves that one out
a little           all liars send the others' mean minus 1.5 of their standard deviations, value by value (Baruch et
                   al., A Little Is Enough, arXiv:1902.06156)
min-max            all liars send the others' mean minus so many of their standard deviations that it is as far from
                   each of them as two of them are from each other (Shejwalkar and Houmansadr, NDSS 2021)
reducer x-1        its gradient, but as a reducer -1 times the mean of its span (each peer owns an equal one)
reducer x-1000     the same with -1000
reducer 90%        the same, but only the smallest 90% of the values are reversed, as much as its checks let pass

A *defence* is an ``AveragingConfig(aggregate=...)``, for ``centered_clip`` with chunks of 1,000 values; "before" is the
mean with weights of up to 100 times the median for everybody (docs/adr/0018), and "unchecked" is "clip" without the
checks of reducers (docs/adr/0051). Both are shown only where they differ. Printed for each row: the loss on held-out
samples at the end, that of the same run if nobody lies (clean), that if the liars are not there (absent), how many
liars and how many others are no members of the roster at the end, and how many others do not vote; with several
seeds, the medians, and the lowest and highest loss. JSON: a list of `{peers, optimizer, attack, liars, defence,
heldout_loss, clean_loss, absent_loss, lowest_loss, highest_loss, lost_standing, honest_lost_standing,
honest_lost_votes, overhead_time, overhead_bytes}`. At last the table of the docs, and what a defence costs where nobody
lies: for a reducer the time of one core for a million values, in chunks of the default size; and of an all-reduce of
four and eight real peers (a million values with int8) the CPU time of all peers and the bytes that they send, as a
share of those of a mean that nobody measures or checks (``overhead_...``; it is not measured of 16 peers, which wait
for each other in one process).
"""

from __future__ import annotations

import functools
import math
import statistics
import timeit
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from _command_line import Parser, json_path, positive_int, run, write_json
from _defence_cost import Cost, costs

from manyhands.averaging.allreduce import partition
from manyhands.averaging.allreduce.centered_clip import centered_clip
from manyhands.averaging.allreduce.checks import SpanCheck, Told
from manyhands.averaging.codecs import NONE, plan_of, shares_of
from manyhands.averaging.messages import Group, Member, Position
from manyhands.averaging.roster import Attendance, Roster
from manyhands.averaging.round import limits
from manyhands.base.identity import PeerId

NUM_CLASSES, NUM_INPUTS = 10, 32
APART = 0.5
BATCH = 64
CHUNK_NUMEL = 1000
DEVIATIONS = 1.5
DELAY = 20
NUM_HELD_OUT = 2000
NUM_STEPS, NUM_STEPS_QUICK = 300, 60
FIRST_SEED = 7
GROUPS = [(4, 1), (8, 1), (8, 3), (16, 7)]
"""How many peers, and how many of them lie."""
MEASURED = (4, 8)
"""Groups of which the cost of a defence is measured."""
ANYBODY = limits.MemberLimits(max_weight_ratio=100.0, max_weight_share=1.0)

Vectors = Sequence[torch.Tensor]


def mean_of(group: Group, vectors: Vectors) -> torch.Tensor:
    """The mean of the members' values, as reducers compute it: a member that is clipped weighs what it has weighed."""
    total = sum(member.weight for member in group.members)
    parts = [member.weight * member.scale / total * one for member, one in zip(group.members, vectors, strict=True)]
    return torch.stack(parts).sum(dim=0)


def robust_mean_of(group: Group, vectors: Vectors) -> torch.Tensor:
    """The same by centered clipping, chunk by chunk."""
    weights = [member.weight for member in group.members]
    chunks = zip(*(torch.split(vector, CHUNK_NUMEL) for vector in vectors), strict=True)
    return torch.cat([centered_clip(torch.stack(chunk), weights) for chunk in chunks])


@dataclass(frozen=True)
class Defence:
    """How the values of the members become one.

    Attributes:
        clips: whether members say their norms, and values that are too large are scaled down.
        combine: of the members that are not left out.
        checks: whether members check the means of reducers.
    """

    clips: bool
    checks: bool = True
    combine: Callable[[Group, Vectors], torch.Tensor] = mean_of
    bounds: limits.MemberLimits = limits.OPEN_LIMITS
    has_roster: bool = True


DEFENCES = {"before": Defence(clips=False, bounds=ANYBODY, has_roster=False), "mean": Defence(clips=False),
            "unchecked": Defence(clips=True, checks=False), "clip": Defence(clips=True),
            "centered_clip": Defence(clips=False, checks=False, combine=robust_mean_of)}  # fmt: skip


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda mean: factor * mean


def most_reversed(mean: torch.Tensor) -> torch.Tensor:
    """Reverse the smallest 90%, as long as the largest ones allow: <m, t> >= <m, m> / 2 still holds."""
    is_small = mean.abs() <= mean.abs().quantile(0.9)
    small, large = float(mean[is_small].square().sum()), float(mean[~is_small].square().sum())
    factor = 0.99 * (math.sqrt(1.0 + large / small) - 1.0) if small else 1.0
    return torch.where(is_small, -factor * mean, mean)


def a_little_off(honest: torch.Tensor) -> torch.Tensor:
    return honest.mean(dim=0) - DEVIATIONS * honest.std(dim=0)


def min_max(honest: torch.Tensor) -> torch.Tensor:
    """As far from the mean as it may be without being farther from any honest peer than two of these are apart."""
    mean, deviation = honest.mean(dim=0), honest.std(dim=0)
    farthest = float(torch.cdist(honest, honest).max())
    low, high = 0.0, 100.0
    for _ in range(30):
        middle = (low + high) / 2
        is_near = float((mean - middle * deviation - honest).norm(dim=1).max()) <= farthest
        low, high = (middle, high) if is_near else (low, middle)
    return mean - low * deviation


@dataclass(frozen=True)
class Attack:
    """What a liar sends.

    Attributes:
        factor: of its gradient.
        weight: of its samples.
        hides: it says the norm of its gradient, not of what it sends.
        is_late: it is honest in the first half of the steps.
        is_delayed: it sends its gradient of ``DELAY`` steps ago.
        copies: it sends the gradient of an honest peer.
        accuses: as a reducer it leaves an honest peer out, and says that this one has sent it nothing.
        complains: it complains of an honest peer in its vote.
        agreed: what all liars send, by what the honest peers send, one in each row.
        reduce: what it makes of the mean of its span.
    """

    factor: float = 1.0
    weight: float = 1.0
    hides: bool = False
    is_noise: bool = False
    flips_labels: bool = False
    is_late: bool = False
    is_delayed: bool = False
    copies: bool = False
    accuses: bool = False
    complains: bool = False
    agreed: Callable[[torch.Tensor], torch.Tensor] | None = None
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None


ATTACKS = {
    "flip x1": Attack(-1.0),
    "flip x9": Attack(-9.0),
    "flip x10": Attack(-10.0),
    "flip x1000": Attack(-1000.0),
    "weight x100": Attack(-1.0, weight=100.0),
    "late weight x100": Attack(-1.0, weight=100.0, is_late=True),
    "norm lie": Attack(-9.0, hides=True),
    "free rider": Attack(0.0),
    "noise": Attack(9.0, is_noise=True),
    "label flip": Attack(flips_labels=True),
    "delayed": Attack(is_delayed=True),
    "copier": Attack(copies=True),
    "false accuser": Attack(accuses=True),
    "false complaint": Attack(complains=True),
    "a little": Attack(agreed=a_little_off),
    "min-max": Attack(agreed=min_max),
    "reducer x-1": Attack(reduce=times(-1.0)),
    "reducer x-1000": Attack(reduce=times(-1000.0)),
    "reducer 90%": Attack(reduce=most_reversed),
}
HONEST = Attack()


def span_of(reducer: int, num_members: int, numel: int) -> slice:
    """The equal part of the vector that a member reduces."""
    return slice(numel * reducer // num_members, numel * (reducer + 1) // num_members)


def reduced(
    group: Group, vectors: Vectors, mean: torch.Tensor, attacks: Sequence[Attack]
) -> tuple[torch.Tensor, set[int]]:
    """The means as the reducers send them, and the ranks of those of which an honest member complains."""
    plan, numel = plan_of([mean.shape], NONE), len(mean)
    weights, scales = [one.weight for one in group.members], [one.scale for one in group.members]
    ranks = range(len(vectors))
    shares = shares_of(weights, scales, ranks)
    sent, caught = mean.clone(), set[int]()
    for reducer, attack in enumerate(attacks):
        if attack.reduce is None:
            continue
        span = span_of(reducer, len(vectors), numel)
        sent[span] = attack.reduce(mean[span])
        told = Told(
            [float(vector[span].norm()) for vector in vectors],
            [shares[rank].scaled * float(sent[span] @ vectors[rank][span]) for rank in ranks],
        )
        for rank in ranks:
            check = SpanCheck(plan, rank, weights, scales, 1, plan.error)
            check.add(0, span.start, sent[span], vectors[rank][span])
            if attacks[rank].reduce is None and check.fault([list(ranks)], told):
                caught.add(reducer)
    return sent, caught


class Trained(NamedTuple):
    """How a run ended.

    Attributes:
        loss: on held-out samples.
        liars_lost, others_lost: how many liars and others are no members of the roster at the end.
        votes_lost: how many others do not vote.
    """

    loss: float
    liars_lost: int
    others_lost: int
    votes_lost: int


def trained(
    seed: int, num_peers: int, num_liars: int, attack: Attack, defence: Defence, optimizer_name: str, num_steps: int
) -> Trained:
    """Train; the liars are the last peers."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    centers = APART * torch.randn(NUM_CLASSES, NUM_INPUTS, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(NUM_INPUTS, 64), torch.nn.ReLU(), torch.nn.Linear(64, NUM_CLASSES))
    parameters = list(model.parameters())
    optimizer = (
        torch.optim.Adam(parameters, lr=3e-3)
        if optimizer_name == "Adam"
        else torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    )

    def samples(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
        return centers[labels] + torch.randn(num_samples, NUM_INPUTS, generator=generator), labels

    def gradient(one: Attack) -> tuple[torch.Tensor, float]:
        """What a peer sends, and the norm that it says."""
        inputs, labels = samples(BATCH)
        labels = NUM_CLASSES - 1 - labels if one.flips_labels else labels
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        flat = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
        norm = float(flat.norm())
        if one.is_noise:
            flat = torch.randn(flat.shape, generator=generator) * norm / flat.numel() ** 0.5
        flat = one.factor * flat
        return flat, norm if one.hides else float(flat.norm())

    held_out = samples(NUM_HELD_OUT)
    ids = [PeerId(f"peer {number}") for number in range(num_peers)]
    roster = Roster()
    before = {peer_id: deque[tuple[torch.Tensor, float]](maxlen=DELAY + 1) for peer_id in ids}
    for step in range(num_steps):
        lies = {
            peer_id: attack if number >= num_peers - num_liars and not (attack.is_late and 2 * step < num_steps)
            else Attack(weight=attack.weight) if number >= num_peers - num_liars and attack.is_late
            else HONEST
            for number, peer_id in enumerate(ids)
            if not roster.barred_rounds(peer_id)
        }  # fmt: skip
        sent = {peer_id: gradient(lie) for peer_id, lie in lies.items()}
        for peer_id, brought in sent.items():
            before[peer_id].append(brought)
        sent |= {one: before[one][0] for one, lie in lies.items() if lie.is_delayed}
        honest = [one for one, lie in lies.items() if lie == HONEST]
        victim = honest[step // 2 % len(honest)]
        sent |= {one: sent[honest[0]] for one, lie in lies.items() if lie.copies}
        if attack.agreed is not None:
            agreed = attack.agreed(torch.stack([vector for one, (vector, _) in sent.items() if lies[one] == HONEST]))
            sent |= {one: (agreed, float(agreed.norm())) for one, lie in lies.items() if lie.agreed is not None}
        members = [
            Member(
                peer_id, [], is_client=False, weight=BATCH * lies[peer_id].weight, norm=norm if defence.clips else 0.0
            )
            for peer_id, (_, norm) in sent.items()
        ]
        leader = next(one for one in roster.leaders(ids) if one in sent)
        formed = Group(b"", leader, Position(step, b""), members)
        known = roster if defence.has_roster else None
        group = limits.limited(formed, defence.bounds, known, clips=defence.clips)
        measured = [float(vector.norm()) for vector, _ in sent.values()]
        norms = limits.counted_norms(group, measured) if defence.clips else measured
        weights = [member.weight for member in group.members]
        found = limits.outsized(norms, weights, defence.bounds, limits.trusted(group, known))
        vectors = [vector for vector, _ in sent.values()]
        if sum(lie.complains for lie in lies.values()) > 1:
            found = found | {[*sent].index(victim)}
        while True:  # the members exchange their values again without those that they complain of
            here = [rank for rank in range(len(members)) if rank not in found]
            left = Group(b"", leader, group.position, [group.members[rank] for rank in here])
            values = [vectors[rank] for rank in here]
            attacks = [lies[group.members[rank].peer_id] for rank in here]
            mean, caught = reduced(left, values, defence.combine(left, values), attacks)
            if not caught or not defence.checks:
                break
            found = found | {here[at] for at in caught}
        out = {members[rank].peer_id for rank in found}
        accused = {one: {leader} for one in out - {leader}}
        if accusers := {one for one in sent if lies[one].accuses}:  # the others hold the same means: nobody is left out
            others = [at for at, rank in enumerate(here) if members[rank].peer_id != victim]
            those = Group(b"", leader, group.position, [left.members[at] for at in others])
            without = defence.combine(those, [values[at] for at in others])
            for at, rank in enumerate(here):
                if members[rank].peer_id in accusers:
                    span = span_of(at, len(here), len(mean))
                    mean[span] = without[span]
            accused[victim] = accusers
        counted = {group.members[rank].peer_id: weights[rank] for rank in here}
        roster = roster.after(Attendance(leader, dict.fromkeys(sent, True), (), out, accused, weights=counted))
        for parameter, part in zip(parameters, torch.split(mean, [one.numel() for one in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(model(held_out[0]), held_out[1]))
    liars = {*ids[num_peers - num_liars :]}
    lost = set(ids) - roster.members
    return Trained(loss, len(lost & liars), len(lost - liars), len(set(ids) - roster.voters - liars))


def rows(
    num_steps: int,
    wanted: str,
    num_seeds: int,
    groups: Sequence[tuple[int, int]],
    cost_of: Mapping[tuple[int, str], Cost],
) -> list[dict[str, Any]]:
    """The rows of the attacks that are wanted.

    Args:
        groups: how many peers, and how many of them lie.
        cost_of: by number of peers and defence.
    """
    found: list[dict[str, Any]] = []
    names = [wanted] if wanted in ATTACKS else [name for name in ATTACKS if wanted in name]

    @functools.cache
    def train(num_peers: int, num_liars: int, attack: Attack, defence: Defence, optimizer: str) -> list[Trained]:
        """The runs of all seeds, that with the lowest loss first."""
        seeds = range(FIRST_SEED, FIRST_SEED + num_seeds)
        return sorted(trained(seed, num_peers, num_liars, attack, defence, optimizer, num_steps) for seed in seeds)

    def middle_loss(*setting: Any) -> float:
        return statistics.median(one.loss for one in train(*setting))

    for num_peers, num_liars in groups:
        for optimizer in ("Adam", "SGD"):
            for name in names:
                attack = ATTACKS[name]
                for defence_name, defence in DEFENCES.items():
                    if defence_name == "before" and (attack.weight == 1 or attack.reduce is not None):
                        continue
                    if defence_name == ("unchecked" if attack.reduce is None else "mean"):
                        continue
                    runs = train(num_peers, num_liars, attack, defence, optimizer)
                    cost = cost_of.get((num_peers, defence_name))
                    row: dict[str, Any] = {
                        "peers": num_peers,
                        "optimizer": optimizer,
                        "attack": name,
                        "liars": num_liars,
                        "defence": defence_name,
                        "heldout_loss": statistics.median(one.loss for one in runs),
                        "clean_loss": middle_loss(num_peers, 0, HONEST, defence, optimizer),
                        "absent_loss": middle_loss(num_peers - num_liars, 0, HONEST, defence, optimizer),
                        "lowest_loss": runs[0].loss,
                        "highest_loss": runs[-1].loss,
                        "lost_standing": statistics.median(one.liars_lost for one in runs),
                        "honest_lost_standing": statistics.median(one.others_lost for one in runs),
                        "honest_lost_votes": statistics.median(one.votes_lost for one in runs),
                        "overhead_time": cost.time if cost is not None else None,
                        "overhead_bytes": cost.bytes if cost is not None else None,
                    }
                    found.append({key: round(one, 3) if isinstance(one, float) else one for key, one in row.items()})
                    text = "{peers} peers, {liars} lie, {optimizer:4} {attack:16} {defence:13}: {heldout_loss:.3f} "
                    text += "(clean {clean_loss:.3f}, absent {absent_loss:.3f}), "
                    text += "{lost_standing:g} liars and {honest_lost_standing:g} others are no members, "
                    text += "{honest_lost_votes:g} others have no vote"
                    if num_seeds > 1:
                        text += ", from {lowest_loss:.3f} to {highest_loss:.3f}"
                    print(text.format(**found[-1]), flush=True)
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """The losses as a table in Markdown: a row for each attack, columns for one of four liars and three of eight."""
    columns = [
        (peers, liars, optimizer, defence)
        for peers, liars, optimizer in ((4, 1, "Adam"), (8, 3, "SGD"))
        for defence in ("mean", "clip", "centered_clip")
    ]

    def figures(attack: str, figure: str) -> list[str]:
        return [
            f"{row[figure]:.3g}"
            for column in columns
            for row in found
            if (*column, attack) == tuple(row[key] for key in ("peers", "liars", "optimizer", "defence", "attack"))
        ]

    heads = [f"{liars} of {peers}, {optimizer}: `{defence}`" for peers, liars, optimizer, defence in columns]
    lines = [
        ["liars send", *heads],
        ["---"] * (len(columns) + 1),
        ["nothing wrong", *figures("flip x1", "clean_loss")],
        ["nothing, and are not there", *figures("flip x1", "absent_loss")],
        *([name, *figures(name, "heldout_loss")] for name, attack in ATTACKS.items() if attack.reduce is None),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def reducer_cost(num_members: int) -> str:
    """What centered clipping and the plain mean of a chunk take, in one thread."""
    values = torch.randn(num_members, partition.CHUNK_NUMEL)
    weights = torch.ones(num_members)
    took = {
        "centered_clip": lambda: centered_clip(values, weights.tolist()),
        "mean": lambda: weights @ values / num_members,
    }
    seconds = {name: min(timeit.repeat(work, number=1, repeat=5)) for name, work in took.items()}
    for_million = {name: 1e3 * one * 1e6 / partition.CHUNK_NUMEL for name, one in seconds.items()}
    return f"{num_members} members: " + ", ".join(f"{name} {one:.2g} ms" for name, one in for_million.items())


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{NUM_STEPS_QUICK} steps, not {NUM_STEPS}")
    parser.add_argument(
        "--attack", default="", metavar="TEXT", help="only the attack of this name, or those with it in theirs"
    )
    parser.add_argument("--seeds", type=positive_int, default=1, metavar="N", help="so many runs of each, not one")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    groups = GROUPS if options.quick else [*GROUPS, (16, 1), (16, 3), (16, 5)]
    cost_of = {(num_peers, name): one for num_peers in MEASURED for name, one in costs(num_peers).items()}
    num_steps = NUM_STEPS_QUICK if options.quick else NUM_STEPS
    found = rows(num_steps, options.attack, options.seeds, groups, cost_of)
    if not options.attack:
        print(table(found))
    print("for a million values:", *map(reducer_cost, (4, 8, 16)), sep="\n")
    for (num_peers, name), one in cost_of.items():
        print(f"an all-reduce of {num_peers} peers: {name} {one.time:+.1%} CPU time, {one.bytes:+.2%} bytes")
    write_json(options.json, found)


if __name__ == "__main__":
    run(main)
