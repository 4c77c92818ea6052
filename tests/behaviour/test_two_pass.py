"""The step that unscales, clips, updates and writes half weights in one pass is the step of torch's optimizer."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import amp, kernels
from amp_engine.ground.devices import HostNumbers
from amp_engine.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests import support
from tests.models import MLP, NORMED_MLP
from tests.support import (
    assert_bitwise,
    assert_same_step,
    backward,
    entries_of,
    frozen,
    left_alone,
    masters,
    optimizer_values,
    train,
    weights_of,
)

Make = Callable[[Any], Optimizer]

native_only = pytest.mark.skipif(
    not kernels.has_native(torch.device("cpu")), reason="without kernels every flag is waited for"
)
OVERFLOW = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to"


class CallsSuper(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=1e-2),
    "FusedAdam": lambda p: FusedAdam(p, lr=1e-2, weight_decay=1e-1),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=1e-2),
    "FusedLAMB": lambda p: FusedLAMB(p, lr=1e-2),
    "FusedNovoGrad": lambda p: FusedNovoGrad(p, lr=1e-2, weight_decay=1e-2),
    "FusedAdagrad": lambda p: FusedAdagrad(p, lr=1e-2, weight_decay=1e-2),
}

VARIANTS: dict[str, Make] = OPTIMIZERS | {
    "Adam without decay": torch.optim.Adam,
    "Adam maximize": lambda p: torch.optim.Adam(p, maximize=True, weight_decay=1e-2),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adam decoupled": lambda p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "AdamW tensor betas": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(1e-2), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "AdamW amsgrad maximize": lambda p: torch.optim.AdamW(p, amsgrad=True, maximize=True),
    "AdamW calls super": lambda p: CallsSuper(p, lr=1e-2),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, maximize=True, weight_decay=1e-2),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "SGD tensor lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9),
    "one group amsgrad": lambda p: torch.optim.AdamW([p[0], p[1] | {"amsgrad": True}]),
    "one group momentum": lambda p: torch.optim.SGD([p[0], p[1] | {"momentum": 0.9}], lr=0.05),
    "a rate each": lambda p: torch.optim.AdamW([p[0] | {"lr": 1e-2, "betas": (0.5, 0.9)}, p[1] | {"weight_decay": 0}]),
    "RMSprop": torch.optim.RMSprop,
}


def grouped(params: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Return two groups: matrices, and the rest."""
    params = list(params)
    return [{"params": [p for _, p in params if p.ndim == 2]}, {"params": [p for _, p in params if p.ndim != 2]}]


def started(
    make: Make, level: str = "O2", task: Any = NORMED_MLP, engine: Any = amp, **keywords: Any
) -> tuple[nn.Module, Optimizer]:
    model = task.model()
    optimizer = make(grouped(model.named_parameters()))
    engine.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **keywords})
    return model, optimizer


def seen_backward(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> dict[Tensor, Tensor]:
    """Run one backward; return the half gradients as they were in the body, still scaled."""
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        return {param: param.grad.clone() for param in model.parameters() if param.grad is not None}


def was_skipped(optimizer: Optimizer) -> bool:
    engine = amp.current_engine()
    assert engine is not None
    return engine.step_was_skipped(optimizer)


class Lockstep:
    """An optimizer in the engine beside a bare one, which gets FP32 parameters and the same gradients, unscaled."""

    def __init__(self, name: str, level: str = "O2", task: Any = NORMED_MLP, **keywords: Any) -> None:
        self.name, self.task, self.taken = name, task, 0
        self.model, self.optimizer = started(VARIANTS[name], level, task, **keywords)
        self.bare_params = {n: nn.Parameter(p.detach().clone()) for n, p in self.task.model().named_parameters()}
        self.bare = VARIANTS[name](grouped(self.bare_params.items()))

    @property
    def both(self) -> tuple[Optimizer, Optimizer]:
        return self.optimizer, self.bare

    def exit(self) -> None:
        """A backward, into both."""
        for optimizer in self.both:
            optimizer.zero_grad(set_to_none=True)
        scale = amp._amp_state.loss_scalers[0].loss_scale()
        loss = self.task.loss(self.model, self.task.batch(self.taken))
        halves = seen_backward(self.model, self.optimizer, loss)
        for name, param in self.model.named_parameters():
            if param in halves:
                self.bare_params[name].grad = halves[param].float() / scale
        self.taken += 1

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.exit()
            for optimizer in self.both:
                optimizer.step()

    def check(self) -> None:
        """Weights, half weights, state and its form are those of the bare optimizer."""
        for param, master in zip(
            [p for group in grouped(self.model.named_parameters()) for p in group["params"]],
            weights_of(self.optimizer),
            strict=True,
        ):
            assert_bitwise(param.detach(), master.detach().to(param.dtype))
        self.assert_same(masters(self.optimizer), masters(self.bare))
        for ours, theirs in zip(*(entries_of(optimizer) for optimizer in self.both), strict=True):
            self.assert_same_state(self.optimizer.state.get(ours, {}), self.bare.state.get(theirs, {}))
        self.assert_same_state_dict(self.optimizer.state_dict(), self.bare.state_dict())

    def assert_same(self, ours: Any, theirs: Any) -> None:
        if "fused" in self.name or self.name.startswith("one group"):
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-7)
        else:
            assert_same_step(self.optimizer, ours, theirs)

    def assert_same_state(self, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            if isinstance(value, Tensor):
                assert (ours[key].dtype, ours[key].shape, ours[key].device) == (value.dtype, value.shape, value.device)
                assert key == "step" or ours[key].stride() == value.stride()
            self.assert_same(ours[key], value)

    def assert_same_state_dict(self, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        assert list(ours) == list(theirs)
        assert_bitwise(ours["param_groups"], theirs["param_groups"])
        assert set(ours["state"]) == set(theirs["state"])
        for index, state in theirs["state"].items():
            self.assert_same_state(ours["state"][index], state)


# --- the step of torch ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "level"), [*((name, "O2") for name in VARIANTS), *((name, "O5") for name in OPTIMIZERS)]
)
def test_weights_and_state_are_those_of_the_bare_optimizer(name: str, level: str) -> None:
    pair = Lockstep(name, level)
    for _ in range(3):
        pair.step()
        pair.check()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "another default device": lambda: torch.device("meta"),
    "another default type": lambda: default_dtype(torch.float64),
    "a half default type": lambda: default_dtype(torch.float16),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu"),
}


@pytest.mark.parametrize("name", ["AdamW", "FusedLAMB"])
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_exit_clip_and_step_give_the_same_bits_in_any_surroundings(surrounding: str, name: str) -> None:
    if surrounding == "another default device" and name == "AdamW" and not kernels.has_native(torch.device("cpu")):
        pytest.skip("torch's own AdamW, which steps without compiled kernels, may fail under another default device")

    def run(around: Callable[[], Any]) -> list[Tensor]:
        model, optimizer = started(OPTIMIZERS[name])
        for index in range(2):
            optimizer.zero_grad(set_to_none=True)
            context = amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
            context.__enter__().backward()
            with around():
                context.__exit__(None, None, None)
                amp.clip_grad_norm_(optimizer, 0.1)
                optimizer.step()
        values = [*masters(optimizer), *frozen(list(model.parameters()))]
        amp.close()
        return values

    assert_bitwise(run(SURROUNDINGS[surrounding]), run(nullcontext))


# --- what users do to an optimizer between steps --------------------------------------------------


def states(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state[param] for param in entries_of(optimizer)]


def replace_state(optimizer: Optimizer) -> None:
    for state in states(optimizer):
        for key, value in state.items():
            if key != "step":
                state[key] = value * 0.5


def replace_one_state(optimizer: Optimizer) -> None:
    state = states(optimizer)[1]
    key = [key for key in state if key != "step"][-1]
    state[key] = state[key].clone().fill_(0.25)


def clear_state(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def empty_one_state_and_drop_another(optimizer: Optimizer) -> None:
    states(optimizer)[1].clear()
    del optimizer.state[entries_of(optimizer)[2]]


def new_state(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def copied_inner_dicts(optimizer: Optimizer) -> None:
    for param in entries_of(optimizer):
        optimizer.state[param] = dict(optimizer.state[param])


def swapped_inner_dicts(optimizer: Optimizer) -> None:
    """Swap the state of the first bias of NormedMlp's second group and the batch norm's, which have one shape."""
    alike = [p for p in entries_of(optimizer) if p.shape == (16,)]
    first, second = (optimizer.state[p] for p in alike[:2])
    optimizer.state[alike[0]], optimizer.state[alike[1]] = second, first


def pop_buffers(optimizer: Optimizer) -> None:
    for state in states(optimizer):
        state.pop("momentum_buffer")


def forget_one_buffer(optimizer: Optimizer) -> None:
    states(optimizer)[1]["momentum_buffer"] = None


def replace_steps(optimizer: Optimizer) -> None:
    for state in states(optimizer):
        state["step"] = torch.tensor(20.0)


def write_one_step(optimizer: Optimizer) -> None:
    states(optimizer)[2]["step"] += 5


def change_group(key: str, value: Any) -> Callable[[Optimizer], None]:
    def change(optimizer: Optimizer) -> None:
        optimizer.param_groups[0][key] = value

    change.__name__ = f"{key}={value}"
    return change


def copied_state_dict(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))


def edited_state_dict(optimizer: Optimizer) -> None:
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                value.mul_(2 if key == "step" else 0.5)
    for group in state_dict["param_groups"]:
        group["lr"] = 2e-3
    optimizer.load_state_dict(state_dict)


def reverse_params(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["params"].reverse()


def swap_groups(optimizer: Optimizer) -> None:
    optimizer.param_groups.reverse()


def new_group_dict(optimizer: Optimizer) -> None:
    optimizer.param_groups[0] = dict(optimizer.param_groups[0], lr=2e-3)


EMPTYING = [
    clear_state,
    empty_one_state_and_drop_another,
    new_state,
]
ANY_CHANGES = [
    *EMPTYING,
    copied_inner_dicts,
    swapped_inner_dicts,
    replace_state,
    replace_one_state,
    change_group("lr", 1e-3),
    change_group("lr", 0.0),
    change_group("weight_decay", 0.3),
    copied_state_dict,
    edited_state_dict,
    new_group_dict,
]
CHANGES = [
    *((name, change) for name in ("AdamW", "SGD momentum") for change in ANY_CHANGES),
    *(
        (name, change)
        for name in ("FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad")
        for change in (clear_state, replace_state, edited_state_dict)
    ),
    *(
        (name, change)
        for name in ("AdamW", "FusedAdam")
        for change in (
            replace_steps,
            write_one_step,
            change_group("betas", (0.5, 0.7)),
            change_group("eps", 1e-2),
        )
    ),
    *((name, change) for name in ("SGD momentum", "FusedSGD") for change in (pop_buffers, forget_one_buffer)),
    ("AdamW", change_group("maximize", True)),
    ("AdamW", change_group("lr", torch.tensor(3e-3))),
    *(
        (name, change)
        for name in ("SGD momentum", "FusedSGD")
        for change in (change_group("momentum", 0.5), change_group("momentum", 0.0), change_group("dampening", 0.0))
    ),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[f"{n}-{c.__name__}" for n, c in CHANGES])
def test_a_change_between_steps_counts_as_in_the_bare_optimizer(name: str, change: Any) -> None:
    pair = Lockstep(name)
    pair.step(2)
    for optimizer in pair.both:
        change(optimizer)
    pair.step(2)
    pair.check()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_state_that_lacks_an_entry_is_an_error_as_in_the_bare_optimizer(key: str, level: str) -> None:
    """torch starts anew where there is nothing, and raises where there is something else."""
    pair = Lockstep("AdamW", level)
    pair.step(2)
    pair.exit()
    before = optimizer_values(pair.optimizer)
    del before["state"][1][key]
    for optimizer in pair.both:
        del states(optimizer)[1][key]
        with pytest.raises(KeyError, match=key):
            optimizer.step()
    assert_bitwise(optimizer_values(pair.optimizer), before)


@pytest.mark.parametrize("name", ["AdamW", "FusedSGD"])
@pytest.mark.parametrize("change", [reverse_params, swap_groups])
@pytest.mark.parametrize("pending", [False, True])
def test_parameters_in_another_order_are_stepped_each_with_its_own(name: str, change: Any, pending: bool) -> None:
    pair = Lockstep(name)
    pair.step(2)
    if pending:
        pair.exit()
    for optimizer in pair.both:
        change(optimizer)
        if pending:
            optimizer.step()
    pair.step()
    pair.assert_same(masters(pair.optimizer), masters(pair.bare))


@pytest.mark.parametrize(("fused", "bare"), [("FusedAdam", "AdamW"), ("FusedSGD", "SGD momentum")])
def test_a_fused_optimizer_and_the_one_of_torch_load_each_others_state(fused: str, bare: str) -> None:
    start = Lockstep(bare)
    start.step(3)
    saved, values = copy.deepcopy(start.optimizer.state_dict()), masters(start.optimizer)
    weights = frozen(start.model.state_dict())
    amp.close()
    after = []
    for name in (fused, bare):
        model, optimizer = started(VARIANTS[name])
        model.load_state_dict(weights)
        own = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": copy.deepcopy(saved["state"]), "param_groups": own})
        assert_bitwise(masters(optimizer), values)
        train(NORMED_MLP, model, optimizer, "cc", first=3)
        after.append(masters(optimizer))
        amp.close()
    torch.testing.assert_close(*after, rtol=2e-6, atol=2e-7)


# --- weights that others write --------------------------------------------------------------------


def test_a_model_made_in_inference_mode_is_refused_and_left_alone() -> None:
    """torch does not train it either: its tensors count no versions."""
    with torch.inference_mode():
        model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with left_alone(model, optimizer), pytest.raises(RuntimeError, match="[Ii]nference"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


# --- skips ----------------------------------------------------------------------------------------


class Late:
    """`known` is True once flags have come from the device."""

    def __init__(self) -> None:
        self.known = False


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """The host knows no flag until `late.known` says so; waiting for a flag gives it as ever."""
    late, is_known = Late(), HostNumbers.is_known
    monkeypatch.setattr(HostNumbers, "is_known", lambda flag: late.known and is_known(flag))
    return late


@pytest.fixture(params=["known at once", "known late"])
def arrival(request: pytest.FixtureRequest) -> str:
    if request.param == "known late":
        request.getfixturevalue("late")
    return request.param


@pytest.mark.usefixtures("arrival")
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "FusedLAMB"])
@pytest.mark.parametrize("script", ["occ", "cooc"])
def test_steps_around_skips_are_bitwise_those_without_them(script: str, name: str) -> None:
    """Step counts and bias corrections included; what is skipped is the batch, and the scale is halved."""

    def run(script: str) -> tuple[Any, Any]:
        model, optimizer = started(OPTIMIZERS[name], task=MLP)
        index = 0
        for outcome in script:
            if outcome == "h":
                amp._amp_state.loss_scalers[0]._loss_scale /= 2
            else:
                train(MLP, model, optimizer, outcome, first=index)
                index += outcome == "c"
        values = optimizer_values(optimizer), frozen(optimizer.state_dict())
        amp.close()
        return values

    assert_bitwise(run(script), run(script.replace("o", "h")))


@pytest.mark.usefixtures("arrival")
def test_an_overflow_of_one_loss_skips_every_optimizer_of_it_and_no_other() -> None:
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    optimizers = [torch.optim.AdamW(layer.parameters()) for layer in model]
    amp.initialize(model, optimizers, opt_level="O2", num_losses=2, verbosity=0)

    def loss(*indices: int) -> Tensor:
        return sum(model[i](torch.ones(2, 4).half()).float().square().mean() for i in indices) / 8

    before = [masters(optimizer) for optimizer in optimizers]
    backward(loss(0, 1), optimizers[:2], overflow=True, loss_id=0)
    backward(loss(2), optimizers[2], loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
    assert [was_skipped(optimizer) for optimizer in optimizers] == [True, True, False]
    for optimizer, values in zip(optimizers[:2], before, strict=False):
        assert_bitwise(masters(optimizer), values)
    assert not torch.equal(masters(optimizers[2])[0], before[2][0])


@pytest.mark.usefixtures("arrival")
def test_state_loaded_after_a_skip_counts() -> None:
    def run(script: str) -> list[Tensor]:
        model, optimizer = started(OPTIMIZERS["AdamW"], task=MLP)
        train(MLP, model, optimizer, "cc")
        saved, weights = pickle.dumps(optimizer.state_dict()), frozen(model.state_dict())
        train(MLP, model, optimizer, script, first=2)
        amp._amp_state.loss_scalers[0]._loss_scale = 2.0**10
        model.load_state_dict(weights)
        optimizer.load_state_dict(pickle.loads(saved))
        train(MLP, model, optimizer, "c", first=4)
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run("o"), run(""))
    assert_bitwise(run("co"), run(""))


def float64_group(optimizer: Optimizer) -> nn.Module:
    return joined(optimizer, torch.ones(3, dtype=torch.float64))


def group_with_gaps(optimizer: Optimizer) -> nn.Module:
    return joined(optimizer, torch.ones(3, 4)[:, ::2])


def joined(optimizer: Optimizer, value: Tensor) -> nn.Module:
    """A module that was made since `initialize`."""
    module = nn.ParameterList([value])
    optimizer.add_param_group({"params": list(module)})
    return module


@pytest.mark.usefixtures("arrival")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("outcome", "oc")
@pytest.mark.parametrize("regroup", [float64_group, group_with_gaps])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_step_that_the_kernels_cannot_take_any_more_heeds_the_flag(
    name: str, regroup: Callable[[Optimizer], nn.Module], outcome: str, level: str
) -> None:
    model, optimizer = started(getattr(torch.optim, name), level)
    train(NORMED_MLP, model, optimizer, "c")
    optimizer.zero_grad()
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer, overflow=outcome == "o")
    joined_module = regroup(optimizer)  # which lives until the step
    before = masters(optimizer)
    joined_module[0].grad = torch.ones_like(joined_module[0])
    optimizer.step()
    del joined_module
    assert was_skipped(optimizer) == (outcome == "o")
    assert all(master.isfinite().all() for master in masters(optimizer))
    changed = [not torch.equal(now, was) for now, was in zip(masters(optimizer), before, strict=True)]
    assert any(changed) == (outcome == "c")
    train(NORMED_MLP, model, optimizer, "c", first=2)
    assert not was_skipped(optimizer)


@native_only
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clipping", [False, True])
def test_exit_clip_and_step_wait_for_nothing(
    name: str, clipping: bool, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(flag: HostNumbers, place: int = 0) -> float:
        raise AssertionError("the host waited for the device")

    model, optimizer = started(OPTIMIZERS[name], verbosity=1)
    monkeypatch.setattr(HostNumbers, "read", wait)
    for index, outcome in enumerate("cococ"):
        optimizer.zero_grad(set_to_none=True)
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer, overflow=outcome == "o")
        if clipping:
            amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    monkeypatch.undo()
    assert all(master.isfinite().all() for master in masters(optimizer))
    assert not was_skipped(optimizer)


# --- what is said about skips ---------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines printed since the last call, without post-mortems."""
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("Amp post-mortem")]


@native_only
def test_a_skip_is_announced_when_it_is_known_and_not_before(late: Late, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started(OPTIMIZERS["AdamW"], task=MLP, verbosity=1)
    said(capsys)
    train(MLP, model, optimizer, "co")
    assert said(capsys) == []
    late.known = True
    train(MLP, model, optimizer, "c", first=2)
    assert said(capsys) == [f"{OVERFLOW} 32768.0"]
    train(MLP, model, optimizer, "cc", first=3)
    assert said(capsys) == []


@pytest.mark.parametrize("script", ["o", "oo", "coco", "ooocoo"])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_known_late_is_said_as_if_known_at_once(
    script: str, count: int, late: Late, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same lines, with the scale of the time."""

    def run(*, known: bool) -> Counter[str]:
        late.known = known
        model = MLP.model()
        params = list(model.parameters())
        optimizers = [torch.optim.AdamW(params[i::count]) for i in range(count)]
        amp.initialize(model, optimizers, opt_level="O2")
        said(capsys)
        for index, outcome in enumerate(script + "c"):
            if index == len(script):
                late.known = True
            backward(MLP.loss(model, MLP.batch(index)), optimizers, overflow=outcome == "o")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        amp.close()
        return Counter(said(capsys))

    lines = run(known=False)
    assert lines == run(known=True)
    assert sum(lines.values()) == count * script.count("o")


# --- arguments that say nothing -------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_argument_that_the_class_does_not_know_changes_nothing_but_raises(level: str) -> None:
    model, optimizer = support.started(level, lambda params: torch.optim.AdamW(params, lr=0.1), MLP)
    backward(MLP.loss(model, MLP.batch(0)), optimizer)
    before = frozen(weights_of(optimizer))
    with pytest.raises(TypeError, match="scale"):
        optimizer.step(scale=None)
    assert_bitwise(frozen(weights_of(optimizer)), before)
    optimizer.step()
    assert not torch.equal(weights_of(optimizer)[0], before[0])


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms", "grad_scaler"])
def test_arguments_of_apex_that_are_none_are_those_of_step(name: str) -> None:
    results = []
    for keywords in ({}, {name: None}):
        model, optimizer = support.started("O2", lambda params: FusedAdam(params, lr=0.1), MLP)
        backward(MLP.loss(model, MLP.batch(0)), optimizer)
        optimizer.step(**keywords)
        results.append(frozen(weights_of(optimizer)))
        amp.close()
    assert_bitwise(*results)
