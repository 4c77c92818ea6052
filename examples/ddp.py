"""DistributedDataParallel on the ranks of torchrun, with gradient accumulation.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_engine import amp

ACCUMULATE = 2

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

torch.manual_seed(0)  # the same weights on every rank, before initialize
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

# After the optimizer: it imports modules of torch that would keep a reference to an existing group.
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")  # first initialize,
ddp = DistributedDataParallel(model)  # then wrap

torch.manual_seed(1 + rank)  # other data on each rank
for step in range(201):
    for i in range(ACCUMULATE):
        x = torch.rand(64, 1, device=device) * 6 - 3
        is_last = i + 1 == ACCUMULATE
        # Gradients that no_sync leaves for the next reduction must stay scaled, as the gradients are that join them.
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            loss = nn.functional.mse_loss(ddp(x), x.sin()) / ACCUMULATE
            with amp.scale_loss(loss, optimizer, delay_unscale=not is_last) as scaled_loss:
                scaled_loss.backward()
    amp.clip_grad_norm_(optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0 and rank == 0:
        print(f"step {step:3}  loss {loss.item() * ACCUMULATE:.5f}")

masters = torch.cat([p.detach().flatten() for p in amp.master_params(optimizer)])
others = [torch.empty_like(masters) for _ in range(dist.get_world_size())]
dist.all_gather(others, masters)
if rank == 0:
    equal = all(torch.equal(masters, other) for other in others)
    print(f"masters of {len(others)} ranks: {'equal' if equal else 'NOT equal'}")
del ddp  # it refers to the group, too: https://github.com/pytorch/pytorch/issues/56297
dist.destroy_process_group()
