"""A gradient that was zeroed in place is one of 0: momentum and weight decay go on, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import amp
from amp_engine.optimizers import FusedSGD
from tests.support import MASTER_LEVELS


class Parts(nn.Module):
    """A loss reaches some of the parts; `never` is reached by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, names: str) -> Tensor:
        return torch.stack([getattr(self, name)(x) for name in names]).sum(0)

    def loss(self, names: str, index: int) -> Tensor:
        batch = torch.randint(-4, 5, (4, 8), generator=torch.Generator().manual_seed(index)) / 4
        return self(batch, names).float().square().mean()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-4, momentum=0.9, weight_decay=0.1),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
}

ZEROED: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "discarded": lambda model, optimizer: optimizer.zero_grad(),
}

# Each word is an iteration, each letter a part that its loss reaches; backwards before a step are joined by +, an
# overflow is marked by !, and - is a step without a backward.
PLANS = ["ab b b a b ab", "b ab - b", "ab a+b b+b b", "ab b! b a! b"]


def run(
    level: str | None,
    make: Callable[[Any], Optimizer],
    plan: str,
    zero: Callable[[nn.Module, Optimizer], Any],
    where: str,
) -> list[Tensor]:
    """The weights afterwards: FP32 masters where there are some. Without a level the plain loop of torch."""
    model = Parts()
    optimizer = make(model.parameters())
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
        amp._amp_state.loss_scalers[0].scale.fill_(256.0)
    for index, word in enumerate(plan.split()):
        if where == "before":
            zero(model, optimizer)
        for names in word.split("+") if word != "-" else ():
            loss = model.loss(names.removesuffix("!"), index)
            if level is None:
                zero(model, optimizer) if where == "body" else None
                loss.backward()
                continue
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                zero(model, optimizer) if where == "body" else None
                (scaled_loss * float("inf") if "!" in names else scaled_loss).backward()
        if level is not None or "!" not in word:
            optimizer.step()
        if where == "after":
            zero(model, optimizer)
    found = amp.master_params(optimizer) if level is not None else model.parameters()
    found = [p.detach().float() for p in found]
    if level is not None:
        amp.close()
    return found


def assert_close(actual: list[Tensor], truth: list[Tensor], level: str) -> None:
    tolerance = {"O4": 0.02, "O5": 0.02}.get(level, 2e-3)
    for a, t in zip(actual, truth, strict=True):
        assert (a - t).norm() <= tolerance * t.norm()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("plan", "where"),
    [(plan, where) for plan in PLANS for where in ("before", "after")] + [(PLANS[0], "body"), (PLANS[3], "body")],
)
def test_unused_parameters_are_stepped_as_torch_does(plan: str, where: str, name: str, level: str) -> None:
    for zero in ZEROED.values() if level in MASTER_LEVELS else (ZEROED["optimizer"],):
        truth = run(None, OPTIMIZERS[name], plan, zero, where)
        assert_close(run(level, OPTIMIZERS[name], plan, zero, where), truth, level)
