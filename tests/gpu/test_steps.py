"""The steps on a GPU: to the bit those of the CPU, which tests/kernels holds against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.kernels import Formula, blocks
from amp_engine.kernels.formulas import Adagrad, Adam, Lamb, NovoGrad, Sgd
from tests.gpu.support import (
    FLOATS,
    GPU,
    HALVES,
    SIZES,
    assert_same_bits,
    memory,
    no_sync,
    on_gpu,
    randn,
)

pytestmark = pytest.mark.cuda

# eps: large enough that a gradient near 0 does not blow its rounding up.
MOMENTS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-2, "weight_decay": 0.1}
BASE = Adam(lr=0.01, **MOMENTS)
HYPERPARAMETERS: dict[str, list[Formula]] = {
    "adam": [BASE, replace(BASE, decoupled=True, maximize=True), replace(BASE, bias_correction=False)],
    "sgd": [
        Sgd(lr=0.01, weight_decay=0.1),
        Sgd(lr=0.01, weight_decay=0.1, momentum=0.9, nesterov=True),
        Sgd(lr=0.01, weight_decay=0.1, momentum=0.9, dampening=0.1, decay_after_momentum=True),
    ],
    "adagrad": [
        Adagrad(lr=0.01, eps=1e-2, weight_decay=0.1, lr_decay=0.1),
        Adagrad(lr=0.01, eps=1e-2, weight_decay=0.1, decoupled=True),
    ],
    "novograd": [
        NovoGrad(lr=0.01, **MOMENTS),
        NovoGrad(lr=0.01, **MOMENTS, decay_inside_moment=True, grad_averaging=False),
        NovoGrad(lr=0.01, **MOMENTS, infinity_norm=True, init_zero=True),
    ],
    "lamb": [
        Lamb(lr=0.01, **MOMENTS, max_grad_norm=1.0),
        Lamb(lr=0.01, **{**MOMENTS, "weight_decay": 0.0}, decoupled=True, use_nvlamb=True),
    ],
}
CASES = [pytest.param(kind, h, id=f"{kind}{i}") for kind, hs in HYPERPARAMETERS.items() for i, h in enumerate(hs)]
HAS_STATE2 = ("adam", "lamb")
INV_SCALE = 1 / 128


@dataclass
class Problem:
    """The lists of one optimizer. `gradients[k]` is the list of step k."""

    kind: str
    weights: list[Tensor]
    copies: list[Tensor | None]
    state1: list[Tensor | None]
    state2: list[Tensor | None]
    steps: Tensor
    norms: Tensor | None
    gradients: list[list[Tensor | None]]

    def on_gpu(self, device: torch.device = GPU) -> Problem:
        return Problem(**{name: on_gpu(value, device) for name, value in vars(self).items()})

    def outcome(self) -> list[object]:
        return [self.weights, self.copies, self.state1, self.state2, self.steps, self.norms]

    def table(self) -> kernels.StepTable:
        groups = [0] * len(self.weights)
        lists = self.weights, self.copies, self.state1, self.state2
        return kernels.step_table(self.kind, *lists, groups, self.steps, self.norms)

    def step(self, table: kernels.StepTable, k: int, h: Formula, **keywords: object) -> None:
        scaled = [True] * len(self.weights)
        table.step(self.gradients[k], scaled, [h], **keywords)


def problem(kind, sizes, n_steps=3, momentum=True):
    """Every type of gradient, weight and copy, aligned and not; one tensor has no gradient in the second step."""
    weights, copies, grads = [], [], [[] for _ in range(n_steps)]
    for i, numel in enumerate(n for n in sizes for _ in range(6)):
        weights.append(randn(numel, torch.float32 if i % 3 else FLOATS[i // 3 % 3], offset=i % 5 == 4))
        copies.append(None if i % 4 == 0 else memory(numel, HALVES[i % 2], weights[0].device, i % 3).zero_())
        for k, step in enumerate(grads):
            missing = k == 1 and i == 2
            step.append(None if missing else randn(numel, FLOATS[i % 3], i // 2 % 3).mul_(1 / INV_SCALE))
    n = len(weights)
    state1 = [torch.zeros(w.numel()) if momentum else None for w in weights]
    state2 = [torch.zeros(w.numel()) if kind in HAS_STATE2 else None for w in weights]
    norms = torch.zeros(n) if kind == "novograd" else None
    return Problem(kind, weights, copies, state1, state2, torch.zeros(n), norms, grads)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("kind", "h"), CASES)
def test_steps_are_the_same_on_the_cpu(kind, h, sizes):
    on_cpu = problem(kind, sizes, momentum=kind != "sgd" or h.momentum != 0)
    ours = on_cpu.on_gpu()
    table, inv_scale = ours.table(), torch.tensor(INV_SCALE, device=GPU)
    with no_sync():
        for k in range(len(ours.gradients)):
            ours.step(table, k, h, inv_scale=inv_scale)
    table = on_cpu.table()
    for k in range(len(on_cpu.gradients)):
        on_cpu.step(table, k, h, inv_scale=torch.tensor(INV_SCALE))
    assert_same_bits(ours.outcome(), on_cpu.outcome())


@pytest.mark.parametrize(("kind", "h"), CASES)
def test_small_clipped_steps_are_the_same_on_the_cpu(kind, h):
    on_cpu = problem(kind, (1, 4096, 40000), momentum=kind != "sgd" or h.momentum != 0)
    ours = on_cpu.on_gpu()
    for p, device in ((on_cpu, "cpu"), (ours, GPU)):
        table = p.table()
        scalars = {"inv_scale": INV_SCALE, "norm": 7.0, "found_inf": 0.0}
        on_device = {name: torch.tensor(x, device=device) for name, x in scalars.items()}
        for k in range(len(p.gradients)):
            p.step(table, k, replace(h, lr=torch.tensor(0.02, device=device)), max_norm=0.5, **on_device)
    assert_same_bits(ours.outcome(), on_cpu.outcome())


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_small_steps_of_seven_bytes_are_the_same_on_the_cpu(kind):
    on_cpu = problem(kind, (1, 31, 33, 4096, 40000))
    n = len(on_cpu.weights)
    on_cpu.weights = [randn(w.numel(), torch.bfloat16, i % 3) for i, w in enumerate(on_cpu.weights)]
    on_cpu.copies = [torch.zeros(w.numel(), dtype=kernels.REMAINDER24) for w in on_cpu.weights]
    in_blocks = [torch.zeros(blocks.size_in_blocks(w.numel()), dtype=kernels.CODES) for w in on_cpu.weights]
    on_cpu.state1 = in_blocks
    on_cpu.state2 = [m.clone() for m in in_blocks] if kind == "adam" else [None] * n
    ours = on_cpu.on_gpu()
    for p, device in ((on_cpu, "cpu"), (ours, GPU)):
        table, inv_scale = p.table(), torch.tensor(INV_SCALE, device=device)
        for k in range(len(p.gradients)):
            p.step(table, k, HYPERPARAMETERS[kind][-1], inv_scale=inv_scale)
    assert_same_bits(ours.outcome(), on_cpu.outcome())


@pytest.mark.parametrize(("kind", "h"), CASES)
def test_small_overflow_changes_nothing(kind, h):
    ours = problem(kind, (31, 40000), momentum=kind != "sgd" or h.momentum != 0).on_gpu()
    table = ours.table()
    ours.step(table, 0, h, inv_scale=torch.tensor(INV_SCALE, device=GPU))
    before = [on_gpu(value) for value in ours.outcome()]
    for found_inf in (1.0, 3.0):
        with no_sync():
            ours.step(
                table, 1, h, inv_scale=torch.ones((), device=GPU), found_inf=torch.full((), found_inf, device=GPU)
            )
        assert_same_bits(ours.outcome(), before)


def test_small_one_step_is_the_tables():
    """kernels.step_once and a table of one group give the same."""
    a, b = (problem("adam", (1, 4096)).on_gpu() for _ in range(2))
    for mine, theirs in zip(a.weights + a.gradients[0], b.weights + b.gradients[0], strict=True):
        theirs.copy_(mine)
    h = replace(BASE, decoupled=True)
    inv_scale = torch.tensor(INV_SCALE, device=GPU)
    a.step(a.table(), 0, h, inv_scale=inv_scale)
    lists = b.gradients[0], b.weights, b.state1, b.state2, b.steps, None, b.copies
    with no_sync():
        kernels.step_once(h, *lists, inv_scale=inv_scale)
    assert_same_bits(a.outcome(), b.outcome())


def test_small_sgd_is_torchs_to_the_bit():
    weights = [randn(n) for n in (1, 31, 4096, 40000)]
    ours, theirs = on_gpu(weights), [torch.nn.Parameter(w) for w in on_gpu(weights)]
    settings = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    optimizer = torch.optim.SGD(theirs, foreach=True, **settings)
    buffers, steps = [torch.zeros_like(w) for w in ours], torch.zeros(len(ours), device=GPU)
    for _ in range(3):
        gradients = on_gpu([randn(w.numel()) for w in weights])
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g.clone()
        optimizer.step()
        kernels.step_once(Sgd(**settings), gradients, ours, buffers, None, steps)
        assert_same_bits(ours, [p.detach() for p in theirs])


def test_channels_last_gradients_are_walked_in_memory_order():
    shape = (8, 3, 5, 7)
    weight = torch.randn(shape).to(memory_format=torch.channels_last)
    gradient = torch.randn(shape).to(memory_format=torch.channels_last)
    ours = weight.to(GPU, copy=True)
    kernels.step_once(Sgd(lr=0.5), [gradient.to(GPU)], [ours], None, None, torch.zeros(1, device=GPU))
    assert torch.equal(ours.cpu(), weight - 0.5 * gradient)
