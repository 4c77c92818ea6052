"""Wrappers cast arguments, as functions show that return what they were given."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine.casting import FunctionCasts, deferred
from amp_engine.casting.wrappers import REGISTERED, match_self

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Pair = namedtuple("Pair", "left right")  # noqa: PYI024


def seen(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The arguments."""
    return (*args, *kwargs.values())


def ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(2, dtype=dtype)


def wrapped(kind: str, casts: FunctionCasts | None) -> Any:
    return REGISTERED[kind](seen, lambda: casts)


def types(values: Any) -> list[Any]:
    return [v.dtype if isinstance(v, Tensor) else types(v) if isinstance(v, (list, tuple)) else v for v in values]


@pytest.fixture
def casts(low: torch.dtype) -> FunctionCasts:
    return FunctionCasts(low)


@pytest.mark.parametrize("kind", REGISTERED)
def test_without_casts_arguments_arrive_as_they_are(kind: str) -> None:
    args = (ones(f16), [ones(f32)], 1, None, "text")
    assert all(a is b for a, b in zip(wrapped(kind, None)(*args), args, strict=True))


@pytest.mark.parametrize("kind", REGISTERED)
def test_what_is_not_a_floating_tensor_of_16_or_32_bits_arrives_as_it_is(kind: str, casts: FunctionCasts) -> None:
    args = (1, 2.0, None, "text", [], (), {"x": ones(f32)}, ones(f64), ones(torch.int64), ones(torch.complex64))
    assert all(a is b for a, b in zip(wrapped(kind, casts)(*args), args, strict=True))


def test_half_casts_positions_keywords_and_sequences(casts: FunctionCasts) -> None:
    low = casts.dtype
    result = wrapped("half", casts)(ones(f32), [ones(f32), ones(low)], x=ones(f32), y=(ones(bf16), ones(f16)))
    assert types(result) == [low, [low, low], low, [low, low]]


def test_float_casts_positions_keywords_and_sequences(casts: FunctionCasts) -> None:
    result = wrapped("float", casts)(ones(f16), [ones(bf16), ones(f32)], x=ones(casts.dtype))
    assert types(result) == [f32, [f32, f32], f32]


@pytest.mark.parametrize(
    ("given", "arrives"),
    [
        ([f32, "low"], [f32, f32]),
        (["low", "low"], ["low", "low"]),
        ([f32, f32], [f32, f32]),
        ([f16, bf16], [f32, f32]),
        (["low", f64], ["low", f64]),
        (["low", f32, f64], ["low", f32, f64]),
        (["low", torch.int64], ["low", torch.int64]),
        (["low", torch.int64, f32], [f32, torch.int64, f32]),
        (["low", torch.complex64], ["low", torch.complex64]),
    ],
    ids=str,
)
def test_promote_acts_where_float32_meets_low_precision(
    given: list[Any], arrives: list[Any], casts: FunctionCasts
) -> None:
    given, arrives = ([casts.dtype if t == "low" else t for t in side] for side in (given, arrives))
    assert types(wrapped("promote", casts)(*map(ones, given))) == arrives
    assert types(wrapped("promote", casts)(**{str(i): ones(t) for i, t in enumerate(given)})) == arrives
    if torch.int64 not in given and f64 not in given:
        assert types(wrapped("promote", casts)([ones(t) for t in given])) == [arrives]


def test_a_cast_where_none_is_needed_is_the_same_object(casts: FunctionCasts) -> None:
    low, wide = ones(casts.dtype), ones(f32)
    assert wrapped("half", casts)(low)[0] is low
    assert wrapped("float", casts)(wide)[0] is wide
    assert wrapped("promote", casts)(wide, wide)[0] is wide


@pytest.mark.parametrize("kind", ["half", "float"])
def test_sequences_keep_their_type_and_mixed_ones_pass_through(kind: str, casts: FunctionCasts) -> None:
    wrapper = wrapped(kind, casts)
    pair, mixed = Pair(ones(f32), ones(casts.dtype)), [ones(f32), 1]
    values, indices = torch.tensor([[1.0]]).max(0)
    result = torch.return_types.max((values, indices))
    assert type(wrapper(pair)[0]) is Pair
    assert type(wrapper([*pair])[0]) is list
    assert wrapper(mixed)[0] is mixed
    assert wrapper(result)[0] is result


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
def test_match_self_casts_the_others_to_the_type_of_the_first(dtype: torch.dtype, casts: FunctionCasts) -> None:
    result = match_self(seen, lambda: casts)(ones(dtype), ones(f32), ones(f16), 2, x=ones(bf16), y=ones(f64))
    assert types(result) == [dtype, dtype, dtype, 2, dtype, f64]
    written = ones(f64)
    assert types(match_self(seen, lambda: casts)(written, ones(f32))) == [f64, f32]


# --- out= ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REGISTERED)
@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64, torch.bool], ids=str)
def test_out_is_never_cast(kind: str, dtype: torch.dtype, casts: FunctionCasts) -> None:
    out = ones(dtype)
    assert wrapped(kind, casts)(ones(f32), ones(casts.dtype), out=out)[-1] is out


@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
def test_the_type_of_out_decides(dtype: torch.dtype, low: torch.dtype) -> None:
    casts = FunctionCasts(low)
    casts.install()
    weight, x = nn.Parameter(torch.eye(2), requires_grad=False), torch.full((2, 2), 0.5, dtype=low)
    for function, args in ((torch.mm, (weight, x)), (torch.cumsum, (x, 0)), (torch.exp, (x,))):
        out = torch.zeros(2, 2, dtype=dtype)
        assert function(*args, out=out) is out
        torch.testing.assert_close(
            out.float(), function(*(a.float() if a is x else a for a in args)).float(), atol=1e-2, rtol=1e-2
        )
    out = torch.zeros(2, 2, dtype=dtype)
    assert torch.add(x, weight, out=out) is out
    assert out[0, 0] == 1.5
    assert torch.eq(x, weight, out=torch.zeros(2, 2, dtype=torch.bool)).sum() == 0
    casts.remove()


# --- deferred: the decorators ---------------------------------------------------------------------


@pytest.fixture
def installed(casts: FunctionCasts) -> Any:
    casts.install()
    yield casts
    casts.remove()


@pytest.mark.parametrize("kind", REGISTERED)
def test_a_decorated_function_keeps_its_name_and_doc(kind: str) -> None:
    wrapper = deferred(kind, seen, lambda: None)
    assert (wrapper.__name__, wrapper.__doc__, wrapper.__module__) == ("seen", "The arguments.", __name__)


def test_a_decorated_function_casts_while_its_casts_are_active(installed: FunctionCasts) -> None:
    current: list[FunctionCasts | None] = [None]
    half = deferred("half", seen, lambda: current[0])
    float32 = deferred("float", seen, lambda: current[0])
    promote = deferred("promote", seen, lambda: current[0])
    low = installed.dtype
    assert types(half(ones(f32))) == [f32]
    current[0] = installed
    assert types(half(ones(f32))) == [low]
    assert types(float32(ones(low))) == [f32]
    assert types(promote(ones(low), ones(f32))) == [f32, f32]
    with installed.disabled():
        assert types(half(ones(f32))) == [f32]
    installed.remove()
    assert types(half(ones(f32))) == [f32]


def test_decorated_half_uses_the_cache_float_and_promote_do_not(installed: FunctionCasts) -> None:
    weight = nn.Parameter(ones(f32))
    half = deferred("half", seen, lambda: installed)
    assert half(weight)[0] is half(weight)[0]
    installed.cache.clear()
    deferred("float", seen, lambda: installed)(weight)
    deferred("promote", seen, lambda: installed)(weight, ones(installed.dtype))
    assert installed.cache.kept() == []


def test_a_decorated_method_gets_its_object(installed: FunctionCasts) -> None:
    class Layer:
        scale = 3

        def method(self, x: Tensor) -> tuple[int, torch.dtype]:
            return self.scale, x.dtype

        method = deferred("half", method, lambda: installed)
        static = deferred("half", staticmethod(lambda x: x.dtype), lambda: installed)
        of_class = deferred("half", classmethod(lambda cls, x: (cls.scale, x.dtype)), lambda: installed)

    low = installed.dtype
    assert Layer().method(ones(f32)) == (3, low)
    assert Layer().static(ones(f32)) == Layer.static(ones(f32)) == low
    assert Layer().of_class(ones(f32)) == Layer.of_class(ones(f32)) == (3, low)


@pytest.mark.parametrize("outside", [True, False], ids=["of staticmethod", "inside staticmethod"])
def test_the_forward_of_an_autograd_function_can_be_decorated(installed: FunctionCasts, outside: bool) -> None:
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        assert x.dtype == w.dtype == installed.dtype
        return grad * w, grad * x

    def decorate(fn: Any) -> Any:
        return deferred("half", fn, lambda: installed)

    decorated = decorate(staticmethod(forward)) if outside else staticmethod(decorate(forward))
    product = type("Product", (torch.autograd.Function,), {"forward": decorated, "backward": staticmethod(backward)})
    x, weight = torch.full((2,), 3.0, requires_grad=True), nn.Parameter(ones(f32))
    result = product.apply(x, weight)
    assert result.dtype == installed.dtype
    result.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (f32, f32)
    assert weight.grad.tolist() == [3, 3]


def test_the_apply_of_an_autograd_function_can_be_decorated(installed: FunctionCasts) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert grad.dtype == installed.dtype
            return grad * 2

    double = deferred("half", Double.apply, lambda: installed)
    weight = nn.Parameter(ones(f32))
    result = double(weight)
    assert result.dtype == installed.dtype
    result.sum().backward()
    assert weight.grad.tolist() == [2, 2]
    assert len(installed.cache.kept()) == 1
