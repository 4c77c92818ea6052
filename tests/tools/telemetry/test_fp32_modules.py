"""`amp.find_fp32_modules`: exactly the modules that lose in half, saved and read back by `initialize`."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import AmpStateError, AmpTypeError, AmpValueError, Engine, RunPolicy, amp
from amp_engine.tools.telemetry.delta_debugging import reduced
from tests.support import HALF, assert_bitwise
from tests.tools.telemetry.lossy import WIDTH, Batch, Cancelling, Model

U = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
CASES = [
    *(("O1", kind) for kind in ("cancelling", "softmax", "overflowing")),
    *(("O2", kind) for kind in ("centred", "overflowing", "attending")),
    *(("O4", kind) for kind in ("softmax", "attending")),
    *(("O5", kind) for kind in ("cancelling", "centred")),
]
PAIRS = [
    ("O1", "cancelling", "overflowing"),
    ("O2", "softmax", "attending"),
    ("O2", "overflowing", "centred"),
    ("O4", "centred", "cancelling"),
    ("O5", "attending", "softmax"),
]


@pytest.mark.parametrize(("level", "kind"), CASES)
def test_the_one_that_is_planted_is_the_list(level: str, kind: str, tmp_path: Path) -> None:
    model, batch = Model(b1=kind), Batch()
    before = model.state_dict()
    kept = {name: t.clone() for name, t in before.items()}
    found = amp.find_fp32_modules(model, batch, level)
    assert found.modules == ("blocks.1.planted",), str(found)
    assert found.is_acceptable
    assert found.is_minimal
    assert found.runs == 4
    assert found.tolerance == 64 * U[HALF[level]]
    assert max(found.before.loss_error, found.before.gradient_error) > found.tolerance
    assert max(found.after.loss_error, found.after.gradient_error) <= found.tolerance
    assert found.after.operations
    assert f"{level} needs blocks.1.planted in FP32" in str(found)
    for name, value in model.state_dict().items():
        assert_bitwise(value, kept[name])
    assert all(p.grad is None for p in model.parameters())
    assert_the_saved_policy_is_enough(model, batch, found, tmp_path)


@pytest.mark.parametrize(("level", "first", "second"), PAIRS)
def test_two_that_are_planted_are_the_list(level: str, first: str, second: str, tmp_path: Path) -> None:
    model, batch = Model(b0=first, b2=second), Batch()
    found = amp.find_fp32_modules(model, batch, level)
    assert sorted(found.modules) == ["blocks.0.planted", "blocks.2.planted"], str(found)
    assert found.is_minimal
    assert "Without any one of them" in str(found)
    for one in found.modules:  # and neither alone
        alone = amp.compare_levels(model, batch, RunPolicy(level, [one]))
        assert max(alone.loss_error, alone.gradient_error) > (found.tolerance or 0.0)
    assert_the_saved_policy_is_enough(model, batch, found, tmp_path)


def assert_the_saved_policy_is_enough(model: nn.Module, batch: Batch, found: Any, tmp_path: Path) -> None:
    """`initialize` with the file gives the gradient of FP32, nearly."""
    found.save(tmp_path / "policy.json")
    written = json.loads((tmp_path / "policy.json").read_text())
    assert written == {"format": 1, "opt_level": found.policy.opt_level, "keep_float": [*found.modules]}
    gradients = []
    for keywords in ({"policy": tmp_path / "policy.json"}, {"opt_level": "O0"}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with Engine() as engine:
            engine.initialize(model, optimizer, verbosity=0, **keywords)  # type: ignore[arg-type]
            for _ in range(20):  # until the loss scale fits
                optimizer.zero_grad()
                torch.manual_seed(3)
                with engine.scale_loss(batch(model), optimizer) as scaled_loss:
                    scaled_loss.backward()
                if all(bool(p.grad.isfinite().all()) for p in engine.master_params(optimizer) if p.grad is not None):
                    break
                optimizer.step()  # is skipped
            masters = engine.master_params(optimizer)
            gradients.append(torch.cat([p.grad.flatten().double() for p in masters if p.grad is not None]))
            optimizer.zero_grad()
    assert bool(gradients[0].isfinite().all())
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < found.tolerance


def test_two_that_suffice_only_together_are_found_among_many() -> None:
    class Together(nn.Module):
        """Two parts of one sum, whose digits are there only if both terms are."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
            self.left, self.right = Cancelling(), Cancelling()
            self.first = nn.Linear(4, WIDTH)
            self.last = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers(self.first(x))
            return self.last(self.left(x) + self.right(x * 2.0))

    found = amp.find_fp32_modules(Together(), Batch(), "O2")
    assert sorted(found.modules) == ["left", "right"]
    assert found.is_minimal


def test_parts_are_kept_rather_than_what_they_are_in() -> None:
    class Outer(nn.Module):
        """Has an operation of its own, which loses nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.left, self.middle, self.right = Cancelling(), nn.Linear(WIDTH, WIDTH), Cancelling()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.right(self.middle(self.left(x))))

    model = nn.Sequential(nn.Linear(4, WIDTH), Outer(), nn.Linear(WIDTH, 2))
    found = amp.find_fp32_modules(model, Batch(), "O2")
    assert sorted(found.modules) == ["1.left", "1.right"], str(found)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_recurrent_layer_is_found_though_torch_runs_other_kernels_in_half(level: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
            self.lstm = nn.LSTM(WIDTH, WIDTH)
            with torch.no_grad():  # gates of large numbers that cancel, and are 1.3 in FP32 alone
                self.lstm.bias_ih_l0.fill_(4001.3)
                self.lstm.bias_hh_l0.fill_(-4000.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.lstm(self.first(x))[0])

    found = amp.find_fp32_modules(Recurrent(), Batch(), level)
    assert found.modules == ("lstm",), str(found)


def test_a_level_that_does_without_needs_nothing(tmp_path: Path) -> None:
    for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
        found = amp.find_fp32_modules(Model(), Batch(), level)
        assert (found.modules, found.runs, found.is_acceptable, found.is_minimal) == ((), 1, True, True)
        assert found.before is found.after
        assert f"{level} needs no module in FP32" in str(found)
    found.save(tmp_path / "policy.json")
    assert RunPolicy.load(tmp_path / "policy.json") == RunPolicy("O5")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_lost_outside_of_the_model_is_said(level: str, tmp_path: Path) -> None:
    def step(model: nn.Module) -> Tensor:
        y = model(torch.ones(3, 4)).half() * 1e4
        return (y * y).sum().float()

    found = amp.find_fp32_modules(nn.Sequential(nn.Linear(4, 2)), step, level, reference=RunPolicy("O0"))
    if found.is_acceptable:
        pytest.fail(str(found))
    assert found.modules == ()
    assert "Keeping modules in FP32 does not help" in str(found)
    assert "outside of the model" in str(found)
    with pytest.raises(AmpValueError, match="There is no policy to save"):
        found.save(tmp_path / "policy.json")
    assert not (tmp_path / "policy.json").exists()


def test_the_models_own_operations_are_the_last_to_be_kept() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.first(x) + 5000.0) - 5000.0)

    found = amp.find_fp32_modules(Own(), Batch(), "O2")
    assert found.modules == ("",)
    assert found.is_minimal
    assert "O2 needs the whole model in FP32" in str(found)


def test_accept_decides() -> None:
    seen = []

    def accept(comparison: Any) -> bool:
        seen.append(comparison)
        return "blocks.0.linear" in comparison.keep_float or "" in comparison.keep_float

    found = amp.find_fp32_modules(Model(), Batch(), "O2", accept=accept)
    assert found.modules == ("blocks.0.linear",)
    assert found.tolerance is None
    assert all(comparison.operations for comparison in seen)


def test_tolerance_decides() -> None:
    model = Model(b1="cancelling")
    assert amp.find_fp32_modules(model, Batch(), "O2", tolerance=1e3).modules == ()
    strict = amp.find_fp32_modules(model, Batch(), "O2", tolerance=1e-9)
    assert strict.tolerance == 1e-9
    assert "blocks.1.planted" in strict.modules or strict.modules == ("",)
    assert strict.after.gradient_error <= 1e-9


def test_overrides_and_modules_of_a_policy_stay_and_go_into_the_file(tmp_path: Path) -> None:
    model = Model(b0="cancelling", b2="softmax")
    base = RunPolicy("O2", ["blocks.0.planted"], loss_scale=128.0, keep_batchnorm_fp32=False)
    found = amp.find_fp32_modules(model, Batch(), base)
    assert found.modules == ("blocks.2.planted",)
    assert found.policy == RunPolicy(
        "O2", ["blocks.0.planted", "blocks.2.planted"], loss_scale=128.0, keep_batchnorm_fp32=False
    )
    assert found.after.loss_scale == 128.0
    found.save(tmp_path / "policy.json")
    assert RunPolicy.load(tmp_path / "policy.json") == found.policy


@pytest.mark.parametrize("max_runs", range(3, 9))
def test_the_bound_of_runs_holds_and_what_it_leaves_open_is_said(max_runs: int) -> None:
    found = amp.find_fp32_modules(Model(b0="cancelling", b2="softmax"), Batch(), "O2", max_runs=max_runs)
    assert found.runs <= max_runs
    assert found.is_acceptable
    assert max(found.after.loss_error, found.after.gradient_error) <= (found.tolerance or 0.0)
    if found.is_minimal:
        assert sorted(found.modules) == ["blocks.0.planted", "blocks.2.planted"]
    else:
        assert "was not settled within" in str(found)
    assert found.is_minimal == (max_runs >= 6)


def test_runs_that_raise_are_not_acceptable_and_are_told_of() -> None:
    class Reaches(nn.Module):
        """Uses a weight of a part without calling the part: kept in FP32 it fits no half input."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.planted = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), Cancelling()

        def forward(self, x: Tensor) -> Tensor:
            x = torch.addmm(self.inner.bias, self.first(x), self.inner.weight)
            return self.planted(self.inner(x))[:, :2]

    found = amp.find_fp32_modules(
        Reaches(), Batch(), "O2", accept=lambda c: not {"inner", ""}.isdisjoint(c.keep_float) or len(c.keep_float) > 1
    )
    assert found.failures >= 1
    assert "same dtype" in str(found.failure)
    assert "of them raised" in str(found)


def test_arguments_that_are_none() -> None:
    model, batch = Model(), Batch()
    for max_runs in (2, True, 3.0):
        with pytest.raises(AmpValueError, match="whole number from 3 on"):
            amp.find_fp32_modules(model, batch, max_runs=max_runs)  # type: ignore[arg-type]
    for tolerance in (0.0, -1.0, float("nan"), "1"):
        with pytest.raises(AmpValueError, match="no number above 0"):
            amp.find_fp32_modules(model, batch, tolerance=tolerance)  # type: ignore[arg-type]
    with pytest.raises(AmpTypeError, match="has to be a function of a comparison"):
        amp.find_fp32_modules(model, batch, accept=0.1)  # type: ignore[arg-type]
    with pytest.raises(AmpValueError, match="Leave one of them out"):
        amp.find_fp32_modules(model, batch, accept=lambda c: True, tolerance=0.1)
    with pytest.raises(AmpTypeError, match="find_fp32_modules takes a torch.nn.Module"):
        amp.find_fp32_modules([model], batch)  # type: ignore[arg-type]
    with pytest.raises(AmpStateError, match="Unexpected optimization level"):
        amp.find_fp32_modules(model, batch, "O7")


# --- delta debugging ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 8))
def test_no_single_item_of_what_is_left_can_be_left_out(size: int) -> None:
    items = list(range(size))
    parts = [set(c) for n in range(1, size + 1) for c in itertools.combinations(items, n)]
    needed = [[part] for part in parts] + [random.Random(i).sample(parts, min(3, len(parts))) for i in range(40)]
    for sets in needed:
        tried: list[Sequence[int]] = []

        def is_enough(kept: Sequence[int], sets: list[set[int]] = sets, tried: list[Any] = tried) -> bool:
            tried.append(kept)
            return any(one <= set(kept) for one in sets)

        if not is_enough(items):
            continue
        left = reduced(items, is_enough)
        assert is_enough(left)
        assert not any(is_enough([item for item in left if item != out]) for out in left)
        assert len(tried) <= size**2 + 3 * size + 2 + size
        if len(sets) == 1:
            assert left == sorted(sets[0])
