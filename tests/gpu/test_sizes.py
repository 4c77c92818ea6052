"""Ten thousand tensors, and one of more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from amp_engine import kernels
from amp_engine.kernels.formulas import Sgd
from tests.gpu.support import FLOATS, GPU, STANDS_IN, assert_same_bits, cuda, on_gpu, randn

pytestmark = pytest.mark.cuda

MANY = 1_000 if STANDS_IN else 10_000
EDGE = 2**15 if STANDS_IN else 2**31
HUGE = EDGE + 5


def test_ten_thousand_tensors():
    tensors = [randn(1 + i % 1000, FLOATS[i % 3], i % 2) for i in range(MANY)]
    on_device = on_gpu(tensors)
    assert_same_bits(tuple(kernels.check(on_device)), tuple(kernels.check(tensors)))
    weights = [randn(t.numel()) for t in tensors]
    ours = on_gpu(weights)
    lists = (on_device, ours, [torch.zeros_like(w) for w in ours], None, torch.zeros(MANY, device=GPU))
    kernels.step_once(Sgd(lr=0.1, momentum=0.9), *lists)
    expected = (tensors, weights, [torch.zeros_like(w) for w in weights], None, torch.zeros(MANY))
    kernels.step_once(Sgd(lr=0.1, momentum=0.9), *expected)
    assert_same_bits([*lists[1:3], lists[4]], [*expected[1:3], expected[4]])


@pytest.mark.slow
def test_more_elements_than_an_int_counts():
    if cuda.mem_get_info()[0] < 5 * 2 * HUGE:
        pytest.skip("needs 22 GB of GPU memory")
    gradient = torch.ones(HUGE, dtype=torch.float16, device=GPU)
    found = kernels.check([gradient])
    assert found.sum_squares.item() == HUGE
    assert found.largest.item() == 1.0
    weight = torch.zeros(HUGE, dtype=torch.float16, device=GPU)
    kernels.step_once(Sgd(lr=-1.0), [gradient], [weight], None, None, torch.zeros(1, device=GPU))
    stepped = kernels.check([weight])
    assert stepped.sum_squares.item() == HUGE  # each element once
    assert stepped.largest.item() == 1.0
    for where in (0, EDGE - 1, EDGE, HUGE - 1):
        gradient[where] = float("inf")
        assert kernels.check([gradient]).nonfinite.item()
        gradient[where] = 1.0
