"""Faults that threads meet only by chance: `make stress ROUNDS=2000`.

`make test` does not run this file. Each test has a form there that needs no luck, in tests/casting/test_safety.py and
test_weight_copies.py. Every loop here has a fixed length.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import Engine, amp
from amp_engine.casting import FunctionCasts
from tests.models import MLP
from tests.stress.support import ROUNDS, WAIT, in_threads, times
from tests.support import FUNCTION_LEVELS, HALF, backward, train

X = torch.eye(4)
MM, LINEAR, MATMUL = torch.mm, F.linear, Tensor.matmul


@pytest.fixture(params=FUNCTION_LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def casts(request: pytest.FixtureRequest) -> Iterator[FunctionCasts]:
    casts = FunctionCasts(request.param)
    casts.install()
    yield casts
    casts.remove()


# --- copies of weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True])
def test_a_model_is_evaluated_in_one_thread_while_another_steps_it(gradients: bool, level: str) -> None:
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    low = HALF[level]

    def evaluate() -> None:
        with torch.set_grad_enabled(gradients):
            model(torch.zeros(1, 512))

    def iterate() -> None:
        backward(model(torch.ones(1, 512)).float().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        casts = amp.current_engine().function_casts.casts
        assert torch.equal(casts.cache.cast(model.weight, low), model.weight.to(low))

    for _ in range(ROUNDS):
        in_threads(times(3, iterate), times(6, evaluate))


def test_two_threads_run_one_model_and_neither_writes_what_the_other_saved(level: str) -> None:
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    x = torch.ones(1, 512)
    for _ in range(2):
        backward(model(x).float().sum(), optimizer)
        optimizer.step()
    casts = amp.current_engine().function_casts.casts

    def work() -> None:
        casts.cache.clear()  # as at the end of each scale_loss, of which several add up
        of_mine = x.clone().requires_grad_()
        torch.autograd.grad(model(of_mine).float().sum(), of_mine)

    for _ in range(ROUNDS):
        in_threads(times(10, work), times(10, work))


def test_a_write_while_another_thread_casts_the_weight_is_seen(casts: FunctionCasts) -> None:
    n = 1024
    weight, x = nn.Parameter(torch.zeros(n, n)), torch.ones(1, n)

    def write() -> None:
        for value in (0.0, 1.0, 2.0):  # one after another, so that casts of one are made while the next is written
            weight.data.fill_(value)
            casts.cache.clear()

    for _ in range(ROUNDS):
        in_threads(write, times(3, lambda: casts.cache.cast(weight, casts.dtype)))
        assert F.linear(x, weight).eq(2.0 * n).all()


def test_threads_may_cast_and_drop_the_copies_of_one_model(casts: FunctionCasts) -> None:
    """Freeing a tensor lets other threads run, in the middle of whatever freed it."""
    x = torch.ones(1, 2)
    for _ in range(ROUNDS):
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
        weights = list(model.parameters())
        expected = model(x).detach()
        drop: list[Callable[[], Any]] = [
            casts.cache.clear,
            lambda all_of_them=weights: [casts.cache.cast(w, casts.dtype) for w in all_of_them],
        ]

        def run(call: Callable[[], Any], model: Any = model, expected: Tensor = expected) -> None:
            for _ in range(5):
                assert torch.equal(model(x).detach(), expected)
                call()

        in_threads(*(lambda call=call, run=run: run(call) for call in drop * 3))


# --- casts that come and go -----------------------------------------------------------------------


def test_patched_functions_run_in_two_threads_while_a_third_switches_casts_on_and_off(casts: FunctionCasts) -> None:
    model, low = nn.Linear(4, 4), casts.dtype

    def work() -> None:
        y = torch.mm(X, X)
        assert torch.equal(y.float(), X)
        z = F.softmax(y, -1)
        output = model(X)
        output.float().sum().backward()
        assert {y.dtype, z.dtype, output.dtype} <= {torch.float32, low}
        assert torch.cat([y, X]).sum().item() == 8.0

    def switch() -> None:
        with casts.disabled():
            assert torch.mm(X, X).dtype == torch.float32
            with casts.disabled():
                pass
            assert torch.mm(X, X).dtype == torch.float32

    for _ in range(ROUNDS):
        in_threads(times(20, work), times(20, work), times(40, switch))
        assert casts.is_active
        assert torch.mm(X, X).dtype == low


def test_one_engine_takes_models_in_from_several_threads_at_once() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    engine = amp.current_engine()

    def run() -> None:
        model = nn.Linear(2, 2)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O4", verbosity=0)

    for _ in range(ROUNDS):
        in_threads(*[times(2, run)] * 4)


def test_functions_run_in_one_thread_while_engines_come_and_go_in_another() -> None:
    """A call that starts under one engine and ends under another is right under one of them."""

    def work() -> None:
        for y in (torch.mm(X, X), X @ X, X.matmul(X), F.linear(X, X), X + X - X, torch.einsum("ij,jk", X, X)):
            assert y.dtype in (torch.float32, torch.float16, torch.bfloat16)
            assert torch.equal(y.float(), X)

    def switch() -> None:
        for level in FUNCTION_LEVELS:
            with Engine() as engine:
                engine.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
                X @ X

    for _ in range(ROUNDS):
        in_threads(times(40, work), switch)
        assert torch.mm is MM


def test_disable_casts_of_several_threads_ends_with_the_last(casts: FunctionCasts) -> None:
    barrier = threading.Barrier(4)

    def run() -> None:
        barrier.wait(WAIT)
        with casts.disabled():
            barrier.wait(WAIT)
            assert torch.mm(X, X).dtype == torch.float32

    for _ in range(ROUNDS):
        in_threads(*[times(2, run)] * 4)
        assert torch.mm(X, X).dtype == casts.dtype


# --- training -------------------------------------------------------------------------------------


def test_several_threads_train_models_of_their_own_under_one_engine() -> None:
    for _ in range(ROUNDS):
        models = [MLP.model(seed) for seed in range(3)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
        amp.initialize(models, optimizers, opt_level="O4", verbosity=0)

        def run(index: int, models: Any = models, optimizers: Any = optimizers) -> list[float]:
            return train(MLP, models[index], optimizers[index], "c" * 15)

        for losses in in_threads(*(lambda index=index, run=run: run(index) for index in range(3))):
            assert losses[-1] < losses[0]
            assert all(loss == loss for loss in losses)  # noqa: PLR0124
        amp.close()


def test_backwards_in_many_threads_add_up_in_one_weight(casts: FunctionCasts) -> None:
    for _ in range(ROUNDS):
        layer = nn.Linear(4, 4, bias=False)
        run = times(5, lambda layer=layer: layer(torch.ones(1, 4)).float().sum().backward())
        in_threads(*[run] * 4)
        assert torch.equal(layer.weight.grad, torch.full((4, 4), 20.0))
