"""The steps of all five optimizers: groups, types, layouts, sizes, missing gradients, closures, schedulers."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor

from amp_engine import Engine
from tests.optimizers.formulas import FORMULAS, Formula
from tests.optimizers.support import (
    CLASSES,
    HALVES,
    STATE,
    all_settings,
    assert_follows,
    assert_rounded_once,
    assert_twice_as_good,
    formula,
    give,
    gradients,
    made,
    mixed_parameters,
    parameters,
    run,
)
from tests.support import assert_bitwise, frozen, optimizer_values, weights_of

# Gradients are put there by hand.
pytestmark = pytest.mark.filterwarnings("ignore:.*nothing scaled the loss:amp_engine.errors.AmpGradientWarning")

EVERY = pytest.mark.parametrize("name", CLASSES)
SECOND = {"FusedSGD": {"momentum": 0.5, "nesterov": True}, "FusedAdagrad": {"eps": 0.1, "adagrad_w_mode": True}}
TORCHS: dict[str, Callable[..., Optimizer]] = {
    "FusedSGD": torch.optim.SGD,
    "FusedAdam": torch.optim.AdamW,
    "FusedAdagrad": torch.optim.Adagrad,
}
TORCHS_OF = {"FusedSGD": [torch.optim.SGD], "FusedAdam": [torch.optim.AdamW, torch.optim.Adam]}


@pytest.mark.parametrize("name", TORCHS)
def test_the_formulas_are_those_of_torch_where_torch_has_them(name: str) -> None:
    params = parameters(dtype=torch.float64)
    settings = {"lr": 0.05, "weight_decay": 0.01} | ({"momentum": 0.9, "dampening": 0.2} if name == "FusedSGD" else {})
    truth = Formula(name, [(params, all_settings(name, **settings))], torch.float64)
    run(TORCHS[name](params, **settings), range(5), lambda index: truth.step(gradients(params, index)))
    torch.testing.assert_close([param.detach() for param in params], truth.params, rtol=1e-12, atol=1e-12)


# --- groups ---------------------------------------------------------------------------------------


@EVERY
def test_each_group_is_stepped_with_its_own_settings(name: str) -> None:
    second = {"lr": 0.003, "weight_decay": 0.1} | SECOND.get(name, {"betas": (0.7, 0.9), "eps": 1e-4})
    assert_twice_as_good(name, split=4, second=second)


@pytest.mark.parametrize("when", [0, 3], ids=["before the first step", "after three steps"])
@EVERY
def test_a_group_added_after_construction_is_stepped(name: str, when: int) -> None:
    params = parameters([(5,), (3, 2), (4,), (2, 2)])
    optimizer = made(name, params[:2])
    truth = Formula(name, [(params[:2], all_settings(name)), (params[2:], all_settings(name, lr=0.007))], torch.float64)
    for index in range(6):
        if index == when:
            optimizer.add_param_group({"params": params[2:], "lr": 0.007})
        grads = [grad if row < 2 or index >= when else None for row, grad in enumerate(gradients(params, index))]
        assert_follows(optimizer, truth, grads, f"step {index}", params)


@EVERY
def test_a_parameter_that_moves_to_the_next_group_is_stepped_by_its_settings(name: str) -> None:
    """After the move the list of all parameters of the optimizer is the same as before."""
    for kind in [CLASSES[name], *TORCHS_OF.get(name, [])]:
        moved, there = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        optimizer = kind([{"params": [nn.Parameter(torch.ones(3)), moved]}, {"params": [there], "lr": 0.25}], lr=1.0)
        with Engine() as engine:
            engine.initialize(nn.Linear(1, 1), optimizer, opt_level="O0", loss_scale=2.0, verbosity=0)
            for _ in range(2):
                with torch.no_grad():
                    moved.fill_(1.0)
                    there.fill_(1.0)
                for p in weights_of(optimizer):
                    p.grad = torch.full_like(p, 0.5)
                optimizer.step()
                first, second = (group["params"] for group in optimizer.param_groups)
                if moved in set(first):
                    assert not torch.equal(moved, there)
                    second.insert(0, first.pop())
            assert torch.equal(moved, there)


@EVERY
def test_settings_may_change_between_steps(name: str) -> None:
    params = parameters()
    optimizer, truth = made(name, params), formula(name, params)
    for index in range(6):
        changed = {"lr": 0.01 * 0.5**index, "weight_decay": 0.02 * index}
        optimizer.param_groups[0].update(changed)
        truth.set(**changed)
        assert_follows(optimizer, truth, gradients(params, index), f"step {index}")


# --- missing gradients ----------------------------------------------------------------------------


@EVERY
def test_a_parameter_without_a_gradient_is_not_stepped_and_its_steps_are_counted_apart(name: str) -> None:
    params = parameters([(5,), (3, 2), (4,)])
    optimizer, truth = made(name, params), formula(name, params)
    for index in range(6):
        grads: list[Tensor | None] = list(gradients(params, index))
        if index < 2:
            grads[1] = None
        if index % 2:
            grads[2] = None
        before = frozen(params)
        assert_follows(optimizer, truth, grads, f"step {index}")
        for row, grad in enumerate(grads):
            if grad is None:
                assert_bitwise(params[row], before[row])


@EVERY
def test_a_step_without_any_gradient_does_nothing(name: str) -> None:
    params = parameters()
    optimizer = made(name, params)
    before = frozen(params)
    optimizer.step()
    assert_bitwise(params, before)
    assert optimizer.state_dict()["state"] == {}
    run(optimizer, range(2))
    values = optimizer_values(optimizer)
    give(params, [None] * len(params))
    optimizer.step()
    assert_bitwise(optimizer_values(optimizer), values)


@EVERY
def test_gradients_are_read_and_not_written(name: str) -> None:
    params = mixed_parameters()
    optimizer = made(name, params)
    run(optimizer, range(2), lambda index: assert_bitwise([p.grad for p in params], gradients(params, index)))


@EVERY
def test_a_replaced_gradient_is_the_one_that_is_stepped(name: str) -> None:
    """Another tensor every step, the same one written in place, and no memory of the last."""
    params, others = parameters(), parameters()
    optimizer, fresh = made(name, params), made(name, others)
    give(params, gradients(params, 0))
    for index in range(5):
        for param, grad in zip(params, gradients(params, index), strict=True):
            param.grad.copy_(grad)
        optimizer.step()
        run(fresh, [index])
        assert_bitwise(params, others)


@EVERY
def test_parameters_written_or_moved_by_the_user_are_stepped_from_there(name: str) -> None:
    params = parameters()
    optimizer, truth = made(name, params), formula(name, params)
    for index in range(6):
        with torch.no_grad():
            if index == 2:
                for param in params:
                    param.mul_(0.5)
            if index == 4:
                for param in params:
                    param.data = param.detach().clone() + 1
        assert_follows(optimizer, truth, gradients(params, index), f"step {index}")


@EVERY
def test_without_a_scaler_a_nan_is_not_hidden(name: str) -> None:
    params = parameters([(5,), (4,)])
    optimizer = made(name, params)
    grads = gradients(params, 0)
    grads[0][2] = float("nan")
    give(params, grads)
    optimizer.step()
    assert params[0][2].isnan()


@EVERY
def test_an_optimizer_that_has_stepped_is_not_kept_alive(name: str) -> None:
    params = parameters([(5,)])
    optimizer = made(name, params)
    run(optimizer, range(2))
    references = [weakref.ref(optimizer), weakref.ref(params[0])]
    del optimizer, params
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# --- types ----------------------------------------------------------------------------------------


@EVERY
def test_types_may_be_mixed_and_each_weight_is_the_truth_rounded_once(name: str) -> None:
    params = mixed_parameters()
    optimizer, truth = made(name, params), formula(name, params)
    for index in range(8):
        assert_follows(optimizer, truth, gradients(params, index), f"step {index}")
    for param in params:
        for key in STATE[name]:
            assert optimizer.state[param][key].dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
@EVERY
def test_a_small_second_moment_of_a_half_parameter_does_not_vanish(name: str, dtype: torch.dtype) -> None:
    """Gradients of 1e-4 have squares that float16 does not hold."""
    params = [nn.Parameter(torch.ones(64, dtype=dtype))]
    settings = {"weight_decay": 0.0} | ({"max_grad_norm": 0.0} if name == "FusedLAMB" else {})
    optimizer, truth = made(name, params, **settings), formula(name, params, **settings)
    for _ in range(3):
        assert_follows(optimizer, truth, [torch.full((64,), 1e-4, dtype=dtype)])
    for key in STATE[name]:
        torch.testing.assert_close(optimizer.state[params[0]][key].double(), truth.states[0][key], rtol=1e-5, atol=0.0)


# --- layouts --------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda grad: grad.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda grad: grad.contiguous(memory_format=torch.channels_last),
    "every other element": lambda grad: torch.stack([grad, grad], -1)[..., 0],
    "reversed memory": lambda grad: grad.flip(0).contiguous().flip(0),
    "inside of a larger one": lambda grad: nn.functional.pad(grad, (1, 2))[..., 1:-2],
    "off by one element": lambda grad: torch.cat([torch.zeros(1), grad.flatten()])[1:].view(grad.shape),
    "expanded": lambda grad: grad[:1].expand_as(grad),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY
def test_a_gradient_may_lie_in_memory_as_it_likes(name: str, layout: str) -> None:
    params, others = parameters([(6, 4, 3, 5)]), parameters([(6, 4, 3, 5)])
    optimizer, contiguous = made(name, params), made(name, others)
    for index in range(3):
        (grad,) = gradients(params, index)
        params[0].grad = LAYOUTS[layout](grad)
        others[0].grad = params[0].grad.contiguous()
        optimizer.step()
        contiguous.step()
        assert_bitwise(params, others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY
def test_parameters_may_be_channels_last_or_transposed(name: str, dtype: torch.dtype) -> None:
    """Norms add up in another order, so tensors are as near as rounding allows."""

    def fresh() -> list[nn.Parameter]:
        image, matrix = parameters([(6, 4, 3, 5), (8, 5)], dtype)
        return [nn.Parameter(image.detach().contiguous(memory_format=torch.channels_last)), nn.Parameter(matrix.mT)]

    params = fresh()
    strides = [param.stride() for param in params]
    optimizer, truth = made(name, params), formula(name, params)
    for index in range(4):
        grads = gradients(params, index)
        if index % 2:
            grads = [torch.empty_like(param).copy_(grad) for param, grad in zip(params, grads, strict=True)]
        assert_follows(optimizer, truth, grads, f"step {index}")
    assert [param.stride() for param in params] == strides


@EVERY
def test_a_parameter_with_gaps_in_memory_is_stepped_as_one_without_them(name: str) -> None:
    def stepped(parameter: Callable[[Tensor], Tensor]) -> list[Tensor]:
        values = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(4))
        params = [*parameters([(3,)]), *(nn.Parameter(parameter(v)) for v in (values[0], values[1].half()))]
        run(made(name, params), range(3))
        return [p.detach().contiguous() for p in params]

    assert_bitwise(stepped(lambda v: v[:, ::2]), stepped(lambda v: v[:, ::2].contiguous()))


@EVERY
def test_an_expanded_parameter_is_refused_by_layout_and_nothing_is_stepped(name: str) -> None:
    params = [*parameters([(3,)]), nn.Parameter(torch.randn(8, 1).expand(8, 6))]
    optimizer = made(name, params)
    give(params, gradients(params, 0))
    before = frozen(params)
    with pytest.raises(TypeError, match="expanded"):
        optimizer.step()
    assert_bitwise(params, before)
    assert not optimizer.state


@EVERY
def test_tensors_that_wrap_others_are_refused_with_what_to_use(name: str) -> None:
    params = [*parameters([(3,)]), nn.Parameter(TwoTensor(torch.randn(4), torch.randn(4)))]
    optimizer = made(name, params)
    give(params[:1], gradients(params[:1], 0))
    before = frozen(params[:1])
    params[1].grad = TwoTensor(torch.randn(4), torch.randn(4))
    with pytest.raises(TypeError, match=r"parameter 1 of shape \(4,\).*Use an optimizer of torch.optim"):
        optimizer.step()
    assert_bitwise(params[:1], before)
    assert not optimizer.state


# --- sizes ----------------------------------------------------------------------------------------


@EVERY
def test_empty_tensors_take_part_without_harm_and_count_their_steps_as_in_torch(name: str) -> None:
    params = parameters([(0,), (4, 0, 2), (3,)])
    optimizer = made(name, params)
    run(optimizer, range(3))
    assert all(param.isfinite().all() for param in params)
    saved = optimizer.state_dict()["state"]
    if "step" in saved[2]:
        assert [saved[row]["step"].item() for row in range(3)] == [3.0] * 3
    run(made(name, parameters([(0,), (0, 3)])), range(2))


@EVERY
def test_ten_thousand_tiny_parameters_are_each_stepped(name: str) -> None:
    """Tensors of the same values in many places get the same bits, and those of the formula."""
    values = torch.randn(3, generator=torch.Generator().manual_seed(1))
    params = [nn.Parameter(values[: 1 + row % 3].clone()) for row in range(10_000)]
    settings = {"max_grad_norm": 0.0} if name == "FusedLAMB" else {}
    optimizer = made(name, params, **settings)
    truth = formula(name, params[:3], **settings)
    for index in range(2):
        grads = gradients(params[:3], index)
        start = [param.detach().double() for param in params[:3]]
        truth.params = list(start)
        truth.step(grads)
        for row, param in enumerate(params):
            param.grad = grads[row % 3]
        optimizer.step()
        assert_rounded_once(params[:3], truth.params, start)
    for kind in range(3):
        same = torch.stack([param.detach() for param in params[kind::3]])
        assert torch.equal(same, same[:1].expand_as(same))


# --- closures and schedulers ----------------------------------------------------------------------


@EVERY
def test_a_closure_is_evaluated_with_gradients_on_and_its_value_returned(name: str) -> None:
    params, others = parameters([(4,)]), parameters([(4,)])
    optimizer, plain = made(name, params), made(name, others)

    def loss(param: Tensor) -> Tensor:
        return (param * torch.arange(4.0)).square().sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(params[0])
        value.backward()
        return value

    for _ in range(3):
        expected = loss(others[0])
        plain.zero_grad()
        expected.backward()
        plain.step()
        assert_bitwise(optimizer.step(closure), expected)
        assert_bitwise(params, others)
    assert plain.step() is None
    assert optimizer.step(closure=closure) is not None


@EVERY
def test_a_scheduler_is_followed_and_warns_of_nothing(name: str) -> None:
    params = parameters()
    optimizer, truth = made(name, params), formula(name, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cycles = "betas" in optimizer.defaults or "momentum" in optimizer.defaults
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8, cycle_momentum=cycles)
        for index in range(6):
            (group,) = optimizer.param_groups
            truth.set(**{key: group[key] for key in ("lr", "betas", "momentum") if key in group})
            assert_follows(optimizer, truth, gradients(params, index), f"step {index}")
            schedule.step()


# --- torch.amp.GradScaler -------------------------------------------------------------------------


@EVERY
def test_grad_scaler_of_torch_drives_it_and_a_power_of_two_changes_no_bit(name: str) -> None:
    params, others = parameters(), parameters()
    optimizer, plain = made(name, params), made(name, others)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for index in range(5):
        for group in (params, others):
            give(group, gradients(group, index))
        for param in params:
            param.grad *= scaler.scale(torch.ones(()))
        if index % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        assert_bitwise(params, others)


def test_every_optimizer_has_a_formula() -> None:
    assert set(FORMULAS) == set(CLASSES)
