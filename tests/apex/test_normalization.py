"""`apex.normalization`: torch's norms with apex's arguments, where types may differ too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_engine import amp
from amp_engine.apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from amp_engine.apex.normalization import fused_layer_norm as functional
from tests.support import assert_bitwise

LAYER = (FusedLayerNorm, MixedFusedLayerNorm)
RMS = (FusedRMSNorm, MixedFusedRMSNorm)
MIXED = (MixedFusedLayerNorm, MixedFusedRMSNorm)
HALF, BFLOAT16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def spread(module):
    """Weights that are neither 1 nor exact in half."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def torch_norm(module):
    kind = nn.LayerNorm if isinstance(module, LAYER) else nn.RMSNorm
    plain = kind(module.normalized_shape, module.eps, module.elementwise_affine)
    plain.load_state_dict(module.state_dict())
    return plain.to(next(module.parameters(), torch.empty(0)).dtype)


@pytest.mark.parametrize("shape", [4, (4,), [3, 4], torch.Size([3, 4])], ids=str)
@pytest.mark.parametrize("kind", [*LAYER, *RMS])
def test_of_one_type_it_is_the_norm_of_torch(kind, shape):
    module = spread(kind(shape, eps=1e-3, memory_efficient=True))
    input = torch.randn(2, 3, 4, requires_grad=True)
    plain, copied = torch_norm(module), input.detach().clone().requires_grad_()
    output, expected = module(input), plain(copied)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert_bitwise(output, expected)
    assert_bitwise(input.grad, copied.grad)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert_bitwise(ours.grad, theirs.grad)


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
def test_it_may_have_no_parameters(kind):
    module, input = kind(4, 1e-5, False), torch.randn(2, 4)
    assert module.state_dict() == {}
    assert_bitwise(module(input), torch_norm(module)(input))


@pytest.mark.parametrize("kind", MIXED)
def test_the_mixed_ones_always_have_parameters(kind):
    with pytest.raises(
        ValueError, match=rf"{kind.__name__} does not .* Use {kind.__name__[5:]}\(..., elementwise_affine"
    ):
        kind(4, elementwise_affine=False)


@pytest.mark.parametrize("kind", [*LAYER, *RMS])
def test_it_is_known_as_a_norm_of_torch_with_its_state(kind):
    module = kind(4)
    assert isinstance(module, nn.LayerNorm if kind in LAYER else nn.RMSNorm)
    assert list(module.state_dict()) == (["weight", "bias"] if kind in LAYER else ["weight"])
    assert module.eps == 1e-5
    assert module.memory_efficient is False


@pytest.mark.parametrize(
    ("given", "weights"),
    [(HALF, FLOAT), (BFLOAT16, FLOAT), (FLOAT, HALF), (HALF, HALF), (FLOAT, DOUBLE), (HALF, BFLOAT16)],
)
@pytest.mark.parametrize("kind", [*LAYER, *RMS])
def test_types_may_differ_and_the_name_says_which_is_returned(kind, given, weights):
    module = spread(kind(64).to(weights))
    input = torch.randn(8, 64).to(given).requires_grad_()
    output = module(input)
    assert output.dtype == (weights if kind in MIXED else given)
    expected = torch_norm(module).double()(input.detach().double())
    # At most the rounding of the result, and of a half precision computation in one type.
    torch.testing.assert_close(output.double(), expected, rtol=2 * torch.finfo(output.dtype).eps, atol=1e-5)
    output.sum().backward()
    assert [p.grad.dtype for p in module.parameters()] == [weights] * len(list(module.parameters()))
    assert input.grad.dtype == given


@pytest.mark.parametrize("kind", MIXED)
def test_weights_are_not_rounded_to_the_type_of_the_input(kind):
    module, input = kind(4), torch.randn(2, 4, dtype=HALF)
    ones = module(input)
    nn.init.constant_(module.weight, 1 + 2**-12)  # 1 in half
    assert not torch.equal(module(input), ones)


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
@pytest.mark.parametrize("kind", [*LAYER, *RMS])
def test_under_O1_it_runs_in_float32_like_the_functions_of_torch(kind, opt_level):
    module = spread(kind(4))
    low = HALF if opt_level == "O1" else BFLOAT16
    input = torch.randn(2, 4, dtype=low)
    amp.initialize(module, opt_level=opt_level, verbosity=0)
    assert_bitwise(module(input), torch_norm(module)(input.float()))
    with amp.disable_casts():
        assert module(input).dtype == (FLOAT if kind in MIXED else low)


@pytest.mark.parametrize("kind", [*LAYER, *RMS])
def test_where_the_model_is_cast_nothing_is_said_of_what_the_norm_is_made_of(kind, capsys):
    model = nn.Sequential(nn.Linear(4, 4), kind(4))
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2")
    capsys.readouterr()
    model(torch.ones(2, 4))
    assert capsys.readouterr().out == ""


def test_the_functions_take_the_arguments_of_apex():
    input, weight, bias = torch.randn(2, 4, dtype=HALF), torch.rand(4), torch.rand(4)
    layer = F.layer_norm(input.float(), (4,), weight, bias, 1e-6)
    rms = F.rms_norm(input.float(), (4,), weight, 1e-6)
    assert_bitwise(functional.fused_layer_norm_affine(input, weight, bias, (4,)), layer.half())
    assert_bitwise(functional.mixed_dtype_fused_layer_norm_affine(input, weight, bias, 4, 1e-6, True), layer)
    assert_bitwise(functional.fused_rms_norm_affine(input, weight, (4,)), rms.half())
    assert_bitwise(functional.mixed_dtype_fused_rms_norm_affine(input, weight, 4, 1e-6, True), rms)
    assert_bitwise(functional.fused_layer_norm(input, (4,)), F.layer_norm(input, (4,), eps=1e-6))
    assert_bitwise(functional.fused_rms_norm(input, 4, memory_efficient=True), F.rms_norm(input, (4,), eps=1e-6))


@pytest.mark.parametrize("kind", [*LAYER, *RMS])
def test_torch_compile_takes_it_in_one_graph(dynamo, kind):
    module = spread(kind(4))
    input = torch.randn(2, 4, dtype=HALF)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert_bitwise(compiled(input), module(input))
