"""A run that is stopped and resumed is bit by bit the run that was not, at every level."""

from __future__ import annotations

import io
import itertools
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import amp
from amp_engine.optimizers import FusedLAMB
from tests import support
from tests.models import NORMED_MLP, Task
from tests.support import (
    assert_bitwise,
    everything,
    frozen,
    masters,
    train,
)

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "lamb": lambda params: FusedLAMB(params, lr=1e-2),
}


def started(task: Task, make: Any, level: str, seed: int = 0, **keywords: Any) -> Any:
    return support.started(level, make, task, seed=seed, **keywords)


def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> io.BytesIO:
    """The three dictionaries of the usual recipe, as a file."""
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()},
        file,
    )
    file.seek(0)
    return file


def resumed(
    file: io.BytesIO,
    task: Task,
    make: Any,
    level: str,
    order: tuple[str, ...] = ("model", "optimizer", "amp"),
    **keywords: Any,
) -> Any:
    saved = torch.load(file, weights_only=True)
    model, optimizer = started(task, make, level, seed=77, **keywords)
    load = {
        "model": model.load_state_dict,
        "optimizer": optimizer.load_state_dict,
        "amp": amp.load_state_dict,
    }
    for part in order:
        load[part](saved[part])
    return model, optimizer


SCRIPTS = {
    "clean": ("ccccc", "ccccc"),
    "stopped right after a skip": ("ccoco", "ccocc"),
    "stopped before any step": ("", "ccc"),
    "first step skipped": ("o", "ccc"),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_resuming_is_bitwise_no_interruption(script: str, name: str, level: str) -> None:
    before, after = SCRIPTS[script]
    if level in ("O3", "O5"):
        before, after = before.replace("o", "c"), after.replace("o", "c")
    make = OPTIMIZERS[name]
    model, optimizer = started(NORMED_MLP, make, level)
    losses = train(NORMED_MLP, model, optimizer, before)
    file = checkpoint(model, optimizer)
    losses = train(NORMED_MLP, model, optimizer, after, first=len(before))
    truth = everything(model, optimizer)
    amp.close()

    model, optimizer = resumed(file, NORMED_MLP, make, level)
    assert train(NORMED_MLP, model, optimizer, after, first=len(before)) == losses
    assert_bitwise(everything(model, optimizer), truth)


@pytest.mark.parametrize("level", ["O2"])
@pytest.mark.parametrize("order", list(itertools.permutations(["model", "optimizer", "amp"])))
def test_the_order_of_loading_does_not_matter(order: tuple[str, ...], level: str) -> None:
    make = OPTIMIZERS["adamw"]
    model, optimizer = started(NORMED_MLP, make, level)
    train(NORMED_MLP, model, optimizer, "ccc")
    file = checkpoint(model, optimizer)
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    truth = everything(model, optimizer)
    amp.close()
    model, optimizer = resumed(file, NORMED_MLP, make, level, order)
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    assert_bitwise(everything(model, optimizer), truth)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_nan_in_a_checkpoint_leaves_the_other_elements_of_its_master_exact(level: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    saved = {"0.weight": torch.full((2, 3), 0.1), "0.bias": torch.tensor([0.1, float("inf")])}
    saved["0.weight"][0, 1] = float("nan")
    model.load_state_dict(saved)
    for value, master in zip(saved.values(), amp.master_params(optimizer), strict=True):
        assert torch.equal(value.view(torch.int32), master.detach().view(torch.int32))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_loading_a_part_of_the_model_loads_its_masters_and_no_others(level: str) -> None:
    model, optimizer = started(NORMED_MLP, OPTIMIZERS["sgd"], level)
    train(NORMED_MLP, model, optimizer, "cc")
    exact = masters(optimizer)
    head = frozen(dict(model[3].state_dict()))
    assert {value.dtype for value in head.values()} == {torch.float32}
    train(NORMED_MLP, model, optimizer, "cc", first=2)
    body = masters(optimizer)[:3]
    model[3].load_state_dict(head)
    assert_bitwise(masters(optimizer)[3:], exact[3:])
    assert_bitwise(masters(optimizer)[:3], body)


class Nested(torch.optim.Optimizer):
    """SGD with momenta in containers, as in SOAP and AggMo, and one that it keeps in half, as timm's Adafactor does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for one in self.state.values():
            one["half"] = one["half"].to(torch.bfloat16)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                zeros = partial(torch.zeros_like, p)
                state["list"], state["by beta"] = [zeros(), None], {0.5: zeros()}
                state["queue"], state["half"] = deque([zeros()]), zeros(dtype=torch.bfloat16)
            state["queue"].append(p.grad.float().clone())
            momenta = [state["list"][0], state["by beta"][0.5], state["half"]]
            for momentum in momenta:
                momentum.mul_(0.5).add_(p.grad.to(momentum.dtype))
            p.sub_(sum(momenta) + state["queue"].popleft(), alpha=0.05)


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_state_in_containers_and_what_a_class_keeps_in_half_come_back(level: str, is_later: bool) -> None:
    if is_later and level != "O5":
        pytest.skip("losses are scaled, or there are no masters")

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = NORMED_MLP.model(0)
        optimizer = None if is_later else Nested(model.parameters())
        amp.initialize(model, *([] if optimizer is None else [optimizer]), opt_level=level, verbosity=0)
        return model, optimizer or Nested(model.parameters())

    model, optimizer = made()
    train(NORMED_MLP, model, optimizer, "ccc")
    file = checkpoint(model, optimizer)
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    whole = _values(model, optimizer)
    amp.close()
    model, optimizer = made()
    saved = torch.load(file, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    assert_bitwise(_values(model, optimizer), whole)


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    state = [{**one, "queue": list(one["queue"])} for one in optimizer.state_dict()["state"].values()]
    return frozen((model.state_dict(), state))


def test_state_of_single_elements_comes_back_where_the_optimizer_is_made_later() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ParameterList([nn.Parameter(torch.ones(1, dtype=torch.bfloat16))])
        amp.initialize(model, opt_level="O5", verbosity=0)
        return model, OPTIMIZERS["adamw"](model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (model[0] * 0.3).sum().backward()  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    step(model, optimizer)
    saved = frozen((model.state_dict(), optimizer.state_dict()["state"]))
    file = checkpoint(model, optimizer)
    amp.close()
    model, optimizer = made()
    loaded = torch.load(file, weights_only=False)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    optimizer.step()  # takes it in, and steps nothing
    assert_bitwise(frozen((model.state_dict(), optimizer.state_dict()["state"])), saved)
