"""A gradient that was zeroed in place is one of 0: momentum and weight decay go on, as in torch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from amp_engine import amp
from amp_engine.optimizers import FusedAdam, FusedSGD
from amp_engine.stepping.spent import Spent
from tests.support import MASTER_LEVELS, assert_bitwise


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
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-4, momentum=0.9, weight_decay=0.1),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
}

IN_PLACE: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [
        p.grad.zero_() for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ],
    "by hand, model": lambda model, optimizer: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
}
ZEROED = {
    **IN_PLACE,
    "discarded": lambda model, optimizer: optimizer.zero_grad(),
    "discarded, model": lambda model, optimizer: model.zero_grad(),
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


class Reads(TorchDispatchMode):
    """Counts the questions whether a tensor holds anything, each of which waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.any.default, torch.ops.aten.all.default)
        return function(*args, **(kwargs or {}))


def test_copies_of_a_shown_gradient_are_plain_tensors() -> None:
    model = Parts()
    model, optimizer = amp.initialize(model, OPTIMIZERS["AdamW"](model.parameters()), opt_level="O2", verbosity=0)
    with amp.scale_loss(model.loss("ab", 0), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    (shown,) = (p.grad for p in model.parameters() if p.grad is not None)
    file = io.BytesIO()
    torch.save(shown, file)
    file.seek(0)
    for copied in (copy.deepcopy(shown), torch.load(file), shown + 1, shown.norm()):
        assert type(copied) is Tensor


@pytest.mark.parametrize("way", IN_PLACE)
@pytest.mark.parametrize("name", ["FusedSGD", "AdamW"])
def test_no_gradient_is_read_to_hear_of_a_zero_grad(way: str, name: str) -> None:
    model = Parts()
    model, optimizer = amp.initialize(model, OPTIMIZERS[name](model.parameters()), opt_level="O2", verbosity=0)
    for index in range(3):
        context = amp.scale_loss(model.loss("ab", index), optimizer)
        with Reads() as reads:
            context.__enter__().backward()
        assert reads.count == 0
        context.__exit__(None, None, None)
        optimizer.step()
        IN_PLACE[way](model, optimizer)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("plan", "where"),
    [(plan, where) for plan in PLANS for where in ("before", "after")] + [(PLANS[0], "body"), (PLANS[3], "body")],
)
def test_unused_parameters_are_stepped_as_torch_does(plan: str, where: str, name: str, level: str) -> None:
    for zero in ZEROED.values() if level in MASTER_LEVELS else (ZEROED["optimizer"],):
        truth = run(None, OPTIMIZERS[name], plan, zero, where)
        assert_close(run(level, OPTIMIZERS[name], plan, zero, where), truth, level)


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_of_zero_is_made_when_somebody_looks(name: str, how: str, level: str) -> None:
    model = Parts()
    optimizer = OPTIMIZERS[name](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    held = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
    masters = list(amp.master_params(optimizer))
    for names in ("ab", "b"):
        with amp.scale_loss(model.loss(names, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert [held(master) for master in masters] == [None] * 6
        if names == "ab":
            optimizer.step()
            IN_PLACE[how](model, optimizer)
    assert masters[0].grad is not None
    assert_bitwise(masters[0].grad, torch.zeros(8, 8))
    assert [masters[row].grad for row in (4, 5)] == [None, None]
    masters[0].grad = None
    before = [master.detach().clone() for master in masters]
    optimizer.step()
    moved = [not torch.equal(master, was) for master, was in zip(masters, before, strict=True)]
    assert moved == [False, True, True, True, False, False]


def step_on(level: str | None, loss: Tensor, optimizers: list[Optimizer], **keywords: Any) -> None:
    if level is None:
        loss.backward()
    else:
        with amp.scale_loss(loss, optimizers, **keywords) as scaled_loss:
            scaled_loss.backward()
    for optimizer in optimizers if not keywords else ():
        optimizer.step()


def close_and_go_on(level: str | None, make: Callable[[Any], Optimizer]) -> list[Optimizer]:
    return go_on(level, make, again=False)


def go_on(level: str | None, make: Callable[[Any], Optimizer], again: bool = True) -> list[Optimizer]:
    model = Parts()
    optimizer = make(model.parameters())
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    for index, names in enumerate(("ab", "b", "b", "a", "b")):
        is_over = index > 1 and not again
        if index == 2 and level is not None:
            amp.close()
            if again:
                amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
        optimizer.zero_grad(set_to_none=False)
        step_on(None if is_over else level, model.loss(names, index), [optimizer])
    return [optimizer]


def delay(level: str | None, make: Callable[[Any], Optimizer]) -> list[Optimizer]:
    model = Parts()
    optimizer = make(model.parameters())
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    for index, names in enumerate(("ab", "ab", "a")):
        step_on(level, model.loss(names, index), [optimizer], delay_unscale=True)
        optimizer.zero_grad(set_to_none=False)
        step_on(level, model.loss("b", index), [optimizer])
        optimizer.zero_grad(set_to_none=index == 1)
    return [optimizer]


def freeze(level: str | None, make: Callable[[Any], Optimizer]) -> list[Optimizer]:
    model = Parts()
    optimizer = make(model.parameters())
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    for index in range(4):
        model.a.requires_grad_(index not in (1, 2))
        optimizer.zero_grad(set_to_none=False)
        step_on(level, model.loss("ab", index), [optimizer])
    return [optimizer]


def take_turns(level: str | None, make: Callable[[Any], Optimizer]) -> list[Optimizer]:
    model = Parts()
    optimizers = [make([*model.a.parameters(), *model.never.parameters()]), make(model.b.parameters())]
    if level is not None:
        amp.initialize(model, optimizers, opt_level=level, verbosity=0, loss_scale=64.0)
    for index, names in enumerate(("ab", "b", "a", "b", "ab", "a")):
        model.zero_grad(set_to_none=False)
        step_on(level, model.loss(names, index), optimizers)
    return optimizers


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loop", [close_and_go_on, go_on, delay, freeze, take_turns])
def test_zeroed_gradients_are_stepped_in_loops_of_every_kind(loop: Any, name: str, level: str) -> None:
    truth, optimizers = loop(None, OPTIMIZERS[name]), loop(level, OPTIMIZERS[name])
    for expected, optimizer in zip(truth, optimizers, strict=True):
        of_torch, ours = ([p for group in one.param_groups for p in group["params"]] for one in (expected, optimizer))
        assert_close([p.detach() for p in ours], [p.detach() for p in of_torch], level)


@pytest.mark.parametrize("memory", [torch.zeros(3, dtype=torch.half), torch.zeros(2, dtype=torch.bfloat16)])
def test_a_parameter_whose_memory_was_replaced_shows_a_gradient_that_fits(memory: Tensor) -> None:
    param = nn.Parameter(torch.zeros(2, dtype=torch.half))
    left = Spent(b"\1")
    for data in (param.data, memory):
        param.data = data
        left.show(lambda: [param])
        assert param.grad is not None
        assert (param.grad.shape, param.grad.dtype) == (data.shape, data.dtype)
        assert left.hear()
        assert param.grad is None
        left.spend(b"\1", b"\1")


@pytest.mark.parametrize("level", [None, *MASTER_LEVELS])
@pytest.mark.parametrize("body", ["empty", "raises"])
def test_a_body_without_gradients_after_a_step_loses_no_zero_grad(body: str, level: str | None) -> None:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)

    def step(names: str) -> None:
        loss = model.loss(names, 0)
        with amp.scale_loss(loss, optimizer) if level is not None else nullcontext(loss) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    step("a")
    if level is not None:
        with suppress(KeyError), amp.scale_loss(model.loss("a", 0), optimizer) as scaled_loss:
            if body == "raises":
                scaled_loss.backward()
                raise KeyError
    optimizer.zero_grad(set_to_none=False)
    before = model.state_dict()["a.weight"].clone()
    step("b")
    assert not torch.equal(model.state_dict()["a.weight"], before), "its momentum moves it"
