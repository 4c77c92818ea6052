"""A patched function looks like torch's own to all code that inspects it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from amp_engine.casting import FunctionCasts
from amp_engine.casting.lists import FUNCTIONAL, LINALG, TENSOR, TORCH

LISTED = {"F": (F, FUNCTIONAL), "torch": (torch, TORCH), "linalg": (torch.linalg, LINALG), "Tensor": (Tensor, TENSOR)}
SHIPPED = {
    label: {name: getattr(space, name) for names in vars(lists).values() for name in names if hasattr(space, name)}
    for label, (space, lists) in LISTED.items()
}
X = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
OPERATORS = [name for name in SHIPPED["Tensor"] if name.startswith("__")]


@pytest.fixture(params=LISTED)
def patched(request: pytest.FixtureRequest, casts: FunctionCasts) -> dict[str, tuple[Any, Any]]:
    """Return, by name, the functions of one namespace while casts are installed, and those that torch shipped."""
    space, _ = LISTED[request.param]
    found = {name: (getattr(space, name), shipped) for name, shipped in SHIPPED[request.param].items()}
    assert all(ours is not shipped for ours, shipped in found.values())
    return found


def failing(patched: dict[str, tuple[Any, Any]], holds: Callable[[Any, Any], bool]) -> dict[str, str]:
    """Return the names for which `holds(ours, shipped)` does not hold, and why."""
    wrong = {}
    for name, (ours, shipped) in patched.items():
        try:
            if not holds(ours, shipped):
                wrong[name] = "differs"
        except Exception as e:  # whatever it raises is what the test reports
            wrong[name] = repr(e)[:120]
    return wrong


# --- what a function says of itself ---------------------------------------------------------------


def test_it_has_the_name_of_the_original(patched: Any) -> None:
    # torch's own Tensor.__pow__ says that its name is "pow".
    assert failing(patched, lambda ours, shipped: ours.__name__ in (shipped.__name__, *OPERATORS)) == {}


def test_it_has_the_doc_of_the_original(patched: Any) -> None:
    assert failing(patched, lambda ours, shipped: ours.__doc__ == shipped.__doc__) == {}


def test_it_is_callable_hashable_and_equal_to_itself_alone(patched: Any) -> None:
    def holds(ours: Any, shipped: Any) -> bool:
        return callable(ours) and {ours: 1}[ours] == 1 and ours == ours and ours != shipped  # noqa: PLR0124

    assert failing(patched, holds) == {}


def test_it_is_pickled_and_copied_by_name(patched: Any) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert failing(patched, lambda ours, _, p=protocol: pickle.loads(pickle.dumps(ours, p)) is ours) == {}
    assert failing(patched, lambda ours, _: copy.deepcopy([ours])[0] is copy.copy(ours) is ours) == {}


def test_unwrapping_it_gives_the_original_or_stays_with_it(patched: Any) -> None:
    assert (
        failing(patched, lambda ours, shipped: inspect.unwrap(ours) in (ours, shipped, inspect.unwrap(shipped))) == {}
    )


def test_pickles_that_were_written_while_patched_load_as_the_originals_afterwards(low: torch.dtype) -> None:
    casts = FunctionCasts(low)
    casts.install()
    written = {
        (label, name): pickle.dumps(getattr(LISTED[label][0], name))
        for label in ("F", "torch", "linalg")
        for name in SHIPPED[label]
    }
    casts.remove()
    wrong = [key for key, data in written.items() if pickle.loads(data) is not SHIPPED[key[0]][key[1]]]
    assert wrong == []


def test_it_does_not_bind_where_the_original_does_not(casts: FunctionCasts) -> None:
    """`activation = torch.exp` in a class body: a builtin function does not become a method."""

    class Holder:
        builtin = torch.mm
        static = staticmethod(F.softmax)

    assert Holder().builtin(X, X).dtype == casts.dtype
    assert Holder().static(X.to(casts.dtype), -1).dtype == torch.float32


def test_methods_bind_and_take_a_subclass(casts: FunctionCasts) -> None:
    class Named(Tensor):
        pass

    bound = X.matmul
    assert bound(X).dtype == Tensor.matmul(X, X).dtype == casts.dtype
    assert Named.matmul is Tensor.matmul
    assert X.as_subclass(Named).matmul(X).dtype == casts.dtype


def test_a_method_on_something_that_is_no_tensor_is_torch_s_type_error(casts: FunctionCasts) -> None:
    for method in (Tensor.matmul, Tensor.add, Tensor.softmax, Tensor.exp, Tensor.__add__, Tensor.add_):
        with pytest.raises(TypeError):
            method("text", X)
        with pytest.raises(TypeError):
            method()


def test_wrong_arguments_are_the_error_that_torch_gives() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: torch.mm(X),
        lambda: torch.mm(X, X, X, X),
        lambda: torch.mm(X, other=X),
        lambda: torch.mm(X, torch.ones(3, 3)),
        lambda: torch.mm("text", X),
        lambda: F.softmax(X, dim=5),
        lambda: F.linear(X, None),
        lambda: X.matmul(),
        lambda: torch.add(X, "text"),
        lambda: X + "text",
        lambda: torch.cat(X),
        lambda: torch.cat([]),
        lambda: torch.cat([X, "text"]),
    ]

    def errors() -> list[type[BaseException]]:
        found = []
        for call in calls:
            with pytest.raises((TypeError, RuntimeError, ValueError, IndexError)) as raised:
                call()
            found.append(raised.type)
        return found

    expected = errors()
    for dtype in (torch.float16, torch.bfloat16):
        casts = FunctionCasts(dtype)
        casts.install()
        try:
            assert errors() == expected
        finally:
            casts.remove()


# --- __torch_function__ ---------------------------------------------------------------------------


class Recorder(Tensor):
    """Writes down which function it was handed."""

    seen: list[Any] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


CALLS: dict[str, Callable[[Any], Any]] = {
    "torch.mm": lambda x: torch.mm(x, x),
    "torch.cat": lambda x: torch.cat([x, x]),
    "torch.add": lambda x: torch.add(x, X),
    "F.linear": lambda x: F.linear(x, x),
    "F.softmax": lambda x: F.softmax(x, -1),
    "x.matmul": lambda x: x.matmul(X),
    "x @ y": lambda x: x @ X,
    "x + y": lambda x: x + X,
    "x.exp": lambda x: x.exp(),
    "x.add_": lambda x: x.clone().add_(X),
}


def handed_to_subclass(call: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    Recorder.seen.clear()
    return call(X.as_subclass(Recorder)), list(Recorder.seen)


def handed_to_mode(call: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        return call(X), seen


def ours() -> list[Any]:
    return [getattr(LISTED[label][0], name) for label, names in SHIPPED.items() for name in names]


@pytest.mark.parametrize("handed", [handed_to_subclass, handed_to_mode], ids=["subclass", "mode"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_overrides_are_handed_the_functions_that_torch_would_hand_them(call: Any, handed: Any, low: Any) -> None:
    """Libraries look them up in tables that they filled with torch's own functions."""
    _, expected = handed(call)
    casts = FunctionCasts(low)
    casts.install()
    try:
        plain, (result, seen) = call(X), handed(call)
        assert (result.dtype, torch.equal(result.as_subclass(Tensor), plain)) == (plain.dtype, True)
        assert type(result) is (Recorder if handed is handed_to_subclass else Tensor)
        assert [f for f in seen if any(f is one for one in ours())] == []
        assert [f for f in expected if not any(f is one for one in seen)] == []
    finally:
        casts.remove()


def test_an_object_that_is_no_tensor_but_overrides_functions_gets_the_original(casts: FunctionCasts) -> None:
    class Quantity:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func, args, kwargs

    one = Quantity()
    assert torch.mm(one, X)[0] is SHIPPED["torch"]["mm"]
    assert F.softmax(one, -1)[0] is SHIPPED["F"]["softmax"]
    assert torch.add(X, one)[0] is SHIPPED["torch"]["add"]


# --- transforms and tracers -----------------------------------------------------------------------


class Block(nn.Module):
    """[N, 2] -> [N, 2], through functions, methods and operators of several lists."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.softmax(self.linear(x), -1) + self.norm(x) @ self.linear.weight
        return torch.cat([y.exp(), x.matmul(self.linear.weight)])


def test_functorch_grad_is_that_of_autograd(casts: FunctionCasts) -> None:
    def loss_of(w: Tensor) -> Tensor:
        return F.softmax(torch.mm(X, w), -1).pow(2).sum() + (X @ w).float().sum()

    w = torch.eye(2, requires_grad=True)
    (expected,) = torch.autograd.grad(loss_of(w), w)
    assert expected.dtype == torch.float32
    torch.testing.assert_close(torch.func.grad(loss_of)(w.detach()), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(loss_of))(w.detach().expand(3, 2, 2))[2], expected, rtol=1e-2, atol=1e-2
    )
    assert casts.cache.kept() == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # torch's own decompositions of jvp
def test_vmap_jvp_and_jacrev_run_low(casts: FunctionCasts) -> None:
    batch = torch.stack([X, 2 * X])
    assert torch.func.vmap(torch.mm)(batch, batch).dtype == casts.dtype
    assert torch.equal(torch.func.vmap(torch.mm)(batch, batch)[1], torch.mm(2 * X, 2 * X))
    value, tangent = torch.func.jvp(lambda x: x @ X, (X,), (X,))
    assert value.dtype == tangent.dtype == casts.dtype
    jacobian = torch.func.jacrev(lambda x: F.softmax(x @ X, -1))(X)
    assert jacobian.shape == (2, 2, 2, 2)
    assert casts.cache.kept() == []


def test_functional_call_runs_the_weights_that_it_was_given(casts: FunctionCasts) -> None:
    model = Block()
    model(X).sum().backward()
    weights = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    output = torch.func.functional_call(model, weights, X)
    assert torch.equal(output[2:], torch.zeros_like(output[2:]))
    assert output.dtype == model(X).dtype == torch.float32


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.softmax(self.norm(F.gelu(self.linear(x))), -1)
        return F.mse_loss(x, y) + torch.mm(x, y) + x.exp() + (x @ y) * x + torch.cat([x, y])[:2]


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_jit_script_compiles_the_originals(casts: FunctionCasts) -> None:
    model = Scripted()
    output = torch.jit.script(model)(X)
    with casts.disabled():
        torch.testing.assert_close(output, model(X))


def test_a_symbolic_trace_and_a_copy_of_it_run(casts: FunctionCasts) -> None:
    model = Block()
    traced = torch.fx.symbolic_trace(model)
    names = [node.name for node in traced.graph.nodes]
    assert {"linear", "softmax", "norm", "cat"} <= set(names)
    twin = copy.deepcopy(traced)
    with torch.no_grad():
        for run in (traced, twin):
            torch.testing.assert_close(run(X).float(), model(X).float(), rtol=3e-2, atol=3e-2)
    casts.remove()
    torch.testing.assert_close(twin(X), model(X))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_an_exported_program_gives_the_eager_result(strict: bool, casts: FunctionCasts) -> None:
    model = Block().eval()
    program = torch.export.export(model, (X,), strict=strict)
    kept = len(casts.cache.kept())
    assert kept == 0
    with torch.no_grad():
        expected = model(2 * X)
        torch.testing.assert_close(program.module()(2 * X), expected, rtol=0, atol=0)
        assert type(model(X)) is Tensor
    low = [n for n in program.graph.nodes if getattr(n.meta.get("val"), "dtype", None) == casts.dtype]
    assert low, "nothing in the graph is of low precision"


def test_meta_tensors_go_through(casts: FunctionCasts) -> None:
    with torch.device("meta"):
        model = Block()
        output = model(torch.empty(3, 2))
    assert (output.device.type, output.dtype, output.shape) == ("meta", torch.float32, (6, 2))
    with torch.device("meta"):
        assert torch.mm(torch.empty(2, 2), torch.empty(2, 2)).dtype == casts.dtype
