"""Train a small GPT: gradient accumulation, clipping, checkpoints, and a resume that is exact.

A run that is stopped and resumed gives bit for bit the weights and the loss of the run that was
not, because the three dictionaries below hold the exact FP32 weights, the optimizer's FP32 state and
the loss scale, and because a step's data depends on the number of the step alone. (The model draws
no random numbers; one with dropout would save torch.get_rng_state() too.)

    python -m examples.train_gpt --steps 200 --checkpoint gpt.pt
    python -m examples.train_gpt --steps 200 --checkpoint gpt.pt --stop-after 100   # "the machine died"
    python -m examples.train_gpt --steps 200 --checkpoint gpt.pt --resume
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from amp_engine import amp
from examples.demo.data import load_topics
from examples.demo.models import GPT

parser = argparse.ArgumentParser(description="A GPT on the text of help('topics').")
parser.add_argument("--opt-level", default="O2", help="O0 to O5, default: %(default)s")
parser.add_argument("--steps", type=int, default=200, help="of the whole schedule")
parser.add_argument("--stop-after", type=int, help="stop early, as if interrupted")
parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
parser.add_argument("--batch-size", type=int, default=8, help="per backward pass")
parser.add_argument("--length", type=int, default=32, help="context, in characters")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--lr", type=float, default=6e-3)
parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
parser.add_argument("--checkpoint", type=Path, help="where to save, every --save-every steps")
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# ---------------------------------------------------------------------------------------------
# data, model, optimizer, schedule

topics = load_topics()
model = GPT(len(topics.vocabulary), options.length, options.layers, options.width, heads=4)
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), eps=1e-5)
model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / options.steps))
)

# ---------------------------------------------------------------------------------------------
# checkpoints: whole or absent, even if the program is killed while it writes one


def save(step: int) -> None:
    amp.save(options.checkpoint, model=model, optimizer=optimizer, scheduler=scheduler, step=step)


start = 0
if options.resume:
    start = amp.load(options.checkpoint, model=model, optimizer=optimizer, scheduler=scheduler)["step"]
    print(f"resumed at step {start}")

# ---------------------------------------------------------------------------------------------
# the loop

stop = min(options.steps, options.stop_after or options.steps)
for step in range(start, stop):
    optimizer.zero_grad()
    step_loss = 0.0
    for micro_step in range(options.accumulate):
        batch = step * options.accumulate + micro_step
        inputs, targets = topics.batch(batch, options.batch_size, options.length)
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss = loss / options.accumulate  # the sum of the gradients is then their mean
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        step_loss += loss.item()

    # After scale_loss the gradients of the master parameters are unscaled, so the norm is the
    # true one at every level and at every loss scale.
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), options.clip)
    optimizer.step()
    scheduler.step()

    done = step + 1
    if done % 20 == 0 or done == stop:
        print(f"step {done:4}  loss {step_loss:.6f}  gradient norm {norm.item():.3f}")
    if options.checkpoint and (done % options.save_every == 0 or done == stop):
        save(done)
