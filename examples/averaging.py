"""Average parameters at intervals, without an optimizer: python examples/averaging.py [ADDRESS OF ANY PEER ...]"""

import sys

import torch

import manyhands

model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

with manyhands.Peer(initial_peers=sys.argv[1:]) as peer:
    print("others join with: python examples/averaging.py", *peer.addresses, flush=True)
    with manyhands.Averager(model.parameters(), peer=peer, run_id="averaging") as averager:
        for _ in range(100):
            for _ in range(50):  # on this peer's own data
                inputs = torch.randn(32, 16)
                loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            result = averager.step(weight=50 * 32, timeout_s=10.0)
            what = f"averaged by {len(result.group)} peers" if result.committed else f"not averaged: {result.reason}"
            print(f"loss {loss.item():.4f}, {what}", flush=True)
        averager.wait_for_others()  # some may still need this peer for the last mean
