"""Local steps of several peers as a plain loop in one process, without a network, for the arms of local_steps.py."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from _local_tasks import MAX_GRAD_NORM, Batch, BySamples, joined, rate_factor

from manyhands.averaging.codecs import Sparse, Unsent, plan_of

FALLS_FROM = 0.7  # the share of the averages after which a falling outer rate falls, in a line
FIRST = 3  # averages whose figures stand by themselves


@dataclass(frozen=True)
class Rule:
    """What the peers do from one average to the next, and with it.

    Attributes:
        rate, momentum: of the outer optimizer, SGD; momentum is Nesterov's.
        falls_to: what is left of the outer rate at the last average.
        restores_norm: scales the mean of each tensor up to the mean of its peers' norms, except embeddings, of which
            each peer changes other rows.
        muon: the inner optimizer is Muon for the matrices of the layers, and AdamW for the rest.
        sparse: how the peers' changes travel, with what was not sent before; None if as they are.
        exact_small: with ``sparse``, vectors and small matrices travel as they are.
        overlap: an average arrives this many steps late; the peers then move half of the way to it.
        parts: relative sizes of the peers' batches; together they have as many samples as equal ones.
        squared: a peer counts by its samples squared over its steps instead of by its samples.
    """

    rate: float = 1.0
    momentum: float = 0.0
    falls_to: float = 1.0
    restores_norm: bool = False
    muon: bool = False
    sparse: Sparse | None = None
    exact_small: bool = False
    overlap: int = 0
    parts: tuple[int, ...] = (1, 1, 1, 1)
    squared: bool = False

    def sizes(self, batch: int) -> list[int]:
        """Samples of each peer's batch, if equal ones have ``batch``."""
        return [batch * len(self.parts) * part // sum(self.parts) for part in self.parts]

    def weights(self, batch: int) -> list[float]:
        """The share of each peer in the mean. All make as many steps, so that steps cancel out."""
        weights = [size**2 if self.squared else size for size in self.sizes(batch)]
        return [weight / sum(weights) for weight in weights]

    def rate_at(self, average: int, num_averages: int) -> float:
        """The outer rate of an average, counted from 1."""
        fallen = max(0.0, (average / num_averages - FALLS_FROM) / (1 - FALLS_FROM))
        return self.rate * (1 - fallen * (1 - self.falls_to))


@dataclass
class Seen:
    """What the peers' changes looked like.

    Attributes:
        clipped: inner steps whose gradient was clipped.
        cosines: of each average, the mean cosine of two peers' changes.
        ratios: of each average, the norm of the mean change over the mean of the norms.
    """

    steps: int = 0
    clipped: int = 0
    cosines: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """The figures of a row."""
        return {
            "clipped": round(self.clipped / max(self.steps, 1), 4),
            **({"cosine": round(statistics.mean(self.cosines), 4)} if self.cosines else {}),
            **({"ratio": round(statistics.mean(self.ratios), 4)} if self.ratios else {}),
            **{f"ratio_{number}": round(ratio, 4) for number, ratio in enumerate(self.ratios[:FIRST], 1)},
        }

    def note(self, changes: Sequence[torch.Tensor], mean: torch.Tensor) -> None:
        norms = [change.norm() for change in changes]
        pairs = [
            float(one @ other / (its * norm))
            for (one, its), (other, norm) in itertools.combinations(zip(changes, norms, strict=True), 2)
        ]
        self.cosines.append(statistics.mean(pairs) if pairs else 1.0)
        self.ratios.append(float(mean.norm() / torch.stack(norms).mean()))


class MuonBySamples:
    """Muon for the matrices of the layers, and AdamW for all other parameters, with the rates of ``BySamples``.

    Each Muon step is scaled to the size of an AdamW step (arXiv:2502.16982), so that both have one rate.
    ``torch.optim.Muon`` computes the same in bfloat16, which is slow on a CPU.
    """

    def __init__(self, model: torch.nn.Module, lr: float, num_steps: int) -> None:
        named = list(model.named_parameters())
        self._matrices = [value for name, value in named if value.ndim == 2 and not is_embedding(name)]
        self._momenta = [torch.zeros_like(value) for value in self._matrices]
        rest = [value for name, value in named if value.ndim != 2 or is_embedding(name)]
        self._rest = BySamples(rest, lr, num_steps)
        self._lr, self._num_done, self._num_steps = lr, 0, num_steps

    @torch.no_grad()
    def step(self) -> None:
        rate = self._lr * rate_factor(self._num_done, self._num_steps)
        for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
            assert matrix.grad is not None
            momentum.lerp_(matrix.grad, 0.05)
            change = orthogonal(matrix.grad.lerp(momentum, 0.95))
            matrix.mul_(1 - 0.01 * rate).sub_(change, alpha=0.2 * rate * max(matrix.shape) ** 0.5)
        self._rest.step()
        self._num_done += 1


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with orthogonal rows or columns, roughly, by five Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    values = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        square = values @ values.T
        values = 3.4445 * values + (-4.7750 * square + 2.0315 * square @ square) @ values
    nearest: torch.Tensor = values if matrix.shape[0] <= matrix.shape[1] else values.T
    return nearest


def is_embedding(name: str) -> bool:
    return any(part in name for part in ("wte", "wpe", "embeddings"))


def inner_step(
    model: torch.nn.Module,
    optimizer: BySamples | MuonBySamples,
    batch: Batch,
    seen: Seen,
    before: torch.nn.Module | None = None,
) -> None:
    """A step with the gradient of a batch.

    Args:
        before: the model as it was before the last step, if the gradient is to be of that one; it follows by a step.
    """
    computing = model if before is None else before
    computing(**batch).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(computing.parameters(), MAX_GRAD_NORM)
    seen.steps += 1
    seen.clipped += bool(norm > MAX_GRAD_NORM)
    if before is not None:
        for own, late in zip(model.parameters(), before.parameters(), strict=True):
            own.grad, late.grad = late.grad, None
        before.load_state_dict(model.state_dict())
    optimizer.step()
    model.zero_grad()


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """A batch in parts of so many samples."""
    parts = {name: torch.split(values, list(sizes)) for name, values in batch.items()}
    return [{name: values[index] for name, values in parts.items()} for index in range(len(sizes))]


def train_apart(
    rule: Rule,
    num_local: int,
    num_steps: int,
    batch_size: int,
    new_model: Callable[[], torch.nn.Module],
    new_inner: Callable[[torch.nn.Module], BySamples | MuonBySamples],
    batch: Callable[[int, int], Batch],
) -> tuple[torch.nn.Module, Seen]:
    """Train peers apart, with an average after each ``num_local`` steps; the agreed model, and what was seen.

    Args:
        batch: of a peer and a step, each of ``batch_size`` samples.
    Raises:
        ValueError: an average would arrive after the next one has begun.
    """
    if rule.overlap > num_local:
        raise ValueError(f"an overlap of {rule.overlap} is more than the {num_local} steps between two averages")
    sizes, weights, num_peers, seen = rule.sizes(batch_size), rule.weights(batch_size), len(rule.parts), Seen()
    agreed, peers = new_model(), [new_model() for _ in rule.parts]
    inner = [new_inner(model) for model in peers]
    senders = [Sender(agreed, rule) for _ in peers] if rule.sparse is not None else []
    outer = torch.optim.SGD(agreed.parameters(), rule.rate, rule.momentum, nesterov=rule.momentum > 0)
    due_at = 0  # the number of inner steps at which a late average arrives

    def step_outside(number: int, kept_share: float) -> None:
        outer.param_groups[0]["lr"] = rule.rate_at(number, num_steps // num_local)
        outer.step()
        for model in peers:
            follow(model, agreed, kept_share)

    for done in range(1, num_steps + 1):
        batches = [batch(peer, done - 1) for peer in range(num_peers)]
        if len(set(sizes)) > 1:
            batches = cut(joined(batches), sizes)
        for model, optimizer, its in zip(peers, inner, batches, strict=True):
            inner_step(model, optimizer, its, seen)
        if done == due_at:
            step_outside((done - rule.overlap) // num_local, 0.5)
        if done % num_local == 0:
            average(rule, agreed, peers, weights, seen, senders)
            if rule.overlap and done < num_steps:
                due_at = done + rule.overlap
            else:
                step_outside(done // num_local, 0.0)
    return agreed, seen


@torch.no_grad()
def follow(model: torch.nn.Module, agreed: torch.nn.Module, kept_share: float) -> None:
    """Move a peer's parameters to the agreed ones, but for a share of the way."""
    for own, value in zip(model.parameters(), agreed.parameters(), strict=True):
        own.lerp_(value, 1 - kept_share) if kept_share else own.copy_(value)


class Sender:
    """One peer's changes as the others receive them with a sparse codec: all tensors as one."""

    def __init__(self, model: torch.nn.Module, rule: Rule) -> None:
        assert rule.sparse is not None
        shapes = [value.shape for value in model.parameters()]
        one_tensor = [(sum(map(math.prod, shapes)), 1)]
        self._plan = plan_of(shapes if rule.exact_small else one_tensor, rule.sparse)
        self._unsent = Unsent(self._plan)

    def sent(self, change_N: torch.Tensor) -> torch.Tensor:
        encoded = torch.empty(self._plan.num_bytes(0, change_N.numel()), dtype=torch.uint8)
        self._unsent.encode(change_N, 0, encoded)
        self._unsent.commit()
        sent_N = torch.empty_like(change_N)
        self._plan.decode(encoded, 0, sent_N)
        return sent_N


def weighted(weights: Sequence[float], changes: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([weight * change for weight, change in zip(weights, changes, strict=True)]).sum(0)


@torch.no_grad()
def average(
    rule: Rule,
    agreed: torch.nn.Module,
    peers: Sequence[torch.nn.Module],
    weights: Sequence[float],
    seen: Seen,
    senders: Sequence[Sender] = (),
) -> None:
    """Put the mean change into the agreed model's gradients."""
    own = [parameter.flatten() for parameter in agreed.parameters()]
    agreed_N = torch.cat(own)
    changes = [agreed_N - torch.cat([value.flatten() for value in model.parameters()]) for model in peers]
    mean_N = weighted(weights, changes)
    seen.note(changes, mean_N)
    if senders:
        changes = [sender.sent(change) for sender, change in zip(senders, changes, strict=True)]
        mean_N = weighted(weights, changes)
    sizes = [value.numel() for value in own]
    for (name, parameter), mean, *its in zip(
        agreed.named_parameters(),
        torch.split(mean_N, sizes),
        *(torch.split(change, sizes) for change in changes),
        strict=True,
    ):
        parameter.grad = mean.view_as(parameter)
        if rule.restores_norm and not is_embedding(name):
            wanted = sum(weight * float(change.norm()) for weight, change in zip(weights, its, strict=True))
            parameter.grad = parameter.grad * (wanted / max(float(mean.norm()), 1e-12))
