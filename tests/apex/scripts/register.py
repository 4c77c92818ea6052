"""Functions registered by hand: at import, inside `__init__`, and through `apex.amp`."""

import argparse

import apex
import torch
import torch.nn as nn
from apex import amp
from apex.amp import amp as amp_module

amp.register_half_function(torch, "einsum")
amp.register_float_function(torch, "sigmoid")
apex.amp.register_float_function(torch.nn.functional, "embedding")
assert amp_module.register_half_function is amp.register_half_function

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
seen = {}


class RelativeAttention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        amp.register_promote_function(torch, "where")
        self.width, self.heads = width, heads
        self.embedding = nn.Embedding(10, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.out = nn.Linear(width, 1)

    def forward(self, ids):
        h = self.embedding(ids)
        q, k, v = (f(h).view(*ids.shape, self.heads, -1) for f in (self.query, self.key, self.value))
        score = torch.einsum("bind,bjnd->bnij", q + self.bias, k)
        seen["einsum"] = score.dtype
        mask = torch.ones(ids.shape[1], ids.shape[1], device=ids.device).triu(1).bool()
        score = torch.where(mask, torch.full_like(score, -1e4), score)
        context = torch.einsum("bnij,bjnd->bind", torch.softmax(score, -1), v)
        gate = torch.sigmoid(self.out(context.flatten(2)))
        seen["sigmoid"] = gate.dtype
        return gate.squeeze(-1)


torch.manual_seed(0)
model = RelativeAttention().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale="dynamic")
generator = torch.Generator().manual_seed(0)
for step in range(60):
    ids = torch.randint(10, (16, 5), generator=generator).to(device)
    prediction = model(ids)
    target = (ids % 2 == 0).float()
    loss = nn.functional.binary_cross_entropy(prediction.clamp(1e-3, 1 - 1e-3), target)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.5f}")
print("einsum ran in", seen["einsum"])
print("sigmoid ran in", seen["sigmoid"])
