"""A user's decisions for one function: registered, decorated, through the environment; and the way back."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import amp
from amp_engine.casting.overrides import from_environment
from amp_engine.errors import AmpTypeError, AmpValueError

from ..support import FUNCTION_LEVELS, HALF, left_alone

X = torch.ones(2, 2)


@pytest.fixture(params=FUNCTION_LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def low(level: str) -> torch.dtype:
    return HALF[level]


@pytest.fixture
def library() -> Iterator[Any]:
    library = types.ModuleType("library_of_overrides")
    source = """if True:
        import torch
        def function(x): return x.dtype
        class Layer:
            def method(self, x): return x.dtype
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x * 2
            @staticmethod
            def backward(ctx, grad): return grad * 2
    """
    exec(source, vars(library))
    sys.modules[library.__name__] = library
    yield library
    del sys.modules[library.__name__]


def initialize(level: str = "O1") -> None:
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)


# --- the environment ------------------------------------------------------------------------------


def test_a_plus_puts_a_function_on_the_list(
    library: Any, level: str, low: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_ENGINE_HALF", f" +torch.tanh, +{library.__name__}.function,,+torch.Tensor.tanh ")
    monkeypatch.setenv("AMP_ENGINE_FLOAT", f"+torch.relu,+{library.__name__}.Layer.method")
    monkeypatch.setenv("AMP_ENGINE_PROMOTE", "+torch.linalg.cross")
    initialize(level)
    assert torch.tanh(X).dtype == X.tanh().dtype == library.function(X) == low
    assert torch.relu(X.to(low)).dtype == library.Layer().method(X.to(low)) == torch.float32
    three = torch.ones(1, 3)
    assert torch.linalg.cross(three, three.to(low)).dtype == torch.float32
    amp.close()
    assert library.function(X) == torch.float32


def test_a_plus_wins_over_the_lists_and_over_what_the_program_registered(
    level: str, low: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_ENGINE_FLOAT", "+torch.mm,+torch.tanh")
    amp.register_half_function(torch, "tanh")
    initialize(level)
    assert torch.mm(X.to(low), X.to(low)).dtype == torch.tanh(X.to(low)).dtype == torch.float32


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("AMP_ENGINE_HALF", "torch.nn.functional.linear"),
        ("AMP_ENGINE_HALF", "torch.Tensor.__matmul__"),
        ("AMP_ENGINE_FLOAT", "torch.nn.functional.softmax"),  # calls Tensor.softmax, which is listed too
        ("AMP_ENGINE_FLOAT", "torch.linalg.norm"),
        ("AMP_ENGINE_PROMOTE", "torch.cat"),
    ],
)
def test_a_minus_leaves_a_function_uncast(
    variable: str, name: str, level: str, low: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {
        "torch.nn.functional.linear": lambda: F.linear(X, X).dtype == torch.float32,
        "torch.Tensor.__matmul__": lambda: (X @ X).dtype == torch.float32,
        "torch.nn.functional.softmax": lambda: F.softmax(X.to(low), 0).dtype == low,
        "torch.linalg.norm": lambda: torch.linalg.norm(X.to(low)).dtype == low,
        "torch.cat": lambda: torch.cat([torch.tensor([1.0]), X.double()[0]]).dtype == torch.float64,
    }
    monkeypatch.setenv(variable, f"-{name}")
    initialize(level)
    assert calls[name]()
    assert torch.mm(X, X).dtype == low
    assert X.to(low).softmax(0).dtype == torch.float32


def test_a_minus_beats_what_the_program_registered(
    library: Any, level: str, low: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    amp.register_half_function(library, "function")
    amp.register_half_function(F, "softmax")
    monkeypatch.setenv("AMP_ENGINE_HALF", f"-{library.__name__}.function,-torch.nn.functional.softmax")
    initialize(level)
    assert library.function(X) == F.softmax(X, 0).dtype == torch.float32
    assert F.softmax(X.to(low), 0).dtype == low


def test_off_one_list_and_onto_another(level: str, low: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_ENGINE_HALF", "-torch.mm")
    monkeypatch.setenv("AMP_ENGINE_FLOAT", "+torch.mm")
    initialize(level)
    assert torch.mm(X.to(low), X.to(low)).dtype == torch.float32


def test_only_levels_that_cast_functions_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_ENGINE_HALF", "nonsense")
    initialize("O2")
    assert torch.mm(X, X).dtype == torch.float32


WRONG = {
    "no sign": ("AMP_ENGINE_HALF", "torch.mm", "no sign.  Use '+torch.mm' to put it on the half list, '-torch.mm'"),
    "no path": ("AMP_ENGINE_HALF", "+mm", "no dotted name of a function, such as torch.nn.functional.gelu"),
    "empty": ("AMP_ENGINE_HALF", "+", "no dotted name"),
    "syntax": ("AMP_ENGINE_HALF", "+torch.mm()", "no dotted name"),
    "no module": ("AMP_ENGINE_FLOAT", "+F.linear", "there is no F to import (ModuleNotFoundError"),
    "no attribute": ("AMP_ENGINE_FLOAT", "+torch.nn.funktional.gelu", "there is no torch.nn.funktional to import"),
    "no function": ("AMP_ENGINE_FLOAT", "+torch.sofmax", "torch has no function of the name sofmax"),
    "no callable": ("AMP_ENGINE_FLOAT", "+torch.float16", "torch has no function of the name float16"),
    "immutable": ("AMP_ENGINE_FLOAT", "+torch._C.TensorBase.mm", "functions of torch._C.TensorBase cannot be replaced"),
    "banned": ("AMP_ENGINE_FLOAT", "+torch.nn.functional.binary_cross_entropy", "allow_banned=True"),
    "twice": ("AMP_ENGINE_FLOAT", "+torch.relu,+torch.relu", "AMP_ENGINE_FLOAT adds it already"),
    "both": ("AMP_ENGINE_HALF", "+torch.mm,-torch.mm", "the same variable says '-torch.mm'"),
    "other list": ("AMP_ENGINE_FLOAT", "-torch.mm", "not on the float list; it is on the list 'half'.  Put it in "),
    "in place": ("AMP_ENGINE_FLOAT", "-torch.exp_", "it is on the list 'refused_in_place'.  Leave the entry out."),
    "no list": ("AMP_ENGINE_PROMOTE", "-torch.relu", "it is on no list.  Leave the entry out."),
}


@pytest.mark.parametrize(("variable", "value", "complaint"), WRONG.values(), ids=WRONG)
def test_a_wrong_entry_is_named_and_changes_nothing(
    variable: str, value: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monkeypatch.setenv(variable, value)
    with pytest.raises(AmpValueError, match="^" + re.escape(f"{variable}: in ") + ".*" + re.escape(complaint)):  # noqa: SIM117
        with left_alone(model, optimizer):
            amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert amp.current_engine() is None
    assert torch.mm(X, X).dtype == torch.float32
    monkeypatch.delenv(variable)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert torch.mm(X, X).dtype == torch.float16


def test_an_addition_to_two_lists_is_refused() -> None:
    with pytest.raises(AmpValueError, match="AMP_ENGINE_FLOAT: in '\\+torch.relu', AMP_ENGINE_HALF adds it already"):
        from_environment({"AMP_ENGINE_HALF": "+torch.relu", "AMP_ENGINE_FLOAT": "+torch.relu"})


def test_a_wrong_entry_that_appears_later_leaves_the_casts_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    initialize("O4")
    monkeypatch.setenv("AMP_ENGINE_HALF", "torch.relu")
    with pytest.raises(AmpValueError, match="no sign"):
        amp.register_half_function(torch, "tanh")
    assert (torch.mm(X, X).dtype, torch.tanh(X).dtype) == (torch.bfloat16, torch.float32)
    monkeypatch.delenv("AMP_ENGINE_HALF")
    amp.register_half_function(torch, "sinc")
    assert (torch.sinc(X).dtype, torch.tanh(X).dtype) == (torch.bfloat16, torch.float32)


# --- registrations --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["register", "initialize"])
class TestRegistered:
    """A function may be registered before or after `initialize`; `close` takes it back."""

    def start(self, first: str, level: str, module: Any, name: str) -> None:
        if first == "initialize":
            initialize(level)
        amp.register_half_function(module, name)
        if first == "register":
            initialize(level)

    @pytest.mark.parametrize("space", [torch, torch._C._nn, torch.special], ids=lambda space: space.__name__)
    def test_a_function_written_in_c_works(self, space: Any, first: str, level: str, low: torch.dtype) -> None:
        name = {torch: "tanh", torch._C._nn: "hardtanh", torch.special: "expit"}[space]
        original = getattr(space, name)
        self.start(first, level, space, name)
        patched = getattr(space, name)
        assert patched(X).dtype == low
        assert pickle.loads(pickle.dumps(patched)) is patched
        assert amp.original(patched) is original
        amp.close()
        assert getattr(space, name) is original
        assert patched(X).dtype == torch.float32

    def test_a_method_of_one_object_works_and_a_copy_has_its_own(
        self, library: Any, first: str, level: str, low: torch.dtype
    ) -> None:
        layer, model = library.Layer(), nn.Linear(2, 2)
        amp.register_half_function(layer, "method")
        self.start(first, level, model, "forward")
        assert (layer.method(X), library.Layer().method(X)) == (low, torch.float32)
        assert amp.original(layer.method) == types.MethodType(library.Layer.method, layer)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            nn.init.zeros_(copied.weight)
            nn.init.zeros_(copied.bias)
            assert copied(X).count_nonzero() == 0
        assert pickle.loads(pickle.dumps(layer)).method(X) == torch.float32
        assert model(X).dtype == low
        amp.close()
        assert layer.method(X) == torch.float32
        assert vars(layer) == {}
        assert "forward" not in vars(model)

    def test_the_apply_of_an_autograd_function_works(
        self, library: Any, first: str, level: str, low: torch.dtype
    ) -> None:
        original = library.Double.apply
        self.start(first, level, library.Double, "apply")
        x = X.clone().requires_grad_()
        assert library.Double.apply(x).dtype == low
        library.Double.apply(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[2, 2], [2, 2]]
        assert amp.original(library.Double.apply) == original
        amp.close()
        assert "apply" not in vars(library.Double)
        assert library.Double.apply(x).dtype == torch.float32


def test_what_cannot_be_replaced_is_refused_and_changes_nothing() -> None:
    initialize("O4")
    with pytest.raises(AmpTypeError, match="mm of <class 'torch._C.TensorBase'> cannot be replaced"):
        amp.register_half_function(torch._C.TensorBase, "mm")
    amp.register_float_function(torch, "relu")
    assert torch.mm(X, X).dtype == torch.bfloat16


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("removed", [True, False])
def test_the_word_on_a_listed_function_is_the_last_in_a_graph_too(
    removed: bool, low: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if removed:
        monkeypatch.setenv("AMP_ENGINE_FLOAT", "-torch.nn.functional.softmax")
    else:
        amp.register_half_function(F, "softmax")
    initialize(level)
    compiled = torch.compile(lambda x: F.softmax(x, 0), backend="aot_eager", fullgraph=True)
    assert compiled(X.to(low)).dtype == F.softmax(X.to(low), 0).dtype == low


@pytest.mark.usefixtures("dynamo")
def test_a_registered_method_of_a_model_compiles(level: str, low: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    amp.register_half_function(model, "forward")
    initialize(level)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(X), model(X))


# --- what was patched -----------------------------------------------------------------------------


def test_original_gives_what_was_patched(low: torch.dtype, level: str) -> None:
    before = [torch.mm, F.linear, F.softmax, torch.norm, torch.Tensor.mm, torch.Tensor.__add__, torch.Tensor.exp_]
    bce, lstm = F.binary_cross_entropy, torch._VF.lstm
    amp.register_half_function(F, "softmax")
    initialize(level)
    now = [torch.mm, F.linear, F.softmax, torch.norm, torch.Tensor.mm, torch.Tensor.__add__, torch.Tensor.exp_]
    assert not any(a is b for a, b in zip(now, before, strict=True))
    assert [amp.original(fn) for fn in now] == before
    assert amp.original(F.binary_cross_entropy) is bce
    assert amp.original(nn.modules.rnn._VF.lstm) is lstm
    assert amp.original(X.mm)(X).dtype == torch.float32
    assert amp.original(X.mm).__self__ is X


def test_original_takes_the_decorators_off() -> None:
    def plain(x: Tensor) -> Tensor:
        return x

    assert amp.original(amp.half_function(plain)) is plain


def test_original_leaves_everything_else_alone() -> None:
    import functools

    initialize()

    @functools.wraps(F.linear)
    def users(*args: Any) -> Any:
        return F.linear(*args)

    for value in (users, len, math.sin, torch.relu, X.relu, nn.Linear, nn.Linear(1, 1).forward, 3, None, "mm"):
        assert amp.original(value) == value
    assert amp.original(users) is users
