"""The list operations on a GPU: to the bit those of the CPU, which tests/kernels holds against float64."""

from __future__ import annotations

import math

import pytest
import torch

from amp_engine import kernels
from amp_engine.errors import AmpValueError
from amp_engine.kernels import _native
from tests.gpu.support import (
    FLOATS,
    GPU,
    HALVES,
    OTHER_DEVICE,
    SIZES,
    STANDS_IN,
    assert_same_bits,
    no_sync,
    on_gpu,
    randn,
)

pytestmark = pytest.mark.cuda


def mixed(sizes, *, offsets=(0, 1, 3)):
    """A tensor of every size, type and offset, on the CPU."""
    return [randn(numel, dtype, offset) for numel in sizes for dtype in FLOATS for offset in offsets]


def scalar(x):
    return torch.tensor(x, dtype=torch.float32)


@pytest.mark.skipif(STANDS_IN, reason="needs a GPU: the CPU's kernels are no CUDA build")
def test_the_module_was_built_for_gpus():
    assert _native.module is not None, _native.reason
    assert _native.module.has_cuda


@pytest.mark.parametrize("sizes", SIZES)
def test_check_is_the_same_on_the_cpu(sizes):
    tensors = mixed(sizes)
    on_device = on_gpu(tensors)
    with no_sync():
        found = kernels.check(on_device)
    assert found.nonfinite.device.type == GPU.type
    assert_same_bits(tuple(found), tuple(kernels.check(tensors)))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_small_check_names_the_tensor_that_is_not_finite(dtype, value):
    for where in (0, 8, 32768, 40000):
        tensors = [randn(40001, dtype), randn(40001, dtype), randn(40001, dtype, 1)]
        for bad in (1, 2):
            given = on_gpu(tensors)
            given[bad][where] = value
            assert kernels.check(given).nonfinite.tolist() == [i == bad for i in range(3)]


def test_small_check_calls_large_finite_values_finite():
    tensors = [torch.full((100,), 3e38), torch.full((100,), 65504.0, dtype=torch.float16)]
    found = kernels.check(on_gpu(tensors))
    assert found.nonfinite.tolist() == [False, False]
    assert found.sum_squares[0].item() in (math.inf, pytest.approx(100 * 3e38**2))  # plain PyTorch squares in float64
    assert found.sum_squares[1].item() == pytest.approx(100 * 65504.0**2)


def norm_of(tensors):
    norm, one, found_inf = (torch.full((), x, device=tensors[0].device) for x in (0.0, 1.0, 0.0))
    return norm, kernels.ListCheck().run(tensors, None, one, found_inf, norm).sum_squares


@pytest.mark.parametrize("sizes", SIZES)
def test_norm_is_the_same_on_the_cpu_and_in_any_order(sizes):
    tensors = mixed(sizes)
    total, sums = norm_of(on_gpu(tensors))
    assert_same_bits((total, sums), norm_of(tensors))
    assert_same_bits(total, norm_of(on_gpu(tensors[::-1]))[0])


@pytest.mark.parametrize("sizes", SIZES)
def test_scale_in_place_is_the_same_on_the_cpu(sizes):
    tensors, inv_scale = mixed(sizes), scalar(1 / 3)
    on_device, device_scale = on_gpu(tensors), inv_scale.to(GPU)
    with no_sync():
        checks = kernels.scale_(on_device, on_device, device_scale)
    expected_checks = kernels.scale_(tensors, tensors, inv_scale)
    assert_same_bits(on_device, tensors)
    assert_same_bits(tuple(checks), tuple(expected_checks))


def combined(xs, ys, outputs, a, b):
    """Everything that axpby_, scale_ and cast_copy_ give, in that order."""
    found = [tuple(kernels.axpby_(outputs, xs, ys, a, b))]
    results = [[o.clone() for o in outputs]]
    found.append(tuple(kernels.scale_(outputs, xs, a)))
    results.append([o.clone() for o in outputs])
    kernels.cast_copy_(outputs, xs)
    return [*results, outputs], found


@pytest.mark.parametrize("sizes", SIZES)
def test_axpby_scale_and_copy_are_the_same_on_the_cpu(sizes):
    xs = mixed(sizes)
    ys = [randn(x.numel(), FLOATS[i % 3], i % 2) for i, x in enumerate(xs)]
    outputs = [randn(x.numel(), FLOATS[(i + 1) % 3], i % 2) for i, x in enumerate(xs)]
    a, b = scalar(0.3), scalar(-1.7)
    given = on_gpu(xs), on_gpu(ys), on_gpu(outputs), a.to(GPU), b.to(GPU)
    with no_sync():
        results, found = combined(*given)
    on_cpu, found_on_cpu = combined(xs, ys, outputs, a, b)
    assert_same_bits(results, on_cpu)
    assert_same_bits(found, found_on_cpu)


def test_small_in_place_results_may_be_the_arguments():
    results = []
    for device in (torch.device("cpu"), GPU):
        torch.manual_seed(0)
        x, y = on_gpu([randn(33000), randn(33000)], device)
        kernels.axpby_([x], [x], [y], scalar(2.0).to(device), scalar(1.0).to(device))
        results.append(x)
    assert_same_bits(*results)


def test_small_types_are_rounded_to_nearest_even():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in HALVES:
        halves = bits.view(dtype)
        floats = halves.float()
        # Every half, and the floats halfway to the next one and next to that.
        nearby = torch.cat(
            [floats, *((floats.view(torch.int32) + d).view(torch.float32) for d in (0xFFF, 0x1000, 0x1001))]
        )
        nearby = torch.cat([nearby, *((floats.view(torch.int32) + d).view(torch.float32) for d in (0x7FFF, 0x8000))])
        nearby = nearby[~nearby.isnan()]
        ours = torch.empty(nearby.numel(), dtype=dtype, device=GPU)
        kernels.cast_copy_([ours], [nearby.to(GPU)])
        assert_same_bits(ours, nearby.to(dtype))
        back = torch.empty(2**16, device=GPU)
        kernels.cast_copy_([back], [halves.to(GPU)])
        assert_same_bits(back, floats)


def test_small_update_scale_follows_the_cpu():
    rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "min_scale": 1.0, "max_scale": 2.0**10}
    for hysteresis in (None, 2):
        states = []
        for device in ("cpu", GPU):
            scale = torch.tensor(256.0, device=device)
            growth = torch.zeros((), dtype=torch.int32, device=device)
            tracker = None if hysteresis is None else torch.full((), hysteresis, dtype=torch.int32, device=device)
            trace = []
            for outcome in "cccooocccccccoooooooooooooccc":
                found_inf = torch.tensor(float(outcome == "o"), device=device)
                kernels.update_scale_(
                    scale, growth, found_inf, hysteresis_tracker=tracker, hysteresis=hysteresis or 1, **rule
                )
                trace.append((scale.item(), growth.item()))
            states.append(trace)
        assert states[0] == states[1]


def test_channels_last_is_walked_in_memory_order():
    images = torch.randn(4, 3, 17, 5).to(memory_format=torch.channels_last)
    on_device = images.to(GPU)
    copy = torch.empty_like(on_device)
    kernels.scale_([copy], [on_device], scalar(0.5).to(GPU))
    assert copy.stride() == on_device.stride() == images.stride()
    assert torch.equal(copy.cpu(), images * 0.5)


@pytest.mark.parametrize(("shape", "strides"), [((4, 3), (6, 2)), ((3,), (2,)), ((5,), (0,)), ((4, 4), (2, 1))])
def test_gaps_and_overlaps_are_refused_before_anything_is_written(shape, strides):
    good = torch.ones(5, device=GPU)
    given, half = [good, torch.zeros(24, device=GPU).as_strided(shape, strides)], scalar(0.5).to(GPU)
    with pytest.raises(AmpValueError, match="1"):
        kernels.scale_(given, given, half)
    assert torch.equal(good.cpu(), torch.ones(5))


def test_lists_of_two_devices_are_refused():
    with pytest.raises(AmpValueError):
        kernels.check([torch.zeros(3, device=GPU), torch.zeros(3, device=OTHER_DEVICE)])
