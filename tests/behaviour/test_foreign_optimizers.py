"""Optimizers that are not ours: a skip leaves all of them alone, a step that raises hurts nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_engine import AmpGradientWarning, AmpStateError, amp, kernels
from amp_engine.optimizers import FusedAdam
from tests.models import MLP
from tests.support import (
    MASTER_LEVELS,
    assert_bitwise,
    backward,
    entries_of,
    frozen,
    masters,
    optimizer_values,
    train,
    weights_of,
)

FUSED = pytest.mark.skipif(not kernels.has_native(torch.device("cpu")), reason="only compiled kernels step FusedAdam")


class CountsInGroup(Optimizer):
    """SGD with warm-up whose step number stands in its groups, as in many third-party optimizers."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "step": 0})
        for group in self.param_groups:
            group["history"] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            group["history"].append(group["step"])
            rate = group["lr"] * min(1.0, group["step"] / 3)
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-rate)
                    self.state[param].setdefault("seen", torch.zeros(())).add_(1)


class NeedsClosure(torch.optim.SGD):
    """An optimizer like LBFGS, under another name."""

    def step(self, grad_closure: Any) -> Any:  # type: ignore[override]
        grad_closure()
        return super().step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NeedsClosure])
@pytest.mark.parametrize(
    ("level", "keywords"),
    [("O1", {}), ("O2", {}), ("O5", {}), ("O4", {"loss_scale": 128.0}), ("O2", {"loss_scale": 1.0})],
)
def test_an_optimizer_that_needs_a_closure_is_refused_where_closures_are(
    level: str, keywords: dict[str, Any], kind: Any
) -> None:
    model = MLP.model()
    before = {name: (param, param.dtype) for name, param in model.named_parameters()}
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(AmpStateError, match=rf"{kind.__name__}.step\(closure\).*opt_level='O4'"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)
    assert {name: (param, param.dtype) for name, param in model.named_parameters()} == before
    assert not hasattr(optimizer, "_amp_stash")


# --- a step that raises ---------------------------------------------------------------------------


def test_a_step_sees_no_casts_at_o1() -> None:
    seen = []

    class Multiplies(CountsInGroup):
        def step(self, closure: Any = None) -> None:
            if weights_of(self):  # a step without parameters does not count
                seen.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
            super().step()

    model = MLP.model()
    optimizer = Multiplies(model.parameters())
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    train(MLP, model, optimizer, "c")
    assert seen == [torch.float32]


# --- what a step leaves in `.grad` -----------------------------------------------------------------


KINDS = pytest.mark.parametrize("kind", [True, "split", "24bit"])  # of masters


@KINDS
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.SGD])
def test_a_step_leaves_the_gradient_tensors_that_a_script_writes(make: Any, clips: bool, kind: Any) -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = make(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", master_weights=kind, verbosity=0)
    static = model.weight.grad = torch.ones_like(model.weight)
    moved = []
    for value in (1.0, -1.0):
        static.fill_(value)
        if clips:
            amp.clip_grad_norm_(optimizer, 1.0)
        before = model.state_dict()["weight"].clone()
        optimizer.step()
        assert model.weight.grad is static
        moved.append((model.state_dict()["weight"] - before).mean().item())
    assert moved[0] < 0 < moved[1]


@KINDS
def test_a_step_that_writes_gradients_writes_those_of_the_model(kind: Any) -> None:
    class Halves(torch.optim.RMSprop):
        def step(self, closure: Any = None) -> None:
            for p in entries_of(self):
                p.grad.mul_(0.5)
            super().step()

    model = nn.Linear(4, 4, bias=False)
    optimizer = Halves(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", master_weights=kind, verbosity=0)
    held = model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert model.weight.grad is held
    assert_bitwise(held, torch.full_like(held, 0.5))


class ZeroesByData(torch.optim.RMSprop):
    """Zeroes gradients as classes of before torch 0.4 do: no version moves."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in entries_of(self):
            p.grad.data.zero_()


@pytest.mark.parametrize("kind", [True, "split"])
@pytest.mark.parametrize("holds", [False, True])
def test_what_a_step_writes_through_data_is_in_the_gradient_after_it(holds: bool, kind: Any) -> None:
    ends = []
    for level, options in (("O0", {}), ("O5", {"master_weights": kind})):
        model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        optimizer = ZeroesByData(model.parameters(), lr=0.25)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        held = []
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
            held += [model.weight.grad] * holds
            optimizer.step()
            assert not model.weight.grad.any()
        ends.append(model.state_dict()["weight"].clone())
        amp.close()
    assert_bitwise(*ends)


@KINDS
def test_a_gradient_that_is_a_negative_view_keeps_its_values_in_a_step_of_the_class(kind: Any) -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", master_weights=kind, verbosity=0)
    held = model.weight.grad = torch._neg_view(torch.ones(1, 4, dtype=torch.bfloat16))
    optimizer.step()
    assert_bitwise(model.weight.grad.float(), -torch.ones(1, 4))
    assert_bitwise(held.resolve_neg().float(), -torch.ones(1, 4))


def test_scaled_half_gradients_are_left_unscaled_by_a_step_of_the_class() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, gradients="half", verbosity=0)
    backward(model(torch.ones(1, 4)).sum(), optimizer)
    held = model.weight.grad
    optimizer.step()
    assert_bitwise(model.weight.grad, torch.ones(4, 4))
    assert held.dtype is torch.float16
    optimizer.step()


# --- hooks that are registered late ---------------------------------------------------------------


@pytest.mark.parametrize("when", ["after initialize", "before the step", "in an iteration that is left open"])
@pytest.mark.parametrize("make", ["SGD", "foreign"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_hook_that_is_registered_late_clips_what_is_stepped(level: str, make: str, when: str) -> None:
    model = MLP.model()
    params = model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.1) if make == "SGD" else TakesFactor(params)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    seen: list[Tensor] = []

    def clip(opt: Optimizer, args: Any, kwargs: Any) -> None:
        params = weights_of(opt)
        seen.append(torch.nn.utils.clip_grad_norm_(params, 1e-3))
        assert torch.nn.utils.get_total_norm([p.grad for p in params]) < 1.1e-3

    delays = when == "in an iteration that is left open"
    handle = optimizer.register_step_pre_hook(clip) if when == "after initialize" else None
    norms = []
    for index in range(3):
        optimizer.zero_grad()
        before = masters(optimizer)
        backward(MLP.loss(model, MLP.batch(index)), optimizer, delay_unscale=delays)
        handle = handle or optimizer.register_step_pre_hook(clip)
        optimizer.step()
        moved = [b.float() - a.float() for b, a in zip(before, masters(optimizer), strict=True)]
        norms.append(float(torch.nn.utils.get_total_norm(moved)))
    assert [1e-2 < float(norm) < 1e2 for norm in seen] == [True] * 3
    if level != "O3":  # whose weights hardly move by so little
        assert norms == pytest.approx([1e-4] * 3, rel=0.05)
    handle.remove()
    train(MLP, model, optimizer, "c", first=3)
    assert len(seen) == 3


class TakesFactor(torch.optim.SGD):
    """An optimizer whose step has an argument of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None, factor: float = 1.0) -> None:
        for param in weights_of(self):
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1 * factor)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_hooks_of_all_optimizers_see_gradients_that_were_left_scaled(level: str) -> None:
    seen: list[float] = []

    def look(opt: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(max(float(p.grad.abs().max()) for p in weights_of(opt) if p.grad is not None))

    handle = register_optimizer_step_pre_hook(look)
    try:
        model = MLP.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        backward(MLP.loss(model, MLP.batch()), optimizer, delay_unscale=True)
        optimizer.step()
    finally:
        handle.remove()
    assert [0 < norm < 10 for norm in seen] == [True]


# --- refused by name ------------------------------------------------------------------------------


class Sharded(Optimizer):
    """Steps the groups of an inner optimizer, not its own, as ZeroRedundancyOptimizer does."""

    def __init__(self, params: Any, attribute: str) -> None:
        super().__init__(params, {"lr": 0.1})
        inner = torch.optim.SGD(weights_of(self), lr=0.1)
        setattr(self, attribute, inner)
        self.attribute = attribute

    def step(self, closure: Any = None) -> None:
        getattr(self, self.attribute).step()


@pytest.mark.parametrize("attribute", ["optim", "optimizer"])
def test_a_wrapper_whose_groups_are_not_the_ones_it_steps_is_refused_by_name(
    attribute: str,
) -> None:
    model = MLP.model()
    optimizer = Sharded(model.parameters(), attribute)
    dtypes = [param.dtype for param in model.parameters()]
    with pytest.raises((TypeError, RuntimeError, ValueError), match="Sharded"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert [param.dtype for param in model.parameters()] == dtypes
    assert not optimizer._optimizer_step_pre_hooks


class StepsElsewhere(Optimizer):
    """Steps parameters that it keeps in a place of its own."""

    def __init__(self, model: nn.Module, place: str) -> None:
        params = list(model.parameters())
        super().__init__(params, {"lr": 0.1})
        kept = {
            "list": (params, lambda kept: kept),
            "nested": ({"all": [tuple(params)]}, lambda kept: kept["all"][0]),
            "model": (model, lambda kept: kept.parameters()),
            "function": (lambda: params, lambda kept: kept()),
            "groups": (self.param_groups, lambda kept: kept[0]["params"]),
        }
        self.kept, self.params_of = kept[place]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.params_of(self.kept):
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)


@pytest.mark.parametrize("place", ["list", "nested", "model", "function"])
def test_an_optimizer_that_steps_parameters_beside_its_groups_is_refused_with_masters(place: str) -> None:
    model = MLP.model()
    optimizer = StepsElsewhere(model, place)
    before = frozen(model.state_dict())
    with pytest.raises(RuntimeError, match=r"StepsElsewhere keeps parameters in its \.kept"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert_bitwise(frozen(model.state_dict()), before)
    assert not optimizer._optimizer_step_pre_hooks


class StepsByName(StepsElsewhere):
    """Reaches the parameters that it keeps by a property."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, "groups")
        self.named = dict(model.named_parameters())

    @property
    def all(self) -> Any:
        return self.named.values()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.all:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)


def test_parameters_that_a_property_reaches_are_found() -> None:
    model = MLP.model()
    with pytest.raises(RuntimeError, match=r"StepsByName keeps parameters in its \.named"):
        amp.initialize(model, StepsByName(model), opt_level="O2", verbosity=0)


@pytest.mark.parametrize("place", ["list", "nested", "model", "function", "groups", "property"])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_skip_leaves_parameters_beside_the_groups_alone(level: str, place: str) -> None:
    model = MLP.model()
    optimizer = StepsByName(model) if place == "property" else StepsElsewhere(model, place)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = frozen(model.state_dict())
    for _ in range(2):
        train(MLP, model, optimizer, "o")
        assert amp.last_step(optimizer).skipped
        assert_bitwise(frozen(model.state_dict()), before)
    assert all(p.grad is not None for p in model.parameters())
    train(MLP, model, optimizer, "c")
    assert not any(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("way", ["in place", "data"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("keywords", [{}, {"master_weights": "split"}], ids=str)
def test_a_step_inside_of_on_masters_keeps_what_was_written_there(
    keywords: dict[str, Any], make: Any, way: str
) -> None:
    """As SAM does at the end of its second step."""
    weights = []
    for steps_inside in (True, False):
        model = MLP.model().bfloat16()
        optimizer = make(model.parameters(), lr=1e-2)
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **keywords)
        for index in range(2):
            MLP.loss(model, MLP.batch(index)).backward()
            with amp.on_masters(optimizer), torch.no_grad():
                for master in entries_of(optimizer):
                    (master.data if way == "data" else master).add_(0.25)
                if steps_inside:
                    optimizer.step()
            if not steps_inside:
                optimizer.step()
            optimizer.zero_grad()
        weights.append(frozen(model.state_dict()))
        amp.close()
    for start, one in zip(MLP.model().parameters(), weights[0].values(), strict=True):
        assert (one - 0.5 - start).abs().max() < 0.3
    for name, one in weights[0].items():
        torch.testing.assert_close(one, weights[1][name], rtol=0, atol=1e-6)


def test_what_was_written_through_data_before_on_masters_is_kept_in_it() -> None:
    model = MLP.model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    MLP.loss(model, MLP.batch(0)).backward()
    first = next(model.parameters())
    first.data.fill_(0.75)
    with amp.on_masters(optimizer):
        assert torch.equal(entries_of(optimizer)[0].detach(), torch.full_like(first, 0.75, dtype=torch.float32))
        optimizer.step()
    assert (first.float() - 0.75).abs().max() < 0.01


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop])
def test_a_step_inside_of_on_masters_sees_what_was_written_to_the_model_and_leaves_masters_shown(make: Any) -> None:
    model = MLP.model().bfloat16()
    optimizer = make(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    MLP.loss(model, MLP.batch(0)).backward()
    first = next(model.parameters())
    with amp.on_masters(optimizer), torch.no_grad():
        first.fill_(2.0)
        optimizer.step()
        assert all(master.dtype is torch.float32 for master in entries_of(optimizer))
        entries_of(optimizer)[1].fill_(0.5)
    assert torch.equal(first, torch.full_like(first, 2.0))
    assert entries_of(optimizer)[1].eq(0.5).all()


@pytest.mark.parametrize("how", ["data", "state"])
@pytest.mark.parametrize("keywords", [{}, {"masters_on": "cpu"}, {"moment_dtype": "8bit"}], ids=str)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_step_inside_of_on_masters_keeps_its_state(make: Any, keywords: dict[str, Any], how: str) -> None:
    """As SAM does: it gives masters other memory, or keeps what it restores in the state."""
    if keywords and (make is torch.optim.NAdam or not kernels.has_native(torch.device("cpu"))):
        pytest.skip("only kernels step so")
    model = MLP.model().bfloat16()
    optimizer = make(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **keywords)
    for index in range(3):
        MLP.loss(model, MLP.batch(index)).backward()
        with amp.on_masters(optimizer):
            for master in entries_of(optimizer):
                if how == "data":
                    master.data = master.data.clone()
            optimizer.step()
            for master in entries_of(optimizer):
                optimizer.state[master]["old"] = master.detach().clone()
            assert len(optimizer.state_dict()["state"]) == len(entries_of(optimizer))
        optimizer.zero_grad()
    assert {float(one["step"]) for one in optimizer.state_dict()["state"].values()} == {3.0}
    assert set(optimizer.state) == set(model.parameters())


def test_what_a_closure_writes_to_masters_is_kept() -> None:
    model = MLP.model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = MLP.loss(model, MLP.batch(0))
        loss.backward()
        with torch.no_grad():
            entries_of(optimizer)[0].fill_(0.5)
        return loss

    with amp.on_masters(optimizer):
        optimizer.step(closure)
    assert next(model.parameters()).eq(0.5).all()


class Logs(Optimizer):
    """Steps its groups, and reads every gradient of parameters that it keeps besides."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kept = [p for group in self.param_groups for p in group["params"]]
        self.norms: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.norms.append(max(float(p.grad.norm()) for p in self.kept))
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_class_that_needs_each_gradient_skips_on_zeros(level: str) -> None:
    model = MLP.model()
    optimizer = Logs(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = frozen(model.state_dict())
    train(MLP, model, optimizer, "oo")
    assert_bitwise(frozen(model.state_dict()), before)
    assert set(optimizer.norms) == {0.0}
    train(MLP, model, optimizer, "c")
    assert 0.0 < optimizer.norms[-1] < float("inf")


class Interrupted(Optimizer):
    """Raises in its second step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.raises = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.raises:
            raise KeyboardInterrupt
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_a_skip_that_raised_brings_no_gradient_back(level: str) -> None:
    model = MLP.model()
    optimizer = Interrupted(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(MLP, model, optimizer, "o")
    optimizer.raises = True
    with pytest.raises(KeyboardInterrupt):
        train(MLP, model, optimizer, "o")
    optimizer.raises = False
    before = frozen(model.state_dict())
    train(MLP, model, optimizer, "c")
    assert not amp.last_step(optimizer).skipped
    assert not any(torch.equal(one, before[name]) for name, one in model.state_dict().items())


class SignedAdam(FusedAdam):
    """Has a step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in entries_of(self):
            if param.grad is not None:
                param.sub_(param.grad.sign(), alpha=0.25)


class Signs:
    """A mixin with a step."""

    step = SignedAdam.step


class Mixed(Signs, FusedAdam):  # type: ignore[misc]
    """Steps by its mixin."""


class Clamped(FusedAdam):
    """Does more than the step of its class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for param in entries_of(self):
            param.clamp_(-0.125, 0.125)


@FUSED
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_subclass_of_ours_steps_by_its_own_step(level: str) -> None:
    for kind, most in ((SignedAdam, 0.25), (Mixed, 0.25), (Clamped, None)):
        model = MLP.model()
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = kind(model.parameters(), lr=1e-3)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        train(MLP, model, optimizer, "c")
        exact = [master for _, master in amp.named_masters(model)]
        if most is None:
            assert max(float(p.detach().abs().max()) for p in exact) <= 0.125
            assert not all(torch.equal(one, other) for one, other in zip(exact, start, strict=True))
        else:
            moved = [(one - other).abs().max().item() for one, other in zip(exact, start, strict=True)]
            assert all(abs(one - most) < 1e-2 for one in moved)
        train(MLP, model, optimizer, "o" if level in ("O1", "O2") else "c", first=1)
        amp.close()


class Around(Optimizer):
    """Steps its groups by an optimizer that it holds, whose state is its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.inner = torch.optim.Adam(self.param_groups, lr=0.05)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Sharpness(Optimizer):
    """Steps by an optimizer that it holds, in a call of its own, as SAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError("second_step")

    def second_step(self) -> None:
        self.base_optimizer.step()


class Perturbing:
    """Sharpness-aware: moves weights along their gradients, and steps from where they were by the gradients there.

    Args:
        optimizer: steps what it moves.
        shown: a context around each move.
        through_data: whether past autograd.
    """

    def __init__(self, optimizer: Optimizer, shown: Any = nullcontext, through_data: bool = False) -> None:
        self.optimizer = optimizer
        self.shown = shown
        self.through_data = through_data
        self.before: list[Tensor] = []

    def values(self) -> list[Tensor]:
        return [p.data if self.through_data else p for p in entries_of(self.optimizer)]

    @torch.no_grad()
    def first_step(self) -> None:
        with self.shown(self.optimizer):
            self.before = [p.detach().clone() for p in self.values()]
            for value, p in zip(self.values(), entries_of(self.optimizer), strict=True):
                value.add_(0.1 * p.grad.to(value.dtype) / p.grad.norm())
        self.optimizer.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        with self.shown(self.optimizer):
            for value, before in zip(self.values(), self.before, strict=True):
                value.copy_(before)
        self.optimizer.step()
        self.optimizer.zero_grad()


def perturbed_losses(model: nn.Module, wrapper: Any, optimizer: Optimizer | None) -> list[float]:
    """Return the losses of six steps; without `optimizer` in plain torch."""
    losses = []
    inputs, targets = MLP.batch()
    for _ in range(6):
        for phase in (wrapper.first_step, wrapper.second_step):
            loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
            losses.append(loss.item())
            loss.backward() if optimizer is None else backward(loss, optimizer)
            phase()
    return losses


FIRST_ORDER: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("name", FIRST_ORDER)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_weights_that_are_moved_between_two_backwards_of_a_step_are_those_of_the_second(
    level: str, name: str, through_data: bool
) -> None:
    plain = MLP.model()
    optimizer = FIRST_ORDER[name](plain.parameters())
    expected = perturbed_losses(plain, Perturbing(optimizer), None)
    model = MLP.model()
    optimizer = FIRST_ORDER[name](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    shown = amp.on_masters if level in MASTER_LEVELS else nullcontext
    losses = perturbed_losses(model, Perturbing(optimizer, shown, through_data), optimizer)
    assert losses == pytest.approx(expected, rel=0.02)
    assert min(b / a for a, b in zip(losses[::2], losses[1::2], strict=True)) > 1.01


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_weights_that_are_moved_and_put_back_before_the_step_cost_the_masters_nothing(level: str) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(MLP, model, optimizer, "c")
    exact = frozen(dict(model.state_dict()))
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.25)
    backward(MLP.loss(model, MLP.batch()), optimizer)  # as SAM's second one
    amp.clip_grad_norm_(optimizer, 1.0)
    with torch.no_grad():
        for p, was in zip(model.parameters(), before, strict=True):
            p.copy_(was)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert_bitwise(dict(model.state_dict()), exact)


def decay_by_hand(model: nn.Module, optimizer: Optimizer, through_data: bool) -> None:
    for index in range(6):
        backward(MLP.loss(model, MLP.batch(index)), optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.data.mul_(0.9) if through_data else p.mul_(0.9999)  # which rounds to the old values at O5
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("level", "masters", "through_data"),
    [("O2", True, False), ("O2", True, True), ("O5", True, False), ("O5", True, True), ("O5", "split", False)],
)
def test_half_parameters_that_are_written_before_every_step_are_said_to_cost_the_masters(
    level: str, masters: Any, through_data: bool
) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, master_weights=masters, loss_scale=128.0, verbosity=0)
    with pytest.warns(
        AmpGradientWarning, match="Low-precision parameters.*written before 3 of the last 20 steps of SGD"
    ) as caught:
        decay_by_hand(model, optimizer, through_data)
    assert len(caught) == 1


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_writes_that_leave_the_old_values_before_the_step_are_not_warned_of(level: str) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        perturbed_losses(model, Perturbing(optimizer, through_data=True), optimizer)
        for index in range(6):
            backward(MLP.loss(model, MLP.batch(index)), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[0].weight.clamp_(-100.0, 100.0)


class Several(Optimizer):
    """Steps by optimizers in a list, each of a part of the parameters; in groups of its own, or in theirs."""

    def __init__(self, params: Any, shares: bool) -> None:
        params = list(params)
        super().__init__([{"params": params[:2]}, {"params": params[2:]}], {"lr": 0.05})
        self.parts = [torch.optim.SGD(group["params"], lr=0.05) for group in self.param_groups]
        for group, part in zip(self.param_groups, self.parts, strict=True):
            if shares:
                part.param_groups[0]["params"] = group["params"]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def test_an_inner_optimizer_that_is_stepped_by_itself_is_refused_by_name() -> None:
    model = MLP.model()
    optimizer = Sharpness(model.parameters())
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    before = optimizer_values(optimizer)
    with pytest.raises(AmpStateError, match=r"SGD inside of this Sharpness was stepped by itself.*Nothing was stepped"):
        optimizer.second_step()
    assert_bitwise(optimizer_values(optimizer), before)
    amp.close()
    optimizer.second_step()


@pytest.mark.parametrize("make", [Around, Sharpness, partial(Several, shares=True)])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_optimizer_that_steps_by_another_is_refused_beside_masters(level: str, make: Any) -> None:
    model = MLP.model()
    optimizer = make(model.parameters())
    with pytest.raises(AmpStateError, match=r"steps by its \..*which FP32 masters would never reach.*opt_level='O4'"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


class Scheduled:
    """A proxy of another library that is no torch optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def test_a_proxy_that_is_no_optimizer_is_refused_by_name() -> None:
    model = MLP.model()
    proxy = Scheduled(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="Scheduled"):
        amp.initialize(model, proxy, opt_level="O2", verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_schedule_free_eval_reaches_the_model_and_train_brings_it_back(level: str) -> None:
    model = MLP.model()
    optimizer = schedulefree.SGDScheduleFree(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.train()
    train(MLP, model, optimizer, "cccccc")
    inputs = MLP.batch()[0]
    in_training = model(inputs)
    shown = amp.on_masters if level in MASTER_LEVELS else nullcontext
    with shown(optimizer):
        optimizer.eval()
    averaged = MLP.model()
    averaged.load_state_dict(model.state_dict())
    in_evaluation = model(inputs)
    torch.testing.assert_close(in_evaluation, averaged(inputs), rtol=0.02, atol=0.01)
    assert (in_evaluation - in_training).abs().max() > 0.03
    with shown(optimizer):
        optimizer.train()
    torch.testing.assert_close(model(inputs), in_training, rtol=1e-3, atol=1e-3)


# --- torch.amp.GradScaler -------------------------------------------------------------------------


SCALED: dict[str, Callable[[Any], Optimizer]] = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "FusedAdam": FusedAdam,
    "RMSprop": torch.optim.RMSprop,
}


def steps_of_grad_scaler(scaler: torch.amp.GradScaler, level: str, made: str, how: str) -> list[Tensor]:
    model = MLP.model()
    optimizer = SCALED[made](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for index in range(4):
        before = masters(optimizer)
        loss = MLP.loss(model, MLP.batch(index)) * (torch.inf if index == 2 else 1.0)
        scaler.scale(loss).backward()
        if how != "not unscaled":
            scaler.unscale_(optimizer)
        if how == "clipped":
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(masters(optimizer)[0], before[0]) == (index == 2)
    return masters(optimizer)


@pytest.mark.parametrize("how", ["unscaled", "not unscaled", "clipped"])
@pytest.mark.parametrize("made", SCALED)
def test_a_grad_scaler_steps_masters_of_bfloat16_parameters_as_without_it(made: str, how: str) -> None:
    with_it = steps_of_grad_scaler(torch.amp.GradScaler("cpu"), "O5", made, how)
    amp.close()
    without = steps_of_grad_scaler(torch.amp.GradScaler("cpu", enabled=False), "O5", made, how)
    torch.testing.assert_close(with_it, without, rtol=1e-4, atol=1e-6)
