"""Recipes of eight and four bits: errors of a batch are those of products that are written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from amp_engine import AmpStateError, RunPolicy, amp
from amp_engine.tools.diagnosis.relative_error import distance
from amp_engine.tools.telemetry.comparison import LevelComparison
from tests.support import left_alone

RECIPES = ("float8", "mxfp8", "nvfp4")


# --- the recipes, written out -----------------------------------------------------------------------


def in_float8(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = torch.finfo(dtype).max / x.abs().amax()
    return (x * scale).to(dtype).float() / scale


def blocks_of(x: Tensor, dim: int, size: int) -> tuple[Tensor, ...]:
    return x.movedim(dim, -1).split(size, -1)


def in_mxfp8(x: Tensor, dim: int) -> Tensor:
    found = []
    for block in blocks_of(x, dim, 32):
        scale = torch.exp2(block.abs().amax(-1, keepdim=True).log2().floor() - 8)
        found.append((block / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(found, -1).movedim(-1, dim)


def in_nvfp4(x: Tensor, dim: int) -> Tensor:
    table = torch.tensor([0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0])  # even ones first: the first of two nearest is taken
    whole = 6.0 * 448.0 / x.abs().amax()
    found = []
    for block in blocks_of(x, dim, 16):
        scale = (block.abs().amax(-1, keepdim=True) / 6.0 * whole).to(torch.float8_e4m3fn).float() / whole
        nearest = table[((block / scale).abs()[..., None] - table).abs().argmin(-1)]
        found.append(nearest.copysign(block) * scale)
    return torch.cat(found, -1).movedim(-1, dim)


OPERANDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "float8": lambda x, dim: in_float8(x, torch.float8_e4m3fn),
    "mxfp8": in_mxfp8,
    "nvfp4": in_nvfp4,
}
GRADIENTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    **OPERANDS,
    "float8": lambda x, dim: in_float8(x, torch.float8_e5m2),
}


class Product(torch.autograd.Function):
    """a @ b, and its two products of the backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.recipe = recipe
        given = OPERANDS[recipe]
        return given(a, -1) @ given(b, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        given, came = OPERANDS[ctx.recipe], GRADIENTS[ctx.recipe]
        of_a = came(grad, -1) @ given(b, -1).mT
        return of_a, given(a, -2).mT @ came(grad, -2), None


def product(a: Tensor, b: Tensor, recipe: str | None) -> Tensor:
    return a @ b if recipe is None else Product.apply(a, b, recipe)


class Attention(nn.Module):
    """A layer and one head over its input, with lengths that no block divides; `recipe` has it written out."""

    def __init__(self, recipe: str | None = None) -> None:
        super().__init__()
        self.first, self.query, self.key = nn.Linear(24, 40), nn.Linear(40, 20), nn.Linear(40, 20, bias=False)
        self.last = nn.Linear(40, 3)
        self.recipe = recipe

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if self.recipe is None:
            return layer(x)
        y = product(x.flatten(0, -2), layer.weight.t(), self.recipe).unflatten(0, x.shape[:-1])
        return y if layer.bias is None else y + layer.bias

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.linear(self.first, x))
        scores = product(self.linear(self.query, x), self.linear(self.key, x).transpose(-1, -2), self.recipe)
        return self.linear(self.last, product(scores.softmax(-1), x, self.recipe))


def run(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def errors(found: LevelComparison, which: str) -> dict[str, float]:
    return {p.parameter: p.error for p in found.parameters if p.parameter.startswith(which)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradients_are_those_of_products_written_out(recipe: str) -> None:
    model, x = Attention(), torch.randn(4, 18, 24)
    found = amp.compare_levels(model, lambda m: run(m, x), recipe)
    written = Attention(recipe)
    written.load_state_dict(model.state_dict())
    losses = [run(one, x) for one in (model, written)]
    for loss in losses:
        loss.backward()
    assert found.loss == pytest.approx(losses[1].item(), rel=1e-6)
    assert found.loss_error > 1e-6
    expected = {
        name: distance(written.get_parameter(name).grad, p.grad).relative for name, p in model.named_parameters()
    }
    assert errors(found, "") == pytest.approx(expected, rel=1e-3)
    assert min(expected[name] for name in expected if name != "last.bias") > 1e-3
    element = "float4_e2m1fn" if recipe == "nvfp4" else "float8_e4m3fn"
    rounded = [o for o in found.operations if o.in_low_precision]
    assert [(o.operation, o.dtype) for o in sorted(rounded, key=lambda o: o.order)] == [
        (name, element) for name in ("addmm", "addmm", "mm", "bmm", "bmm", "addmm")
    ]
    assert (found.level, found.dtype) == (recipe, element)
    assert found.roundoff == (0.25 if recipe == "nvfp4" else 0.0625)
    assert all(o.growth == pytest.approx(o.error / max(o.error_in, found.roundoff)) for o in rounded)


class Operand(torch.autograd.Function):
    """An operand in E4M3, whose gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return OPERANDS["float8"](x, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_convolutions_are_rounded_at_float8_alone() -> None:
    layers = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3)
    model, x = nn.Sequential(*layers), torch.randn(3, 2, 6, 6)
    for recipe in ("mxfp8", "nvfp4"):
        assert amp.compare_levels(model, lambda m: run(m, x), recipe).gradient_error == 0.0
    found = amp.compare_levels(model, lambda m: run(m, x), "float8")
    y = x
    for layer in layers:
        y = F.conv2d(Operand.apply(y), Operand.apply(layer.weight), layer.bias)
        y.register_hook(lambda grad: GRADIENTS["float8"](grad, 0))
    weights = [layer.weight for layer in layers]
    expected = torch.autograd.grad(y.square().mean(), weights)
    exact = torch.autograd.grad(run(model, x), weights)
    for i, (one, other) in enumerate(zip(expected, exact, strict=True)):
        error = distance(one, other).relative
        assert error > 1e-3
        assert errors(found, f"{i}.weight") == pytest.approx({f"{i}.weight": error}, rel=1e-3)


def test_the_model_in_a_half_type_is_rounded_to_both() -> None:
    model, x = nn.Linear(32, 8), torch.randn(64, 32)
    found = amp.compare_levels(
        model, lambda m: m(x).float().square().mean(), RunPolicy("float8", cast_model_type="bfloat16")
    )
    (operation, *_) = (o for o in found.operations if o.operation == "addmm")
    assert operation.dtype == "float8_e4m3fn"
    assert 2.0**-8 < operation.error < 2.0**-3


# --- kept modules -----------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two layers of one input, and a loss in which neither changes the gradient of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.other(x)], -1).sin()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_kept_module_is_exact_in_both_directions(recipe: str) -> None:
    model, x = Branches(), torch.randn(64, 32)
    found = amp.compare_levels(model, lambda m: run(m, x), RunPolicy(recipe, keep_float=["one"]))
    assert set(errors(found, "one").values()) == {0.0}
    assert min(errors(found, "other").values()) > 1e-3
    assert {o.in_low_precision for o in found.operations if o.module == "one"} == {False}
    whole = amp.compare_levels(model, lambda m: run(m, x), RunPolicy(recipe, keep_float=[""]))
    assert (whole.loss_error, whole.gradient_error) == (0.0, 0.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_activation_checkpoint_changes_nothing(recipe: str, use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(24, 32)
            self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            self.uses = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return checkpoint(self.inner, x, use_reentrant=use_reentrant) if self.uses else self.inner(x)

    model, x = Checkpointed(), torch.randn(48, 24)
    plain = amp.compare_levels(model, lambda m: run(m, x), recipe)
    model.uses = True
    found = amp.compare_levels(model, lambda m: run(m, x), recipe)
    assert (found.loss, found.gradient_error) == (plain.loss, pytest.approx(plain.gradient_error, rel=1e-5))


class Outlying(nn.Module):
    """A layer that is given one feature 2^24 times as large as the others, as its weights are in the inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(64)
        scale[0] = 2.0**24
        return F.linear(x * scale, self.weight / scale)


def test_the_module_that_one_scale_ruins_is_named_and_found_and_blocks_bound_the_damage(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), Outlying(), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(64, 8)
    found = amp.compare_levels(model, lambda m: run(m, x), "float8")
    assert (found.operations[0].module, found.operations[0].error) == ("2", 1.0)  # all of its products are 0
    in_blocks = amp.compare_levels(model, lambda m: run(m, x), "mxfp8")
    lost = next(o.error for o in in_blocks.operations if o.module == "2" and o.operation == "mm")
    assert 0.5 < lost < 0.9  # half of the features share a block with that one
    kept = amp.find_fp32_modules(model, lambda m: run(m, x), "float8")
    assert kept.modules == ("2",)
    assert kept.tolerance == 0.5
    assert str(kept).startswith("float8 needs 2 in FP32: then the gradient is off by 0.")
    kept.save(tmp_path / "policy.json")
    again = RunPolicy.load(tmp_path / "policy.json")
    assert amp.compare_levels(model, lambda m: run(m, x), again).gradient_error == kept.after.gradient_error


# --- what is not changed, and what is refused -------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_is_left_of_an_emulation(raises: bool) -> None:
    model, x = Attention(), torch.randn(2, 5, 24)
    with left_alone(model):
        if raises:
            with pytest.raises(ZeroDivisionError):
                amp.compare_levels(model, lambda m: run(m, x) / (1 // 0), "float8")
        else:
            amp.compare_levels(model, lambda m: run(m, x), "float8")
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("typed", "meant"), [("float8", "float8"), ("fp8", "float8"), ("MXFP8", "mxfp8"), ("nvfp4", "nvfp4")]
)
def test_no_recipe_is_a_level_to_train_at(typed: str, meant: str) -> None:
    model = nn.Linear(4, 2)
    with left_alone(model):
        with pytest.raises(AmpStateError, match=f'{typed} is no training level.*compare_levels.*"{meant}"') as caught:
            amp.initialize(model, opt_level=typed, verbosity=0)
        assert 'opt_level="O5"' in str(caught.value)
        with pytest.raises(AmpStateError, match=f"{meant} is no training level"):
            amp.initialize(model, policy=RunPolicy(meant), verbosity=0)
    if typed != meant:
        with pytest.raises(AmpStateError, match=f'"{meant}"'):
            amp.compare_levels(model, lambda m: m(torch.ones(2, 4)).sum(), typed)
