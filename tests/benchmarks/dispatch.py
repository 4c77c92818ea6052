"""The cost of O4's casts per call, against torch.autocast and against wrappers in Python.

`make bench` writes build/bench/dispatch.json. Tensors are tiny, so a call is hardly more than its dispatch. The sides
of a case take turns in one process, in one thread, with gradients enabled. Times are CPU time: one thread waits for
nothing, and the wall clock counts other programs on the core. The 25th percentile over the rounds counts.
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from amp_engine import kernels
from amp_engine.casting import FunctionCasts
from tests.benchmarks.processes import Block, Contestant, ContestantError, interleaved
from tests.benchmarks.timing import Judged, judged, write

HALF = torch.bfloat16
BLOCK_SECONDS = 0.005  # about what a contestant runs at a time: some thousand calls
AUTOCAST = "torch.autocast"


@dataclass(frozen=True)
class Against:
    """A call whose time is compared with a peer's.

    Attributes:
        name: of the case.
        call: Python source, over the names that `operands` gives.
        limit: of ours / peer.
        peer: AUTOCAST, which runs the same source, or the source of a plain torch call that does the same work.
    """

    name: str
    call: str
    limit: float
    peer: str = AUTOCAST


@dataclass(frozen=True)
class Added:
    """A call whose added cost is compared with that of the wrappers in Python.

    Attributes:
        name, call: as above.
        bare: source of the torch call without casts; what a side takes beyond it is its added cost.
        limit: of ours / Python, None for a figure that is shown and not judged.
    """

    name: str
    call: str
    bare: str
    limit: float | None = 0.35


# x, y: activations of 4x8. _grad: needs a gradient, and is no leaf, since autocast keeps casts of leaves.
AGAINST = (
    Against("nothing to cast: linear", "F.linear(x_half, w_half, b_half)", 1.00),
    Against("nothing to cast: mm", "torch.mm(x_half, w_half)", 1.00),
    Against("nothing to cast: operator @", "x_half @ w_half", 1.00),
    Against("nothing to cast: conv2d", "F.conv2d(image_half, kernel_half)", 1.00),
    Against("weight cached: linear", "F.linear(x_half, w, b)", 1.00),
    Against("weight cached: operator @", "x_half @ w", 1.00),
    Against("weight cached: conv2d", "F.conv2d(image_half, kernel)", 1.00),
    Against("activation to cast: linear", "F.linear(x_float, w, b)", 1.06),
    Against("activation to cast: linear, with gradient", "F.linear(x_float_grad, w, b)", 1.06),
    Against("activation to cast: operator @", "x_float @ w", 1.06),
    Against("activation to cast: conv2d", "F.conv2d(image_float, kernel)", 1.06),
    Against("two activations to cast: mm", "torch.mm(x_float, y_float.t())", 1.06),
    Against("FP32 list: prod", "torch.prod(x_half)", 1.05),
    Against("FP32 list: prod, with gradient", "torch.prod(x_half_grad)", 1.05),
    Against("FP32 list: mse_loss", "F.mse_loss(x_half, y_half)", 1.05),
    Against("FP32 list: mse_loss, with gradient", "F.mse_loss(x_half_grad, y_half)", 1.05),
    Against("FP32 list: l1_loss", "F.l1_loss(x_half, y_half)", 1.05),
    Against("FP32 list: l1_loss, with gradient", "F.l1_loss(x_half_grad, y_half)", 1.05),
    Against("FP32 list: huber_loss", "F.huber_loss(x_half, y_half)", 1.05),
    Against("FP32 list: huber_loss, with gradient", "F.huber_loss(x_half_grad, y_half)", 1.05),
    Against("FP32 list: nll_loss", "F.nll_loss(x_half, labels)", 1.05),
    Against("FP32 list: nll_loss, with gradient", "F.nll_loss(x_half_grad, labels)", 1.05),
    # On CPU autocast does not list what follows: the peer is torch without autocast, with the casts written out.
    Against("FP32 list: softmax", "x_half.softmax(-1)", 1.05, "x_half.float().softmax(-1)"),
    Against("FP32 list: softmax, with gradient", "x_half_grad.softmax(-1)", 1.05, "x_half_grad.float().softmax(-1)"),
    Against("promote: cat", "torch.cat((x_half, y_float))", 1.05),
    Against("promote: cat, one type", "torch.cat((x_half, y_half))", 1.05),
    Against("promote: stack", "torch.stack((x_half, y_float))", 1.05),
    Against("promote: add", "torch.add(x_half, y_float)", 1.05, "torch.add(x_half, y_float)"),
    Against("promote: operator +", "x_half + y_float", 1.05, "x_half + y_float"),
    Against("promote: operator +, one type", "x_half + y_half", 1.05, "x_half + y_half"),
    Against("promote: add of a 0-dim tensor", "torch.add(x_half, scalar)", 1.25, "torch.add(x_half.float(), scalar)"),
    Against("promote: operator * of a 0-dim tensor", "x_half * scalar", 1.25, "x_half.float() * scalar"),
)  # fmt: skip

ADDED = (
    Added(
        "added cost, nothing to cast: linear", "F.linear(x_half, w_half, b_half)", "F.linear(x_half, w_half, b_half)"
    ),
    Added("added cost, weight cached: linear", "F.linear(x_half, w, b)", "F.linear(x_half, w_cast, b_cast)"),
    Added("added cost, float op: mse_loss", "F.mse_loss(x_half, y_half)", "F.mse_loss(x_half.float(), y_half.float())"),
    Added(
        "added cost, float op: mse_loss, its casts counted",
        "F.mse_loss(x_half, y_half)",
        "F.mse_loss(x_float, y_float)",
        None,
    ),
    Added("added cost, promote op: cat", "torch.cat((x_half, y_float))", "torch.cat((x_half, y_float))"),
    Added("added cost, promote op: add", "torch.add(x_half, y_float)", "torch.add(x_half, y_float)"),
)


def operands() -> dict[str, Any]:
    """The names that calls are made of."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "F": F, "scalar": torch.tensor(2.0), "labels": torch.arange(4)}
    for name, *shape in (("x", 4, 8), ("y", 4, 8), ("image", 1, 2, 6, 6)):
        data = torch.randn(shape)
        for suffix, dtype in (("float", torch.float32), ("half", HALF)):
            names[f"{name}_{suffix}"] = data.to(dtype)
            names[f"{name}_{suffix}_grad"] = data.to(dtype, copy=True).requires_grad_().clone()
    for name, *shape in (("w", 8, 8), ("b", 8), ("kernel", 2, 2, 3, 3)):
        names[name] = nn.Parameter(torch.randn(shape))
        names[f"{name}_half"] = names[name].detach().to(HALF)
        names[f"{name}_cast"] = names[name].to(HALF)
    return names


@contextmanager
def ours(call: str, native: bool = True) -> Iterator[Block]:
    """The call under O4's casts; where `native` is false, with the wrappers in Python."""
    casts = FunctionCasts(HALF, native=native)
    casts.install()
    try:
        yield _block(call)
    finally:
        casts.remove()


@contextmanager
def peer(call: str, autocast: bool) -> Iterator[Block]:
    """The call under autocast, all of it in one context so that weights stay cached, or in plain torch."""
    with torch.autocast("cpu", HALF) if autocast else nullcontext():
        yield _block(call)


def _block(call: str) -> Block:
    timer = timeit.Timer(call, timer=time.process_time, globals=operands())
    timer.timeit(50)  # convolutions compile
    calls = max(50, int(BLOCK_SECONDS / timer.timeit(50) * 50))

    def run() -> float:
        timer.timeit(calls // 10)  # the CPU's caches hold the last contestant's
        return timer.timeit(calls) / calls

    return run


def sides(case: Against) -> tuple[Contestant, Contestant]:
    """Ours and the peer."""
    autocast = case.peer == AUTOCAST
    return partial(ours, case.call), partial(peer, case.call if autocast else case.peer, autocast)


def measure(case: Against | Added, rounds: int) -> Judged:
    """Return one record."""
    if isinstance(case, Against):
        mine, theirs = interleaved(sides(case), rounds)
        return judged(case.name, mine, case.peer, theirs, case.limit)
    contestants = partial(ours, case.call), partial(ours, case.call, native=False), partial(peer, case.bare, False)
    mine, theirs, bare = interleaved(contestants, rounds)
    return judged(case.name, mine, f"Python wrappers, over {case.bare}", theirs, case.limit, base=bare)


def main() -> None:
    """Run the cases and write build/bench/dispatch.json."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.dispatch", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31, help="interleaved rounds; the 25th percentile counts")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--out", type=Path, default=Path("build/bench/dispatch.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not kernels.has_native(torch.device("cpu")):
        print("Note:  the wrappers here are the ones in Python, so ours and theirs are the same.")
    records, failures = [], []
    for case in (*AGAINST, *ADDED):
        if args.only in case.name:
            try:
                records.append(measure(case, args.rounds))
            except ContestantError as error:
                failures.append(f"{case.name}: {error}")
    write(records, args.out)
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
