"""Whatever the split of samples over peers and batches, the update is that of one process with the whole batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.averaging.round.limits import OPEN_LIMITS, capped_weights
from manyhands.optim import Lamb
from tests.simulation.swarm_of_trainers import Batch, Member, Swarm, assert_equal_parameters, cut, together
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 10
NUM_PEERS = 3
TARGET = 24
VOCABULARY, WIDTH = 11, 6


class Model(torch.nn.Module):
    """A small language model: tied weights, a frozen parameter, one that is never used, and one that some use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.frozen = torch.nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.randn(4))
        self.rare = torch.nn.Parameter(torch.randn(WIDTH))
        self.out = torch.nn.Linear(WIDTH, VOCABULARY)
        self.out.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states = torch.tanh(self.hidden(self.words(words)) + self.frozen)
        if bool((words == 0).any()):  # only some batches use it
            states = states + self.rare * (words == 0).unsqueeze(-1)
        logits: torch.Tensor = self.out(self.norm(states))
        return logits


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    words, targets = batch
    return torch.nn.functional.cross_entropy(model(words), targets)


def data_of_step(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(VOCABULARY, (TARGET,), generator=generator)
    return words, torch.randint(VOCABULARY, (TARGET,), generator=generator)


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    bare = [parameter for name, parameter in model.named_parameters() if "bias" in name or "norm" in name]
    rest = [parameter for name, parameter in model.named_parameters() if not ("bias" in name or "norm" in name)]
    return [{"params": rest, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0, "lr": 0.02}]


def splits_of(seed: int) -> list[list[list[int]]]:
    """For each step and peer the sizes of its batches; some peers have none in some steps.

    No peer has so much more than the others that it counts for less: see :mod:`manyhands.averaging.round.limits`. All
    have some in the first step, which founds the run: else they would be guests for some steps.
    """
    rng = random.Random(seed)
    steps: list[list[list[int]]] = []
    while len(steps) < NUM_STEPS:
        marks = sorted(rng.sample(range(1, TARGET), rng.randint(NUM_PEERS, 7)))
        sizes = [end - start for start, end in zip([0, *marks], [*marks, TARGET], strict=True)]
        owners = [rng.randrange(NUM_PEERS) for _ in sizes]
        of_peers = [[size for size, own in zip(sizes, owners, strict=True) if own == peer] for peer in range(NUM_PEERS)]
        weights = [float(sum(of_peer)) for of_peer in of_peers]
        if capped_weights(weights, OPEN_LIMITS) == weights and (steps or all(weights)):
            steps.append(of_peers)
    return steps


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1.0) * 0.95**step)


MAKERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(groups_of(model), lr=0.3, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(groups_of(model), lr=0.01),
    "LAMB": lambda model: Lamb(groups_of(model), lr=0.01, clamp_value=10000.0),
}


def whole_batches(make: Callable[[torch.nn.Module], torch.optim.Optimizer], max_grad_norm: float | None) -> Model:
    """What one process finds that has all samples."""
    model = Model()
    optimizer = make(model)
    scheduler = schedule(optimizer)
    for step in range(NUM_STEPS):
        loss_of(model, data_of_step(step)).backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model


CASES = [("SGD", False, 0.5), ("AdamW", True, 0.5), ("LAMB", False, 0.5)]
"""Each optimizer, and each place of its state."""
OTHER_CASES = [case for case in itertools.product(MAKERS, (False, True), (0.5, None)) if case not in CASES]


@pytest.mark.parametrize(("name", "offload", "max_grad_norm"), few_of([*CASES, *OTHER_CASES], len(CASES)))
def test_any_split_makes_the_steps_of_one_process(name: str, offload: bool, max_grad_norm: float | None) -> None:
    swarm, splits = Swarm(seed=len(name)), splits_of(len(name) + 7 * offload)

    def train(member: Member) -> None:
        own = int(member.name[1:])
        together(NUM_PEERS, member)
        for step in range(NUM_STEPS):
            parts = cut(data_of_step(step), [size for sizes in splits[step] for size in sizes])
            first = sum(len(sizes) for sizes in splits[step][:own])
            for batch in parts[first : first + len(splits[step][own])]:
                member.step(loss_of(member.model, batch), batch_size=len(batch[0]))
            member.wait_for(step + 1)

    for number in range(NUM_PEERS):
        swarm.start(
            f"p{number}", Model, MAKERS[name], train,
            target_batch_size=TARGET, scheduler=schedule, max_grad_norm=max_grad_norm, offload=offload,
        )  # fmt: skip
    swarm.run()
    plain = whole_batches(MAKERS[name], max_grad_norm)
    for member in swarm.members.values():
        assert_equal_parameters(member.model, plain)
        counts = member.optimizer.statistics
        assert counts.samples_used == counts.samples_computed
        assert counts.rounds_committed == NUM_STEPS, counts
    assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1


def test_clipping_changes_the_parameters_of_this_test() -> None:
    """Else the test above would show nothing."""
    clipped, free = whole_batches(MAKERS["SGD"], 0.5), whole_batches(MAKERS["SGD"], None)
    assert (clipped.hidden.weight - free.hidden.weight).abs().max() > 0.01


def test_a_loss_over_tokens_is_weighted_by_tokens() -> None:
    """The mean over a varying number of tokens, as with padding; the samples still count towards the target."""
    num_steps, sizes = 12, [5, 9, 10]

    def tokens_of_step(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(VOCABULARY, (TARGET, 7), generator=generator)
        is_padding = torch.arange(7) >= torch.randint(1, 8, (TARGET, 1), generator=generator)
        return words, words.masked_fill(is_padding, -100)

    def token_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        words, targets = batch
        return torch.nn.functional.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=-100)

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    plain = Model()
    optimizer = make(plain)
    for step in range(num_steps):
        token_loss(plain, tokens_of_step(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    swarm = Swarm()

    def train(member: Member) -> None:
        together(len(sizes), member)
        for step in range(num_steps):
            batch = cut(tokens_of_step(step), sizes)[int(member.name[1:])]
            num_tokens = int((batch[1] != -100).sum())
            member.step(token_loss(member.model, batch), batch_size=len(batch[0]), weight=num_tokens)
            member.wait_for(step + 1)

    for number in range(len(sizes)):
        swarm.start(f"p{number}", Model, make, train, target_batch_size=TARGET)
    swarm.run()
    for member in swarm.members.values():
        assert_equal_parameters(member.model, plain)


def test_a_tiny_albert_with_lamb_and_clipping_trains_as_in_one_process() -> None:
    """Its layers share one set of weights, and its decoder those of the embedding."""
    import transformers

    num_steps, sizes = 6, [1, 3]

    def new_albert() -> torch.nn.Module:
        torch.manual_seed(5)
        config = transformers.AlbertConfig(
            vocab_size=40, embedding_size=8, hidden_size=12, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=10, classifier_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.AlbertForPreTraining(config)

    def batch_of(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(5, 40, (4, 10), generator=generator)
        return ids, torch.randint(2, (4,), generator=generator)

    def albert_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        ids, order = batch
        loss: torch.Tensor = model(input_ids=ids, labels=ids, sentence_order_label=order).loss
        return loss

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return Lamb(model.parameters(), lr=0.01, weight_decay=0.01, clamp_value=10000.0)

    plain = new_albert()
    optimizer = make(plain)
    for step in range(num_steps):
        albert_loss(plain, batch_of(step)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    swarm = Swarm()

    def train(member: Member) -> None:
        together(2, member)
        for step in range(num_steps):
            batch = cut(batch_of(step), sizes)[int(member.name[1:])]
            member.step(albert_loss(member.model, batch), batch_size=len(batch[0]))
            member.wait_for(step + 1)

    for number in range(2):
        swarm.start(f"p{number}", new_albert, make, train, target_batch_size=4, max_grad_norm=1.0)
    swarm.run()
    for member in swarm.members.values():
        assert_equal_parameters(member.model, plain)
