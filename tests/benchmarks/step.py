"""The optimizer step on a CPU against what people leave apex for: `make bench` writes build/bench/step.json.

Ours is what a user calls: the exit of `scale_loss` (inf check, norm), `amp.clip_grad_norm_`, `optimizer.step()` with
the model's weights written back. The peer does the same work in FP32: autocast's casts of weights and gradients,
GradScaler's `unscale_`, torch's `clip_grad_norm_`, `AdamW(fused=True)`. The backward itself is left out of both:
gradients are handed over as it would.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

from amp_engine import Engine, kernels
from tests.benchmarks.timing import Record, Run, interleaved, median_ratio, micros, write

BYTES_PER_PARAM = 30.0  # docs/design/stepping.md: check 2; gradient 2, master, exp_avg, exp_avg_sq 24, weight 2
LEARNING_RATE = 1e-5


class Tensors(nn.Module):
    """Parameters of one size, without a forward."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(numel) * 0.02 for _ in range(count))


def ours(count: int, numel: int, dtype: torch.dtype, gradients: list[Tensor]) -> Run:
    """One O2 or O5 step from the end of the backward on."""
    model = Tensors(count, numel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine = Engine()
    engine.initialize(
        model, optimizer, opt_level="O2" if dtype == torch.float16 else "O5", verbosity=0, loss_scale="dynamic"
    )
    params = list(model.parameters())
    loss = torch.zeros(())

    def step() -> None:
        with engine.scale_loss(loss, optimizer):
            for p, g in zip(params, gradients, strict=True):
                p.grad = g
        engine.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peer(count: int, numel: int, dtype: torch.dtype, gradients: list[Tensor]) -> Run:
    """The same with GradScaler and AdamW(fused=True) on FP32 parameters."""
    model = Tensors(count, numel)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.zeros(()))  # makes its state

    def step() -> None:
        for p in params:
            p.detach().to(dtype)  # autocast's cast of a weight, once an iteration
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.to(torch.float32)  # and its backward
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def stream(count: int, numel: int) -> Run:
    """Reads and writes as many bytes as our step does, in place."""
    x = torch.zeros(int(count * numel * BYTES_PER_PARAM / 8))
    return lambda: x.mul_(1.0)


def kernels_alone(count: int, numel: int, dtype: torch.dtype, rounds: int) -> Record:
    """Compare both passes, without the Python around them, with the stream."""
    masters = [torch.randn(numel) * 0.02 for _ in range(count)]
    gradients = [torch.randn(numel).to(dtype) for _ in range(count)]
    moments = [[torch.zeros(numel) for _ in range(count)] for _ in range(2)]
    copies = [master.to(dtype) for master in masters]
    table = kernels.step_table("adam", masters, copies, *moments, [0] * count, torch.zeros(count))
    look = kernels.ListCheck()
    settings = [kernels.FORMULAS["adam"](lr=LEARNING_RATE, weight_decay=0.01, decoupled=True)]
    scale, found_inf, norm = torch.tensor(2.0**16), torch.zeros(()), torch.zeros(())
    scaled = [True] * count

    def both() -> None:
        look.run(gradients, None, scale, found_inf, norm)
        table.step(gradients, scaled, settings, inv_scale=1 / scale, found_inf=found_inf, norm=norm, max_norm=1.0)

    mine, plain = interleaved([both, stream(count, numel)], rounds)
    return Record(
        case=f"kernels alone, {str(dtype).removeprefix('torch.')}, {count} tensors of {numel}",
        ours_us=micros(mine),
        peer="a stream of as many bytes",
        peer_us=micros(plain),
        ratio=median_ratio(mine, plain),
        bytes_per_param=BYTES_PER_PARAM,
        bandwidth_fraction=1 / median_ratio(mine, plain),
    )


def compare(count: int, numel: int, dtype: torch.dtype, rounds: int) -> Record:
    """Return one record."""
    gradients = [torch.randn(numel).to(dtype) for _ in range(count)]
    runs = [f(count, numel, dtype, gradients) for f in (ours, peer)]
    mine, theirs, plain = interleaved([*runs, stream(count, numel)], rounds)
    return Record(
        case=f"AdamW step, {str(dtype).removeprefix('torch.')}, {count} tensors of {numel}",
        ours_us=micros(mine),
        peer="GradScaler + casts + clip + AdamW(fused)",
        peer_us=micros(theirs),
        ratio=median_ratio(mine, theirs),
        bytes_per_param=BYTES_PER_PARAM,
        bandwidth_fraction=statistics.median(s / m for s, m in zip(plain, mine, strict=True)),
    )


def main() -> None:
    """Run the cases and write build/bench/step.json."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds, of which the median counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench/step.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not kernels.has_native(torch.device("cpu")):
        print("Note:  the native kernels are not built (python -m amp_engine info), so this measures the fallback.")
    records = [
        compare(count, numel, dtype, args.rounds)
        for count, numel in ((200, 250_000), (10_000, 1_000))
        for dtype in (torch.float16, torch.bfloat16)
    ]
    if kernels.has_native(torch.device("cpu")):
        records += [kernels_alone(200, 250_000, dtype, args.rounds) for dtype in (torch.float16, torch.bfloat16)]
    write(records, args.out)


if __name__ == "__main__":
    main()
