"""One peer with several GPUs: torchrun --standalone --nproc-per-node 2 examples/several_gpus.py [ADDRESS ...]"""

import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import manyhands

torch.distributed.init_process_group()
rank, device = int(os.environ["RANK"]), f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
model = DistributedDataParallel(model)
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
peer = manyhands.Peer(initial_peers=sys.argv[1:]) if rank == 0 else None
if peer is not None:
    print("others join with: torchrun ... examples/several_gpus.py", *peer.addresses, flush=True)
optimizer = manyhands.ProcessGroupOptimizer(inner, peer=peer, run_id="gpus", target_batch_size=4096)
while (step := optimizer.global_step) < 1000:
    inputs = torch.randn(32, 16, device=device)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    loss.backward()
    optimizer.step(batch_size=len(inputs))
    optimizer.zero_grad()
    if optimizer.global_step > step and rank == 0:
        print(f"global step {step + 1}: {optimizer.num_peers} peers, loss {loss.item():.3f}", flush=True)
torch.distributed.destroy_process_group()  # the peer is closed when its process exits
