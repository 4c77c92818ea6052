"""`apex.fp16_utils`: models cast by hand, masters kept by hand or by FP16_Optimizer."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import amp
from amp_engine.apex import fp16_utils
from amp_engine.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from amp_engine.errors import AmpError, AmpStateError, AmpTypeError, AmpValueError
from amp_engine.scaling.scaler import LossScaler as EngineScaler

HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
OVERFLOW = "Gradient overflow.  Skipping step, reducing loss scale to {}\n"


# --- names -----------------------------------------------------------------------------------------


def test_a_star_import_gives_every_name_of_apex():
    namespace: dict[str, Any] = {}
    exec("from amp_engine.apex.fp16_utils import *", namespace)
    names = set(namespace) - {"__builtins__"}
    assert names == set(fp16_utils.__all__) == {
        "BN_convert_float", "DynamicLossScaler", "FP16Model", "FP16_Optimizer", "LossScaler", "clip_grad_norm",
        "convert_module", "convert_network", "master_params_to_model_params", "model_grads_to_master_grads",
        "network_to_half", "prep_param_lists", "to_python_float", "tofp16",
    }  # fmt: skip
    from amp_engine.apex.fp16_utils import fp16_optimizer, fp16util, loss_scaler

    assert fp16_optimizer.FP16_Optimizer is FP16_Optimizer
    assert fp16util.network_to_half is network_to_half
    assert loss_scaler.DynamicLossScaler is DynamicLossScaler
    assert clip_grad_norm is nn.utils.clip_grad_norm_


# --- models ----------------------------------------------------------------------------------------


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.ReLU())
    return nn.Sequential(inner, nn.Flatten(), nn.LazyLinear(3), nn.LayerNorm(3))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_floating_point()}


def built() -> nn.Sequential:
    model = convnet()
    model(torch.randn(2, 2, 5, 5))
    return model


def test_network_to_half_keeps_affine_batch_norms_in_float32():
    model = built()
    params = list(model.parameters())
    network = network_to_half(model)
    assert isinstance(network[0], tofp16)
    assert network[1] is model
    assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
    kept = {name for name, dtype in dtypes(model).items() if dtype == torch.float32}
    assert kept == {"0.1.weight", "0.1.bias", "0.1.running_mean", "0.1.running_var"}
    assert network[0](torch.ones(2)).dtype == torch.float16
    assert network(torch.randn(2, 2, 5, 5)).dtype == torch.float16


@HALVES
def test_convert_network_leaves_affine_batch_norms_alone_and_objects_in_place(half):
    model = built()
    model(torch.randn(2, 2, 5, 5)).sum().backward()
    tensors = [*model.parameters(), *model.buffers()]
    assert convert_network(model, half) is model
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    assert {name for name, dtype in dtypes(model).items() if dtype != half} == {
        "0.1.weight", "0.1.bias", "0.1.running_mean", "0.1.running_var"
    }  # fmt: skip
    assert all(p.grad.dtype == p.dtype for p in model.parameters() if p.grad is not None)
    assert model[0][1].num_batches_tracked.dtype == torch.int64


def test_convert_network_does_not_widen_a_batch_norm_and_bn_convert_float_does():
    model = built().half()
    convert_network(model, torch.float16)
    assert model[0][1].weight.dtype == torch.float16
    assert BN_convert_float(model) is model
    assert model[0][1].weight.dtype == torch.float32
    assert model[0][2].running_mean.dtype == torch.float16


def test_convert_module_leaves_children_alone():
    model = nn.Sequential(nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.ones(2))
    convert_module(model, torch.float16)
    assert (model.scale.dtype, model[0].weight.dtype) == (torch.float16, torch.float32)


def test_convert_network_of_a_recurrent_network_computes():
    model = convert_network(nn.LSTM(3, 4), torch.bfloat16)
    assert model(torch.randn(2, 1, 3, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_fp16_model_casts_its_positional_inputs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, a, b):
            return self.linear(a) + b

    model = FP16Model(Sum())
    assert model.network.linear.weight.dtype == torch.float16
    assert model(torch.ones(1, 3), torch.ones(1, 3)).dtype == torch.float16


# --- masters by hand -------------------------------------------------------------------------------


def half_mlp(half: torch.dtype = torch.float16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(half)


def test_masters_are_float32_copies_of_what_requires_gradients():
    model = half_mlp()
    model[0].bias.requires_grad_(False)
    model[2].float()
    params, masters = prep_param_lists(model)
    assert [id(p) for p in params] == [id(p) for p in model.parameters() if p.requires_grad]
    for param, master in zip(params, masters, strict=True):
        assert master.dtype == torch.float32
        assert master.requires_grad
        assert torch.equal(master, param.float())
        assert master.data_ptr() != param.data_ptr()


def test_gradients_go_to_masters_and_masters_back():
    model = half_mlp()
    params, masters = prep_param_lists(model)
    params[0].grad = torch.ones_like(params[0])
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad.dtype == torch.float32
    assert [m.grad is None for m in masters] == [False, True, True, True]
    buffer = masters[0].grad
    params[0].grad.fill_(2)
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad is buffer
    assert (buffer == 2).all()
    params[0].grad = None
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad is None
    masters[0].data.fill_(0.1)
    master_params_to_model_params(params, masters)
    assert torch.equal(params[0], torch.full_like(params[0], 0.1))


def test_a_flat_master_holds_all_parameters():
    model = half_mlp()
    params, masters = prep_param_lists(model, flat_master=True)
    (master,) = masters
    assert (master.dtype, master.shape) == (torch.float32, (4 * 8 + 8 + 8 * 3 + 3,))
    assert not master.grad.any()
    for i, param in enumerate(params[:-1]):
        param.grad = torch.full_like(param, i + 1)
    allocated = master.grad
    model_grads_to_master_grads(params, masters, flat_master=True)
    assert master.grad is allocated
    master.grad = None
    model_grads_to_master_grads(params, masters, flat_master=True)
    assert master.grad.unique_consecutive().tolist() == [1, 2, 3, 0]
    with torch.no_grad():
        master -= master.grad
    before = [p.detach().clone() for p in params]
    master_params_to_model_params(params, masters, flat_master=True)
    for i, (param, old) in enumerate(zip(params, before, strict=True)):
        assert torch.equal(param, (old.float() - (0 if i == 3 else i + 1)).half())


def test_a_flat_master_of_mixed_types_is_refused():
    model = half_mlp()
    model[2].float()
    with pytest.raises(AmpStateError, match="torch.float16 on cpu, torch.float32 on cpu"):
        prep_param_lists(model, flat_master=True)
    with pytest.raises(AmpStateError, match="the model has none"):
        prep_param_lists(nn.ReLU(), flat_master=True)


def test_masters_of_another_number_are_refused():
    params, masters = prep_param_lists(half_mlp())
    with pytest.raises(AmpStateError, match="4 model parameters, but 3 masters"):
        master_params_to_model_params(params, masters[:3])


def test_to_python_float_takes_tensors_and_sequences():
    assert to_python_float(torch.tensor([2.5])) == 2.5
    assert to_python_float([1.5]) == 1.5


# --- scalers ---------------------------------------------------------------------------------------


def test_the_static_scaler_scales_and_looks_at_nothing():
    scaler, weight = LossScaler(128.0), nn.Parameter(torch.tensor(3.0))
    scaler.backward(weight * 2, retain_graph=True)
    assert weight.grad.item() == 256
    weight.grad.fill_(math.inf)
    assert not scaler.has_overflow([weight])
    scaler.update_scale(True)
    assert scaler.loss_scale == 128
    scaled = scaler.scale_gradient(nn.Module(), (torch.ones(1), None), ())
    assert scaled[0].item() == 128
    assert scaled[1] is None


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_the_dynamic_scaler_sees_every_element(bad):
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 5, 1)]
    scaler = DynamicLossScaler()
    assert not scaler.has_overflow(params)
    params[1].grad = torch.full((5,), 3e38)  # whose sum is infinite
    assert not scaler.has_overflow(params)
    params[1].grad[4] = bad
    assert scaler.has_overflow(params)


def test_the_dynamic_scaler_sees_sparse_gradients():
    embedding = nn.Embedding(4, 2, sparse=True)
    (embedding(torch.tensor([1, 1])) * 2).sum().backward()
    assert not DynamicLossScaler().has_overflow(embedding.parameters())
    embedding.weight.grad._values()[0, 0] = math.nan
    assert DynamicLossScaler().has_overflow(embedding.parameters())


def test_the_dynamic_scaler_falls_to_one_and_grows_every_window():
    scaler = DynamicLossScaler(init_scale=4.0, scale_factor=2.0, scale_window=3)
    scales = []
    for outcome in "oooccccccc":
        scaler.update_scale(outcome == "o")
        scales.append(scaler.loss_scale)
    # The last overflow was iteration 2: it grows at 5 and at 8.
    assert scales == [2, 1, 1, 1, 1, 2, 2, 2, 4, 4]
    first = DynamicLossScaler(init_scale=4.0, scale_window=3)
    grown = []
    for _ in range(4):
        first.update_scale(False)
        grown.append(first.loss_scale)
    assert grown == [4, 4, 8, 8]
    assert DynamicLossScaler().loss_scale == 2**32


# --- FP16_Optimizer --------------------------------------------------------------------------------


def wrapped(half: torch.dtype = torch.float16, seed: int = 0, **keywords: Any) -> tuple[nn.Module, FP16_Optimizer]:
    """A half model with one float32 layer in the middle, as batch norms are."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), Float32Norm(8), nn.Tanh(), nn.Linear(8, 3)).to(half)
    model[1].float()
    keywords.setdefault("verbose", False)
    return model, FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **keywords)


class Float32Norm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


def batch(step: int, half: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(half)


def loss_of(model: nn.Module, step: int = 0, factor: float = 1.0) -> Tensor:
    x = batch(step, model[0].weight.dtype)
    return model(x).float().square().mean() * factor


def train(model: nn.Module, optimizer: FP16_Optimizer, outcomes: str, first: int = 0) -> None:
    for step, outcome in enumerate(outcomes, first):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step, math.inf if outcome == "o" else 1.0))
        optimizer.step()


def masters(optimizer: FP16_Optimizer) -> list[Tensor]:
    return [p for group in optimizer.fp32_from_fp16_groups for p in group]


def snapshot(model: nn.Module, optimizer: FP16_Optimizer) -> list[Tensor]:
    state = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    assert all(value.dtype == torch.float32 for value in state)
    return [t.detach().clone() for t in [*model.parameters(), *masters(optimizer), *state]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@HALVES
@pytest.mark.parametrize("scale", [{}, {"static_loss_scale": 100.0}, {"dynamic_loss_scale": True}], ids=str)
def test_training_is_that_of_float32_masters_with_the_gradients_of_the_half_model(half, scale):
    model, optimizer = wrapped(half, **scale)
    plain = copy.deepcopy(model)
    weights = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    reference = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        # The gradient of the half model at the same scale, in float32, over the scale.
        plain.zero_grad()
        (loss_of(plain, step) * optimizer.loss_scale).backward()
        for weight, param in zip(weights, plain.parameters(), strict=True):
            weight.grad = param.grad.float() / optimizer.loss_scale
        reference.step()
        with torch.no_grad():
            for weight, param in zip(weights, plain.parameters(), strict=True):
                param.copy_(weight)
    halves = [w for w, p in zip(weights, plain.parameters(), strict=True) if p.dtype == half]
    for actual, expected in zip(masters(optimizer), halves, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    for param, weight in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(param, weight.to(param.dtype), rtol=1e-2, atol=1e-6)


def test_masters_lie_beside_half_parameters_and_state_from_before_is_widened():
    model = half_mlp()
    model[2].float()
    model[0].bias.requires_grad_(False)
    inner = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}])
    moment = torch.full_like(model[0].weight, 0.5)
    inner.state[model[0].weight] = {"step": torch.tensor(3.0), "exp_avg": moment}
    optimizer = FP16_Optimizer(inner, verbose=False)
    assert optimizer.optimizer is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert [len(g) for g in optimizer.fp16_groups] == [1, 0]
    assert optimizer.fp16_groups[0][0] is model[0].weight
    master = optimizer.fp32_from_fp16_groups[0][0]
    assert torch.equal(master, model[0].weight.float())
    assert [len(g) for g in optimizer.fp32_from_fp32_groups] == [0, 2]
    in_groups = [p for group in inner.param_groups for p in group["params"]]
    assert [*map(id, in_groups)] == [*map(id, model.parameters())]
    assert inner.state[model[0].weight]["step"] == 3
    assert torch.equal(inner.state[model[0].weight]["exp_avg"], moment.float())
    assert inner.state[model[0].weight]["exp_avg"].dtype == torch.float32


def test_construction_says_what_apex_said(capsys):
    wrapped(verbose=True)
    text = "Warning:  FP16_Optimizer is deprecated and dangerous, and will be deleted soon.  "
    assert capsys.readouterr().out.startswith(text)
    wrapped(verbose=False)
    assert capsys.readouterr().out == ""


def test_parameters_of_other_types_are_refused_and_nothing_changes():
    half, double = nn.Parameter(torch.ones(1).half()), nn.Parameter(torch.ones(1).double())
    inner = torch.optim.SGD([half, double], lr=0.1)
    message = re.escape(
        "Wrapped parameters must be either torch.cuda.FloatTensor or torch.cuda.HalfTensor. Received torch.DoubleTensor"
    )
    with pytest.raises(AmpTypeError, match=message):
        FP16_Optimizer(inner, verbose=False)
    assert inner.param_groups[0]["params"][0] is half


def test_amp_and_fp16_optimizer_do_not_wrap_each_other():
    model, optimizer = wrapped()
    with pytest.raises(AmpError, match="An incoming optimizer is an instance of .*FP16_Optimizer"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model = half_mlp(torch.float32)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, inner, opt_level="O2", verbosity=0)
    try:
        with pytest.raises(AmpStateError, match="This SGD was passed through amp.initialize"):
            FP16_Optimizer(inner, verbose=False)
    finally:
        amp.close()


def test_an_overflow_skips_the_step_and_halves_the_scale(capsys):
    model, optimizer = wrapped(dynamic_loss_scale=True, verbose=True)
    train(model, optimizer, "cc")
    before = snapshot(model, optimizer)
    capsys.readouterr()
    train(model, optimizer, "o", first=2)
    assert optimizer.overflow
    assert capsys.readouterr().out == OVERFLOW.format(32768.0)
    assert same(snapshot(model, optimizer), before)
    train(model, optimizer, "c", first=3)
    assert not optimizer.overflow
    assert not same(snapshot(model, optimizer), before)


def test_steps_after_an_overflow_without_another_backward_do_nothing_more():
    model, optimizer = wrapped(dynamic_loss_scale=True)
    train(model, optimizer, "co")
    before = snapshot(model, optimizer)
    optimizer.step()
    assert same(snapshot(model, optimizer), before)
    assert optimizer.loss_scale == 32768


def test_the_dynamic_scale_takes_its_arguments_and_counts_steps():
    model, optimizer = wrapped(
        dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0, "scale_window": 2, "max_loss_scale": 16.0}
    )
    scales = []
    for step, outcome in enumerate("ccccoo"):
        train(model, optimizer, outcome, first=step)
        scales.append(optimizer.loss_scale)
    assert scales == [8, 16, 16, 16, 8, 4]


def test_a_static_scale_steps_on_and_says_so_once(capsys):
    model, optimizer = wrapped(static_loss_scale=64.0, verbose=True)
    capsys.readouterr()
    train(model, optimizer, "oo")
    text = capsys.readouterr().out
    assert text.count("The loss scale is static at 64.0, so the step is taken") == 1
    assert not optimizer.overflow
    assert not model[0].weight.isfinite().all()
    assert optimizer.loss_scale == 64


def test_a_static_scale_skips_if_it_is_told_to(capsys):
    model, optimizer = wrapped(static_loss_scale=64.0, skip_on_overflow=True, verbose=True)
    before = snapshot(model, optimizer)
    capsys.readouterr()
    train(model, optimizer, "o")
    assert capsys.readouterr().out == "Gradient overflow.  Skipping step, loss scale is static at 64.0\n"
    assert same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("eager", [True, False])
def test_several_backwards_accumulate_once_each(eager):
    """Float32 gradients, which are unscaled in place, as much as half ones."""
    model, optimizer = wrapped(static_loss_scale=256.0)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0), update_master_grads=eager)
    optimizer.backward(loss_of(model, 1), update_master_grads=eager)
    optimizer.backward(loss_of(model, 2))
    exact = copy.deepcopy(model).double()
    exact[1].forward = lambda x: nn.functional.layer_norm(x, (8,), exact[1].weight, exact[1].bias)
    sum(exact(batch(step).double()).square().mean() for step in range(3)).backward()
    for param, truth in zip(model.parameters(), exact.parameters(), strict=True):
        assert param.grad.dtype == torch.float32
        torch.testing.assert_close(param.grad.double(), truth.grad, rtol=2e-2, atol=2e-3)


@HALVES
@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_gradients_of_masters_are_those_of_the_model_unscaled_once(half, scale):
    model, optimizer = wrapped(half, static_loss_scale=scale)
    plain = copy.deepcopy(model)
    (loss_of(plain) * scale).backward()
    expected = [(p.grad.float() / scale) for p in plain.parameters() if p.dtype == half]
    optimizer.backward(loss_of(model), update_master_grads=False)
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    for _ in range(2):
        optimizer.update_master_grads()
        shown = [master.grad for master in masters(optimizer)]
        assert same(shown, expected)
        assert all(g is p.grad for g, p in zip(shown, optimizer.fp16_groups[0], strict=True))


def test_zero_grad_zeroes_or_drops_all_gradients():
    model, optimizer = wrapped()
    optimizer.backward(loss_of(model))
    optimizer.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in [*model.parameters(), *masters(optimizer)])
    optimizer.zero_grad(set_grads_to_None=True)
    assert all(p.grad is None for p in [*model.parameters(), *masters(optimizer)])


def test_clipping_is_of_unscaled_gradients_and_minus_one_after_an_overflow():
    model, optimizer = wrapped(dynamic_loss_scale=True)
    optimizer.backward(loss_of(model))
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    assert optimizer.clip_master_grads(norm / 2) == pytest.approx(norm, rel=1e-5)
    clipped = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    assert clipped == pytest.approx(norm / 2, rel=1e-4)
    optimizer.backward(loss_of(model, factor=math.inf))
    assert optimizer.clip_master_grads(1.0) == -1


def test_master_gradients_can_be_looked_at_unless_they_overflowed(capsys):
    model, optimizer = wrapped(dynamic_loss_scale=True, verbose=True)
    optimizer.backward(loss_of(model))
    model[0].weight.grad = None
    optimizer.update_master_grads()
    (group,) = optimizer.inspect_master_grad_data()
    assert group[0] is None
    assert torch.equal(group[1], optimizer.param_groups[0]["params"][1].grad)
    optimizer.backward(loss_of(model, factor=math.inf))
    capsys.readouterr()
    assert optimizer.inspect_master_grad_data() is None
    assert capsys.readouterr().out.startswith("Warning:  ")


def closure_for(model: nn.Module, optimizer: FP16_Optimizer, outcomes: str):
    calls = iter(outcomes)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0, math.inf if next(calls) == "o" else 1.0)
        optimizer.backward(loss)
        return loss

    return closure, calls


def test_a_closure_is_run_again_until_it_does_not_overflow(capsys):
    model, optimizer = wrapped(dynamic_loss_scale=True, verbose=True)
    other, plain = wrapped(dynamic_loss_scale=True)
    plain.loss_scale = 2.0**14
    train(other, plain, "c")
    capsys.readouterr()
    closure, calls = closure_for(model, optimizer, "ooc")
    loss = optimizer.step(closure)
    assert next(calls, None) is None
    text = "OVERFLOW within closure! Skipping step, reducing loss scale to {}\n"
    assert capsys.readouterr().out == text.format(32768.0) + text.format(16384.0)
    assert loss.isfinite()
    assert same(snapshot(model, optimizer), snapshot(other, plain))


def test_a_closure_that_always_overflows_ends_in_an_error():
    model, optimizer = wrapped(dynamic_loss_scale=True, dynamic_loss_args={"min_loss_scale": 2.0**14})
    closure, calls = closure_for(model, optimizer, "o" * 100)
    with pytest.raises(AmpStateError, match="overflow at a loss scale of 16384.0, which falls no more"):
        optimizer.step(closure)
    assert len(list(calls)) > 90


def test_an_optimizer_that_calls_its_closure_itself_is_refused_with_a_level_that_takes_it():
    inner = torch.optim.LBFGS(half_mlp().parameters())
    with pytest.raises(AmpStateError, match=r"LBFGS\.step\(closure\) runs backwards of its own.*opt_level='O4'"):
        FP16_Optimizer(inner, verbose=False)


def test_a_parameter_that_is_unfrozen_later_gets_a_master():
    model = half_mlp()
    model[0].requires_grad_(False)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False, static_loss_scale=128.0)
    assert [len(g) for g in optimizer.fp16_groups] == [2]
    model[0].requires_grad_(True)
    optimizer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).half())]})
    optimizer.backward(loss_of(model))
    optimizer.step()
    assert [len(g) for g in optimizer.fp16_groups] == [4, 1]
    assert all(master.dtype == torch.float32 for master in masters(optimizer))


def test_masters_follow_weights_that_are_loaded_later_and_stay_exact_where_those_are_their_own():
    model, optimizer = wrapped()
    train(model, optimizer, "ccc")
    exact = snapshot(model, optimizer)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    optimizer.backward(loss_of(model))
    assert same(snapshot(model, optimizer), exact)
    other, _ = wrapped(seed=1)
    model.load_state_dict(other.state_dict())
    optimizer.backward(loss_of(model))
    optimizer.state_dict()
    for param, master in zip(optimizer.fp16_groups[0], optimizer.fp32_from_fp16_groups[0], strict=True):
        assert torch.equal(master, param.float())
    train(model, optimizer, "c")
    assert not torch.equal(model[0].weight, exact[0])


def saved_and_loaded(optimizer: FP16_Optimizer) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)  # weights only, the default


@pytest.mark.parametrize("scale", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}], ids=str)
def test_a_resumed_run_is_bitwise_the_run_that_was_not_interrupted(scale):
    model, optimizer = wrapped(**scale)
    outcomes = "ccocc" if "dynamic_loss_scale" in scale else "ccccc"
    train(model, optimizer, outcomes)
    weights = copy.deepcopy(model.state_dict())
    # torch's own optimizers go on with the tensors that they load.
    states = [saved_and_loaded(optimizer) for _ in range(2)]
    train(model, optimizer, "ccc", first=5)
    for model_first, state in zip((True, False), states, strict=True):
        other, resumed = wrapped(seed=7, **scale)
        if model_first:
            other.load_state_dict(weights)
        resumed.load_state_dict(state)
        if not model_first:
            other.load_state_dict(weights)
        train(other, resumed, "ccc", first=5)
        assert same(snapshot(other, resumed), snapshot(model, optimizer))
        assert resumed.loss_scale == optimizer.loss_scale


def test_the_state_has_the_keys_of_apex():
    model, optimizer = wrapped(dynamic_loss_scale=True)
    train(model, optimizer, "o")
    state = optimizer.state_dict()
    assert list(state) == [
        "loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step", "optimizer_state_dict",
        "fp32_from_fp16",
    ]  # fmt: skip
    assert state["loss_scaler"] == {"loss_scale": 32768.0, "unskipped": 0}
    assert (state["dynamic_loss_scale"], state["overflow"]) == (True, True)
    assert same(state["fp32_from_fp16"][0], optimizer.fp32_from_fp16_groups[0])


def unpickled_apex_scaler() -> EngineScaler:
    """The scaler of apex.amp as pickle gives it back: its attributes, in the class that answers to its name now."""
    scaler = EngineScaler.__new__(EngineScaler)
    state = {"_loss_scale": 512.0, "_unskipped": 7, "dynamic": True, "_has_overflow": False, "_scale_seq_len": 8}
    scaler.__setstate__({**state, "_min_loss_scale": 256.0, "_max_loss_scale": 1024.0, "_overflow_buf": torch.zeros(1)})
    return scaler


@pytest.mark.parametrize(
    ("scaler", "unskipped"),
    [
        (unpickled_apex_scaler(), 7),
        (DynamicLossScaler(init_scale=512.0), 0),
        ({"loss_scale": 512.0, "unskipped": 7}, 7),
    ],
    ids=["amp", "fp16_utils", "numbers"],
)
def test_a_state_that_apex_wrote_is_loaded(scaler, unskipped):
    model, optimizer = wrapped()
    train(model, optimizer, "cc")
    state = {**optimizer.state_dict(), "loss_scaler": scaler, "dynamic_loss_scale": True}
    other, loaded = wrapped(seed=3)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(state)
    assert loaded.dynamic_loss_scale
    assert (loaded.loss_scale, loaded.loss_scaler._unskipped) == (512, unskipped)
    assert same(snapshot(other, loaded), snapshot(model, optimizer))


@pytest.mark.parametrize("change", ["masters", "scaler"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change):
    model, optimizer = wrapped()
    train(model, optimizer, "c")
    state = optimizer.state_dict()
    if change == "masters":
        state["fp32_from_fp16"] = [[t[:1] for t in state["fp32_from_fp16"][0]]]
    else:
        state["loss_scaler"] = object()
    other, loaded = wrapped(seed=3)
    before = snapshot(other, loaded)
    with pytest.raises(
        AmpValueError, match="masters of the shapes" if change == "masters" else "A loss scaler's state is"
    ):
        loaded.load_state_dict(state)
    assert same(snapshot(other, loaded), before)


def test_it_is_saved_by_state_dict_only():
    _, optimizer = wrapped()
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RuntimeError, match="cannot be pickled or copied.  Save its state_dict"):
            copied(optimizer)


def test_sparse_and_strided_gradients_reach_the_masters():
    embedding, weight = nn.Embedding(6, 2, sparse=True).half(), nn.Parameter(torch.ones(4, 3).half())
    optimizer = FP16_Optimizer(
        torch.optim.SGD([*embedding.parameters(), weight], lr=1.0), dynamic_loss_scale=True, verbose=False
    )
    loss = embedding(torch.tensor([1, 1])).float().sum() * 0.25 + weight.float().sum() * 0.25
    optimizer.backward(loss, update_master_grads=False)
    weight.grad = torch.full((1, 3), 65536.0 / 4).half().expand(4, 3)
    optimizer.update_master_grads()
    of_embedding, of_weight = (master.grad for master in masters(optimizer))
    assert of_embedding.is_sparse
    assert of_embedding.to_dense()[1].tolist() == [0.5, 0.5]
    assert torch.equal(of_weight, torch.full((4, 3), 0.25))
    optimizer.zero_grad(set_grads_to_None=True)
    optimizer.backward(embedding(torch.tensor([1, 1])).float().sum() * math.inf)
    assert optimizer.overflow
