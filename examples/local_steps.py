"""Peers that train alone and average now and then: python examples/local_steps.py [ADDRESS OF ANY PEER ...]"""

import sys

import torch

import manyhands

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

with manyhands.Peer(initial_peers=sys.argv[1:]) as peer:
    print("others join with: python examples/local_steps.py", *peer.addresses, flush=True)
    optimizer = manyhands.Optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        peer=peer,
        run_id="local-steps",
        target_batch_size=8192,  # two peers with batches of 32 make 128 steps each from one average to the next
        batch_size_per_step=32,
        local_steps=manyhands.LocalSteps(),
    )
    while (step := optimizer.global_step) < 1000:
        inputs = torch.randn(32, 16)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.global_step > step:
            print(f"average {step + 1}: {optimizer.num_peers} peers, loss {loss.item():.3f}", flush=True)
