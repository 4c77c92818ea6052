"""Masters get the values that a model loads with all of their bits, whoever has a hand in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import amp
from tests.support import assert_bitwise

KEPT: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2"},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.weight.t()


def initialized(run: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(Layer(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, verbosity=0, **KEPT[run])
    return model, optimizer


def checkpoint(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn(p.shape) for name, p in model.named_parameters()}


def renames(module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
    for name in module._parameters:
        state_dict[prefix + name] = state_dict.pop(prefix + name + "_old")


def doubles(module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
    for name in module._parameters:
        state_dict[prefix + name] = state_dict.pop(prefix + name + "_old") * 2 + 2.0**-20


@pytest.mark.parametrize("hook", [renames, doubles])
@pytest.mark.parametrize("run", KEPT)
def test_a_hook_that_comes_after_initialize_gives_them_exactly(run: str, hook: Any) -> None:
    model, _ = initialized(run)
    saved = checkpoint(model)
    for part in model.modules():
        if part._parameters:
            part.register_load_state_dict_pre_hook(hook)
    model.load_state_dict({f"{name}_old": value for name, value in saved.items()})
    expected = {name: value if hook is renames else value * 2 + 2.0**-20 for name, value in saved.items()}
    assert_bitwise(dict(model.state_dict()), expected)


@pytest.mark.parametrize("run", KEPT)
def test_a_hook_of_the_model_that_renames_keys_of_parts_gives_them_exactly(run: str) -> None:
    model, _ = initialized(run)
    saved = checkpoint(model)

    def hook(module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in list(state_dict):
            state_dict[name.removeprefix("module.")] = state_dict.pop(name)

    model.register_load_state_dict_pre_hook(hook)
    model.load_state_dict({f"module.{name}": value for name, value in saved.items()})
    assert_bitwise(dict(model.state_dict()), saved)


@pytest.mark.parametrize("run", KEPT)
def test_a_value_that_a_hook_takes_out_leaves_the_master(run: str) -> None:
    model, _ = initialized(run)
    saved, before = checkpoint(model), {name: value.clone() for name, value in model.state_dict().items()}

    def hook(module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        del state_dict[prefix + "weight"]

    model[0].register_load_state_dict_pre_hook(hook)
    model.load_state_dict(saved, strict=False)
    assert_bitwise(dict(model.state_dict()), {**saved, "0.weight": before["0.weight"]})


@pytest.mark.parametrize("run", [*KEPT, "O3"])
def test_what_is_written_into_a_state_dictionary_reaches_the_model_once_it_is_loaded(run: str) -> None:
    model = nn.Sequential(Layer(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)  # which keeps the masters alive
    amp.initialize(model, optimizer, verbosity=0, **KEPT.get(run, {"opt_level": "O3"}))
    saved, own = checkpoint(model), model.state_dict()
    before = {name: value.clone() for name, value in own.items()}
    for name, value in saved.items():
        own[name].copy_(value)
    assert_bitwise(dict(model.state_dict()), before)
    model.load_state_dict(own)
    dtype = torch.float16 if run == "O3" else torch.float32
    assert_bitwise(dict(model.state_dict()), {name: value.to(dtype).float() for name, value in saved.items()})
