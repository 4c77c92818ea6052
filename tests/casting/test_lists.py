"""What the comparison with torch.autocast in test_coverage.py, of every listed function, leaves open."""

from __future__ import annotations

import pkgutil
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_engine.casting import FunctionCasts
from amp_engine.casting.lists import NAMESPACES

f32 = torch.float32
X = torch.tensor([[0.25, 0.5], [0.75, 0.125]])


COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")


@pytest.mark.parametrize(
    ("space", "name"),
    [*product((torch, Tensor), COMPARISONS), *((Tensor, f"__{name}__") for name in COMPARISONS)],
)
def test_comparisons_are_made_in_the_widest_type(space: Any, name: str, casts: FunctionCasts) -> None:
    compare = getattr(space, name)
    low = X.to(casts.dtype)
    number = torch.tensor(0.25 + 2**-20)  # 0-dim: torch would compare in low precision, where it is 0.25
    for other in (number, X + 2**-20):
        assert torch.equal(compare(low, other), compare(X, other))
    assert not torch.equal(low, X + 2**-20)


OPERATORS = [f"__{kind}{name}__" for kind, name in product(("", "i", "r"), ("add", "mul", "sub", "truediv"))]
OPERATORS.remove("__rtruediv__")  # computed by way of `reciprocal`, in FP32


@pytest.mark.parametrize(
    ("space", "name"),
    [*product((torch, Tensor), ("add", "atan2", "div", "mul")), *((Tensor, name) for name in OPERATORS)],
)
def test_promote_counts_0_dim_tensors_but_not_numbers(space: Any, name: str, casts: FunctionCasts) -> None:
    function = getattr(space, name)
    assert function(X.to(casts.dtype), torch.tensor(0.5)).dtype == f32
    if name != "atan2":
        assert function(X.to(casts.dtype), 0.5).dtype == casts.dtype


@pytest.mark.parametrize("name", ["add_", "lt_", "addmm_"])
def test_in_place_methods_cast_to_the_type_of_what_they_write(name: str, casts: FunctionCasts) -> None:
    for first, second in ((f32, casts.dtype), (casts.dtype, f32)):
        written, other = X.to(first, copy=True), X.to(second)
        result = getattr(written, name)(*[other] * (2 if name == "addmm_" else 1))
        assert result is written
        assert result.dtype == first


@pytest.mark.parametrize(
    ("space", "kind"),
    [(torch, "function exp_ with fp16 arguments"), (Tensor, "method exp_ on fp16 Tensors")],
    ids=["torch", "Tensor"],
)
def test_in_place_functions_that_lose_range_are_refused_on_float16(space: Any, kind: str, casts: FunctionCasts) -> None:
    if casts.dtype is torch.float16:
        with pytest.raises(NotImplementedError, match="^Cannot call in-place " + kind):
            space.exp_(X.half())
    for dtype in (torch.bfloat16, f32, torch.float64):
        given = X.to(dtype, copy=True)
        assert space.exp_(given) is given
        assert given.dtype == dtype
    with casts.disabled():
        space.exp_(X.half())


def test_binary_cross_entropy_is_refused_on_float16_with_the_ways_out(casts: FunctionCasts) -> None:
    if casts.dtype is torch.bfloat16:
        assert F.binary_cross_entropy(X.bfloat16(), X).dtype == f32
        return
    for args in ((X.half(), X), (X, X.half())):
        with pytest.raises(NotImplementedError) as refusal:
            F.binary_cross_entropy(*args)
        text = str(refusal.value)
        assert text.startswith(
            "\namp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` "
        )
        for way_out in ("BCEWithLogitsLoss", "register_float_function(torch, 'sigmoid')", "allow_banned=True"):
            assert way_out in text
    assert F.binary_cross_entropy(X, X).dtype == f32
    with casts.disabled():
        assert F.binary_cross_entropy(X.half(), X.half()).dtype == torch.float16


def test_allow_banned_computes_binary_cross_entropy_in_float(low: torch.dtype) -> None:
    casts = FunctionCasts(low, allow_banned=True)
    casts.install()
    loss = F.binary_cross_entropy(X.to(low), X.to(low))
    casts.remove()
    assert loss.dtype == f32
    torch.testing.assert_close(loss, F.binary_cross_entropy(X, X))


@pytest.mark.parametrize("name", ["cat", "stack"])
def test_sequences_are_joined_in_the_widest_type(name: str, casts: FunctionCasts) -> None:
    fn, low = getattr(torch, name), X.to(casts.dtype)
    for kind in (list, tuple):
        assert fn(kind([low, low])).dtype == casts.dtype
        assert fn(kind([low, X])).dtype == f32
        assert fn(tensors=kind([X, low]), dim=1).dtype == f32
        assert fn(kind([low, X.double()])).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_double_and_complex_are_never_touched(dtype: torch.dtype, casts: FunctionCasts) -> None:
    x = X.to(dtype)
    assert {y.dtype for y in (x.mm(x), x.sum(), x.mul(x))} == {dtype}


def test_integers_are_never_touched(casts: FunctionCasts) -> None:
    ones = torch.ones(2, 2, dtype=torch.int64)
    assert torch.mm(ones, ones).dtype == torch.int64
    assert ones.sum().dtype == torch.int64
    assert (ones + ones).dtype == torch.int64
    assert ones.cpu() is ones
    assert (ones * X.to(casts.dtype)).dtype == casts.dtype


# Names that torch had once, kept since apex lists them.
GONE = {"__div__", "__idiv__"}


def test_every_namespace_exists_with_the_names_listed_in_it_once() -> None:
    for space, lists in NAMESPACES:
        names = [name for names in vars(lists).values() for name in names]
        assert set(names) - GONE <= set(dir(pkgutil.resolve_name(space))), space
        assert len(names) == len(set(names)), space


def test_distributions_use_the_cast_functions_that_they_imported_by_name(casts: FunctionCasts) -> None:
    logits, zeros = X.to(casts.dtype), torch.zeros(2, 2, dtype=casts.dtype)
    for name in ("Bernoulli", "ContinuousBernoulli", "Geometric"):
        distribution = getattr(torch.distributions, name)(logits=logits, validate_args=False)
        assert distribution.log_prob(zeros).dtype == f32, name
    assert torch.distributions.transforms.SoftplusTransform()(logits).dtype == f32
