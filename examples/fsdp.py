"""One peer with a model in parts: torchrun --standalone --nproc-per-node 2 examples/fsdp.py [ADDRESS ...]"""

import os
import sys

import torch
from torch.distributed.fsdp import fully_shard

import manyhands

torch.distributed.init_process_group()
rank, device = int(os.environ["RANK"]), f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
mesh = torch.distributed.device_mesh.init_device_mesh(device.split(":")[0], (int(os.environ["WORLD_SIZE"]),))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
fully_shard(model, mesh=mesh)  # each rank has a part of each parameter; of a large model, split its layers first
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
peer = manyhands.Peer(initial_peers=sys.argv[1:]) if rank == 0 else None
if peer is not None:
    print("others join with: torchrun ... examples/fsdp.py", *peer.addresses, flush=True)
optimizer = manyhands.ProcessGroupOptimizer(inner, peer=peer, run_id="parts", target_batch_size=4096)
while (step := optimizer.global_step) < 1000:
    inputs = torch.randn(32, 16, device=device)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    loss.backward()
    optimizer.step(batch_size=len(inputs))
    optimizer.zero_grad()
    if optimizer.global_step > step and rank == 0:
        print(f"global step {step + 1}: {optimizer.num_peers} peers, loss {loss.item():.3f}", flush=True)
torch.distributed.destroy_process_group()  # the peer is closed when its process exits
