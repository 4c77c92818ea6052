"""Each operation against arithmetic done by hand or in float64."""

import math

import pytest
import torch

from amp_engine import kernels

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [0, 1, 31, 4097]


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator).to(dtype) for n in SIZES]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_names_the_tensor(dtype, bad):
    given = tensors(dtype)
    assert kernels.nonfinite(given).tolist() == [False] * 4
    given[2][17] = bad
    assert kernels.nonfinite(given).tolist() == [False, False, True, False]


def test_nonfinite_of_nothing_is_empty():
    assert kernels.nonfinite([]).shape == (0,)


def test_finite_values_whose_squares_overflow_are_finite():
    assert kernels.nonfinite([torch.full((8,), 3e38), torch.full((8,), 65504.0).half()]).tolist() == [False, False]


@pytest.mark.parametrize("dtype", TYPES)
def test_unscaled_is_float32_and_leaves_its_input(dtype):
    given = tensors(dtype)
    before = [t.clone() for t in given]
    result = kernels.unscaled(given, torch.tensor(2.0**-16))
    for t, b, r in zip(given, before, result, strict=True):
        assert r.dtype == torch.float32
        assert torch.equal(t, b)
        assert torch.equal(r, t.float() * 2.0**-16)


def test_unscaled_keeps_strides():
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).half()
    (result,) = kernels.unscaled([channels_last], torch.tensor(1.0))
    assert result.stride() == channels_last.stride()


@pytest.mark.parametrize("dtype", TYPES)
def test_unscale_rounds_once_in_the_type_of_the_tensor(dtype):
    given = tensors(dtype)
    inv_scale = torch.tensor(1.0 / 3.0)
    expected = [(t.double() * inv_scale.double()) for t in given]
    kernels.unscale_(given, inv_scale)
    for t, e in zip(given, expected, strict=True):
        assert t.dtype == dtype
        torch.testing.assert_close(t.double(), e, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)


def test_unscaling_half_survives_an_inverse_below_half():
    grad = torch.full((4,), 2.0**14, dtype=torch.float16)
    kernels.unscale_([grad], torch.tensor(2.0**-26))
    assert torch.equal(grad, torch.full((4,), 2.0**-12, dtype=torch.float16))


def test_accumulate_adds_pairwise():
    totals = [torch.ones(3), torch.ones(2)]
    kernels.accumulate_(totals, [torch.full((3,), 2.0), torch.full((2,), 3.0)])
    assert [t.tolist() for t in totals] == [[3.0] * 3, [4.0] * 2]


def test_cast_copy_rounds_to_nearest_even():
    outputs = [torch.zeros(3, dtype=torch.bfloat16)]
    kernels.cast_copy_(outputs, [torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-7])])
    assert outputs[0].tolist() == [1.0, 1.0 + 2**-6, 1.0 + 2**-7]


RULES = {
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "min_scale": 1.0,
    "max_scale": 16.0,
}


@pytest.mark.parametrize(
    ("flags", "scale", "count"),
    [
        ([0, 0], 4.0, 2),
        ([0, 0, 0], 8.0, 0),
        ([0, 0, 1], 2.0, 0),
        ([0, 1, 0, 0, 0], 4.0, 0),
        ([1, 1, 1, 1], 1.0, 0),  # the floor
        ([0] * 12, 16.0, 0),  # the ceiling
        ([2.0], 2.0, 0),  # a flag that was summed over ranks
    ],
)
def test_update_scale_follows_its_rule(flags, scale, count):
    state, tracker = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32)
    for flag in flags:
        kernels.update_scale_(state, tracker, torch.tensor(float(flag)), **RULES)
    assert (state.item(), tracker.item()) == (scale, count)
    assert (state.dtype, tracker.dtype) == (torch.float32, torch.int32)
