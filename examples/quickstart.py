"""A training loop shared by several peers: python examples/quickstart.py [ADDRESS OF ANY PEER ...]"""

import sys

import torch

import manyhands

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

with manyhands.Peer(initial_peers=sys.argv[1:]) as peer:
    print("others join with: python examples/quickstart.py", *peer.addresses, flush=True)
    optimizer = manyhands.Optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        peer=peer,
        run_id="quickstart",
        target_batch_size=4096,
        batch_size_per_step=32,
    )
    while (step := optimizer.global_step) < 1000:
        inputs = torch.randn(32, 16)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.global_step > step:
            print(f"global step {step + 1}: {optimizer.num_peers} peers, loss {loss.item():.3f}", flush=True)
