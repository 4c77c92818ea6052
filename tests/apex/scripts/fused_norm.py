"""A language model with the fused layer norm, or its own where apex is missing, and the fused Adam likewise."""

import argparse

import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_

try:
    from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm

    print("fused layer norm")
except ImportError:
    print("Better speed can be achieved with apex installed from https://www.github.com/nvidia/apex .")

    class BertLayerNorm(nn.LayerNorm):
        pass


try:
    from apex.normalization import FusedRMSNorm

    T5LayerNorm = FusedRMSNorm
except ImportError:
    T5LayerNorm = nn.RMSNorm

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", default="O1")
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
try:
    from apex.optimizers import FusedAdam

    adam = FusedAdam
except ImportError:
    adam = torch.optim.AdamW
if args.fp16:
    try:
        from apex import amp
    except ImportError as error:
        raise ImportError("Please install apex from https://www.github.com/nvidia/apex to use fp16.") from error


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.rms = BertLayerNorm(width, eps=1e-12), T5LayerNorm(width, eps=1e-6)
        self.dense, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.out(nn.functional.gelu(self.dense(self.rms(self.norm(x)))))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(12, 16), Block(), Block(), nn.Linear(16, 12)).to(device)
no_decay = ["bias", "norm.weight", "rms.weight"]
groups = [
    {"params": [p for n, p in model.named_parameters() if not n.endswith(tuple(no_decay))], "weight_decay": 0.01},
    {"params": [p for n, p in model.named_parameters() if n.endswith(tuple(no_decay))], "weight_decay": 0.0},
]
optimizer = adam(groups, lr=5e-3, eps=1e-6)
if args.fp16:
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
generator = torch.Generator().manual_seed(1)
for step in range(30):
    ids = torch.randint(12, (8, 6), generator=generator).to(device)
    loss = nn.functional.cross_entropy(model(ids).view(-1, 12), (5 * ids + 1).view(-1) % 12)
    if args.fp16:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        clip_grad_norm_(amp.master_params(optimizer), 1.0)
    else:
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()
    print(f"step {step} loss {loss.item():.5f}")
