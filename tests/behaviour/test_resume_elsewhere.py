"""Saved by one program, resumed by another: every level and torch's own GradScaler, in all 64 pairs.

The table in docs/checkpoints.md is what these tests hold the runs against.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from amp_engine import AmpIndexError, AmpStateError, AmpTypeError, AmpValueError, amp
from amp_engine.saving.scaler_state import SCHEMA_VERSION
from tests.models import NORMED_MLP
from tests.support import (
    DYNAMIC_LEVELS,
    LEVELS,
    WEIGHT_DTYPE,
    assert_bitwise,
    scaler_numbers,
    started,
    train,
    weights_of,
)

AUTOCAST, PLAIN = "GradScaler, autocast", "GradScaler, FP32"
PROGRAMS = (*LEVELS, AUTOCAST, PLAIN)
TABLE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
MOVED = 2.0**10  # where dynamic scales are when they are saved
COUNT = 7


def adam(params: Any) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=1e-2, eps=1e-4)


def table() -> dict[tuple[str, str], str]:
    """(saved by, resumed by) -> the scale, of the document."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in TABLE.read_text().splitlines()
        if re.match(r"\| (saved by|O\d)", line)
    ]
    (_, *columns), *rows = rows
    return {
        (source, target): cell
        for row in rows
        for column, cell in zip(columns, row[1:], strict=True)
        for source in programs(row[0])
        for target in programs(column.removeprefix("resumed by "))
    }


def programs(cell: str) -> list[str]:
    """The programs that a cell names; GradScaler stands for it with autocast and without."""
    return [
        program for name in cell.split(", ") for program in ((AUTOCAST, PLAIN) if name == "GradScaler" else (name,))
    ]


class Run:
    """A model, Adam and what scales the loss: `amp` at a level, or a GradScaler."""

    def __init__(self, program: str, seed: int = 0) -> None:
        self.program = program
        self.scaler: GradScaler | None = None
        if program in LEVELS:
            self.model, self.optimizer = started(program, adam, seed=seed)
        else:
            self.model = NORMED_MLP.model(seed)
            self.optimizer = adam(self.model.parameters())
            self.scaler = GradScaler("cpu")

    def train(self, steps: int, first: int = 0) -> None:
        if self.scaler is None:
            train(NORMED_MLP, self.model, self.optimizer, "c" * steps, first=first)
            return
        for index in range(first, first + steps):
            self.optimizer.zero_grad()
            cast = torch.autocast("cpu", torch.float16) if self.program == AUTOCAST else contextlib.nullcontext()
            with cast:
                loss = NORMED_MLP.loss(self.model, NORMED_MLP.batch(index))
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def move_scale(self) -> None:
        """Move the scale as overflows would have."""
        if self.scaler is not None:
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": MOVED, "_growth_tracker": COUNT})
        elif self.program in DYNAMIC_LEVELS:
            (scaler,) = amp._amp_state.loss_scalers
            scaler._loss_scale, scaler._unskipped = MOVED, COUNT

    def numbers(self) -> tuple[float, int]:
        if self.scaler is None:
            return scaler_numbers()
        state = self.scaler.state_dict()
        return state["scale"], state["_growth_tracker"]

    def save(self) -> dict[str, Any]:
        file = io.BytesIO()
        scale = amp.state_dict() if self.scaler is None else self.scaler.state_dict()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "scale": scale}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scaler is None:
            amp.load_state_dict(saved["scale"])
        else:
            self.scaler.load_state_dict(amp.convert_state_dict(saved["scale"], "torch"))


@pytest.mark.parametrize("target", PROGRAMS)
@pytest.mark.parametrize("source", PROGRAMS)
def test_each_cell_of_the_table(source: str, target: str) -> None:
    """The scale as the document says; weights and moments bit for bit, but where the target rounds them itself."""
    run = Run(source)
    run.train(3)
    run.move_scale()
    numbers = run.numbers()
    saved = run.save()
    amp.close()

    run = Run(target, seed=77)
    run.train(1)  # what the load finds is no fresh run
    run.load(saved)

    was_dynamic, is_dynamic = (program not in ("O0", "O3", "O4", "O5") for program in (source, target))
    expected = {"saved": numbers, "2^16": (2.0**16, 0), "1": (1.0, COUNT)}[table()[source, target]]
    assert run.numbers()[0] == expected[0]
    assert expected[0] == (1.0 if not is_dynamic else MOVED if was_dynamic else 2.0**16)
    if is_dynamic:
        assert run.numbers()[1] == expected[1]

    dtypes = {name: p.dtype for name, p in run.model.named_parameters()}
    assert set(dtypes.values()) <= {torch.float32, WEIGHT_DTYPE.get(target, torch.float32)}
    for name, weight in zip(dtypes, weights_of(run.optimizer), strict=True):
        # O3 alone has nothing wider than its half parameters.
        assert weight.dtype == (torch.float16 if target == "O3" else torch.float32), name
        assert_bitwise(weight.detach(), saved["model"][name].to(weight.dtype), name)
    for index, (weight, own) in enumerate(zip(weights_of(run.optimizer), run.optimizer.state.values(), strict=True)):
        state = {key: torch.as_tensor(value) for key, value in saved["optimizer"]["state"][index].items()}
        for key in ("exp_avg", "exp_avg_sq"):
            assert_bitwise(own[key], state[key].to(weight.dtype), key)
        assert float(own["step"]) == float(state["step"]) == 3.0

    run.train(2, first=3)
    assert run.numbers()[0] == expected[0], "a wrong scale overflows"
    assert all(p.isfinite().all() for p in run.model.parameters())
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {5.0}


def test_the_table_has_every_cell() -> None:
    assert set(table()) == {(source, target) for source in PROGRAMS for target in PROGRAMS}


# --- versions and formats -------------------------------------------------------------------------


def written_by(level: str, scale: float = MOVED, **keywords: Any) -> OrderedDict[str, Any]:
    """amp.state_dict() of a run whose scale has moved to `scale`, if it is dynamic."""
    started(level, **keywords)
    for scaler in amp._amp_state.loss_scalers:
        if scaler.dynamic:
            scaler._loss_scale, scaler._unskipped = scale, COUNT
    state = amp.state_dict()
    amp.close()
    return state


def test_version_and_level_stand_inside_of_every_entry() -> None:
    assert written_by("O2", num_losses=2) == {
        f"loss_scaler{i}": {
            "loss_scale": MOVED,
            "unskipped": COUNT,
            "dynamic": True,
            "opt_level": "O2",
            "version": SCHEMA_VERSION,
        }
        for i in range(2)
    }


@pytest.mark.parametrize(
    ("saved", "resumed_at", "expected"),
    [
        ({"loss_scale": "dynamic"}, {"loss_scale": "dynamic"}, (MOVED, COUNT)),
        ({"loss_scale": "dynamic"}, {"loss_scale": 128.0}, (128.0, 0)),
        ({"loss_scale": 128.0}, {"loss_scale": "dynamic"}, (2.0**16, 0)),
        ({"loss_scale": 128.0}, {"loss_scale": 64.0}, (64.0, 0)),
        ({"loss_scale": 0.1}, {"loss_scale": 0.1}, (0.1, 0)),
        ({"loss_scale": "dynamic"}, {"loss_scale": "dynamic", "max_loss_scale": 512.0}, (MOVED, COUNT)),
        ({"loss_scale": 128.0}, {"loss_scale": "dynamic", "max_loss_scale": 512.0}, (512.0, 0)),
    ],
)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_a_scaler_was_told_counts_and_not_what_its_level_does(
    level: str, saved: dict[str, Any], resumed_at: dict[str, Any], expected: tuple[float, int]
) -> None:
    state = written_by(level, **saved)
    started(level, **resumed_at)
    amp.load_state_dict(state)
    assert scaler_numbers() == expected


@pytest.mark.parametrize(
    ("scale", "unskipped", "dynamic"),
    [
        (MOVED, COUNT, True),
        (2.0**24, 1999, True),
        (0.5, 0, True),
        (1.0, 0, False),  # of O0 and O3
        (1.0, 77, False),
        (128.0, 2000, False),  # a dynamic count ends there
        (1000.0, 0, False),  # from 2**16 by factors of 2 none gets there
    ],
)
def test_what_apex_did_not_write_down_shows_in_the_numbers(scale: float, unskipped: int, dynamic: bool) -> None:
    state = {"loss_scaler0": {"loss_scale": scale, "unskipped": unskipped}}
    started("O2")
    amp.load_state_dict(state)
    assert scaler_numbers() == ((scale, unskipped) if dynamic else (2.0**16, 0))
    amp.close()
    started("O3")
    amp.load_state_dict(state)
    assert scaler_numbers()[0] == 1.0


@pytest.mark.parametrize(
    ("saved", "resumed_at", "text"),
    [
        (
            ("O2", {}),
            ("O3", {}),
            "loss_scaler0 was saved from a dynamic loss scale: a static scale stays as it is",
        ),
        (
            ("O4", {}),
            ("O2", {}),
            "loss_scaler0 was saved from a static loss scale: a dynamic scale starts at 65536.0",
        ),
        (
            ("O3", {"loss_scale": 128.0}),
            ("O3", {}),
            "loss_scaler0 was saved from a static loss scale of 128.0: 1.0, as initialize was told, stays",
        ),
        (("O2", {}), ("O2", {}), ""),
        (("O4", {}), ("O4", {}), ""),
    ],
)
def test_a_scale_that_is_not_taken_is_said(capsys: Any, saved: Any, resumed_at: Any, text: str) -> None:
    state = written_by(saved[0], **saved[1])
    started(resumed_at[0], verbosity=1, **resumed_at[1])
    capsys.readouterr()
    amp.load_state_dict(state)
    assert capsys.readouterr().out.strip() == text


def test_a_newer_version_is_refused_and_changes_nothing() -> None:
    state = written_by("O2", num_losses=2)
    state["loss_scaler1"]["version"] = SCHEMA_VERSION + 1
    started("O2", num_losses=2)
    before = amp.state_dict()
    with pytest.raises(AmpStateError, match=rf"in version {SCHEMA_VERSION + 1} .* up to {SCHEMA_VERSION}"):
        amp.load_state_dict(state)
    assert amp.state_dict() == before


# --- GradScaler's ---------------------------------------------------------------------------------


@pytest.fixture
def torchs() -> Iterator[dict[str, Any]]:
    scaler = GradScaler("cpu", init_scale=MOVED, growth_interval=500)
    return {**scaler.state_dict(), "_growth_tracker": COUNT}


def test_grad_scalers_of_several_losses_stand_under_our_names(torchs: dict[str, Any]) -> None:
    started("O2", num_losses=2)
    amp.load_state_dict({"loss_scaler1": torchs, "loss_scaler0": {**torchs, "scale": 4.0}})
    assert [scaler_numbers(i) for i in range(2)] == [(4.0, COUNT), (MOVED, COUNT)]


@pytest.mark.parametrize("bad", [{"scale": float("nan")}, {"scale": float("inf")}, {"scale": 0.0}, {"scale": "many"}])
def test_a_grad_scalers_dictionary_that_is_none_is_refused(torchs: dict[str, Any], bad: dict[str, Any]) -> None:
    started("O2")
    with pytest.raises(AmpValueError, match="scale"):
        amp.load_state_dict({**torchs, **bad})
    assert scaler_numbers() == (2.0**16, 0)


def test_a_scale_that_outgrew_our_bounds_is_taken_at_the_bound(torchs: dict[str, Any]) -> None:
    started("O2")
    amp.load_state_dict({**torchs, "scale": 2.0**100})
    assert scaler_numbers() == (2.0**24, COUNT)


@pytest.mark.parametrize("by", ["amp", "GradScaler"])
def test_a_grad_scaler_goes_on_by_the_rule_of_the_run(by: str) -> None:
    rule = amp.DynamicLossScale(growth_factor=4.0, backoff_factor=0.125, growth_interval=500, hysteresis=2)
    started("O2", loss_scale=rule)
    saved = amp.state_dict(format="torch") if by == "amp" else amp.GradScaler().state_dict()
    scaler = GradScaler("cpu")
    scaler.load_state_dict(saved)
    numbers = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    assert numbers == (4.0, 0.125, 500)


@pytest.mark.parametrize(("name", "value"), [("_max_loss_scale", math.inf), ("scale_factor", 1.0)])
def test_a_scale_whose_attributes_a_script_has_set_is_saved(name: str, value: float) -> None:
    """apex had no other way; a DynamicLossScale refuses these numbers."""
    started("O2")
    setattr(amp._amp_state.loss_scalers[0], name, value)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == amp.state_dict(format="torch")["scale"] == 2.0**16


def test_a_grad_scalers_dictionary_keeps_its_rule_in_a_conversion(torchs: dict[str, Any]) -> None:
    assert amp.convert_state_dict(torchs, "torch") == torchs
    bare = {"scale": MOVED, "_growth_tracker": COUNT}
    assert amp.convert_state_dict(bare, "torch") == {**torchs, "growth_interval": 2000}
    with pytest.raises(AmpValueError, match="A GradScaler's state is"):
        amp.convert_state_dict({**torchs, "growth_interval": "often"}, "torch")
    with pytest.raises(AmpValueError, match="A GradScaler's state is"):
        amp.convert_state_dict({**torchs, "growth_interval": math.inf}, "torch")


def test_of_several_losses_one_is_taken() -> None:
    state = written_by("O2", num_losses=2)
    state["loss_scaler1"]["loss_scale"] = 8.0
    assert amp.convert_state_dict(state, "torch", loss_id=1)["scale"] == 8.0
    with pytest.raises(AmpValueError, match="one loss scale, and there are 2"):
        amp.convert_state_dict(state, "torch")
    with pytest.raises(AmpIndexError, match="loss_id=2, but saved are loss_id 0, 1"):
        amp.convert_state_dict(state, "torch", loss_id=2)


@pytest.mark.parametrize(
    ("state", "scaler_format", "error"),
    [
        ([], "apex", AmpTypeError),
        ({"optimizer": 1}, "apex", AmpStateError),
        ({"loss_scaler0": 1}, "apex", AmpValueError),
        ({}, "json", AmpValueError),
    ],
)
def test_what_cannot_be_converted_is_refused(state: Any, scaler_format: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        amp.convert_state_dict(state, scaler_format)
