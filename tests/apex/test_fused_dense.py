"""`apex.fused_dense`: a linear layer, and two with a GELU between."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_engine import amp
from amp_engine.apex.fused_dense import FusedDense, FusedDenseGeluDense
from tests.support import assert_bitwise


@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_layer_is_the_linear_layer_of_torch(bias):
    dense, input = FusedDense(5, 3, bias=bias), torch.randn(4, 5)
    assert isinstance(dense, nn.Linear)
    assert list(dense.state_dict()) == ["weight", "bias"][: 1 + bias]
    assert_bitwise(dense(input), F.linear(input, dense.weight, dense.bias))


@pytest.mark.parametrize("bias", [True, False])
def test_dense_gelu_dense_is_that(bias):
    dense, input = FusedDenseGeluDense(5, 7, 3, bias), torch.randn(2, 4, 5)
    names = [name for name, _ in dense.named_parameters()]
    assert sorted(names) == sorted(["weight1", "weight2", *(["bias1", "bias2"] if bias else [])])
    hidden = nn.GELU(approximate="tanh")(F.linear(input, dense.weight1, dense.bias1))
    output = dense(input)
    assert_bitwise(output, F.linear(hidden, dense.weight2, dense.bias2))
    output.sum().backward()
    assert all(parameter.grad.any() for parameter in dense.parameters())
    assert repr(dense) == (f"FusedDenseGeluDense(in_features=5, intermediate_features=7, out_features=3, bias={bias})")


def test_it_starts_within_the_bounds_of_torch_linear():
    dense = FusedDenseGeluDense(4, 400, 1000)
    for parameter, bound in ((dense.weight1, 0.5), (dense.bias1, 0.5), (dense.weight2, 0.05), (dense.bias2, 0.05)):
        assert 0.95 * bound < parameter.abs().max() <= bound


@pytest.mark.parametrize("module", [FusedDense(5, 3), FusedDenseGeluDense(5, 7, 3)], ids=lambda m: type(m).__name__)
def test_under_O1_it_returns_half(module):
    amp.initialize(module, opt_level="O1", verbosity=0)
    assert module(torch.randn(4, 5)).dtype == torch.float16
