"""check, scale_, axpby_, cast_copy_, nonfinite and accumulate_ against float64."""

import math

import pytest
import torch

from amp_engine import kernels

from . import oracle
from .lists import FLOATS, SIZES, Arena, copies, same_bits, same_values

INV_SCALE = torch.tensor(1.0 / 3000.0)


@pytest.fixture
def arena():
    arena = Arena()
    yield arena
    assert arena.is_intact()


@pytest.fixture
def mixed(arena):
    """Return every type in every size, in one list."""
    return [arena.randn(n, dtype) for n in SIZES for dtype in FLOATS]


def assert_checks(checks, tensors):
    n = len(tensors)
    assert [(t.dtype, t.shape) for t in checks] == [
        (torch.bool, (n,)),
        (torch.float64, (n,)),
        (torch.float32, (n,)),
    ]
    assert checks.nonfinite.tolist() == [oracle.is_nonfinite(t) for t in tensors]
    assert checks.largest.tolist() == pytest.approx([oracle.largest(t) for t in tensors], rel=0, abs=0, nan_ok=True)
    sums = [oracle.sum_squares(t) for t in tensors]
    assert checks.sum_squares.tolist() == pytest.approx(sums, rel=1e-6, abs=1e-37, nan_ok=True)


def test_check_of_every_type_and_size(mixed):
    before = copies(mixed)
    assert_checks(kernels.check(mixed), mixed)
    assert all(map(same_bits, mixed, before))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, -1, 17])
def test_check_finds_one_bad_element(mixed, bad, place):
    for i, t in enumerate(mixed):
        if i % 2 and t.numel() > 17:
            t[place] = bad
    checks = kernels.check(mixed)
    assert checks.nonfinite.any()
    assert_checks(checks, mixed)


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_values_whose_squares_overflow_are_finite(dtype):
    largest = torch.finfo(dtype).max
    given = [torch.full((8,), largest, dtype=dtype), torch.full((40000,), -largest, dtype=dtype)]
    checks = kernels.check(given)
    assert checks.nonfinite.tolist() == [False, False]
    assert checks.largest.tolist() == [largest, largest]


@pytest.mark.parametrize("dtype", FLOATS)
def test_subnormals_and_zeros_are_looked_at(arena, dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    given = [arena.place(torch.full((n,), smallest, dtype=dtype)) for n in (1, 100, 40000)] + [arena.zeros(9, dtype)]
    assert kernels.check(given).largest.tolist() == [smallest] * 3 + [0.0]


def test_nothing_is_checked_to_nothing():
    assert [t.shape for t in kernels.check([])] == [(0,)] * 3
    kernels.cast_copy_([], [])


def test_scale_in_place_rounds_once_and_checks_what_was_there(mixed):
    before = copies(mixed)
    checks = kernels.scale_(mixed, mixed, INV_SCALE)
    assert_checks(checks, before)
    for t, b in zip(mixed, before, strict=True):
        assert same_bits(t, (b.float() * INV_SCALE).to(b.dtype))


@pytest.mark.parametrize("factor", [1.0, 0.3, 3e4, 1e-7])
def test_scale_between_all_types(arena, factor):
    pairs = [(n, a, b) for n in SIZES for a in FLOATS for b in FLOATS]
    inputs, outputs = [arena.randn(n, a) for n, a, _ in pairs], [arena.zeros(n, b) for n, _, b in pairs]
    before, factor = copies(inputs), torch.tensor(factor)
    checks = kernels.scale_(outputs, inputs, factor)
    assert_checks(checks, inputs)
    assert all(map(same_bits, inputs, before))
    for given, out in zip(inputs, outputs, strict=True):
        assert same_bits(out, (given.float() * factor).to(out.dtype))


@pytest.mark.parametrize("into", ["ys", "xs", "others"])
def test_axpby_is_one_fma(arena, into):
    pairs = [(n, a, b) for n in SIZES for a in FLOATS for b in FLOATS]
    xs, ys = [arena.randn(n, x) for n, x, _ in pairs], [arena.randn(n, y) for n, _, y in pairs]
    outputs = {"ys": ys, "xs": xs, "others": [arena.zeros(n, y) for n, _, y in pairs]}[into]
    a, b = torch.tensor(0.3), torch.tensor(-0.7)
    old_xs, old_ys = copies(xs), copies(ys)
    assert_checks(kernels.axpby_(outputs, xs, ys, a, b), old_xs)
    for out, x, y in zip(outputs, old_xs, old_ys, strict=True):
        exact = a.double() * x.double() + (b * y.float()).double()
        # A tie between float64 and float32 may move the last bit of float32, and so one of half.
        assert torch.equal(out.float(), exact.float().to(out.dtype).float()) or torch.allclose(
            out.double(), exact, rtol=torch.finfo(out.dtype).eps * 0.51, atol=torch.finfo(out.dtype).tiny
        )


def test_axpby_without_factors_adds(arena):
    x, y = arena.randn(33, torch.float16), arena.randn(33)
    expected = x.float() + y
    kernels.axpby_([y], [x], [y], None, None)
    assert same_bits(y, expected)


def test_cast_copy_between_all_types(arena):
    pairs = [(n, a, b) for n in SIZES for a in FLOATS for b in FLOATS]
    inputs, outputs = [arena.randn(n, a) for n, a, _ in pairs], [arena.zeros(n, b) for n, _, b in pairs]
    kernels.cast_copy_(outputs, inputs)
    for given, out in zip(inputs, outputs, strict=True):
        assert same_bits(out, given.to(out.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_low_precision_number_survives_float32_and_back(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide, back, copied = torch.zeros(65536), torch.zeros_like(every), torch.zeros_like(every)
    one = torch.tensor(1.0)
    kernels.scale_([wide], [every], one)
    assert same_values(wide, every.float())
    kernels.scale_([back], [wide], one)
    kernels.cast_copy_([copied], [every.float()])
    assert same_values(back, every)
    assert same_values(copied, every)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_float32_is_rounded_as_by_torch(dtype):
    generator = torch.Generator().manual_seed(1)
    some = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator).to(torch.int32)
    # Ties, and their neighbours on both sides: low bits that are half of a unit of the type, or next to it.
    unit = 16 if dtype == torch.bfloat16 else 13
    ties = (some & -(1 << unit)) + (1 << (unit - 1)) + some % 3 - 1
    given = torch.cat([some, ties.to(torch.int32)]).view(torch.float32)
    output = torch.zeros(given.shape, dtype=dtype)
    kernels.cast_copy_([output], [given])
    assert same_values(output, given.to(dtype))


def channels_last(dtype):
    values = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(2))
    return values.to(dtype).to(memory_format=torch.channels_last)


def test_channels_last_is_walked_in_its_own_order():
    x = channels_last(torch.float16)
    result = torch.empty_like(x, dtype=torch.float32)
    kernels.scale_([result], [x], INV_SCALE)
    assert torch.equal(result, x.float() * INV_SCALE)
    y = channels_last(torch.float32)
    expected = x.float() + y
    kernels.axpby_([y], [x], [y], None, None)
    assert torch.equal(y, expected)


def test_strides_of_dimensions_of_one_element_do_not_matter():
    x, y = torch.randn(1, 6), torch.zeros(6, 1).t()
    assert x.stride() != y.stride()
    kernels.cast_copy_([y], [x])
    assert torch.equal(y, x)


def test_tensors_that_want_gradients_may_be_written():
    param = torch.nn.Parameter(torch.ones(5))
    version = param._version
    kernels.scale_([param], [param], torch.tensor(0.5))
    assert param.tolist() == [0.5] * 5
    assert param._version > version


def test_accumulate_adds_pairwise():
    totals = [torch.ones(3), torch.ones(2)]
    kernels.accumulate_(totals, [torch.full((3,), 2.0), torch.full((2,), 3.0)])
    assert [t.tolist() for t in totals] == [[3.0] * 3, [4.0] * 2]
