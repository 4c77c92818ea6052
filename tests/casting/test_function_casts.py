"""Switching casts on and off: install and remove, for all threads, for one; what is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import amp
from amp_engine.casting import FunctionCasts
from amp_engine.casting.regions import float_region

X = torch.ones(2, 2)


def dtype() -> torch.dtype:
    return F.linear(X, X).dtype


def in_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


# --- on and off -----------------------------------------------------------------------------------


def test_install_and_remove_are_idempotent(low: torch.dtype) -> None:
    casts = FunctionCasts(low)
    casts.remove()
    assert (casts.installed, casts.is_active, dtype()) == (False, False, torch.float32)
    for _ in range(2):
        casts.install()
        assert (casts.installed, casts.is_active, dtype()) == (True, True, low)
    casts.remove()
    assert (casts.installed, casts.is_active, dtype()) == (False, False, torch.float32)


def test_remove_forgets_the_cached_casts(casts: FunctionCasts) -> None:
    nn.Linear(2, 2)(X)
    assert len(casts.cache.kept()) == 2
    casts.remove()
    assert casts.cache.kept() == []


def region(casts: FunctionCasts, context: str) -> Callable[[], AbstractContextManager[Any]]:
    return casts.disabled if context == "disabled" else float_region


@pytest.mark.parametrize("context", ["disabled", "float_region"])
class TestDisabled:
    def test_nests(self, context: str, casts: FunctionCasts) -> None:
        disabled = region(casts, context)
        with disabled():
            with disabled():
                assert dtype() == torch.float32
            assert (dtype(), casts.is_active) == (torch.float32, False)
        assert (dtype(), casts.is_active) == (casts.dtype, True)

    def test_ends_with_an_exception(self, context: str, casts: FunctionCasts) -> None:
        with pytest.raises(KeyError), region(casts, context)():
            raise KeyError
        assert dtype() == casts.dtype

    def test_leaves_refusals_and_bans_off(self, context: str, casts: FunctionCasts) -> None:
        with region(casts, context)():
            X.half().exp_()
            F.binary_cross_entropy(X.half(), X.half())

    def test_outlives_remove_and_install(self, context: str, casts: FunctionCasts) -> None:
        with region(casts, context)():
            casts.remove()
            casts.install()
            assert dtype() == torch.float32
        assert dtype() == casts.dtype


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("context", ["disabled", "float_region"])
def test_compiled_code_is_followed_inside_and_around(context: str, casts: FunctionCasts) -> None:
    disabled = region(casts, context)

    def operator(x: Tensor) -> torch.dtype:
        return (x @ x).dtype

    def inside(x: Tensor) -> tuple[Tensor, ...]:
        with disabled():
            return F.linear(x, x), x @ x, x.mm(x)

    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert compiled(X) == casts.dtype
        with disabled():
            assert compiled(X) == torch.float32
    assert {y.dtype for y in torch.compile(inside, backend="aot_eager", fullgraph=True)(X)} == {torch.float32}
    assert casts.is_active


def test_autocast_is_as_it_was_after_a_region(casts: FunctionCasts) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        with float_region():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_cache_enabled()


def test_disabled_reaches_every_thread_a_float_region_its_own(casts: FunctionCasts) -> None:
    with casts.disabled():
        assert in_thread(dtype) == torch.float32
    with float_region():
        assert in_thread(dtype) == casts.dtype
    assert in_thread(dtype) == casts.dtype


# --- reports --------------------------------------------------------------------------------------


def test_verbose_casts_are_reported_in_apex_words(low: torch.dtype) -> None:
    lines: list[str] = []
    casts = FunctionCasts(low, verbose=True, emit=lines.append)
    casts.install()
    weight = nn.Parameter(X.clone())
    F.linear(X, weight)
    F.linear(X.to(low), weight)
    F.softmax(X.to(low), 0)
    X.add(X)
    casts.remove()
    name = {torch.float16: "Half", torch.bfloat16: "BFloat16"}[low]
    assert lines == [f"Float->{name} (linear)", f"Float->{name} (linear)", f"{name}->Float (softmax)"]


def test_casts_are_silent_by_default(casts: FunctionCasts, capsys: pytest.CaptureFixture[str]) -> None:
    nn.Linear(2, 2)(X)
    assert capsys.readouterr().out == ""


# --- what has no effect ---------------------------------------------------------------------------


CASTS_THE_MODEL = ("O2", "O3", "O5")
KINDS = {"half": amp.half_function, "float": amp.float_function, "promote": amp.promote_function}


def no_effect(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "has no effect" in line]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O0", *CASTS_THE_MODEL])
def test_a_decorator_says_once_where_the_model_is_cast_and_no_function(
    level: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @KINDS[kind]
    def my_loss(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    my_loss(torch.ones(2))
    amp.initialize(nn.Linear(2, 2), opt_level=level)
    assert no_effect(capsys) == []
    for _ in range(2):
        my_loss(torch.ones(2))
    said = no_effect(capsys)
    assert len(said) == (level in CASTS_THE_MODEL)
    assert all(f"amp.{kind}_function" in line and "my_loss" in line and f"at {level}" in line for line in said)
    amp.close()
    my_loss(torch.ones(2))
    assert no_effect(capsys) == []


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("level", ["O0", *CASTS_THE_MODEL])
def test_a_registration_says_that_it_has_no_effect_where_the_model_is_cast(
    level: str, first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def register() -> None:
        amp.register_float_function(torch, "tanh")

    if first:
        register()
    amp.initialize(nn.Linear(2, 2), opt_level=level)
    if not first:
        register()
    said = no_effect(capsys)
    assert len(said) == (level in CASTS_THE_MODEL)
    assert all("amp.register_float_function" in line and "torch.tanh" in line for line in said)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_where_functions_are_cast_nothing_is_said_of_those_that_are_added(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cast = amp.float_function(torch.square)
    amp.initialize(nn.Linear(2, 2), opt_level=level)
    amp.register_float_function(torch, "tanh")
    assert cast(torch.ones(2, dtype=torch.float16)).dtype == torch.float32
    assert no_effect(capsys) == []


def test_casts_of_another_model_are_no_reason_to_say_that_nothing_is_cast(capsys: pytest.CaptureFixture[str]) -> None:
    cast = amp.float_function(torch.square)
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    amp.initialize(models[0], opt_level="O1")
    amp.initialize(models[1], opt_level="O2")
    assert cast(torch.ones(2, dtype=torch.float16)).dtype == torch.float32
    assert no_effect(capsys) == []
