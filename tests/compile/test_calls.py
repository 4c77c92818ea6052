"""What compiled code calls as it runs, and what caches find it by, follows the casts that it was compiled with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import select_algorithm
from torch._inductor.utils import fresh_cache

from amp_engine import amp
from amp_engine.casting import FunctionCasts
from tests.support import FUNCTION_LEVELS, HALF, assert_bitwise

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated")  # inductor


def defined(name: str, fake: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A custom operator `x @ w.T` whose gradient is another one."""

    @torch.library.custom_op(f"amp_engine_tests::{name}", mutates_args=())
    def product(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    @torch.library.custom_op(f"amp_engine_tests::{name}_backward", mutates_args=())
    def gradient(g: Tensor, w: Tensor) -> Tensor:
        return torch.mm(g, w)

    product.register_fake(fake)
    gradient.register_fake(lambda g, w: torch.empty_like(g))
    product.register_autograd(
        lambda ctx, g: (gradient(g, *ctx.saved_tensors), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )
    return product


OPERATORS = {
    "told": defined("told", lambda x, w: x.new_empty(x.shape)),
    "computed": defined("computed", lambda x, w: F.linear(x, w)),
}


def everywhere(call: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return call(*args)


def in_casts(call: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with amp.casts():
        return call(*args)


def disabled(call: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with amp.disable_casts():
        return call(*args)


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
@pytest.mark.parametrize("fake", OPERATORS)
@pytest.mark.parametrize(
    ("casts", "within"), [("everywhere", everywhere), ("everywhere", disabled), ("model", in_casts)]
)
def test_a_custom_operator_runs_in_the_type_of_its_fake_kernel(
    level: str, fake: str, casts: str, within: Callable[..., Tensor]
) -> None:

    def sized(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = OPERATORS[fake](x, w)
        return y * y.dtype.itemsize  # known while the graph is made

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    expected = F.linear(x, w) * 4
    amp.initialize(nn.Linear(1, 1), opt_level=level, casts=casts, verbosity=0)
    actual = within(torch.compile(sized, fullgraph=True, backend="aot_eager"), x, w)
    assert_bitwise(actual, expected)
    assert_bitwise(torch.autograd.grad(actual.sum(), x), torch.autograd.grad(expected.sum(), x))


class Kept(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.kept, self.how = nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1), how
        if how == "keep_float":
            amp.keep_float(self.kept)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.how == "keep_float":
            return self.kept(x)
        with amp.disable_casts():
            return self.kept(x.float())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo
@pytest.mark.parametrize("how", ["keep_float", "disable_casts"])
@pytest.mark.parametrize("casts", ["everywhere", "model"])
def test_a_kept_convolution_is_right_if_inductor_was_imported_while_torch_was_patched(
    casts: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(Kept(how)), torch.randn(1, 2, 3)
    amp.initialize(model, opt_level="O4", casts=casts, verbosity=0)
    monkeypatch.setattr(select_algorithm.extern_kernels, "convolution", torch.convolution)  # as its import does
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    model[0].compile()
    output = model(x)
    assert output.dtype is torch.float32
    torch.testing.assert_close(torch.autograd.grad(output.sum(), list(model.parameters())), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo
@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_gradients_of_a_compiled_decomposition_are_those_that_the_page_of_casts_says(level: str) -> None:
    page = " ".join((Path(__file__).parents[2] / "docs/casts.md").read_text().split())
    assert "Call them through `torch.compiler.disable(torch.linalg.inv)` where that matters" in page
    x = torch.randn(6, 6) + 4 * torch.eye(6)

    def gradient(inv: Callable[[Tensor], Tensor], is_compiled: bool = True) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return inv(x).square().sum()

        given = x.clone().requires_grad_()
        (torch.compile(loss, backend="aot_eager") if is_compiled else loss)(given).backward()
        return given.grad

    plain = gradient(torch.linalg.inv, is_compiled=False)
    with torch.autocast("cpu", dtype=HALF[level]):
        under_autocast = gradient(torch.linalg.inv)
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    assert_bitwise(gradient(torch.linalg.inv, is_compiled=False), plain)
    assert_bitwise(gradient(torch.linalg.inv), under_autocast)
    assert_bitwise(gradient(torch.compiler.disable(torch.linalg.inv)), plain)
    counters["graph_break"].clear()  # which `disable` is


@pytest.mark.slow
def test_a_graph_from_inductors_cache_has_the_casts_of_now() -> None:
    """The cache of graphs knows `x @ x` by its name, and outlives the process."""
    x = torch.randn(2, 2)

    def check(dtype: torch.dtype) -> None:
        torch.compiler.reset()
        assert torch.compile(lambda x: x @ x)(x).dtype is dtype

    with fresh_cache():
        check(torch.float32)
        amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
        check(torch.bfloat16)
        thread = Thread(target=check, args=(torch.bfloat16,))
        thread.start()
        thread.join()
        with amp.disable_casts():
            check(torch.float32)
        amp.close()
        check(torch.float32)
    assert torch._functorch.config.enable_autograd_cache


def test_a_subclass_is_told_of_a_listed_function() -> None:
    class Told(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            return -1 if func is add else super().__torch_function__(func, types, args, kwargs)

    add = torch.add
    for table in (torch._dynamo.variables.torch.get_overridable_functions, torch.overrides._get_overridable_functions):
        table.cache_clear()
    casts = FunctionCasts(torch.bfloat16)
    casts.install()
    try:
        run = torch.compile(lambda x, y: (x * 2, torch.add(x, y)), fullgraph=True, backend="aot_eager")
        assert run(torch.ones(2), torch.ones(2).as_subclass(Told))[1] == -1
    finally:
        casts.remove()
