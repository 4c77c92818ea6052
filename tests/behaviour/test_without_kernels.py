"""Without compiled kernels torch's classes take their own step on FP32 masters; what needs kernels says so, and why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import amp, optimizers
from amp_engine.apex import amp_C
from amp_engine.errors import AmpStateError
from amp_engine.kernels import _native, choice
from tests.kernels.conftest import backend as backend
from tests.models import NORMED_MLP
from tests.support import (
    LEVELS,
    MASTER_LEVELS,
    assert_bitwise,
    frozen,
    momentum_sgd,
    started,
    step_beside,
    train,
    weights_of,
)

pytestmark = pytest.mark.parametrize("backend", ["plain"], indirect=True)
OURS = ("FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad", "FusedMixedPrecisionLamb")
NEEDS = r"needs compiled kernels.*: the compiler is out; run: pip install"


@pytest.fixture(autouse=True)
def reason(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "module", None)
    monkeypatch.setattr(_native, "reason", "the compiler is out; run: pip install")


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("make", [adamw, torch.optim.Adam, momentum_sgd])
@pytest.mark.parametrize("level", LEVELS)
def test_torch_takes_its_own_step_bit_by_bit(level: str, make: Callable[[Any], Optimizer]) -> None:
    model, optimizer = started(level, make)
    bare = make([nn.Parameter(weight.detach().clone()) for weight in weights_of(optimizer)])
    for index in range(3):
        step_beside(NORMED_MLP, model, optimizer, bare, index)
        assert_bitwise(frozen(weights_of(optimizer)), frozen(weights_of(bare)))
    states = [[*map(frozen, one.state.values())] for one in (optimizer, bare)]
    assert_bitwise(*states)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_step_takes_what_other_code_wrote_into_a_parameter(level: str) -> None:
    model, optimizer = started(level, lambda params: torch.optim.SGD(params, lr=0.0))
    train(NORMED_MLP, model, optimizer, "c")
    written = next(p for p in model.parameters() if p.dtype is not torch.float32)
    written.data[0] = 0.375
    train(NORMED_MLP, model, optimizer, "c", first=1)
    master = next(m for m, p in zip(weights_of(optimizer), model.parameters(), strict=True) if p is written)
    assert (master[0] == 0.375).all()
    assert (master[1] != written[1].float()).any()


@pytest.mark.parametrize("name", OURS)
def test_a_fused_class_is_refused_as_in_apex(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} {NEEDS}"):
        getattr(optimizers, name)([nn.Parameter(torch.ones(3))], lr=0.1)


@pytest.mark.parametrize("level", ["alone", "O4", "O5"])
def test_a_fused_step_on_a_device_without_kernels_is_refused(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(choice.NATIVE, "cpu", None)
        model = nn.Linear(3, 2)
        optimizer = optimizers.FusedAdam(model.parameters(), lr=0.1)
    if level != "alone":
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model(torch.ones(4, 3)).float().sum().backward()
    before = frozen([*model.parameters()])
    with pytest.raises(AmpStateError, match=f"FusedAdam {NEEDS}"):
        optimizer.step()
    assert_bitwise(frozen([*model.parameters()]), before)
    assert not optimizer.state


def test_narrow_moments_are_refused_and_nothing_is_changed() -> None:
    model = NORMED_MLP.model(0)
    optimizer = adamw(model.parameters())
    before = frozen(model.state_dict())
    with pytest.raises(AmpStateError, match=NEEDS):
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, moment_dtype=torch.bfloat16)
    assert_bitwise(frozen(model.state_dict()), before)


def test_of_amp_c_only_the_steps_are_refused() -> None:
    def lists(n: int) -> list[list[Tensor]]:
        return [[torch.ones(3), torch.ones(2, 2)] for _ in range(n)]

    flag, given = torch.zeros(1, dtype=torch.int32), lists(4)
    before = copy.deepcopy(given)
    with pytest.raises(AmpStateError, match=f"step of adam by amp_engine {NEEDS}"):
        amp_C.multi_tensor_adam(65536, flag, given, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    assert_bitwise(given, before)
    inputs, outputs = lists(2)
    amp_C.multi_tensor_scale(65536, flag, [inputs, outputs], 0.5)
    assert outputs[0].tolist() == [0.5] * 3
    assert amp_C.multi_tensor_l2norm(65536, flag, [inputs], False)[0].item() == pytest.approx(7**0.5)


def test_initialize_says_in_one_line_what_is_missing_and_what_adds_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = NORMED_MLP.model(0)
    amp.initialize(model, adamw(model.parameters()), opt_level="O5")
    said = [line for line in capsys.readouterr().out.splitlines() if "kernels" in line]
    assert said == [f"Note:  optimizers take PyTorch's own steps, without the compiled kernels: {_native.reason}"]
    amp.initialize(NORMED_MLP.model(0), opt_level="O5", verbosity=0)
    assert "kernels" not in capsys.readouterr().out


def test_a_build_for_the_cpu_says_what_gpus_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "module", object())
    monkeypatch.setattr(_native, "record", {"reason": "nvcc was not found"})
    monkeypatch.setitem(choice.NATIVE, "cpu", object())
    assert choice.missing(torch.device("cpu")) is None
    assert choice.missing(torch.device("cuda", 1)) == f"none for CUDA, nvcc was not found; then run: {_native.INSTALL}"
    assert "none for mps" in str(choice.missing(torch.device("mps")))
