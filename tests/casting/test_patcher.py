"""Patches are undone exactly; patched functions can be kept, pickled, compiled and scripted."""

from __future__ import annotations

import pickle
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import rnn
from torch.optim import optimizer as optimizer_hooks

from amp_engine.casting import FunctionCasts, Registration, original, patches
from amp_engine.casting.patches import Patches

SPACES = (torch, F, torch.Tensor, torch._C.TensorBase, torch.linalg, rnn, rnn.RNNBase, rnn.RNNCellBase)
X = torch.ones(2, 2)


def picture() -> list[dict[str, Any]]:
    return [dict(vars(space)) for space in SPACES]


def assert_same(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    for space, ours, theirs in zip(SPACES, now, before, strict=True):
        assert set(ours) == set(theirs), space
        assert [name for name in ours if ours[name] is not theirs[name]] == [], space


def low_of_now() -> torch.dtype:
    return torch.mm(X, X).dtype


# --- exact undo -----------------------------------------------------------------------------------


def test_every_attribute_is_the_same_object_again(low: torch.dtype) -> None:
    before, fastpath = picture(), torch.backends.mha.get_fastpath_enabled()
    casts = FunctionCasts(low)
    for _ in range(2):
        casts.install()
        assert not torch.backends.mha.get_fastpath_enabled()
        assert optimizer_hooks._global_optimizer_post_hooks
        casts.remove()
        assert_same(picture(), before)
        assert torch.backends.mha.get_fastpath_enabled() == fastpath
        assert not optimizer_hooks._global_optimizer_post_hooks


def test_hash_and_equality_of_tensors_and_parameters_survive(casts: FunctionCasts) -> None:
    weight = nn.Parameter(X.clone())
    for tensor in (X, weight):
        assert {tensor: 1}[tensor] == 1
        assert (tensor == tensor).all()
    assert hash(weight) == id(weight)


def test_casts_take_the_place_of_those_before(low: torch.dtype) -> None:
    before = picture()
    first, second = FunctionCasts(low), FunctionCasts(torch.bfloat16)
    first.install()
    mm = original(torch.mm)
    second.install()
    assert original(torch.mm) is mm
    assert (first.is_active, second.is_active) == (False, True)
    first.remove()
    with first.disabled():
        assert low_of_now() == torch.bfloat16
    second.remove()
    assert_same(picture(), before)


def test_casts_whose_installation_fails_leave_those_before_in_force(low: torch.dtype) -> None:
    before = picture()
    first = FunctionCasts(low)
    first.install()
    immutable = Registration("half", torch._C.TensorBase, "sigmoid")
    second = FunctionCasts(torch.float16, registrations=[immutable])
    with pytest.raises(TypeError, match="immutable|can't set"):
        second.install()
    assert not second.installed
    assert first.is_active
    assert low_of_now() == low
    first.remove()
    assert_same(picture(), before)


@pytest.mark.parametrize(
    ("doing", "count"), [(what, n) for what in ("install", "remove") for n in (1, 2, 150)] + [("install", 400)]
)
@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
def test_an_interrupt_while_torch_is_patched_leaves_nothing_half_done(
    doing: str, after: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes at the assignment number `count` to one of torch's attributes."""
    before, calls = picture(), []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == count and not after:
            raise KeyboardInterrupt
        setattr(*args)
        if len(calls) == count:
            raise KeyboardInterrupt

    first, second = FunctionCasts(torch.float16), FunctionCasts(torch.bfloat16)
    first.install()
    with monkeypatch.context() as patch:
        patch.setattr(patches, "setattr", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            second.install() if doing == "install" else first.remove()
    assert first.is_active
    assert low_of_now() == torch.float16
    assert (X @ X).dtype == F.linear(X, X).dtype == torch.float16
    first.remove()
    assert_same(picture(), before)
    assert not optimizer_hooks._global_optimizer_post_hooks


def test_patches_of_one_name_are_undone_last_first() -> None:
    space = types.SimpleNamespace(name=1)
    patches, calls = Patches(), []
    patches.set(space, "name", 2)
    patches.on_undo(lambda: calls.append(space.name))
    patches.set(space, "name", 3)
    patches.set(space, "other", 4)
    patches.undo()
    patches.undo()
    assert vars(space) == {"name": 1}
    assert calls == [2]


# --- functions that a program kept ----------------------------------------------------------------

KEPT = {"builtin": (F, "gelu"), "python": (F, "softmax"), "torch": (torch, "mm"), "functional": (torch, "norm")}


class Kept(nn.Module):
    """Holds a function, as nn.TransformerEncoderLayer holds its activation."""

    def __init__(self, space: Any, name: str) -> None:
        super().__init__()
        self.function = getattr(space, name)


@pytest.mark.parametrize(("space", "name"), KEPT.values(), ids=KEPT)
def test_a_kept_function_can_be_pickled_after_another_install(space: Any, name: str, low: torch.dtype) -> None:
    first, second = FunctionCasts(low), FunctionCasts(torch.bfloat16)
    first.install()
    model = Kept(space, name)
    first.remove()
    second.install()
    assert pickle.loads(pickle.dumps(model)).function is getattr(space, name)
    second.remove()


@pytest.mark.parametrize("kept", ["builtin", "torch"])
def test_a_kept_builtin_is_the_original_once_it_is_unpickled_without_casts(kept: str, casts: FunctionCasts) -> None:
    model = Kept(*KEPT[kept])
    while_patched = pickle.dumps(model)
    casts.remove()
    assert b"amp_engine" not in while_patched
    for pickled in (while_patched, pickle.dumps(model)):
        assert pickle.loads(pickled).function is getattr(*KEPT[kept])


def test_a_builtin_kept_before_can_be_pickled(low: torch.dtype) -> None:
    model, casts = Kept(F, "gelu"), FunctionCasts(low)
    casts.install()
    assert pickle.loads(pickle.dumps(model)).function is model.function
    casts.remove()


def test_a_kept_function_follows_the_casts_in_force(low: torch.dtype) -> None:
    first, second = FunctionCasts(low), FunctionCasts(torch.bfloat16)
    first.install()
    mm = torch.mm
    assert mm(X, X).dtype == low
    first.remove()
    assert mm(X, X).dtype == torch.float32
    second.install()
    assert mm(X, X).dtype == torch.bfloat16
    with second.disabled():
        assert mm(X, X).dtype == torch.float32
    second.remove()


# --- registrations --------------------------------------------------------------------------------


@pytest.fixture
def library() -> Any:
    """A module with a function, and a class with every kind of method."""
    library = types.ModuleType("library_of_this_test")
    source = """if True:
        def function(x): return x.dtype
        class Parent:
            def inherited(self, x): return x.dtype
            @classmethod
            def inherited_class_method(cls, x): return cls.__name__, x.dtype
        class Layer(Parent):
            def method(self, x): return x.dtype
            @staticmethod
            def static(x): return x.dtype
            @classmethod
            def class_method(cls, x): return cls.__name__, x.dtype
        class Child(Layer): pass
        class Callable:
            __hash__ = None
            def __call__(self, x): return x.dtype
        instance = Callable()
    """
    exec(source, vars(library))
    sys.modules[library.__name__] = library
    yield library
    del sys.modules[library.__name__]


def installed(low: torch.dtype, *registrations: tuple[str, Any, str]) -> FunctionCasts:
    casts = FunctionCasts(low, registrations=[Registration(*each) for each in registrations])
    casts.install()
    return casts


def test_an_absent_function_is_a_value_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"^No function named nothing in module <module 'math' .*>\.$"):
        Registration("half", sys.modules["math"], "nothing")


def test_a_registered_python_function_is_cast_and_comes_back(library: Any, low: torch.dtype) -> None:
    original = library.function
    for kind, given, arrives in (("half", X, low), ("float", X.to(low), torch.float32), ("promote", X, torch.float32)):
        casts = installed(low, (kind, library, "function"))
        assert library.function(given) == arrives
        assert pickle.loads(pickle.dumps(library.function)) is library.function
        casts.remove()
        assert library.function is original


def test_registered_methods_of_every_kind_are_cast_and_come_back(library: Any, low: torch.dtype) -> None:
    layer, child = library.Layer, library.Child
    names = ("method", "static", "class_method", "inherited", "inherited_class_method")
    before = dict(vars(layer))
    casts = installed(low, *(("half", layer, name) for name in names))
    assert layer().method(X) == layer().inherited(X) == child().inherited(X) == low
    assert layer.static(X) == layer().static(X) == child().static(X) == low
    assert layer.class_method(X) == layer().class_method(X) == layer.inherited_class_method(X) == ("Layer", low)
    assert child.class_method(X) == child().inherited_class_method(X) == ("Child", low)
    assert library.Parent().inherited(X) == torch.float32
    casts.remove()
    assert dict(vars(layer)) == before


def test_an_inherited_static_method_stays_static(library: Any, low: torch.dtype) -> None:
    casts = installed(low, ("half", library.Child, "static"))
    assert library.Child.static(X) == library.Child().static(X) == low
    assert library.Layer.static(X) == torch.float32
    casts.remove()
    assert "static" not in vars(library.Child)


def test_a_callable_object_in_a_module_is_cast_and_comes_back(library: Any, low: torch.dtype) -> None:
    original = library.instance
    casts = installed(low, ("half", library, "instance"))
    assert library.instance(X) == low
    casts.remove()
    assert library.instance is original


def test_a_registration_wins_over_the_lists(low: torch.dtype) -> None:
    before = picture()
    casts = installed(
        low,
        ("float", torch, "mm"),
        ("half", F, "softmax"),
        ("half", torch.Tensor, "exp"),
        ("float", torch, "tanh"),
        ("half", torch, "tanh"),  # the first one of a function counts
    )
    assert torch.mm(X.to(low), X.to(low)).dtype == torch.float32
    assert F.softmax(X, 0).dtype == low
    assert X.exp().dtype == low
    assert torch.tanh(X.to(low)).dtype == torch.float32
    casts.remove()
    assert_same(picture(), before)


def test_a_registration_does_not_defeat_the_ban() -> None:
    before = picture()
    casts = installed(torch.float16, ("float", F, "binary_cross_entropy"))
    with pytest.raises(NotImplementedError, match="does not work out-of-the-box"):
        F.binary_cross_entropy(X.half(), X)
    assert F.binary_cross_entropy(X, X).dtype == torch.float32
    casts.remove()
    assert_same(picture(), before)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "group_norm"])
def test_a_registration_wins_over_listed_functions_inside_of_it(name: str, low: torch.dtype) -> None:
    casts = installed(low, ("half", F, name))
    args = {"layer_norm": ((2,),), "group_norm": (2,)}.get(name, (0,))
    assert getattr(F, name)(X, *args).dtype == low
    assert X.softmax(0).dtype == torch.float32
    casts.remove()


def test_inside_a_registered_function_that_is_in_no_list_the_lists_hold(library: Any, low: torch.dtype) -> None:
    library.function = lambda x: (x.dtype, x.softmax(0).dtype)
    casts = installed(low, ("half", library, "function"))
    assert library.function(X) == (low, torch.float32)
    casts.remove()
