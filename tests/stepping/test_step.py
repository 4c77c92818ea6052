"""A step of any class on FP32 weights: what it sees, what is put back whatever raises, what a skip leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import AmpStateError, amp
from amp_engine.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests.models import NORMED_MLP
from tests.support import (
    MASTER_LEVELS,
    WEIGHT_DTYPE,
    assert_bitwise,
    assert_same_step,
    backward,
    entries_of,
    frozen,
    masters,
    momentum_sgd,
    started,
    step_beside,
    train,
    weights_of,
)

# --- classes that nobody knows ----------------------------------------------------------------------------------------


class Sign(Optimizer):
    """Lion, in short: a momentum in the state, its sign as the update."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["beta"])
                    p.add_(momentum.sign(), alpha=-group["lr"])
        return loss


class CountsInGroups(Sign):
    """As Prodigy: numbers and a tensor in the groups, changed in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["k"], group["d"] = 0, torch.ones(())

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["d"].mul_(0.5)
        return super().step(closure)


class CountsInState(Sign):
    """A number and a tensor in the state under names, not parameters."""

    def step(self, closure: Any = None) -> Any:
        of_all = self.state["all"]
        of_all["steps"] = of_all.get("steps", 0) + 1
        of_all.setdefault("decay", torch.ones(())).mul_(0.5)
        return super().step(closure)


class NeedsParameters(CountsInGroups):
    """As AdamS and Adai: fails where groups have no parameters. It counts in its groups, too."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group["params"][0].device.type == "cpu"
        return super().step(closure)


class Twice(torch.optim.SGD):
    """Steps by its base class, and then halves what the step did not decay."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        super().step()
        return loss


class Raises(torch.optim.SGD):
    """Raises once after each step that it is told to."""

    error: type[BaseException] | None = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return loss


CUSTOM: dict[str, Callable[[Any], Optimizer]] = {
    cls.__name__: cls for cls in (Sign, CountsInGroups, CountsInState, NeedsParameters)
}
CUSTOM["Twice"] = lambda params: Twice(params, lr=0.1, momentum=0.9)


def schedule_free(params: Any) -> Optimizer:
    optimizer = schedulefree.AdamWScheduleFree(params, lr=0.01, warmup_steps=4)
    optimizer.train()
    return optimizer


OWN: dict[str, Callable[[Any], Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": lambda params: torch.optim.RAdam(params, decoupled_weight_decay=True, weight_decay=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "Adam, for each": lambda params: torch.optim.Adam(params, foreach=True, amsgrad=True),
    "AdamWScheduleFree": schedule_free,
    "Prodigy": lambda params: prodigyopt.Prodigy(params, weight_decay=1e-2),
    **CUSTOM,
}
KERNELS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": momentum_sgd,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "FusedAdagrad": lambda params: FusedAdagrad(params, lr=1e-2, weight_decay=1e-3),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2, weight_decay=1e-2),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=2e-2),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=0.1, betas=(0.9, 0.98), weight_decay=1e-3),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
}
ALL = KERNELS | OWN
# State of another shape or of numbers, made by the constructor, or under names; numbers in groups; fails empty.
KINDS = {name: ALL[name] for name in ("SGD", "AdamW", "FusedLAMB", "Adafactor", "Adagrad", "ASGD", "Prodigy", *CUSTOM)}


def identities(optimizer: Optimizer) -> list[Any]:
    """Of groups, their lists, their parameters, and the parameters that have state."""
    groups = optimizer.param_groups
    return [
        id(groups),
        [(id(group), id(group["params"]), [*map(id, group["params"])]) for group in groups],
        [id(key) if isinstance(key, Tensor) else key for key in optimizer.state],
    ]


def with_gradients(level: str, make: Callable[[Any], Optimizer]) -> tuple[nn.Module, Optimizer]:
    """A model after a step, with gradients for the next one."""
    model, optimizer = started(level, make)
    train(NORMED_MLP, model, optimizer, "c")
    optimizer.zero_grad()
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)
    return model, optimizer


# --- taken ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "level"), [*((name, "O2") for name in ALL), *((name, "O5") for name in KINDS)])
def test_steps_are_those_of_the_class_on_float32_weights(level: str, name: str) -> None:
    model, optimizer = started(level, ALL[name])
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights_of(optimizer)]
    plain = ALL[name](copies)
    for index in range(3):
        step_beside(NORMED_MLP, model, optimizer, plain, index)
        assert_same_step(plain, masters(optimizer), copies)
        for param, master in zip(model.parameters(), masters(optimizer), strict=True):
            assert_bitwise(param, master.to(param.dtype))
    assert_same_step(
        plain, [frozen(optimizer.state[p]) for p in model.parameters()], [frozen(plain.state[p]) for p in copies]
    )


@pytest.mark.parametrize("name", ["SGD", "Sign", "Twice"])
@pytest.mark.parametrize("outcome", ["c", "o"])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_hooks_of_the_user_run_once_a_step_on_the_models_own_parameters(level: str, outcome: str, name: str) -> None:
    torch.optim.SGD([torch.zeros(1)])  # torch gives a class's step its hooks when the first object is made
    model, optimizer = started(level, ALL[name], skip_on_overflow=True)
    calls: list[tuple[str, bool, list[int]]] = []
    params = [*map(id, model.parameters())]
    for when in ("pre", "post"):
        getattr(optimizer, f"register_step_{when}_hook")(
            lambda self, args, kwargs, when=when: calls.append((when, self is optimizer, [*map(id, entries_of(self))]))
        )
    train(NORMED_MLP, model, optimizer, outcome)
    assert (calls[0], calls[-1]) == (("pre", True, params), ("post", True, params))
    is_nested = name == "Twice" and outcome == "c"
    assert len(calls) == (6 if is_nested else 2), "torch runs them around each super().step() as well"


# --- a step that raises -----------------------------------------------------------------------------------------------


def by_itself(optimizer: Optimizer, error: type[BaseException]) -> None:
    optimizer.error = error  # type: ignore[attr-defined]


def by_a_post_hook(optimizer: Optimizer, error: type[BaseException]) -> None:
    def hook(*_: Any) -> None:
        handle.remove()
        raise error

    handle = optimizer.register_step_post_hook(hook)


ENGINE_CALLS: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "scale_loss": lambda model, optimizer: backward(NORMED_MLP.loss(model, NORMED_MLP.batch(2)), optimizer),
    "step": lambda model, optimizer: optimizer.step(),
    "master_params": lambda model, optimizer: list(amp.master_params(optimizer)),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "clip_grad_norm_": lambda model, optimizer: amp.clip_grad_norm_(optimizer, 1.0),
    "close": lambda model, optimizer: amp.close(),
}


@pytest.mark.parametrize("call", ENGINE_CALLS)
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("raises", [by_itself, by_a_post_hook])
def test_the_call_after_a_step_that_raised_finds_groups_and_state_as_they_were(
    raises: Any, error: type[BaseException], call: str
) -> None:
    model, optimizer = with_gradients("O2", lambda params: Raises(params, lr=0.1, momentum=0.9))
    before = identities(optimizer)
    raises(optimizer, error)
    with pytest.raises(error):
        optimizer.step()
    ENGINE_CALLS[call](model, optimizer)
    assert identities(optimizer) == before
    assert all(value.dtype == torch.float32 for of in optimizer.state.values() for value in of.values())


# --- skipped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("level", ["O2", "O4"])
def test_a_skip_changes_neither_weights_nor_groups_nor_state(level: str, name: str, is_first: bool) -> None:
    model, optimizer = started(level, ALL[name])
    if not is_first:
        train(NORMED_MLP, model, optimizer, "cc")
    optimizer.zero_grad()
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(2)), optimizer, overflow=True)
    before, same = snapshot(model, optimizer), identities(optimizer)
    grads = [p.grad for p in model.parameters()]
    optimizer.step()
    assert amp.last_step(optimizer).skipped
    assert identities(optimizer) == same
    assert_bitwise(snapshot(model, optimizer), before)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    train(NORMED_MLP, model, optimizer, "c", first=3)
    assert not amp.last_step(optimizer).skipped
    after = snapshot(model, optimizer)
    assert not torch.equal(after["masters"][0], before["masters"][0])


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        "masters": masters(optimizer),
        "model": [p.detach().clone() for p in model.parameters()],
        "state": [frozen(value) for value in optimizer.state.values()],
        "groups": [frozen({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups],
    }


@pytest.mark.parametrize("name", ALL)
def test_a_run_with_skips_is_the_run_without_those_batches(name: str) -> None:
    ends = []
    for outcomes in ("coc", "cc"):
        model, optimizer = started("O2", ALL[name], loss_scale=128.0, skip_on_overflow=True)
        for index, outcome in zip((0, 5, 1) if "o" in outcomes else (0, 1), outcomes, strict=True):
            train(NORMED_MLP, model.eval(), optimizer, outcome, first=index)  # no batch norm sees the batch
        ends.append(snapshot(model, optimizer))
        amp.close()
    assert_bitwise(*ends)


# --- closures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_keyword", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Sign", "Twice"])
@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_step_with_a_closure_returns_its_loss_and_is_the_step_without(
    level: str, name: str, as_keyword: bool
) -> None:
    ends, losses = [], []
    for has_closure in (True, False):
        model, optimizer = started(level, ALL[name])
        for index in range(2):

            def closure(model: nn.Module = model, optimizer: Optimizer = optimizer, index: int = index) -> Tensor:
                assert torch.is_grad_enabled()
                optimizer.zero_grad()
                loss = NORMED_MLP.loss(model, NORMED_MLP.batch(index))
                loss.backward()
                losses.append(loss.detach())
                return loss

            if has_closure:
                returned = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)  # type: ignore
                assert_bitwise(returned, losses[-1])
            else:
                closure()
                optimizer.step()
        ends.append(snapshot(model, optimizer))
        amp.close()
    assert len(losses) == 4, "each closure was called once"
    torch.testing.assert_close(losses[:2], losses[2:])
    torch.testing.assert_close(*ends, rtol=2e-6, atol=2e-7)  # at O0 and O4 torch steps where there is a closure


@pytest.mark.parametrize("name", ["SGD", "Sign"])
def test_a_closure_that_leaves_what_is_not_finite_is_skipped_and_its_loss_returned(name: str) -> None:
    model, optimizer = started("O5", ALL[name])
    before = masters(optimizer)

    def closure() -> Tensor:
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch())
        (loss * torch.inf).backward()
        return loss.detach()

    assert torch.isfinite(optimizer.step(closure))  # type: ignore[arg-type]
    assert amp.last_step(optimizer).skipped
    assert_bitwise(masters(optimizer), before)


def test_a_class_that_calls_its_closure_several_times_is_refused_beside_masters_alone() -> None:
    with pytest.raises(AmpStateError, match="Choose opt_level='O4'"):
        started("O5", lambda params: torch.optim.LBFGS(params, max_iter=3))
    model, optimizer = started("O4", lambda params: torch.optim.LBFGS(params, max_iter=3))
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch())
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    assert len(losses) > 1
    assert losses[-1] < losses[0]


# --- checkpoints ------------------------------------------------------------------------------------------------------

# Of the others, torch cannot load state under names, and Prodigy's groups have numbers that follow the gradients.
SAVED = {name: make for name, make in KINDS.items() if name not in ("CountsInState", "Prodigy")}


def plain_after(make: Callable[[Any], Optimizer], steps: int) -> tuple[nn.Module, Optimizer]:
    """Plain torch in FP32."""
    model = NORMED_MLP.model()
    optimizer = make(model.parameters())
    for index in range(steps):
        optimizer.zero_grad()
        NORMED_MLP.loss(model, NORMED_MLP.batch(index)).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_plain_torch_loads_what_we_save_and_we_what_it_saves_to_the_last_bit(level: str, name: str) -> None:
    model, optimizer = started(level, SAVED[name])
    train(NORMED_MLP, model, optimizer, "cc")
    plain_model, plain = plain_after(SAVED[name], 1)
    saved = frozen(optimizer.state_dict())
    plain.load_state_dict(optimizer.state_dict())
    plain_model.load_state_dict(model.state_dict())
    assert_bitwise(frozen(plain.state_dict()), saved)
    assert_bitwise([p.detach() for p in plain_model.parameters()], masters(optimizer))

    plain.zero_grad()
    NORMED_MLP.loss(plain_model, NORMED_MLP.batch(2)).backward()
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    model.load_state_dict(plain_model.state_dict())
    assert_bitwise(frozen(optimizer.state_dict()), frozen(plain.state_dict()))
    assert_bitwise(masters(optimizer), [p.detach() for p in plain_model.parameters()])
    assert entries_of(optimizer) == list(model.parameters())
    assert [p.dtype for p in model.parameters()].count(WEIGHT_DTYPE[level]) == 3
