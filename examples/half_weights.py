"""Half weights lose updates that FP32 masters keep: one GPT, trained three times from the same bfloat16 weights.

    python -m examples.half_weights
    python -m examples.half_weights --plot half_weights.png    # the losses as curves; needs matplotlib

It trains in FP32 (O0), in bfloat16 with FP32 masters (O5), and in pure bfloat16. A step of Adam is about as long as the
learning rate; the numbers of bfloat16 near 1, where the weights of norms are, lie 0.004 apart, and a step shorter than
half of that is lost. The text is that of help('topics'), in Python's own installation.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from amp_engine import amp
from examples.demo.data import load_topics
from examples.demo.models import GPT

parser = argparse.ArgumentParser(description="One GPT from the same bfloat16 weights: FP32, O5, and pure bfloat16.")
parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
parser.add_argument("--lr", type=float, default=1e-4, help="of AdamW, default: %(default)s")
parser.add_argument("--width", type=int, default=64, help="of the model, which has two layers; default: %(default)s")
parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
parser.add_argument("--length", type=int, default=32, help="context, in characters; default: %(default)s")
parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses into a picture")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
topics = load_topics()
RUNS = {"FP32": "O0", "bfloat16, FP32 masters": "O5", "pure bfloat16": None}


def train(level: str | None) -> tuple[list[float], float, float]:
    """The losses; the shares of all weights and of norm weights that did not change."""
    torch.manual_seed(0)
    model = GPT(len(topics.vocabulary), options.length, layers=2, width=options.width, heads=4)
    model.to(device, torch.bfloat16)  # as from a checkpoint in bfloat16
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    model, optimizer = amp.initialize(model, optimizer, enabled=level is not None, opt_level=level or "O0", verbosity=0)
    before = {name: weight.detach().clone() for name, weight in amp.named_masters(model)}
    losses = []
    for step in range(options.steps):
        optimizer.zero_grad()
        inputs, targets = topics.batch(step, options.batch_size, options.length)
        logits = model(inputs.to(device)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    still = {name: weight.detach() == before[name] for name, weight in amp.named_masters(model)}
    norms = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    amp.close()
    everything, of_norms = [torch.cat([still[name].flatten() for name in names]) for names in (still, norms)]
    return torch.stack(losses).tolist(), everything.float().mean().item(), of_norms.float().mean().item()


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Plot means of 20 successive losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), dpi=150, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, mean of 20 steps")
    for (name, losses), style, width in zip(curves.items(), ("-", "--", "-"), (5, 2, 2), strict=True):
        means = torch.tensor(losses).unfold(0, 20, 1).mean(1).tolist()
        axes.plot(range(20, len(losses) + 1), means, style, linewidth=width, label=name)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


where = torch.cuda.get_device_name() if device == "cuda" else f"CPU with {torch.backends.cpu.get_cpu_capability()}"
print(
    f"GPT, 2 layers, width {options.width}; AdamW, lr {options.lr:g}, {options.steps} steps of "
    f"{options.batch_size} x {options.length} characters; {where}, torch {torch.__version__}"
)
print(f"{'weights':24}{'loss':>8}{'never moved':>14}{'of norms':>11}{'seconds':>10}")
curves = {}
for name, level in RUNS.items():
    start = time.perf_counter()
    curves[name], everything, of_norms = train(level)
    loss = sum(curves[name][-20:]) / len(curves[name][-20:])
    print(f"{name:24}{loss:8.3f}{everything:14.1%}{of_norms:11.1%}{time.perf_counter() - start:10.0f}", flush=True)
if options.plot is not None:
    plot(curves, options.plot)
