"""Inside of a module that is kept in float nothing is cast, its inputs are FP32, and nothing stays switched off."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_engine import amp
from amp_engine.casting.regions import is_outside
from amp_engine.errors import AmpRuntimeWarning, AmpStateError, AmpTypeError

from ..support import CAST_LEVELS, FUNCTION_LEVELS, HALF, assert_bitwise, backward, picture
from .cuda_autocast import Computation, cuda_autocast, on_cuda

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Products(nn.Module):
    """Every way to multiply: module, function, method, operator, and what the lists want in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.eye(4) * 0.7)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.linear(x), self.weight) @ self.weight
        return torch.mm(y.mm(self.weight), self.weight).softmax(-1) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = Products()
        self.tail = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(self.body(x))
        return self.tail(y), y


class Spy(nn.Module):
    """Notes what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.dtype:
        self.seen = args, kwargs
        return F.linear(X, X).dtype


@pytest.fixture(params=FUNCTION_LEVELS)
def low(request: pytest.FixtureRequest) -> torch.dtype:
    amp.initialize(nn.Linear(1, 1), opt_level=request.param, verbosity=0)
    return HALF[request.param]


def assert_casts_are_on(low: torch.dtype) -> None:
    assert is_outside()
    assert F.linear(X, X).dtype == low


# --- inside of its forward ------------------------------------------------------------------------


def test_nothing_is_cast_inside_and_everything_after(low: torch.dtype) -> None:
    model = Model()
    amp.keep_float(model.head)
    y, inside = model(X)
    x = model.body(X).float()
    with amp.disable_casts():
        expected = model.head(x)
    assert_bitwise(inside, expected)
    assert y.dtype == low
    assert_casts_are_on(low)


def test_low_precision_inputs_arrive_in_float32_in_any_container(low: torch.dtype) -> None:
    spy = amp.keep_float(Spy())
    half, double, number = X.to(low), X.double(), torch.tensor(1)
    packed = nn.utils.rnn.pack_sequence([half])
    packed_double = nn.utils.rnn.pack_sequence([double])
    assert spy(half, [half, (double,)], packed, packed_double, x={"y": half, "z": number}, s="s") == torch.float32
    (first, (second, (third,)), fourth, fifth), kwargs = spy.seen
    assert [t.dtype for t in (first, second, third, fourth.data, fifth.data)] == [
        torch.float32,
        torch.float32,
        torch.float64,
        torch.float32,
        torch.float64,
    ]
    assert (kwargs["x"]["y"].dtype, kwargs["x"]["z"], kwargs["s"]) == (torch.float32, number, "s")


def test_gradients_flow_through_the_input_cast(low: torch.dtype) -> None:
    model = Model()
    amp.keep_float(model.head)
    model(X)[1].pow(2).sum().backward()
    assert model.body.weight.grad is not None
    assert model.body.weight.grad.abs().sum() > 0


def test_kept_modules_nest(low: torch.dtype) -> None:
    model = Model()
    amp.keep_float(model)
    amp.keep_float(model.head)
    assert {y.dtype for y in model(X)} == {torch.float32}
    assert_casts_are_on(low)


def test_a_kept_module_may_call_itself(low: torch.dtype) -> None:
    class Recursive(nn.Module):
        def forward(self, depth: int) -> list[torch.dtype]:
            deeper = self(depth - 1) if depth else []
            return [*deeper, F.linear(X, X).dtype]

    assert set(amp.keep_float(Recursive())(3)) == {torch.float32}
    assert_casts_are_on(low)


def test_other_threads_go_on_casting(low: torch.dtype) -> None:
    class Waiting(nn.Module):
        def forward(self) -> list[torch.dtype]:
            found: list[torch.dtype] = []
            thread = threading.Thread(target=lambda: found.append(F.linear(X, X).dtype))
            thread.start()
            thread.join()
            return [*found, F.linear(X, X).dtype]

    assert amp.keep_float(Waiting())() == [low, torch.float32]


# --- errors ---------------------------------------------------------------------------------------


class Raises(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def forward(self, *args: Any) -> None:
        raise self.error


def raising(*args: Any) -> None:
    raise KeyError


def test_an_error_inside_leaves_nothing_switched_off(low: torch.dtype) -> None:
    with pytest.raises(KeyError):
        amp.keep_float(Raises(KeyError))()
    assert_casts_are_on(low)


@pytest.mark.parametrize("prepend", [True, False])
@pytest.mark.parametrize("where", ["register_forward_pre_hook", "register_forward_hook"])
def test_an_error_in_a_hook_leaves_nothing_switched_off(where: str, prepend: bool, low: torch.dtype) -> None:
    inner, outer = amp.keep_float(Spy()), amp.keep_float(nn.Sequential())
    getattr(inner, where)(raising, prepend=prepend)
    outer.append(inner)
    with pytest.raises(KeyError):
        outer(X)
    assert_casts_are_on(low)


def test_an_error_inside_that_is_caught_leaves_the_outer_module_kept(low: torch.dtype) -> None:
    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = amp.keep_float(Raises(KeyError))
            self.inner.register_forward_pre_hook(raising, prepend=True)

        def forward(self) -> torch.dtype:
            with pytest.raises(KeyError):
                self.inner()
            return F.linear(X, X).dtype

    assert amp.keep_float(Catches())() == torch.float32


def test_after_a_keyboard_interrupt_the_next_iteration_casts(low: torch.dtype) -> None:
    model = amp.keep_float(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize([], optimizer, opt_level="O1" if low is torch.float16 else "O4", verbosity=0)
    with pytest.raises(KeyboardInterrupt):
        amp.keep_float(nn.Sequential(amp.keep_float(Raises(KeyboardInterrupt))))(X)
    backward(model(X).sum(), optimizer)
    assert_casts_are_on(low)


def test_after_a_keyboard_interrupt_the_next_evaluation_casts(low: torch.dtype) -> None:
    kept = amp.keep_float(nn.Sequential(amp.keep_float(nn.Linear(4, 4))))
    with pytest.raises(KeyboardInterrupt):
        amp.keep_float(nn.Sequential(amp.keep_float(Raises(KeyboardInterrupt))))(X)
    with torch.no_grad():
        assert kept(X).dtype == torch.float32
    assert_casts_are_on(low)


@pytest.mark.parametrize("what", ["close", "initialize"])
def test_a_keyboard_interrupt_leaves_nothing_behind_close_and_initialize(low: torch.dtype, what: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        amp.keep_float(Raises(KeyboardInterrupt))(X)
    if what == "close":
        amp.close()
        assert is_outside()
    else:
        model = nn.Linear(4, 4)
        amp.initialize(model, opt_level="O1" if low is torch.float16 else "O4", verbosity=0)
        assert_casts_are_on(low)


# Made outside, so that they know nothing of the region that they are entered in.
AUTOCASTS = {
    "cuda": torch.autocast("cuda", enabled=False),
    "cuda, bfloat16": torch.autocast("cuda", dtype=torch.bfloat16, enabled=False),
}


@pytest.mark.parametrize("autocast", AUTOCASTS)
def test_an_autocast_of_another_device_inside_switches_nothing_on(low: torch.dtype, autocast: str) -> None:
    class Guarded(Products):
        forward = AUTOCASTS[autocast](Products.forward)

    torch.manual_seed(0)
    module = Guarded()
    with amp.disable_casts():
        expected = Products.forward(module, X)
    with amp.disable_casts():
        assert_bitwise(module(X), expected)
    assert_bitwise(amp.keep_float(module)(X), expected)
    assert_casts_are_on(low)


def test_an_autocast_for_a_gpu_that_is_left_around_the_model_casts_here_too(low: torch.dtype) -> None:
    """So the warning of it says."""

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, x)

    module, x = amp.keep_float(Product()), on_cuda(X)
    with Computation():
        assert module(x).dtype == torch.float32
        with cuda_autocast(low):
            with pytest.warns(AmpRuntimeWarning, match="on a GPU also in modules of amp.keep_float"):
                F.linear(x, x)
            assert module(x).dtype == low


# --- on and off -----------------------------------------------------------------------------------


def test_it_works_before_and_after_initialize_and_is_undone() -> None:
    model = Model()
    before = picture(model)
    assert amp.keep_float(model.head) is model.head
    amp.keep_float(model.head)
    amp.initialize(model, opt_level="O4", verbosity=0)
    assert model(X)[1].dtype == torch.float32
    amp.keep_float(model.head, False)
    assert model(X)[0].dtype == torch.bfloat16
    assert model.head.linear(X).dtype == torch.bfloat16
    amp.keep_float(model.head, False)
    amp.close()
    assert_bitwise(picture(model), before)
    assert model.head._forward_hooks_always_called == model.head._forward_pre_hooks_with_kwargs == {}


def test_hooks_of_others_stay_when_it_is_undone() -> None:
    module = nn.Linear(4, 4)
    calls: list[str] = []
    module.register_forward_pre_hook(lambda *args: calls.append("before"))
    amp.keep_float(module)
    module.register_forward_hook(lambda *args: calls.append("after"))
    amp.keep_float(module, False)
    module(X)
    assert calls == ["before", "after"]


def test_it_does_nothing_where_no_casts_are_on() -> None:
    spy = amp.keep_float(Spy())
    spy(X.half())
    assert spy.seen[0][0].dtype == torch.float16
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    amp.close()
    spy(X.half())
    assert spy.seen[0][0].dtype == torch.float16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_is_kept_and_can_be_taken_back_by_itself(copied: Callable[[Any], Any], low: torch.dtype) -> None:
    model = Model()
    amp.keep_float(model.head)
    other = copied(model)
    assert_bitwise(other(X)[1], model(X)[1])
    amp.keep_float(other.head, False)
    assert other.head.linear(X).dtype == low
    assert not torch.equal(other(X)[1], model(X)[1])


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(AmpTypeError, match=r"not a builtin_function_or_method.*register_float_function"):
        amp.keep_float(torch.mm)  # type: ignore[type-var]


# --- recomputation and compilers ------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A checkpoint inside of the kept module's forward, whose recomputation passes none of its hooks."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.products, self.use_reentrant = Products(), use_reentrant
        self.seen: list[torch.dtype] = []

    def run(self, x: Tensor) -> Tensor:
        self.seen.append((x @ x.t()).dtype)
        return self.products(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_inside_is_recomputed_without_casts(use_reentrant: bool, low: torch.dtype) -> None:
    module = amp.keep_float(Checkpointed(use_reentrant))
    module(X.clone().requires_grad_()).pow(2).sum().backward()
    assert module.seen == [torch.float32] * 2
    assert_casts_are_on(low)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_gives_the_same_gradients(use_reentrant: bool, low: torch.dtype) -> None:
    model = Model()
    amp.keep_float(model.head)
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
        model.zero_grad()
        sum(y.float().pow(2).sum() for y in run(X.clone().requires_grad_())).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_bitwise(grads[1], grads[0])
    assert_casts_are_on(low)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("kept", ["head", "head.linear", ""])
def test_a_compiled_model_is_one_graph_with_the_eager_result(kept: str, low: torch.dtype) -> None:
    model = Model()
    amp.keep_float(model.get_submodule(kept))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = {}
    for name, run in (("eager", model), ("compiled", compiled), ("again", compiled)):
        model.zero_grad()
        outputs = run(X)
        sum(y.float().pow(2).sum() for y in outputs).backward()
        results[name] = outputs, {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert_bitwise(results["compiled"][0], results["eager"][0])
    torch.testing.assert_close(results["compiled"][1], results["eager"][1], rtol=1e-2, atol=1e-2)
    assert_bitwise(results["again"], results["compiled"])
    assert_casts_are_on(low)


@pytest.mark.usefixtures("dynamo")
def test_a_model_that_is_compiled_already_follows(low: torch.dtype) -> None:
    model = Model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for keep in (False, True, False):
        amp.keep_float(model.head, keep)
        assert_bitwise(compiled(X), model(X))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's look at inputs
def test_a_graph_break_inside_changes_nothing(low: torch.dtype) -> None:
    class Breaks(Products):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(y)

    model = Model()
    model.head = amp.keep_float(Breaks())
    assert_bitwise(torch.compile(model, backend="aot_eager")(X), model(X))
    assert_casts_are_on(low)


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_submodule_follows_the_kept_module_around_it(low: torch.dtype) -> None:
    inner = Products()
    compiled = torch.compile(inner, backend="aot_eager", fullgraph=True)
    outer = amp.keep_float(nn.Sequential(compiled))
    expected = [run(X).detach() for run in (inner, amp.keep_float(nn.Sequential(inner)))]
    for _ in range(2):
        assert_bitwise(compiled(X).detach(), expected[0])
        assert_bitwise(outer(X).detach(), expected[1])


# --- levels that cast the model -------------------------------------------------------------------


@pytest.mark.parametrize("level", CAST_LEVELS)
@pytest.mark.parametrize("kept", ["head", "head.linear", ""])
def test_levels_that_cast_the_model_leave_it_in_float32(kept: str, level: str) -> None:
    model = Model()
    before = picture(model)
    amp.keep_float(model.get_submodule(kept))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    dtype = {True: torch.float32, False: HALF.get(level, torch.float32)}
    for name, param in model.named_parameters():
        assert param.dtype == dtype[name.startswith(kept)], name
    seen: list[Any] = []
    model.get_submodule(kept).register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    outputs = model(X)
    assert seen == [torch.float32]
    assert {y.dtype for y in outputs} == {torch.float32}
    backward(sum(y.pow(2).sum() for y in outputs), optimizer)
    optimizer.step()
    amp.close()
    amp.keep_float(model.get_submodule(kept), False)
    model.get_submodule(kept)._forward_pre_hooks.clear()
    for key in ("module hooks", "module attributes"):
        assert picture(model)[key] == before[key]


def test_a_nested_kept_module_gives_float32_to_the_one_around_it() -> None:
    model = Model()
    amp.keep_float(model.head)
    amp.keep_float(model.head.linear)
    amp.initialize(model, opt_level="O5", verbosity=0)
    seen: list[torch.dtype] = []
    model.head.linear.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    model.tail.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    model(X)
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("keep", [True, False])
def test_a_part_of_a_model_that_was_cast_is_refused(keep: bool) -> None:
    model = Model()
    amp.initialize(model, opt_level="O2", verbosity=0)
    with pytest.raises(AmpStateError, match=r"O2 has cast this Products .* before amp\.initialize"):
        amp.keep_float(model.head, keep)
    amp.keep_float(nn.Linear(2, 2), keep)
