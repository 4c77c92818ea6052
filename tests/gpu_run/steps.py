"""The optimizer step on a GPU against a copy's bandwidth and against what people leave apex for.

Ours is what a user calls: the exit of `scale_loss` (inf check, norm), `amp.clip_grad_norm_`, `optimizer.step()` with
the model's weights written back, `zero_grad()`. The peers do the same work with FP32 parameters: autocast's casts of
weights and gradients, GradScaler's `unscale_`, torch's `clip_grad_norm_`, the step. The backward itself is left out of
all of them: gradients are handed over as it would. Without clipping and casts a peer does less than we do. Bytes a
parameter are those that the work must move: docs/design/stepping.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import Engine, kernels
from amp_engine.kernels import Formula
from amp_engine.kernels.formulas import Adam, Lamb, Sgd
from amp_engine.optimizers import FusedLAMB, FusedSGD
from tests.gpu.stand_in import captured
from tests.gpu_run.program import Task, task
from tests.gpu_run.timing import Contestant, Race, Run
from tests.gpu_run.training import SEVEN_BYTES

LEARNING_RATE = 1e-5
CHECK, CHECK_FLOAT = 2.0, 4.0  # bytes a parameter
UNSCALE_HALF, UNSCALE_FLOAT = 4.0, 8.0
UPDATE = {"adam": 28.0, "sgd": 20.0, "lamb": 40.0}  # from half gradients, with momentum, half weights written back
NARROW = {  # Adam with bfloat16 gradients and weights
    "ours, split masters, bfloat16 moments": (18.0, {"master_weights": "split", "moment_dtype": torch.bfloat16}),
    "ours, masters of 24 bits, 8-bit moments": (12.1, SEVEN_BYTES),
}
UPDATE_FLOAT = 28.0  # Adam of FP32 gradients and parameters
AT_O2 = 8.0  # beside the update's: the check reads half gradients and writes FP32 ones, the update reads these
PEER = 60.0  # casts 6 + 6, unscale_ 8, clip 4 + 8, AdamW 28
STATES = {"adam": 2, "sgd": 1, "lamb": 2}
FORMULAS: dict[str, Callable[[], Formula]] = {
    "adam": lambda: Adam(lr=LEARNING_RATE, weight_decay=0.01, decoupled=True),
    "sgd": lambda: Sgd(lr=LEARNING_RATE, weight_decay=0.01, momentum=0.9),
    "lamb": lambda: Lamb(lr=LEARNING_RATE, weight_decay=0.01, decoupled=True, max_grad_norm=1.0),
}


@dataclass(frozen=True)
class Shape:
    """`count` tensors of `numel` elements."""

    count: int
    numel: int
    device: torch.device

    @property
    def total(self) -> int:
        """Elements."""
        return self.count * self.numel

    def __str__(self) -> str:
        millions = self.total / 1e6
        return f"{millions:,.0f}M in {self.count:,}" if millions >= 1 else f"{self.total:,} in {self.count:,}"

    def random(self, dtype: torch.dtype) -> list[Tensor]:
        """Random data: zeros are quicker to move and slower to take roots of."""
        return [self.zeros(dtype).normal_() for _ in range(self.count)]

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """One tensor."""
        return torch.zeros(self.numel, dtype=dtype, device=self.device)


class Tensors(nn.Module):
    """Parameters of one shape, without a forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weights = nn.ParameterList(w.mul_(0.02) for w in shape.random(torch.float32))


class Kernels:
    """The kernels of a step without the engine around them: FP32 masters, half parameters.

    Args:
        kind: a key of FORMULAS.
        dtype: of gradients and parameters; float32: no copy is written.
    """

    def __init__(self, shape: Shape, kind: str, dtype: torch.dtype) -> None:
        device = shape.device
        self.gradients = shape.random(dtype)
        weights = shape.random(torch.float32)
        none = [None] * shape.count
        states = [[shape.zeros(torch.float32) for _ in weights] for _ in range(STATES[kind])]
        copies = none if dtype == torch.float32 else [shape.zeros(dtype) for _ in weights]
        steps = torch.zeros(shape.count, device=device)
        state2 = states[1] if len(states) > 1 else none
        self._table = kernels.step_table(kind, weights, copies, states[0], state2, [0] * shape.count, steps)
        self._scaled, self._hyperparameters = [True] * shape.count, [FORMULAS[kind]()]
        self._scale, self._inv_scale = torch.full((), 2.0**16, device=device), torch.full((), 2.0**-16, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf, self._norm = torch.zeros((), device=device), torch.zeros((), device=device)
        self._listed = kernels.ListCheck()
        self._checks = self._listed.run(self.gradients, None, self._scale, self.found_inf, self._norm)
        self._unscaling, self._one = kernels.ListCheck(), torch.ones((), device=device)

    def check(self) -> None:
        """Pass 1."""
        self._checks = self._listed.run(self.gradients, None, self._scale, self.found_inf, self._norm)

    def unscale(self) -> None:
        """Pass 1 at O1: the gradients are unscaled in place, here by 1, again and again."""
        self._unscaling.run(self.gradients, self.gradients, self._one, self.found_inf, self._norm)

    def step(self) -> None:
        """Pass 2."""
        keywords = {"inv_scale": self._inv_scale, "found_inf": self.found_inf, "norm": self._norm}
        self._table.step(
            self.gradients, self._scaled, self._hyperparameters, **keywords, max_norm=1.0, checks=self._checks
        )

    def all(self) -> None:
        """Measure both passes and the scale between them."""
        self.check()
        kernels.update_scale_(
            self._scale,
            self._growth,
            self.found_inf,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=2000,
            min_scale=2.0**-24,
            max_scale=2.0**24,
        )
        self.step()


def replayed(run: Run, device: torch.device) -> Run:
    """`run` captured in a CUDA graph."""
    for _ in range(3):
        run()
    return captured(run, device)


def adamw(params: Iterator[nn.Parameter]) -> Optimizer:
    """Return the optimizer that is stepped unless a case says otherwise."""
    return torch.optim.AdamW(params, lr=LEARNING_RATE)


def ours(
    stack: ExitStack,
    shape: Shape,
    level: str,
    gradients: list[Tensor],
    /,
    optimizer_of: Callable[[Iterator[nn.Parameter]], Optimizer] = adamw,
    zeroed: bool = True,
    **options: Any,
) -> Run:
    """Return one step at `level` from the end of the backward on, until `stack` is closed.

    O1 unscales in place, the same gradients again and again: there the scale is 1. `options`: of `initialize`.
    """
    model = Tensors(shape)
    optimizer = optimizer_of(model.parameters())
    engine = stack.enter_context(Engine())
    options |= {"max_loss_scale": 1.0} if level == "O1" else {}
    engine.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    params = list(model.parameters())
    loss = torch.zeros((), device=shape.device)

    def step() -> None:
        with engine.scale_loss(loss, optimizer):
            for p, g in zip(params, gradients, strict=True):
                p.grad = g
        engine.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        if zeroed:
            optimizer.zero_grad()

    return step


def peer(
    shape: Shape,
    gradients: list[Tensor],
    *,
    sgd: bool = False,
    casts: bool = True,
    clip: bool = True,
) -> Run:
    """GradScaler, where float16 needs it, and torch's own optimizers on FP32 parameters."""
    params = list(Tensors(shape).parameters())
    optimizer: Optimizer
    if sgd:
        optimizer = torch.optim.SGD(params, lr=LEARNING_RATE, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)
    half = gradients[0].dtype
    scaler = torch.amp.GradScaler(shape.device.type, init_scale=1.0, enabled=half != torch.bfloat16)
    scaler.scale(torch.zeros((), device=shape.device))  # makes its state; 1, for gradients are used again and again
    floats = [] if casts else [g.to(torch.float32) for g in gradients]

    def step() -> None:
        if casts:
            for p in params:
                p.detach().to(half)  # autocast's cast of a weight, once an iteration
            for p, g in zip(params, gradients, strict=True):
                p.grad = g.to(torch.float32)  # and its backward
        else:
            for p, g in zip(params, floats, strict=True):
                p.grad = g
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def flash_adamw(params: list[nn.Parameter]) -> Optimizer:
    """FlashOptim's: masters of 24 bits, 8-bit moments."""
    from flashoptim import FlashAdamW

    return FlashAdamW(params, lr=LEARNING_RATE)


def fused_adam_with_remainders(params: list[nn.Parameter]) -> Optimizer:
    """TransformerEngine's: split masters, FP32 moments."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(params, lr=LEARNING_RATE, weight_decay=0.01, master_weights=True, store_param_remainders=True)


# With the package that they need, and the bytes of their step.
OTHERS = {
    "clip, FlashAdamW": ("flashoptim", flash_adamw, 12.1),
    "clip, TransformerEngine's FusedAdam with remainders": ("transformer_engine", fused_adam_with_remainders, 26.0),
}
CLIP = 6.0  # of half gradients


def other(shape: Shape, gradients: list[Tensor], optimizer_of: Callable[[list[nn.Parameter]], Optimizer]) -> Run:
    """Return torch's clipping and a step of half parameters that keeps what rounding takes from them."""
    params = [nn.Parameter(w.mul_(0.02)) for w in shape.random(gradients[0].dtype)]
    optimizer = optimizer_of(params)

    def step() -> None:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Cases:
    """Everything that is measured, most valuable first."""

    def __init__(self, task: Task) -> None:
        self._task, self._race = task, Race(task)
        # Four contestants of up to 24 bytes a parameter, and what they make meanwhile.
        free = task.cuda.mem_get_info()[0]
        self._largest = min(1_000_000_000, int(free / 120) // 1_000_000 * 1_000_000)
        said = f"{self._largest / 1e6:,.0f}M parameters, at 120 bytes each of {free / 1e9:,.0f} GB that are free"
        task.rows.add("the largest cases", said)

    def shape(self, count: int, total: int) -> Shape:
        """Parameters that fit the device."""
        total = min(total, self._largest)
        if self._task.tiny:
            count, total = min(count, 3), 3_000
        return Shape(count, max(1, total // count), self._task.device)

    def list(self) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """Names, seconds that they need, and functions."""
        billion = self._largest
        yield "AdamW, O5", 12, self.bfloat16
        yield "AdamW, O2", 10, lambda: self.adamw(self.shape(300, billion))
        yield "AdamW, O2, many tensors", 12, lambda: self.adamw(self.shape(10_000, 10_000_000))
        yield "AdamW, O2, 10M", 5, lambda: self.adamw(self.shape(300, 10_000_000))
        yield "kernels, bfloat16", 5, lambda: self.kernels("adam", torch.bfloat16)
        yield "kernels, LAMB", 5, lambda: self.kernels("lamb", torch.float16)
        yield "SGD, O2", 6, self.sgd
        yield "LAMB, O2", 5, self.lamb
        yield "AdamW, O1", 6, self.unscaled
        yield "kernels, float32", 5, lambda: self.kernels("adam", torch.float32)
        yield "kernels, SGD", 5, lambda: self.kernels("sgd", torch.float16)
        yield "AdamW, O2, 100M", 5, lambda: self.adamw(self.shape(300, 100_000_000))
        # Last: a capture that fails may leave the device unusable.
        yield "kernels as a graph", 5, self.kernels_as_a_graph
        yield "whole step as a graph", 5, self.step_as_a_graph

    def kernels(self, kind: str, dtype: torch.dtype) -> None:
        """Check, update, both, and the update that skips."""
        shape = self.shape(300, self._largest)
        bare = Kernels(shape, kind, dtype)
        half = dtype != torch.float32
        check = CHECK if half else CHECK_FLOAT
        update = UPDATE[kind] if half else UPDATE_FLOAT
        counted = (kind, dtype) == ("adam", torch.bfloat16)
        contestants = [
            Contestant("check", bare.check, check, counted=counted),
            Contestant("update", bare.step, update, counted=counted),
            Contestant("unscale in place", bare.unscale, UNSCALE_HALF if half else UNSCALE_FLOAT),
            Contestant("check, scale, update", bare.all, check + update, counted=counted),
        ]
        case = f"kernels, {kind}, {str(dtype).removeprefix('torch.')}, {shape}"
        self._race.run(case, shape.total, contestants, 1.5)
        bare.found_inf.fill_(1.0)
        self._race.run(f"{case}, overflow", shape.total, [Contestant("update, skipped", bare.step)], 0.5)

    def adamw(self, shape: Shape) -> None:
        """Ours at O2, with FP32 gradients and with half ones, against torch's."""
        gradients = shape.random(torch.float16)
        with ExitStack() as stack:
            half = ours(stack, shape, "O2", gradients, gradients="half")
            contestants = [
                Contestant("ours", ours(stack, shape, "O2", gradients), AT_O2 + UPDATE["adam"], counted=True),
                Contestant('ours, gradients="half"', half, CHECK + UPDATE["adam"], counted=True),
                Contestant(
                    "GradScaler, casts, clip, AdamW(fused)",
                    peer(shape, gradients),
                    PEER,
                    peer=True,
                    counted=shape.count <= 300,
                ),
                Contestant("GradScaler, AdamW(fused) alone", peer(shape, gradients, casts=False, clip=False)),
            ]
            self._race.run(f"AdamW, O2, {shape}", shape.total, contestants, 3.0)

    def bfloat16(self) -> None:
        """At O5, in less and less memory; the peers need no scaler."""
        shape = self.shape(300, self._largest)
        gradients = shape.random(torch.bfloat16)
        with ExitStack() as stack:
            step = ours(stack, shape, "O5", gradients)
            contestants = [Contestant("ours", step, CHECK + UPDATE["adam"], counted=True)]
            for what, (update, options) in NARROW.items():
                narrow = ours(stack, shape, "O5", gradients, **options)
                contestants.append(Contestant(what, narrow, CHECK + update, counted=True))
            theirs = peer(shape, gradients)
            contestants.append(Contestant("casts, clip, AdamW(fused)", theirs, PEER - 8.0, peer=True, counted=True))
            for what, (package, optimizer_of, update) in OTHERS.items():
                if not find_spec(package):
                    self._task.rows.add("not installed", package, without=what)
                    continue
                run = other(shape, gradients, optimizer_of)
                contestants.append(Contestant(what, run, CLIP + update, counted=True))
            self._race.run(f"AdamW, O5, {shape}", shape.total, contestants, 3.5)

    def sgd(self) -> None:
        """FusedSGD against torch's."""
        shape = self.shape(300, self._largest)
        gradients = shape.random(torch.float16)
        with ExitStack() as stack:
            step = ours(stack, shape, "O2", gradients, lambda params: FusedSGD(params, lr=LEARNING_RATE, momentum=0.9))
            contestants = [
                Contestant("ours: FusedSGD", step, AT_O2 + UPDATE["sgd"], counted=True),
                Contestant("GradScaler, casts, clip, SGD(fused)", peer(shape, gradients, sgd=True), peer=True),
            ]
            self._race.run(f"SGD, O2, {shape}", shape.total, contestants, 2.5)

    def lamb(self) -> None:
        """FusedLAMB has no peer in torch."""
        shape = self.shape(300, self._largest)
        gradients = shape.random(torch.float16)
        with ExitStack() as stack:
            step = ours(stack, shape, "O2", gradients, lambda params: FusedLAMB(params, lr=LEARNING_RATE))
            contestants = [Contestant("ours: FusedLAMB", step, AT_O2 + UPDATE["lamb"], counted=True)]
            self._race.run(f"LAMB, O2, {shape}", shape.total, contestants, 2.0)

    def unscaled(self) -> None:
        """O1: FP32 gradients, unscaled in place."""
        shape = self.shape(300, self._largest)
        gradients = shape.random(torch.float32)
        with ExitStack() as stack:
            contestants = [
                Contestant("ours", ours(stack, shape, "O1", gradients), UNSCALE_FLOAT + UPDATE_FLOAT, counted=True),
                Contestant(
                    "GradScaler, clip, AdamW(fused)", peer(shape, gradients, casts=False), peer=True, counted=True
                ),
            ]
            self._race.run(f"AdamW, O1, {shape}", shape.total, contestants, 2.5)

    def kernels_as_a_graph(self) -> None:
        """Measure both passes, captured."""
        shape = self.shape(300, self._largest)
        bare = Kernels(shape, "adam", torch.float16)
        self.graph(f"kernels, adam, float16, as a graph, {shape}", bare.all, shape, CHECK)

    def step_as_a_graph(self) -> None:
        """The whole engine step captured."""
        shape = self.shape(300, 100_000_000)
        gradients = shape.random(torch.float16)
        with ExitStack() as stack:
            step = ours(stack, shape, "O2", gradients, zeroed=False)
            self.graph(f"AdamW, O2, as a graph, {shape}", step, shape, AT_O2)

    def graph(self, case: str, run: Run, shape: Shape, check: float) -> None:
        """Measure what is captured, whose check moves so many bytes. A refusal is a result."""
        try:
            again = replayed(run, self._task.device)
        except Exception as error:
            self._task.rows.add(case, "capture refused", why=f"{type(error).__name__}: {error}"[:300])
            return
        self._race.run(case, shape.total, [Contestant("ours, replayed", again, check + UPDATE["adam"])], 1.0)


def main() -> None:
    """Measure as much as there is time for."""
    asked = task("tests.gpu_run.steps", __doc__)
    native = kernels.has_native(asked.device)
    print(f"compiled kernels for {asked.device.type}: {native}")
    if not native:
        asked.rows.add("compiled kernels", "none: what follows measures plain PyTorch")
    asked.run(Cases(asked).list())


if __name__ == "__main__":
    main()
