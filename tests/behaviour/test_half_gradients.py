"""`initialize(gradients="half")`: half gradients stay scaled until the step, which takes the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from amp_engine import AmpStateError, AmpValueError, amp
from amp_engine.optimizers import FusedLAMB
from tests.models import MLP, NORMED_MLP
from tests.support import assert_bitwise, backward, frozen, started

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
}


def trained(name: str, mode: str, **keywords: Any) -> tuple[Any, set[torch.dtype]]:
    model, optimizer = started("O2", OPTIMIZERS[name], **keywords)
    seen: set[torch.dtype] = set()
    for index in range(5):
        optimizer.zero_grad()
        for _ in range(2 if mode == "accumulated" else 1):
            overflow = mode == "overflow" and index == 2
            backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer, overflow=overflow)
        seen |= {p.grad.dtype for p in model.parameters() if p.dtype is torch.float16 and p.grad is not None}
        if mode == "clipped":
            amp.clip_grad_norm_(optimizer, 0.01)
        elif mode == "clipped twice":
            amp.clip_grad_norm_(optimizer, 0.01)
            amp.clip_grad_norm_(optimizer, 0.005)
        elif mode == "masters clipped":
            clip_grad_norm_(amp.master_params(optimizer), 0.01)
        optimizer.step()
    state = frozen(dict(model.state_dict()))
    amp.close()
    return state, seen


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["plain", "overflow", "accumulated", "clipped", "clipped twice", "masters clipped"])
def test_training_gives_the_same_bits_as_with_float32_gradients(name: str, mode: str) -> None:
    expected, wide = trained(name, mode)
    actual, half = trained(name, mode, gradients="half")
    assert_bitwise(actual, expected)
    assert wide == {torch.float32}
    assert half == ({torch.float32} if mode == "accumulated" else {torch.float16})


def test_a_write_of_a_scaled_gradient_is_an_error_and_a_zero_is_none() -> None:
    model, optimizer = started("O2", OPTIMIZERS["AdamW"], MLP, gradients="half")
    before = frozen(list(model.parameters()))
    backward(MLP.loss(model, MLP.batch(0)), optimizer)
    clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(AmpStateError, match='scaled with gradients="half".*amp.clip_grad_norm_'):
        optimizer.step()
    assert_bitwise(frozen(list(model.parameters())), before)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def test_no_step_leaves_a_scaled_one() -> None:
    model, optimizer = started("O2", lambda params: FusedLAMB(params, lr=1e-2), MLP, gradients="half")
    backward(MLP.loss(model, MLP.batch(0)), optimizer)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_another_word_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(AmpValueError, match="gradients='float16', but it is"):
        amp.initialize(model, opt_level="O2", gradients="float16", verbosity=0)  # type: ignore[arg-type]
