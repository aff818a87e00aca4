"""An evaluator is not held up by a record that nobody can prove."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import msgspec
import pytest

from manyhands import Peer
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PROGRESS_KIND, PeerRecord, peer_key
from manyhands.optim.optimizer import Optimizer
from manyhands.recipes.albert.adoption import RunRecipe, adopted
from manyhands.recipes.albert.compute import Compute
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.tokenizer import tokenizer_digest, train_tokenizer
from manyhands.recipes.albert.model import build_model
from manyhands.recipes.albert.optimizer import join_run
from manyhands.recipes.albert.packages import torch, transformers
from manyhands.recipes.albert.settings import TuningSettings
from manyhands.recipes.albert.state_follower import StateFollower
from manyhands.recipes.albert.tokenizer_exchange import serve_tokenizer

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TINY = AlbertRecipe(
    vocab_size=512, seq_length=16, embedding_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=16,
)  # fmt: skip


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    rng = random.Random(0)
    words = [" ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(8)) for _ in range(50)]
    return train_tokenizer([words], 512)


@pytest.mark.timeout(55)  # and not once the false record, of 60 s, has expired
def test_a_position_that_nobody_has_the_state_of_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tokenizer, recipe = tiny_tokenizer(), TINY
    run = RunRecipe(recipe=recipe, tokenizer=tokenizer_digest(tokenizer), vocab_size=len(tokenizer))
    with (
        Peer(listen=[LOOPBACK]) as trainer,
        Peer(trainer.addresses, listen=[LOOPBACK]) as liar,
        Peer(trainer.addresses, listen=[LOOPBACK]) as here,
    ):
        trainer.run(serve_tokenizer(trainer.endpoint, tokenizer), 5.0, "handing out the tokenizer")
        optimizer = join_run(build_model(recipe, run.vocab_size), run, trainer, "run", TuningSettings())
        ahead = PeerRecord(
            Position(10**6, b"x"), False, liar.addresses, 60.0, samples=8, samples_per_second=2.5, lineage_samples=64
        )
        plain = msgspec.to_builtins(ahead, builtin_types=(bytes,))
        liar.store(peer_key("run", PROGRESS_KIND), plain, ttl_s=60, subkey=liar.peer_id)
        follower = StateFollower(here, "run", run, Compute("cpu", "float32"))
        assert follower.next_state(every=1) == 0
        assert all(str(liar.peer_id) in message for message in caplog.messages), "the false one was tried first"
        assert caplog.messages
        optimizer.close()


def test_a_follower_of_local_steps_holds_the_agreed_parameters_and_statistics() -> None:
    tokenizer, recipe = tiny_tokenizer(), replace(TINY, local_steps=True, target_batch_size=8)
    run = RunRecipe(recipe=recipe, tokenizer=tokenizer_digest(tokenizer), vocab_size=len(tokenizer))
    with Peer(listen=[LOOPBACK]) as trainer, Peer(trainer.addresses, listen=[LOOPBACK]) as here:
        trainer.run(serve_tokenizer(trainer.endpoint, tokenizer), 5.0, "handing out the tokenizer")
        model = build_model(recipe, run.vocab_size)
        optimizer = join_run(model, run, trainer, "run", TuningSettings(), batch_size_per_step=2)
        adopted_run = adopted("run", optimizer.manifest.extra, {})
        follower = StateFollower(here, "run", adopted_run, Compute("cpu", "float32"))
        assert adopted_run.recipe.local_steps
        assert follower.manifest.fingerprint() == optimizer.manifest.fingerprint()
        for step in (2, 4):
            while optimizer.global_step < step:
                inner_steps(model, optimizer, 1)
            inner_steps(model, optimizer, 2)  # between two averages
            assert follower.next_state(every=1) == step
            own = {name: value.clone() for name, value in model.state_dict().items()}
            with optimizer.agreed_parameters():
                agreed, state = model.state_dict(), optimizer.state_dict()
                for name, value in follower.model.state_dict().items():
                    assert torch.equal(value, agreed[name]), name
                    assert not name.endswith("weight") or not torch.equal(value, own[name]), name
            kept = follower.state_dict()
            assert kept["manyhands"].keys() == state["manyhands"].keys()
            for part, (ours, theirs) in {
                "outer": (kept["manyhands"]["outer"]["state"], state["manyhands"]["outer"]["state"]),
                "inner": (kept["state"], state["state"]),
            }.items():
                assert ours.keys() == theirs.keys()
                assert ours or part == "outer", "plain averaging has no statistics"
                for number, statistics in theirs.items():
                    for name, value in statistics.items():
                        assert torch.equal(torch.as_tensor(ours[number][name]), torch.as_tensor(value)), part
        optimizer.close()


def inner_steps(model: torch.nn.Module, optimizer: Optimizer, number: int) -> None:
    for _ in range(number):
        optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
