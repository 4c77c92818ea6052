"""Training steps at O1, O2, O4 and O5 on a CPU, in one thread, against what people leave apex for.

`make bench` writes build/bench/train.json. A step is zero_grad, forward, loss, backward and the optimizer's step. The
peer is torch.autocast with AdamW(fused=True), and GradScaler at float16; ours is plain AdamW, which the engine steps.
Each contestant is a process with equal weights and data. Times are CPU time of all its threads, which a neighbour on
the core does not lengthen. The 25th percentile over the rounds counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import Engine, kernels
from tests.benchmarks.processes import Block, ContestantError, race
from tests.benchmarks.timing import Judged, judged, write

LEARNING_RATE = 1e-4
WARMUP_STEPS = 3
HEADS = 4

Step = Callable[[], None]


class Layer(nn.Module):
    """Pre-norm attention and MLP: [N, T, width] -> [N, T, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@dataclass(frozen=True)
class Case:
    """A model, and what it is held to.

    Attributes:
        name, layers, width, length: of sequences; a batch has four.
        dtype: the low-precision type.
        limits: per level, of ours / peer.
        steps: in a block.
        compiled: with torch.compile(fullgraph=True).
    """

    name: str
    layers: int
    width: int
    length: int
    dtype: torch.dtype
    limits: dict[str, float]
    steps: int
    compiled: bool = False

    def peer(self) -> str:
        """The peer that ours is compared with."""
        scaler = " + GradScaler" if self.dtype is torch.float16 else ""
        return f"{'compiled ' * self.compiled}autocast{scaler} + AdamW(fused)"


BFLOAT16 = {"O4": 1.00, "O5": 0.85}
FLOAT16 = {"O1": 0.95, "O2": 0.80}
CASES = (
    Case("dispatch-bound, bfloat16", 4, 64, 16, torch.bfloat16, BFLOAT16, 5),
    Case("dispatch-bound, float16", 4, 64, 16, torch.float16, FLOAT16, 5),
    Case("compute-bound, bfloat16", 2, 512, 64, torch.bfloat16, BFLOAT16, 1),
    # Without AVX512-FP16 a float16 product of transposed matrices runs at 1 GFLOP/s: the size above would take minutes.
    Case("compute-bound, float16", 1, 256, 32, torch.float16, FLOAT16, 1),
    Case("compiled, float16", 2, 64, 16, torch.float16, {"O1": 1.00, "O2": 1.00}, 5, compiled=True),
)


def build(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, inputs and targets, the same for every contestant."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(case.width) for _ in range(case.layers)))
    inputs, targets = torch.randn(2, 4, case.length, case.width)
    return model, inputs, targets


@contextmanager
def ours(case: Case, level: str) -> Iterator[Step]:
    """A step at `level`, with the defaults of a user who changes nothing else."""
    model, inputs, targets = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        forward = torch.compile(model, fullgraph=True) if case.compiled else model

        def step() -> None:
            optimizer.zero_grad()
            loss = F.mse_loss(forward(inputs), targets)
            with engine.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

        yield checked(step, model)


@contextmanager
def peer(case: Case) -> Iterator[Step]:
    """The step of torch.amp."""
    model, inputs, targets = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=case.dtype is torch.float16)
    forward = torch.compile(model, fullgraph=True) if case.compiled else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", case.dtype):
            loss = F.mse_loss(forward(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    yield checked(step, model)


def checked(step: Step, model: nn.Module) -> Step:
    """`step` after its warm-up. Raises RuntimeError where it does not train: a skipped step would be a quick one."""
    for _ in range(WARMUP_STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        step()
    if all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)):
        raise RuntimeError(f"the step moves no weight after {WARMUP_STEPS - 1} others")
    return step


@contextmanager
def timed(contestant: Callable[[], AbstractContextManager[Step]], steps: int) -> Iterator[Block]:
    """A block of some steps that gives the seconds of one."""
    with contestant() as step:

        def block() -> float:
            start = time.process_time()
            for _ in range(steps):
                step()
            return (time.process_time() - start) / steps

        yield block


def compare(case: Case, rounds: int) -> list[Judged]:
    """A record per level."""
    contestants = [partial(peer, case), *(partial(ours, case, level) for level in case.limits)]
    theirs, *others = race([partial(timed, contestant, case.steps) for contestant in contestants], rounds, warmup=1)
    return [
        judged(f"{case.name}, {level}", mine, case.peer(), theirs, limit)
        for (level, limit), mine in zip(case.limits.items(), others, strict=True)
    ]


def main() -> None:
    """Run the cases and write build/bench/train.json."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.train", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds; the 25th percentile counts")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--out", type=Path, default=Path("build/bench/train.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a contestant has no children
    if not kernels.has_native(torch.device("cpu")):
        print("Note:  the native kernels are not built (python -m amp_engine info), so this measures the fallback.")
    records, failures = [], []
    for case in CASES:
        if args.only not in case.name:
            continue
        if case.compiled and not shutil.which(os.environ.get("CXX", "g++")):
            print(f"Note:  without a C++ compiler there is no {case.name!r}.")
            continue
        try:
            records += compare(case, args.rounds)
        except ContestantError as error:
            failures.append(f"{case.name}: {error}")
    write(records, args.out)
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
