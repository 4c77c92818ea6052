"""Formats of eight and four bits: as torch casts, as the specification of blocks says, and as torchao emulates them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_engine.tools.narrow_formats import (
    E2M1,
    E4M3,
    E5M2,
    Element,
    Format,
    one_scale,
    powers_of_two,
    quantize,
    rounded,
    two_levels,
)

FLOAT8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
MXFP8 = Format(E4M3, powers_of_two, 32)
NVFP4 = Format(E2M1, two_levels, 16)


def around(numbers: Tensor) -> Tensor:
    """Numbers, the middles between them, and the float32 next to each on both sides."""
    numbers = numbers.unique()
    found = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    return torch.cat([found, found.nextafter(up), found.nextafter(down), torch.tensor([-0.0, 1e-45, -1e-40])])


@pytest.mark.parametrize("element", FLOAT8, ids=lambda element: element.name)
def test_rounding_is_that_of_torch(element: Element) -> None:
    dtype = FLOAT8[element]
    info = torch.finfo(dtype)
    assert (element.largest, 2.0**-element.mantissa_bits) == (info.max, info.eps)
    assert 2.0**element.smallest_exponent == info.tiny
    assert str(dtype) == f"torch.{element.name}"
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    assert torch.equal(rounded(numbers, element), numbers)
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(10_000, generator=generator) * 2.0 ** torch.randint(-24, 17, (10_000,), generator=generator)
    values = torch.cat([around(numbers), spread])
    values = values[values.abs() <= element.largest]
    expected = values.to(dtype).float()
    assert torch.equal(rounded(values, element), expected)
    assert torch.equal(rounded(values, element).signbit(), expected.signbit())


def test_four_bits_are_a_table_whose_ties_go_to_even() -> None:
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert rounded(torch.tensor(table), E2M1).tolist() == table
    middles = [(a + b) / 2 for a, b in pairwise(table)]  # 0.25, 0.75, ..., 3.5, 5
    assert rounded(torch.tensor(middles), E2M1).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    values = around(torch.tensor(table + middles))
    values = values[~torch.isin(values, torch.tensor(middles))]
    nearest = [math.copysign(min(table, key=lambda one, x=x: abs(one - abs(x))), x) for x in values.tolist()]
    assert rounded(values, E2M1).tolist() == nearest


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda element: element.name)
def test_what_is_too_large_saturates_and_what_is_not_finite_is_nan(element: Element) -> None:
    largest = element.largest
    found = rounded(torch.tensor([largest * 1.01, -largest * 1.2, 3e38, math.inf, -math.inf, math.nan]), element)
    assert found[:3].tolist() == [largest, -largest, largest]
    assert found[3:].isnan().all()


# --- scales, by hand ------------------------------------------------------------------------------


def test_one_scale_makes_the_largest_448() -> None:
    found = quantize(torch.tensor([[7.0, 0.1], [-0.3, 0.0]]), Format(E4M3, one_scale), -1)
    # A scale of 448 / 7 = 64: 0.1 is 6.4, between 6 and 6.5; -0.3 is -19.2, between 18 and 20.
    assert found.tolist() == [[7.0, 6.5 / 64], [-20.0 / 64, 0.0]]


def test_a_microscaled_block_has_the_power_of_two_of_the_specification() -> None:
    x = torch.zeros(2, 70)
    x[0, 0], x[0, 1], x[0, 31] = 3.0, 0.3, -0.001
    x[0, 32], x[0, 33] = 1.9, 1.0
    x[0, 64], x[0, 69] = 2.0**-20, 2.0**-21 * 1.3
    x[1] = -x[0] * 4
    # Largest powers of two 2, 1 and 2^-20, so scales 2 / 2^8, 1 / 2^8 and 2^-20 / 2^8.
    expected = torch.zeros(2, 70)
    expected[0, 0] = 3.0
    expected[0, 1] = 40.0 / 128  # 38.4, between 36 and 40
    expected[0, 31] = -0.125 / 128  # -0.128, between -0.125 and -0.140625
    expected[0, 32] = 448.0 / 256  # 486.4 is beyond the largest number
    expected[0, 33] = 1.0
    expected[0, 64] = 2.0**-20
    expected[0, 69] = 2.0**-28 * 160  # 166.4, between 160 and 176
    expected[1] = -expected[0] * 4
    assert torch.equal(quantize(x, MXFP8, -1), expected)
    assert torch.equal(quantize(x.t(), MXFP8, 0), expected.t())
    assert torch.equal(quantize(x.t().expand(3, 70, 2), MXFP8, -2), expected.t().expand(3, 70, 2))


def test_scales_of_microscaled_blocks_end_where_e8m0_does() -> None:
    tiny = torch.full((1, 32), 2.0**-127)
    tiny[0, 1] = 2.0**-137  # an element of 2^-10 at a scale of 2^-127: half of the smallest, which rounds to even
    expected = torch.full((1, 32), 2.0**-127)
    expected[0, 1] = 0.0
    assert torch.equal(quantize(tiny, MXFP8, -1), expected)
    assert torch.equal(quantize(torch.full((32,), 2.0**127), MXFP8, -1), torch.full((32,), 2.0**127))


def test_two_levels_by_hand() -> None:
    x = torch.zeros(5, 16)
    x[0, 0] = 2688.0  # 6 * 448: the scale of the tensor is 1, and that of this block 448
    x[1, :4] = torch.tensor([12.0, 5.0, -7.0, 0.4])  # a scale of 2: 6, 2.5, -3.5, 0.2
    x[2, :3] = torch.tensor([1.0, 0.4, 0.1])  # 1 / 6 in E4M3: 11 / 64, between 10 / 64 and 12 / 64
    x[3, :2] = torch.tensor([0.0117, 0.001])  # 0.00195 in E4M3: 2^-9
    x[4, 0] = 0.005  # 0.00083 in E4M3: 0
    expected = torch.zeros(5, 16)
    expected[0, 0] = 2688.0
    expected[1, :4] = torch.tensor([12.0, 4.0, -8.0, 0.0])
    expected[2, :3] = torch.tensor([6 * 11, 2 * 11, 0.5 * 11]) / 64  # 5.8, 2.3, 0.58
    expected[3, :2] = torch.tensor([6.0, 0.5]) / 512
    assert torch.equal(quantize(x, NVFP4, -1), expected)
    assert torch.equal(quantize(x.t(), NVFP4, 0), expected.t())
    assert torch.equal(quantize(x * 2.0**-30, NVFP4, -1), expected * 2.0**-30)


@pytest.mark.parametrize("form", [Format(E4M3, one_scale), MXFP8, NVFP4])
def test_zeros_and_empty_tensors_stay_and_what_is_not_finite_spoils_its_block(form: Format) -> None:
    assert torch.equal(quantize(torch.zeros(2, 40), form, -1), torch.zeros(2, 40))
    assert quantize(torch.zeros(2, 0), form, -1).shape == (2, 0)
    tiny = quantize(torch.full((2, 40), 1e-44), form, -1)
    assert tiny.isfinite().all()
    for bad in (math.inf, math.nan):
        x = torch.ones(2, 40)
        x[0, 0] = bad
        assert quantize(x, form, -1)[0, :16].isnan().all()


# --- others' arithmetic ---------------------------------------------------------------------------


def test_the_product_is_that_of_torch_in_float8() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 64, generator=generator), torch.randn(64, 16, generator=generator)
    scales = [448.0 / one.abs().amax() for one in (x, y)]
    x8, y8 = ((one * scale).to(torch.float8_e4m3fn) for one, scale in zip((x, y), scales, strict=True))
    try:
        expected = torch._scaled_mm(
            x8, y8.t().contiguous().t(), scale_a=1 / scales[0], scale_b=1 / scales[1], out_dtype=torch.float32
        )
    except (RuntimeError, NotImplementedError) as e:
        pytest.skip(f"torch._scaled_mm: {e}")
    form = Format(E4M3, one_scale)
    torch.testing.assert_close(quantize(x, form, -1) @ quantize(y, form, 0), expected, rtol=1e-5, atol=1e-5)


def sample() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 128, generator=generator) * 2.0 ** torch.randint(-3, 4, (64, 1), generator=generator)


@pytest.mark.parametrize("element", FLOAT8, ids=lambda element: element.name)
def test_one_scale_is_that_of_torchao(element: Element) -> None:
    utils: Any = pytest.importorskip("torchao.float8.float8_utils")
    x = sample()
    scale = utils.tensor_to_scale(x, FLOAT8[element])
    expected = utils.to_fp8_saturated(x * scale, FLOAT8[element]).float() * (1.0 / scale)
    assert torch.equal(quantize(x, Format(element, one_scale), -1), expected)


def test_microscaled_blocks_are_those_of_torchao() -> None:
    mx: Any = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    expected = mx.MXTensor.to_mx(sample(), torch.float8_e4m3fn, 32).dequantize(torch.float32)
    assert torch.equal(quantize(sample(), MXFP8, -1), expected)


def test_two_levels_are_those_of_torchao() -> None:
    nvfp4: Any = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    scale = nvfp4.per_tensor_amax_to_scale(sample().abs().amax())
    expected = nvfp4.NVFP4Tensor.to_nvfp4(sample(), per_tensor_scale=scale).dequantize(torch.float32)
    torch.testing.assert_close(quantize(sample(), NVFP4, -1), expected, rtol=1e-6, atol=0.0)
