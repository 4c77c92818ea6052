"""Fine-tune a model that arrives in bfloat16, and save it in bfloat16: O5 steps FP32 masters of its weights meanwhile.

    python -m examples.finetune_half --save tuned.pt                      # makes a model to begin with, in base.pt
    python -m examples.finetune_half --checkpoint base.pt --save tuned.pt

Each file has `model.state_dict()` in bfloat16, as `from_pretrained` would load it. To stop and resume bit for bit, save
FP32 with amp.save, as examples/train_gpt.py does.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from amp_engine import amp
from examples.demo.data import load_topics
from examples.demo.models import GPT

parser = argparse.ArgumentParser(description="Fine-tune a GPT in bfloat16 with FP32 masters.")
parser.add_argument("--checkpoint", type=Path, help="weights to begin with; default: made first, in base.pt")
parser.add_argument("--save", type=Path, default=Path("tuned.pt"), help="default: %(default)s")
parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
parser.add_argument("--lr", type=float, default=1e-4, help="default: %(default)s")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
topics = load_topics()


def gpt() -> GPT:
    return GPT(len(topics.vocabulary), length=32, layers=2, width=32, heads=4).to(device)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    inputs, targets = topics.batch(step, batch_size=8, length=32)
    return F.cross_entropy(model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())


if options.checkpoint is None:
    options.checkpoint = options.save.with_name("base.pt")
    base = gpt()
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss_of(base, step).backward()
        optimizer.step()
    torch.save(base.bfloat16().state_dict(), options.checkpoint)

# ---------------------------------------------------------------------------------------------
# the model is loaded in bfloat16: cast nothing before `initialize`, and make the optimizer as usual

model = gpt().bfloat16()
model.load_state_dict(torch.load(options.checkpoint))
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
model, optimizer = amp.initialize(model, optimizer, opt_level="O5")

losses = []
for step in range(options.steps):
    optimizer.zero_grad()
    loss = loss_of(model, step + 10_000)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    amp.clip_grad_norm_(optimizer, max_norm=1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 19:
        print(f"step {step + 1:4}  mean loss of 20 steps {sum(losses[-20:]) / 20:.4f}")

# ---------------------------------------------------------------------------------------------
# the saved file is bfloat16 again: the masters, rounded once

exported = amp.export_state_dict(model, dtype=torch.bfloat16)
torch.save(exported, options.save)
before = torch.load(options.checkpoint)
moved = sum((exported[name] != before[name]).sum().item() for name in exported)
total = sum(tensor.numel() for tensor in exported.values())
dtypes = ", ".join({str(tensor.dtype).removeprefix("torch.") for tensor in exported.values()})
print(f"{options.save}: {dtypes}; {moved / total:.0%} of the weights moved")
