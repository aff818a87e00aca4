"""Local steps of several peers as a plain loop of torch: what a run should hold, without any of its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from manyhands.averaging.codecs import Sparse

Batches = Sequence[Any]


class Peer:
    """A model with its inner optimizer, and what it has not sent yet."""

    def __init__(self, model: torch.nn.Module, inner: torch.optim.Optimizer) -> None:
        self.model, self.inner, self.unsent = model, inner, torch.zeros(())

    def step(self, loss: torch.Tensor, max_grad_norm: float) -> None:
        self.inner.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        self.inner.step()

    def sent(self, change_N: torch.Tensor, codec: Sparse) -> torch.Tensor:
        """What the others decode; the rest is added to the next change."""
        wanted_N = change_N + codec.decay * self.unsent
        encoded = torch.empty(codec.num_bytes(len(change_N)), dtype=torch.uint8)
        codec.encode(wanted_N, encoded)
        codec.decode(encoded, sent_N := torch.empty_like(wanted_N))
        self.unsent = wanted_N - sent_N
        return sent_N


def agreed_after_each(
    shards: Sequence[Batches],
    num_local: int,
    new_model: Callable[[], torch.nn.Module],
    new_inner: Callable[[torch.nn.Module], Any],
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor],
    *,
    outer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=1.0),
    fragments: int = 1,
    overlap: int = 0,
    sparse: Sparse | None = None,
    max_grad_norm: float = float("inf"),
) -> list[list[torch.Tensor]]:
    """The agreed parameters after each average; all batches weigh the same.

    Args:
        shards: the batches of each peer, as many for each.
        num_local: batches from one average of a parameter to the next, a multiple of ``fragments``.
        overlap: the average arrives this many batches late, and is merged half and half.
    """
    agreed = list(new_model().parameters())
    peers = [Peer(model, new_inner(model)) for model in (new_model() for _ in shards)]
    optimizer, trace = outer(agreed), list[list[torch.Tensor]]()
    numbers, waiting = in_parts([value.numel() for value in agreed], fragments), dict[int, list[torch.Tensor]]()

    per_average = num_local // fragments

    @torch.no_grad()
    def changes(part: Sequence[int]) -> list[torch.Tensor]:
        own = [[list(peer.model.parameters())[i] for i in part] for peer in peers]
        flats = [torch.cat([(agreed[i] - value).flatten() for i, value in zip(part, its, strict=True)]) for its in own]
        flats = [peer.sent(flat, sparse) if sparse else flat for peer, flat in zip(peers, flats, strict=True)]
        mean_N = torch.stack(flats).mean(0)
        values = mean_N.split([agreed[i].numel() for i in part])
        return [value.view_as(agreed[i]) for i, value in zip(part, values, strict=True)]

    @torch.no_grad()
    def step_with(part: Sequence[int], mean: Sequence[torch.Tensor], kept_share: float) -> None:
        optimizer.zero_grad()
        for number, value in zip(part, mean, strict=True):
            agreed[number].grad = value
        optimizer.step()
        for peer in peers:
            for number, own in enumerate(peer.model.parameters()):
                if number in part:
                    own.lerp_(agreed[number], 1 - kept_share) if kept_share else own.copy_(agreed[number])
        trace.append([value.detach().clone() for value in agreed])

    for done, batches in enumerate(zip(*shards, strict=True), 1):
        for peer, batch in zip(peers, batches, strict=True):
            peer.step(loss_of(peer.model, batch), max_grad_norm)
        if (mean := waiting.pop(done, None)) is not None:
            step_with(numbers[0], mean, 0.5)
        if done % per_average == 0:
            part = numbers[(done // per_average - 1) % fragments]
            if overlap and done < len(shards[0]):
                waiting[done + overlap] = changes(part)
            else:
                step_with(part, changes(part), 0.0)
    return trace


def in_parts(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Numbers of tensors: the largest first, each to the part that has the fewest values, then the fewest tensors."""
    parts = [list[int]() for _ in range(num_parts)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        min(parts, key=lambda part: (sum(sizes[one] for one in part), len(part))).append(number)
    return [sorted(part) for part in parts]
