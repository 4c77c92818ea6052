"""Orders in memory, types and gaps of weights and state that torch's own optimizers step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import amp, kernels
from amp_engine.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from tests.support import entries_of, frozen, weights_of

# Gradients are put there by hand.
pytestmark = pytest.mark.filterwarnings("ignore:.*nothing scaled the loss:amp_engine.errors.AmpGradientWarning")

LEVELS = ("O1", "O2", "O5")
MAKES: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "FusedAdam": lambda p: FusedAdam(p, lr=1e-2),
    "FusedSGD": lambda p: FusedSGD(p, lr=1e-2, momentum=0.9),
    "FusedLAMB": lambda p: FusedLAMB(p, lr=1e-2),
    "FusedNovoGrad": lambda p: FusedNovoGrad(p, lr=1e-2),
    "FusedAdagrad": lambda p: FusedAdagrad(p, lr=1e-2),
    "FusedMixedPrecisionLamb": lambda p: FusedMixedPrecisionLamb(p, lr=1e-2),
}
TORCHS = ("AdamW", "SGD")


def network() -> nn.Module:
    """[N, 3, 4, 4] -> [N, 2]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))


def beside(optimizer: Optimizer, make: Callable[[Any], Optimizer]) -> Optimizer:
    """A bare optimizer of copies of what `optimizer` steps, in plain order, with its state."""
    bare = make([nn.Parameter(p.detach().clone().contiguous()) for p in weights_of(optimizer)])
    if optimizer.state:
        bare.load_state_dict(frozen_state(optimizer))
    return bare


def frozen_state(optimizer: Optimizer) -> dict[str, Any]:
    saved = optimizer.state_dict()
    return {**saved, "state": {i: {k: frozen(v) for k, v in s.items()} for i, s in saved["state"].items()}}


def relaid(value: Tensor, how: str) -> Tensor:
    if how == "transposed":
        return value.t().contiguous().t() if value.ndim == 2 else value.clone(memory_format=torch.contiguous_format)
    if how == "gaps":
        return torch.stack([value, value], -1)[..., 0]
    if how == "expanded":
        return value.flatten()[:1].mul(0).add(0.01).reshape([1] * value.ndim).expand_as(value)
    return value.to(getattr(torch, how))


@pytest.mark.parametrize("how", ["transposed", "gaps", "expanded", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "level"),
    [(name, level) for name in MAKES for level in ("alone", *LEVELS) if level != "alone" or name not in TORCHS],
)
def test_state_in_another_order_or_type_is_gone_on_with(name: str, level: str, how: str) -> None:
    fails = how == "expanded" or (name != "SGD" and how in ("float64", "float16", "bfloat16"))
    if fails and name in TORCHS and not kernels.has_native(torch.device("cpu")):
        pytest.skip("torch's own step fails on these")
    model = network()
    optimizer = MAKES[name](model.parameters())
    if level != "alone":
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step(index: int) -> None:
        for i, p in enumerate(weights_of(optimizer)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * index + i))
        optimizer.step()

    step(0)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1:
                state[key] = relaid(value, how)
    bare = beside(optimizer, MAKES[name])
    for i, (ours, theirs) in enumerate(zip(entries_of(optimizer), weights_of(bare), strict=True)):
        theirs.grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(10 + i))
        for key, value in bare.state[theirs].items():
            dtype = optimizer.state[ours][key].dtype if name == "SGD" else value.dtype  # which torch's keeps
            bare.state[theirs][key] = value.to(dtype).contiguous()
    step(1)
    with amp.disable_casts() if level != "alone" else nullcontext():
        bare.step()
    for ours, theirs in zip(weights_of(optimizer), weights_of(bare), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
