"""Every kernel over few elements, for the sanitizers: each formula and type, aligned and not, half a chunk too."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.kernels import Formula
from amp_engine.kernels.formulas import Adagrad, Adam, Lamb, NovoGrad, Sgd
from tests.gpu_run.program import task

SIZES = (0, 1, 31, 4096, 33_000)  # 33,000: two chunks
HALVES = (torch.float16, torch.bfloat16)
FORMULAS: dict[str, Formula] = {
    "adam": Adam(lr=0.01, weight_decay=0.1, decoupled=True),
    "sgd": Sgd(lr=0.01, weight_decay=0.1, momentum=0.9, nesterov=True),
    "adagrad": Adagrad(lr=0.01, eps=1e-2, weight_decay=0.1),
    "novograd": NovoGrad(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-2),
    "lamb": Lamb(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-2, weight_decay=0.1, max_grad_norm=1.0),
}


def values(numel: int, dtype: torch.dtype, device: torch.device, offset: int = 0) -> Tensor:
    """Written in full, `offset` elements behind an aligned address too."""
    return torch.ones(numel + offset, dtype=dtype, device=device)[offset:].mul_(0.5)


FORMS = ("", "adopting", "split")  # split: bfloat16 weights with remainders; moments of Adam and SGD are bfloat16, too


def step(kind: str, form: str, device: torch.device) -> None:
    """Take two steps of one formula over all sizes, types and alignments."""
    split = form == "split"
    mixed = list(product(SIZES, kernels.FLOATS, (0, 1)))
    gradients = [values(n, dtype, device, offset) for n, dtype, offset in mixed]
    weights = [values(n, torch.bfloat16 if split else torch.float32, device, offset) for n, _, offset in mixed]
    copies = [None if i % 3 == 0 else values(n, HALVES[i % 2], device, i % 2) for i, (n, _, _) in enumerate(mixed)]
    if split:
        rests = kernels.REMAINDERS
        copies = [torch.zeros(n, dtype=rests[i % 2], device=device) for i, (n, _, _) in enumerate(mixed)]
    state = torch.bfloat16 if split and kind in ("adam", "sgd") else torch.float32
    states = [[values(n, state, device) for n, _, _ in mixed] for _ in range(2)]
    steps = torch.zeros(len(mixed), device=device)
    state2 = states[1] if kind in ("adam", "lamb") else [None] * len(mixed)
    norms = torch.zeros(len(mixed), device=device) if kind == "novograd" else None
    adopts = form == "adopting"
    table = kernels.step_table(kind, weights, copies, states[0], state2, [0] * len(mixed), steps, norms, adopts)
    inv_scale, norm = torch.full((), 0.25, device=device), torch.full((), 3.0, device=device)
    for found_inf in (0.0, 0.0, 1.0):
        keywords = {"inv_scale": inv_scale, "norm": norm, "found_inf": torch.full((), found_inf, device=device)}
        table.step(gradients, [True] * len(mixed), [FORMULAS[kind]], **keywords, max_norm=1.0)
    if not all(bool(w.isfinite().all()) for w in weights):
        raise RuntimeError(f"{kind}: a weight is not finite")


def lists(device: torch.device) -> None:
    """Check, unscale, casts and the loss scale."""
    tensors = [values(n, dtype, device, offset) for n, dtype, offset in product(SIZES, kernels.FLOATS, (0, 1))]
    scale, found_inf, norm = (torch.full((), x, device=device) for x in (2.0, 0.0, 0.0))
    listed = kernels.ListCheck()
    for outputs in (None, tensors):
        listed.run(tensors, outputs, scale, found_inf, norm)
    copies = [torch.zeros_like(t, dtype=torch.bfloat16) for t in tensors]
    kernels.cast_copy_(copies, tensors)
    kernels.scale_(tensors, tensors, scale)
    growth = torch.zeros((), dtype=torch.int32, device=device)
    factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "min_scale": 1.0, "max_scale": 2.0**24}
    kernels.update_scale_(scale, growth, found_inf, growth_interval=1, **factors)
    if not norm.item() > 0 or found_inf.item() or scale.item() != 4.0:
        raise RuntimeError("the check or the scale is wrong")


def main() -> None:
    """Run them all."""
    device = task("tests.gpu_run.small", __doc__).device
    lists(device)
    print("lists", flush=True)
    for kind, form in product(FORMULAS, FORMS):
        step(kind, form, device)
        print(kind, form, flush=True)


if __name__ == "__main__":
    main()
