"""FP32 by `dtype`: softmax, log_softmax, sum and prod are told to compute in float32, and convert by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_engine.casting import FunctionCasts

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.softmax": lambda x: F.softmax(x, dim=-1),
    "F.softmax, all by position": lambda x: F.softmax(x, -1, 3, None),
    "F.log_softmax": lambda x: F.log_softmax(x, 1),
    "torch.softmax": lambda x: torch.softmax(x, 0),
    "torch.softmax, None for the type": lambda x: torch.softmax(x, 0, None),
    "torch.softmax, None by name": lambda x: torch.softmax(x, dim=0, dtype=None),
    "torch.log_softmax": lambda x: torch.log_softmax(input=x, dim=0),
    "torch.special.softmax": lambda x: torch.special.softmax(x, 0),
    "torch.special.log_softmax": lambda x: torch.special.log_softmax(x, dim=0),
    "Tensor.softmax": lambda x: x.softmax(-1),
    "Tensor.log_softmax": lambda x: x.log_softmax(dim=-1),
    "torch.sum": lambda x: torch.sum(x),
    "torch.sum, dim": lambda x: torch.sum(x, dim=1, keepdim=True),
    "torch.sum, no dim": lambda x: torch.sum(x, None),
    "Tensor.sum": lambda x: x.sum(),
    "Tensor.sum, dims": lambda x: x.sum((0, 1)),
    "Tensor.sum, axis": lambda x: x.sum(axis=0),
    "torch.prod": lambda x: torch.prod(x),
    "Tensor.prod": lambda x: x.prod(0, keepdim=True),
}
TOLD = {
    "by name": lambda x, dtype: x.sum(dtype=dtype),
    "beside dim": lambda x, dtype: torch.softmax(x, dim=0, dtype=dtype),
    "by position": lambda x, dtype: torch.softmax(x, 0, dtype),
    "by position of F": lambda x, dtype: F.log_softmax(x, 0, 3, dtype),
}


@pytest.fixture(params=["native", "Python"])
def casts(low: torch.dtype, native: bool, request: pytest.FixtureRequest) -> Iterator[FunctionCasts]:
    if request.param == "native" and not native:
        pytest.skip("the wrappers are not compiled (python -m amp_engine info)")
    casts = FunctionCasts(low, native=request.param == "native")
    casts.install()
    yield casts
    casts.remove()


def of(call: Callable[..., Tensor], x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of x."""
    x = x.detach().requires_grad_()
    result = call(x, *args)
    result.backward(torch.arange(1.0, result.numel() + 1).view(result.shape).to(result.dtype))
    return result.detach(), x.grad


def numbers(dtype: torch.dtype) -> Tensor:
    return (torch.arange(12.0).view(3, 4) / 7 + 0.1).to(dtype)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_and_gradients_are_those_of_an_argument_in_float32(
    call: Callable[[Tensor], Tensor], casts: FunctionCasts
) -> None:
    x = numbers(casts.dtype)
    result, gradient = of(call, x)
    with casts.disabled():
        expected, expected_gradient = of(lambda x: call(x.float()), x)
    assert (result.dtype, gradient.dtype) == (torch.float32, casts.dtype)
    assert torch.equal(result, expected)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("call", TOLD.values(), ids=TOLD)
@pytest.mark.parametrize("given", ["low", torch.float32, torch.float64], ids=str)
def test_a_type_that_is_asked_for_is_given(
    call: Callable[..., Tensor], given: Any, dtype: torch.dtype, casts: FunctionCasts
) -> None:
    x = numbers(casts.dtype if given == "low" else given)
    results = of(call, x, dtype)
    with casts.disabled():
        expected = of(call, x, dtype)
    for result, right in zip(results, expected, strict=True):
        assert result.dtype == right.dtype
        assert torch.equal(result, right)


@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.int64, torch.bool], ids=str)
def test_other_types_are_left_to_torch(given: torch.dtype, casts: FunctionCasts) -> None:
    x = numbers(torch.float32).to(given)
    results = [x.sum(), torch.prod(x, 1), x.sum(dim=0)]
    with casts.disabled():
        expected = [x.sum(), torch.prod(x, 1), x.sum(dim=0)]
    for result, right in zip(results, expected, strict=True):
        assert result.dtype == right.dtype
        assert torch.equal(result, right)


def test_out_decides(casts: FunctionCasts) -> None:
    x = numbers(casts.dtype)
    for dtype in (casts.dtype, torch.float32):
        out = torch.zeros(3, dtype=dtype)
        assert torch.sum(x, 1, out=out) is out
        assert out.dtype == dtype
        with casts.disabled():
            assert torch.equal(out, x.to(dtype).sum(1))


def test_no_copy_of_the_argument_is_kept_for_the_backward(casts: FunctionCasts) -> None:
    saved: list[tuple[torch.dtype, int]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor.dtype, tensor.data_ptr()))
        return tensor

    x = numbers(casts.dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.prod(x)
    assert (x.dtype, x.data_ptr()) in saved
    assert all(dtype == x.dtype or pointer != x.data_ptr() for dtype, pointer in saved)
    assert sum(dtype == torch.float32 for dtype, _ in saved) <= 1  # the result


def test_a_subclass_is_cast_before_the_call(casts: FunctionCasts) -> None:
    class Watching(Tensor):
        seen: list[tuple[Any, dict[str, Any]]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ == "sum":
                cls.seen.append((args[0].dtype, kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = numbers(casts.dtype).as_subclass(Watching)
    assert torch.sum(x).dtype == torch.float32
    assert "dtype" not in Watching.seen[-1][1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_cast_before_the_call(casts: FunctionCasts) -> None:
    parts = [numbers(casts.dtype), numbers(casts.dtype)[:2]]
    result = torch.nested.nested_tensor(parts).sum(-1, keepdim=True)
    assert result.dtype == torch.float32
    with casts.disabled():
        assert torch.equal(result[1], parts[1].float().sum(-1, keepdim=True))
