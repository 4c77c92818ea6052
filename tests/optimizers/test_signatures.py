"""The constructors are apex's, `zero_grad` is torch's, and what cannot be is refused in the caller's own words."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import optimizers
from tests.optimizers.support import CLASSES, give, gradients, made, parameters
from tests.support import assert_bitwise, frozen

REQUIRED = object()
SIGNATURES: dict[str, dict[str, Any]] = {
    "FusedSGD": {
        "lr": REQUIRED,
        "momentum": 0,
        "dampening": 0,
        "weight_decay": 0,
        "nesterov": False,
        "wd_after_momentum": False,
        "materialize_master_grads": True,
        "set_grad_none": False,
    },
    "FusedAdam": {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "adam_w_mode": True,
        "weight_decay": 0.0,
        "amsgrad": False,
        "set_grad_none": True,
        "capturable": False,
        "master_weights": False,
    },
    "FusedLAMB": {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "amsgrad": False,
        "adam_w_mode": True,
        "grad_averaging": True,
        "set_grad_none": True,
        "max_grad_norm": 1.0,
        "use_nvlamb": False,
    },
    "FusedNovoGrad": {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "reg_inside_moment": False,
        "grad_averaging": True,
        "norm_type": 2,
        "init_zero": False,
        "set_grad_none": True,
    },
    "FusedAdagrad": {
        "lr": 1e-2,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "set_grad_none": True,
        "adagrad_w_mode": False,
    },
}
WITH_AMSGRAD = ("FusedAdam", "FusedLAMB", "FusedNovoGrad")


def one() -> list[nn.Parameter]:
    return parameters([(3,)])


def test_all_five_are_public() -> None:
    assert set(CLASSES) <= set(optimizers.__all__)
    assert all(issubclass(cls, torch.optim.Optimizer) for cls in CLASSES.values())


@pytest.mark.parametrize("name", CLASSES)
def test_order_names_and_defaults_of_the_arguments_are_those_of_apex(name: str) -> None:
    given = list(inspect.signature(CLASSES[name]).parameters.values())
    assert given[0].name == "params"
    expected = SIGNATURES[name]
    assert [argument.name for argument in given[1 : len(expected) + 1]] == list(expected)
    for argument in given[1 : len(expected) + 1]:
        assert argument.kind is argument.POSITIONAL_OR_KEYWORD
        if expected[argument.name] is not REQUIRED:
            assert argument.default == expected[argument.name]
    assert all(argument.kind is argument.KEYWORD_ONLY for argument in given[len(expected) + 1 :])


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_AMSGRAD)
def test_amsgrad_is_refused_by_name(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{name}.*(AMSGrad|amsgrad)|(AMSGrad|amsgrad).*{name}"):
        CLASSES[name](one(), amsgrad=True)


def test_masters_of_fused_adam_need_capturable_as_in_apex() -> None:
    with pytest.raises(RuntimeError, match=r"master_weights(?s:.*)capturable"):
        optimizers.FusedAdam(one(), master_weights=True)


@pytest.mark.parametrize("given", [{}, {"lr": None}])
def test_sgd_without_a_learning_rate_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="lr"):
        optimizers.FusedSGD(one(), **given)


def test_sgd_takes_its_learning_rates_from_groups_that_have_one_each() -> None:
    params, others = (parameters([(3,), (2, 2)]) for _ in range(2))
    ours = optimizers.FusedSGD([{"params": params[:1], "lr": 0.25}, {"params": params[1:], "lr": 0.5}])
    theirs = torch.optim.SGD([{"params": others[:1], "lr": 0.25}, {"params": others[1:], "lr": 0.5}])
    for these, optimizer in ((params, ours), (others, theirs)):
        give(these, gradients(these, 0))
        optimizer.step()
    assert_bitwise(params, others)
    assert [group["lr"] for group in ours.param_groups] == [0.25, 0.5]
    with pytest.raises(ValueError, match="didn't specify a value of required optimization parameter lr"):
        ours.add_param_group({"params": one()})


@pytest.mark.parametrize("given", [{"momentum": 0}, {"momentum": 0.9, "dampening": 0.5}])
def test_nesterov_needs_momentum_without_dampening(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(?i)nesterov(?s:.*)momentum"):
        optimizers.FusedSGD(one(), lr=0.1, nesterov=True, **given)


NEGATIVE = {
    "FusedSGD": ("lr", "momentum", "weight_decay"),
    "FusedAdam": ("lr", "eps", "weight_decay"),
    "FusedLAMB": ("lr", "eps", "weight_decay", "max_grad_norm"),
    "FusedNovoGrad": ("lr", "eps", "weight_decay"),
    "FusedAdagrad": ("lr", "eps", "weight_decay"),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in NEGATIVE.items() for key in keys])
def test_a_negative_value_is_refused_with_its_name_and_itself(name: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}.*-0\.375"):
        made(name, one(), **{key: -0.375})


@pytest.mark.parametrize("betas", [(1.0, 0.999), (0.9, 1.0), (-0.1, 0.9), (0.9, 1.5)])
@pytest.mark.parametrize("name", WITH_AMSGRAD)
def test_betas_out_of_range_are_refused_with_what_was_typed(name: str, betas: tuple[float, float]) -> None:
    wrong = next(beta for beta in betas if not 0 <= beta < 1)
    with pytest.raises(ValueError, match=rf"beta(?s:.*){wrong}"):
        CLASSES[name](one(), betas=betas)


@pytest.mark.parametrize("norm_type", [1, 3, -1])
def test_norms_other_than_2_and_infinity_are_refused_with_what_was_typed(norm_type: int) -> None:
    with pytest.raises((RuntimeError, ValueError), match=rf"norm_type.*{norm_type}|norm.*{norm_type}"):
        optimizers.FusedNovoGrad(one(), norm_type=norm_type)


@pytest.mark.parametrize("name", CLASSES)
def test_sparse_gradients_are_refused_and_nothing_is_stepped(name: str) -> None:
    dense, table = one()[0], nn.Embedding(5, 3, sparse=True)
    optimizer = made(name, [dense, table.weight])
    dense.grad = torch.ones(3)
    table(torch.tensor([1, 2])).sum().backward()
    before = frozen([dense, table.weight])
    with pytest.raises(RuntimeError, match=r"(?i)sparse"):
        optimizer.step()
    assert_bitwise([dense, table.weight], before)


@pytest.mark.parametrize("name", CLASSES)
def test_float64_parameters_are_refused_by_type_and_nothing_is_stepped(name: str) -> None:
    params = one() + parameters([(3,)], torch.float64)
    optimizer = made(name, params)
    give(params, gradients(params, 0))
    before = frozen(params)
    with pytest.raises((RuntimeError, TypeError, ValueError), match="float64"):
        optimizer.step()
    assert_bitwise(params, before)


# --- zero_grad ------------------------------------------------------------------------------------


def zeroed(name: str, call: Any, **settings: Any) -> torch.Tensor | None:
    params = one()
    optimizer = made(name, params, **settings)
    params[0].grad = torch.ones(3)
    call(optimizer)
    return params[0].grad


@pytest.mark.parametrize("name", CLASSES)
def test_zero_grad_does_by_default_what_set_grad_none_says(name: str) -> None:
    assert zeroed(name, lambda optimizer: optimizer.zero_grad(), set_grad_none=True) is None
    assert_bitwise(zeroed(name, lambda optimizer: optimizer.zero_grad(), set_grad_none=False), torch.zeros(3))
    default = zeroed(name, lambda optimizer: optimizer.zero_grad())
    assert (default is None) == SIGNATURES[name]["set_grad_none"]


@pytest.mark.parametrize("set_grad_none", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_zero_grad_takes_torchs_argument_which_decides(name: str, set_grad_none: bool) -> None:
    settings = {"set_grad_none": set_grad_none}
    assert zeroed(name, lambda optimizer: optimizer.zero_grad(set_to_none=True), **settings) is None
    assert zeroed(name, lambda optimizer: optimizer.zero_grad(True), **settings) is None
    assert_bitwise(zeroed(name, lambda optimizer: optimizer.zero_grad(set_to_none=False), **settings), torch.zeros(3))
