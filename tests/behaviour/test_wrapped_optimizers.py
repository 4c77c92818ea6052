"""Optimizers around an optimizer that never call Optimizer.__init__, as the Lookaheads of timm and catalyst."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from amp_engine import amp
from amp_engine.errors import AmpStateError
from amp_engine.optimizers import FusedAdam
from tests.models import MLP, NORMED_MLP
from tests.support import (
    assert_bitwise,
    frozen,
    masters,
    optimizer_values,
    step_beside,
    train,
    weights_of,
)


class LeavesOutWithoutGradient(Optimizer):
    """timm's shape: the slow weights are state of the inner optimizer, and `.grad` decides which are pulled along."""

    def __init__(self, base_optimizer: Optimizer, k: int = 2) -> None:
        self._base_optimizer = base_optimizer
        self.param_groups = base_optimizer.param_groups
        self.defaults = base_optimizer.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group.update(k=k, count=0)

    @torch.no_grad()
    def pull(self) -> None:
        for group in self.param_groups:
            for fast in group["params"]:
                if fast.grad is None:
                    continue
                state = self._base_optimizer.state[fast]
                if "slow" not in state:
                    state["slow"] = fast.detach().clone()
                state["slow"].add_(fast - state["slow"], alpha=0.5)
                fast.copy_(state["slow"])

    def step(self, closure: Any = None) -> Any:
        loss = self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["count"] += 1
        if self.param_groups[0]["count"] % self.param_groups[0]["k"] == 0:
            self.pull()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups = self._base_optimizer.param_groups


class WritesThroughData(Optimizer):
    """catalyst's shape: state of its own, from the first step on, and every write through `.data`."""

    def __init__(self, optimizer: Optimizer, k: int = 2) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state = defaultdict(dict)
        self.fast_state = optimizer.state
        self.k = k
        for group in self.param_groups:
            group["count"] = 0

    def pull(self) -> None:
        for group in self.param_groups:
            for fast in group["params"]:
                state = self.state[fast]
                if "slow" not in state:
                    state["slow"] = torch.zeros_like(fast.data)
                    state["slow"].copy_(fast.data)
                state["slow"] += (fast.data - state["slow"]) * 0.5
                fast.data.copy_(state["slow"])

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step()
        if self.param_groups[0]["count"] % self.k == 0:
            self.pull()
        for group in self.param_groups:
            group["count"] += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.optimizer.state_dict(), "slow": [self.state[p]["slow"] for p in weights_of(self)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["fast"])
        self.param_groups = self.optimizer.param_groups
        for p, slow in zip(weights_of(self), state_dict["slow"], strict=True):
            self.state[p]["slow"] = slow.clone()


WRAPPERS: dict[str, Callable[..., Any]] = {"timm": LeavesOutWithoutGradient, "catalyst": WritesThroughData}
# With an `eps` that float16 holds, for O3.
INNER: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-4),
}
both = pytest.mark.parametrize("shape", WRAPPERS)
FREE_LEVELS = ["O1", "O3", "O4"]


def wrapped(shape: str, optimizer: Optimizer) -> Any:
    """Return a wrapper that torch, too, can step: zero_grad() looks into dictionaries that the class does not make."""
    wrapper = WRAPPERS[shape](optimizer)
    wrapper._optimizer_step_pre_hooks, wrapper._optimizer_step_post_hooks = {}, {}
    return wrapper


def inner(wrapper: Any) -> Optimizer:
    return next(v for v in vars(wrapper).values() if isinstance(v, Optimizer))


def started(shape: str, level: str, name: str = "SGD", task: Any = MLP) -> tuple[nn.Module, Any]:
    model = task.model()
    optimizer = WRAPPERS[shape](INNER[name](model.parameters()))
    returned = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert returned[1] is optimizer
    return model, optimizer


def slow(wrapper: Any) -> list[Any]:
    return [frozen(wrapper.state.get(p, {})) for p in weights_of(wrapper)]


@both
@pytest.mark.parametrize(
    "keywords", [{"opt_level": "O2"}, {"opt_level": "O5"}, {"opt_level": "O4", "master_weights": True}]
)
def test_beside_masters_it_is_refused_and_nothing_has_changed(keywords: dict[str, Any], shape: str) -> None:
    model = MLP.model()
    optimizer = WRAPPERS[shape](INNER["SGD"](model.parameters()))
    before = set(vars(optimizer))
    with pytest.raises(AmpStateError, match=f"A {type(optimizer).__name__} is around.*opt_level='O4'"):
        amp.initialize(model, optimizer, verbosity=0, **keywords)
    assert set(vars(optimizer)) == before
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@both
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_beside_masters_one_that_was_made_around_an_initialized_optimizer_is_refused_at_its_step(
    level: str, shape: str
) -> None:
    model = MLP.model()
    bare = INNER["SGD"](model.parameters())
    amp.initialize(model, bare, opt_level=level, verbosity=0, loss_scale=1.0)
    optimizer = wrapped(shape, bare)
    before = masters(bare)
    for _ in range(2):
        MLP.loss(model, MLP.batch()).backward()
        with pytest.raises(AmpStateError, match=f"A {type(optimizer).__name__} is around.*opt_level='O4'"):
            optimizer.step()
    assert_bitwise(masters(bare), before)
    with amp.on_masters(bare):
        optimizer.step()
    bare.step()
    assert not torch.equal(masters(bare)[0], before[0])


class SetsTheRate(Optimizer):
    """A schedule as a class of optimizers, without groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.count
        return self.optimizer.step(closure)


def test_one_that_sets_the_rate_of_an_initialized_optimizer_is_none_of_these() -> None:
    model = MLP.model()
    bare = INNER["SGD"](model.parameters())
    amp.initialize(model, bare, opt_level="O5", verbosity=0)
    before = masters(bare)
    MLP.loss(model, MLP.batch()).backward()
    SetsTheRate(bare).step()
    assert not torch.equal(masters(bare)[0], before[0])


class AcceleratesShape(Optimizer):
    """Groups and state are those inside, asked for each time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = weights_of(optimizer)  # what it only looks at

    @property  # type: ignore[override]
    def state(self) -> Any:
        return self.optimizer.state

    @property  # type: ignore[override]
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class LightningsShape:
    """All that is not its own is the optimizer's inside, whose class its class inherits."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Lightning", (LightningsShape, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
@pytest.mark.parametrize("wrap", [AcceleratesShape, LightningsShape])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_beside_masters_one_that_keeps_nothing_steps_as_the_optimizer_inside(
    level: str, wrap: Any, name: str, with_closure: bool
) -> None:
    ended = []
    for is_wrapped in (False, True):
        model = MLP.model()
        bare = INNER[name](model.parameters())
        optimizer = wrap(bare) if is_wrapped else bare
        returned = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
        assert returned[1] is optimizer
        hooks: list[Any] = []
        if wrap is LightningsShape:
            optimizer.register_step_pre_hook(lambda *_, hooks=hooks: hooks.append("called"))
        for index in range(4):
            bare.zero_grad()

            def closure(model: nn.Module = model, index: int = index) -> Any:
                loss = MLP.loss(model, MLP.batch(index))
                loss.backward()
                return loss

            if not with_closure:
                closure()
            amp.clip_grad_norm_(optimizer, 1e-2)
            optimizer.step(closure if with_closure else None)
        assert len(hooks) == (4 if wrap is LightningsShape else 0)
        ended.append([*masters(bare), *model.parameters()])
        amp.close()
        assert not any("amp" in key for key in vars(optimizer))
    assert_bitwise(ended[0], ended[1])
    assert not torch.equal(ended[0][0], MLP.model()[0].weight)


@both
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("level", FREE_LEVELS)
def test_it_does_what_it_does_alone_with_the_same_gradients(level: str, name: str, shape: str) -> None:
    model, optimizer = started(shape, level, name, NORMED_MLP)
    start = [p.detach().clone() for p in amp.master_params(optimizer)]
    alone = wrapped(shape, INNER[name]([nn.Parameter(value.clone()) for value in start]))
    for index in range(7):
        step_beside(NORMED_MLP, model, optimizer, alone, index)
        expected = [p.detach() for p in weights_of(alone)]
        torch.testing.assert_close(masters(optimizer), expected, rtol=1e-6, atol=1e-7)
    assert any((p - q).abs().max() > 1e-4 for p, q in zip(expected, start, strict=True))


@both
@pytest.mark.parametrize("level", FREE_LEVELS)
def test_it_may_have_stepped_before_and_close_gives_everything_back(level: str, shape: str) -> None:
    model = MLP.model()
    optimizer = wrapped(shape, INNER["SGD"](model.parameters()))
    for _ in range(2):
        MLP.loss(model, MLP.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = optimizer_values(inner(optimizer)), slow(optimizer)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if level != "O3":
        assert_bitwise(slow(optimizer), before[1])
    assert {"_amp_stash", "_post_amp_backward"} <= vars(optimizer).keys()
    assert optimizer._amp_stash is inner(optimizer)._amp_stash
    train(MLP, model, optimizer, "ccc")
    expected, states = masters(optimizer), slow(optimizer)
    amp.close()
    assert [name for name in vars(optimizer) if "amp" in name and name != "_base_optimizer"] == []
    assert all(p is q for p, q in zip(weights_of(optimizer), model.parameters(), strict=True))
    assert_bitwise(masters(optimizer), [p.float() for p in expected])
    assert_bitwise(slow(optimizer), states)
    optimizer.zero_grad()
    params = {id(p) for p in model.parameters()}
    assert {id(p) for p in [*optimizer.state, *inner(optimizer).state]} <= params
    assert not any(module._forward_pre_hooks for module in model.modules())
    MLP.loss(model, MLP.batch()).backward()
    optimizer.step()
    assert not torch.equal(weights_of(optimizer)[0], expected[0])


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("again", ["itself", "inner", "beside"])
def test_it_is_taken_once(again: str, level: str) -> None:
    model = MLP.model()
    optimizer = LeavesOutWithoutGradient(INNER["SGD"](model.parameters()))
    if again != "beside":
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    given = {"itself": optimizer, "inner": inner(optimizer), "beside": [optimizer, inner(optimizer)]}[again]
    with pytest.raises(RuntimeError, match="should only be passed through amp.initialize once"):
        amp.initialize(model, given, opt_level=level, verbosity=0)


class Broken(WritesThroughData):
    """Has what no master could be seen through."""

    def __init__(self, optimizer: Optimizer, how: str) -> None:
        super().__init__(optimizer)
        first = weights_of(optimizer)
        if how == "two":
            self.second = torch.optim.SGD(first, lr=0.1)
        elif how == "none":
            self.optimizer = None
        elif how == "own lists":
            self.param_groups = [{**g, "params": list(g["params"])} for g in optimizer.param_groups]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("how", ["two", "none", "own lists"])
def test_what_cannot_be_seen_through_is_refused(how: str, level: str) -> None:
    model = MLP.model()
    optimizer = Broken(INNER["SGD"](model.parameters()), how)
    before = set(vars(optimizer))
    with pytest.raises(RuntimeError, match="Broken .*by name only"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert set(vars(optimizer)) == before
    assert {p.dtype for p in model.parameters()} == {torch.float32}
