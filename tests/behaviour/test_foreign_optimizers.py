"""Optimizers that are not ours: a skip leaves all of them alone, a step that raises hurts nothing."""

from __future__ import annotations

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

from amp_engine import AmpGradientWarning, AmpStateError, amp
from amp_engine.optimizers import FusedAdam
from tests.models import MLP, NORMED_MLP
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


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_muon_trains_matrices_beside_another_optimizer(level: str) -> None:
    model = MLP.model()
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    muon, sgd = torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(vectors, lr=0.05)
    amp.initialize(model, [muon, sgd], opt_level=level, loss_scale="dynamic", verbosity=0)
    losses = []
    for outcome in "cccocccccc":
        before = masters(muon)
        loss = MLP.loss(model, MLP.batch())
        backward(loss, [muon, sgd], overflow=outcome == "o")
        for optimizer in (muon, sgd):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        assert torch.equal(before[0], masters(muon)[0]) == (outcome == "o")
    assert losses[-1] < losses[0]


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


def test_group_entries_written_by_a_real_step_stay() -> None:
    model = NORMED_MLP.model()
    params = list(model.parameters())
    optimizer = CountsInGroup([{"params": params[:2]}, {"params": params[2:]}])
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(NORMED_MLP, model, optimizer, "ccoc")
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert [group["history"] for group in optimizer.param_groups] == [[1, 2, 3], [1, 2, 3]]


# --- a step that raises ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("registered", ["before", "after"])
def test_a_hook_of_the_user_that_raises_leaves_everything_ready(level: str, registered: str) -> None:
    model = NORMED_MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refuse(*_: Any) -> None:
        raise OSError("not today")

    handle = optimizer.register_step_pre_hook(refuse) if registered == "before" else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    handle = handle or optimizer.register_step_pre_hook(refuse)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    with pytest.raises(OSError, match="not today"):
        optimizer.step()
    handle.remove()
    half = torch.float16 if level == "O1" else torch.float32
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == half
    train(NORMED_MLP, model, optimizer, "cc", first=1)
    assert all(master.isfinite().all() for master in masters(optimizer))


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


# --- what a class keeps on itself -----------------------------------------------------------------


class LooksAtFew(torch.optim.SGD):
    """Holds something that cannot be copied, and looks at it in no step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.trainer = Uncopied()

    def step(self, closure: Any = None) -> Any:
        return super().step()


class Uncopied:
    def __copy__(self) -> Any:
        raise AssertionError("copied")

    __deepcopy__ = __reduce_ex__ = __copy__  # type: ignore[assignment]


def test_what_a_step_does_not_look_at_is_not_copied() -> None:
    model = MLP.model()
    optimizer = LooksAtFew(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(MLP, model, optimizer, "co")


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


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_hooks_run_once_and_in_their_order_and_give_their_arguments_on(level: str) -> None:
    model = MLP.model()
    optimizer = TakesFactor(model.parameters())
    said: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: said.append("first"))
    optimizer.register_step_post_hook(lambda *_: said.append("after"))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    handle = optimizer.register_step_pre_hook(lambda opt, args, kwargs: (args, {**kwargs, "factor": 0.0}))
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: said.append(kwargs))
    optimizer.register_step_post_hook(lambda *_: said.append("late"))
    before = masters(optimizer)
    train(MLP, model, optimizer, "c")
    assert said == ["first", {"factor": 0.0}, "after", "late"]
    assert_bitwise(masters(optimizer), before)
    handle.remove()
    train(MLP, model, optimizer, "c")
    assert said[4:] == ["first", {}, "after", "late"]
    assert not torch.equal(masters(optimizer)[0], before[0])


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


def test_an_optimizer_that_steps_its_groups_under_another_name_is_taken() -> None:
    model = MLP.model()
    optimizer = StepsElsewhere(model, "groups")
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = frozen(model.state_dict())
    train(MLP, model, optimizer, "c")
    after = model.state_dict()
    assert all(not torch.equal(after[name], value) for name, value in before.items())


class Around(Optimizer):
    """Steps its groups by an optimizer that it holds, whose state is its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.inner = torch.optim.Adam(self.param_groups, lr=0.05)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_an_optimizer_around_one_that_has_stepped_before_is_taken(level: str) -> None:
    model = MLP.model()
    optimizer = Around(model.parameters())
    MLP.loss(model, MLP.batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = frozen(model.state_dict())
    train(MLP, model, optimizer, "c")
    after = model.state_dict()
    assert all(not torch.equal(after[name], value) for name, value in before.items())


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


@pytest.mark.parametrize(("level", "masters"), [("O2", True), ("O5", True), ("O5", "split")])
def test_half_parameters_that_are_written_before_every_step_are_said_to_cost_the_masters(
    level: str, masters: Any
) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, master_weights=masters, loss_scale=128.0, verbosity=0)
    with pytest.warns(AmpGradientWarning, match="Low-precision parameters.*written before each.*SGD") as caught:
        perturbed_losses(model, Perturbing(optimizer), optimizer)
    assert len(caught) == 1


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_optimizer_inside_of_one_that_steps_it_by_itself_can_be_passed_alone(level: str) -> None:
    model = MLP.model()
    outer = Sharpness(model.parameters())
    amp.initialize(model, outer.base_optimizer, opt_level=level, verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    backward(MLP.loss(model, MLP.batch()), outer.base_optimizer)
    outer.second_step()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


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


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_optimizers_in_a_list_step_what_their_groups_share(level: str) -> None:
    moved = []
    for shares in (True, False):
        model = MLP.model()
        optimizer = Several(model.parameters(), shares)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        before = [p.detach().clone() for p in model.parameters()]
        backward(MLP.loss(model, MLP.batch()), optimizer)
        optimizer.step()
        moved.append([not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)])
        amp.close()
    assert all(all(parts) for parts in moved)


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


@pytest.mark.parametrize("how", ["unscaled", "not unscaled", "clipped"])
@pytest.mark.parametrize("made", SCALED)
def test_a_grad_scaler_that_unscales_float16_gradients_is_refused_by_torch(made: str, how: str) -> None:
    unscales = (made, how) != ("fused AdamW", "not unscaled")  # whose step unscales
    with pytest.raises(ValueError, match="unscale FP16 gradients") if unscales else nullcontext():
        steps_of_grad_scaler(torch.amp.GradScaler("cpu"), "O2", made, how)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_optimizer_whose_constructor_is_called_again_goes_on(level: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0, skip_on_overflow=True)
    for index in range(3):
        before = model.weight.detach().clone()
        with amp.scale_loss(model(torch.ones(2, 4)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(model.weight, before)
        if index == 0:
            optimizer.__init__(model.parameters(), lr=0.1)  # type: ignore[misc]
    with amp.scale_loss(model(torch.ones(2, 4)).square().mean() * torch.inf, optimizer) as scaled_loss:
        scaled_loss.backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert_bitwise(model.weight.detach(), before)
