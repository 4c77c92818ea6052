"""The GPU tests' own comparison, which needs no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import stand_in
from tests.gpu.support import FLOATS, assert_same_bits

INF = float("inf")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("infinite", [INF, -INF])
def test_an_infinity_is_not_the_largest_number(dtype, infinite):
    largest = torch.full((2,), torch.finfo(dtype).max).copysign(torch.tensor(infinite))
    assert_same_bits(torch.full((2,), infinite, dtype=dtype), torch.full((2,), infinite, dtype=dtype))
    with pytest.raises(AssertionError):
        assert_same_bits(torch.full((2,), infinite, dtype=dtype), largest.to(dtype))


def test_the_stand_in_has_names_of_torch_cuda():
    public = [name for name, value in vars(stand_in).items() if getattr(value, "__module__", "") == stand_in.__name__]
    ours = {"cuda_of", "captured", "calls_of"}
    assert ours < set(public)
    assert [name for name in public if not hasattr(torch.cuda, name) and name not in ours] == []
    for kind in ("Stream", "Event"):
        assert not set(dir(getattr(stand_in, kind))) - set(dir(getattr(torch.cuda, kind))) - {"__dict__", "__weakref__"}


def test_nans_are_equal_and_no_number():
    nan = torch.full((2,), float("nan"))
    assert_same_bits(nan, nan.clone())
    with pytest.raises(AssertionError):
        assert_same_bits(nan, torch.zeros(2))
    with pytest.raises(AssertionError):
        assert_same_bits(nan, torch.full((2,), 12345.0))
