"""Draw the audit of 100 steps in pure bfloat16: the GPT of examples/half_weights.py, AdamW, a learning rate of 1e-4."""

import torch
import torch.nn.functional as F
from svg import FAINT, INK, ORANGE, SOFT, Picture

from amp_engine import amp
from examples.demo.data import load_topics
from examples.demo.models import GPT

torch.manual_seed(0)
topics = load_topics()
model = GPT(len(topics.vocabulary), 32, layers=2, width=64, heads=4).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
with amp.audit_updates(optimizer, every=10, models=model) as audit:
    for step in range(100):
        inputs, targets = topics.batch(step, 8, 32)
        F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
report = audit.measured()
shown = [one for one in report.tensors if not one.name.startswith("blocks.1")]  # like those of blocks.0
LEFT, TOP, ROW, BAR = 220, 98, 22, 460
ALT = f"The share of AdamW's steps that rounding to bfloat16 erased: of norm weights {report.tensors[0].erased:.0%}"
picture = Picture(LEFT + BAR + 190, TOP + ROW * len(shown) + 12, ALT)
picture.text(20, 34, report.summary[0].partition(": ")[2], 18, weight="bold")
picture.text(20, 56, "a GPT in pure bfloat16, 100 steps of AdamW, learning rate 1e-4; one of its two blocks", 13, SOFT)
picture.text(LEFT, 86, "share of AdamW's steps that is erased", 13, SOFT)
picture.text(LEFT + BAR + 160, 86, "never moved", 13, SOFT, "end")
for row, one in enumerate(shown):
    y = TOP + ROW * row
    picture.text(LEFT - 12, y + 12, one.name.partition(" = ")[0], 13, anchor="end")
    picture.box(LEFT, y, BAR, 15, FAINT)
    picture.box(LEFT, y, BAR * one.erased, 15, ORANGE if one.loses else SOFT)
    picture.text(LEFT + BAR + 58, y + 12, f"{one.erased:.0%}", 13, INK, "end")
    picture.text(LEFT + BAR + 160, y + 12, f"{one.never_moved:.0%}", 13, INK, "end")
picture.save(__file__)
