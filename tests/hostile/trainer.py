"""An honest trainer of a small model, which prints a line of facts after each global step.

python -m tests.hostile.trainer HOST INITIAL_PEER... [--client]
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

import torch

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.optim import ProgressConfig
from tests.smaller import make_smaller

RUN_ID = "besieged"
WIDTH = 64
BATCH_SIZE = 16
BATCH_S = 0.05
TARGET = int(os.environ.get("HOSTILE_TARGET", "480"))
"""Samples of a step, of which three trainers make 960 in a second; ``--target`` of ``make test-hostile``."""
LR = 0.01
CLIENT = "--client"
"""Dials out only."""
PROGRESS = ProgressConfig(min_refresh_s=0.1, max_refresh_s=1.0, ttl_s=10.0)
AVERAGING = AveragingConfig(matchmaking_time_s=5.0, averaging_timeout_s=10.0)


def new_model() -> torch.nn.Module:
    """The same for all."""
    torch.manual_seed(0)
    return torch.nn.Linear(WIDTH, WIDTH)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR)


def joined(peer: manyhands.Peer, model: torch.nn.Module) -> manyhands.Optimizer:
    """The optimizer of a member of the run."""
    return manyhands.Optimizer(
        adam(model), peer=peer, run_id=RUN_ID, target_batch_size=TARGET, batch_size_per_step=BATCH_SIZE,
        averaging=AVERAGING, progress=PROGRESS,
    )  # fmt: skip


def fingerprint() -> bytes:
    """Of the run's manifest."""
    with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as peer:
        return joined(peer, new_model()).manifest.fingerprint()


def loss_of(model: torch.nn.Module, generator: torch.Generator) -> torch.Tensor:
    """A regression: the model is to become the identity."""
    inputs = torch.randn(BATCH_SIZE, WIDTH, generator=generator)
    return torch.nn.functional.mse_loss(model(inputs), inputs)


def main(host: str, *arguments: str) -> None:
    initial_peers = [argument for argument in arguments if argument != CLIENT]
    listen = {"client_mode": True} if CLIENT in arguments else {"listen": [f"/ip4/{host}/tcp/0"]}
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(relativeCreated)d %(message)s")
    torch.set_num_threads(1)
    make_smaller(span_numel=1)  # all members reduce
    model = new_model()
    with manyhands.Peer(initial_peers=initial_peers, **listen) as peer:
        print("address", *peer.addresses, flush=True)
        optimizer = joined(peer, model)
        generator = torch.Generator().manual_seed(int(peer.peer_id.encode().hex(), 16) % 2**31)
        longest_s = 0.0
        while True:
            time.sleep(BATCH_S)
            step = optimizer.global_step
            loss = loss_of(model, generator)
            loss.backward()
            began = time.monotonic()
            optimizer.step()
            longest_s = max(longest_s, time.monotonic() - began)
            optimizer.zero_grad()
            counts = optimizer.statistics
            is_new = optimizer.global_step != step
            facts = {
                "at": time.monotonic(), "step": optimizer.global_step, "loss": loss.item(), "block_s": longest_s,
                "digest": optimizer.state_digest() if is_new else None, "computed": counts.samples_computed,
                "dropped": counts.samples_dropped, "alone": counts.steps_alone, "loaded": counts.states_loaded,
            }  # fmt: skip
            if is_new or longest_s > 1.0:
                print(json.dumps(facts), flush=True)
                longest_s = 0.0


if __name__ == "__main__":
    main(*sys.argv[1:])
