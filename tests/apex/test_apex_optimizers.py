"""apex.optimizers: its names, FusedMixedPrecisionLamb, torch.amp.GradScaler without a host sync, learning rates."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import amp, optimizers
from amp_engine.apex import optimizers as apex_optimizers
from amp_engine.optimizers import FusedAdam, FusedLAMB, FusedMixedPrecisionLamb
from tests.models import MLP
from tests.optimizers.support import CLASSES, HALVES, give, gradients, made, parameters
from tests.support import assert_bitwise, backward, frozen, train, weights_of

MODULES = {
    "fused_sgd": "FusedSGD",
    "fused_adam": "FusedAdam",
    "fused_lamb": "FusedLAMB",
    "fused_novograd": "FusedNovoGrad",
    "fused_adagrad": "FusedAdagrad",
    "fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
}


@pytest.mark.parametrize("module", MODULES)
def test_each_class_is_in_the_package_and_in_its_module(module: str) -> None:
    name = MODULES[module]
    inside = importlib.import_module(f"amp_engine.apex.optimizers.{module}")
    assert getattr(apex_optimizers, name) is getattr(inside, name) is getattr(optimizers, name)


# --- FusedMixedPrecisionLamb ----------------------------------------------------------------------


def run(optimizer: Any, steps: Any, scaler: torch.amp.GradScaler | None = None) -> None:
    params = weights_of(optimizer)
    for index in steps:
        give(params, gradients(params, index))
        if scaler is None:
            optimizer.step()
        else:
            for p in params:
                p.grad.mul_(scaler.scale(torch.ones(())))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()


def test_its_arguments_have_the_names_and_defaults_of_fused_lamb() -> None:
    ours = inspect.signature(FusedMixedPrecisionLamb).parameters
    lamb = inspect.signature(FusedLAMB).parameters
    assert {name: p.default for name, p in lamb.items()} == {name: ours[name].default for name in lamb}
    assert set(ours) - set(lamb) == {"step", "reduced_precision_dtype"}


def test_float32_weights_are_stepped_as_by_fused_lamb() -> None:
    params, others = parameters(), parameters()
    mixed, lamb = FusedMixedPrecisionLamb(params, lr=0.02), FusedLAMB(others, lr=0.02)
    run(mixed, range(4))
    run(lamb, range(4))
    torch.testing.assert_close(params, others, rtol=1e-6, atol=1e-7)  # its lr is rounded to float32
    assert all("master_param" not in state for state in mixed.state.values())


@pytest.mark.parametrize("dtype", HALVES)
def test_half_weights_are_the_rounded_masters_of_a_float32_run(dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    singles = [nn.Parameter(p.detach().float()) for p in params]
    optimizer, truth = FusedMixedPrecisionLamb(params, lr=1e-4), FusedMixedPrecisionLamb(singles, lr=1e-4)
    for index in range(6):
        give(params, gradients(params, index))
        give(singles, [p.grad.float() for p in params])  # type: ignore[union-attr]
        optimizer.step()
        truth.step()
    assert_bitwise([optimizer.state[p]["master_param"] for p in params], [p.detach() for p in singles])
    assert_bitwise([p.detach() for p in params], [p.detach().to(dtype) for p in singles])


@pytest.mark.parametrize("reload_model", [False, True])
def test_masters_survive_a_checkpoint_exactly(reload_model: bool) -> None:
    params = parameters(dtype=torch.float16)
    optimizer = FusedMixedPrecisionLamb(params, lr=1e-4)
    run(optimizer, range(3))
    saved, weights = frozen(optimizer.state_dict()), frozen([p.detach() for p in params])
    run(optimizer, range(3, 5))
    expected = frozen([optimizer.state[p]["master_param"] for p in params])
    if not reload_model:
        params = [nn.Parameter(w.clone()) for w in weights]
        optimizer = FusedMixedPrecisionLamb(params, lr=1e-4)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for p, weight in zip(params, weights, strict=True):
            p.copy_(weight)  # after the optimizer's state, as some scripts do
    run(optimizer, range(3, 5))
    assert_bitwise([optimizer.state[p]["master_param"] for p in params], expected)


def test_weights_that_somebody_else_wrote_go_into_the_master_and_the_others_stay_exact() -> None:
    p = nn.Parameter(torch.full((4,), 1.0, dtype=torch.float16))
    optimizer = FusedMixedPrecisionLamb([p], lr=0.0, weight_decay=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["master_param"].add_(1e-5)
    with torch.no_grad():
        p[1] = 3.0
    optimizer.step()
    assert_bitwise(
        optimizer.state[p]["master_param"], torch.tensor([1.0, 2.0, 1.0, 1.0]) + torch.tensor([1e-5, 1, 1e-5, 1e-5])
    )
    assert p[1] == 3.0


def test_learning_rate_and_step_are_tensors_of_its_own() -> None:
    lr = torch.tensor(0.5)
    groups = [{"params": parameters([(3,)])}, {"params": parameters([(4,)]), "lr": 0.25}]
    optimizer = FusedMixedPrecisionLamb(groups, lr=lr, step=7)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]
    optimizer.param_groups[0]["lr"].fill_(0.125)
    assert lr == 0.5
    run(optimizer, [0])
    assert all(state["step"].dtype == torch.float32 for state in optimizer.state.values())
    assert [float(state["step"]) for state in optimizer.state.values()] == [8.0, 8.0]
    saved = optimizer.state_dict()
    other = FusedMixedPrecisionLamb([{"params": parameters([(3,)])}, {"params": parameters([(4,)])}])
    other.load_state_dict(saved)
    assert [float(group["lr"]) for group in other.param_groups] == [0.125, 0.25]
    assert other.param_groups[0]["lr"] is not optimizer.param_groups[0]["lr"]


def test_it_loads_what_fused_lamb_saved_and_goes_on_from_there() -> None:
    params, others = parameters(), parameters()
    lamb = FusedLAMB(params, lr=0.5)
    run(lamb, range(2))
    with torch.no_grad():
        for p, other in zip(params, others, strict=True):
            other.copy_(p)
    mixed = FusedMixedPrecisionLamb(others)
    mixed.load_state_dict(lamb.state_dict())
    run(lamb, [2])
    run(mixed, [2])
    assert_bitwise(params, others)


def test_amsgrad_and_another_type_than_the_parameters_own_are_refused() -> None:
    with pytest.raises(RuntimeError, match="FusedMixedPrecisionLamb does not support the AMSGrad variant"):
        FusedMixedPrecisionLamb(parameters(), amsgrad=True)
    with pytest.raises(TypeError, match=r"reduced_precision_dtype=torch.float16.*Call model.to\(dtype\)"):
        FusedMixedPrecisionLamb(parameters(), reduced_precision_dtype=torch.float16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step=-1"):
        FusedMixedPrecisionLamb(parameters(), step=-1)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_under_amp_it_is_a_lamb_like_any_other(level: str) -> None:
    results = []
    for build in (FusedLAMB, FusedMixedPrecisionLamb):
        model = MLP.model()
        optimizer = build(model.parameters(), lr=2.0**-7)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        train(MLP, model, optimizer, "ccocc" if level != "O5" else "cccc")
        results.append(frozen([p.detach() for p in amp.master_params(optimizer)]))
        amp.close()
    assert_bitwise(*results)


# --- torch.amp.GradScaler -------------------------------------------------------------------------

SCALED: dict[str, Any] = {
    "FusedAdam": lambda params: FusedAdam(params, capturable=True),
    "FusedAdam with masters": lambda params: FusedAdam(params, capturable=True, master_weights=True),
    "FusedMixedPrecisionLamb": lambda params: FusedMixedPrecisionLamb(params),
}


class Watched(torch.amp.GradScaler):
    """Counts the times that it decides on the host whether to step."""

    decisions = 0

    def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
        self.decisions += 1
        return super()._maybe_opt_step(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("name", SCALED)
def test_the_grad_scaler_leaves_unscaling_and_skipping_to_the_step(name: str, dtype: torch.dtype) -> None:
    params, others = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer, plain = SCALED[name](params), SCALED[name](others)
    scaler = Watched("cpu", init_scale=2.0**4)
    for index in range(4):
        run(optimizer, [index], scaler)
        run(plain, [index])
        if index == 1:
            before = frozen([p.detach() for p in params]), frozen(optimizer.state_dict())
            give(params, gradients(params, 9))
            params[2].grad[3] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            assert_bitwise((frozen([p.detach() for p in params]), frozen(optimizer.state_dict())), before)
    assert scaler.decisions == 0
    assert scaler.get_scale() == 2.0**3
    assert not hasattr(optimizer, "found_inf")
    # A scaled half gradient has other subnormals than the one that was not scaled.
    tolerance = {} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(params, others, **(tolerance or {"rtol": 0, "atol": 0}))


def test_gradients_in_another_memory_order_are_unscaled_where_they_belong() -> None:
    params, others = parameters([(5, 3)]), parameters([(5, 3)])
    optimizer, plain = FusedMixedPrecisionLamb(params), FusedMixedPrecisionLamb(others)
    grad = torch.arange(15.0).reshape(3, 5).t()
    others[0].grad = grad.contiguous()
    params[0].grad = grad * 4
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    plain.step()
    assert_bitwise(params, others)


def test_the_others_leave_it_to_the_grad_scaler_which_may_be_that_of_shards() -> None:
    assert not any(getattr(made(name, parameters()), "_step_supports_amp_scaling", False) for name in CLASSES)
    assert copy.deepcopy(FusedAdam(parameters(), capturable=True))._step_supports_amp_scaling


@pytest.mark.parametrize("name", SCALED)
def test_a_scheduler_is_quiet_when_the_first_steps_are_skipped(name: str) -> None:
    params = parameters()
    optimizer = SCALED[name](params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    give(params, [torch.full_like(p, float("nan")) for p in params])
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()


@pytest.mark.parametrize(
    "build",
    [
        lambda params: FusedMixedPrecisionLamb(params, max_grad_norm=0.5),
        lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    ],
)
def test_it_may_drive_an_optimizer_that_amp_looks_after_too(build: Any) -> None:
    results = []
    for scaled in (True, False):
        model = MLP.model()
        optimizer = build(model.parameters())
        amp.initialize(model, optimizer, opt_level="O1", loss_scale=1.0, verbosity=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for index in range(3):
            optimizer.zero_grad()
            with amp.disable_casts():
                scaler.scale(MLP.loss(model, MLP.batch(index))).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(frozen([p.detach() for p in model.parameters()]))
        amp.close()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", MODULES.values())
@pytest.mark.parametrize("argument", ["grads", "output_params", "scale", "grad_norms", "grad_scaler"])
def test_arguments_that_step_once_had_are_refused_with_what_to_type(name: str, argument: str) -> None:
    settings = {"lr": 0.1} if name == "FusedSGD" else {}
    optimizer = getattr(apex_optimizers, name)(parameters(), **settings)
    advice = r"Call scaler\.step\(optimizer\)" if argument == "grad_scaler" else r"Call step\(\) without arguments"
    optimizer.step(**{argument: None})  # apex's own default
    with pytest.raises(TypeError, match=rf"{name}\.step\(\) got {argument}.*  {advice}"):
        optimizer.step(**{argument: 1.0})


# --- what torch's own classes saved, learning rates, zero_grad ------------------------------------


@pytest.mark.parametrize("theirs", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_fused_adam_goes_on_from_a_state_dict_of_torchs_adam(theirs: Any, level: str | None) -> None:
    """Its groups have no bias_correction and no adam_w_mode, which raised a KeyError in apex."""
    model = MLP.model()
    saving = theirs(model.parameters(), lr=0.01, weight_decay=0.1)
    for index in range(2):
        saving.zero_grad()
        MLP.loss(model, MLP.batch(index)).backward()
        saving.step()
    resumed = copy.deepcopy(model)
    optimizer = FusedAdam(resumed.parameters(), lr=0.5)
    if level is not None:
        amp.initialize(resumed, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    optimizer.load_state_dict(saving.state_dict())
    saving.zero_grad()
    loss = MLP.loss(resumed, MLP.batch(2))
    if level is None:
        loss.backward()
    else:
        backward(loss, optimizer)
    for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        p.grad = master.grad.clone()  # type: ignore[union-attr]
    saving.step()
    optimizer.step()
    for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        torch.testing.assert_close(master.detach(), p.detach(), rtol=1e-5, atol=1e-7)


def test_learning_rate_schedulers_work_where_the_rate_is_a_tensor() -> None:
    params = parameters([(3,)])
    optimizer = FusedMixedPrecisionLamb(params, lr=0.5)
    for scheduler in (
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ):
        rates = []
        for index in range(3):
            before = frozen(params[0].detach())
            run(optimizer, [index])
            assert not torch.equal(params[0].detach(), before)
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        assert rates == sorted(rates, reverse=True)
        assert rates[2] < rates[0]
