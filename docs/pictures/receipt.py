"""Draw the receipt of a small run at O5, without the sections that list options and what was not measured."""

import torch
import torch.nn.functional as F
from svg import terminal
from torch import nn

from amp_engine import amp

SHOWN = ("Verdict", "Optimizers", "Memory")

torch.manual_seed(0)
model = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
with amp.audit_updates(optimizer, every=2) as audit:
    for _ in range(20):
        x = torch.randn(8, 16, 64)
        F.mse_loss(model(x), x).backward()
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
title, *sections = str(amp.receipt(updates=audit)).split("\n\n")
shown = [section for section in sections if section.startswith(SHOWN)]
printed = "\n\n".join([">>> print(amp.receipt(updates=audit))", title, *shown, "..."])
terminal(__file__, "The receipt of a run begins with a verdict: skips, what steps, bytes a parameter, updates", printed)
