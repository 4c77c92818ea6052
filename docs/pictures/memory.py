"""Draw the bytes a parameter of each choice with Adam, as `amp.receipt()` counts them after a step of a real model."""

import torch
from svg import BLUE, ORANGE, PURPLE, SOFT, TEAL, Picture
from torch import nn

from amp_engine import amp

CHOICES = (
    ("O0", "FP32", {}),
    ("O5", "bfloat16, FP32 masters", {}),
    ("O5", "split masters, bfloat16 moments", {"master_weights": "split", "moment_dtype": torch.bfloat16}),
    ("O5", "24-bit masters, 8-bit moments", {"master_weights": "24bit", "moment_dtype": "8bit"}),
    ("O5", "no masters: loses small updates", {"master_weights": False}),
)
COLORS = {"weights": TEAL, "masters": ORANGE, "gradients": BLUE, "moments": PURPLE}
NAMES = {"parameters": "weights", "gradients": "gradients", "optimizer state": "moments"}  # else masters
LEFT, TOP, ROW, BYTE, COUNT = 260, 70, 46, 30, 512 * 512
ALT = (
    "Bytes a parameter of weights, masters, gradients and moments: 16 in FP32, 16 at O5, 10 and 7 at O5 in less memory"
)
picture = Picture(LEFT + BYTE * 16 + 60, TOP + ROW * len(CHOICES), ALT)
picture.text(20, 36, "bytes a parameter, with Adam", 13, SOFT)
for place, (name, color) in enumerate(COLORS.items()):
    picture.box(LEFT + 125 * place, 24, 14, 14, color)
    picture.text(LEFT + 125 * place + 20, 36, name, 13, SOFT)
for row, (level, words, options) in enumerate(CHOICES):
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    model(torch.randn(2, 512)).mean().backward()
    optimizer.step()
    memory = {kind.kind: round(kind.bytes / COUNT) for kind in amp.receipt().memory}
    amp.close()
    x, y = LEFT, TOP + ROW * row
    picture.text(20, y + 11, level, 15, weight="bold")
    picture.text(20, y + 28, words, 13, SOFT)
    for kind, size in memory.items():
        picture.box(x, y, BYTE * size - 2, 28, COLORS[NAMES.get(kind, "masters")])
        picture.text(x + BYTE * size / 2 - 1, y + 19, str(size), 14, "white", "middle")
        x += BYTE * size
    picture.text(x + 8, y + 20, str(sum(memory.values())), 16, weight="bold")
picture.save(__file__)
