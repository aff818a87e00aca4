"""Evaluates the run of quickstart.py without taking part in it: python examples/evaluate.py ADDRESS OF ANY PEER"""

import sys
import time

import torch

import manyhands

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
inputs = torch.randn(1024, 16)

with manyhands.Peer(initial_peers=sys.argv[1:], client_mode=True) as peer, torch.no_grad():
    while True:
        try:
            loaded = manyhands.load_state_from_peers(peer, "quickstart", into=model)
        except manyhands.Unavailable as error:  # the trainers have just started, or are all away
            print(error, flush=True)
        else:
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
            print(f"global step {loaded.global_step}: held-out loss {loss.item():.3f}", flush=True)
        time.sleep(10)
