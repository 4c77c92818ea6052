"""Parts that join a model after `initialize`: what is saved and loaded of them is exact, however they joined."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from amp_engine import AmpStateError, amp
from tests.support import MASTER_LEVELS, MODULE_HOOKS, assert_bitwise, backward, frozen

HALF = {"O2": torch.float16, "O5": torch.bfloat16}


class Model(nn.Module):
    """A body, a list and a head; everything in it is applied in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8))])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        for part in (self.body, *self.parts, getattr(self, "head", nn.Identity())):
            x = part(x)
        return x


def by_attribute(model: Any, part: nn.Module) -> str:
    model.late = part
    return "late."


def appended(model: Any, part: nn.Module) -> str:
    model.parts.append(part)
    return "parts.1."


def inserted(model: Any, part: nn.Module) -> str:
    model.parts.insert(0, part)
    return "parts.0."


def replaced(model: Any, part: nn.Module) -> str:
    model.head = part
    return "head."


def deep_inside(model: Any, part: nn.Module) -> str:
    model.parts[0][0].add_module("late", nn.ModuleDict({"a": nn.Sequential(part)}))
    return "parts.0.0.late.a.0."


def behind_the_back(model: Any, part: nn.Module) -> str:
    model.body._modules["late"] = nn.Sequential(part)
    return "body.late.0."


def after_another_left(model: Any, part: nn.Module) -> str:
    del model.head
    model.tail = part
    return "tail."


def as_parameters(model: Any, part: nn.Module) -> str:
    model.register_parameter("weight", part.weight)
    model.register_parameter("bias", part.bias)
    return ""


WAYS: dict[str, Callable[[Any, nn.Module], str]] = {
    f.__name__: f
    for f in (
        by_attribute, appended, inserted, replaced, deep_inside, behind_the_back, after_another_left, as_parameters,
    )
}  # fmt: skip


def started(level: str, **keywords: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)
    return model, optimizer


def step(level: str, model: nn.Module, part: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.ones(2, 8)
    loss = model(x).float().square().mean() + part(x.to(HALF[level])).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def exact(model: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {name: w.detach().clone() for name, w in amp.named_masters(model) if name.startswith(prefix)}


@pytest.mark.parametrize("joins", ["before the group", "after the group", "in training"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["O2", "O5", "O5, split"])
def test_what_joined_is_saved_and_loaded_exactly(how: str, way: str, joins: str) -> None:
    level, keywords = how[:2], {"master_weights": "split"} if "split" in how else {}
    model, optimizer = started(level, **keywords)
    part = nn.Linear(8, 8).to(HALF[level])
    if joins == "before the group":
        prefix = WAYS[way](model, part)
    optimizer.add_param_group({"params": [*part.parameters()]})
    if joins == "after the group":
        prefix = WAYS[way](model, part)
    step(level, model, part, optimizer)
    if joins == "in training":
        prefix = WAYS[way](model, part)
        step(level, model, part, optimizer)
    masters = exact(model, prefix)
    saved = frozen(dict(model.state_dict()))
    assert not torch.equal(saved[prefix + "weight"], part.weight.float())
    assert_bitwise({name: saved[name] for name in masters}, masters)
    if way != "as_parameters":
        assert_bitwise(frozen(dict(part.state_dict()))["weight"], masters[prefix + "weight"])

    step(level, model, part, optimizer)
    assert not torch.equal(exact(model, prefix)[prefix + "weight"], masters[prefix + "weight"])
    model.load_state_dict(saved)
    assert_bitwise(exact(model, prefix), masters)
    with pytest.raises(AmpStateError, match="assign=True"):
        model.load_state_dict(saved, assign=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["O2"])
def test_close_leaves_no_hook_and_the_exact_values(level: str, way: str) -> None:
    before = len(torch_modules._global_module_registration_hooks)
    model, optimizer = started(level)
    part = nn.Linear(8, 8).to(HALF[level])
    prefix = WAYS[way](model, part)
    optimizer.add_param_group({"params": [*part.parameters()]})
    step(level, model, part, optimizer)
    masters = exact(model, prefix)
    model.state_dict()
    amp.close()
    assert_bitwise({n: p.detach() for n, p in model.named_parameters() if n.startswith(prefix)}, masters)
    assert not any(getattr(m, hooks) for m in model.modules() for hooks in MODULE_HOOKS)
    assert len(torch_modules._global_module_registration_hooks) == before
    model.later = nn.Linear(8, 8)
    assert not model.later._state_dict_hooks


def test_all_models_have_one_hook_which_stays_until_close() -> None:
    """Graphs that torch.compile made guard it, also where their model is gone."""
    before = dict(torch_modules._global_module_registration_hooks)
    model, optimizer = started("O2")
    during = dict(torch_modules._global_module_registration_hooks)
    assert len(during) == len(before) + 1
    started("O2")
    amp.initialize(model, opt_level="O2", verbosity=0)
    del model, optimizer
    gc.collect()
    assert torch_modules._global_module_registration_hooks == during
    amp.close()
    assert torch_modules._global_module_registration_hooks == before


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_fp32_part_that_joins_computes_and_trains_in_fp32(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    model[1] = nn.Linear(8, 3)
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    before = model[1].weight.detach().clone()
    backward(model(torch.randn(2, 4)).square().mean(), optimizer)
    optimizer.step()
    assert model[1].weight.dtype is torch.float32
    assert not torch.equal(model[1].weight, before)
