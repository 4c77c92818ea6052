"""Self-supervised training: LARC around SGD, a schedule on its inner optimizer, synchronized batch norm."""

import argparse
import math
import os

import apex
import torch
import torch.distributed as dist
import torch.nn as nn
from apex.parallel.LARC import LARC

parser = argparse.ArgumentParser()
parser.add_argument("--use_fp16", default="O1")
parser.add_argument("--sync_bn", default="apex", choices=["apex", "none"])
parser.add_argument("--syncbn_process_group_size", type=int, default=1)
parser.add_argument("--schedule", default="by_hand", choices=["by_hand", "scheduler"])
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

if "WORLD_SIZE" in os.environ:
    dist.init_process_group(backend="nccl" if device == "cuda" else "gloo", init_method="env://")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 6, bias=False)
)
if args.sync_bn == "apex":
    process_group = None
    if dist.is_initialized():
        process_group = apex.parallel.create_syncbn_process_group(args.syncbn_process_group_size)
    model = apex.parallel.convert_syncbn_model(model, process_group=process_group)
    assert isinstance(model[1], apex.parallel.SyncBatchNorm)
model = model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9, weight_decay=1e-6)
optimizer = LARC(optimizer=optimizer, trust_coefficient=0.05, clip=False)
assert apex.parallel.LARC is LARC
schedule = [0.3 * (1 + math.cos(math.pi * t / 60)) for t in range(60)]
model, optimizer = apex.amp.initialize(model, optimizer, opt_level=args.use_fp16)
if args.schedule == "scheduler":
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optim, 60)
patterns = torch.randn(6, 8)
model.train()
for it in range(60):
    if args.schedule == "by_hand":
        for param_group in optimizer.param_groups:
            param_group["lr"] = schedule[it]
    y = torch.randint(6, (24,))
    output = model((patterns[y] + 0.3 * torch.randn(24, 8)).to(device))
    loss = nn.functional.cross_entropy(output, y.to(device))
    optimizer.zero_grad()
    with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    for name, p in model.named_parameters():
        if name.startswith("4.") and it < 3:
            p.grad = None
    optimizer.step()
    if args.schedule == "scheduler":
        scheduler.step()
    print("Epoch: [0][{}] Loss {:.5f} Lr: {:.4f}".format(it, loss.item(), optimizer.optim.param_groups[0]["lr"]))
save_dict = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": apex.amp.state_dict()}
apex.amp.load_state_dict(save_dict["amp"])
if dist.is_initialized():
    dist.destroy_process_group()
