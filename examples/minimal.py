"""The four calls, on a problem that takes seconds: learn y = sin(x).  python examples/minimal.py."""

import torch
from torch import nn

from amp_engine import amp

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x = torch.linspace(-3, 3, 256, device=device).unsqueeze(1)
y = x.sin()

model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")

for step in range(301):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    amp.clip_grad_norm_(optimizer, max_norm=1.0)
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step:3}  loss {loss.item():.5f}")
