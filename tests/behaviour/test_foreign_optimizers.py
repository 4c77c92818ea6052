"""Optimizers that are not ours: a skip leaves all of them alone, a step that raises hurts nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from torch import nn
from torch.optim import Optimizer

from amp_engine import AmpStateError, amp
from amp_engine.optimizers import FusedAdam
from tests.models import MLP, NORMED_MLP
from tests.support import (
    LEVELS,
    MASTER_LEVELS,
    assert_bitwise,
    assert_same_step,
    backward,
    frozen,
    group_params,
    masters,
    optimizer_values,
    step_beside,
    train,
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


class RefusesEmptyGroups(CountsInGroup):
    """Raises when a group holds no parameter with a gradient, as Adai and AdamS do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = sum(p.grad is not None for group in self.param_groups for p in group["params"])
        if count == 0:
            raise ZeroDivisionError("no parameter has a gradient")
        super().step()


class CallsSuper(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class CallsSuperTwice(CallsSuper):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class CountsInItself(CountsInGroup):
    """Keeps its step number as an attribute of the optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.steps += 1


def schedule_free(params: Any) -> Optimizer:
    optimizer = schedulefree.AdamWScheduleFree(params, lr=0.01, warmup_steps=4)
    optimizer.train()
    return optimizer


def schedule_free_sgd(params: Any) -> Optimizer:
    optimizer = schedulefree.SGDScheduleFree(params, lr=0.1)
    optimizer.train()
    return optimizer


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "Adam amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "Adam foreach": lambda params: torch.optim.Adam(params, foreach=True),
    "Adam fused": lambda params: torch.optim.Adam(params, fused=True),
    "AdamW": torch.optim.AdamW,
    "AdamW tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-3)),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=1e-2),
    "schedulefree.AdamWScheduleFree": schedule_free,
    "schedulefree.SGDScheduleFree": schedule_free_sgd,
    "prodigyopt.Prodigy": lambda params: prodigyopt.Prodigy(params, weight_decay=1e-2),
    "counts in its groups": CountsInGroup,
    "counts in itself": CountsInItself,
    "refuses empty groups": RefusesEmptyGroups,
    "calls super().step()": CallsSuper,
    "calls super().step() twice removed": CallsSuperTwice,
}


def started(maker: str, level: str) -> tuple[nn.Module, Optimizer]:
    model = NORMED_MLP.model()
    names = dict(model.named_parameters())
    groups = [
        {"params": [param for name, param in names.items() if name.endswith("weight")]},
        {"params": [param for name, param in names.items() if name.endswith("bias")]},
    ]
    optimizer = MAKERS[maker](groups)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, (int, float))}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", ["", "cc"], ids=["first step", "later step"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_skip_leaves_parameters_state_and_group_entries_alone(maker: str, first: str, level: str) -> None:
    model, optimizer = started(maker, level)
    train(NORMED_MLP, model, optimizer, first)
    before, own = optimizer_values(optimizer), attributes(optimizer)
    halves = frozen(dict(model.named_parameters()))
    groups = [id(group) for group in optimizer.param_groups]
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(9)), optimizer, overflow=True)
    assert optimizer.step() is None
    assert_bitwise(optimizer_values(optimizer), before)
    assert_bitwise(frozen(dict(model.named_parameters())), halves)
    assert attributes(optimizer) == own
    assert [id(group) for group in optimizer.param_groups] == groups


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("maker", MAKERS)
def test_steps_around_a_skip_are_bitwise_those_without_it(maker: str, level: str) -> None:
    def run(script: str) -> dict[str, Any]:
        model, optimizer = started(maker, level)
        index = 0
        for outcome in script:
            if outcome == "h":
                amp._amp_state.loss_scalers[0]._loss_scale /= 2
            else:
                model.eval()
                train(NORMED_MLP, model, optimizer, outcome, first=index)
                index += outcome == "c"
        values = optimizer_values(optimizer)
        amp.close()
        return values

    assert_bitwise(run("ococc"), run("hchcc"))


@pytest.mark.parametrize("maker", MAKERS)
def test_masters_at_o2_take_the_step_of_the_bare_optimizer(maker: str) -> None:
    """The optimizer, given the masters and their gradients, without any engine, does the same.

    Bit by bit, but for Adam, whose fused step rounds at other places than torch's (tests/kernels holds it to float64).
    """
    model, optimizer = started(maker, "O2")
    start = [[param.detach().clone() for param in g["params"]] for g in optimizer.param_groups]
    bare = MAKERS[maker]([{"params": [nn.Parameter(value) for value in group]} for group in start])
    for index in range(3):
        step_beside(NORMED_MLP, model, optimizer, bare, index)
    assert_same_step(optimizer, masters(optimizer), [param.detach() for param in group_params(bare)])


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_lbfgs_runs_its_closure_where_there_is_nothing_to_scale(level: str) -> None:
    model = MLP.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = MLP.loss(model, MLP.batch())
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


class NeedsClosure(torch.optim.SGD):
    """As LBFGS, by another name of its own."""

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
    with pytest.raises(AmpStateError, match=rf"{kind.__name__}.step\(closure\)"):
        amp.init().wrap_optimizer(optimizer)


def test_group_entries_written_by_a_real_step_stay() -> None:
    model, optimizer = started("counts in its groups", "O2")
    train(NORMED_MLP, model, optimizer, "ccoc")
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert [group["history"] for group in optimizer.param_groups] == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("maker", ["calls super().step()", "calls super().step() twice removed"])
def test_a_subclass_that_calls_super_steps_once(maker: str, level: str) -> None:
    model, optimizer = started(maker, level)
    train(NORMED_MLP, model, optimizer, "ccc")
    assert {state["step"].item() for state in optimizer.state.values()} == {3.0}


# --- a step that raises ---------------------------------------------------------------------------


class RaisesOnce(CountsInGroup):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.fuse = 0

    def step(self, closure: Any = None) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise OSError("the step failed")
        super().step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("earlier", ["", "c"], ids=["first step", "second step"])
def test_a_step_that_raises_leaves_gradients_and_flags_and_the_next_one_works(level: str, earlier: str) -> None:
    def run(*, failing: bool) -> list[torch.Tensor]:
        model = NORMED_MLP.model()
        optimizer = RaisesOnce(model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        train(NORMED_MLP, model, optimizer, earlier)
        optimizer.zero_grad()
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)
        gradients = [param.grad.clone() for param in amp.master_params(optimizer)]
        if failing:
            before = masters(optimizer)
            optimizer.fuse = 1
            with pytest.raises(OSError, match="the step failed"):
                optimizer.step()
            assert_bitwise(masters(optimizer), before)
            assert_bitwise([param.grad for param in amp.master_params(optimizer)], gradients)
            expected = {"O1": torch.float16, "O4": torch.bfloat16}.get(level, torch.float32)
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == expected
        optimizer.step()
        train(NORMED_MLP, model, optimizer, "c", first=2)
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(failing=True), run(failing=False))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_hooks_of_the_user_see_the_gradients_and_run_once_a_step(level: str) -> None:
    model = NORMED_MLP.model()
    optimizer = torch.optim.AdamW(model.parameters())
    seen: dict[str, list[Any]] = {"before": [], "after": [], "later": []}

    def grads(opt: Optimizer) -> list[bool]:
        return [param.grad is not None for param in group_params(opt)]

    optimizer.register_step_pre_hook(lambda opt, a, k: seen["before"].append(grads(opt)))
    optimizer.register_step_post_hook(lambda opt, a, k: seen["after"].append(opt))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.register_step_pre_hook(lambda opt, a, k: seen["later"].append(1))
    train(NORMED_MLP, model, optimizer, "cc")
    assert seen["before"] == [[True] * 5] * 2
    assert len(seen["after"]) == len(seen["later"]) == 2


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
            if group_params(self):  # a step without parameters is nobody's step
                seen.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
            super().step()

    model = MLP.model()
    optimizer = Multiplies(model.parameters())
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    train(MLP, model, optimizer, "c")
    assert seen == [torch.float32]


def test_the_value_of_a_real_step_is_free_and_of_a_skipped_one_none() -> None:
    model, optimizer = started("SGD", "O2")
    backward(MLP.loss(model, MLP.batch()), optimizer, overflow=True)
    assert optimizer.step() is None


# --- refused by name ------------------------------------------------------------------------------


class Sharded(Optimizer):
    """Steps the groups of an inner optimizer, not its own, as ZeroRedundancyOptimizer does."""

    def __init__(self, params: Any, attribute: str) -> None:
        super().__init__(params, {"lr": 0.1})
        inner = torch.optim.SGD(group_params(self), lr=0.1)
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


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_schedule_free_eval_reaches_the_model_and_train_brings_it_back(level: str) -> None:
    model = MLP.model()
    optimizer = schedulefree.SGDScheduleFree(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.train()
    train(MLP, model, optimizer, "cccccc")
    inputs = MLP.batch()[0]
    in_training = model(inputs)
    optimizer.eval()
    averaged = MLP.model()
    averaged.load_state_dict(model.state_dict())
    in_evaluation = model(inputs)
    torch.testing.assert_close(in_evaluation, averaged(inputs), rtol=0.02, atol=0.01)
    assert (in_evaluation - in_training).abs().max() > 0.03
    optimizer.train()
    torch.testing.assert_close(model(inputs), in_training, rtol=1e-3, atol=1e-3)


# --- torch.amp.GradScaler -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["unscaled", "not unscaled", "clipped"])
@pytest.mark.parametrize("made", ["AdamW", "fused AdamW", "FusedAdam", "RMSprop"])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_grad_scaler_that_would_step_masters_without_gradients_says_what_to_write(
    level: str, made: str, how: str
) -> None:
    model = MLP.model()
    optimizer = {
        "AdamW": lambda params: torch.optim.AdamW(params),
        "fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
        "FusedAdam": lambda params: FusedAdam(params),
        "RMSprop": lambda params: torch.optim.RMSprop(params),
    }[made](model.parameters())
    attributes = dict(vars(optimizer))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(MLP.loss(model, MLP.batch())).backward()
    if how != "not unscaled":
        scaler.unscale_(optimizer)
    if how == "clipped":
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    with pytest.raises(AmpStateError, match=r"torch.amp.GradScaler.*use `with amp.scale_loss\(loss, optimizer\)"):
        scaler.step(optimizer)
    for attribute in ("found_inf", "grad_scale"):
        vars(optimizer).pop(attribute, None)  # which GradScaler leaves where a step raises
    train(MLP, model, optimizer, "c")
    assert not copy.deepcopy(vars(optimizer).get("_step_supports_amp_scaling")) or made == "fused AdamW"
    amp.close()
    assert vars(optimizer).keys() == attributes.keys()
    assert vars(optimizer).get("_step_supports_amp_scaling") is attributes.get("_step_supports_amp_scaling")


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_grad_scaler_that_is_off_or_around_scale_loss_steps(level: str) -> None:
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=1.0)):
        model = MLP.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        before = masters(optimizer)
        backward(scaler.scale(MLP.loss(model, MLP.batch())), optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(masters(optimizer)[0], before[0])
        amp.close()
