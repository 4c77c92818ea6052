"""FSDP2 (fully_shard) on the ranks of torchrun: half in forward and backward, FP32 shards as masters.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
"""

import argparse
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from amp_engine import amp

parser = argparse.ArgumentParser(description="FSDP2 on the ranks of torchrun.")
parser.add_argument("--opt-level", default="O2", help="O0, O1, O2, O4 or O5, default: %(default)s")
level = parser.parse_args().opt_level

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    """Features [B, 64] -> [B, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(self.norm(x)).tanh())


def start(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Shard first, with the policy of the level; then the optimizer; then initialize."""
    torch.manual_seed(seed)
    blocks = [Block(), Block()]
    model = nn.Sequential(nn.Linear(1, 64), *blocks, nn.Linear(64, 1)).to(device)
    for block in blocks:
        fully_shard(block, mp_policy=amp.fsdp_policy(level))
    fully_shard(model, mp_policy=amp.fsdp_policy(level, root=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=int(rank == 0))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step * ranks + rank)  # other data on each rank
        x = torch.rand(64, 1, generator=generator).to(device) * 6 - 3
        loss = nn.functional.mse_loss(model(x), x.sin())
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        amp.clip_grad_norm_(optimizer, max_norm=1.0)  # by the norm over all shards
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 and rank == 0:
            print(f"step {step:3}  loss {loss.item():.5f}")


def shards(model: nn.Module) -> list[DTensor]:
    return [p for p in model.parameters() if isinstance(p, DTensor)]


def whole(model: nn.Module) -> Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in shards(model)])


model, optimizer = start(seed=0)
train(model, optimizer, 0, 101)

# Saves a checkpoint in shards, which any number of ranks can read, and continues from it in another run.
folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder, 0)
weights, state = get_state_dict(model, optimizer)
state_dict_saver.save({"model": weights, "optimizer": state, "amp": amp.state_dict()}, checkpoint_id=folder[0])
train(model, optimizer, 101, 201)
expected = whole(model)

amp.close()
model, optimizer = start(seed=1)
weights, state = get_state_dict(model, optimizer)
saved: dict[str, Any] = {"model": weights, "optimizer": state, "amp": amp.state_dict()}
state_dict_loader.load(saved, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
amp.load_state_dict(saved["amp"])
train(model, optimizer, 101, 201)
resumed = whole(model)
if rank == 0:
    print(f"resumed: {'bitwise equal' if torch.equal(resumed, expected) else 'NOT equal'}")
    print(f"parameters of this rank: {sum(p.to_local().numel() for p in shards(model))} of {resumed.numel()}")
dist.destroy_process_group()
if not cuda:
    # Caches of DTensor keep the mesh, and so threads of Gloo that can abort Python at its end:
    # https://github.com/pytorch/pytorch/issues/56297
    sys.stdout.flush()
    os._exit(0)
