"""Weights that are swapped through `.data`, as averages are: what is saved meanwhile, and how training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import amp
from tests.models import NORMED_MLP
from tests.support import assert_bitwise, frozen, masters, optimizer_values, started, train

HOW = {"O2": ("O2", {}), "O5": ("O5", {}), "O5, split": ("O5", {"master_weights": "split"})}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "foreach sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}


class Average:
    """An average like diffusers' EMAModel, of `model.parameters()`."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [p.detach().float() * 1.25 + 0.001 for p in model.parameters()]
        self.stored: list[Tensor] = []

    def store(self, model: nn.Module) -> None:
        self.stored = [p.detach().clone() for p in model.parameters()]

    def copy_to(self, model: nn.Module) -> None:
        for p, value in zip(model.parameters(), self.shadow, strict=True):
            p.data.copy_(value.to(p.dtype).data)

    def restore(self, model: nn.Module) -> None:
        for p, value in zip(model.parameters(), self.stored, strict=True):
            p.data.copy_(value.data)


class Swap(Average):
    """The same by new memory: `p.data = value`."""

    def store(self, model: nn.Module) -> None:
        self.stored = [p.data for p in model.parameters()]

    def copy_to(self, model: nn.Module) -> None:
        for p, value in zip(model.parameters(), self.shadow, strict=True):
            p.data = value.to(p.dtype)

    def restore(self, model: nn.Module) -> None:
        for p, value in zip(model.parameters(), self.stored, strict=True):
            p.data = value


class Copied(Swap):
    """The same, and goes back to a copy."""

    def store(self, model: nn.Module) -> None:
        self.stored = [p.detach().clone() for p in model.parameters()]


def in_half(model: nn.Module) -> dict[str, Tensor]:
    return frozen({name: p.detach().float() for name, p in model.named_parameters()})


def parameters_of(state: Any, model: nn.Module) -> dict[str, Tensor]:
    return {name: state[name].float() for name, _ in model.named_parameters()}


def assert_is_average(found: dict[str, Tensor], model: nn.Module, how: str) -> None:
    """Bit for bit what the model computes with; of masters in two halves, what rounds to it."""
    if how == "O5, split":
        found = {name: v.bfloat16().float() for name, v in found.items() if not name.startswith("1.")}
    expected = in_half(model)
    assert_bitwise(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("kind", [Average, Swap, Copied])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["O1", "O2", "O3", "O5", "O5, split"])
def test_what_is_saved_is_what_the_model_computes_with_and_training_goes_on_from_the_masters(
    tmp_path: Path, how: str, name: str, kind: type[Average]
) -> None:
    if how == "O5, split" and kind is Copied:
        pytest.skip("new memory drops the lower halves: the values are those of the model, rounded")
    level, keywords = HOW.get(how, (how, {}))
    make = OPTIMIZERS["adamw" if how == "O5, split" else name]

    def run(saves: bool) -> Any:
        model, optimizer = started(level, make, **keywords)
        train(NORMED_MLP, model, optimizer, "cc")
        if saves:
            average = kind(model)
            average.store(model)
            before = frozen(dict(model.state_dict()))
            average.copy_to(model)
            assert_is_average(parameters_of(model.state_dict(), model), model, how)
            assert_is_average(parameters_of(amp.export_state_dict(model, torch.float32), model), model, how)
            half = amp.export_state_dict(model)
            assert_bitwise({n: half[n] for n, _ in model.named_parameters()}, frozen(dict(model.named_parameters())))
            assert_is_average({n: w.detach().float() for n, w in amp.named_masters(model)}, model, how)
            assert_is_average(
                parameters_of(amp.training_state(model, optimizer).state_dict()["model"], model), model, how
            )
            twin = copy.deepcopy(model)
            assert_is_average(parameters_of(twin.state_dict(), model), model, how)
            averaged = amp.averaged_model(model)
            assert_is_average(parameters_of(averaged.module.state_dict(), model), model, how)
            averaged.update_parameters(model)
            assert_is_average(parameters_of(averaged.module.state_dict(), model), model, how)
            amp.save(tmp_path / "file", model=model)
            assert_is_average(parameters_of(torch.load(tmp_path / "file")["model"], model), model, how)
            average.restore(model)
            assert_bitwise(frozen(dict(model.state_dict())), before)
        train(NORMED_MLP, model, optimizer, "cc", first=2)
        return frozen([dict(model.state_dict()), optimizer_values(optimizer), [w.detach() for w in masters(optimizer)]])

    quiet = run(saves=False)
    amp.close()
    assert_bitwise(run(saves=True), quiet)


@pytest.mark.parametrize("kind", [Average, Swap])
def test_an_average_that_is_swapped_in_after_a_load_is_what_is_saved(kind: type[Average]) -> None:
    model, _ = started("O2")
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    kind(model).copy_to(model)
    assert_is_average(parameters_of(model.state_dict(), model), model, "O2")
