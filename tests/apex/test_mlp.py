"""`apex.mlp`: linear layers with an activation behind each."""

import pytest
import torch
from torch import nn

from amp_engine import amp
from amp_engine.apex.mlp import MLP
from tests.support import assert_bitwise

ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "none": nn.Identity}


def as_layers(mlp):
    layers = []
    for i in range(mlp.num_layers):
        linear = nn.Linear(mlp.mlp_sizes[i], mlp.mlp_sizes[i + 1], bias=mlp.bias)
        linear.load_state_dict({k[:-2]: v for k, v in mlp.state_dict().items() if k.endswith(f"_{i}")})
        layers += [linear, ACTIVATIONS[mlp.activation]()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_its_layers_with_the_activation_behind_each(activation, bias):
    mlp = MLP([5, 7, 3], bias=bias, activation=activation)
    layers, input = as_layers(mlp), torch.randn(4, 5)
    assert_bitwise(mlp(input), layers(input))
    mlp(input).square().sum().backward()
    layers(input).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in mlp.named_parameters()}
    assert len(gradients) == (4 if bias else 2)
    for i in (0, 1):
        assert_bitwise(gradients[f"weight_{i}"], layers[2 * i].weight.grad)
        if bias:
            assert_bitwise(gradients[f"bias_{i}"], layers[2 * i].bias.grad)


def test_its_defaults_and_its_state_are_those_of_apex():
    mlp = MLP([5, 7, 3])
    assert list(mlp.state_dict()) == ["weight_0", "bias_0", "weight_1", "bias_1"]
    assert (mlp.bias, mlp.activation) == (True, "relu")
    assert repr(mlp) == "MLP(mlp_sizes=[5, 7, 3], bias=True, activation='relu')"


def test_it_starts_within_the_bounds_of_torch_linear():
    for parameter in MLP([4, 1000]).parameters():
        assert 0.49 < parameter.abs().max() <= 0.5


def test_under_O1_it_runs_in_half():
    mlp = MLP([5, 7, 3])
    amp.initialize(mlp, opt_level="O1", verbosity=0)
    assert mlp(torch.randn(4, 5)).dtype == torch.float16
    assert mlp.weight_0.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([5, 3], True, "gelu"), "activation is 'gelu'; it may be 'none', 'relu', 'sigmoid'"), (([5],), "at least")],
)
def test_what_it_cannot_be_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        MLP(*arguments)
